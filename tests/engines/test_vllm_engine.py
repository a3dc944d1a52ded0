"""Real vLLM, step by step in this process: what comes back at every kind of boundary, out of every tier.

Its own prefix cache is emptied before a prompt is asked again, so every cached token is ours. An answer is right if
the probabilities of its likeliest tokens are those of the same prompt computed whole.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from hicache.testing.redis_server import RedisServer
from hicache.testing.tiny_models import VOCABULARY
from hicache.testing.vllm_engine import HOST, POLICY, EngineStand, VllmEngine, agree, distance, rounding
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


@pytest.fixture(autouse=True)
def no_thread_left_behind() -> None:
    """An engine outlives the test that made it, with its threads; ``stand`` looks after them."""


def words(count: int, seed: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(1, VOCABULARY) for _ in range(count)]


def chunk_of(model: ServedModel) -> int:
    """Tokens a step: no multiple of a block, so that chunks end within blocks and boundaries lie within chunks."""
    return 100 if model.block == BLOCK else 1000


@pytest.fixture(scope="module", params=SERVED_MODELS)
def model(request: pytest.FixtureRequest) -> ServedModel:
    return SERVED_MODELS[request.param]


@pytest.fixture
def engine(stand: EngineStand, model: ServedModel) -> VllmEngine:
    """The one that most tests share: three requests at once, in small chunks."""
    return stand.engine(model, max_num_seqs=3, max_num_batched_tokens=chunk_of(model))


def has_states(engine: VllmEngine) -> bool:
    return engine.index._geometry.has_states


# ---- boundaries -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "place", ["one token", "before a block's end", "a block", "behind it", "many blocks"]
)
def test_a_prompt_comes_back_up_to_its_last_whole_block(
    engine: VllmEngine, model: ServedModel, place: str
) -> None:
    lengths = {"one token": 1, "before a block's end": model.block - 1, "a block": model.block}
    length = {**lengths, "behind it": model.block + 1, "many blocks": 3 * model.block + 5}[place]
    prompt = words(length, length)
    cold = engine.cold(prompt)
    engine.ask(prompt)
    engine.forget()
    again = engine.ask(prompt)
    assert again.cached == (length - 1) // model.block * model.block
    assert agree(model, again, cold)
    engine.check()


@pytest.mark.parametrize("num_shared", [0, 1, 2, 3])
def test_a_prompt_that_leaves_another_comes_back_to_a_boundary_before_it(
    engine: VllmEngine, model: ServedModel, num_shared: int
) -> None:
    stem = words(3 * model.block + 9, 1)
    engine.ask(stem)
    engine.forget()
    prompt = [*stem[: num_shared * model.block + 3], *words(model.block, 10 + num_shared)]
    got = engine.ask(prompt)
    assert got.cached in range(0, num_shared * model.block + 1, model.block)
    if model.name == "Llama" or num_shared in (0, 3):  # windows and states are not kept everywhere
        assert got.cached == num_shared * model.block
    assert agree(model, got, engine.cold(prompt))
    engine.check()


def test_equal_prompts_at_once_more_than_can_run(engine: VllmEngine, model: ServedModel) -> None:
    prompt = words(2 * model.block + 17, 30)
    cold = engine.cold(prompt)
    computed = engine.ask_at_once([prompt] * 8)
    engine.forget()
    restored = engine.ask_at_once([prompt] * 8)
    assert all(agree(model, answer, cold) for answer in (*computed, *restored))
    assert restored[0].cached == 2 * model.block
    assert all(answer.cached == 2 * model.block for answer in restored)
    engine.check()


def test_salts_are_kept_apart_also_at_once(engine: VllmEngine, model: ServedModel) -> None:
    prompt = words(model.block + 17, 31)
    for wanted in (0, model.block):
        names = [engine.add(prompt, salt=salt) for salt in ("a", "b")]
        assert [engine.answer(name).cached for name in names] == [wanted] * 2
        engine.forget()
    assert engine.ask(prompt, salt="c").cached == 0


def test_pages_of_zeros_would_be_far_off(engine: VllmEngine, model: ServedModel) -> None:
    """The control: without it, equal answers would prove nothing."""
    prompt = words(2 * model.block + 1, 100)
    cold = engine.ask(prompt)
    engine.forget()
    pool = engine.index.cache.device
    for component in engine.index._geometry.components:
        pool[component.name].zero_()
    got = engine.ask(prompt)
    engine.index.reset()  # what the pool has is nobody's any more
    assert got.cached == 2 * model.block
    assert distance(got, cold, 1) > 2 * rounding(model)


def test_with_async_scheduling_and_a_chunk_at_a_time(stand: EngineStand, model: ServedModel) -> None:
    engine = stand.engine(model, max_num_batched_tokens=chunk_of(model), async_scheduling=True)
    prompts = [words(3 * model.block + 11 * number, 20 + number) for number in range(3)]
    cold = [engine.cold(prompt) for prompt in prompts]
    first = engine.ask_at_once(prompts)
    engine.forget()
    again = engine.ask_at_once(prompts)
    assert [got.cached for got in again] == [(len(it) - 1) // model.block * model.block for it in prompts]
    engine.forget()
    longer = [
        [*it, *mine.tokens[:3], *words(chunk_of(model), 5)] for it, mine in zip(prompts, first, strict=True)
    ]
    onward = engine.ask_at_once(longer)
    for mine, it in zip(onward, longer, strict=True):
        assert mine.cached >= 2 * model.block
        assert agree(model, mine, engine.cold(it))
    assert all(
        agree(model, *both) for both in (*zip(first, cold, strict=True), *zip(again, cold, strict=True))
    )
    engine.check()


@pytest.mark.parametrize("block_size", [64, 128])
def test_blocks_of_another_size(stand: EngineStand, block_size: int) -> None:
    model = SERVED_MODELS["full+swa"]
    engine = stand.engine(model, block_size=block_size)
    prompt = words(3 * block_size + 7, block_size)
    cold = engine.cold(prompt)
    engine.ask(prompt)
    engine.forget()
    again = engine.ask(prompt)
    assert again.cached == 3 * block_size
    assert agree(model, again, cold)
    engine.check()


# ---- tiers, another engine ------------------------------------------------------------------------------------------
@pytest.mark.redis
def test_another_engine_has_it_from_the_disk_or_from_redis(
    stand: EngineStand, model: ServedModel, tmp_path: Path
) -> None:
    """Also what was still being saved when the engine was told to stop: its core steps as long as there is work."""
    prompt = words(2 * model.block + 17, 40)
    with RedisServer(tmp_path) as server:
        disk = {"kind": "disk", "path": str(tmp_path / "disk"), "capacity": "1GiB"}
        redis = {"kind": "redis", "url": server.url}

        def settings(*stores: object) -> dict[str, object]:
            return {"tiers": {**HOST, "stores": list(stores), "stack": {"write": "all"}}, "policy": POLICY}

        engine = stand.engine(model, settings(disk, redis))
        with engine.held(loads=False):
            cold = engine.ask(prompt)
            assert engine.index.has_work
        for store in (disk, redis):
            again = stand.engine(model, settings(store)).ask(prompt)
            assert again.cached == 2 * model.block, store["kind"]
            assert agree(model, again, cold)
        stand.close()


# ---- weights, adapters --------------------------------------------------------------------------------------------------------
def test_after_an_update_of_weights_and_a_reset_nothing_of_the_old_ones_is_used(
    engine: VllmEngine, model: ServedModel
) -> None:
    prompt = words(2 * model.block + 17, 80)
    weights = [weight.data for weight in worker_model(engine).parameters()]
    before = [weight.clone() for weight in weights]
    with engine.held(loads=False):  # saved with the old weights, under way at the reset
        old = engine.ask(prompt)
        for weight in weights:
            weight.mul_(1.2)
        engine.index.reset()
    engine.forget()
    new = engine.ask(prompt)
    assert new.cached == 0
    engine.forget()
    again = engine.ask(prompt)
    for weight, was in zip(weights, before, strict=True):
        weight.copy_(was)
    engine.index.reset()
    assert distance(new, old, 1) > rounding(model)
    assert again.cached == 2 * model.block
    assert agree(model, again, new)
    engine.check()


def worker_model(engine: VllmEngine) -> torch.nn.Module:
    worker: Any = engine.engine.engine_core.engine_core.model_executor.driver_worker.worker
    found: torch.nn.Module = worker.model_runner.model
    return found


def adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter for the tiny Llama."""
    folder.mkdir(exist_ok=True)
    told = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 64,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(told))
    source = torch.Generator().manual_seed(seed)
    weights = {
        f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{side}.weight": torch.randn(
            shape, generator=source
        )
        for layer in range(2)
        for name, width in (("q_proj", 128), ("v_proj", 64))
        for side, shape in (("A", (8, 64)), ("B", (width, 8)))
    }
    importlib.import_module("safetensors.torch").save_file(weights, folder / "adapter_model.safetensors")
    return folder


