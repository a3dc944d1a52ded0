"""What L3 lacks travels there through L2, parents first; so L2 must never be full of suffixes alone."""

from __future__ import annotations

import random

import pytest

from hicache.radix.actions import Store
from hicache.testing.checks import check_idle
from hicache.testing.harness import BuildHarness, Harness
from hicache.testing.payloads import path_bytes
from hicache.testing.trees import count_to
from hicache.types import Namespace, Tier

DEVICE, HOST = Tier.DEVICE, Tier.HOST


def pages_in_l3(cache: Harness, length: int) -> list[bool]:
    keys = cache.executor.keys.of("full", Namespace(), path_bytes(count_to(length)))
    return [key in cache.executor.store for key in keys]


def leave_device(cache: Harness, *, step: int) -> None:
    """Push everything out of L1, ``step`` pages at a time, each as far as it will go."""
    capacity = cache.core.pool_count("full", DEVICE).capacity
    free = cache.core.pool_count("full", DEVICE).free
    while free < capacity:
        aim = min(capacity, free + step)
        for _ in range(4 * capacity):
            if cache.make_room("full", DEVICE, aim).free_slots >= aim or not cache.executor.pending:
                break
            cache.complete(next(iter(cache.executor.pending)))
        now = cache.core.pool_count("full", DEVICE).free
        assert now > free, f"stuck with {free} of {capacity} pages free"
        free = now


@pytest.mark.parametrize("write", ["write_back", "write_through", "write_through_selective"])
@pytest.mark.parametrize("step", [1, 8, 140])
@pytest.mark.parametrize("host", [2, 3, 24, 64, 140])
def test_nothing_is_lost_on_the_way_from_l1_to_l3(
    build: BuildHarness, write: str, step: int, host: int
) -> None:
    """O-39: the tail enters L2 first, L3 takes the head first; every page gets there all the same."""
    cache = build(page_size=4, device=140, host=host, has_store=True, write=write, is_checked=step > 1)
    cache.serve(count_to(512), is_idle_after=False)
    cache.serve(count_to(513))  # a second use, for the selective policy
    leave_device(cache, step=step)
    cache.persist_all()
    assert all(pages_in_l3(cache, 512))
    check_idle(cache.core, cache.core.snapshot())


@pytest.mark.parametrize("write", ["write_back", "write_through"])
@pytest.mark.parametrize("model", ["full", "full+swa", "full+draft", "full+mamba"])
@pytest.mark.parametrize("host", [2, 3, 4, 6, 10, 24])
@pytest.mark.parametrize("seed", range(5))
def test_a_backlog_loses_no_page(build: BuildHarness, seed: int, host: int, model: str, write: str) -> None:
    """O-71: transfers that end late and in any order, in an L2 that is too small."""
    rng = random.Random(seed)
    options = {"page_size": 4, "device": 24 + host, "host": host, "has_store": True, "write": write}
    cache = build(model, **options, is_checked=seed == 0)
    prompts = [
        [*count_to(16), *count_to(1000 * i + 4 * rng.choice((4, 8, 12)), start=1000 * i + 1)]
        for i in range(1, 13)
    ]
    served = []
    for prompt in prompts:
        lease = cache.match(prompt)
        cache.restore(lease)
        if cache.reserve_waiting(lease, len(prompt) - lease.boundary):
            cache.compute(lease, len(prompt))
            cache.release(lease, len(prompt))
            served.append(prompt)
        else:
            cache.release(lease)
        for _ in range(rng.randrange(4)):
            if cache.executor.pending:
                cache.complete(rng.choice(list(cache.executor.pending)))
    cache.persist_all()
    assert len(served) > 6
    for prompt in served:
        keys = cache.executor.keys.of("full", Namespace(), path_bytes(prompt))
        assert all(key in cache.executor.store for key in keys)
    check_idle(cache.core, cache.core.snapshot())


def test_a_store_that_refuses_does_not_keep_l2(build: BuildHarness) -> None:
    """What L3 refused is not waited for: L2 makes room, and loses it."""
    cache = build(page_size=4, device=140, host=24, has_store=True, write="write_back")
    cache.serve(count_to(512))
    capacity = 140
    for _ in range(2000):
        if cache.make_room("full", DEVICE, capacity).free_slots == capacity:
            break
        for ticket, action in list(cache.executor.pending.items()):
            if isinstance(action, Store):
                cache.abort(ticket, 0, missing=False)
            else:
                cache.complete(ticket)
    assert cache.core.pool_count("full", DEVICE).free == capacity
    assert not any(pages_in_l3(cache, 512))


