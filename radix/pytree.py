"""The Python core: the readable specification of ``TreeCore``.

It only routes: ``forest`` keeps the state, ``lookup`` reads it, ``restore`` brings payload up,
``publish`` puts new payload in, ``demote`` sends it down, ``storing`` on to L3, ``keeping`` says what goes
last, ``change`` is for the operator, ``audit`` doubts all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from hicache.errors import ProtocolError
from hicache.events import Cause, ResidencyEvent
from hicache.radix import keeping, lookup
from hicache.radix.actions import Action, Slots
from hicache.radix.audit import audit, pool_count, snapshot
from hicache.radix.change import Changer
from hicache.radix.check import check_config, check_priority
from hicache.radix.demote import Demoter
from hicache.radix.forest import Forest
from hicache.radix.interface import (
    Choice,
    Cleared,
    Inserted,
    MatchResult,
    NodeView,
    PlanStep,
    PoolCount,
    ProbeResult,
    Reserved,
    Room,
    Settled,
    Started,
    StoreQuery,
    Tokens,
    TreeConfig,
)
from hicache.radix.keys import as_tokens, token_buffer
from hicache.radix.leases import LeaseState
from hicache.radix.node import DEVICE, MOST_USES, NO_TURN
from hicache.radix.publish import Publisher, touch, touch_spare_marks
from hicache.radix.restore import Restorer
from hicache.radix.ticket_ends import TicketEnds
from hicache.radix.tickets import Ticket
from hicache.radix.trust import arriving_slots
from hicache.types import (
    DEFAULT_NAMESPACE,
    DEFAULT_PRIORITY,
    MOST_WORTH,
    NO_SLOT,
    LeaseId,
    Namespace,
    Regard,
    SessionId,
    TicketId,
    Tier,
)


class PyTreeCore:
    """See ``hicache.radix.interface.TreeCore`` for every method's contract."""

    def __init__(self, config: TreeConfig) -> None:
        check_config(config)
        self.config = config
        self._forest = Forest(config)
        self._demoter = Demoter(self._forest)
        self._restorer = Restorer(self._forest, self._demoter)
        self._publisher = Publisher(self._forest, self._demoter, self._restorer)
        self._changer = Changer(self._forest, self._demoter)
        self._ends = TicketEnds(self._forest, self._demoter, self._restorer)

    # ---- look up -----------------------------------------------------------------------------
    def probe(
        self, tokens: Tokens, namespace: Namespace = DEFAULT_NAMESPACE, *, cap: bool = True
    ) -> ProbeResult:
        found, verdict = lookup.find(self._forest, _checked(tokens), namespace, cap=cap)
        return lookup.describe(self._forest, found, verdict)

    def store_query(
        self, tokens: Tokens, namespace: Namespace = DEFAULT_NAMESPACE, *, cap: bool = True
    ) -> StoreQuery:
        return lookup.store_query(self._forest, _checked(tokens), namespace, cap=cap)

    def learn(
        self,
        tokens: Tokens,
        found: Mapping[str, Mapping[int, bool]],
        namespace: Namespace = DEFAULT_NAMESPACE,
    ) -> None:
        unknown = sorted(set(found) - set(self._forest.index))
        if unknown:
            raise ProtocolError(f"no component is called {', '.join(unknown)}")
        checked = _checked(tokens)
        self._forest.tick += 1
        lookup.learn(self._forest, checked, found, namespace)
        self._tidy()

    def match(
        self,
        tokens: Tokens,
        namespace: Namespace = DEFAULT_NAMESPACE,
        *,
        session: SessionId | None = None,
        priority: int = DEFAULT_PRIORITY,
        cap: bool = True,
    ) -> MatchResult:
        forest, tokens = self._forest, _checked(tokens)
        check_priority(priority)
        forest.tick += 1
        forest.counters["matches"] += 1
        found, verdict = lookup.find(forest, tokens, namespace, cap=cap)
        result = lookup.describe(forest, found, verdict)
        if result.fork is not None:
            forest.counters["fork_tokens"] += result.fork - result.boundary
        stops = found.stops()[: verdict.index + 1]
        origins = lookup.origins(forest, stops)
        node = forest.root(namespace)
        met = NO_TURN
        if stops:
            node, end = stops[-1]
            met = node.turn
            if end < node.end:
                node = forest.split(node, (end - node.start) // forest.page_size)
        met_end = forest.turns.end_of(met)
        lease = LeaseState(
            LeaseId(forest.next_lease),
            node,
            result,
            forest.num_components,
            origins,
            np.array(tokens[: node.end], dtype=np.int32),
            len(tokens),
            priority,
        )
        forest.next_lease += 1
        forest.leases[lease.id] = lease
        forest.turns.open(lease.id, session, Regard.of_priority(priority))
        node.holders += 1
        forest.dead_weight.doubt(node)
        lease.locks = [rule.lock(node) for rule in forest.rules]
        if not node.is_root:
            if met != NO_TURN and not forest.turns.goes_on(met, session, met_end - node.end):
                forest.share(node)
            touch(forest, node, lease.id)
            touch_spare_marks(forest, node, lease.id)
            node.uses = min(node.uses + 1, MOST_USES)
            forest.note_use(node, priority, len(tokens))
            if forest.ordering.protects_hits:
                forest.protect(node, True)
            self._demoter.after_use(node)
        actions = self._finish()
        return MatchResult(lease.id, result, actions, None if met == NO_TURN else met, met_end)

    # ---- restore -----------------------------------------------------------------------------
    def plan(self, lease: LeaseId) -> tuple[PlanStep, ...]:
        return self._restorer.plan(self._lease(lease))

    def choices(self, lease: LeaseId) -> tuple[Choice, ...]:
        return self._restorer.choices(self._lease(lease))

    def lower(self, lease: LeaseId, boundary: int) -> None:
        self._restorer.lower(self._lease(lease), boundary)
        self._forest.tidy()

    def fetch(self, lease: LeaseId) -> Started:
        started = self._restorer.fetch(self._lease(lease))
        return Started(started.tickets, self._finish())

    def load(self, lease: LeaseId) -> Started:
        started = self._restorer.load(self._lease(lease))
        return Started(started.tickets, self._finish())

    def settle(self, lease: LeaseId, *, arriving: bool = False) -> Settled:
        settled = self._restorer.settle(self._lease(lease), arriving=arriving)
        return Settled(
            settled.boundary,
            settled.source,
            settled.by_component,
            settled.tickets,
            self._finish(),
        )

    # ---- compute and publish -----------------------------------------------------------------
    def reserve(self, lease: LeaseId, num_tokens: int) -> Reserved:
        reserved = self._publisher.reserve(self._lease(lease), num_tokens)
        return Reserved(reserved.short, reserved.tickets, self._finish())

    def insert(self, lease: LeaseId, tokens: Tokens, *, mark: bool = True, verified_len: int = 0) -> Inserted:
        state, tokens = self._lease(lease), _checked(tokens)
        self._publisher.check(state, tokens, verified_len)
        self._forest.tick += 1
        done = self._publisher.insert(state, tokens, mark=mark, final=False)
        return self._with_actions(done)

    def release(self, lease: LeaseId, tokens: Tokens | None = None, *, verified_len: int = 0) -> Inserted:
        state = self._lease(lease)
        done = Inserted(state.published, 0, 0, 0, ())
        if tokens is not None:
            tokens = _checked(tokens)
            self._publisher.check(state, tokens, verified_len)
            self._forest.tick += 1
            done = self._publisher.insert(state, tokens, mark=True, final=True)
        self._publisher.end(state)
        return self._with_actions(done)

    def _with_actions(self, done: Inserted) -> Inserted:
        return Inserted(
            done.published,
            done.duplicate_tokens,
            done.adopted_tokens,
            done.new_tokens,
            done.states,
            done.tickets,
            self._finish(),
        )

    def lease_slots(self, lease: LeaseId, component: str) -> Slots:
        state, i = self._lease(lease), self._component(component)
        rule = self._forest.rules[i]
        if not rule.keeps_pages:
            raise ProtocolError(f"{component} keeps states, not pages; ask lease_state")
        runs = [state.owned[i]]
        arriving = arriving_slots(self._forest, state, i)
        first = rule.span(state.node.end)
        for node in state.node.up():
            held = node.slots[i][DEVICE]
            pages = self._forest.num_slots(node, i)
            if held is None:
                held = arriving.get(node.id)
            if held is None or node.end <= first:
                held = np.full(pages, NO_SLOT, dtype=np.int64)
            runs.append(held)
        runs.reverse()
        return np.concatenate(runs)

    def lease_state(self, lease: LeaseId, component: str) -> int | None:
        return self._lease(lease).states[self._component(component)]

    def rate(
        self, leases: Sequence[LeaseId], worths: Sequence[int], regards: Sequence[Regard] | None = None
    ) -> tuple[LeaseId, ...]:
        forest = self._forest
        told = [Regard.PLAIN] * len(leases) if regards is None else [Regard(regard) for regard in regards]
        if not len(leases) == len(worths) == len(told):
            raise ValueError(f"{len(leases)} leases, {len(worths)} worths and {len(told)} regards")
        wrong = next((worth for worth in worths if not 0 <= worth <= MOST_WORTH), None)
        if wrong is not None:
            raise ValueError(f"worth: {wrong} is not within 0 to {MOST_WORTH}")
        for lease, worth, regard in zip(leases, worths, told, strict=True):
            forest.rate(lease, worth, regard)
        return forest.turns.take_over()

    # ---- keeping -----------------------------------------------------------------------------
    def keep(self, tokens: Tokens, namespace: Namespace = DEFAULT_NAMESPACE) -> int:
        kept = keeping.keep(self._forest, _checked(tokens), namespace)
        self._tidy()
        return kept

    def unkeep(self, tokens: Tokens, namespace: Namespace = DEFAULT_NAMESPACE) -> None:
        keeping.unkeep(self._forest, _checked(tokens), namespace)
        self._tidy()

    # ---- pressure ----------------------------------------------------------------------------
    def make_room(self, component: str, tier: Tier, free_slots: int) -> Room:
        i = self._component(component)
        tickets = self._demoter.make_room(i, tier, free_slots)
        return Room(self._forest.pools[i][tier].num_free, tickets, self._finish())

    def persist(self) -> Started:
        tickets = self._demoter.storer.persist()
        return Started(tickets, self._finish())

    def retry_stores(self) -> Started:
        tickets = self._demoter.storer.retry_stores()
        return Started(tickets, self._finish())

    # ---- change while serving ----------------------------------------------------------------
    def clear(
        self, namespace: Namespace | None = None, tokens: Tokens | None = None, *, alone: bool = False
    ) -> Cleared:
        checked = None if tokens is None else as_tokens(tokens)
        cleared = self._changer.clear(namespace, checked, alone=alone)
        return replace(cleared, actions=self._finish())

    def forget_store(self) -> None:
        self._changer.forget_store()
        self._tidy()

    def resize(self, component: str, tier: Tier, num_slots: int) -> Room:
        i = self._component(component)
        tickets = self._changer.resize(i, tier, num_slots)
        actions = self._finish()
        return Room(self._forest.pools[i][tier].num_free, tickets, actions)

    def withheld_slots(self, component: str, tier: Tier) -> Slots:
        if tier == Tier.STORE:
            raise ProtocolError("L3 has no pool of slots")
        return self._forest.pools[self._component(component)][tier].withheld_slots()

    def surplus_slots(self) -> Mapping[str, Slots]:
        return self._forest.surplus_slots()

    def reconfigure(self, config: TreeConfig) -> None:
        self._changer.reconfigure(config)
        self.config = config

    # ---- tickets -----------------------------------------------------------------------------
    def commit(self, ticket: TicketId) -> tuple[Action, ...]:
        state = self._ticket(ticket)
        if state is None:
            return ()
        self._ends.commit(state)
        return self._finish()

    def abort(self, ticket: TicketId, done_slots: int = 0, *, missing: bool = True) -> tuple[Action, ...]:
        state = self._ticket(ticket)
        if state is None:
            return ()
        total = sum(part.num_slots for part in state.parts)
        if not 0 <= done_slots <= total:
            raise ProtocolError(f"ticket {ticket} has {total} slots, {done_slots} cannot be done")
        self._ends.abort(state, done_slots, missing=missing)
        return self._finish()

    def in_flight(self) -> tuple[TicketId, ...]:
        return tuple(self._forest.tickets)

    # ---- inspect -----------------------------------------------------------------------------
    def audit(self) -> list[str]:
        return audit(self._forest)

    def free_slots(self, component: str, tier: Tier) -> tuple[int, int]:
        pool = self._forest.pools[self._component(component)][tier]
        return pool.capacity, pool.num_free

    def held_slots(self, component: str, tier: Tier) -> int:
        return self._forest.pools[self._component(component)][tier].num_held

    def pool_count(self, component: str, tier: Tier) -> PoolCount:
        return pool_count(self._forest, self._component(component), tier)

    def dead_slots(self, component: str, tier: Tier) -> int:
        return self._forest.dead_weight.slots[self._component(component)][tier]

    def counters(self) -> Mapping[str, int]:
        return dict(self._forest.counters)

    def snapshot(self) -> tuple[NodeView, ...]:
        return snapshot(self._forest)

    def drain_events(self) -> tuple[ResidencyEvent, ...]:
        events, self._forest.events = tuple(self._forest.events), []
        return events

    def reset(self) -> None:
        forest = self._forest
        if self.config.emit_events:
            self._emit_reset()
        self._changer.take_hints_back()
        events, hints = forest.events, forest.actions
        forest.start_empty()
        forest.events, forest.actions = events, hints

    def _emit_reset(self) -> None:
        forest = self._forest
        for root in forest.roots.values():
            pending = list(root.children.values())
            while pending:
                node = pending.pop()
                for i in range(forest.num_components):
                    for tier in Tier:
                        if node.has(i, tier):
                            forest.note_removed(node, i, tier, Cause.RESET)
                pending.extend(node.children.values())

    # ---- helpers -----------------------------------------------------------------------------
    def _lease(self, lease: LeaseId) -> LeaseState:
        state = self._forest.leases.get(lease)
        if state is None:
            old = 0 <= lease < self._forest.next_lease
            why = "has ended or is from before a reset" if old else "is unknown"
            raise ProtocolError(f"lease {lease} {why}")
        return state

    def _ticket(self, ticket: TicketId) -> Ticket | None:
        """None for a late report on a ticket from before a reset."""
        forest = self._forest
        state = forest.tickets.get(ticket)
        if state is None and not 0 <= ticket < forest.first_live_ticket:
            known = 0 <= ticket < forest.next_ticket
            why = "was reported back already" if known else "is unknown"
            raise ProtocolError(f"ticket {ticket} {why}")
        return state

    def _component(self, name: str) -> int:
        index = self._forest.index.get(name)
        if index is None:
            known = ", ".join(self._forest.index)
            raise ProtocolError(f"no component is called {name!r}; there are {known}")
        return index

    def _finish(self) -> tuple[Action, ...]:
        self._tidy()
        return self._forest.take_actions()

    def _tidy(self) -> None:
        """The end of a call that returns no actions: hints that wait go with the next one."""
        self._demoter.forget_beliefs()
        self._forest.tidy()
        self._forest.dead_weight.settle()
        self._forest.approach_limits()


def _checked(tokens: Tokens) -> Tokens:
    return as_tokens(token_buffer(tokens))
