"""Real vLLM in this process, and what goes wrong: copies that fail or last, requests that end meanwhile, bad stores."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest

from hicache.testing.redis_server import RedisServer, wait_until
from hicache.testing.tiny_models import VOCABULARY
from hicache.testing.vllm_engine import HOST, POLICY, EngineStand, VllmEngine, agree
from hicache.testing.vllm_server import BLOCK, SERVED_MODELS, ServedModel

pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="runs in vLLM's environment: make test-vllm"
    ),
]

FULL = SERVED_MODELS["full"]


@pytest.fixture(autouse=True)
def no_thread_left_behind() -> None:
    """An engine outlives the test that made it, with its threads; ``stand`` looks after them."""


def words(count: int, seed: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(1, VOCABULARY) for _ in range(count)]


def with_store(store: object, **policy: object) -> dict[str, object]:
    return {"tiers": {**HOST, "stores": [store]}, "policy": {**POLICY, **policy}}


@pytest.fixture(scope="module", params=SERVED_MODELS)
def model(request: pytest.FixtureRequest) -> ServedModel:
    return SERVED_MODELS[request.param]


@pytest.fixture
def engine(stand: EngineStand, model: ServedModel) -> VllmEngine:
    return stand.engine(model)


def fail_after(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, num_parts: int, *, loads: bool) -> None:
    """Copies in one direction fail once so many groups' blocks were copied."""
    copied = engine.copies._copy
    good = iter(range(num_parts))

    def copy(part: Any, *, is_load: bool) -> int:
        if is_load is loads and next(good, None) is None:
            raise OSError(5, "I/O")
        return copied(part, is_load=is_load)

    monkeypatch.setattr(engine.copies, "_copy", copy)


