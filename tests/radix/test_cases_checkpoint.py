"""Reported failures of recurrent states: exact boundaries, claims, recency, failed loads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from hicache.radix.actions import Copy
from hicache.testing.checks import check_idle
from hicache.testing.harness import BuildHarness, Harness
from hicache.testing.payloads import path_bytes
from hicache.testing.trees import count_to
from hicache.types import Namespace, TicketId, Tier

DEVICE, HOST, STORE = Tier.DEVICE, Tier.HOST, Tier.STORE


def seed(cache: Harness, length: int, **pages: Iterable[int]) -> None:
    """Put pages of T(length) into L3; a state counts by the page it follows."""
    for component, indices in pages.items():
        cache.executor.seed_store(component, Namespace(), path_bytes(count_to(length)), indices)


def tickets_of(cache: Harness, component: str) -> list[TicketId]:
    return [t for t, a in cache.executor.pending.items() if a.component == component]


def test_the_same_prompt_again_hits_the_state_below_its_last_token(build: BuildHarness) -> None:
    """O-04."""
    cache = build("full+mamba", page_size=64, device=16)
    assert cache.serve(count_to(100)).reused == 0
    assert cache.serve(count_to(100)).reused == 64


def test_a_match_that_reuses_nothing_changes_nothing(build: BuildHarness) -> None:
    """O-04: the only state lies at the prompt's end, which the cap rules out."""
    cache = build("full+mamba", page_size=1, device={"full": 128, "mamba": 8})
    cache.serve(count_to(100), marks=[])
    cache.serve([500, 501], marks=[])
    before = cache.core.snapshot()
    for _ in range(3):
        lease = cache.match(count_to(100))
        assert (lease.found.boundary, lease.found.walked, lease.found.fork) == (0, 99, 99)
        assert cache.core.snapshot() == before
        cache.release(lease)
    assert cache.core.snapshot() == before


def test_the_last_device_copy_leaves_a_node_that_the_host_can_serve(build: BuildHarness) -> None:
    """O-17."""
    cache = build("full+mamba", page_size=64, device=8, host=8)
    cache.serve(count_to(256), marks=[])
    cache.empty("mamba", DEVICE)
    cache.empty("full", DEVICE)
    assert cache.core.pool_count("full", HOST).free == 8 - 4
    assert cache.core.pool_count("mamba", HOST).free == 8 - 1
    assert cache.core.pool_count("full", DEVICE).free == 8

    lease = cache.match(count_to(257))
    assert (lease.found.source.device, lease.found.source.host) == (0, 256)
    started = cache.load(lease)
    copies = {a.component: a.num_slots for a in started.actions if isinstance(a, Copy)}
    assert copies == {"full": 4, "mamba": 1}
    cache.complete_all()
    assert cache.restore(lease).boundary == 256
    assert cache.core.lease_state(lease.lease, "mamba") is not None


@pytest.mark.parametrize("refused", ["all", "state", "path"])
def test_an_aborted_load_leaves_no_state_and_no_reuse(build: BuildHarness, refused: str) -> None:
    """O-18: the copy engine refuses."""
    cache = build("full+mamba", page_size=64, device=8, host=8)
    cache.serve(count_to(256), marks=[])
    cache.empty("mamba", DEVICE)
    cache.empty("full", DEVICE)
    lease = cache.match(count_to(257))
    cache.load(lease)
    for component in ("full", "mamba"):
        for ticket in tickets_of(cache, component):
            if refused == "all" or (refused == "state") == (component == "mamba"):
                cache.abort(ticket)
            else:
                cache.complete(ticket)
    assert cache.settle(lease).boundary == 0
    assert cache.core.lease_state(lease.lease, "mamba") is None
    cache.release(lease)
    check_idle(cache.core, cache.core.snapshot())
    assert cache.empty("mamba", DEVICE) == 8
    assert cache.probe(count_to(257)).boundary == 256, "the host still has all of it"


def test_a_claim_that_fails_leaves_nothing_to_reuse(build: BuildHarness) -> None:
    """O-18: the copy into the private slot fails after settle; the engine reads the boundary again."""
    cache = build("full+mamba", page_size=4, device=8)
    cache.serve(count_to(8), marks=[])
    lease = cache.match(count_to(9))
    cache.is_checked = False
    assert cache.settle(lease).tickets
    for ticket in list(cache.executor.claims()):
        cache.abort(ticket)
    assert cache.core.settle(lease.lease).boundary == 0
    assert cache.core.lease_state(lease.lease, "mamba") is None
    cache.release(lease)
    cache.is_checked = True
    cache.check()
    check_idle(cache.core, cache.core.snapshot())
    assert cache.serve(count_to(9)).reused == 8, "the tree's own state is unharmed"


