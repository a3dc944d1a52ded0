"""The scheduler's part: what is in the cache, and what workers are to copy.

Blocks that a save reads are held in vLLM's pool by their reference count until the save was published, whatever
happens to their request meanwhile: it may end, be preempted, or let its window slide on.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hicache.cache import HiCache
from hicache.engines.vllm_geometry import Geometry
from hicache.engines.vllm_messages import CopyJob, CopyPart, Ids
from hicache.engines.vllm_requests import Blocks, Found, Hold, Save
from hicache.engines.vllm_settings import adapter_digest
from hicache.exits import OpenThings
from hicache.radix.rules.window import window_frontier
from hicache.types import MAX_SESSION_NAME, NO_SLOT, Namespace, ReuseRule

logger = logging.getLogger(__name__)

GRACE_S = 0.003
"""All look-ups of a step may take so long together; a request whose own is not over is asked about again in the next."""
_POOL_SHARE = 4
"""One save takes at most this fraction of a window's slots, since it needs them for all its pages at first."""
_CLOSE_S = 5.0


class EngineRequest(Protocol):
    """What is read of a request of vLLM's."""

    request_id: str
    all_token_ids: Sequence[int]
    num_tokens: int
    num_computed_tokens: int
    cache_salt: str | None
    session_id: str | None
    lora_request: Any
    mm_features: Sequence[Any]
    prompt_embeds: Any