# ---- copies that fail -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("is_begun", [False, True], ids=["at once", "in the middle"])
def test_a_load_that_fails_is_computed(
    engine: VllmEngine, model: ServedModel, is_begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of groups that share blocks' numbers no single block could be named: the whole request starts anew."""
    prompt = words(2 * model.block + 17, 60 + is_begun)
    num_groups = sum(len(component.groups) for component in engine.index._geometry.components)
    num_parts = num_groups - 1 if is_begun else 0
    cold = engine.cold(prompt)
    engine.ask(prompt)
    engine.forget()
    failed = engine.index.counts["loads_failed"]
    with monkeypatch.context() as patched:
        fail_after(engine, patched, num_parts, loads=True)
        got = engine.ask(prompt)
    assert got.stop == "length"
    assert agree(model, got, cold)
    assert engine.index.counts["loads_failed"] == failed + 1
    engine.forget()
    again = engine.ask(prompt)
    assert again.cached == 2 * model.block
    assert agree(model, again, cold)
    engine.check()


def test_where_vllm_is_to_fail_a_failed_load_ends_its_request_alone(
    stand: EngineStand, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = stand.engine(SERVED_MODELS["full+swa"], policy="fail")
    prompt, other = words(2 * BLOCK + 17, 62), words(50, 63)
    engine.ask(prompt)
    engine.forget()
    with monkeypatch.context() as patched:
        fail_after(engine, patched, 0, loads=True)
        names = [engine.add(prompt), engine.add(other)]
        assert [engine.answer(name).stop for name in names] == ["error", "length"]
    assert not engine.index._load_failed
    engine.forget()
    assert engine.ask(prompt).cached == 2 * BLOCK
    engine.check()


def test_a_save_that_fails_is_not_found_and_costs_nothing_else(
    engine: VllmEngine, model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = words(2 * model.block + 17, 64)
    with monkeypatch.context() as patched:
        fail_after(engine, patched, 0, loads=False)
        cold = engine.ask(prompt)
        engine.forget()
    again = engine.ask(prompt)
    assert again.cached == 0
    assert agree(model, again, cold)
    engine.forget()
    assert engine.ask(prompt).cached == 2 * model.block
    engine.check()


# ---- requests that end, or are sent back, meanwhile -------------------------------------------------------------------
def test_blocks_of_a_request_aborted_during_its_load_wait_for_the_copy(
    engine: VllmEngine, model: ServedModel
) -> None:
    prompt = words(2 * model.block + 17, 65)
    cold = engine.cold(prompt)
    engine.ask(prompt)
    engine.forget()
    free = engine.num_free_blocks
    with engine.held(loads=True):
        name = engine.add(prompt)
        engine.step_until(lambda: any(hold.is_loading for hold in engine.index._holds.values()))
        engine.abort(name)
        engine.step()
        assert engine.num_free_blocks < free
    engine.check()
    again = engine.ask(prompt)
    assert again.cached == 2 * model.block
    assert agree(model, again, cold)
    engine.check()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4, 7])
def test_a_request_aborted_at_any_moment_leaves_nothing(
    stand: EngineStand, model: ServedModel, num_steps: int
) -> None:
    chunk = 64 if model.block == BLOCK else 600
    engine = stand.engine(model, max_num_batched_tokens=chunk, async_scheduling=True)
    prompts = [words(2 * model.block + 17, 66 + num_steps), words(3 * model.block, 166 + num_steps)]
    cold = [engine.cold(prompt) for prompt in prompts]
    engine.ask(prompts[0])
    engine.forget()
    names = [engine.add(prompt, max_tokens=12) for prompt in prompts]
    for _ in range(num_steps):
        engine.step()
    for name in names:
        engine.abort(name)
    engine.check()
    engine.forget()
    assert all(agree(model, *both) for both in zip(engine.ask_at_once(prompts), cold, strict=True))
    engine.check()


ROOMS = {"full": (160, 40, 20), "full+swa": (160, 40, 36), "full+mamba": (584, 520, 24)}
"""Tokens of prompt and answer, and blocks that are too few for three such requests at once."""


@pytest.mark.parametrize("name", SERVED_MODELS)
def test_a_request_preempted_while_it_is_saved_is_saved_right(stand: EngineStand, name: str) -> None:
    """Its blocks stay held, whoever wants them meanwhile."""
    model = SERVED_MODELS[name]
    length, answer, num_blocks = ROOMS[name]
    engine = stand.engine(
        model, max_num_seqs=3, num_gpu_blocks_override=num_blocks, max_model_len=256 if length < 256 else 1200
    )
    prompts = [words(length, 70 + number) for number in range(3)]
    cold = [engine.cold(prompt, max_tokens=answer) for prompt in prompts]
    engine.forget()
    with engine.held(loads=False):
        names = [engine.add(prompt, max_tokens=answer) for prompt in prompts]
        requests = list(engine.scheduler.requests.values())
        for _ in range(20):
            engine.step()
    got = [engine.answer(name) for name in names]
    assert any(request.num_preemptions for request in requests)
    assert all(agree(model, *both) for both in zip(got, cold, strict=True))
    for prompt, one in zip(prompts, cold, strict=True):
        engine.forget()
        again = engine.ask(prompt, max_tokens=answer)
        assert again.cached == (length - 1) // model.block * model.block
        assert agree(model, again, one)
    engine.check()


# ---- stores -----------------------------------------------------------------------------------------------------------
@pytest.mark.redis
def test_a_redis_that_hangs_dies_and_comes_back_costs_hits_only(stand: EngineStand, tmp_path: Path) -> None:
    prompts = [words(100, 50 + number) for number in range(4)]
    with RedisServer(tmp_path) as server:
        store = {
            "kind": "redis",
            "url": server.url,
            "timeout": "3s",  # no healthy call takes that long, also on a busy machine; the one that hangs does
            "breaker": {"failures": 1, "backoff": "50ms", "jitter": 0},
        }
        settings = with_store(store, store_timeout="8s")
        engine = stand.engine(FULL, settings)
        cold = [engine.ask(prompt) for prompt in prompts]
        engine.check()
        stand.close()
        engine = stand.engine(FULL, settings)
        assert engine.ask(prompts[0]).cached == 96
        server.pause()
        beside = engine.add(words(40, 59))
        hung = engine.ask(prompts[1])
        assert (hung.cached, engine.answer(beside).stop) == (0, "length")
        server.resume()
        server.kill()
        dead = engine.ask(prompts[2])
        assert dead.cached == 0
        server.start()

        def is_used_again() -> bool:
            engine.ask(words(100, 60))
            engine.rest()
            return bool(server.names())

        wait_until(is_used_again, "Redis is written again")
        empty = engine.ask(prompts[3])
        assert empty.cached == 0
        assert all(agree(FULL, *both) for both in zip((hung, dead, empty), cold[1:], strict=True))
        engine.check()
        stand.close()


def test_damaged_pages_on_the_disk_shorten_the_hit(stand: EngineStand, tmp_path: Path) -> None:
    model = SERVED_MODELS["full+swa"]
    prompt = words(3 * model.block + 9, 43)
    settings = with_store({"kind": "disk", "path": str(tmp_path), "capacity": "1GiB"})
    cold = stand.engine(model, settings).ask(prompt)
    stand.close()
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.stat().st_size > 1 << 14:
            raw = bytearray(path.read_bytes())
            for at in range(len(raw) // 2, len(raw), 4096):
                raw[at] ^= 1
            path.write_bytes(raw)
    again = stand.engine(model, settings).ask(prompt)
    stand.close()
    assert again.cached < 3 * model.block
    assert agree(model, again, cold)


# ---- what is refused --------------------------------------------------------------------------------------------------
def test_a_wrong_configuration_ends_the_start_with_its_place(stand: EngineStand, tmp_path: Path) -> None:
    file = tmp_path / "hicache.yaml"
    file.write_text("tiers:\n  host: {capacity: 64MiB}\npolcy: {write: write_through}\n")
    with pytest.raises(Exception, match=r"polcy.*hicache\.yaml:3.*did you mean.*policy"):
        stand.engine(FULL, {"config_file": str(file)})
