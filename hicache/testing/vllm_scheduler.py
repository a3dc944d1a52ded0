"""As much of vLLM's scheduler as our index sees, without vLLM: requests, tables of blocks, and who holds them."""

# ruff: noqa: SLF001  a test's eye on the inside: when the index comes to rest

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from hicache.cache import HiCache
from hicache.config import load_config
from hicache.engines.vllm_geometry import Component, Geometry, GroupPart, LayerPart
from hicache.engines.vllm_index import RequestIndex, Step
from hicache.engines.vllm_messages import CopyJob
from hicache.testing.scripted_store import ScriptedStore
from hicache.tiers.shared import SharedPool
from hicache.types import ReuseRule

PAGE = 4
FULL = Component("full", ReuseRule.PATH, 0, (GroupPart(0, (LayerPart("a", 64, "f32"),)),))
SWA = Component("swa", ReuseRule.WINDOW, 7, (GroupPart(1, (LayerPart("b", 64, "f32"),)),))
MAMBA = Component("mamba", ReuseRule.CHECKPOINT, 0, (GroupPart(1, (LayerPart("m", 64, "f32"),)),))


class Blocks:
    """Counts who holds which block of vLLM's pool."""

    def __init__(self) -> None:
        self.held: Counter[int] = Counter()

    def hold(self, blocks: Sequence[int]) -> None:
        self.held.update(blocks)

    def free(self, blocks: Sequence[int]) -> None:
        self.held.subtract(blocks)
        self.held += Counter()


class VllmScheduler:
    """As much of vLLM's scheduler as the index sees; a worker that does what the test says."""

    def __init__(
        self, *components: Component, num_ranks: int = 1, store: ScriptedStore | None = None
    ) -> None:
        self.geometry = Geometry(PAGE, num_ranks, components)
        settings: dict[str, object] = {
            "model": {"name": "m", "page_size": PAGE, "components": self.geometry.sections()},
            "tiers": {
                "device": {"kind": "cpu", "capacity": "1MiB", "split": "fixed"},
                "host": None if store is None else {"capacity": "64KiB", "pinned": False},
            },
            "policy": {"write": "write_through", "prefetch": {"min_tokens": 0}},
        }
        self.cache = HiCache(
            load_config(settings, environ={}), device_pool=SharedPool, background=False, store=store
        )
        self.blocks = Blocks()
        self.index = RequestIndex(self.cache, self.geometry)
        self.index.bind(self.blocks)
        self.begun: list[CopyJob] = []

    def request(self, name: str, tokens: Sequence[int], **values: Any) -> Any:
        fields = {
            "request_id": name,
            "all_token_ids": list(tokens),
            "num_tokens": len(tokens),
            "num_computed_tokens": 0,
            "cache_salt": None,
            "session_id": None,
            "lora_request": None,
            "mm_features": [],
            "prompt_embeds": None,
        }
        return SimpleNamespace(**{**fields, **values})

    def look_up(self, request: Any, num_local: int = 0) -> int:
        """Ask until there is an answer."""
        while (found := self.index.matched(request, num_local)) is None:
            self.index._holds[request.request_id].found.result(10)
        return found

    def admit(self, name: str, tokens: Sequence[int]) -> Any:
        """A request that was looked up and has its blocks; nothing of it is scheduled yet."""
        request = self.request(name, tokens)
        found = self.look_up(request)
        self.index.allocated(request, table(len(tokens)), found)
        return request

    def step(
        self, request: Any, num_tokens: int, tables: Any = None, states: Sequence[tuple[int, int, int]] = ()
    ) -> Step:
        """Schedule ``num_tokens`` of a request; the jobs that are to begin."""
        begun = self.index.step(
            {request.request_id: num_tokens} if num_tokens else {},
            lambda _: tables if tables is not None else table(request.num_tokens),
            {request.request_id: states},
        )
        request.num_computed_tokens += num_tokens
        self.begun.extend(begun.saves)  # the cache's thread may have been as quick as that
        return begun

    def jobs(self, request: Any) -> tuple[CopyJob, ...]:
        """The saves that workers are to begin, once the cache's thread has reserved their slots."""
        for _ in self.ticks():
            self.step(request, 0)
            if self.begun or not self.index.has_work:
                break
        saves, self.begun = tuple(self.begun), []
        return saves

    def report(self, saves: Mapping[int, int], failed: Sequence[int] = ()) -> None:
        """Workers have ended saves; each that all of them have ended is published, or dropped."""
        pending = {
            number
            for number, count in saves.items()
            if self.index._saving[number].num_reports + count >= self.geometry.num_ranks
        }
        self.index.reported(saves, failed, (), ())
        for _ in self.ticks():
            self.index.reported({}, (), (), ())
            if not pending & self.index._saving.keys():
                break

    def save_all(self, request: Any) -> None:
        """Workers do whatever there is to do."""
        while jobs := self.jobs(request):
            self.report({job.number: self.geometry.num_ranks for job in jobs})
        self.rest()

    def rest(self) -> None:
        """Until every hold that is over has let go of its lease."""
        for _ in self.ticks():
            if len(self.index._tasks) <= len(self.index._holds.keys() | self.index._loading.keys()):
                break

    def ticks(self) -> Iterator[int]:
        """Rounds of the cache's thread; it comes to rest in far fewer than these."""
        for number in range(10_000):
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.index._loop).result(10)
            yield number
        raise AssertionError("the cache's thread does not come to rest")

    def serve(self, name: str, tokens: Sequence[int], **values: Any) -> int:
        """One request from look-up to end, in one chunk; what it reused."""
        request = self.request(name, tokens, **values)
        reused = self.look_up(request)
        self.index.allocated(request, table(len(tokens)), reused)
        request.num_computed_tokens = reused
        loads = self.step(request, len(tokens) - reused).loads
        assert [job.request for job in loads] == ([name] if reused else [])
        self.index.reported({}, (), [name] if reused else (), ())
        self.index.finished(request, table(len(tokens)), "finished_stopped")
        self.save_all(request)
        return reused


def table(num_tokens: int, first: int = 1) -> tuple[list[int], list[int]]:
    """Blocks of both groups, none of them the same."""
    count = -(-num_tokens // PAGE)
    return list(range(first, first + count)), list(range(100 + first, 100 + first + count))
