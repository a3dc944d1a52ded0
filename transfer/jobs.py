"""Tickets from submission to completion, and who waits for them.

::

                submit                  begin                   finish
    (unknown) ----------> QUEUED ------------------> RUNNING ----------> DONE, drained by completions()
                            |   cancel, queue full, close                  ^
                            +----------------------------------------------+

A ticket is *outstanding* until it is done; whoever waits for one that is not outstanding is through.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto

from hicache.errors import ProtocolError
from hicache.radix.actions import Fetch, Slots, Store
from hicache.tracing import NO_SPAN, Span
from hicache.transfer.streams import Fence
from hicache.types import TicketId


class Direction(StrEnum):
    """What a transfer does; the key of all counters."""

    TO_HOST = "to_host"
    TO_DEVICE = "to_device"
    LOCAL = "local"
    STORE = "store"
    FETCH = "fetch"


class Failure(StrEnum):
    """Why a transfer moved less than it was asked to."""

    QUEUE_FULL = "queue full"
    CANCELLED = "cancelled"
    CLOSED = "closed"
    COPY = "copy"  # a copy between L1 and L2 raised
    MISS = "miss"  # the store had no verified page
    REFUSED = "refused"  # the store did not take a page
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    CORRUPT = "corrupt"
    RAISED = "raised"  # the store raised what no store should
    STAMP = "stamp"  # a payload is not what its key says


@dataclass(frozen=True, slots=True)
class Completion:
    """How a ticket ended.

    Args:
        num_slots: slots asked for.
        done_slots: leading slots whose bytes are in place (copy, fetch) or durable (store).
        error: a ``Failure`` when ``done_slots`` falls short; None on success, and for a fetch whose
            next page the store does not have: that is an answer, not a fault.
        num_bytes: bytes of the ``done_slots``.
    """

    ticket: TicketId
    num_slots: int
    done_slots: int
    error: str | None
    num_bytes: int
    kind: Direction

    @property
    def is_complete(self) -> bool:
        return self.done_slots == self.num_slots


class JobState(Enum):
    """How far a job is; it never goes back."""

    QUEUED = auto()
    RUNNING = auto()
    DONE = auto()


@dataclass(slots=True, eq=False)
class Job:
    """One ticket under way. All fields but the guarded ones are fixed; ``JobBoard`` moves the state.

    Args:
        slot_bytes: bytes of one slot of the component.
        progress: leading slots in place so far.
        num_layers: layers that arrive one by one; 1 if the copy comes as a whole.
        layers_done: leading layers in place so far, of all slots.
        fences: by layer, what device streams can wait for; empty where only the completion tells.
        is_admitted: its bytes count in its queue's budget.
        is_cancelled: stop at the next chance.
        writing: held while bytes are written to the target; who ends the job from outside takes it,
            so that no byte moves after the completion.
        span: of the whole ticket, from submission to completion.
    """

    ticket: TicketId
    kind: Direction
    component: str
    num_slots: int
    slot_bytes: int
    state: JobState = JobState.QUEUED
    progress: int = 0
    is_admitted: bool = False
    is_cancelled: bool = False
    writing: threading.Lock = field(default_factory=threading.Lock)
    num_layers: int = 1
    layers_done: int = 0
    fences: dict[int, Fence] = field(default_factory=dict)
    span: Span = NO_SPAN

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.slot_bytes


@dataclass(slots=True, eq=False)
class StoreJob(Job):
    """A job with the pages to write, and where their slots lie."""

    action: Store = field(kw_only=True)
    places: Slots = field(kw_only=True)


@dataclass(slots=True, eq=False)
class FetchJob(Job):
    """A job with the pages to read, and where their slots lie."""

    action: Fetch = field(kw_only=True)
    places: Slots = field(kw_only=True)


class ByteBudget:
    """How many bytes of a queue's jobs may be under way: admitted at submission, given back at completion.

    *Thread*: any; never blocks.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._used_bytes = 0
        self._num_jobs = 0

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def num_jobs(self) -> int:
        return self._num_jobs

    def admit(self, job: Job) -> bool:
        """Count the job in if it fits; False, with nothing changed, if it does not."""
        with self._lock:
            if self._used_bytes + job.num_bytes > self.limit_bytes:
                return False
            self._used_bytes += job.num_bytes
            self._num_jobs += 1
            job.is_admitted = True
            return True

    def give_back(self, job: Job) -> None:
        """Count an admitted job out."""
        with self._lock:
            assert job.is_admitted, "a job is counted out once"
            job.is_admitted = False
            self._used_bytes -= job.num_bytes
            self._num_jobs -= 1


