"""What is derived from a model, and that a boundary comes back bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hicache.engines.transformers import TransformersEngine
from hicache.engines.transformers_geometry import read_geometry
from hicache.engines.transformers_library import forward, load_library, make_cache
from hicache.testing.model_oracle import open_quiet, tiny_settings
from hicache.testing.tiny_models import TINY_MODELS, make_tiny_model
from hicache.types import ComponentSpec

pytestmark = pytest.mark.engines

Words = Callable[[int], list[int]]


def specs_of(model: Any) -> dict[str, ComponentSpec]:
    return {spec.name: spec for spec in read_geometry(model, load_library()).specs}


def test_a_model_has_the_components_of_its_family(model_name: str, model: Any) -> None:
    assert set(specs_of(model)) == TINY_MODELS[model_name].components


def test_sizes_of_the_three_components_are_those_counted_by_hand(lara: Any) -> None:
    # 2 KV heads of 16 floats, keys and values; a window of 32 needs the 31 tokens before the next one. A state: 128
    # channels x 4 of the convolution, 4 heads x 16 x 16 of the recurrence, in each of 2 layers.
    token_bytes = 2 * 2 * 16 * 4
    state_bytes = 2 * (128 * 4 + 4 * 16 * 16) * 4
    assert specs_of(lara) == {
        "full": ComponentSpec("full", "path", num_layers=1, bytes_per_token=token_bytes),
        "swa": ComponentSpec("swa", "window", window_tokens=31, num_layers=1, bytes_per_token=token_bytes),
        "mamba": ComponentSpec("mamba", "checkpoint", num_layers=2, state_bytes=state_bytes),
    }


def test_keys_and_values_of_different_sizes_are_counted_apart() -> None:
    # Latent attention keeps one row of 32 and one of 16 floats for all heads, in each of 2 layers.
    assert specs_of(make_tiny_model("KimiLinear"))["full"].bytes_per_token == 2 * (32 + 16) * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_restored_cache_is_bit_by_bit_the_one_that_went_on(
    model_name: str, words: Words, dtype: torch.dtype
) -> None:
    """Keys, values, states and counters after a restore, against those of a model that was never interrupted."""
    model = make_tiny_model(model_name, dtype=dtype)
    library = load_library()
    prompt = words(65)
    went_on, restored = (make_cache(library, model.config) for _ in range(2))
    with torch.inference_mode():
        for begin, end in ((0, 32), (32, 64)):
            forward(model, torch.tensor([prompt[begin:end]]), went_on)
    with TransformersEngine(model, tiny_settings(device="16MiB"), open_cache=open_quiet) as engine:
        with engine.cache.match(prompt) as lease:
            lease.reserve(64)
            engine.payload.write_pages(went_on, lease, 0, 64)
            engine.payload.write_states(went_on, lease)
            lease.release(prompt, written=64)
        with engine.cache.match(prompt) as lease:
            assert lease.load() == 64
            engine.payload.restore(restored, lease, 64)
            for fill in restored.pending.values():
                fill()
    for number, (layer, expected) in enumerate(zip(restored.layers, went_on.layers, strict=True)):
        assert_same(vars(layer), vars(expected), f"layer {number}")


def assert_same(got: dict[str, Any], expected: dict[str, Any], where: str) -> None:
    assert got.keys() == expected.keys(), where
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert got[name].dtype == value.dtype, (where, name)
            assert torch.equal(got[name], value), (where, name)
        elif isinstance(value, dict):
            assert_same(got[name], value, f"{where} {name}")
        else:
            assert got[name] == value, (where, name)
