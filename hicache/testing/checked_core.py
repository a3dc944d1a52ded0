"""What a test knows of a core besides the core itself, and the checks of one against the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hicache.events import ResidencyChange, ResidencyEvent
from hicache.radix.interface import (
    Inserted,
    ProbeResult,
    Settled,
    Tokens,
    TreeConfig,
    TreeCore,
)
from hicache.radix.keys import as_tokens
from hicache.testing.checks import check_closure, check_owners, residency_keys
from hicache.testing.oracle import BruteForceModel, Expected
from hicache.testing.payloads import TOKEN_BYTES, PayloadExecutor, Stamp, path_bytes, walk_views
from hicache.types import (
    DEFAULT_NAMESPACE,
    NO_SLOT,
    LeaseId,
    Namespace,
    PageKey,
    ReuseRule,
    TicketId,
    Tier,
)

TokensLike = Sequence[int] | NDArray[np.integer]


@dataclass(slots=True, eq=False)
class OpenLease:
    """What the engine knows of one request.

    Args:
        tokens: the prompt, later with output.
        found: what the match said.
        num_missing: how many fetches had failed for lack of a page when the lease was opened.
        boundary, is_settled: reuse, and whether ``settle`` has fixed it.
        reserved, written, published: lengths from the request's start.
        waits: tickets that must be done before the engine computes.
        slots, states: device slots by component, one a page, and the private states.
        near: pages and states that reuse at ``boundary`` needs and that were seen in L1 or L2.
    """

    lease: LeaseId
    namespace: Namespace
    tokens: Tokens
    found: ProbeResult
    boundary: int
    num_missing: int
    is_settled: bool = False
    reserved: int = 0
    written: int = 0
    published: int = 0
    waits: tuple[TicketId, ...] = ()
    slots: dict[str, list[int]] = field(default_factory=dict)
    states: dict[str, int] = field(default_factory=dict)
    near: set[tuple[str, PageKey]] = field(default_factory=set)

    @property
    def path(self) -> bytes:
        return path_bytes(self.tokens)


class CheckedCore:
    """A core with simulated payload and the model beside it. ``check()`` doubts all of them.

    Args:
        core: under test; give it ``emit_events=True`` to have its events replayed.
        store: L3 contents to share with another harness (a restart, a second process).
        is_checked: False for tests that count or time; ``check()`` may still be called by hand.
    """

    def __init__(
        self,
        core: TreeCore,
        *,
        store: dict[PageKey, Stamp] | None = None,
        is_checked: bool = True,
    ) -> None:
        self.core = core
        self.config: TreeConfig = core.config
        self.executor = PayloadExecutor(core.config, store=store)
        self.model = BruteForceModel(core.config)
        self.leases: dict[LeaseId, OpenLease] = {}
        self.is_checked = is_checked
        self.events: list[ResidencyEvent] = []
        self.replayed: set[tuple[Tier, str, PageKey]] = set()
        self._num_missing = 0
        self._counters: Mapping[str, int] = {}
        rules = {spec.name: spec.rule for spec in core.config.components}
        self.checkpoints = [c for c, rule in rules.items() if rule == ReuseRule.CHECKPOINT]
        self.paged = [c for c, rule in rules.items() if rule != ReuseRule.CHECKPOINT]
        self._path_is_primary = rules[self.model.primary] == ReuseRule.PATH
        self._has_only_paths = set(rules.values()) == {ReuseRule.PATH}

    # ---- look up -----------------------------------------------------------------------------
    def probe(
        self, tokens: TokensLike, namespace: Namespace = DEFAULT_NAMESPACE, *, cap: bool = True
    ) -> ProbeResult:
        return self.core.probe(as_tokens(tokens), namespace, cap=cap)

    def expect(
        self, tokens: TokensLike, namespace: Namespace = DEFAULT_NAMESPACE, *, cap: bool = True
    ) -> Expected:
        """What the brute-force model says, from the core's present snapshot."""
        self.model.rebuild(self.core.snapshot())
        return self.model.expect(namespace, path_bytes(tokens), cap=cap)

    # ---- checks ------------------------------------------------------------------------------
    def check(self) -> None:
        """All invariants that can be seen from outside. Raises ``AssertionError``."""
        if not self.is_checked:
            return
        findings = self.core.audit()
        assert not findings, "\n".join(findings)
        pending = tuple(self.executor.pending)
        assert sorted(self.core.in_flight()) == sorted(pending), "tickets in flight differ"
        views = self.core.snapshot()
        walked = list(walk_views(views))
        self.executor.check_views(walked)
        check_closure(self.config, views)
        resident = residency_keys(self.config, self.executor.keys, views)
        self._check_events(resident)
        for lease in self.leases.values():
            if lease.is_settled:
                self.check_lease(lease)
                self._note_slots(lease)
            else:
                self._note_states(lease)
                self._check_locked(lease, resident)
        check_owners(self.core, self.executor, views, self.leases.values())
        counters = self.core.counters()
        fallen = [name for name, old in self._counters.items() if counters[name] < old]
        assert not fallen, f"counters fell: {fallen}"
        self._counters = dict(counters)

    def check_lease(self, lease: OpenLease) -> None:
        """What a settled lease reuses, and what it has written, is what the engine expects."""
        page_size, path = self.config.page_size, lease.path
        length = max(lease.boundary, lease.written)
        whole = length // page_size * page_size
        for component in self.paged:
            slots = self.core.lease_slots(lease.lease, component).tolist()
            ends = [*self.model.needed(component, whole), *([length] if length > whole else [])]
            for end in ends:
                stamp = Stamp(component, lease.namespace, path[: end * TOKEN_BYTES])
                found = self.executor.read(component, Tier.DEVICE, slots[(end - 1) // page_size])
                assert found == stamp, f"lease {lease.lease} has {found} for {stamp}"
        if length == 0 or any(ticket in self.executor.pending for ticket in lease.waits):
            return
        for component in self.checkpoints:
            state = self.core.lease_state(lease.lease, component)
            assert state is not None, f"{component}: no private state at {length}"
            stamp = Stamp(component, lease.namespace, path[: length * TOKEN_BYTES])
            found = self.executor.read(component, Tier.DEVICE, state)
            assert found == stamp, f"lease {lease.lease} has {found} for {stamp}"

    def residency(self) -> set[tuple[Tier, str, PageKey]]:
        """What the core's snapshot says is where, by page key."""
        return residency_keys(self.config, self.executor.keys, self.core.snapshot())

    def _check_locked(self, lease: OpenLease, resident: set[tuple[Tier, str, PageKey]]) -> None:
        """What an open lease needs does not leave L1 and L2 once it is there (until it settles)."""
        if self._num_missing > lease.num_missing:
            return  # pages proved missing since, so the lease may aim lower now
        present = {(component, key) for tier, component, key in resident if tier != Tier.STORE}
        lost = lease.near - present
        assert not lost, f"lease {lease.lease} lost {len(lost)} locked pages of {lost.pop()[0]}"
        for component in self.model.component_names:
            keys = self.executor.keys.of(component, lease.namespace, lease.path)
            ends = self.model.needed(component, lease.found.boundary)
            needed = {(component, keys[end // self.config.page_size - 1]) for end in ends}
            lease.near |= needed & present

    def _check_events(self, resident: set[tuple[Tier, str, PageKey]]) -> None:
        if not self.config.emit_events:
            return
        for event in self.core.drain_events():
            self.events.append(event)
            named = {(event.tier, event.component, key) for key in event.keys}
            assert len(named) == len(event.keys) > 0, f"{event} names a page twice, or none"
            if event.change is ResidencyChange.STORED:
                assert not named & self.replayed, f"{event} says again what was said"
                self.replayed |= named
            else:
                assert named <= self.replayed, f"{event} removes what was not there"
                self.replayed -= named
        assert self.replayed == resident, _difference(self.replayed, resident)

    # ---- notes -------------------------------------------------------------------------------
    def _note_settled(self, lease: OpenLease, settled: Settled) -> None:
        assert settled.source.total == settled.boundary
        if settled.boundary == lease.found.boundary:
            assert settled.source == lease.found.source
            assert settled.by_component == lease.found.by_component
        if not lease.is_settled:
            lease.is_settled = True
            lease.boundary = lease.reserved = lease.written = lease.published = settled.boundary
        assert settled.boundary == lease.boundary, "a settled boundary moved"
        lease.waits += settled.tickets
        self._note_slots(lease)

    def _note_inserted(self, lease: OpenLease, inserted: Inserted, length: int) -> None:
        whole = length // self.config.page_size * self.config.page_size
        assert inserted.published == whole, f"published {inserted.published} of {length}"
        if self._path_is_primary:
            told = inserted.duplicate_tokens + inserted.adopted_tokens + inserted.new_tokens
            assert told == max(0, whole - lease.published), f"{inserted} since {lease.published}"
        lease.published = max(lease.published, whole)

    def _note_slots(self, lease: OpenLease) -> None:
        """Take note of the slots that the lease was given."""
        for component in self.paged:
            slots = self.core.lease_slots(lease.lease, component).tolist()
            held = self.executor.held[component, Tier.DEVICE]
            self.executor.take(component, (s for s in slots if s != NO_SLOT and s not in held))
            lease.slots[component] = slots
        self._note_states(lease)

    def _note_states(self, lease: OpenLease) -> None:
        for component in self.checkpoints:
            state = self.core.lease_state(lease.lease, component)
            if state is None:
                lease.states.pop(component, None)
                continue
            if state not in self.executor.held[component, Tier.DEVICE]:
                self.executor.take(component, [state])
            lease.states[component] = state


def _difference(replayed: Iterable[object], resident: Iterable[object]) -> str:
    missing, extra = Counter(resident), Counter(replayed)
    return f"events lack {list(missing - extra)[:4]}, snapshot lacks {list(extra - missing)[:4]}"
