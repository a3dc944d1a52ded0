"""What the cache and its leases share: the tree, the transfers, and the one lock.

The lock is held while the tree decides and while finished transfers are booked, never while something is
waited for. Methods that say "lock held" are called with it; the others take it for as long as they need.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence

from hicache.clock import Clock
from hicache.errors import ProtocolError
from hicache.events import ResidencyEvent
from hicache.explain import Explainer, Explanation
from hicache.policy.backoff import Backoff
from hicache.policy.prefetch import PrefetchPolicy
from hicache.policy.recompute import Bandwidth, LoadOrRecompute, Move, Option
from hicache.policy.watermarks import Watermark
from hicache.radix.actions import Action, Copy, Fetch, Free, Store, Ticketed
from hicache.radix.interface import PlanStep, Started, TreeCore
from hicache.sessions import Sessions
from hicache.stats import RequestCounts
from hicache.transfer.engine import TransferEngine
from hicache.transfer.jobs import Completion, Direction, Failure
from hicache.types import LeaseId, ReuseRule, TicketId, Tier

OnEvents = Callable[[Sequence[ResidencyEvent]], None]
MAX_FAILURES = 1024
"""Failed transfers whose reason is remembered for the requests that waited for them."""
POOLED = (Tier.DEVICE, Tier.HOST)
_NOT_IN_STORE = frozenset({Failure.MISS, Failure.CORRUPT, Failure.STAMP})
"""Faults of a fetch that prove a page not to be there; the others say nothing of it."""


class Runtime:
    """The moving parts of one cache.

    Args:
        core: the tree.
        transfers: moves the bytes.
        sessions, clock, prefetch, recompute, watermarks: knowledge and policy.
        wait_limit_s: bound of every wait for a copy.
        store_timeout_s: bound of one batch of the store.
        explainer: says why requests missed; it is told of every change in residency.
    """

    def __init__(
        self,
        *,
        core: TreeCore,
        transfers: TransferEngine,
        sessions: Sessions,
        clock: Clock,
        prefetch: PrefetchPolicy,
        recompute: LoadOrRecompute,
        watermarks: dict[Tier, Watermark],
        wait_limit_s: float,
        store_timeout_s: float,
        explainer: Explainer | None = None,
    ) -> None:
        self.core = core
        self.transfers = transfers
        self.sessions = sessions
        self.clock = clock
        self.prefetch = prefetch
        self.recompute = recompute
        self.wait_limit_s = wait_limit_s
        self.store_timeout_s = store_timeout_s
        self.lock = threading.RLock()
        self.closed = False
        self.specs = core.config.components
        self.page_size = core.config.page_size
        self.mark_spacing = core.config.mark_spacing
        self._paths = frozenset(spec.name for spec in self.specs if spec.rule == ReuseRule.PATH)
        self.is_hybrid = any(spec.rule != ReuseRule.PATH for spec in self.specs)
        self.num_layers = max(spec.num_layers for spec in self.specs)
        self.requests = RequestCounts(self.specs)
        self.faults: Counter[str] = Counter()
        self.lost_tokens: Counter[str] = Counter()
        self.explainer = explainer
        self._listeners: list[OnEvents] = []
        if explainer is not None:
            self.listen(explainer.ledger.record)
        self.num_recomputed = 0  # tokens that were found and computed again all the same
        self._slot_bytes = {spec.name: spec.slot_bytes(self.page_size) for spec in self.specs}
        self._failures: OrderedDict[TicketId, str] = OrderedDict()
        self.num_audits = 0
        self.num_audit_findings = 0
        self._watermarks = watermarks
        self._doomed: set[TicketId] = set()
        self._running: dict[TicketId, Ticketed] = {}
        self._fetch_waiters: Counter[TicketId] = Counter()
        self._refused_fetches: set[TicketId] = set()
        # A window or state is worth nothing before its path is there, so its fetch is booked after the path's.
        self._paths_of_fetch: dict[TicketId, tuple[TicketId, ...]] = {}
        self._early: list[Completion] = []
        self._store_backoff = Backoff()

    def check_open(self) -> None:
        if self.closed:
            raise ProtocolError("the cache is closed")

    def rate(self) -> None:
        """Tell the tree what sessions are worth by now (lock held)."""
        self.sessions.tell(self.core)

    # ---- transfers ---------------------------------------------------------------------------
    def run(self, actions: Iterable[Action]) -> None:
        """Hand actions to the transfer engine (lock held).

        Frees are booked by the tree already: on a device of our own nobody else has to hear of them. In L2
        they may give up places, too.
        """
        for action in actions:
            if isinstance(action, Copy | Fetch | Store):
                self._running[action.ticket] = action
            if not isinstance(action, Free) or action.tier == Tier.HOST:
                self.transfers.submit(action)
        self.tell()

    def listen(self, listener: OnEvents) -> None:
        """Have every change in residency told, in order, with the lock held; it must neither block nor raise.

        *Caller guarantees*: the core keeps events (``emit_events``).
        """
        self._listeners.append(listener)

    def tell(self) -> None:
        """Tell the listeners what changed since the last time (lock held)."""
        if not self._listeners:
            return
        events = self.core.drain_events()
        if events:
            for listener in self._listeners:
                listener(events)

    def failure_of(self, ticket: TicketId) -> str | None:
        """Why a transfer fell short, if it did so lately (lock held)."""
        return self._failures.get(ticket)

    def note_lost(self, explanation: Explanation) -> None:
        """Count what a request that ends did not get (lock held)."""
        for cause, num_tokens in explanation.lost_tokens.items():
            self.lost_tokens[cause.value] += num_tokens

    def run_fetch(self, started: Started) -> None:
        """Hand what a lease needs from L3 to the transfer engine (lock held)."""
        self.run(started.actions)
        fetches = {ticket: self._running.get(ticket) for ticket in started.tickets}
        paths = tuple(
            ticket
            for ticket, action in fetches.items()
            if isinstance(action, Fetch) and action.component in self._paths
        )
        for action in started.actions:
            if isinstance(action, Fetch) and action.component not in self._paths:
                self._paths_of_fetch[action.ticket] = paths

    def pump(self) -> None:
        """Book what has ended, and start what that allows (lock held)."""
        ended, self._early = [*self._early, *self.transfers.completions()], []
        ended.sort(key=lambda completion: completion.ticket in self._paths_of_fetch)
        for completion in ended:
            paths = self._paths_of_fetch.get(completion.ticket, ())
            if any(path in self._running for path in paths):
                self._early.append(completion)
            else:
                self._paths_of_fetch.pop(completion.ticket, None)
                self.run(self._book(completion))
        if not self.closed and self._store_backoff.take(self.clock.now_s()):
            self.faults["store_retries"] += 1
            self.run(self.core.retry_stores().actions)

    def tend(self) -> None:
        """What an idle engine leaves undone: book, store on, try again, demote ahead."""
        with self.lock:
            if not self.closed:
                self.pump()
                self.demote_ahead()

    def rule(self, prefetch: PrefetchPolicy, watermarks: dict[Tier, Watermark]) -> None:
        """Go on under other rules (lock held)."""
        self.prefetch, self._watermarks = prefetch, watermarks

    def store_tickets(self) -> tuple[TicketId, ...]:
        """Transfers to and from L3 under way, oldest first (lock held)."""
        return tuple(ticket for ticket, action in self._running.items() if isinstance(action, Store | Fetch))

    @property
    def retry_due_s(self) -> float | None:
        """When stores that failed are tried again, by the clock; None if none failed."""
        return self._store_backoff.due_s

    def copies(self) -> tuple[TicketId, ...]:
        """Copies under way, oldest first (lock held): each pins slots of L1 until it has ended."""
        return tuple(ticket for ticket, action in self._running.items() if isinstance(action, Copy))

    def _book(self, done: Completion) -> tuple[Action, ...]:
        self._running.pop(done.ticket, None)
        doomed = done.ticket in self._doomed
        self._doomed.discard(done.ticket)
        if done.is_complete and not doomed:
            if done.kind is Direction.STORE:
                self._store_backoff.succeeded()
            return self.core.commit(done.ticket)
        cause = done.error or ("late" if doomed else Failure.MISS)
        self.faults[f"{done.kind}_{cause}".replace(" ", "_")] += 1
        self._failures[done.ticket] = cause
        if len(self._failures) > MAX_FAILURES:
            self._failures.popitem(last=False)
        if done.kind is Direction.STORE:
            self._store_backoff.failed(self.clock.now_s())
        if cause == Failure.QUEUE_FULL and done.ticket in self._fetch_waiters:
            self._refused_fetches.add(done.ticket)
        arrived = 0 if doomed else done.done_slots
        return self.core.abort(done.ticket, arrived, missing=cause in _NOT_IN_STORE)

    def doom(self, tickets: Collection[TicketId]) -> None:
        """These copies read what is being overwritten: whatever they report, they have failed."""
        with self.lock:
            running = set(tickets) & set(self.core.in_flight())
            self._doomed.update(running)

    def wait(self, tickets: Collection[TicketId], limit_s: float | None = None) -> bool:
        """Wait, bounded, and book. True if all ended in time."""
        limit_s = self.wait_limit_s if limit_s is None else limit_s
        return self._waited(not tickets or self.transfers.wait(tickets, limit_s))

    async def wait_async(self, tickets: Collection[TicketId], limit_s: float | None = None) -> bool:
        """``wait`` without blocking the running loop."""
        limit_s = self.wait_limit_s if limit_s is None else limit_s
        return self._waited(not tickets or await self.transfers.await_(tickets, limit_s))

    def _waited(self, in_time: bool) -> bool:
        with self.lock:
            self.pump()
            if not in_time:
                self.faults["wait_limit"] += 1
        return in_time

    def drain(self) -> bool:
        """Wait, bounded, until no transfer is under way. True if that was reached."""
        while True:
            with self.lock:
                self.pump()
                running = self.core.in_flight()
            if not running:
                return True
            # Each round ends with at least one ticket booked, or with a wait that was too long.
            if not self.transfers.wait(running, self.wait_limit_s):
                return False

    def store_failures(self) -> int:
        """Store transfers that have failed so far (lock held)."""
        return sum(count for cause, count in self.faults.items() if cause.startswith("store_"))

    # ---- load or recompute -------------------------------------------------------------------
    def lower(self, lease: LeaseId, num_tokens: int) -> int | None:
        """Have a lease go for the boundary that is ready first (lock held); None if that is the one it has.

        Args:
            num_tokens: of its prompt.
        """
        if self.recompute.per_token_s is None:
            return None
        choices = self.core.choices(lease)
        if len(choices) < 2:
            return None
        options = [Option(choice.boundary, self._load_s(choice.steps)) for choice in choices]
        chosen = self.recompute.choose(options, num_tokens)
        if not chosen:
            return None
        boundary = choices[chosen].boundary
        self.core.lower(lease, boundary)
        self.faults["recompute_sooner"] += 1
        self.num_recomputed += choices[0].boundary - boundary
        return boundary

    def _load_s(self, steps: Sequence[PlanStep]) -> float:
        """Seconds until all of this is in L1: what L3 has comes through L2."""
        num_bytes: Counter[tuple[Direction, str]] = Counter()
        for step in steps:
            step_bytes = step.num_slots * self._slot_bytes[step.component]
            num_bytes[Direction.TO_DEVICE, step.component] += step_bytes
            if step.source == Tier.STORE:
                num_bytes[Direction.FETCH, step.component] += step_bytes
        ahead = {direction: self.transfers.queued_bytes(direction) for direction, _ in num_bytes}
        seconds = 0.0
        for (direction, component), wanted in num_bytes.items():
            bandwidth = Bandwidth(*self.transfers.recent(direction, component))
            if not bandwidth.is_known:
                bandwidth = Bandwidth(*self.transfers.recent(direction))
            seconds += Move(wanted, ahead.pop(direction, 0), bandwidth).time_s
        return seconds

    def load_failures(self) -> int:
        """Copies up that have failed so far."""
        with self.lock:
            return sum(count for cause, count in self.faults.items() if cause.startswith("to_device_"))

    # ---- prefetches that several leases wait for ----------------------------------------------
    def join_fetch(self, tickets: Collection[TicketId]) -> None:
        """A lease waits for these (lock held)."""
        self._fetch_waiters.update(tickets)

    def ahead_of_fetch(self, tickets: Collection[TicketId]) -> tuple[TicketId, ...]:
        """If the queue was too full for one of these: the oldest fetch in it, whose end makes room."""
        with self.lock:
            self.pump()
            if self._refused_fetches.isdisjoint(tickets):
                return ()
            queued = (ticket for ticket, action in self._running.items() if isinstance(action, Fetch))
            return tuple(queued)[:1]

    def leave_fetch(self, tickets: Collection[TicketId]) -> None:
        """A lease waits no longer (lock held). Cancels the fetches that nobody waits for any more."""
        for ticket in tickets:
            self._fetch_waiters[ticket] -= 1
            if self._fetch_waiters[ticket] > 0:
                continue
            del self._fetch_waiters[ticket]
            self._refused_fetches.discard(ticket)
            if isinstance(self._running.get(ticket), Fetch):
                self.faults["prefetch_stopped"] += 1
                self.transfers.cancel(ticket)

    def forget_leases(self) -> None:
        """The tree was reset: nobody waits for anything any more (lock held)."""
        self._fetch_waiters.clear()
        self._refused_fetches.clear()

    # ---- ahead of need -----------------------------------------------------------------------
    def demote_ahead(self) -> None:
        """Below the low watermark, begin demotion up to the high one; wait for nothing (lock held)."""
        for spec in self.specs:
            for tier in POOLED:
                capacity, free = self.core.free_slots(spec.name, tier)
                wanted = self._watermarks[tier].wanted_free(free_slots=free, capacity_slots=capacity)
                if wanted is not None:
                    self.run(self.core.make_room(spec.name, tier, wanted).actions)
