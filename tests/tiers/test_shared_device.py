"""The memory of an L1 with one budget: tensors for all, memory for what is in use."""

from __future__ import annotations

import ctypes
import mmap
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from hicache.errors import ProtocolError
from hicache.testing.residency import resident_bytes, vm_flags
from hicache.tiers import host_memory
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


class CountingLibc:
    """Counts system calls by name; ``process_madvise`` may be one that this kernel does not have."""

    def __init__(self, libc: ctypes.CDLL, *, is_old: bool) -> None:
        self._libc, self._is_old = libc, is_old
        self.calls: Counter[str] = Counter()

    def syscall(self, *args: Any) -> int:  # as libc's
        self.calls["syscall"] += 1
        return -1 if self._is_old else int(self._libc.syscall(*args))

    def madvise(self, *args: Any) -> int:  # as libc's
        self.calls["madvise"] += 1
        return int(self._libc.madvise(*args))


@pytest.mark.parametrize("is_old", [False, True], ids=["this kernel", "an older kernel"])
def test_what_lies_scattered_goes_in_few_calls(monkeypatch: pytest.MonkeyPatch, is_old: bool) -> None:
    """Every other slot of 600, two layers: 600 places, one call for each before."""
    specs = (ComponentSpec("full", num_layers=2, bytes_per_token=2 * PAGE),)
    pool = SharedDevicePool(specs, 1, {"full": 600}, capacity_bytes=1200 * PAGE)
    fill(pool, "full", range(600))
    libc = CountingLibc(host_memory._LIBC, is_old=is_old)
    monkeypatch.setattr(host_memory, "_LIBC", libc)
    assert pool.give_back({"full": np.arange(0, 600, 2)}) == 600 * PAGE
    assert libc.calls["syscall"] == 1
    if libc.calls["madvise"] and not is_old:
        pytest.skip("process_madvise of this process needs Linux 6.14")
    assert libc.calls["madvise"] == (600 if is_old else 0)
    assert resident_bytes(pool["full"]) == 600 * PAGE
    assert pool.read_many("full", range(600)).any(axis=1).tolist() == [False, True] * 300


def test_more_places_than_one_call_takes_go_all() -> None:
    specs = (ComponentSpec("full", bytes_per_token=PAGE),)
    pool = SharedDevicePool(specs, 1, {"full": 2200}, capacity_bytes=2200 * PAGE)
    fill(pool, "full", range(2200))
    assert pool.give_back({"full": np.arange(0, 2200, 2)}) == 1100 * PAGE
    assert pool.read_many("full", range(2200)).any(axis=1).tolist() == [False, True] * 1100


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