class Waiter:
    """Tickets somebody waits for, and what to call when the last one is done."""

    __slots__ = ("fire", "remaining")

    def __init__(self, remaining: set[TicketId], fire: Callable[[], None]) -> None:
        self.remaining = remaining
        self.fire = fire


class JobBoard:
    """Every ticket, what became of it, and who waits.

    Args:
        on_finish: called once for each job with its outcome, before anybody can see the completion.
            Must not call the board.

    *Thread*: any; no method blocks but ``wait``.
    """

    def __init__(self, on_finish: Callable[[Job, int, Failure | None], None]) -> None:
        self._on_finish = on_finish
        self._lock = threading.Lock()
        self._layer_came = threading.Condition(self._lock)
        self._jobs: dict[TicketId, Job] = {}
        self._completions: deque[Completion] = deque()
        self._waiters: dict[TicketId, list[Waiter]] = {}
        self._num_opened = 0
        self._num_finished = 0
        self.on_completion: Callable[[], None] = lambda: None
        """Called after each completion, from the thread that brought it about; must not block."""

    def open(self, job: Job) -> None:
        """Make a ticket outstanding. Raises ``ProtocolError`` if it is already."""
        with self._lock:
            if job.ticket in self._jobs:
                raise ProtocolError(f"ticket {job.ticket} was submitted and is not done yet")
            self._jobs[job.ticket] = job
            self._num_opened += 1

    def begin(self, job: Job) -> bool:
        """Take a queued job to work on it; False when it was dropped meanwhile."""
        with self._lock:
            if job.state is not JobState.QUEUED:
                return False
            job.state = JobState.RUNNING
            return True

    def is_open(self, job: Job) -> bool:
        """Whether the job is still to be completed."""
        return job.state is not JobState.DONE

    def arrived(self, job: Job, num_slots: int) -> None:
        """Note that the first ``num_slots`` slots hold their bytes now."""
        with self._lock:
            job.progress = num_slots

    def layer_arrived(self, job: Job) -> None:
        """Note that one more layer of all slots holds its bytes now."""
        with self._layer_came:
            job.layers_done += 1
            self._layer_came.notify_all()

    def cancel(self, ticket: TicketId) -> bool:
        """Stop a fetch or store as far as it can be stopped.

        What is queued completes at once as cancelled; a running fetch is told to stop after its
        batch. False when there is nothing to stop: done, running store, copy.
        """
        with self._lock:
            job = self._jobs.get(ticket)
            if job is None or job.kind not in (Direction.STORE, Direction.FETCH):
                return False
            if job.state is JobState.RUNNING:
                job.is_cancelled = job.kind is Direction.FETCH
                return job.is_cancelled
            ready = self._complete(job, 0, Failure.CANCELLED)
        self._tell(ready)
        return True

    def finish(self, job: Job, done_slots: int, error: Failure | None) -> bool:
        """Complete a ticket and release who waits for it.

        Returns:
            False when the ticket was completed before (the first completion stands).
        """
        with self._lock:
            if job.state is JobState.DONE:
                return False
            ready = self._complete(job, done_slots, error)
        self._tell(ready)
        return True

    def drop_queued(self, kinds: Collection[Direction], error: Failure) -> None:
        """Complete all jobs of these kinds that nobody began."""
        with self._lock:
            queued = [j for j in self._jobs.values() if j.kind in kinds and j.state is JobState.QUEUED]
            ready = [waiter for job in queued for waiter in self._complete(job, 0, error)]
        self._tell(ready)

    def take_completions(self) -> list[Completion]:
        """All completions not taken yet, in the order in which they happened."""
        with self._lock:
            taken = list(self._completions)
            self._completions.clear()
            return taken

    def outstanding(self) -> tuple[TicketId, ...]:
        """Tickets not completed yet, oldest first."""
        with self._lock:
            return tuple(self._jobs)

    def jobs(self) -> tuple[Job, ...]:
        """Jobs not completed yet, oldest first."""
        with self._lock:
            return tuple(self._jobs.values())

    def progress(self, ticket: TicketId) -> int:
        """Leading slots in place; of a ticket that is done, until its completion is taken."""
        with self._lock:
            job = self._jobs.get(ticket)
            if job is not None:
                return job.progress
            done = (c.done_slots for c in self._completions if c.ticket == ticket)
            return next(done, 0)

    # ---- waiting ---------------------------------------------------------------------------------------------

    def watch(self, tickets: Collection[TicketId], fire: Callable[[], None]) -> Waiter | None:
        """Have ``fire`` called once, from any thread, when all of these are done; None if they are."""
        with self._lock:
            waiter = Waiter({ticket for ticket in tickets if ticket in self._jobs}, fire)
            for ticket in waiter.remaining:
                self._waiters.setdefault(ticket, []).append(waiter)
            return waiter if waiter.remaining else None

    def unwatch(self, waiter: Waiter) -> None:
        """Forget a waiter that gave up."""
        with self._lock:
            for ticket in waiter.remaining:
                others = [other for other in self._waiters.get(ticket, ()) if other is not waiter]
                if others:
                    self._waiters[ticket] = others
                else:
                    self._waiters.pop(ticket, None)
            waiter.remaining = set()

    def wait(self, tickets: Collection[TicketId], timeout_s: float) -> bool:
        """Block until all of these are done (True) or real time is over (False)."""
        done = threading.Event()
        waiter = self.watch(tickets, done.set)
        if waiter is None or done.wait(max(0.0, timeout_s)):
            return True
        self.unwatch(waiter)
        return done.is_set()

    def wait_layer(
        self, tickets: Collection[TicketId], layer: int, timeout_s: float, component: str | None = None
    ) -> bool:
        """Block until each of these has ended or has ``layer`` in place (True), or real time is over (False).

        Only those of one component, if it is named. A copy with fewer layers has to have all of them; on a device, what follows on the caller's stream
        waits instead of the caller.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._layer_came:
            found = (self._jobs.get(ticket) for ticket in tickets)
            jobs = [job for job in found if job is not None and component in (None, job.component)]
        waited: list[Job] = []
        for job in jobs:
            fence = job.fences.get(min(layer, job.num_layers - 1))
            if fence is None or not fence.pass_on(max(0.0, deadline_s - time.monotonic())):
                waited.append(job)

        def are_there() -> bool:
            return all(
                job.state is JobState.DONE or job.layers_done > min(layer, job.num_layers - 1)
                for job in waited
            )

        with self._layer_came:
            return self._layer_came.wait_for(are_there, max(0.0, deadline_s - time.monotonic()))

    def check_integrity(self) -> list[str]:
        """One sentence for each count that does not add up."""
        with self._lock:
            findings = []
            if self._num_opened != self._num_finished + len(self._jobs):
                findings.append(
                    f"{self._num_opened} tickets opened, {self._num_finished} finished, "
                    f"{len(self._jobs)} outstanding"
                )
            strays = self._waiters.keys() - self._jobs.keys()
            if strays:
                findings.append(f"somebody waits for tickets that are done: {sorted(strays)}")
            return findings

    def _complete(self, job: Job, done_slots: int, error: Failure | None) -> list[Waiter]:
        assert (done_slots == job.num_slots) == (error is None), "a job falls short for a reason"
        self._on_finish(job, done_slots, error)
        job.state = JobState.DONE
        job.progress = done_slots
        del self._jobs[job.ticket]
        self._layer_came.notify_all()
        self._num_finished += 1
        shown = None if error is Failure.MISS else error
        num_bytes = done_slots * job.slot_bytes
        self._completions.append(
            Completion(job.ticket, job.num_slots, done_slots, shown, num_bytes, job.kind)
        )
        ready = []
        for waiter in self._waiters.pop(job.ticket, ()):
            waiter.remaining.discard(job.ticket)
            if not waiter.remaining:
                ready.append(waiter)
        return ready

    def _tell(self, waiters: list[Waiter]) -> None:
        for waiter in waiters:
            waiter.fire()
        self.on_completion()
