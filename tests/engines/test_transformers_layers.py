"""The generator computes a layer while the load of later ones goes on, and answers what the model alone would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hicache.cache import HiCache
from hicache.config import HiCacheConfig
from hicache.engines.transformers import TransformersEngine
from hicache.lease import Lease
from hicache.testing.model_oracle import ModelOracle, squeeze, tiny_settings
from hicache.testing.stepped_stream import SteppedStream
from hicache.testing.tiny_models import make_tiny_model
from hicache.transfer.streams import CpuStream, Streams
from hicache.types import Tier

pytestmark = pytest.mark.engines

Words = Callable[[int], list[int]]


class Watched:
    """An engine whose loads move one layer at a time, each when it is waited for."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loads = SteppedStream()
        self.pending: list[tuple[int, int]] = []
        """Each forward pass of a layer that began with loads under way: which layer, how many copies."""
        self.engine = TransformersEngine(
            model, tiny_settings(host="16MiB"), chunk_tokens=64, open_cache=self._open
        )
        self.oracle = ModelOracle(self.engine)
        for index, layer in enumerate(model.model.layers):
            layer.register_forward_pre_hook(lambda *_, index=index: self._begins(index))
        wait_layer = Lease.wait_layer

        def step_and_wait(lease: Lease, layer: int, component: str | None = None) -> bool:
            transfers = self.engine.cache._runtime.transfers
            while not transfers.wait_layer(lease._restore._landing, layer, 0, component):
                self.loads.step()
            return wait_layer(lease, layer, component)

        monkeypatch.setattr(Lease, "wait_layer", step_and_wait)

    def _open(self, config: HiCacheConfig) -> HiCache:
        streams = Streams(CpuStream("to-host"), self.loads, CpuStream("local"))
        return HiCache(config, background=False, streams=streams)

    def _begins(self, layer: int) -> None:
        if self.loads.num_pending:
            self.pending.append((layer, self.loads.num_pending))

    def leave_in_host(self, prompt: list[int]) -> None:
        """Serve a prompt, then have it in L2 alone."""
        assert self.oracle.serve(prompt).is_right
        squeeze(self.engine.cache, Tier.DEVICE)


@pytest.fixture(params=["Llama", "Mistral", "Gemma3", "GptOss"])
def watched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """Paths alone, windows alone, both."""
    made = Watched(make_tiny_model(request.param), monkeypatch)
    yield made
    made.loads.step_all()
    made.engine.close()


def test_the_first_layer_computes_before_the_last_has_arrived(watched: Watched, words: Words) -> None:
    prompt = words(100)
    watched.leave_in_host(prompt)
    again = watched.oracle.serve(prompt)
    assert again.is_right, again
    assert (again.answer.reused, again.answer.source.host > 0) == (96, True)
    num_layers = len(watched.engine.model.model.layers)
    layers = [layer for layer, _ in watched.pending]
    assert layers[0] == 0
    assert layers == list(range(len(layers))), "each layer began while later ones were loaded"
    # The layer before the last was brought when it was computed; then only the last one's copies were left.
    assert num_layers - 2 <= len(layers) <= num_layers


@pytest.mark.parametrize("step", [0, 1, -1], ids=["first", "second", "last"])
def test_a_layer_that_does_not_arrive_has_the_request_computed_anew(
    watched: Watched, words: Words, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = words(100)
    watched.leave_in_host(prompt)
    ends: list[int] = []
    end_next = watched.loads._end_next

    def failing(num_slots: int, error: BaseException | None) -> None:
        ends.append(num_slots)
        is_last = watched.loads.num_pending == 1
        if len(ends) - 1 == step or (step < 0 and is_last):
            watched.loads.fail_next(OSError("the copy engine refuses"))
        end_next(num_slots, error)

    monkeypatch.setattr(watched.loads, "_end_next", failing)
    again = watched.oracle.serve(prompt)
    assert again.is_right, again
    assert (again.answer.reused, again.answer.source.total) == (0, 0)
    watched.loads.step_all()
    assert watched.engine.cache.audit() == []
    assert again.answer.kept > 0, "what was computed anew is kept"
