"""A host pool near its device, in huge pages, pinned in the background: on a stand-in for what locks pages."""

from __future__ import annotations

import logging
import mmap
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hicache.errors import TierUnavailableError
from hicache.testing.transfer_rig import PATIENCE_S, engine_threads
from hicache.tiers import host_memory
from hicache.tiers.host import HostPool
from hicache.tiers.host_memory import HUGE_PAGE_BYTES, Pinning, allocate, node_of
from hicache.tiers.shared_host import SharedHostPool
from hicache.types import ComponentSpec

SPECS = (
    ComponentSpec("full", num_layers=2, bytes_per_token=1 << 10),
    ComponentSpec("mamba", rule="checkpoint", num_layers=3, state_bytes=96),
)


class FakeLocker:
    """Remembers what is locked; may wait, and may refuse from some call on."""

    def __init__(self, *, refuse_from: int = 100) -> None:
        self.locked: dict[int, int] = {}
        self.num_calls = 0
        self.may_lock = threading.Event()
        self.may_lock.set()
        self.is_locking = threading.Event()
        self._refuse_from = refuse_from

    def lock(self, address: int, num_bytes: int) -> None:
        self.is_locking.set()
        assert self.may_lock.wait(PATIENCE_S)
        self.num_calls += 1
        if self.num_calls >= self._refuse_from:
            raise TierUnavailableError("too little may be locked")
        self.locked[address] = num_bytes

    def unlock(self, address: int) -> None:
        del self.locked[address]


@pytest.fixture
def locker() -> FakeLocker:
    return FakeLocker()


@pytest.fixture
def make_pool(locker: FakeLocker) -> Iterator[Callable[[], HostPool]]:
    pools: list[HostPool] = []

    def make() -> HostPool:
        pools.append(HostPool(SPECS, 16, {"full": 100, "mamba": 7}, pinned=True, locker=locker))
        return pools[-1]

    yield make
    locker.may_lock.set()
    for pool in pools:
        pool.close()


# ---- memory ----------------------------------------------------------------------------------------------------------
def flags_of(address: int) -> list[str]:
    """What the kernel says of the mapping that holds an address."""
    text = Path("/proc/self/smaps").read_text(encoding="ascii")
    for entry in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", text):
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", entry)
        if bounds and int(bounds[1], 16) <= address < int(bounds[2], 16):
            found = re.search(r"VmFlags: (.*)", entry)
            assert found is not None
            return found[1].split()
    raise AssertionError("no such mapping")


@pytest.mark.parametrize("num_bytes", [1, 4096, 5_000_001])
def test_memory_starts_at_a_huge_page_is_zero_and_can_be_written(num_bytes: int) -> None:
    block = allocate(num_bytes)
    assert (block.nbytes, block.ctypes.data % HUGE_PAGE_BYTES) == (num_bytes, 0)
    assert not block.any()
    block[:] = 7
    assert block[-1] == 7


needs_huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="this machine has no huge pages to ask for",
)


@needs_huge_pages
def test_huge_pages_are_asked_for() -> None:
    # The control is a mapping of our own: NumPy asks for huge pages too where a kernel is new enough.
    plain = np.frombuffer(mmap.mmap(-1, 8 << 20), np.uint8)
    assert "hg" in flags_of(allocate(8 << 20).ctypes.data)
    assert "hg" not in flags_of(plain.ctypes.data)


def test_a_node_that_is_not_there_costs_nothing_but_a_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        block = allocate(4096, node=60)
    block[:] = 1
    assert "NUMA node 60" in caplog.text


def test_the_first_node_is_taken_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    allowed = re.search(
        r"(?m)^Mems_allowed_list:\s*(\d+)", Path("/proc/self/status").read_text(encoding="ascii")
    )
    with caplog.at_level(logging.INFO):
        allocate(4096, node=int(allowed[1]) if allowed else 0)[:] = 1
    if "error 38" in caplog.text or "error 1:" in caplog.text or "error 1\n" in caplog.text:
        pytest.skip("this machine, or its container, lets nobody choose NUMA nodes")
    assert caplog.text == ""