def complete_all_but_stores(cache: Harness) -> None:
    """L3 takes nothing."""
    while cache.executor.pending:
        ticket, action = next(iter(cache.executor.pending.items()))
        if isinstance(action, Store):
            cache.abort(ticket, 0, missing=False)
        else:
            cache.complete(ticket)


@pytest.mark.parametrize("write", ["write_back", "write_through"])
def test_what_l3_did_not_take_is_tried_again_while_l2_has_it(build: BuildHarness, write: str) -> None:
    """DESIGN 6: and what hangs below follows."""
    cache = build("full+swa", page_size=4, device=32, host=32, has_store=True, write=write)
    cache.serve(count_to(40), is_idle_after=False)
    if write == "write_back":
        cache.persist()
    complete_all_but_stores(cache)
    assert not cache.executor.store
    assert cache.retry_stores().tickets
    cache.complete_all()
    assert all(pages_in_l3(cache, 40))
    assert not cache.retry_stores().tickets


def test_what_l2_gave_up_is_not_tried_again(build: BuildHarness) -> None:
    cache = build(page_size=4, device=8, host=8, has_store=True)
    cache.serve(count_to(16), is_idle_after=False)
    complete_all_but_stores(cache)
    cache.empty("full", HOST)
    assert not cache.retry_stores().tickets


@pytest.mark.parametrize(
    ("model", "component"), [("full+swa", "swa"), ("full+mamba", "mamba"), ("swa", "swa"), ("mamba", "mamba")]
)
def test_what_finds_l2_full_is_stored_when_it_gets_there(
    build: BuildHarness, model: str, component: str
) -> None:
    """A window or state whose path is in L3 long since: L2 is full of another's when it is published, and lets
    it in when it leaves L1. It goes on to L3; else the path would be there, and no boundary on it.
    """
    host = {name: 16 if name == "full" else 1 for name in model.split("+")}
    cache = build(model, page_size=4, window=4, device=16, host=host, has_store=True)
    first, second = count_to(8), count_to(108, start=101)
    cache.serve(first, is_idle_after=False)  # its copies down are under way, so their slots in L2 are pinned
    cache.serve(second)
    cache.complete_all()
    cache.empty(component, DEVICE)
    cache.complete_all()
    for name in ("full", component) if "full" in model else (component,):
        key = cache.executor.keys.of(name, Namespace(), path_bytes(second))[-1]
        assert key in cache.executor.store, f"{name} is not in L3"


@pytest.mark.parametrize("model", ["full+swa", "full+mamba", "full+swa+mamba"])
@pytest.mark.parametrize("is_path_there", [False, True], ids=["nothing", "path-there"])
def test_what_hangs_on_a_page_is_in_l3_before_that_leaves_l2(
    build: BuildHarness, model: str, is_path_there: bool
) -> None:
    """A page that goes takes its window and state along, so they must be in L3, whether or not its own way there
    is over long since.
    """
    cache = build(model, page_size=4, device=16, host=16, has_store=True, write="write_back")
    lease = cache.match(count_to(16))
    cache.restore(lease)
    assert cache.reserve_waiting(lease, 16)
    cache.compute(lease, 16)
    cache.insert(lease, mark=False)
    if is_path_there:
        cache.persist_all()
    cache.release(lease, 16)
    for tier in (DEVICE, HOST):
        cache.empty("full", tier)
    for name in model.split("+"):
        key = cache.executor.keys.of(name, Namespace(), path_bytes(count_to(16)))[-1]
        assert key in cache.executor.store, f"{name} is not in L3"
    assert cache.probe(count_to(17)).boundary == 16


@pytest.mark.parametrize("model", ["full+swa", "full+mamba"])
def test_a_state_that_l3_refuses_does_not_keep_its_page_in_l2(build: BuildHarness, model: str) -> None:
    cache = build(model, page_size=4, device=16, host=16, has_store=True, write="write_back")
    cache.serve(count_to(16))
    cache.empty("full", DEVICE)
    for _ in range(100):
        if cache.make_room("full", HOST, 16).free_slots == 16:
            break
        for ticket, action in list(cache.executor.pending.items()):
            if isinstance(action, Store) and action.component != "full":
                cache.abort(ticket, 0, missing=False)
            else:
                cache.complete(ticket)
    assert cache.core.pool_count("full", HOST).free == 16
    assert all(pages_in_l3(cache, 16))