def test_a_state_whose_copy_fails_is_not_left_in_the_tree(build: BuildHarness) -> None:
    """O-18, the other way: the copy from the private slot into the tree's fails."""
    cache = build("full+mamba", page_size=4, device=8)
    lease = cache.match(count_to(12))
    cache.reserve(lease, 12)
    cache.compute(lease, 8)
    cache.insert(lease)
    for ticket in list(cache.executor.claims()):
        cache.abort(ticket)
    assert cache.probe(count_to(9)).boundary == 0
    cache.compute(lease, 12)
    cache.release(lease, 12)
    assert cache.probe(count_to(13)).boundary == 12


def test_a_load_without_room_leaves_no_state_and_no_reuse(build: BuildHarness) -> None:
    """O-18: no room for the state in L1."""
    cache = build("full+mamba", page_size=64, device={"full": 8, "mamba": 2}, host=8)
    cache.serve(count_to(256), marks=[])
    cache.empty("mamba", DEVICE)
    cache.empty("full", DEVICE)
    busy = [cache.match([900 + i] * 65) for i in range(2)]
    assert all(not cache.reserve(lease, 65).short for lease in busy)

    lease = cache.match(count_to(257))
    assert cache.restore(lease).boundary == 0
    assert cache.core.lease_state(lease.lease, "mamba") is None
    cache.release(lease)
    for other in busy:
        cache.release(other)
    check_idle(cache.core, cache.core.snapshot())


def test_a_hit_refreshes_only_the_state_it_consumes(build: BuildHarness) -> None:
    """O-19: four states; the inner ones of the sessions go before the ends."""
    cache = build("full+mamba", page_size=4, device={"full": 64, "mamba": 4})
    a, b = [1] * 8, [2] * 8
    cache.serve(a, marks=[4])
    cache.serve(b, marks=[4])
    hit = cache.match([*a, 9])
    assert hit.found.boundary == 8
    cache.release(hit)

    states = {"a1": [*a[:4], 9], "a2": [*a, 9], "b1": [*b[:4], 9], "b2": [*b, 9]}
    cache.serve([3] * 4, marks=[])
    found = {name: cache.probe(prompt).boundary for name, prompt in states.items()}
    assert found == {"a1": 0, "a2": 8, "b1": 4, "b2": 8}
    cache.serve([4] * 4, marks=[])
    found = {name: cache.probe(prompt).boundary for name, prompt in states.items()}
    assert found == {"a1": 0, "a2": 8, "b1": 0, "b2": 8}


def test_a_shared_prefix_gets_a_state_at_the_fork(build: BuildHarness) -> None:
    """O-20: 1,500 shared tokens, 700 of each's own, states every 528."""
    cache = build("full+mamba", page_size=528, device=64)
    shared = count_to(1500)
    prompts = [[*shared, *[10_000 * (i + 1)] * 700] for i in range(3)]
    assert cache.serve(prompts[0]).reused == 0
    blocked = cache.core.counters().get("fork_tokens", 0)
    second = cache.serve(prompts[1])
    assert (second.reused, second.found.walked, second.found.fork) == (0, 1056, 1056)
    assert cache.core.counters()["fork_tokens"] - blocked == 1056
    assert cache.serve(prompts[2]).reused == 1056


@pytest.mark.parametrize(("length", "reused"), [(512, 256), (513, 512), (511, 256), (257, 256)])
def test_the_cap_falls_back_to_the_state_before_an_exact_boundary(
    build: BuildHarness, length: int, reused: int
) -> None:
    """O-21."""
    cache = build("full+mamba", page_size=256, device=16)
    cache.serve(count_to(512), marks=[256, 512])
    assert cache.probe(count_to(length)).boundary == reused
    lease = cache.match(count_to(length))
    assert lease.found.boundary == reused
    assert cache.restore(lease).boundary == reused