@pytest.mark.parametrize(("says", "node"), [("1\n", 1), ("-1\n", None), (None, None), ("what", None)])
def test_the_node_of_a_device_is_read_from_the_system(
    tmp_path: Path, says: str | None, node: int | None
) -> None:
    place = tmp_path / "0000:c8:00.0"
    place.mkdir()
    if says is not None:
        (place / "numa_node").write_text(says)
    cuda = SimpleNamespace(
        get_device_properties=lambda _: SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC8, pci_device_id=0)
    )
    assert node_of(torch.device("cuda", 0), tmp_path, cuda) == node


def test_a_machine_without_the_device_has_no_node() -> None:
    assert node_of(torch.device("cpu")) is None


# ---- pinning ---------------------------------------------------------------------------------------------------------
def test_a_pool_is_one_block_a_component_and_each_is_locked_as_a_whole(
    make_pool: Callable[[], HostPool], locker: FakeLocker
) -> None:
    pool = make_pool()
    assert pool.wait_pinned(PATIENCE_S)
    assert locker.locked == {pool[name].data_ptr(): pool[name].nbytes for name in ("full", "mamba")}
    progress = pool.pin_progress
    assert progress is not None
    assert progress.present_bytes == progress.pinned_bytes == progress.total_bytes == pool.nbytes


def test_a_pool_serves_while_it_is_being_pinned(
    make_pool: Callable[[], HostPool], locker: FakeLocker
) -> None:
    locker.may_lock.clear()
    pool = make_pool()
    assert locker.is_locking.wait(PATIENCE_S)
    payload = bytes(range(256)) * 64
    pool.write("full", 99, payload)
    assert not pool.is_pinned
    progress = pool.pin_progress
    assert progress is not None
    assert (progress.present_bytes, progress.pinned_bytes) == (pool["full"].nbytes, 0)
    locker.may_lock.set()
    assert pool.wait_pinned(PATIENCE_S)
    assert pool.read("full", 99) == payload, "pinning changed nothing"
    assert bytes(pool.page("full", 99)) == payload


def test_pages_are_brought_in_part_by_part(monkeypatch: pytest.MonkeyPatch, locker: FakeLocker) -> None:
    monkeypatch.setattr(host_memory, "PART_BYTES", 1 << 20)
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(
        host_memory, "_madvise", lambda _block, first, num_bytes, _advice: asked.append((first, num_bytes))
    )
    pinning = Pinning([np.zeros((5 << 19), np.uint8)], locker)
    assert pinning.wait(PATIENCE_S)
    assert asked == [(0, 1 << 20), (1 << 20, 1 << 20), (2 << 20, 1 << 19)]
    pinning.close()


@pytest.mark.parametrize("refuse_from", [1, 2])
def test_what_cannot_be_locked_is_told_with_what_it_costs_and_the_remedy(
    caplog: pytest.LogCaptureFixture, refuse_from: int
) -> None:
    locker = FakeLocker(refuse_from=refuse_from)
    with caplog.at_level(logging.WARNING):
        pool = HostPool(SPECS, 16, {"full": 100, "mamba": 7}, pinned=True, locker=locker)
        assert not pool.wait_pinned(PATIENCE_S)
    for said in ("too little may be locked", "each byte once more", "ulimit -l", "tiers.host.pinned"):
        assert said in caplog.text
    progress = pool.pin_progress
    assert progress is not None
    assert progress.error == "too little may be locked"
    assert progress.pinned_bytes == (refuse_from - 1) * pool["full"].nbytes
    pool.write("full", 0, bytes(16 << 10))
    pool.close()
    assert locker.locked == {}


def test_closing_unlocks_and_leaves_no_thread(make_pool: Callable[[], HostPool], locker: FakeLocker) -> None:
    before = engine_threads()
    pool = make_pool()
    pool.wait_pinned(PATIENCE_S)
    assert locker.locked
    pool.close()
    pool.close()
    assert locker.locked == {}
    assert engine_threads() == before


