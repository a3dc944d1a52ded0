"""What the cache and its leases share: the tree, the transfers, and the one lock.

The lock is held while the tree decides and while finished transfers are booked, never while something is
waited for. Methods that say "lock held" are called with it; the others take it for as long as they need.

Where several ranks keep trees that must not differ, what has ended is booked by ``step`` alone, when all ranks
have agreed on it, and ``pump`` does nothing (``hicache.ranks``).
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeGuard

from hicache.clock import Clock
from hicache.errors import ProtocolError
from hicache.events import ResidencyEvent
from hicache.explain import Explainer, Explanation
from hicache.kept import KeptPrefixes
from hicache.policy.backoff import Backoff
from hicache.policy.prefetch import PrefetchPolicy
from hicache.policy.recompute import Bandwidth, LoadOrRecompute, Move, Option
from hicache.policy.watermarks import Watermark
from hicache.radix.actions import Action, Copy, Fetch, Free, Slots, Store, Ticketed
from hicache.radix.interface import PlanStep, Started, TreeCore
from hicache.radix.publish import MAX_TOKENS
from hicache.ranks.agreement import Agreement, Facts
from hicache.sessions import Sessions
from hicache.stats import RequestCounts
from hicache.tracing import OFF, Tracing
from hicache.transfer.engine import TransferEngine
from hicache.transfer.jobs import Completion, Direction, Failure
from hicache.types import LeaseId, ReuseRule, TicketId, Tier

OnEvents = Callable[[Sequence[ResidencyEvent]], None]
GiveBack = Callable[[Mapping[str, Slots]], object]
MAX_FAILURES = 1024
"""Failed transfers whose reason is remembered for the requests that waited for them."""
POOLED = (Tier.DEVICE, Tier.HOST)
_UPWARD: tuple[Direction, ...] = (Direction.FETCH, Direction.TO_DEVICE)
_NOT_IN_STORE = frozenset({Failure.MISS, Failure.CORRUPT, Failure.STAMP})
"""Faults of a fetch that prove a page not to be there; the others say nothing of it."""


class Runtime:
    """The moving parts of one cache.

    Args:
        core: the tree.
        transfers: moves the bytes.
        ranks: what the ranks agree on; its clock is the one that time limits go by.
        sessions, kept, prefetch, recompute, watermarks: knowledge and policy.
        wait_limit_s: bound of every wait for a copy.
        store_timeout_s: bound of one batch of the store.
        explainer: says why requests missed; it is told of every change in residency.
        tracing: makes spans.
        give_back: lets the system have the memory of slots of a shared L1.
    """

    def __init__(
        self,
        *,
        core: TreeCore,
        transfers: TransferEngine,
        sessions: Sessions,
        kept: KeptPrefixes,
        ranks: Agreement,
        prefetch: PrefetchPolicy,
        recompute: LoadOrRecompute,
        watermarks: dict[Tier, Watermark],
        wait_limit_s: float,
        store_timeout_s: float,
        explainer: Explainer | None = None,
        tracing: Tracing = OFF,
        give_back: GiveBack | None = None,
    ) -> None:
        self.core = core
        self._give_back = give_back
        self.transfers = transfers
        self.sessions = sessions
        self.kept = kept
        self.ranks = ranks
        self.clock: Clock = ranks.clock
        self.prefetch = prefetch
        self.recompute = recompute
        self.wait_limit_s = wait_limit_s
        self.store_timeout_s = store_timeout_s
        self.lock = threading.RLock()
        self.closed = False
        self._why_closed = "the cache is closed"
        self.specs = core.config.components
        self.page_size = core.config.page_size
        self.mark_spacing = core.config.mark_spacing
        self._paths = frozenset(spec.name for spec in self.specs if spec.rule == ReuseRule.PATH)
        self._states = frozenset(spec.name for spec in self.specs if spec.is_checkpoint)
        self.is_hybrid = any(spec.rule != ReuseRule.PATH for spec in self.specs)
        self._num_layers = {spec.name: spec.num_layers for spec in self.specs}
        self.device_tokens = {  # what L1 takes of each component, with nothing else in it
            spec.name: min(MAX_TOKENS, core.config.device_slots[spec.name] * self.page_size)
            for spec in self.specs
            if not spec.is_checkpoint
        } or {self.specs[0].name: MAX_TOKENS}
        self.requests = RequestCounts(self.specs)
        self.faults: Counter[str] = Counter()
        self.lost_tokens: Counter[str] = Counter()
        self.explainer = explainer
        self.tracing = tracing
        self._listeners: list[OnEvents] = []
        if explainer is not None:
            self.listen(explainer.ledger.record)
        self.num_recomputed = 0  # tokens that were found and computed again all the same
        self._slot_bytes = {spec.name: spec.slot_bytes(self.page_size) for spec in self.specs}
        self._failures: OrderedDict[TicketId, str] = OrderedDict()
        self.num_store_failures = 0  # of writes to L3
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
        self._ended: dict[TicketId, Completion] = {}  # here, and perhaps not on all ranks
        names = [None, *(spec.name for spec in self.specs)] if recompute.is_asked else []
        self._agreed_speeds: dict[tuple[Direction, str | None], Bandwidth] = {
            (direction, name): Bandwidth() for direction in _UPWARD for name in names
        }
        self._agreed_queues: dict[Direction, int] = dict.fromkeys(_UPWARD if recompute.is_asked else (), 0)
        self._store_backoff = Backoff()

    def num_layers(self, component: object = None) -> int:
        """Layers of a component, or of the deepest one. Raises ``ValueError`` for an unknown name."""
        if component is None:
            return max(self._num_layers.values())
        if not isinstance(component, str) or component not in self._num_layers:
            known = ", ".join(self._num_layers)
            raise ValueError(f"no component is called {component!r:.80}; there are {known}")
        return self._num_layers[component]

    def keeps_states(self, component: object) -> bool:
        """Whether a component keeps states, not pages. Raises ``ProtocolError`` for an unknown name."""
        if not isinstance(component, str) or component not in self._num_layers:
            known = ", ".join(self._num_layers)
            raise ProtocolError(f"no component is called {component!r:.80}; there are {known}")
        return component in self._states

    def check_open(self) -> None:
        if self.closed:
            raise ProtocolError(self._why_closed)

    def disown(self) -> None:
        """See ``OpenThings``: a lock that a thread of the parent's holds is nobody's to give back here."""
        self.lock, self.closed = threading.RLock(), True
        self._why_closed = (
            "the cache belongs to the process that this one was forked from, as do its threads; open one here"
        )

    def check_alone(self, call: str, instead: str) -> None:
        """Raises ``ProtocolError`` in a group of ranks: those make all calls in one order, from one thread."""
        if not self.ranks.is_alone:
            raise ProtocolError(
                f"{call}: {self.ranks.group.size} ranks agree here, in one order of calls; use {instead} instead"
            )

    # ---- transfers ---------------------------------------------------------------------------
    def run(self, actions: Iterable[Action]) -> None:
        """Hand actions to the transfer engine (lock held).

        Frees are booked by the tree already: on a device of our own nobody else has to hear of them. In L2
        they may give up places, too, and where L1 is one budget, memory that others need.
        """
        if self._give_back is not None and (surplus := self.core.surplus_slots()):
            self._give_back(surplus)
        for action in actions:
            if isinstance(action, Copy | Fetch | Store):
                self._running[action.ticket] = action
            if not isinstance(action, Free) or action.tier == Tier.HOST:
                self.transfers.submit(action)
        self.tell()

    def run_by_layer(self, actions: Sequence[Action]) -> None:
        """``run``, with the pages of loads layer after layer, behind all that is needed whole (lock held)."""
        layered = [action for action in actions if self.is_paged_load(action)]
        self.run(action for action in actions if not self.is_paged_load(action))
        for action in layered:
            self._running[action.ticket] = action
        self.transfers.submit_by_layer(layered)

    def is_paged_load(self, action: Action | None) -> TypeGuard[Copy]:
        """Whether it copies pages, not states, from L2 to L1."""
        return (
            isinstance(action, Copy)
            and (action.source, action.target) == (Tier.HOST, Tier.DEVICE)
            and action.component not in self._states
        )

    def loading(self, tickets: Iterable[TicketId]) -> tuple[TicketId, ...]:
        """Those of the tickets that bring pages from L2 to L1 and have not ended (lock held)."""
        return tuple(ticket for ticket in tickets if self.is_paged_load(self._running.get(ticket)))

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
        """Book what has ended, and start what that allows (lock held). A group of ranks does so in ``step``."""
        if self.ranks.is_alone:
            self._book_all(self.transfers.completions())

    def step(self, what: str, extra: Sequence[int] = ()) -> tuple[int, ...]:
        """Agree with the other ranks on the time and on what has ended, and book that. Nothing for one rank alone.

        *Caller guarantees*: all ranks call it with the same trees, for the same ``what``.

        Args:
            extra: further numbers, as many on all ranks.

        Returns:
            the lowest of all ranks of those.

        Raises:
            RankGroupError: see ``Agreement.step``.
        """
        if self.ranks.is_alone:
            return tuple(extra)
        with self.lock:
            self._ended.update((each.ticket, each) for each in self.transfers.completions())
            state = [self.core.free_slots(spec.name, tier)[1] for spec in self.specs for tier in POOLED]
            facts = Facts(
                tuple(self._running),
                self._ended,
                [Bandwidth(*self.transfers.recent(*of)) for of in self._agreed_speeds],
                [self.transfers.queued_bytes(direction) for direction in self._agreed_queues],
                extra,
                state,
            )
        agreed = self.ranks.step(what, facts)
        with self.lock:
            self._agreed_speeds = dict(zip(self._agreed_speeds, agreed.speeds, strict=True))
            self._agreed_queues = dict(zip(self._agreed_queues, agreed.queued_bytes, strict=True))
            for each in agreed.ended:
                del self._ended[each.ticket]
            self._book_all(agreed.ended)
        return agreed.extra

    def _book_all(self, completions: Iterable[Completion]) -> None:
        ended, self._early = [*self._early, *completions], []
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
        self.step("poll")
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
            self.num_store_failures += 1
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
        return self.waited(in_time=self.have_ended(tickets, limit_s))

    def have_ended(self, tickets: Collection[TicketId], limit_s: float) -> bool:
        """Wait, bounded. True if all ended in time, on all ranks."""
        in_time = not tickets or self.transfers.wait(tickets, limit_s)
        if self.ranks.is_alone or not tickets:
            return in_time
        self.step("wait")
        return self._running.keys().isdisjoint(tickets)

    def deadline_s(self, what: str) -> float:
        """When a loop of waits that begins now is to end, by the clock.

        Args:
            what: who waits. Ranks agree on the time for it: the last time they did may be long ago.
        """
        self.step(what)
        return self.clock.now_s() + self.wait_limit_s

    async def have_ended_async(self, tickets: Collection[TicketId], limit_s: float) -> bool:
        """``have_ended`` without blocking the running loop; for one rank alone."""
        return not tickets or await self.transfers.await_(tickets, limit_s)

    def waited(self, *, in_time: bool | None) -> bool:
        """Book after a wait, and count it if it was too long."""
        with self.lock:
            self.pump()
            if not in_time:
                self.faults["wait_limit"] += 1
        return bool(in_time)

    def drain(self) -> bool:
        """Wait, bounded, until no transfer is under way. True if that was reached."""
        while True:
            with self.lock:
                self.pump()
                running = self.core.in_flight()
            if not running:
                return True
            # Each round ends with at least one ticket booked, or with a wait that was too long.
            if not self.have_ended(running, self.wait_limit_s):
                return False

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
        ahead = {direction: self._queued_bytes(direction) for direction, _ in num_bytes}
        seconds = 0.0
        for (direction, component), wanted in num_bytes.items():
            bandwidth = self._recent(direction, component)
            if not bandwidth.is_known:
                bandwidth = self._recent(direction)
            seconds += Move(wanted, ahead.pop(direction, 0), bandwidth).time_s
        return seconds

    def _recent(self, direction: Direction, component: str | None = None) -> Bandwidth:
        if self.ranks.is_alone:
            return Bandwidth(*self.transfers.recent(direction, component))
        return self._agreed_speeds[direction, component]

    def _queued_bytes(self, direction: Direction) -> int:
        return (
            self.transfers.queued_bytes(direction) if self.ranks.is_alone else self._agreed_queues[direction]
        )

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
        """Below the low watermark, begin demotion up to the high one; wait for nothing (lock held).

        Not in the lowest tier: what leaves that is dropped at once when room is needed, and hit until then.
        """
        config = self.core.config
        below = {Tier.DEVICE: any(config.host_slots.values()), Tier.HOST: config.has_store}
        costs = {Tier.DEVICE: config.device_costs, Tier.HOST: config.host_costs}
        for spec in self.specs:
            for tier in (tier for tier in POOLED if below[tier]):
                # Of a shared budget once: a slot of the dearest may be more than the high watermark.
                if spec.name != min(costs[tier], key=costs[tier].__getitem__, default=spec.name):
                    continue
                capacity, free = self.core.free_slots(spec.name, tier)
                wanted = self._watermarks[tier].wanted_free(free_slots=free, capacity_slots=capacity)
                if wanted is not None:
                    self.run(self.core.make_room(spec.name, tier, wanted).actions)
