"""Random calls on every kind of model, with everything checked after each of them.

``CacheMachine`` draws a configuration so small that eviction works at every step, and then calls
whatever a careful or a careless caller might: transfers end late, in any order, in part or not at all;
requests are abandoned in every state; L3 loses pages. ``HICACHE_TEST_PROFILE`` sets how much is tried.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hicache.radix.core import make_core
from hicache.testing.checked_core import OpenLease
from hicache.testing.checks import check_idle
from hicache.testing.harness import Harness
from hicache.testing.oracle import BruteForceModel
from hicache.testing.payloads import path_bytes
from hicache.testing.trees import tree_config
from hicache.types import Namespace, TicketId, Tier

IS_QUICK = os.environ.get("HICACHE_TEST_PROFILE") == "quick"
EXAMPLES = 12 if IS_QUICK else 300
STEPS = 20 if IS_QUICK else 30

MODELS = [
    "full",
    "full+swa",
    "full+mamba",
    "full+swa+mamba",
    "swa",
    "full+swa+wide",
    "mamba",
    "full+draft+swa",
]
NAMESPACES = [Namespace(), Namespace(salt="a"), Namespace(salt="")]

letters = st.lists(st.integers(0, 2), max_size=6)
namespaces = st.sampled_from(NAMESPACES)
small = st.integers(0, 12)
choices = st.integers(0, 63)


def spell(page_letters: list[int], page_size: int, tail: int = 0) -> list[int]:
    """Pages of one letter each; letter 2 differs from letter 0 in the page's last token only."""
    tokens: list[int] = []
    for letter in page_letters:
        tokens += [0] * (page_size - 1) + [1] if letter == 2 else [letter] * page_size
    return tokens + [1] * (tail % page_size)


