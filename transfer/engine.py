r"""Executes what the tree asks for: copies on streams, stores and fetches on the store's loop.

::

    Copy   -> CopyJobs -> Streams.to_host / to_device / local             \
    Store  -> byte budget -> StoreWriter  (one, in order)   -> Store.put   > JobBoard -> completions(),
    Fetch  -> byte budget -> StoreFetcher (a few at a time) -> Store.get  /              wait(), await_()
    Forget ----------------> StoreWriter                    -> Store.delete              (no ticket)
    Hint ------------------> StoreWriter                    -> Store.hint                (no ticket)

A completion never comes before its bytes are in place, and no byte moves after it: copies report when
they have returned, and a store only ever sees staging memory (``hicache.transfer.staging``).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from hicache.clock import Clock
from hicache.closing import Closing
from hicache.errors import ProtocolError
from hicache.radix.actions import Copy, Fetch, Forget, Free, Hint, Store
from hicache.tiers.shared_host import SharedHostPool
from hicache.tiers.store import Store as PageStore
from hicache.tracing import OFF, Tracing
from hicache.transfer.copy import PageCopier
from hicache.transfer.copy_jobs import CopyJobs, CopyWork
from hicache.transfer.jobs import (
    ByteBudget,
    Completion,
    Direction,
    Failure,
    FetchJob,
    Job,
    JobBoard,
    StoreJob,
)
from hicache.transfer.layout import Layout, TensorPool
from hicache.transfer.stats import QueueDepth, TransferCounters, TransferStats
from hicache.transfer.store_io import Presence, StoreIO
from hicache.transfer.store_port import OnPage
from hicache.transfer.streams import Order, Streams
from hicache.types import ComponentSpec, PageKey, TicketId, Tier

__all__ = ["CopyWork", "OnPage", "TransferEngine", "TransferStats"]

T = TypeVar("T")

_SPANS = {
    Direction.TO_HOST: "hicache.copy",
    Direction.TO_DEVICE: "hicache.copy",
    Direction.LOCAL: "hicache.copy",
    Direction.STORE: "hicache.store",
    Direction.FETCH: "hicache.fetch",
}


class TransferEngine(Closing):
    """Moves bytes between tiers and reports each ticket back exactly once.

    Args:
        specs: the model's components.
        page_size: tokens a page.
        device, host: pools of uint8 tensors, ``[layer, slot, bytes]`` and ``[slot, layer, bytes]``, or an L2
            that all components share.
        store: L3; the engine opens and closes it.
        streams: where copies run; default: one per direction, of the device's kind. The engine closes them.
        clock: drives the time limits of store calls (see ``clock_moved``).
        store_queue_bytes, prefetch_queue_bytes: bytes of stores and of fetches, queued and running,
            beyond which new ones complete at once with "queue full".
        store_timeout_s: limit of each store call.
        store_batch_pages: the most pages in one store call; default: many to put, fewer to get, so that what
            arrived before a time limit counts.
        open_timeout_s: limit of opening the store; a large disk store reads its index then.
        on_page: called as ``(op, component, key, payload)`` on the store's loop with each page that the
            store has verified (``fetch``) and each about to be put (``store``); what it raises turns the
            page into a failure "stamp". Must not block.
        tracing: makes a span for each ticket.

    *Raises*: ``TierUnavailableError`` or ``TierTimeoutError`` when the store does not open;
    ``ProtocolError`` when a pool does not fit its component.

    *Thread*: any; only ``wait``, ``drain``, ``exists``, ``run_store`` and ``close`` block, all with a
    bound, and must not be called from ``on_page``.
    """

    def __init__(
        self,
        *,
        specs: Sequence[ComponentSpec],
        page_size: int,
        device: TensorPool,
        host: TensorPool | SharedHostPool | None,
        store: PageStore | None,
        streams: Streams | None = None,
        clock: Clock,
        store_queue_bytes: int,
        prefetch_queue_bytes: int,
        store_timeout_s: float,
        store_batch_pages: int | None = None,
        on_page: OnPage | None = None,
        open_timeout_s: float = 600.0,
        tracing: Tracing = OFF,
    ) -> None:
        if store_timeout_s <= 0 or (store_batch_pages is not None and store_batch_pages < 1):
            raise ValueError(
                f"a store call takes time and pages: got {store_timeout_s} s, {store_batch_pages} pages"
            )
        self._layout = Layout(specs, page_size, device=device, host=host)
        self._budgets = {
            Direction.STORE: ByteBudget(store_queue_bytes),
            Direction.FETCH: ByteBudget(prefetch_queue_bytes),
        }
        self._counters = TransferCounters(clock)
        self._board = JobBoard(self._on_finish)
        self._copier = PageCopier()
        self._streams = Streams.on(self._layout.device) if streams is None else streams
        self._copies = CopyJobs(
            self._layout, self._streams, self._copier, self._board, self._counters, self._open
        )
        self._make_store_io = partial(
            StoreIO,
            layout=self._layout,
            copier=self._copier,
            board=self._board,
            counters=self._counters,
            clock=clock,
            timeout_s=store_timeout_s,
            batch_pages=store_batch_pages,
            on_page=on_page,
            tracing=tracing,
        )
        self._open_timeout_s = open_timeout_s
        self._tracing = tracing
        self._store_io: StoreIO | None = None
        self._lock = threading.Lock()  # submit and close exclude each other
        self._is_closed = False
        if store is not None:
            try:
                self.open_store(store)
            except BaseException:  # an interrupt, too, must not leave threads behind
                self.close()
                raise

    # ---- work ------------------------------------------------------------------------------------------------

    def submit(self, action: Copy | Store | Fetch | Forget | Hint | Free) -> None:
        """Begin a transfer. Never blocks; a tier's fault ends in the completion.

        Slots of a shared L2 get their places here, and lose them with ``Free``; so actions come in the
        order in which the tree gave them, one at a time.

        *Caller guarantees*: source and target slots stay untouched until the completion was seen.
        *Raises*: ``ProtocolError`` when the action makes no sense here: unknown component or pool, slots
        outside it or named twice, no store, a ticket that is outstanding. Nothing was begun then.
        """
        match action:
            case Copy():
                self._copies.submit(action)
            case Store() | Fetch():
                self._submit_store(action)
            case Free():
                self._layout.let_go(action.component, action.tier, np.ascontiguousarray(action.slots))
            case Forget():
                self._need_store().submit(action)
            case Hint():
                if (store_io := self._store_io) is not None:  # else what it is about has gone with its store
                    store_io.submit(action)

    def submit_by_layer(self, copies: Sequence[Copy]) -> None:
        """Begin copies in one direction, layer after layer of all of them; see ``wait_layer``.

        Each has a completion of its own, as ever. *Raises*: as ``submit``; nothing was begun then.
        """
        self._copies.submit_by_layer(copies)

    def cancel(self, ticket: TicketId) -> bool:
        """Stop a fetch or a store that nobody needs any more.

        Not begun: it completes now as "cancelled". A running fetch completes after the batch under way
        with what has arrived. False for all else: copies and running stores end by themselves.
        """
        return self._board.cancel(ticket)

    @property
    def compute(self) -> Order:
        """Where the engine's own work on the device stands; to be told by who publishes and releases."""
        return self._streams.compute

    # ---- outcomes --------------------------------------------------------------------------------------------

    def completions(self) -> list[Completion]:
        """What has ended since the last call, in the order in which it ended."""
        return self._board.take_completions()

    def on_completion(self, call: Callable[[], None]) -> None:
        """Have ``call`` called after each completion, from any thread; it must not block."""
        self._board.on_completion = call

    def outstanding(self) -> tuple[TicketId, ...]:
        """Tickets that have not ended, oldest first."""
        return self._board.outstanding()

    def progress(self, ticket: TicketId) -> int:
        """Leading slots that hold verified bytes by now; 0 once the completion was taken."""
        return self._board.progress(ticket)

    def wait(self, tickets: Collection[TicketId], timeout_s: float) -> bool:
        """Block until all have ended, whether or not their completions were taken.

        A ticket never seen counts as ended. The limit is real time, whatever the clock.
        """
        return self._board.wait(tickets, timeout_s)

    def wait_layer(
        self, tickets: Collection[TicketId], layer: int, timeout_s: float, component: str | None = None
    ) -> bool:
        """Block until ``layer`` of each of these (of one component, if named) is in place, or its copy has ended (look at its completion).

        On CUDA the caller's current stream waits instead, and this returns at once. Copies that were not
        submitted by layer count when they have ended. False when real time is over.
        """
        return self._board.wait_layer(tickets, layer, timeout_s, component)

    async def await_(self, tickets: Collection[TicketId], timeout_s: float) -> bool:
        """``wait`` for a caller on any event loop, without blocking it."""
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def fire() -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody waits
                loop.call_soon_threadsafe(done.set)

        waiter = self._board.watch(tickets, fire)
        if waiter is None:
            return True
        try:
            await asyncio.wait_for(done.wait(), timeout_s)
        except TimeoutError:
            return not waiter.remaining
        finally:
            self._board.unwatch(waiter)
        return True

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is outstanding and no deletion is queued; False when time is over first."""
        deadline = time.monotonic() + timeout_s
        while True:
            if not self.wait(self.outstanding(), deadline - time.monotonic()):
                return False
            store_io = None if self._is_closed else self._store_io
            if store_io is not None and not store_io.settle(max(0.0, deadline - time.monotonic())):
                return False
            if not self.outstanding():
                return True

    def undeleted(self, timeout_s: float) -> int:
        """Wait, bounded, for the deletions that are queued; how many pages are still to be deleted then."""
        store_io = self._store_io
        return 0 if store_io is None else store_io.undeleted(timeout_s)

    # ---- asking the store ------------------------------------------------------------------------------------

    def exists(self, keys: Mapping[str, Sequence[PageKey]], timeout_s: float) -> Presence | None:
        """Ask the store for pages of all components in one round trip.

        Returns:
            One answer per key, by component; None, counted, when the store could not answer in time.
        """
        store_io = self._store_io
        return None if store_io is None else store_io.exists(keys, timeout_s)

    async def aexists(self, keys: Mapping[str, Sequence[PageKey]], timeout_s: float) -> Presence | None:
        """``exists`` for a caller on any event loop, without blocking it."""
        store_io = self._store_io
        return None if store_io is None else await store_io.aexists(keys, timeout_s)

    def run_store(
        self,
        call: Callable[[PageStore], Coroutine[Any, Any, T]],  # Any: what the store awaits
        timeout_s: float | None = None,
    ) -> T:
        """Run another call on the store's loop and wait: ``run_store(lambda store: store.clear())``.

        *Raises*: ``TierError`` when the store fails or takes longer (default: ``store_timeout_s``);
        ``ProtocolError`` when there is no store.
        """
        return self._need_store().call(call, timeout_s)

    # ---- another store ---------------------------------------------------------------------------------------

    def open_store(self, store: PageStore) -> None:
        """Begin to work with a store where there was none.

        *Raises*: as the constructor does; there is still no store then.
        """
        if self._store_io is not None:
            raise ProtocolError("there is a store already; exchange or close it")
        store_io = self._make_store_io(store)
        try:
            store_io.call(lambda each: each.open(), self._open_timeout_s)
        except BaseException:
            store_io.close()
            raise
        self._store_io = store_io

    def exchange_store(self, store: PageStore) -> None:
        """Have all calls from now on go to another store, which is open; those under way end where they are."""
        self._need_store().exchange(store)

    def close_store(self) -> None:
        """Work without a store; what is queued for it completes as "closed". Bounded."""
        with self._lock:
            store_io, self._store_io = self._store_io, None
        if store_io is not None:
            self._board.drop_queued((Direction.STORE, Direction.FETCH), Failure.CLOSED)
            store_io.close()

    # ---- inspect, close --------------------------------------------------------------------------------------

    def recent(self, direction: Direction, component: str | None = None) -> tuple[float, float]:
        """Bytes and seconds of the latest batches in one direction, of one component or of all.

        Older ones count less.
        """
        return self._counters.recent(direction, component)

    def queued_bytes(self, direction: Direction) -> int:
        """Bytes under way in one direction."""
        if direction in self._budgets:
            return self._budgets[direction].used_bytes
        return sum(job.num_bytes for job in self._board.jobs() if job.kind is direction)

    def stats(self) -> TransferStats:
        """A copy of the counters."""
        store_io = self._store_io
        return self._counters.snapshot(
            store_queue=_depth(self._budgets[Direction.STORE]),
            fetch_queue=_depth(self._budgets[Direction.FETCH]),
            outstanding=len(self._board.outstanding()),
            stuck_calls=0 if store_io is None else store_io.num_stuck,
        )

    def check_integrity(self) -> list[str]:
        """One sentence for each count that does not add up; empty when all is well."""
        findings = self._board.check_integrity()
        jobs = self._board.jobs()
        for kind, budget in self._budgets.items():
            admitted = [job for job in jobs if job.kind is kind and job.is_admitted]
            if (
                len(admitted) != budget.num_jobs
                or sum(job.num_bytes for job in admitted) != budget.used_bytes
            ):
                findings.append(
                    f"{kind} queue counts {budget.num_jobs} jobs and {budget.used_bytes} bytes, "
                    f"{len(admitted)} jobs are there"
                )
        return findings

    def clock_moved(self) -> None:
        """Let the time limits of store calls look at the clock; call it after advancing a manual one."""
        store_io = self._store_io
        if store_io is not None:
            store_io.wake()

    def close(self) -> None:
        """End everything: copies under way finish, all else completes as "closed". Bounded, idempotent.

        Call ``drain`` first to lose nothing. No thread of the engine is left afterwards.
        """
        with self._lock:
            self._is_closed = True
        self._board.drop_queued((Direction.STORE, Direction.FETCH), Failure.CLOSED)
        self._streams.close()
        if self._store_io is not None:
            self._store_io.close()
        for job in self._board.jobs():
            with job.writing:
                self._board.finish(job, job.progress, Failure.CLOSED)
        self._copier.close()

    # ---- inside ----------------------------------------------------------------------------------------------

    def _need_store(self) -> StoreIO:
        store_io = self._store_io
        if store_io is None:
            raise ProtocolError("there is no store")
        return store_io

    def _submit_store(self, action: Store | Fetch) -> None:
        store_io = self._need_store()
        view = self._layout.view(action.component, Tier.HOST)
        slots = np.ascontiguousarray(action.slots)
        view.check(slots)
        if len(action.keys) != action.num_slots:
            raise ProtocolError(f"{len(action.keys)} keys do not pair with {action.num_slots} slots")
        job: StoreJob | FetchJob
        if isinstance(action, Store):
            if len(action.parents) != action.num_slots:
                raise ProtocolError(
                    f"{len(action.parents)} parents do not pair with {action.num_slots} slots"
                )
            job = StoreJob(
                action.ticket,
                Direction.STORE,
                action.component,
                action.num_slots,
                view.slot_bytes,
                action=action,
                places=view.locate(slots),
            )
        else:
            job = FetchJob(
                action.ticket,
                Direction.FETCH,
                action.component,
                action.num_slots,
                view.slot_bytes,
                action=action,
                places=view.place(slots),
            )
        with self._lock:
            if not self._open(job):
                return
            if self._budgets[job.kind].admit(job):
                store_io.submit(job)
            else:
                self._board.finish(job, 0, Failure.QUEUE_FULL)

    def _open(self, job: Job) -> bool:
        """Make the ticket outstanding; False if it is done already (nothing to move, or closed)."""
        job.span = self._tracing.begin(
            _SPANS[job.kind], direction=job.kind.value, component=job.component, slots=job.num_slots
        )
        self._board.open(job)
        if job.num_slots == 0:
            self._board.finish(job, 0, None)
        elif self._is_closed:
            self._board.finish(job, 0, Failure.CLOSED)
        return self._board.is_open(job)

    def _on_finish(self, job: Job, done_slots: int, error: Failure | None) -> None:
        if job.is_admitted:
            self._budgets[job.kind].give_back(job)
        self._counters.ended(job.kind, job.component, done_slots, done_slots * job.slot_bytes, error)
        job.span.note(done_slots=done_slots, bytes=done_slots * job.slot_bytes)
        job.span.end(None if error is None else error.value)


def _depth(budget: ByteBudget) -> QueueDepth:
    return QueueDepth(budget.num_jobs, budget.used_bytes, budget.limit_bytes)