@pytest.mark.parametrize(("length", "reused"), [(512, 256), (513, 512)])
def test_the_cap_holds_for_what_only_l3_has(build: BuildHarness, length: int, reused: int) -> None:
    """O-21, by the L3 probe and the plan."""
    cache = build("full+mamba", page_size=256, device=16, host=16, has_store=True)
    seed(cache, 512, full=range(2), mamba=range(2))
    query = cache.learn(count_to(length))
    asked = [page for page, _ in query.keys["mamba"]]
    assert max(asked) == reused // 256 - 1
    lease = cache.match(count_to(length))
    assert lease.found.boundary == reused
    steps = [step for step in cache.plan(lease) if step.component == "mamba"]
    assert [(s.first_page, s.last_page) for s in steps] == [(reused // 256 - 1, reused // 256)]
    assert cache.restore(lease).boundary == reused


ENDPOINTS = [
    # path pages, window endpoints, state endpoints, the greatest common one
    (3, [3], [3], 3),
    (3, [3], [2], 0),
    (3, [1, 3], [1, 2], 1),
    (2, [1, 3], [1, 3], 1),
    (3, [2], [2], 2),
    (3, [], [1], 0),
]


@pytest.mark.parametrize(("path_pages", "windows", "states", "common"), ENDPOINTS)
def test_the_boundary_is_a_common_endpoint_in_match_probe_and_plan(
    build: BuildHarness, path_pages: int, windows: list[int], states: list[int], common: int
) -> None:
    """O-22: an intersection, not the minimum of maxima."""
    settings = {"page_size": 4, "window": 4, "device": 16, "host": 16, "has_store": True}
    cache = build("full+swa+mamba", **settings)
    pages = {
        "full": range(path_pages),
        "swa": [end - 1 for end in windows],
        "mamba": [end - 1 for end in states],
    }
    seed(cache, 12, **pages)
    prompt = count_to(13)
    cache.learn(prompt)

    assert cache.probe(prompt).boundary == 4 * common
    lease = cache.match(prompt)
    assert lease.found.boundary == 4 * common
    steps = {(s.component, s.first_page, s.last_page) for s in cache.plan(lease)}
    wanted = {("full", 0, common), ("swa", common - 1, common), ("mamba", common - 1, common)}
    assert steps == (wanted if common else set())
    assert cache.restore(lease).boundary == 4 * common


@pytest.mark.parametrize(
    ("marks", "evicted", "common"),
    [([12], "", 3), ([8, 12], "", 3), ([4, 12], "mamba", 0), ([4, 8], "swa", 0), ([4, 8], "", 2)],
)
def test_the_boundary_is_a_common_endpoint_of_what_l1_has(
    build: BuildHarness, marks: list[int], evicted: str, common: int
) -> None:
    """O-22, in L1."""
    cache = build("full+swa+mamba", page_size=4, window=4, device=16)
    lease = cache.match(count_to(13))
    cache.reserve(lease, 13)
    for end in sorted({*marks, 12}):
        cache.compute(lease, end)
        cache.insert(lease, mark=end in marks)
        cache.complete_all()
    cache.release(lease)
    if evicted:
        cache.empty(evicted, DEVICE)
    assert cache.probe(count_to(13)).boundary == 4 * common
    assert cache.match(count_to(13)).found.boundary == 4 * common


@pytest.mark.parametrize(
    ("states", "lost", "reused"),
    [([], [], 0), ([31], [], 512), ([31], [31], 0), ([15, 31], [31], 256)],
)
def test_l3_reports_only_what_every_component_can_restore(
    build: BuildHarness, states: list[int], lost: list[Any], reused: int
) -> None:
    """O-23: path payload of 1,024 tokens, states at 512 and 256."""
    cache = build("full+mamba", page_size=16, device=80, host=80, has_store=True)
    seed(cache, 1024, full=range(64), mamba=states)
    cache.learn(count_to(1025))
    promised = (states[-1] + 1) * 16 if states else 0
    assert cache.probe(count_to(1025)).boundary == promised
    keys = cache.executor.keys.of("mamba", Namespace(), path_bytes(count_to(1024)))
    for page in lost:
        del cache.executor.store[keys[page]]
    first = cache.match(count_to(1025))
    assert cache.restore(first).boundary in {0, reused}
    cache.release(first)
    second = cache.match(count_to(1025))
    assert second.found.boundary == reused, "the lost state is no longer believed in"
    assert cache.restore(second).boundary == reused


def lose(cache: Harness, component: str, page: int) -> None:
    keys = cache.executor.keys.of(component, Namespace(), path_bytes(count_to(32)))
    cache.executor.store.pop(keys[page], None)


@pytest.mark.parametrize(
    ("lost", "reused"),
    [
        ([("full", 5)], 16),
        ([("full", 5), ("mamba", 3)], 0),
        ([("full", 5), ("swa", 3)], 0),
        ([("swa", 7)], 16),
        ([("mamba", 7)], 16),
        ([("full", 3)], 0),
        ([], 32),
    ],
    ids=str,
)
def test_a_failed_load_of_a_hybrid_falls_back_to_a_boundary_that_all_have(
    build: BuildHarness, lost: list[Any], reused: int
) -> None:
    """O-58: pages 0-7 of 4 tokens, window 8, states at 16 and 32; reads fail after the probe."""
    settings = {"page_size": 4, "window": 8, "device": 24, "host": 24, "has_store": True}
    cache = build("full+swa+mamba", **settings)
    seed(cache, 32, full=range(8), swa=[2, 3, 6, 7], mamba=[3, 7])
    cache.learn(count_to(33))
    for component, page in lost:
        lose(cache, component, page)
    reuses = []
    for _ in range(4):
        lease = cache.match(count_to(33))
        reuses.append(cache.restore(lease).boundary)
        cache.release(lease)
    assert max(reuses) == reuses[-1] == reused


@pytest.mark.parametrize(("done", "reused"), [(0, 16), (1, 16), (3, 16)])
def test_what_arrived_before_the_failure_is_salvaged_with_what_l1_had(
    build: BuildHarness, done: int, reused: int
) -> None:
    """O-58: L1 has all of 16; of pages 4-7 only the first arrive."""
    settings = {"page_size": 4, "window": 8, "device": 24, "host": 24, "has_store": True}
    cache = build("full+swa+mamba", write="write_back", **settings)
    cache.serve(count_to(16), marks=[])
    seed(cache, 32, full=range(8), swa=[6, 7], mamba=[7])
    cache.learn(count_to(33))
    lease = cache.match(count_to(33))
    assert lease.found.boundary == 32
    cache.fetch(lease)
    for component in ("full", "swa", "mamba"):
        for ticket in tickets_of(cache, component):
            if component == "full":
                cache.abort(ticket, done)
            else:
                cache.complete(ticket)
    cache.load(lease)
    cache.complete_all()
    assert cache.settle(lease).boundary == reused
    cache.release(lease)


def test_a_state_is_handed_over_only_at_a_whole_number_of_pages(build: BuildHarness) -> None:
    cache = build("full+mamba", page_size=4, device=16)
    lease = cache.match(count_to(10))
    cache.reserve(lease, 10)
    cache.compute(lease, 6)
    assert cache.insert(lease).states == ()
    cache.compute(lease, 8)
    assert cache.insert(lease).states == ("mamba",)
    cache.compute(lease, 10)
    released = cache.release(lease, 10)
    assert (released.published, released.states) == (8, ())
    assert cache.probe(count_to(11)).boundary == 8
    assert cache.core.pool_count("mamba", DEVICE).free == 15


def test_the_private_state_is_never_the_shared_one(build: BuildHarness) -> None:
    cache = build("full+mamba", page_size=4, device=16)
    cache.serve(count_to(8), marks=[])
    leases = [cache.match([*count_to(8), 20 + i]) for i in range(2)]
    for lease in leases:
        cache.restore(lease)
    shared = [slot for view in cache.core.snapshot() for slot in view.slots.get(("mamba", DEVICE), ())]
    private = [cache.core.lease_state(lease.lease, "mamba") for lease in leases]
    assert len({*shared, *private}) == 3


def test_a_state_that_the_tree_has_is_kept_and_ours_is_freed(build: BuildHarness) -> None:
    cache = build("full+mamba", page_size=4, device=16)
    prompt = count_to(8)
    leases = [cache.match(prompt) for _ in range(2)]
    for lease in leases:
        cache.reserve(lease, 8)
        cache.compute(lease, 8)
    cache.release(leases[0], 8)
    kept = [v.slots["mamba", DEVICE] for v in cache.core.snapshot() if ("mamba", DEVICE) in v.slots]
    cache.release(leases[1], 8)
    after = [v.slots["mamba", DEVICE] for v in cache.core.snapshot() if ("mamba", DEVICE) in v.slots]
    assert after == kept
    assert cache.core.pool_count("mamba", DEVICE).free == 15


def test_a_state_alone_needs_no_path(build: BuildHarness) -> None:
    cache = build("mamba", page_size=4, device=8)
    cache.serve(count_to(12), marks=[4])
    assert cache.probe(count_to(13)).boundary == 12
    assert cache.probe([*count_to(8), 99]).boundary == 4
    assert cache.serve([*count_to(8), 99]).reused == 4