class CacheMachine(RuleBasedStateMachine):
    """One core under arbitrary calls."""

    model: ClassVar[str]
    core_kind: ClassVar[str]

    @initialize(
        page_size=st.sampled_from([1, 2, 4, 16]),
        device=st.integers(4, 10),
        states=st.integers(2, 5),
        host=st.sampled_from([0, 2, 4, 8]),
        has_store=st.booleans(),
        write=st.sampled_from(["write_through", "write_through_selective", "write_back"]),
        window_pages=st.sampled_from([0.5, 1, 1.5, 2, 3]),
        granularity=st.sampled_from(["page", "page", "leaf"]),
        beliefs=st.sampled_from([4_000_000, 4_000_000, 3]),
    )
    def start(
        self,
        page_size: int,
        device: int,
        states: int,
        host: int,
        has_store: bool,
        write: str,
        window_pages: float,
        granularity: str,
        beliefs: int,
    ) -> None:
        names = self.model.split("+")
        window = max(1, int(window_pages * page_size))
        config = tree_config(
            self.model,
            page_size=page_size,
            window=window,
            wide=window + 2 * page_size,
            device={name: states if name == "mamba" else device for name in names},
            host=host,
            has_store=has_store and host > 0,
            write=write,
            granularity=granularity,
            max_stored_pages=beliefs,
        )
        self.page_size = page_size
        self.names = names
        self.cache = Harness(make_core(config, kind=self.core_kind))
        self.leases: list[OpenLease] = []
        self.seen: list[tuple[Namespace, list[int]]] = [(Namespace(), [0] * (3 * page_size + 1))]
        self.step = 0

    # ---- helpers -----------------------------------------------------------------------------
    def pick(self, choice: int, *, is_settled: bool | None = None) -> OpenLease | None:
        fitting = [lease for lease in self.leases if is_settled is None or lease.is_settled == is_settled]
        return fitting[choice % len(fitting)] if fitting else None

    def pick_ticket(self, choice: int, *, but: Collection[TicketId] = ()) -> TicketId | None:
        pending = [ticket for ticket in self.cache.executor.pending if ticket not in but]
        return pending[choice % len(pending)] if pending else None

    def advance_to(self, lease: OpenLease, num_tokens: int) -> None:
        """Compute so many tokens more, as far as slots are reserved; output is made up as needed."""
        end = min(lease.reserved, lease.written + num_tokens)
        lacking = end - len(lease.tokens)
        if lacking > 0:
            output = np.full(lacking, 1, dtype=np.int32)
            lease.tokens = np.concatenate([lease.tokens, output])
        self.cache.compute(lease, end)

    # ---- requests ----------------------------------------------------------------------------
    @precondition(lambda self: len(self.leases) < 4)
    @rule(page_letters=letters, tail=small, namespace=namespaces, cap=st.booleans())
    def match(self, page_letters: list[int], tail: int, namespace: Namespace, cap: bool) -> None:
        prompt = spell(page_letters, self.page_size, tail)
        promised = self.cache.probe(prompt, namespace, cap=cap)
        lease = self.cache.match(prompt, namespace, cap=cap)
        assert lease.found == promised
        self.leases.append(lease)
        self.seen = [*self.seen[-5:], (namespace, prompt)]

    @precondition(lambda self: any(not lease.is_settled for lease in self.leases))
    @rule(choice=choices)
    def fetch(self, choice: int) -> None:
        lease = self.pick(choice, is_settled=False)
        if lease:
            self.cache.fetch(lease)

    @precondition(lambda self: any(not lease.is_settled for lease in self.leases))
    @rule(choice=choices)
    def load(self, choice: int) -> None:
        lease = self.pick(choice, is_settled=False)
        if lease:
            self.cache.load(lease)

    @precondition(lambda self: self.leases)
    @rule(choice=choices)
    def settle(self, choice: int) -> None:
        lease = self.pick(choice)
        if lease:
            self.cache.settle(lease)

    @precondition(lambda self: self.leases)
    @rule(choice=choices, num_tokens=small)
    def reserve(self, choice: int, num_tokens: int) -> None:
        lease = self.pick(choice)
        if lease:
            self.cache.reserve(lease, num_tokens)

    @precondition(lambda self: self.leases)
    @rule(choice=choices)
    def reserve_prompt(self, choice: int) -> None:
        lease = self.pick(choice)
        if lease and len(lease.tokens) > lease.reserved:
            self.cache.settle(lease)
            self.cache.reserve(lease, len(lease.tokens) - lease.reserved)

    @precondition(lambda self: any(lease.reserved > lease.written for lease in self.leases))
    @rule(choice=choices, num_tokens=small, mark=st.booleans())
    def insert(self, choice: int, num_tokens: int, mark: bool) -> None:
        lease = self.pick(choice, is_settled=True)
        if lease:
            self.advance_to(lease, num_tokens)
            self.cache.insert(lease, mark=mark)

    @precondition(lambda self: any(lease.reserved > lease.written for lease in self.leases))
    @rule(choice=choices, pages=st.integers(1, 3), mark=st.booleans())
    def insert_whole_pages(self, choice: int, pages: int, mark: bool) -> None:
        lease = self.pick(choice, is_settled=True)
        if lease:
            whole = (lease.written // self.page_size + pages) * self.page_size
            self.advance_to(lease, whole - lease.written)
            self.cache.insert(lease, mark=mark)

    @precondition(lambda self: any(lease.is_settled for lease in self.leases))
    @rule(choice=choices)
    def finish(self, choice: int) -> None:
        lease = self.pick(choice, is_settled=True)
        if lease:
            self.advance_to(lease, lease.reserved)
            self.leases.remove(lease)
            self.cache.release(lease, lease.written)

    @precondition(lambda self: self.leases)
    @rule(choice=choices)
    def abandon(self, choice: int) -> None:
        lease = self.pick(choice)
        if lease:
            self.leases.remove(lease)
            self.cache.release(lease)

    @precondition(lambda self: len(self.leases) < 4)
    @rule(
        page_letters=letters,
        tail=small,
        namespace=namespaces,
        mark=st.booleans(),
        is_idle_after=st.booleans(),
    )
    def serve(
        self, page_letters: list[int], tail: int, namespace: Namespace, mark: bool, is_idle_after: bool
    ) -> None:
        """One request from match to release, with a pause before its last page; as far as slots go."""
        prompt = spell(page_letters, self.page_size, tail + 1)
        lease = self.cache.match(prompt, namespace)
        for begin in (self.cache.fetch, self.cache.load):
            self.cache.complete_all(begin(lease).tickets)
        self.cache.settle(lease)
        reserved = self.cache.reserve(lease, len(prompt) - lease.boundary)
        if not reserved.short:
            pause = (len(prompt) - 1) // self.page_size * self.page_size
            if pause > lease.written:
                self.advance_to(lease, pause - lease.written)
                self.cache.insert(lease, mark=mark)
            self.advance_to(lease, len(prompt) - lease.written)
        self.cache.release(lease, lease.written)
        if is_idle_after:
            self.cache.complete_all()
        self.seen = [*self.seen[-5:], (namespace, prompt)]

    # ---- transfers ---------------------------------------------------------------------------
    @precondition(lambda self: self.cache.executor.pending)
    @rule(choice=choices)
    def complete(self, choice: int) -> None:
        ticket = self.pick_ticket(choice)
        if ticket is not None:
            self.cache.complete(ticket)

    @precondition(lambda self: self.cache.executor.pending)
    @rule()
    def complete_all(self) -> None:
        self.cache.complete_all()

    @precondition(lambda self: self.cache.executor.pending)
    @rule(choice=choices, done=small, missing=st.booleans())
    def abort(self, choice: int, done: int, missing: bool) -> None:
        ticket = self.pick_ticket(choice, but=self.cache.executor.claims())
        if ticket is not None:
            arrivable = self.cache.executor.num_arrivable(ticket)
            self.cache.abort(ticket, min(done, arrivable), missing=missing)

    # ---- pressure and L3 ---------------------------------------------------------------------
    @rule(choice=choices, tier=st.sampled_from([Tier.DEVICE, Tier.HOST]), slots=small)
    def make_room(self, choice: int, tier: Tier, slots: int) -> None:
        name = self.names[choice % len(self.names)]
        capacity = self.cache.core.pool_count(name, tier).capacity
        self.cache.make_room(name, tier, min(slots, capacity))

    @precondition(lambda self: self.cache.config.has_store)
    @rule(page_letters=letters, tail=small, namespace=namespaces)
    def learn(self, page_letters: list[int], tail: int, namespace: Namespace) -> None:
        prompt = spell(page_letters, self.page_size, tail)
        self.cache.learn(prompt, namespace)
        self.check_learnt(prompt, namespace)

    def check_learnt(self, prompt: list[int], namespace: Namespace) -> None:
        """What L3 really has counts from now on, on top of what L1 and L2 have."""
        if self.cache.config.max_stored_pages < 100:
            return
        truth = BruteForceModel(self.cache.config)
        path = path_bytes(prompt)
        truth.rebuild(self.cache.core.snapshot())
        truth.resident = {entry for entry in truth.resident if entry[2] != Tier.STORE}
        for name in self.names:
            keys = self.cache.executor.keys.of(name, namespace, path)
            pages = [i for i, key in enumerate(keys) if key in self.cache.executor.store]
            truth.place(namespace, path, name, Tier.STORE, pages)
        expected = truth.expect(namespace, path)
        found = self.cache.probe(prompt, namespace)
        assert found.boundary == expected.boundary, f"{found.boundary}, could be {expected.boundary}"

    @precondition(lambda self: self.cache.executor.store)
    @rule(choice=choices)
    def lose(self, choice: int) -> None:
        keys = sorted(self.cache.executor.store)
        self.cache.executor.lose(keys[choice % len(keys)])

    @precondition(lambda self: self.cache.config.has_store)
    @rule(page_letters=letters, namespace=namespaces, choice=choices, odd=st.booleans())
    def seed(self, page_letters: list[int], namespace: Namespace, choice: int, odd: bool) -> None:
        path = path_bytes(spell(page_letters, self.page_size))
        name = self.names[choice % len(self.names)]
        pages = range(len(page_letters))
        self.cache.executor.seed_store(name, namespace, path, pages[::2] if odd else pages)

    @precondition(lambda self: self.cache.config.has_store)
    @rule()
    def persist(self) -> None:
        self.cache.persist()

    @precondition(lambda self: self.step % 7 == 6)
    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self.leases.clear()

    # ---- always ------------------------------------------------------------------------------
    @invariant()
    def probes_agree_with_brute_force_and_change_nothing(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.step += 1
        before = self.cache.core.snapshot()
        self.cache.model.rebuild(before)
        for namespace, prompt in self.seen[-2:] + self.seen[self.step % len(self.seen) :][:1]:
            cap = bool(self.step % 2)
            found = self.cache.probe(prompt, namespace, cap=cap)
            expected = self.cache.model.expect(namespace, path_bytes(prompt), cap=cap)
            assert found.boundary == expected.boundary
            assert found.walked == expected.walked
            assert found.source == expected.source
            assert found.by_component == expected.by_component
            assert found.fork == expected.fork
        assert self.cache.core.snapshot() == before, "a probe changed something"

    def teardown(self) -> None:
        if not hasattr(self, "cache") or sys.exc_info()[0] is not None:
            return  # a failure is being reported; do not hide it behind another
        for lease in list(self.cache.leases.values()):
            self.cache.release(lease)
        self.cache.complete_all()
        check_idle(self.cache.core, self.cache.core.snapshot())
        for name in self.names:
            for tier in (Tier.DEVICE, Tier.HOST):
                capacity = self.cache.core.pool_count(name, tier).capacity
                assert self.cache.empty(name, tier) == capacity, f"{name} in {tier.name} is stuck"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", MODELS)
def test_no_sequence_of_calls_breaks_an_invariant(model: str, core_kind: str) -> None:
    machine = type("Machine", (CacheMachine,), {"model": model, "core_kind": core_kind})
    run_state_machine_as_test(machine, settings=settings(max_examples=EXAMPLES, stateful_step_count=STEPS))
