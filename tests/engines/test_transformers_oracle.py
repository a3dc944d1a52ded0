"""Logits after a restore are those of the model alone: every component, through every tier, under pressure."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache.testing.model_oracle import TOLERANCE, ModelOracle, cache_after, squeeze
from hicache.testing.redis_server import RedisServer
from hicache.testing.tiny_models import TINY_MODELS, make_tiny_model
from hicache.types import Tier, TierTokens

pytestmark = pytest.mark.engines

Words = Callable[[int], list[int]]
MakeOracle = Callable[..., ModelOracle]


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


def disk(folder: Path) -> list[object]:
    return [{"kind": "disk", "path": str(folder), "capacity": "64MiB"}]


def check_next_turn(oracle: ModelOracle, prompt: list[int], tier: str, reused: int, words: Words) -> None:
    """The prompt's next turn reuses ``reused`` tokens, all components from one tier, and is right."""
    judged = oracle.serve([*prompt, *words(30)])
    assert judged.answer.reused == reused
    assert judged.answer.by_component  # what lies before a window is in no tier, so only these tell
    for component, got in judged.answer.by_component.items():
        assert getattr(got, tier) == got.total > 0, component
    assert judged.is_right, judged


# ---- each tier in turn -----------------------------------------------------------------------------------------
def test_a_turn_restored_from_the_device_is_exact(make_oracle: MakeOracle, model: Any, words: Words) -> None:
    oracle = make_oracle(model, host=None)
    prompt = words(150)
    cold = oracle.serve(prompt, new_tokens=20)
    assert cold.answer.reused == 0
    assert cold.is_right, cold
    # 169 tokens were computed; the page that token 160 ends is the last whole one.
    check_next_turn(oracle, [*prompt, *cold.answer.tokens], "device", 160, words)


def test_a_turn_restored_through_the_host_is_exact(make_oracle: MakeOracle, model: Any, words: Words) -> None:
    oracle = make_oracle(model)
    prompt = words(150)
    cold = oracle.serve(prompt, new_tokens=20)
    squeeze(oracle.engine.cache, Tier.DEVICE)
    check_next_turn(oracle, [*prompt, *cold.answer.tokens], "host", 160, words)


def test_a_turn_restored_through_the_disk_is_exact(
    make_oracle: MakeOracle, model: Any, words: Words, tmp_path: Path
) -> None:
    oracle = make_oracle(model, stores=disk(tmp_path))
    prompt = words(150)
    cold = oracle.serve(prompt, new_tokens=20)
    assert oracle.engine.cache.flush()
    oracle.engine.cache.reset()
    check_next_turn(oracle, [*prompt, *cold.answer.tokens], "store", 160, words)


def test_a_turn_restored_after_a_restart_is_exact(
    make_oracle: MakeOracle, model: Any, words: Words, tmp_path: Path
) -> None:
    first = make_oracle(model, stores=disk(tmp_path))
    prompt = words(150)
    cold = first.serve(prompt, new_tokens=20)
    first.engine.cache.close(flush=True)
    second = make_oracle(model, stores=disk(tmp_path))
    check_next_turn(second, [*prompt, *cold.answer.tokens], "store", 160, words)


@pytest.mark.redis
def test_a_turn_restored_through_redis_by_another_engine_is_exact(
    make_oracle: MakeOracle, model: Any, words: Words, redis_server: RedisServer
) -> None:
    stores = [{"kind": "redis", "url": redis_server.url}]
    first, second = make_oracle(model, stores=stores), make_oracle(model, stores=stores)
    prompt = words(150)
    cold = first.serve(prompt, new_tokens=20)
    assert first.engine.cache.flush()
    check_next_turn(second, [*prompt, *cold.answer.tokens], "store", 160, words)


# ---- boundaries -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("page_size", [8, 16, 64])
def test_a_prompt_that_leaves_another_at_any_page_is_exact(
    make_oracle: MakeOracle, model: Any, words: Words, page_size: int
) -> None:
    """In chunks larger than the window, so that a sliding layer has forgotten most of a chunk when it ends."""
    oracle = make_oracle(model, page_size=page_size, chunk_tokens=4096, device="64MiB", host="64MiB")
    prompt = words(200)
    assert oracle.serve(prompt).is_right
    forks = range(page_size, 200, 3 * page_size if page_size < 64 else page_size)
    for fork in [*forks, *forks]:
        judged = oracle.serve([*prompt[:fork], *words(40)])
        assert judged.is_right, (fork, judged)
    # By now a hybrid model has left a window and a state at each of them, too.
    assert [oracle.serve([*prompt[:fork], *words(40)]).answer.reused for fork in forks] == list(forks)


def test_a_window_model_reuses_a_page_only_when_all_of_it_was_written(
    make_oracle: MakeOracle, words: Words
) -> None:
    """The page in which a window begins is kept as a whole, though a sliding layer keeps a part of it."""
    oracle = make_oracle(make_tiny_model("Mistral"), chunk_tokens=4096)
    prompt = words(17)
    oracle.serve(prompt, new_tokens=1)
    longer = [*prompt[:16], *words(100)]
    assert oracle.serve(longer, new_tokens=1).answer.reused == 16
    for end in range(16, 112, 16):
        judged = oracle.serve([*longer[:end], *words(20)])
        assert judged.is_right, (end, judged)


