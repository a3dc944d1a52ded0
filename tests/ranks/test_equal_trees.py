"""Random loads on ranks that each have faults of their own: equal answers, equal trees, the same collectives."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hicache.errors import CapacityError, TierTimeoutError
from hicache.testing.ranks import Rank, Team

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from tests.ranks.conftest import MakeTeam

RUNS = 3 if os.environ.get("HICACHE_TEST_PROFILE") == "quick" else 12
STEPS = 40
MODELS = ("full", "full+swa", "full+mamba", "full+swa+mamba")
POLICIES: tuple[dict[str, object], ...] = (
    {"write": "write_through", "eviction": "session"},
    {"write": "write_back", "prefetch": {"mode": "timeout", "min_tokens": 0, "timeout_base": "20ms"}},
    {"write": "write_through_selective", "prefetch": {"mode": "best_effort", "min_tokens": 8}},
    {"watermarks": {"device": {"low": 0.1, "high": 0.3}, "host": {"low": 0.1, "high": 0.2}}},
)


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
                return cache.poll()
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


def run_at_random(team: Team[Rank], seed: int) -> None:
    """Drive all ranks through one random sequence, and compare them after each step."""
    choice = random.Random(seed)
    for number in range(STEPS):
        team.each(Rank.break_something)
        call = choice.choice((serve, serve, serve, serve, two_at_once, whole_cache))(choice)
        answers = team.each(call)
        where = f"seed {seed}, step {number}"
        assert all(answer == answers[0] for answer in answers), f"{where}: {answers}"
        states = team.each(Rank.state)
        assert all(state == states[0] for state in states), f"{where}: the trees differ"
        assert team.each(lambda rank: rank.cache.audit()) == [[]] * len(states), where
        calls = [member.group.calls for member in team.members]
        assert all(each == calls[0] for each in calls), f"{where}: the collectives differ"
    team.each(Rank.mend)
    assert team.each(lambda rank: rank.cache.drain()) == [True] * len(team.members)
    assert all(member.checker.mismatches == 0 for member in team.members)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("core", ["python", "rust"])
@pytest.mark.parametrize("run", range(RUNS))
def test_trees_answers_and_collectives_are_the_same_on_all_ranks(
    make_team: MakeTeam, tree_of: Callable[..., dict[str, Any]], run: int, core: str
) -> None:
    choice = random.Random(run)
    model = MODELS[run % len(MODELS)]
    page_bytes = 48 * model.count("+") + 32
    tree = tree_of(
        model,
        device=str(choice.randint(26, 40) * page_bytes),
        host=str(choice.randint(8, 40) * page_bytes),
        **POLICIES[run % len(POLICIES) if run < len(POLICIES) else choice.randrange(len(POLICIES))],
    )
    run_at_random(make_team(2 + run % 3, tree, seed=run, core=core), seed=run)
