"""The memory of an L1 with one budget: tensors for all, memory for what is in use."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch

from hicache.errors import ProtocolError
from hicache.testing.residency import resident_bytes, vm_flags
from hicache.tiers.shared_device import SharedDevicePool
from hicache.tiers.slots import PoolMemoryError
from hicache.types import ComponentSpec, ReuseRule

PAGE = mmap.PAGESIZE
SPECS = (
    ComponentSpec("full", num_layers=2, bytes_per_token=2 * PAGE),
    ComponentSpec("mamba", ReuseRule.CHECKPOINT, num_layers=2, state_bytes=8 * PAGE),
)
CAPACITY = 32 * PAGE
SLOTS = {"full": 16, "mamba": 4}


def make_pool() -> SharedDevicePool:
    return SharedDevicePool(SPECS, 1, SLOTS, capacity_bytes=CAPACITY)


def fill(pool: SharedDevicePool, name: str, slots: range) -> None:
    payload = np.ones((len(slots), pool.slot_bytes(name)), dtype=np.uint8)
    pool.write_many(name, list(slots), payload)


def test_each_component_has_the_tensor_that_kernels_know() -> None:
    pool = make_pool()
    assert pool["full"].shape == (2, 16, PAGE)
    assert pool["mamba"].shape == (2, 4, 4 * PAGE)
    assert pool.nbytes == CAPACITY
    fill(pool, "mamba", range(1, 2))
    assert bool((pool["mamba"][:, 1] == 1).all())
    assert not pool["mamba"][:, (0, 2, 3)].any()


def test_memory_comes_with_the_first_write_and_goes_when_it_is_given_back() -> None:
    pool = make_pool()
    assert resident_bytes(pool["full"]) == 0
    fill(pool, "full", range(10))
    assert resident_bytes(pool["full"]) == 10 * 2 * PAGE
    assert pool.give_back({"full": np.array([7, 2, 3])}) == 3 * 2 * PAGE
    assert resident_bytes(pool["full"]) == 7 * 2 * PAGE
    assert pool.read_many("full", [1, 2, 4]).any(axis=1).tolist() == [True, False, True]
    fill(pool, "full", range(2, 3))
    assert pool.read_many("full", [2]).all()


def test_no_huge_pages_are_given_unasked() -> None:
    """One of 2 MiB would be in memory as a whole for one slot, and go back as a whole or not at all."""
    pool = make_pool()
    assert all("nh" in vm_flags(pool[name]) for name in SLOTS)


def test_what_others_have_of_the_same_memory_stays() -> None:
    """Slots of half a page of the system: one alone gives nothing back, two that lie together do."""
    specs = (ComponentSpec("full", bytes_per_token=PAGE // 2),)
    pool = SharedDevicePool(specs, 1, {"full": 8}, capacity_bytes=8 * PAGE)
    fill(pool, "full", range(8))
    assert pool.give_back({"full": np.array([1])}) == 0
    assert pool.read_many("full", range(8)).all()
    assert pool.give_back({"full": np.array([3, 2, 1])}) == PAGE
    assert pool.read_many("full", [0, 1, 4]).all()


def test_all_of_it_goes_at_once() -> None:
    pool = make_pool()
    fill(pool, "full", range(16))
    fill(pool, "mamba", range(4))
    assert pool.give_back_all() == 2 * CAPACITY
    assert resident_bytes(pool["full"]) + resident_bytes(pool["mamba"]) == 0


def test_it_is_the_budget_that_has_to_fit_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.tiers.slots.available_memory", lambda device: CAPACITY)
    make_pool().close()
    monkeypatch.setattr("hicache.tiers.slots.available_memory", lambda device: CAPACITY - 1)
    with pytest.raises(PoolMemoryError, match=f"{CAPACITY:,} bytes does not fit"):
        make_pool()


def test_closed_it_has_nothing() -> None:
    pool = make_pool()
    view = pool["full"]
    pool.close()
    assert pool.nbytes == 0
    with pytest.raises(ProtocolError, match="closed"):
        pool["full"]
    assert isinstance(view, torch.Tensor)
    assert not view.any()


def test_the_measure_counts_what_is_there() -> None:
    """Of the helper: a tensor of which one page was written."""
    block = mmap.mmap(-1, 8 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(block, dtype=torch.uint8)
    tensor[3 * PAGE] = 1
    assert resident_bytes(tensor) == PAGE
