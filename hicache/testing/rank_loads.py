"""Random loads for ranks: the same calls on all of them, drawn from one seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hicache.errors import CapacityError, TierTimeoutError
from hicache.testing.ranks import Rank

Call = Callable[[Rank], object]
"""Something a rank does; what it returns must be the same on all ranks."""

COMPONENTS: dict[str, dict[str, object]] = {
    "full": {"rule": "path", "layers": 2, "bytes_per_token": 8},
    "swa": {"rule": "window", "window": 8, "layers": 2, "bytes_per_token": 8},
    "mamba": {"rule": "checkpoint", "layers": 3, "state_bytes": 48},
}
MODELS = ("full", "full+swa", "full+mamba", "full+swa+mamba")
POLICIES: tuple[dict[str, object], ...] = (
    {"write": "write_through", "eviction": "session"},
    {"write": "write_through", "eviction": "adaptive"},
    {"write": "write_back", "prefetch": {"mode": "timeout", "min_tokens": 0, "timeout_base": "10ms"}},
    {"write": "write_through_selective", "prefetch": {"mode": "best_effort", "min_tokens": 8}},
    {"watermarks": {"device": {"low": 0.1, "high": 0.3}, "host": {"low": 0.1, "high": 0.2}}},
)


def settings(
    model: str = "full", *, device: int = 40, host: int = 40, **policy: object
) -> dict[str, Any]:  # Any: what a YAML may hold
    """A configuration's tree: pages of 4 tokens, L1 and L2 of about so many on each rank, waits of 20 ms."""
    page_bytes = 48 * model.count("+") + 32
    return {
        "model": {
            "name": "tiny",
            "page_size": 4,
            "components": {name: dict(COMPONENTS[name]) for name in model.split("+")},
        },
        "tiers": {
            "device": {"kind": "cpu", "capacity_per_rank": device * page_bytes},
            "host": {"pinned": False, "capacity_per_rank": host * page_bytes},
        },
        "policy": {
            "write": "write_through",
            "prefetch": {"mode": "wait_complete", "min_tokens": 0},
            "wait_limit": "20ms",
            "store_timeout": "20ms",
            **policy,
        },
    }


def random_settings(seed: int) -> dict[str, Any]:  # Any: see ``settings``
    """Seeds that follow each other go through all models and policies."""
    choice = random.Random(seed)
    return settings(
        MODELS[seed % len(MODELS)],
        device=choice.randint(26, 40),
        host=choice.randint(8, 40),
        **POLICIES[seed // len(MODELS) % len(POLICIES)],
    )


def random_calls(seed: int, count: int) -> Iterator[Call]:
    """So many calls, the same for a seed wherever they are made."""
    choice = random.Random(seed)
    for _ in range(count):
        yield choice.choice((serve, serve, serve, serve, two_at_once, whole_cache))(choice)


def prompt_of(choice: random.Random) -> NDArray[np.int32]:
    """The beginning of one of four sequences: two fork at 12, two more at 30."""
    tokens = np.arange(1, 91, dtype=np.int32)
    if choice.random() < 0.5:
        tokens[12:] += 1000
    if choice.random() < 0.5:
        tokens[30:] += 2000
    return tokens[: choice.randint(1, 90)]


def serve(choice: random.Random) -> Callable[[Rank], object]:
    prompt = prompt_of(choice)
    answer = np.arange(7000, 7000 + choice.randint(0, 12), dtype=np.int32)
    session = choice.choice((None, "a", "b"))

    def run(rank: Rank) -> object:
        served = rank.engine.serve(prompt, answer, session=session, stop="end")
        assert served.mismatches == 0, "a reused page has another's bytes"
        return served.source, served.by_component, served.shortened_tokens, served.unkept_tokens

    return run


def two_at_once(choice: random.Random) -> Callable[[Rank], object]:
    """Two requests, of which one leaves in the middle."""
    first, second, steps = prompt_of(choice), prompt_of(choice), choice.randint(0, 3)

    def run(rank: Rank) -> object:
        seen: list[object] = []
        with rank.cache.match(first, session="a") as one, rank.cache.match(second) as two:
            seen += [one.reused, two.reused, one.checkpoint_hint, two.checkpoints]
            if steps:
                seen += [two.load(), two.source]
            if steps > 1:
                seen.append(one.load())
            try:
                if steps > 2:
                    one.reserve(len(first) - one.reused)
                    seen.append(one.slots("full").tolist())
            except CapacityError as error:
                seen.append((error.required_slots, error.free_slots))
        return seen

    return run


def whole_cache(choice: random.Random) -> Callable[[Rank], object]:
    name = choice.choice(("poll", "poll", "poll", "drain", "flush", "restart", "restart", "close", "expect"))

    def run(rank: Rank) -> object:
        cache = rank.cache
        match name:
            case "poll":
                cache.poll()
                return None
            case "drain":
                return cache.drain()
            case "flush":
                return cache.flush()
            case "close":
                return cache.sessions.close("a")
            case "expect":
                return cache.sessions.expects_return("b", 5.0)
        try:
            cache.drain()
            cache.reset()
        except TierTimeoutError:
            return "too slow"
        return "reset"

    return run
