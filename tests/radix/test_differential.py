"""Both cores, given the same calls, return the same (DESIGN 10.10, O-70).

Hypothesis draws a configuration and a string of bytes; ``Driver`` reads the bytes as choices and calls
both cores in step, which are compared after every call (``hicache.testing.core_pair``). A failure shrinks to the shortest string and lists
its calls. ``HICACHE_TEST_PROFILE`` sets how much is tried.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from hicache.radix.core import core_kind
from hicache.radix.interface import TreeConfig
from hicache.radix.ordering import ORDERINGS
from hicache.testing.core_pair import CorePair
from hicache.testing.trees import tree_config
from hicache.types import (
    MOST_WORTH,
    RECENCY_WORTH,
    SHARED_WORTH,
    LeaseId,
    Namespace,
    Regard,
    SessionId,
    TicketId,
    Tier,
)

IS_QUICK = os.environ.get("HICACHE_TEST_PROFILE") == "quick"
CASES = 25 if IS_QUICK else 640

MODELS = [
    "full",
    "full+swa",
    "full+mamba",
    "full+swa+mamba",
    "swa",
    "mamba",
    "full+swa+wide",
    "full+draft+swa",
    "full+chunked+swa",
    "full+picky",
    "full+unreliable",
]
EVICTIONS = [
    *(name for name in ORDERINGS for _ in range(2)),
    *(f"hicache.testing.orderings.{name}" for name in ("UsesOverAge", "OldestUseInBands", "Unreliable")),
]
NAMESPACES = [Namespace(), Namespace(salt="a"), Namespace(salt=""), Namespace(lora="\ud800", extra="b")]
MAX_LEASES = 4

needs_rust = pytest.mark.skipif(
    core_kind("auto")[0] != "rust" and os.environ.get("HICACHE_REQUIRE_RUST") != "1",
    reason="the Rust core was not built (HICACHE_REQUIRE_RUST=1 makes this a failure)",
)


@st.composite
def configurations(draw: st.DrawFn, model: str) -> TreeConfig:
    """Pools so small that something has to leave at every step."""
    page_size = draw(st.sampled_from([1, 2, 4, 16, 64]))
    window = max(1, int(draw(st.sampled_from([0.5, 1, 1.5, 2, 3, 5])) * page_size))
    host = draw(st.sampled_from([0, 1, 2, 4, 8]))
    device = draw(st.integers(2, 12))
    states = draw(st.integers(1, 5))
    least = -(-window // page_size) + 1
    windows = draw(st.sampled_from([device, device, least, least + 1]))
    special = {"mamba": states, "swa": windows}
    costs = draw(st.sampled_from([(), (), (1, 1, 1), (1, 1, 4), (2, 1, 3), (1, 3, 2), (2, 3, 5)]))
    host_costs = dict(zip(model.split("+"), costs, strict=False)) if host else {}
    names = model.split("+")
    device_costs = dict(zip(names, draw(st.sampled_from([(), (), costs])), strict=False))
    # At least what a slot of each takes, and a window; three times that at most.
    fewest = sum(cost * (least if name == "swa" else 1) for name, cost in device_costs.items())
    return tree_config(
        model,
        page_size=page_size,
        window=window,
        wide=window + 2 * page_size,
        device=fewest * draw(st.integers(1, 3)) + draw(st.integers(0, 3))
        if device_costs
        else {name: special.get(name, device) for name in names},
        device_costs=device_costs,
        host=max(*host_costs.values(), 0, -(-sum(host_costs.values()) * host // 2)) if host_costs else host,
        host_costs=host_costs,
        has_store=host > 0 and draw(st.booleans()),
        write=draw(st.sampled_from(["write_through", "write_through_selective", "write_back"])),
        eviction=draw(st.sampled_from(EVICTIONS)),
        granularity=draw(st.sampled_from(["page", "page", "leaf"])),
        tail_tokens=draw(st.sampled_from([0, 1, 2, 4])) * page_size,
        admission=draw(st.sampled_from(["all", "ranked"])),
        store_admission=draw(st.sampled_from(["all", "unless_over"])),
        mark_spacing=draw(st.sampled_from([0, 1, 2])) * page_size,
        max_stored_pages=draw(st.sampled_from([4_000_000, 4_000_000, 3])),
    )


class Driver(CorePair):
    """Both cores, and a caller who reads bytes as choices."""

    def __init__(self, config: TreeConfig, choices: bytes) -> None:
        super().__init__(config)
        self.choices: Iterator[int] = iter(choices)
        self.leases: dict[LeaseId, list[int]] = {}
        self.reserved: dict[LeaseId, int] = {}
        self.num_opened = 0
        self.prompts: list[list[int]] = [[]]

    # ---- choices -----------------------------------------------------------------------------
    def pick(self, bound: int) -> int:
        """Raises ``StopIteration`` when the bytes are used up."""
        return next(self.choices) % bound

    def one_of(self, items: list[Any]) -> Any:  # Any: as the items
        return items[self.pick(len(items))]

    def prompt(self) -> list[int]:
        """Pages of one letter each, often behind an earlier prompt; letter 2 differs at the page's end."""
        tokens = list(self.one_of(self.prompts))
        keep = self.pick(8)
        if keep < 6:
            tokens = tokens[: len(tokens) // self.page_size * keep // 5 * self.page_size]
        for _ in range(self.pick(5)):
            letter = self.pick(3)
            page = [0] * (self.page_size - 1) + [1] if letter == 2 else [letter] * self.page_size
            tokens += page
        tokens += [1] * self.pick(self.page_size + 1)
        self.prompts = [*self.prompts[-5:], tokens]
        return tokens

    def lease(self) -> LeaseId:
        """Mostly an open one."""
        if not self.leases or self.pick(24) == 0:
            return LeaseId(self.pick(6) - 1)
        lease: LeaseId = self.one_of(list(self.leases))
        return lease

    # ---- steps -------------------------------------------------------------------------------
    def step(self) -> None:
        weighted: list[Callable[[], None]] = [
            self.match, self.match, self.serve, self.serve, self.serve, self.restore, self.restore,
            self.reserve, self.insert, self.insert, self.release, self.release,
            self.commit, self.commit, self.commit, self.commit_all, self.abort, self.refuse,
            self.make_room, self.make_room, self.learn, self.learn, self.persist, self.look, self.misuse,
            self.change, self.ahead, self.ahead, self.prefill, self.prefill,
        ]  # fmt: skip
        choice = self.pick(len(weighted) * 8 + 1)
        if choice == len(weighted) * 8:
            self.call("reset")
            self.leases.clear()
            self.reserved.clear()
        else:
            weighted[choice % len(weighted)]()
        self.agree()

    def run(self) -> None:
        self.agree()
        try:
            while True:
                self.step()
        except StopIteration:
            self.agree()

    # ---- requests ----------------------------------------------------------------------------
    def match(self) -> None:
        if len(self.leases) >= MAX_LEASES:
            self.release()
            return
        tokens = self.prompt()
        self.open(tokens, self.one_of(NAMESPACES) if self.pick(3) == 0 else NAMESPACES[0])

    def open(self, tokens: list[int], namespace: Namespace) -> LeaseId:
        array = np.array(tokens, dtype=np.int32)
        cap, priority = self.pick(4) > 0, self.one_of([0, 50, 100])
        session = self.one_of([None, SessionId(0), SessionId(1), SessionId(-5)])
        self.call("probe", array, namespace, cap=cap)
        lease: LeaseId = self.call(
            "match", array, namespace, session=session, priority=priority, cap=cap
        ).lease
        self.leases[lease] = tokens
        self.reserved[lease] = 0
        self.num_opened = lease + 1
        if self.pick(3) == 0:
            self.rate()
        return lease

    def serve(self) -> None:
        """A request from match to release, as far as slots go."""
        tokens = self.prompt()
        lease = self.open(tokens, NAMESPACES[0])
        is_ahead = self.pick(3) == 0
        if self.pick(2):
            for name in ("fetch", "load")[: 1 if is_ahead else 2]:
                for ticket in self.call(name, lease).tickets:
                    self.end(ticket)
        loading = self.call("load", lease).tickets if is_ahead else ()
        if self.pick(4) == 0:
            self.call("lower", lease, self.one_of(list(self.call("choices", lease))).boundary)
        boundary = self.call("settle", lease, arriving=is_ahead).boundary
        reserved = self.call("reserve", lease, max(0, len(tokens) - boundary))
        for ticket in loading:  # which may have ended, as what it waited for
            self.end(ticket)
        if reserved.short or (is_ahead and self.call("settle", lease).boundary < boundary):
            self.call("release", lease)
        else:
            if self.pick(2):
                pause = boundary + self.pick(len(tokens) - boundary + 1)
                self.call("insert", lease, np.array(tokens[:pause], dtype=np.int32), mark=self.pick(3) > 0)
            self.call("release", lease, np.array(tokens, dtype=np.int32), verified_len=len(tokens))
        del self.leases[lease], self.reserved[lease]

    def prefill(self) -> None:
        """A request that computes a page or two at a time and publishes each, behind what is in L1."""
        self.prefill_of(self.prompt())

    def prefill_of(self, tokens: list[int]) -> None:
        lease = self.open(tokens, NAMESPACES[0])
        done = self.call("settle", lease).boundary
        while done < len(tokens):
            count = min((1 + self.pick(2)) * self.page_size, len(tokens) - done)
            reserved = self.call("reserve", lease, count)
            while reserved.short and reserved.tickets:
                for ticket in reserved.tickets:
                    self.end(ticket)
                reserved = self.call("reserve", lease, count)
            if reserved.short:
                break
            done += count
            self.call("insert", lease, np.array(tokens[:done], dtype=np.int32), mark=self.pick(4) == 0)
        self.call("release", lease, np.array(tokens[:done], dtype=np.int32))
        del self.leases[lease], self.reserved[lease]

    def restore(self) -> None:
        lease = self.lease()
        self.call("plan", lease)
        choices = self.call("choices", lease)
        if choices and self.pick(4) == 0:
            self.call("lower", lease, self.one_of([0, self.page_size, *(each.boundary for each in choices)]))
        name = self.one_of(["fetch", "fetch", "load", "load", "settle", "arriving"])
        if name == "arriving":
            self.call("load", lease)
            self.call("settle", lease, arriving=True)
            self.call("lease_slots", lease, self.one_of(self.names))
        else:
            self.call(name, lease)

    def ahead(self) -> None:
        """A request that computes while L2 brings what it reuses; another one may publish the same meanwhile."""
        if len(self.leases) > MAX_LEASES - 2:
            self.release()
            return
        self.commit_all()
        for name in self.names:
            self.call("make_room", name, Tier.DEVICE, 12)
        self.agree()
        self.commit_all()
        tokens = list(self.one_of(self.prompts))
        array = np.array(tokens, dtype=np.int32)
        double = None
        if self.pick(2):
            double = self.open(list(tokens), NAMESPACES[0])
            self.reserved[double] = len(tokens)
            if self.call("reserve", double, len(tokens)).short:
                self.reserved[double] = 0
        lease = self.open(tokens, NAMESPACES[0])
        loading = self.call("load", lease).tickets
        self.call("settle", lease, arriving=True)
        for name in self.names:
            self.call("lease_slots", lease, name)
        self.reserve()
        if double is not None and self.reserved[double]:
            self.call("insert", double, array)
        if self.pick(2):
            self.agree()
            for ticket in loading:
                self.end(ticket)

    def reserve(self) -> None:
        lease = self.lease()
        num_tokens = self.pick(3 * self.page_size + 3) - (self.pick(20) == 0)
        reserved = self.call("reserve", lease, num_tokens)
        if reserved is not None and not reserved.short and lease in self.leases:
            self.reserved[lease] += num_tokens

    def insert(self) -> None:
        lease = self.lease()
        tokens = self.extended(lease)
        verified_len = self.pick(2) * (self.pick(len(tokens) + 3) - 1)
        array = np.array(tokens, dtype=np.int32)
        self.call("insert", lease, array, mark=self.pick(3) > 0, verified_len=verified_len)

    def extended(self, lease: LeaseId) -> list[int]:
        """What the lease may publish next: its prompt and output as far as slots reach, sometimes wrong."""
        if lease not in self.leases:
            return []
        settled = self.call("settle", lease)
        tokens = self.leases[lease]
        reach = settled.boundary + self.reserved[lease]
        tokens += [2] * max(0, reach - len(tokens))
        end = min(reach, len(tokens)) if self.pick(4) else self.pick(len(tokens) + 1)
        wrong = list(tokens[:end])
        if wrong and self.pick(16) == 0:
            wrong[self.pick(len(wrong))] = 7
        return wrong

    def release(self) -> None:
        lease = self.lease()
        tokens = np.array(self.extended(lease), dtype=np.int32) if self.pick(2) else None
        if self.call("release", lease, tokens) is not None:
            self.leases.pop(lease, None)
            self.reserved.pop(lease, None)

    # ---- while serving -----------------------------------------------------------------------
    def change(self) -> None:
        """What an operator does."""
        kinds = [
            self.clear, self.clear, self.resize, self.reconfigure, self.keep, self.keep,
            lambda: self.call("forget_store"),
        ]  # fmt: skip
        self.one_of(kinds)()

    def clear(self) -> None:
        namespace = self.one_of([None, *NAMESPACES[:3]])
        if self.pick(3) == 0:
            self.call("clear", namespace)
            return
        tokens = np.array(self.prompt()[: self.pick(6) * self.page_size + 1], dtype=np.int32)
        self.call("clear", namespace, tokens, alone=bool(self.pick(2)))

    def keep(self) -> None:
        tokens = np.array(self.prompt(), dtype=np.int32)
        name = self.one_of(["keep", "keep", "unkeep"])
        self.call(name, tokens, self.one_of(NAMESPACES[:2]))

    def resize(self) -> None:
        tier = self.one_of([Tier.DEVICE, Tier.HOST, Tier.HOST, Tier.STORE])
        name = self.one_of(self.names)
        self.call("resize", name, tier, self.pick(10))
        self.call("withheld_slots", name, tier)
        self.call("surplus_slots")

    def reconfigure(self) -> None:
        changes: list[dict[str, Any]] = [  # Any: as the fields
            {"eviction": self.one_of([*EVICTIONS, "session"])},
            {"write": self.one_of(["write_through", "write_through_selective", "write_back"])},
            {"pauses_writes": bool(self.pick(2))},
            {"granularity": self.one_of(["page", "leaf"]), "tail_tokens": self.page_size * self.pick(3)},
            {"has_store": bool(self.pick(2)), "max_stored_pages": 1 + self.pick(30)},
            {"page_size": self.page_size + 1},
        ]
        self.call("reconfigure", dataclasses.replace(self.cores[0].config, **self.one_of(changes)))

    # ---- transfers, pressure, L3 -------------------------------------------------------------
    def end(self, ticket: TicketId) -> None:
        if self.pick(8):
            self.call("commit", ticket)
        else:
            self.call("abort", ticket, self.pick(4), missing=bool(self.pick(2)))

    def commit(self) -> None:
        if self.pending:
            self.call("commit", self.one_of(self.pending))

    def commit_all(self) -> None:
        for ticket in self.pending:
            self.call("commit", ticket)

    def abort(self) -> None:
        if self.pending:
            ticket = self.one_of(self.pending)
            self.call("abort", ticket, self.pick(6), missing=bool(self.pick(2)))

    def refuse(self) -> None:
        """L3 is down, or has lost what it had: nothing under way arrives."""
        missing = bool(self.pick(2))
        for ticket in self.pending:
            self.call("abort", ticket, missing=missing)

    def make_room(self) -> None:
        tier = self.one_of([Tier.DEVICE, Tier.HOST])
        self.call("make_room", self.one_of(self.names), tier, self.pick(14) - 1)

    def rate(self) -> None:
        """Mostly recent turns; sometimes more than there are."""
        leases = [LeaseId(self.num_opened - self.pick(9)) for _ in range(self.pick(5))]
        worths = [self.one_of([0, 1, 9, 100, RECENCY_WORTH, SHARED_WORTH, MOST_WORTH]) for _ in leases]
        regards = [self.one_of([Regard.LOW, Regard.PLAIN, Regard.HIGH]) for _ in leases]
        self.call("rate", leases, worths, *([regards] if self.pick(2) else []))

    def persist(self) -> None:
        self.call(self.one_of(["persist", "retry_stores"]))

    def learn(self) -> None:
        tokens, namespace = np.array(self.prompt(), dtype=np.int32), self.one_of(NAMESPACES[:2])
        query = self.call("store_query", tokens, namespace, cap=bool(self.pick(2)))
        kind = self.pick(4)
        found = {
            name: {page: kind == 0 or (kind > 1 and self.pick(4) > 0) for page, _ in pages}
            for name, pages in query.keys.items()
        }
        if kind == 3 and self.config.has_store:
            found = {
                name: {self.pick(8): bool(self.pick(3)) for _ in range(self.pick(5))} for name in self.names
            }
        self.call("learn", tokens, found, namespace)

    def look(self) -> None:
        lease, name = self.lease(), self.one_of(self.names)
        self.call("lease_slots", lease, name)
        self.call("lease_state", lease, name)
        for tier in (Tier.DEVICE, Tier.HOST):
            self.call("pool_count", name, tier)
            self.call("free_slots", name, tier)
            self.call("held_slots", name, tier)

    def misuse(self) -> None:
        """What is refused and changes nothing."""
        before = self.cores[0].snapshot()
        number = self.one_of([-1, 10**6, 2**70])
        self.call("commit", TicketId(number))
        self.call("abort", TicketId(number))
        self.call("plan", LeaseId(number))
        self.call("lease_state", LeaseId(number), "full")
        self.call("make_room", "nothing", Tier.DEVICE, 1)
        self.call("learn", np.zeros(1, dtype=np.int32), {"nothing": {}, "nobody": {}})
        if self.pending:
            self.call("abort", self.pending[0], 10**6)
        assert self.cores[1].snapshot() == before


@needs_rust
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", MODELS)
def test_both_cores_return_the_same_for_any_sequence_of_calls(model: str) -> None:
    @settings(max_examples=CASES)
    @given(config=configurations(model), choices=st.binary(min_size=60, max_size=200))
    def run(config: TreeConfig, choices: bytes) -> None:
        driver = Driver(config, choices)
        try:
            driver.run()
        except BaseException:
            note("\n".join(f"{name}{args} {kwargs or ''}" for name, args, kwargs in driver.calls))
            raise

    run()


@needs_rust
@pytest.mark.parametrize("host", [0, 12, 64])
@pytest.mark.parametrize("model", ["swa", "full+swa", "full+swa+wide", "full+swa+mamba", "full+chunked+swa"])
def test_both_cores_cut_at_the_same_edges_of_windows(model: str, host: int) -> None:
    """A request goes on behind long nodes in pools with two pages more than its windows."""
    device = {"full": 48, "chunked": 48, "mamba": 4, "swa": 10, "wide": 14}
    config = tree_config(
        model,
        page_size=4,
        window=32,
        wide=48,
        device={name: device[name] for name in model.split("+")},
        host=host,
    )
    driver = Driver(config, b"\x01" * 1000)
    prompt = list(range(64))
    for tokens in (prompt, [*prompt, 900], [*prompt, *range(700, 772)], [*prompt[:56], *range(800, 830)]):
        driver.prefill_of(tokens)
        driver.agree()
        driver.commit_all()
        driver.agree()
        published = driver.call("probe", np.array(tokens, dtype=np.int32), NAMESPACES[0], cap=False).walked
        assert published == len(tokens) // 4 * 4, "a part was refused"
