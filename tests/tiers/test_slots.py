"""Both pools keep a slot's bytes in page order, each in its own layout."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from hicache.errors import ConfigError, ProtocolError
from hicache.tiers import slots as slots_module
from hicache.tiers.device import DevicePool
from hicache.tiers.host import HostPool
from hicache.tiers.slots import PoolMemoryError, SlotPool, available_memory
from hicache.types import ComponentSpec

PAGE_SIZE = 4
SPECS = (
    ComponentSpec("full", num_layers=3, bytes_per_token=6),  # slots of 24 bytes, 8 a layer
    ComponentSpec("mamba", rule="checkpoint", num_layers=2, state_bytes=10),
)
SLOTS = {"full": 5, "mamba": 2}


def device_pool() -> SlotPool:
    return DevicePool(SPECS, PAGE_SIZE, SLOTS)


def host_pool() -> SlotPool:
    return HostPool(SPECS, PAGE_SIZE, SLOTS, pinned=False)


both_pools = pytest.mark.parametrize("make_pool", [device_pool, host_pool], ids=["device", "host"])
PAGE = bytes(range(24))
ROWS = np.arange(3 * 24, dtype=np.uint8).reshape(3, 24)


@both_pools
def test_a_pool_says_what_it_holds(make_pool: Callable[[], SlotPool]) -> None:
    pool = make_pool()
    assert pool.names == ("full", "mamba")
    assert (pool.num_slots("full"), pool.num_slots("mamba")) == (5, 2)
    assert (pool.slot_bytes("full"), pool.slot_bytes("mamba")) == (24, 10)
    assert pool.nbytes == 5 * 24 + 2 * 10
    assert pool["full"].dtype == torch.uint8


def test_the_device_pool_is_layer_first() -> None:
    pool = device_pool()
    assert (tuple(pool["full"].shape), tuple(pool["mamba"].shape)) == ((3, 5, 8), (2, 2, 5))
    assert pool["full"].is_contiguous()
    pool.write("full", 2, PAGE)
    for layer in range(3):
        assert pool["full"][layer, 2].tolist() == list(PAGE[8 * layer : 8 * layer + 8])


def test_the_host_pool_is_page_first() -> None:
    pool = host_pool()
    assert (tuple(pool["full"].shape), tuple(pool["mamba"].shape)) == ((5, 3, 8), (2, 2, 5))
    assert pool["full"].is_contiguous()
    pool.write("full", 2, PAGE)
    assert pool["full"][2].flatten().tolist() == list(PAGE)


@both_pools
def test_what_was_written_is_read_and_nothing_else_changes(make_pool: Callable[[], SlotPool]) -> None:
    pool = make_pool()
    pool.write("full", 3, PAGE)
    pool.write("mamba", 1, bytearray(b"0123456789"))
    assert pool.read("full", 3) == PAGE
    assert pool.read("mamba", 1) == b"0123456789"
    assert [pool.read("full", slot) for slot in (0, 1, 2, 4)] == [bytes(24)] * 4


@both_pools
@pytest.mark.parametrize(
    "payload",
    [ROWS, torch.from_numpy(ROWS.copy()), np.asfortranarray(ROWS)],
    ids=["array", "tensor", "strided"],
)
def test_many_slots_are_written_and_read_in_the_order_given(
    make_pool: Callable[[], SlotPool], payload: np.ndarray[tuple[int, int], np.dtype[np.uint8]]
) -> None:
    pool = make_pool()
    pool.write_many("full", [4, 0, 2], payload)
    assert pool.read("full", 0) == ROWS[1].tobytes()
    read = pool.read_many("full", np.array([2, 4, 0, 2], dtype=np.int32))
    assert read.dtype == np.uint8
    assert read.tolist() == ROWS[[2, 0, 1, 2]].tolist()
    read[:] = 0
    assert pool.read("full", 4) == ROWS[0].tobytes()  # a copy


@both_pools
def test_no_slots_are_written_and_read_as_nothing(make_pool: Callable[[], SlotPool]) -> None:
    pool = make_pool()
    pool.write_many("full", [], np.empty((0, 24), dtype=np.uint8))
    assert pool.read_many("full", []).shape == (0, 24)


@both_pools
@pytest.mark.parametrize("slot", [-1, 5, 2**40])
def test_a_slot_out_of_range_is_refused_and_never_wraps_around(
    make_pool: Callable[[], SlotPool], slot: int
) -> None:
    pool = make_pool()
    for call in (
        lambda: pool.read("full", slot),
        lambda: pool.write("full", slot, PAGE),
        lambda: pool.read_many("full", [0, slot]),
        lambda: pool.write_many("full", [0, 1, slot], ROWS),
    ):
        with pytest.raises(ValueError, match=f"slot {slot} .* out of range"):
            call()
    assert not pool["full"].any()


@both_pools
@pytest.mark.parametrize("slots", [[0.5, 1.0, 2.0], [[0], [1], [2]], [True, False, True]])
def test_slots_that_are_no_list_of_integers_are_refused(
    make_pool: Callable[[], SlotPool], slots: list[int]
) -> None:
    with pytest.raises(ValueError, match="integers of one dimension expected"):
        make_pool().write_many("full", slots, ROWS)


@both_pools
def test_a_slot_named_twice_in_one_write_is_refused(make_pool: Callable[[], SlotPool]) -> None:
    with pytest.raises(ValueError, match="named twice"):
        make_pool().write_many("full", [1, 2, 1], ROWS)


@both_pools
@pytest.mark.parametrize(
    "payload",
    [ROWS[:2], ROWS[:, :23], ROWS.astype(np.int8), ROWS.reshape(-1)],
    ids=["rows", "width", "type", "flat"],
)
def test_a_payload_of_another_shape_or_type_is_refused(
    make_pool: Callable[[], SlotPool], payload: np.ndarray[tuple[int, int], np.dtype[np.uint8]]
) -> None:
    with pytest.raises(ValueError, match="expected"):
        make_pool().write_many("full", [0, 1, 2], payload)


@both_pools
@pytest.mark.parametrize("num_bytes", [0, 23, 25])
def test_a_payload_of_another_length_is_refused(make_pool: Callable[[], SlotPool], num_bytes: int) -> None:
    with pytest.raises(ValueError):
        make_pool().write("full", 0, bytes(num_bytes))


@both_pools
def test_a_closed_pool_holds_no_memory_and_gives_no_tensor(make_pool: Callable[[], SlotPool]) -> None:
    with make_pool() as pool:
        assert pool.nbytes > 0
    assert pool.nbytes == 0
    pool.close()
    with pytest.raises(ProtocolError):
        pool.read("full", 0)


def test_a_host_page_is_a_writable_view_of_the_pool() -> None:
    pool = HostPool(SPECS, PAGE_SIZE, SLOTS, pinned=False)
    page = pool.page("full", 4)
    assert (page.nbytes, page.format, page.contiguous, page.readonly) == (24, "B", True, False)
    page[:] = PAGE
    assert pool.read("full", 4) == PAGE
    assert pool["full"].data_ptr() + 4 * 24 == torch.frombuffer(page, dtype=torch.uint8).data_ptr()
    pool.close()
    assert page == PAGE  # who holds a view keeps its memory
    with pytest.raises(ProtocolError):
        pool.page("full", 4)


@pytest.mark.parametrize("slot", [-1, 5])
def test_a_host_page_out_of_range_is_refused(slot: int) -> None:
    pool = HostPool(SPECS, PAGE_SIZE, SLOTS, pinned=False)
    with pytest.raises(ValueError, match=f"slot {slot} is out of range: 'full' has 5 slots"):
        pool.page("full", slot)


def test_pinned_without_cuda_is_plain_memory_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with caplog.at_level(logging.INFO, logger="hicache"):
        pool = HostPool(SPECS, PAGE_SIZE, SLOTS, pinned=True)
    assert not pool.is_pinned
    assert caplog.messages == ["no CUDA here: the host pool is plain memory, not pinned"]


def test_a_component_may_have_no_slots_in_a_tier() -> None:
    for pool in (
        DevicePool(SPECS, 4, {"full": 1, "mamba": 0}),
        HostPool(SPECS, 4, {"full": 1, "mamba": 0}, pinned=False),
    ):
        assert pool.num_slots("mamba") == 0
        with pytest.raises(ValueError):
            pool.read("mamba", 0)


@pytest.mark.parametrize(
    ("specs", "page_size", "slots", "problem"),
    [
        (SPECS, 4, {"full": 1}, "slots.mamba: missing"),
        (SPECS, 4, {"full": 1, "mamba": 1, "swa": 1}, "slots.swa: no such component"),
        (SPECS, 4, {"full": 1, "mamba": -1}, "slots.mamba: -1, 0 or more expected"),
        (SPECS, 0, SLOTS, "page_size: 0, 1 or more expected"),
        (SPECS * 2, 4, SLOTS, "names are not unique"),
        (
            [ComponentSpec("a", num_layers=3, bytes_per_token=1)],
            4,
            {"a": 1},
            "4 bytes a slot do not divide into 3 layers",
        ),
        ([ComponentSpec("a", num_layers=1)], 4, {"a": 1}, "0 bytes a slot"),
    ],
    ids=["missing", "unknown", "negative", "page-size", "names", "layers", "empty"],
)
def test_sizes_that_do_not_agree_are_refused(
    specs: list[ComponentSpec], page_size: int, slots: dict[str, int], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        HostPool(specs, page_size, slots, pinned=False)


def test_a_pool_that_does_not_fit_memory_is_refused_with_the_numbers() -> None:
    spec = ComponentSpec("full", num_layers=1, bytes_per_token=1 << 50)
    with pytest.raises(PoolMemoryError, match="lower the tier's capacity") as raised:
        HostPool([spec], 1, {"full": 8}, pinned=False)
    assert raised.value.required_bytes == 8 << 50
    assert 0 < raised.value.available_bytes < 1 << 50
    assert isinstance(raised.value, ConfigError)


def test_cuda_without_cuda_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="cuda:0 was asked for, this machine has no CUDA"):
        DevicePool(SPECS, PAGE_SIZE, SLOTS, device="cuda:0")


def test_available_memory_honours_a_containers_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots_module, "_MEMORY_GROUP", tmp_path)
    unlimited = available_memory("cpu")
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    assert available_memory("cpu") == 450
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory("cpu") > 1000
    assert unlimited > 1000


def test_available_memory_is_known_without_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots_module, "_MEMORY_INFO", tmp_path / "meminfo")
    assert available_memory("cpu") > 0


@pytest.mark.gpu
def test_the_same_class_serves_cuda() -> None:
    host = HostPool(SPECS, PAGE_SIZE, SLOTS, pinned=True)
    assert host.wait_pinned(60)
    assert host["full"].is_pinned()
    with DevicePool(SPECS, PAGE_SIZE, SLOTS, device="cuda:0") as pool:
        assert pool["full"].is_cuda
        pool.write_many("full", [4, 0, 2], ROWS)
        pool.write_many("full", [1], torch.from_numpy(ROWS[:1].copy()).cuda())
        assert pool.read_many("full", [0, 1, 2]).tolist() == ROWS[[1, 0, 2]].tolist()
        assert pool.read("full", 4) == ROWS[0].tobytes()
        with pytest.raises(ValueError, match="out of range"):
            pool.read("full", -1)


def test_memory_of_unused_slots_goes_back_and_their_neighbours_keep_theirs() -> None:
    """Slots of ten memory pages and a half, so that no slot but the first begins with one."""
    page = mmap.PAGESIZE
    slot_bytes = 10 * page + page // 2
    specs = (ComponentSpec("full", num_layers=1, bytes_per_token=slot_bytes),)
    pool = HostPool(specs, 1, {"full": 400}, pinned=False)
    rows = np.full((400, slot_bytes), 7, dtype=np.uint8)
    pool.write_many("full", np.arange(400), rows)
    before = resident_bytes()
    unused = np.arange(399, 99, -1, dtype=np.int64)
    freed = pool.give_back("full", unused)
    assert 300 * slot_bytes - 2 * page <= freed <= 300 * slot_bytes
    assert before - resident_bytes() > freed // 2
    assert (pool.read_many("full", np.arange(100)) == rows[:100]).all()
    pool.write_many("full", unused, rows[100:])
    assert (pool.read_many("full", unused) == rows[100:]).all()
    assert pool.give_back("full", np.empty(0, dtype=np.int64)) == 0
    small = host_pool()
    assert isinstance(small, HostPool)
    assert small.give_back("full", np.array([0, 3])) == 0  # less than a page of memory


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_a_device_index_that_is_not_there_is_refused_with_what_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(
        ConfigError, match=r"tiers\.device\.index: 3 is not there; this machine has 2 devices"
    ):
        available_memory("cuda:3")
