"""Random calls on every kind of model, with everything checked after each of them.

``CacheMachine`` draws a configuration so small that eviction works at every step, and then calls
whatever a careful or a careless caller might: transfers end late, in any order, in part or not at all;
requests are abandoned in every state; L3 loses pages. ``HICACHE_TEST_PROFILE`` sets how much is tried.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
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
from hicache.types import Namespace, Tier

IS_QUICK = os.environ.get("HICACHE_TEST_PROFILE") == "quick"
EXAMPLES = 12 if IS_QUICK else 260
STEPS = 15 if IS_QUICK else 25

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

small = st.integers(0, 12)
choices = st.integers(0, 63)


@dataclass(frozen=True)
class Prompt:
    """A prompt before the page size is known: maybe what an earlier request had, then some pages."""

    namespace: Namespace
    again: int
    letters: tuple[int, ...]
    tail: int


prompts = st.builds(
    Prompt,
    namespace=st.sampled_from(NAMESPACES),
    again=st.integers(0, 15),
    letters=st.lists(st.integers(0, 2), max_size=5).map(tuple),
    tail=small,
)


def spell(letters: Sequence[int], page_size: int, tail: int = 0) -> list[int]:
    """Pages of one letter each; letter 2 differs from letter 0 in the page's last token only."""
    tokens: list[int] = []
    for letter in letters:
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
        host=st.sampled_from([4, 2, 0, 8]),
        shares_device=st.booleans(),
        costs=st.sampled_from([(), (1, 1, 1), (1, 1, 4), (2, 1, 3), (1, 3, 2), (2, 3, 5)]),
        has_store=st.sampled_from([True, True, False]),
        write=st.sampled_from(["write_back", "write_through", "write_through_selective"]),
        window_pages=st.sampled_from([0.5, 1, 1.5, 2, 3]),
        granularity=st.sampled_from(["page", "page", "leaf"]),
        beliefs=st.sampled_from([4_000_000, 4_000_000, 3]),
        warm=st.lists(prompts, min_size=2, max_size=5),
    )
    def start(
        self,
        page_size: int,
        device: int,
        states: int,
        host: int,
        shares_device: bool,
        costs: tuple[int, ...],
        has_store: bool,
        write: str,
        window_pages: float,
        granularity: str,
        beliefs: int,
        warm: list[Prompt],
    ) -> None:
        names = self.model.split("+")
        host_costs = dict(zip(names, costs, strict=False)) if host else {}
        device_costs = dict(zip(names, costs, strict=False)) if shares_device else {}
        window = max(1, int(window_pages * page_size))
        config = tree_config(
            self.model,
            page_size=page_size,
            window=window,
            wide=window + 2 * page_size,
            device=device * max(costs) * 2
            if device_costs
            else {name: states if name == "mamba" else device for name in names},
            device_costs=device_costs,
            host=max(*host_costs.values(), 0, -(-sum(host_costs.values()) * host // 2))
            if host_costs
            else host,
            host_costs=host_costs,
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
        self.cache.is_checked = False
        for prompt in warm:
            self.serve(prompt, mark=True, is_idle_after=False)
        self.cache.is_checked = True
        self.cache.check()

    # ---- helpers -----------------------------------------------------------------------------
    def tokens_of(self, prompt: Prompt) -> tuple[Namespace, list[int]]:
        """Half of the prompts go on where an earlier one ended, or start alike."""
        page = self.page_size
        namespace, head = prompt.namespace, []
        if prompt.again < 8:
            namespace, seen = self.seen[prompt.again % len(self.seen)]
            keep = len(seen) if prompt.again < 4 else len(seen) // 2
            head = seen[: keep // page * page]
        tokens = (head + spell(prompt.letters, page, prompt.tail))[: 9 * page]
        self.seen = [*self.seen[-5:], (namespace, tokens)]
        return namespace, tokens

    def pick(self, choice: int) -> OpenLease:
        return self.leases[choice % len(self.leases)]

    def advance_to(self, lease: OpenLease, length: int) -> None:
        """Compute up to ``length``, as far as slots are reserved; output is made up as needed."""
        end = min(lease.reserved, length)
        lacking = end - len(lease.tokens)
        if lacking > 0:
            output = np.full(lacking, 1, dtype=np.int32)
            lease.tokens = np.concatenate([lease.tokens, output])
        self.cache.compute(lease, end)

    # ---- requests ----------------------------------------------------------------------------
    @precondition(lambda self: len(self.leases) < 4)
    @rule(prompt=prompts, cap=st.booleans())
    def match(self, prompt: Prompt, cap: bool) -> None:
        namespace, tokens = self.tokens_of(prompt)
        promised = self.cache.probe(tokens, namespace, cap=cap)
        lease = self.cache.match(tokens, namespace, cap=cap)
        assert lease.found == promised
        self.leases.append(lease)

    @precondition(lambda self: any(not lease.is_settled for lease in self.leases))
    @rule(choice=choices, act=st.sampled_from(["fetch", "load", "fetch", "load", "settle"]))
    def restore(self, choice: int, act: str) -> None:
        unsettled = [lease for lease in self.leases if not lease.is_settled]
        getattr(self.cache, act)(unsettled[choice % len(unsettled)])

    @precondition(lambda self: self.leases)
    @rule(choice=choices, num_tokens=small, is_prompt=st.booleans())
    def reserve(self, choice: int, num_tokens: int, is_prompt: bool) -> None:
        lease = self.pick(choice)
        self.cache.settle(lease)
        if is_prompt:
            num_tokens = max(0, len(lease.tokens) - lease.reserved)
        self.cache.reserve(lease, num_tokens)

    @precondition(lambda self: any(lease.reserved > lease.written for lease in self.leases))
    @rule(choice=choices, num_tokens=small, is_whole=st.booleans(), mark=st.booleans())
    def insert(self, choice: int, num_tokens: int, is_whole: bool, mark: bool) -> None:
        ready = [lease for lease in self.leases if lease.reserved > lease.written]
        lease = ready[choice % len(ready)]
        end = lease.written + num_tokens
        if is_whole:
            end = (end // self.page_size + 1) * self.page_size
        self.advance_to(lease, end)
        self.cache.insert(lease, mark=mark)

    @precondition(lambda self: self.leases)
    @rule(choice=choices, is_abandoned=st.booleans())
    def release(self, choice: int, is_abandoned: bool) -> None:
        lease = self.pick(choice)
        self.leases.remove(lease)
        if is_abandoned or not lease.is_settled:
            self.cache.release(lease)
        else:
            self.advance_to(lease, lease.reserved)
            self.cache.release(lease, lease.written)

    @rule(prompt=prompts, mark=st.booleans(), is_idle_after=st.booleans())
    def serve(self, prompt: Prompt, mark: bool, is_idle_after: bool) -> None:
        """One request from match to release, with a pause before its last page; as far as slots go."""
        namespace, tokens = self.tokens_of(prompt)
        tokens.append(1)
        lease = self.cache.match(tokens, namespace)
        for begin in (self.cache.fetch, self.cache.load):
            self.cache.complete_all(begin(lease).tickets)
        self.cache.settle(lease)
        reserved = self.cache.reserve(lease, len(tokens) - lease.boundary)
        if reserved.short:
            self.cache.complete_all(reserved.tickets)
            reserved = self.cache.reserve(lease, len(tokens) - lease.boundary)
        if not reserved.short:
            pause = (len(tokens) - 1) // self.page_size * self.page_size
            if pause > lease.written:
                self.advance_to(lease, pause)
                self.cache.insert(lease, mark=mark)
            self.advance_to(lease, len(tokens))
        self.cache.release(lease, lease.written)
        if is_idle_after:
            self.cache.complete_all()

    # ---- transfers ---------------------------------------------------------------------------
    @precondition(lambda self: self.cache.executor.pending)
    @rule(choice=choices, is_everything=st.booleans())
    def complete(self, choice: int, is_everything: bool) -> None:
        if is_everything:
            self.cache.complete_all()
        else:
            pending = list(self.cache.executor.pending)
            self.cache.complete(pending[choice % len(pending)])

    @precondition(lambda self: len(self.cache.executor.pending) > len(self.cache.executor.claims()))
    @rule(choice=choices, done=small, missing=st.booleans())
    def abort(self, choice: int, done: int, missing: bool) -> None:
        """A claim is a copy within L1, which does not fail."""
        pending = [t for t in self.cache.executor.pending if t not in self.cache.executor.claims()]
        ticket = pending[choice % len(pending)]
        arrivable = self.cache.executor.num_arrivable(ticket)
        self.cache.abort(ticket, min(done, arrivable), missing=missing)

    # ---- pressure and L3 ---------------------------------------------------------------------
    @rule(choice=choices, is_host=st.booleans(), slots=small)
    def make_room(self, choice: int, is_host: bool, slots: int) -> None:
        name = self.names[choice % len(self.names)]
        tier = Tier.HOST if is_host and self.cache.config.host_slots else Tier.DEVICE
        count = self.cache.core.pool_count(name, tier)
        self.cache.make_room(name, tier, min(count.free + slots, count.capacity))

    @precondition(lambda self: self.cache.config.has_store)
    @rule(prompt=prompts)
    def learn(self, prompt: Prompt) -> None:
        namespace, tokens = self.tokens_of(prompt)
        self.cache.learn(tokens, namespace)
        if self.cache.config.max_stored_pages > 100:
            self.check_learnt(tokens, namespace)

    def check_learnt(self, tokens: list[int], namespace: Namespace) -> None:
        """What L3 really has counts from now on, on top of what L1 and L2 have."""
        truth = BruteForceModel(self.cache.config)
        path = path_bytes(tokens)
        truth.rebuild(self.cache.core.snapshot())
        truth.resident = {entry for entry in truth.resident if entry[2] != Tier.STORE}
        for name in self.names:
            keys = self.cache.executor.keys.of(name, namespace, path)
            pages = [i for i, key in enumerate(keys) if key in self.cache.executor.store]
            truth.place(namespace, path, name, Tier.STORE, pages)
        expected = truth.expect(namespace, path)
        found = self.cache.probe(tokens, namespace)
        assert found.boundary == expected.boundary, f"{found.boundary}, could be {expected.boundary}"

    @precondition(lambda self: self.cache.config.has_store)
    @rule(prompt=prompts, choice=choices, act=st.sampled_from(["persist", "seed", "lose"]))
    def change_store(self, prompt: Prompt, choice: int, act: str) -> None:
        executor = self.cache.executor
        if act == "persist":
            self.cache.persist()
        elif act == "lose" and executor.store:
            keys = sorted(executor.store)
            executor.lose(keys[choice % len(keys)])
        elif act == "seed":
            namespace, tokens = self.tokens_of(prompt)
            pages = range(len(tokens) // self.page_size)
            name = self.names[choice % len(self.names)]
            whole = path_bytes(tokens[: len(pages) * self.page_size])
            executor.seed_store(name, namespace, whole, pages[:: 1 + choice % 2])

    @precondition(lambda self: self.step % 7 == 6)
    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self.leases.clear()

    @rule(prompt=prompts, choice=choices, alone=st.booleans())
    def clear(self, prompt: Prompt, choice: int, alone: bool) -> None:
        """An operator throws something away; what is not held is in no tier any more."""
        namespace, tokens = self.tokens_of(prompt)
        whole = tokens[: len(tokens) // self.page_size * self.page_size]
        if choice % 4 and whole:
            cleared = self.cache.clear(namespace, whole, alone=alone)
        else:
            cleared = self.cache.clear(namespace if choice % 8 else None)
        if not cleared.kept and whole:
            assert self.cache.probe(tokens, namespace, cap=False).boundary < len(whole)

    @rule(choice=choices, eviction=st.sampled_from(["lru", "slru", "session", "fifo", "priority"]))
    def reconfigure(self, choice: int, eviction: str) -> None:
        self.cache.reconfigure(eviction=eviction, pauses_writes=choice % 4 == 0)

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