def test_closing_in_the_middle_waits_for_the_lock_at_hand_and_begins_no_other(locker: FakeLocker) -> None:
    locker.may_lock.clear()
    pool = HostPool(SPECS, 16, {"full": 100, "mamba": 7}, pinned=True, locker=locker)
    assert locker.is_locking.wait(PATIENCE_S)
    closer = threading.Thread(target=pool.close)
    closer.start()
    assert pool._pinning is not None
    assert pool._pinning._stop.wait(PATIENCE_S)
    locker.may_lock.set()
    closer.join(PATIENCE_S)
    assert not closer.is_alive()
    assert (locker.num_calls, locker.locked) == (1, {})


def test_memory_that_is_pinned_or_about_to_be_is_not_given_back(make_pool: Callable[[], HostPool]) -> None:
    pool = make_pool()
    assert pool.give_back("full", np.arange(100)) == 0
    plain = HostPool(SPECS, 16, {"full": 100, "mamba": 7}, pinned=False)
    assert plain.give_back("full", np.arange(100)) > 0
    assert plain.pin_progress is None
    plain.close()


def test_without_cuda_the_pool_is_plain_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with caplog.at_level(logging.INFO):
        pool = HostPool(SPECS, 16, {"full": 1, "mamba": 1}, pinned=True)
    assert "not pinned" in caplog.text
    assert not pool.is_pinned
    assert not pool.wait_pinned(0)
    pool.close()


# ---- one budget for all components -----------------------------------------------------------------------------------
COSTS = {"full": 4, "mamba": 1}


def shared_pool(locker: FakeLocker | None, *, pinned: bool = True) -> SharedHostPool:
    """Of 64 units of 4 KiB."""
    return SharedHostPool(SPECS, 16, num_units=64, unit_bytes=4096, costs=COSTS, pinned=pinned, locker=locker)


def test_a_shared_budget_is_one_block_that_is_locked_as_a_whole(
    locker: FakeLocker,
) -> None:
    before = engine_threads()
    pool = shared_pool(locker)
    address = pool.units.data_ptr()
    assert address % HUGE_PAGE_BYTES == 0
    assert pool.wait_pinned(PATIENCE_S)
    assert locker.locked == {address: 64 * 4096}
    pool.close()
    pool.close()
    assert locker.locked == {}
    assert engine_threads() == before


@needs_huge_pages
def test_a_shared_budget_lies_in_huge_pages(locker: FakeLocker) -> None:
    pool = shared_pool(locker)
    assert "hg" in flags_of(pool.units.data_ptr())
    pool.close()


def test_a_shared_budget_serves_while_it_is_being_pinned(locker: FakeLocker) -> None:
    locker.may_lock.clear()
    pool = shared_pool(locker)
    assert locker.is_locking.wait(PATIENCE_S)
    pool.placement.place("full", np.array([3]))
    payload = bytes(range(256)) * 64
    pool.write("full", 3, payload)
    assert not pool.is_pinned
    locker.may_lock.set()
    assert pool.wait_pinned(PATIENCE_S)
    assert pool.read("full", 3) == payload, "pinning changed nothing"
    pool.close()


def test_a_shared_budget_that_is_about_to_be_pinned_gives_nothing_back(locker: FakeLocker) -> None:
    locker.may_lock.clear()
    pool = shared_pool(locker)
    assert pool.withhold(8) == 0
    locker.may_lock.set()
    pool.close()
    plain = shared_pool(None, pinned=False)
    assert plain.withhold(8) > 0
    plain.close()


def test_a_shared_budget_that_cannot_be_locked_serves_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        pool = shared_pool(FakeLocker(refuse_from=1))
        assert not pool.wait_pinned(PATIENCE_S)
    assert "ulimit -l" in caplog.text
    pool.placement.place("mamba", np.array([0]))
    pool.write("mamba", 0, bytes(range(96)))
    assert pool.read("mamba", 0) == bytes(range(96))
    pool.close()