class BlockHolder(Protocol):
    """Keeps vLLM's blocks from being given away."""

    def hold(self, blocks: Sequence[int]) -> None: ...
    def free(self, blocks: Sequence[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class Step:
    """What workers are to begin in one step."""

    loads: tuple[CopyJob, ...]
    saves: tuple[CopyJob, ...]


class RequestIndex:
    """Follows vLLM's requests with leases of a ``HiCache``.

    Args:
        cache: its device pool is what workers copy to and from; closed by ``close``.
        geometry: of the model.

    *Thread*: the scheduler's; nothing but ``close`` waits longer than ``GRACE_S``.
    """

    def __init__(self, cache: HiCache, geometry: Geometry) -> None:
        self.cache = cache
        self._geometry = geometry
        self._page = geometry.page_size
        self._blocks: BlockHolder | None = None
        self._holds: dict[str, Hold] = {}
        self._requests: dict[str, EngineRequest] = {}
        self._loading: dict[str, Hold] = {}
        self._load_failed: set[str] = set()
        self._loads: list[CopyJob] = []
        self._saving: dict[int, Save] = {}
        self._ready: deque[CopyJob] = deque()
        self._over: deque[Save] = deque()
        self._numbers = itertools.count()
        self._epoch: str | None = None
        self._adapters: dict[tuple[int, str], str] = {}
        """Digests of adapters' files, as they were when a request first named them."""
        self._patience_s = GRACE_S
        self.counts: Counter[str] = Counter()
        self._save_pages = self._pages_at_once()
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hicache-requests", daemon=True)
        self._thread.start()
        _open.add(self)

    def bind(self, blocks: BlockHolder) -> None:
        """Say who holds blocks; before the first step."""
        self._blocks = blocks

    # ---- a request comes ---------------------------------------------------------------------
    def matched(self, request: EngineRequest, num_local: int) -> int | None:
        """Tokens beyond ``num_local`` that can be loaded; None while it is being looked up.

        They are in the pool by then, and stay there until the request has ended.
        """
        if request.prompt_embeds is not None:
            return 0
        hold = self._holds.get(request.request_id)
        if hold is not None and hold.is_admitted:  # preempted, or its load failed: it starts anew
            self._end(hold, "preempted")
            hold = None
        if hold is None:
            hold = self._begin(request)
            if not self._is_found(hold):
                self.counts["deferred"] += 1
        if not hold.found.done():
            return None
        hold.num_local = num_local
        if request.request_id in self._load_failed:
            return 0
        return max(0, hold.found.result().reused - num_local)

    def allocated(self, request: EngineRequest, blocks: Blocks, num_external: int) -> None:
        """VLLM has blocks for the request; ``num_external`` tokens of them are to be loaded."""
        hold = self._holds.get(request.request_id)
        if hold is None:
            return
        if not hold.is_admitted:
            hold.is_admitted = True
            self._requests[request.request_id] = request
            found = hold.found.result()
            hold.saved = found.reused
            self.counts["requests"] += 1
            self.counts["external_tokens"] += num_external
        if num_external:
            first, last = hold.num_local // self._page, (hold.num_local + num_external) // self._page
            parts = tuple(self._load_parts(hold.found.result(), blocks, first, last))
            hold.is_loading = True
            self._loading[hold.request] = hold
            self._loads.append(CopyJob(next(self._numbers), hold.request, parts))

    def found(self, request: str) -> Found:
        """What the look-up of an admitted request restored."""
        return self._holds[request].found.result()

    # ---- a step ------------------------------------------------------------------------------
    def step(
        self,
        scheduled: Mapping[str, int],
        block_ids: Callable[[str], Blocks | None],
        states: Mapping[str, Sequence[tuple[int, int, int]]],
    ) -> Step:
        """What workers are to do with this step.

        Args:
            scheduled: tokens that each request computes in it.
            block_ids: a request's blocks once it is over.
            states: of each request: group, block and length of the states that it leaves.
        """
        for name, num_tokens in scheduled.items():
            hold, request = self._holds.get(name), self._requests.get(name)
            if hold is None or request is None or not hold.keeps:
                continue
            computed = min(request.num_computed_tokens + num_tokens, request.num_tokens)
            if self._geometry.has_states:
                self._save_states(hold, request, computed, block_ids, states.get(name, ()))
            elif request.num_computed_tokens < len(hold.prompt):
                end = min(computed, len(hold.prompt)) // self._page * self._page
                if end > hold.saved:
                    self._save_up_to(hold, request, end, block_ids(name), is_last=False)
        self._settle()
        self._patience_s = GRACE_S
        loads, self._loads = self._loads, []
        saves = [self._ready.popleft() for _ in range(len(self._ready))]
        return Step(tuple(loads), tuple(saves))

    def reported(
        self,
        saves: Mapping[int, int],
        failed_saves: Collection[int],
        loaded: Iterable[str],
        failed: Collection[str],
    ) -> None:
        """What workers have done: reports per save, and requests whose load has ended in all of them."""
        for number, num_reports in saves.items():
            save = self._saving.get(number)
            if save is None:
                continue
            save.num_reports += num_reports
            save.failed |= number in failed_saves
            if save.num_reports >= self._geometry.num_ranks:
                self._loop.call_soon_threadsafe(save.done.set)
        for name in loaded:
            hold = self._loading.pop(name, None)
            if hold is None:
                continue
            hold.is_loading = False
            if name in failed:
                self.counts["loads_failed"] += 1
                if not hold.is_over:
                    self._load_failed.add(name)
            if hold.is_over:
                self._post(hold, None)
        self._settle()

    def finished(self, request: EngineRequest, blocks: Blocks, stop: str) -> None:
        """The request is over; what it computed and is not saved yet is saved from ``blocks``."""
        name = request.request_id
        self._load_failed.discard(name)
        hold = self._holds.get(name)
        if hold is None:
            return
        if hold.is_admitted and hold.keeps and not hold.is_loading and not self._geometry.has_states:
            # The last token was sampled, never computed.
            end = min(request.num_computed_tokens, request.num_tokens - 1) // self._page * self._page
            if end > hold.saved:
                self._save_up_to(hold, request, end, blocks, is_last=True)
        self._end(hold, stop)

    @property
    def has_work(self) -> bool:
        """Whether steps are needed although no request may be left."""
        return bool(self._saving)

    # ---- all of it ---------------------------------------------------------------------------
    def reset(self) -> None:
        """From now on nothing that was computed before is found: weights may have changed.

        Pages from before are out of reach, in stores too, and leave as anything that nobody uses.
        """
        self._epoch = uuid.uuid4().hex
        self._adapters.clear()
        for hold in list(self._holds.values()):
            if not hold.is_admitted:
                self._end(hold, "reset")

    def close(self) -> None:
        """End all holds and close the cache. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        _open.discard(self)
        ended = asyncio.run_coroutine_threadsafe(self._end_tasks(), self._loop)
        try:
            ended.result(_CLOSE_S)
        except FutureTimeoutError:
            logger.warning("requests did not let go of the cache within %g s", _CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()
        self.cache.close()

    def disown(self) -> None:
        """This process is a fork of the one that made it: ``close`` does nothing here."""
        self._is_closed = True

    # ---- inside ------------------------------------------------------------------------------
    def _begin(self, request: EngineRequest) -> Hold:
        session = request.session_id
        if session is not None and not 0 < len(session) <= MAX_SESSION_NAME:
            session = None
        tokens = np.asarray(request.all_token_ids, dtype=np.int32)
        namespace = namespace_of(request, self._epoch, self._adapter(request.lora_request))
        hold = Hold(request.request_id, tokens, session, namespace)
        self._holds[hold.request] = hold
        self._loop.call_soon_threadsafe(self._start, hold)
        return hold

    def _is_found(self, hold: Hold) -> bool:
        """Whether its look-up is over; waits for it as long as this step's look-ups may still take."""
        began_s = time.monotonic()
        with contextlib.suppress(FutureTimeoutError):
            hold.found.result(self._patience_s)
        self._patience_s = max(0.0, self._patience_s - (time.monotonic() - began_s))
        return hold.found.done()

    def _adapter(self, lora: Any) -> str | None:
        """Digest of an adapter's files: trained on, it has other weights under the same name and path."""
        if lora is None:
            return None
        known = lora.lora_int_id, lora.lora_path
        if known not in self._adapters:
            self._adapters[known] = adapter_digest(lora.lora_path)
        return self._adapters[known]

    def _start(self, hold: Hold) -> None:
        task = self._loop.create_task(
            hold.run(self.cache, self._geometry, self._ready.append, self._over.append)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _end(self, hold: Hold, stop: str) -> None:
        """Let go of a hold once its saves, and a load that reads its slots, are over."""
        hold.stop = stop
        hold.is_over = True
        if self._holds.get(hold.request) is hold:
            del self._holds[hold.request]
            self._requests.pop(hold.request, None)
        if not hold.is_loading:
            self._post(hold, None)

    def _post(self, hold: Hold, save: Save | None) -> None:
        self._loop.call_soon_threadsafe(hold.saves.put_nowait, save)

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _settle(self) -> None:
        """Give back the blocks of saves that are over."""
        assert self._blocks is not None
        while self._over:
            save = self._over.popleft()
            del self._saving[save.number]
            self._blocks.free(save.held)
            self.counts["saves" if save.is_kept else "saves_failed"] += 1

    # ---- which blocks ------------------------------------------------------------------------
    def _load_parts(self, found: Found, blocks: Blocks, first: int, last: int) -> Iterable[CopyPart]:
        """Blocks of pages ``[first, last)`` that vLLM has room for, and the slots they come from.

        Should vLLM want another length than was restored, or more of a window, ``NO_SLOT`` fails the copy, and vLLM
        hears of it.
        """
        is_whole = last * self._page == found.reused
        for component_idx, component in enumerate(self._geometry.components):
            slots = found.slots[component.name]
            for group_idx, group in enumerate(component.groups):
                if component.rule is ReuseRule.CHECKPOINT:
                    ids = np.asarray(blocks[group.index][last - 1 : last], dtype=np.int64)
                    yield CopyPart(component_idx, group_idx, slots if is_whole else np.array([NO_SLOT]), ids)
                    continue
                ids = np.asarray(blocks[group.index][first:last], dtype=np.int64)
                wanted = ids != 0
                yield CopyPart(component_idx, group_idx, slots[first:last][wanted], ids[wanted])

    def _save_up_to(
        self, hold: Hold, request: EngineRequest, end: int, blocks: Blocks | None, *, is_last: bool
    ) -> None:
        """Save whole pages to ``end``, pausing where the lease wants a boundary, and where slots would run short."""
        if blocks is None:
            return
        marks = {length for length in hold.found.result().checkpoints if hold.saved < length <= end}
        pauses = range(hold.saved + self._save_pages * self._page, end, self._save_pages * self._page)
        for pause in sorted({*marks, *pauses, end}):
            is_boundary = pause in marks or (is_last and pause == end)
            self._save(hold, request, pause, blocks, {}, mark=is_boundary or not self.cache.is_hybrid)

    def _save_states(
        self,
        hold: Hold,
        request: EngineRequest,
        computed: int,
        block_ids: Callable[[str], Blocks | None],
        states: Sequence[tuple[int, int, int]],
    ) -> None:
        """Save up to each length at which every recurrent group leaves its state in this step."""
        wanted = {
            group.index
            for component in self._geometry.components
            if component.rule is ReuseRule.CHECKPOINT
            for group in component.groups
        }
        by_length: dict[int, dict[int, int]] = {}
        for group_index, block, length in states:
            by_length.setdefault(length, {})[group_index] = block
        for length in sorted(by_length):
            is_whole = length % self._page == 0 and wanted <= by_length[length].keys()
            blocks = block_ids(hold.request) if is_whole and hold.saved < length <= computed else None
            if blocks is not None:
                self._save(hold, request, length, blocks, by_length[length], mark=True)

    def _save(
        self,
        hold: Hold,
        request: EngineRequest,
        end: int,
        blocks: Blocks,
        states: Mapping[int, int],
        *,
        mark: bool,
    ) -> None:
        """Queue one save; none where vLLM has let go of a block that it needs."""
        parts = list(self._save_parts(hold.saved, end, blocks, states))
        if any((ids == 0).any() or len(ids) != len(pages) for _, _, pages, ids in parts):
            self.counts["saves_too_late"] += 1
            return
        held = tuple({int(block) for _, _, _, ids in parts for block in ids})
        tokens: NDArray[np.int32] | None = None
        if end > len(hold.prompt):
            tokens = np.asarray(request.all_token_ids[:end], dtype=np.int32)
        save = Save(next(self._numbers), hold.saved, end, tuple(parts), held, tokens, mark)
        assert self._blocks is not None
        self._blocks.hold(held)
        self._saving[save.number] = save
        hold.saved = end
        self._post(hold, save)

    def _save_parts(
        self, begin: int, end: int, blocks: Blocks, states: Mapping[int, int]
    ) -> Iterable[tuple[int, int, Ids, Ids]]:
        """Pages and blocks of each group; of a window only what the end needs, for the tree drops the rest."""
        for component_idx, component in enumerate(self._geometry.components):
            first = begin
            if component.rule is ReuseRule.WINDOW:
                first = max(begin, window_frontier(end, component.window_tokens, self._page))
            pages = np.arange(first // self._page, end // self._page)
            for group_idx, group in enumerate(component.groups):
                if component.rule is ReuseRule.CHECKPOINT:
                    yield component_idx, group_idx, np.zeros(1, np.int64), np.array([states[group.index]])
                else:
                    ids = np.asarray(blocks[group.index][pages[0] : pages[-1] + 1], dtype=np.int64)
                    yield component_idx, group_idx, pages, ids

    def _pages_at_once(self) -> int:
        slots = [
            self.cache.device.num_slots(component.name)
            for component in self._geometry.components
            if component.rule is not ReuseRule.CHECKPOINT
        ]
        return max(1, min(slots, default=1) // _POOL_SHARE)


def namespace_of(request: EngineRequest, epoch: str | None, adapter: str | None) -> Namespace:
    """What makes equal tokens of two requests unequal: salt, adapter, pictures, and resets in between.

    Args:
        adapter: digest of the adapter's files, if the request has one.
    """
    lora = request.lora_request
    pictures = [feature.identifier for feature in request.mm_features]
    extra = json.dumps([epoch, pictures]) if epoch is not None or pictures else None
    return Namespace(
        salt=request.cache_salt,
        lora=None if lora is None else json.dumps([lora.lora_name, lora.lora_path, adapter]),
        extra=extra,
    )


_open = OpenThings(with_main_thread=True)
"""An engine inside the caller's own process may never be shut down; the cache's threads would outlive it."""
