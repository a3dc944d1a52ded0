"""One request's hold on the cache, run by a coroutine of its own on the cache's thread.

::

    scheduler's thread                        this coroutine (the cache's thread)
    matched()   ---- begins ----------------> match, load            -> found
    a chunk was computed -- Save ------------> reserve slots          -> outbox
    workers reported ---- done --------------> checkpoint (publish)   -> settled
    request over ---- None ------------------> release

The scheduler never waits for the cache: it posts, and looks at what has come back in its next step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hicache.cache import HiCache
from hicache.engines.vllm_geometry import Geometry
from hicache.engines.vllm_messages import CopyJob, CopyPart, Ids
from hicache.errors import HiCacheError
from hicache.lease import Lease
from hicache.types import Namespace, ReuseRule, TierTokens

logger = logging.getLogger(__name__)

Blocks = tuple[list[int], ...]
"""A request's block numbers, one list a group; 0 where a group keeps nothing."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a look-up restored into the pool.

    Args:
        reused: tokens, whole pages.
        source: where they came from.
        slots: int64 per component: of each page from the prompt's start, or of the one state.
        checkpoints: lengths where the same prompt could be reused next time.
    """

    reused: int = 0
    source: TierTokens = field(default_factory=TierTokens)
    slots: Mapping[str, Ids] = field(default_factory=dict)
    checkpoints: tuple[int, ...] = ()


@dataclass(eq=False)
class Save:
    """Pages ``[begin, end)``, in tokens, on their way from vLLM's blocks into the pool.

    Args:
        parts: component, group, pages and blocks of each group; slots come later. A state's page is 0.
        held: block numbers that vLLM may not give away meanwhile.
        tokens: of the request, at least ``end``; None if they are its prompt's.
        mark: keep the end as a boundary.
    """

    number: int
    begin: int
    end: int
    parts: tuple[tuple[int, int, Ids, Ids], ...]
    held: tuple[int, ...]
    tokens: NDArray[np.int32] | None
    mark: bool
    num_reports: int = 0
    failed: bool = False
    is_kept: bool = False
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Hold:
    """One attempt of one request: from its look-up until it ends, or is preempted.

    *Thread*: the scheduler's, except ``run``.
    """

    def __init__(
        self, request: str, prompt: NDArray[np.int32], session: str | None, namespace: Namespace
    ) -> None:
        self.request = request
        self.prompt = prompt
        self.session = session
        self.namespace = namespace
        self.found: Future[Found] = Future()
        self.saves: asyncio.Queue[Save | None] = asyncio.Queue()
        self.is_admitted = False
        self.is_loading = False
        self.is_over = False
        self.keeps = True
        self.saved = 0
        """Tokens that are in the pool, or on their way there."""
        self.num_local = 0
        """Tokens that vLLM had itself."""
        self.stop = ""

    async def run(
        self,
        cache: HiCache,
        geometry: Geometry,
        ready: Callable[[CopyJob], None],
        over: Callable[[Save], None],
    ) -> None:
        """Hold a lease for as long as the request goes on.

        Args:
            ready: takes what workers are to copy; ``Save.done`` is set when they have.
            over: takes each save at its end, whatever came of it.
        """
        lease: Lease | None = None
        try:
            lease = await cache.amatch(self.prompt, session=self.session, namespace=self.namespace)
            await lease.aload()
            found = _found(lease, geometry)
        except Exception as error:  # noqa: BLE001  without an answer the request would wait for ever
            self._give_up("looking it up", error)
            found = Found()
        self.found.set_result(found)
        reserved = self.found.result().reused
        while (save := await self.saves.get()) is not None:
            if self.keeps and lease is not None:
                try:
                    lease.reserve(max(0, save.end - reserved))
                    reserved = max(reserved, save.end)
                    ready(_job(self.request, save, lease, geometry))
                    await save.done.wait()
                    self.keeps = not save.failed
                    if self.keeps:
                        lease.checkpoint(save.end, save.tokens, mark=save.mark)
                        save.is_kept = True
                except Exception as error:  # noqa: BLE001  vLLM's blocks must be given back
                    self._give_up("saving", error)
            over(save)
        if lease is not None:
            try:
                lease.release(stop=self.stop)
            except HiCacheError as error:
                self._give_up("releasing it", error)
                lease.abandon()

    def _give_up(self, what: str, error: Exception) -> None:
        """The request goes on without the cache."""
        self.keeps = False
        logger.debug("request %s is kept no further; %s failed: %s", self.request, what, error)


def _found(lease: Lease, geometry: Geometry) -> Found:
    slots: dict[str, Ids] = {}
    for component in geometry.components:
        if component.rule is not ReuseRule.CHECKPOINT:
            slots[component.name] = lease.slots(component.name)
        elif lease.reused:
            slots[component.name] = np.array([lease.state(component.name)], dtype=np.int64)
    return Found(lease.reused, lease.source, slots, lease.checkpoints)


def _job(request: str, save: Save, lease: Lease, geometry: Geometry) -> CopyJob:
    """The save with the slots that the lease has reserved for it."""
    parts = []
    for component_idx, group_idx, pages, blocks in save.parts:
        component = geometry.components[component_idx]
        if component.rule is ReuseRule.CHECKPOINT:
            slots = np.array([lease.state(component.name)], dtype=np.int64)
        else:
            slots = lease.slots(component.name)[pages]
        parts.append(CopyPart(component_idx, group_idx, slots, blocks))
    return CopyJob(save.number, request, tuple(parts))