def test_adapters_have_pages_of_their_own_also_once_trained_on(stand: EngineStand, tmp_path: Path) -> None:
    model = SERVED_MODELS["full"]
    prompt = words(2 * BLOCK + 17, 81)
    request = importlib.import_module("vllm.lora.request").LoRARequest
    disk = {"kind": "disk", "path": str(tmp_path / "disk"), "capacity": "1GiB"}
    settings = {"tiers": {**HOST, "stores": [disk]}, "policy": POLICY}
    lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    paths = [adapter(tmp_path / name, seed) for seed, name in enumerate("ab")]
    named = [None, *(request(path.name, number, str(path)) for number, path in enumerate(paths, 1))]

    engine = stand.engine(model, settings, **lora)
    first = [engine.ask(prompt, lora=each) for each in named]
    engine.forget()
    again = [engine.ask(prompt, lora=each) for each in named]
    assert [got.cached for got in (*first, *again)] == [0] * 3 + [2 * BLOCK] * 3
    assert all(agree(model, *both) for both in zip(again, first, strict=True))
    assert all(
        distance(first[one], first[other], 1) > rounding(model) for one, other in ((0, 1), (0, 2), (1, 2))
    )

    adapter(paths[0], seed=7)
    stand.close()
    engine = stand.engine(model, settings, **lora)
    restarted = [engine.ask(prompt, lora=each) for each in named]
    stand.close()
    assert [got.cached for got in restarted] == [2 * BLOCK, 0, 2 * BLOCK]
    assert distance(restarted[1], first[1], 1) > rounding(model)
