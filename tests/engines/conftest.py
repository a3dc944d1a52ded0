"""Tiny models, made once for a run, and engines on caches of every shape."""

from __future__ import annotations

import functools
import importlib.util
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hicache.engines.transformers import TransformersEngine
from hicache.testing.model_oracle import ModelOracle, open_quiet, tiny_settings
from hicache.testing.tiny_models import TINY_MODELS, VOCABULARY, make_tiny_model
from hicache.testing.vllm_engine import EngineStand

MakeOracle = Callable[..., ModelOracle]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not item.get_closest_marker("engines"):
        return
    if item.path.name.startswith("test_sglang") and importlib.util.find_spec("sglang") is None:
        pytest.skip("needs the environment .venv-sglang: make test-sglang")
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers: pip install 'hicache[engines]', or make test-engines")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from threads, and workers of pytest share the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def model_named(name: str) -> Any:
    return make_tiny_model(name)


@pytest.fixture(params=TINY_MODELS)
def model_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(model_name: str) -> Any:
    return model_named(model_name)


@pytest.fixture
def lara() -> Any:
    """The model with all three components."""
    return model_named("LaraMini")


@pytest.fixture
def make_oracle() -> Iterator[MakeOracle]:
    """An engine and its judge: ``make_oracle(model, chunk_tokens=64, page_size=16, device=..., host=..., stores=...)``."""
    engines: list[TransformersEngine] = []

    def make(
        model: Any, *, open_cache: Any = open_quiet, chunk_tokens: int = 64, **settings: Any
    ) -> ModelOracle:
        engine = TransformersEngine(
            model, tiny_settings(**settings), chunk_tokens=chunk_tokens, open_cache=open_cache
        )
        engines.append(engine)
        return ModelOracle(engine)

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def words(seeded_random: random.Random) -> Callable[[int], list[int]]:
    """``words(n)``: n tokens that nobody else has."""
    return lambda count: [seeded_random.randrange(1, VOCABULARY) for _ in range(count)]


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineStand]:
    """Engines of vLLM in this process, one after another."""
    with EngineStand(tmp_path_factory.mktemp("models")) as made:
        yield made
    assert [it.name for it in threading.enumerate() if it.name.startswith("hicache")] == ["hicache-exit"]
