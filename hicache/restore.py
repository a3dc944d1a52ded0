"""From what a request found to what it reuses: fetch from L3, load to L1, settle for what arrived.

What has to be waited for is yielded, so that one text serves callers that block and callers on an event loop
(``complete``, ``acomplete``).
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Generator, Iterator

from hicache.errors import ProtocolError
from hicache.explain import LossCause, fetch_failure
from hicache.hold import Hold
from hicache.radix.interface import PlanStep, Settled
from hicache.runtime import Runtime
from hicache.types import TicketId, Tier

Waits = Generator[tuple[Collection[TicketId], float], bool | None, None]
"""Tickets and the most seconds to wait for them; it is told whether all have ended in time."""

_FETCH_ROUNDS = 8
"""How often a fetch begins anew because pages proved missing, before what has arrived is loaded."""
_LOAD_TRIES = 8
"""How often copies up may fail before the load goes on with what it has."""
_LOAD_ROUNDS = 10_000
"""A load is bounded by time; this many rounds mean that its clock stands still."""


def complete(runtime: Runtime, waits: Waits) -> None:
    """Run to the end, blocking where something is waited for."""
    in_time: bool | None = None
    while True:
        try:
            tickets, limit_s = waits.send(in_time)
        except StopIteration:
            return
        in_time = runtime.have_ended(tickets, limit_s)


async def acomplete(runtime: Runtime, waits: Waits) -> None:
    """``complete`` without blocking the running loop."""
    in_time: bool | None = None
    while True:
        try:
            tickets, limit_s = waits.send(in_time)
        except StopIteration:
            return
        in_time = await runtime.have_ended_async(tickets, limit_s)


class Restore:
    """What a request reuses, exact once it has settled.

    *Thread*: one at a time.
    """

    def __init__(self, hold: Hold) -> None:
        self._hold = hold
        self._runtime = hold.runtime
        self.found = hold.matched.found.boundary
        self.loss: tuple[LossCause, str] | None = None
        """Why less is reused than was found."""
        self._fetch_began_s = self._runtime.clock.now_s()
        self._fetch_tickets: tuple[TicketId, ...] = ()
        self._fetch_rounds = 0
        self._aim = self.found  # less, if the rest is computed sooner than loaded
        self._missing_pages: int | None = None
        self._load_tickets: tuple[TicketId, ...] = ()
        self._landing: tuple[TicketId, ...] = ()
        self._has_lost_load = False
        self.settled: Settled | None = None
        if self.found:
            self._lower_if_sooner()
            self._begin_fetch()

    @property
    def reused(self) -> int:
        """Tokens that need not be computed."""
        return self._aim if self.settled is None else self.settled.boundary

    def plan(self) -> tuple[PlanStep, ...]:
        """What is still to be moved. Raises ``ProtocolError`` after a reset, which made the lease void."""
        with self._hold.booked() as core:
            return core.plan(self._hold.id)

    def _blame(self, cause: LossCause, detail: str = "") -> None:
        """What may cost tokens; the first trouble is the root of those that follow."""
        if self.loss is None:
            self.loss = cause, detail

    def load(self, *, by_layer: bool) -> Waits:
        """Run the restore plan; ``by_layer`` without waiting for the last step, from L2 to L1."""
        runtime = self._runtime
        if self.settled is not None:
            self.plan()
            if not by_layer:
                yield from self._land()
                self._has_lost_load = False  # this call's answer says it
            return
        if not runtime.ranks.is_alone and self.plan():
            runtime.step("load")  # the time of the match may be long ago
        goes_on = True
        while goes_on:
            while awaited := self._fetch_awaited():
                self._end_fetch(in_time=(yield awaited, self._fetch_left_s()))
            for left_s in self._load_rounds():
                tickets = self._begin_load(by_layer=by_layer)
                if not tickets or not runtime.waited(in_time=(yield tickets, left_s)):
                    break
            if by_layer and any(step.source == Tier.STORE for step in self.plan()):
                # L2 gets room for the rest only when these have ended.
                runtime.waited(in_time=(yield self._load_tickets, runtime.wait_limit_s))
            goes_on = self._fetch_on()
        yield from self.settle(arriving=by_layer)

    def end(self) -> None:
        """The request has ended; it waits for no fetch any more (lock held)."""
        self._end_fetch(in_time=False)

    # ---- L3 to L2 ----------------------------------------------------------------------------
    def _lower_if_sooner(self) -> None:
        """Leave what is computed sooner than loaded."""
        with self._hold.booked():
            lowered = self._runtime.lower(self._hold.id, len(self._hold.prompt))
        if lowered is not None:
            self._blame(LossCause.RECOMPUTE_SOONER)
            self._aim = lowered

    def _begin_fetch(self) -> None:
        with self._hold.booked() as core:
            started = core.fetch(self._hold.id)
            self._runtime.run_fetch(started)
            self._fetch_tickets = started.tickets
            self._runtime.join_fetch(started.tickets)

    def _fetch_left_s(self) -> float:
        """Seconds of the prefetch's time limit that are left."""
        elapsed_s = self._runtime.clock.now_s() - self._fetch_began_s
        num_tokens = self._hold.matched.found.source.store
        return max(0.0, self._runtime.prefetch.limit_s(num_tokens) - elapsed_s)

    def _fetch_awaited(self) -> tuple[TicketId, ...]:
        """What to wait for before the fetch is looked at again; nothing once it is over."""
        ahead = self._runtime.ahead_of_fetch(self._fetch_tickets)
        if not ahead:  # waiting for room in the queue is bounded by the time limit alone
            self._fetch_rounds += 1
        if self._fetch_rounds > _FETCH_ROUNDS:
            return ()
        return self._fetch_tickets + ahead

    def _end_fetch(self, *, in_time: bool | None) -> None:
        """Stop waiting for the fetch; begin another one where pages proved missing."""
        runtime = self._runtime
        with runtime.lock:
            runtime.pump()
            tickets, self._fetch_tickets = self._fetch_tickets, ()
            for ticket in tickets:
                failure = runtime.failure_of(ticket)
                if failure is not None:
                    self._blame(fetch_failure(failure), failure)
            if not in_time:
                self._blame(LossCause.STORE_TIMEOUT, f"prefetch mode {runtime.prefetch.mode}")
            runtime.leave_fetch(tickets)
            if in_time:
                self._begin_fetch()

    def _fetch_on(self) -> bool:
        """Begin to fetch what L2 had no room for before the load.

        False if that is all, time is up, or the last fetch and load brought nothing.
        """
        if not any(of.store for of in self._hold.matched.found.by_component.values()):
            return False
        missing = sum(step.last_page - step.first_page for step in self.plan())
        brought = self._missing_pages is None or missing < self._missing_pages
        self._missing_pages = missing
        if not missing or not brought or self._fetch_left_s() <= 0:
            return False
        self._fetch_rounds = 0
        self._begin_fetch()
        return bool(self._fetch_tickets)

    # ---- L2 to L1 ----------------------------------------------------------------------------
    def _load_rounds(self) -> Iterator[float]:
        """The seconds left for each round of copying up: what finds no room waits for what makes it."""
        runtime = self._runtime
        deadline_s = runtime.clock.now_s() + runtime.wait_limit_s
        failures = runtime.load_failures()
        for _ in range(_LOAD_ROUNDS):
            left_s = deadline_s - runtime.clock.now_s()
            if left_s <= 0 or runtime.load_failures() - failures >= _LOAD_TRIES:
                return
            yield left_s

    def _begin_load(self, *, by_layer: bool = False) -> tuple[TicketId, ...]:
        """Begin what can be begun; what to wait for before the next round."""
        runtime = self._runtime
        with self._hold.booked() as core:
            started = core.load(self._hold.id)
            if by_layer:
                runtime.run_by_layer(started.actions)
            else:
                runtime.run(started.actions)
            self._load_tickets += started.tickets
            landing = frozenset(runtime.loading(started.tickets)) if by_layer else frozenset()
            return tuple(ticket for ticket in started.tickets if ticket not in landing)

    # ---- what is reused ----------------------------------------------------------------------
    def settle(self, *, arriving: bool = False) -> Waits:
        """Settle for what L1 has (or gets, ``arriving``), and have the states that are reused."""
        runtime = self._runtime
        tickets = self._settle(arriving=arriving)
        if runtime.waited(in_time=(yield tickets, runtime.wait_limit_s)):
            self._settle()  # a claim that failed has lowered the boundary
            self._hold.computes_from(self.reused)
        else:
            self._begin_anew("a state's copy was too slow")

    def _settle(self, *, arriving: bool = False) -> tuple[TicketId, ...]:
        with self._hold.booked() as core:
            settled = core.settle(self._hold.id, arriving=arriving)
            self._runtime.run(settled.actions)
            if arriving and settled.boundary:
                # Pages may come with other requests' loads, too. Those that began before ours end before it.
                self._landing = self._runtime.loading(self._runtime.copies())
            if settled.boundary < self.reused:
                self._runtime.faults["shortened"] += 1
                failures = [self._runtime.failure_of(ticket) for ticket in self._load_tickets]
                if any(failures):
                    self._blame(LossCause.COPY_FAILED)
                self._blame(LossCause.NO_ROOM)
            self.settled = settled
            return settled.tickets

    def _begin_anew(self, why: str) -> None:
        """Reuse nothing, and leave to the copies under way what they write."""
        with self._hold.booked() as core:
            self._blame(LossCause.COPY_FAILED, why)
            self._runtime.faults["shortened"] += 1
            self._hold.begin_anew(core)
            self._aim, self.settled, self._landing = 0, None, ()
            self._settle()
        self._hold.computes_from(self.reused)

    # ---- layer by layer ----------------------------------------------------------------------
    def wait_layer(self, layer: int, component: str | None) -> bool:
        """See ``Lease.wait_layer``."""
        runtime = self._runtime
        num_layers = runtime.num_layers(component)
        try:
            number = -1 if isinstance(layer, bool) else operator.index(layer)
        except TypeError:
            number = -1
        if not 0 <= number < num_layers:
            raise ValueError(f"layer {layer!r:.80} is no whole number within 0 to {num_layers - 1}")
        if self.settled is None and self.reused:
            raise ProtocolError(
                "wait_layer: what was found has not been loaded; call load_by_layer or load first"
            )
        if self._landing:
            wait_layer = runtime.transfers.wait_layer
            with self._hold.waiting():
                in_time = wait_layer(self._landing, number, runtime.wait_limit_s, component)
            self._note_landing(in_time=in_time)
        has_lost_load, self._has_lost_load = self._has_lost_load, False
        return not has_lost_load

    def has_landed(self) -> bool:
        """Wait, bounded, for the whole load; False if it fell short and ``wait_layer`` has not said so yet."""
        complete(self._runtime, self._land())
        return not self._has_lost_load

    def _land(self) -> Waits:
        if self._landing:
            with self._hold.waiting():
                in_time = yield self._landing, self._runtime.wait_limit_s
            self._note_landing(in_time=in_time)

    def _note_landing(self, *, in_time: bool | None) -> None:
        """See what has become of a load by layer."""
        runtime, promised = self._runtime, self.reused
        with self._hold.booked():
            landing, self._landing = self._landing, runtime.loading(self._landing)
            if not in_time:
                runtime.faults["wait_limit"] += 1
                self._begin_anew("a page's copy was too slow")
            elif self._landing != landing:
                runtime.transfers.compute.ended()  # if the load fell short, what was reserved goes
                self._settle()
            if self.reused < promised:
                self._landing, self._has_lost_load = (), True
