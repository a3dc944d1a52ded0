"""Real vLLM over HTTP, in its default layout of processes: what is restored, and that answers stay the same.

vLLM's own prefix cache is emptied before each turn, so every cached token is ours.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache.testing.tiny_models import VOCABULARY
from hicache.testing.vllm_server import SERVED_MODELS, ServedModel, VllmServer, why_not

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(900)]

MEMORY = {"host": {"capacity": "64MiB"}}
POLICY = {"write": "write_through", "prefetch": {"min_tokens": 0}}
SAMPLING: dict[str, Any] = {"temperature": 1.0, "seed": 7}
"""A tiny Gemma's likeliest token is its last one, whatever came before: a drawn one tells contexts apart."""


@pytest.fixture(scope="module", autouse=True)
def can_run() -> None:
    problem = why_not()
    if problem is not None:
        pytest.skip(problem)


def words(count: int, seed: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(1, VOCABULARY) for _ in range(count)]


class Pair:
    """A server without HiCache and one with it, on a disk that outlives it."""

    def __init__(self, model: ServedModel, folder: Path) -> None:
        self.model = model
        self._folder = folder
        self._path = model.save(folder)
        self.plain = VllmServer(self._path, folder)
        self.ours = self.start()
        self.plain.wait()
        self.ours.wait()

    def start(self, **settings: object) -> VllmServer:
        disk = {"kind": "disk", "path": str(self._folder / "disk"), "capacity": "1GiB"}
        tiers = {**MEMORY, "stores": [disk]}
        return VllmServer(self._path, self._folder, hicache={"tiers": tiers, "policy": POLICY, **settings})

    def restart(self) -> None:
        self.ours.stop()
        self.ours = self.start().wait()

    def stop(self) -> None:
        self.plain.stop()
        self.ours.stop()

    def boundary(self, computed: int, prompt: int) -> int:
        """Whole blocks of what was computed, of which at least one token of the prompt is left."""
        return min(computed, prompt - 1) // self.model.block * self.model.block


@pytest.fixture(scope="module", params=SERVED_MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    servers = Pair(SERVED_MODELS[request.param], tmp_path_factory.mktemp("vllm"))
    yield servers
    servers.stop()


def test_every_turn_reuses_all_whole_blocks_and_gets_the_same_answer(pair: Pair) -> None:
    turn = 3 * pair.model.block + 17
    prompt, computed = words(turn, 1), 0
    for number in range(3):
        pair.ours.forget()
        wanted = pair.plain.complete(prompt, **SAMPLING)
        got = pair.ours.complete(prompt, **SAMPLING)
        assert got.tokens == wanted.tokens
        assert got.cached == pair.boundary(computed, len(prompt)), f"turn {number}"
        computed = len(prompt) + len(got.tokens) - 1  # the last token was sampled, never computed
        if pair.model.block > 32:  # a state is left where a block ends, and only there
            computed = computed // pair.model.block * pair.model.block
        prompt = [*prompt, *got.tokens, *words(turn, 2 + number)]
    assert len(set(got.tokens)) > 8  # what says nothing of its context would prove nothing


def test_after_a_restart_hits_come_from_the_disk(pair: Pair) -> None:
    prompt = words(3 * pair.model.block + 9, 30)
    first = pair.ours.complete(prompt, **SAMPLING)
    assert first.cached == 0
    pair.restart()
    again = pair.ours.complete(prompt, **SAMPLING)
    assert again.cached == 3 * pair.model.block
    assert again.tokens == first.tokens == pair.plain.complete(prompt, **SAMPLING).tokens
    hits = pair.ours.metrics()
    assert hits["vllm:external_prefix_cache_hits_total"] == again.cached