# ---- random work ------------------------------------------------------------------------------------------------
def random_request(rng: random.Random, known: list[list[int]], words: Words) -> list[int]:
    """A new prompt, the next turn of a conversation, or a branch off one, at any token."""
    kind = rng.random()
    if not known or kind < 0.2:
        return words(rng.randrange(1, 120))
    talk = rng.choice(known)
    if kind < 0.6:
        return [*talk, *words(rng.randrange(1, 40))]
    return [*talk[: rng.randrange(1, len(talk) + 1)], *words(rng.randrange(1, 40))]


@pytest.mark.parametrize("page_size", [4, 16])
def test_random_branching_turns_under_pressure_are_exact(
    make_oracle: MakeOracle,
    model: Any,
    words: Words,
    seeded_random: random.Random,
    tmp_path: Path,
    page_size: int,
) -> None:
    oracle = make_oracle(
        model, page_size=page_size, device="512KiB", host="700KiB", stores=disk(tmp_path), chunk_tokens=48
    )
    known: list[list[int]] = []
    sources = TierTokens()
    for number in range(18):
        prompt = random_request(seeded_random, known, words)[-300:]
        if number % 6 == 5:
            prompt = words(80)  # pressed down below, and asked for again at once
        elif number % 6 == 0 and known:
            prompt = [*known[-1], *words(20)]
        judged = oracle.serve(prompt, new_tokens=seeded_random.randrange(1, 12), session=f"s{number % 5}")
        assert judged.is_right, (number, len(prompt), judged)
        known = [*known, [*prompt, *judged.answer.tokens]][-6:]
        sources += judged.answer.source
        if number % 6 == 5:
            squeeze(oracle.engine.cache, Tier.DEVICE)
        if number == 11:
            assert oracle.engine.cache.flush()
            oracle.engine.cache.reset()
    assert min(sources.device, sources.host, sources.store) > 0, sources


# ---- the control ------------------------------------------------------------------------------------------------
FAR_OFF = 100 * TOLERANCE


def spoil_restore(oracle: ModelOracle, spoil: Callable[[Any, int], None]) -> None:
    """Have every boundary spoilt after it was restored."""
    restore = oracle.engine.payload.restore

    def restored(cache: Any, lease: Any, length: int) -> None:
        restore(cache, lease, length)
        while cache.pending:
            cache.pending.popitem()[1]()
        if length:
            spoil(cache, length)

    oracle.engine.payload.restore = restored  # type: ignore[method-assign]  # a fault put in on purpose


def having(component: str) -> list[str]:
    return [name for name, tiny in TINY_MODELS.items() if component in tiny.components]


@pytest.mark.parametrize("model_name", having("mamba"))
def test_a_state_one_page_old_is_far_off(make_oracle: MakeOracle, model: Any, words: Words) -> None:
    oracle = make_oracle(model)
    prompt = words(150)
    oracle.serve(prompt)

    def age(cache: Any, length: int) -> None:
        old = cache_after(oracle.engine.model, prompt[: length - 16])
        for layer, older in zip(cache.layers, old.layers, strict=True):
            for held in ("conv_states", "recurrent_states"):
                for index, tensor in getattr(layer, held, {}).items():
                    if tensor is not None:
                        tensor.copy_(getattr(older, held)[index])

    spoil_restore(oracle, age)
    judged = oracle.serve(prompt)
    assert judged.answer.reused == 144
    assert judged.difference > FAR_OFF, judged


@pytest.mark.parametrize("model_name", having("swa"))
def test_a_window_of_which_half_is_missing_is_far_off(
    make_oracle: MakeOracle, model: Any, words: Words
) -> None:
    oracle = make_oracle(model)
    prompt = words(150)
    oracle.serve(prompt)

    def halve(cache: Any, length: int) -> None:
        for layer in cache.layers:
            if hasattr(layer, "sliding_window"):
                # The newer one: a chunked layer needs the older only where its chunk reaches so far back.
                layer.keys[:, :, -(layer.keys.shape[2] // 2) :] = 0
                layer.values[:, :, -(layer.values.shape[2] // 2) :] = 0

    spoil_restore(oracle, halve)
    judged = oracle.serve(prompt)
    assert judged.answer.reused == 144
    assert judged.difference > FAR_OFF, judged


@pytest.mark.parametrize("model_name", having("full"))
def test_one_page_of_another_prompt_is_far_off(make_oracle: MakeOracle, model: Any, words: Words) -> None:
    oracle = make_oracle(model)
    prompt = words(150)
    oracle.serve(prompt)

    def exchange(cache: Any, length: int) -> None:
        other = cache_after(oracle.engine.model, [*prompt[: length - 16], *words(16)])
        for layer, wrong in zip(cache.layers, other.layers, strict=True):
            if getattr(layer, "keys", None) is not None and not hasattr(layer, "sliding_window"):
                layer.keys[:, :, -16:] = wrong.keys[:, :, -16:]
                layer.values[:, :, -16:] = wrong.values[:, :, -16:]

    spoil_restore(oracle, exchange)
    judged = oracle.serve(prompt)
    assert judged.answer.reused == 144
    assert judged.difference > FAR_OFF, judged
