"""The copy kernel without a device: it compiles for every architecture, and copies the right bytes when run on the CPU."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import TierUnavailableError
from hicache.transfer.kernels import (
    ARCHITECTURES,
    SOURCE,
    THREADS,
    CupyKernel,
    Strides,
    compile_kernels,
    copy_kernel,
)

SHIM = """
#define __global__
typedef struct { unsigned x, y, z; } dim3_;
typedef struct __attribute__((aligned(16))) { unsigned x, y, z, w; } uint4;
static dim3_ blockIdx, blockDim, gridDim, threadIdx;
#include "%s"
void launch(unsigned blocks, unsigned threads, const unsigned char *source, unsigned char *target,
            const long long *source_slots, const long long *target_slots, const long long *rest)
{
    gridDim.x = blocks; blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)
            copy_pages(source, target, source_slots, target_slots,
                       rest[0], rest[1], rest[2], rest[3], rest[4], rest[5], rest[6]);
}
"""
MAPPING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
"""``MAP_NORESERVE`` (mmap has the name from Python 3.13 on): addresses only."""
Launch = Callable[[torch.Tensor, list[int], torch.Tensor, list[int]], None]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_kernels_compile_without_a_device(architecture: str) -> None:
    cubin = compile_kernels(architecture)
    assert cubin.startswith(b"\x7fELF")
    assert b"copy_pages" in cubin


def test_what_does_not_compile_is_told_with_the_compiler_s_words() -> None:
    with pytest.raises(TierUnavailableError, match="sm_1"):
        compile_kernels("sm_1")


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """The same source, compiled by the C compiler, thread after thread."""
    folder: Path = tmp_path_factory.mktemp("kernel")
    (folder / "shim.c").write_text(SHIM % SOURCE)
    command = ["cc", "-O1", "-shared", "-fPIC", "-o", str(folder / "shim.so"), str(folder / "shim.c")]
    subprocess.run(command, check=True, capture_output=True, timeout=250)
    library = ctypes.CDLL(str(folder / "shim.so"))

    def run(
        source: torch.Tensor, source_slots: list[int], target: torch.Tensor, target_slots: list[int]
    ) -> None:
        strides = Strides.of(source, target)
        rest = np.array(strides.arguments(len(source_slots)), dtype=np.int64)
        slots = [np.array(each, dtype=np.int64) for each in (source_slots, target_slots)]
        addresses = (source.data_ptr(), target.data_ptr(), *(s.ctypes.data for s in slots), rest.ctypes.data)
        blocks = strides.num_blocks(len(source_slots))
        library.launch(blocks, THREADS, *(ctypes.c_void_p(address) for address in addresses))

    return run


def pool(
    num_slots: int, num_layers: int, layer_bytes: int, *, layer_first: bool, offset: int
) -> torch.Tensor:
    """Uint8 ``[slot, layer, byte]`` over memory of that order, not aligned where ``offset`` says so."""
    memory = torch.empty(num_slots * num_layers * layer_bytes + 16, dtype=torch.uint8)
    begin = -memory.data_ptr() % 16 + offset
    flat = memory[begin:][: num_slots * num_layers * layer_bytes]
    if layer_first:
        return flat.view(num_layers, num_slots, layer_bytes).transpose(0, 1)
    return flat.view(num_slots, num_layers, layer_bytes)


@given(data=st.data())
def test_the_kernel_copies_what_it_is_told_and_nothing_else(launch: Launch, data: st.DataObject) -> None:
    num_slots = data.draw(st.integers(1, 12), "slots")
    num_layers = data.draw(st.integers(1, 5), "layers")
    layer_bytes = data.draw(st.sampled_from([1, 7, 8, 16, 24, 100, 512, 528, 1000]), "layer bytes")
    source, target = (
        pool(
            num_slots,
            num_layers,
            layer_bytes,
            layer_first=data.draw(st.booleans(), "layer first"),
            offset=data.draw(st.sampled_from([0, 0, 1, 8]), "offset"),
        )
        for _ in range(2)
    )
    seed = data.draw(st.integers(0, 1000), "seed")
    generator = torch.Generator().manual_seed(seed)
    source.copy_(torch.randint(0, 256, source.shape, generator=generator, dtype=torch.uint8))
    target.fill_(0xEE)  # poison
    count = data.draw(st.integers(1, num_slots), "count")
    pairs = [data.draw(st.permutations(range(num_slots)), "table")[:count] for _ in range(2)]
    layers = slice(None)
    if data.draw(st.booleans(), "one layer"):  # of a load by layer
        layer = data.draw(st.integers(0, num_layers - 1), "layer")
        layers = slice(layer, layer + 1)
    expected = target.clone()
    expected[pairs[1], layers] = source[pairs[0], layers]
    launch(source[:, layers], pairs[0], target[:, layers], pairs[1])
    assert torch.equal(target, expected)


def test_a_large_batch_goes_round_the_grid_several_times(launch: Launch) -> None:
    """More segments than warps: 1,024 blocks of 8 warps, 20,000 segments."""
    source = pool(5000, 4, 32, layer_first=True, offset=0)
    target = pool(5000, 4, 32, layer_first=False, offset=0)
    source.copy_(torch.randint(0, 256, source.shape, dtype=torch.uint8))
    order = torch.randperm(5000).tolist()
    launch(source, order, target, list(range(5000)))
    assert torch.equal(target, source[order])


@pytest.mark.parametrize("to_host", [True, False])
def test_offsets_beyond_four_gib_are_whole(launch: Launch, to_host: bool) -> None:
    """Pools of tens of GiB: the last slots and layers are far beyond what 32 bits count. Untouched memory costs nothing."""
    num_slots, num_layers, layer_bytes = 300_000, 3, 8192  # 2.3 GiB a layer, 6.9 GiB a pool
    num_bytes = num_slots * num_layers * layer_bytes
    try:
        flat = [
            torch.frombuffer(mmap.mmap(-1, num_bytes, flags=MAPPING), dtype=torch.uint8) for _ in range(2)
        ]
    except OSError:
        pytest.skip("this machine gives no 14 GiB of addresses")
    device = flat[0].view(num_layers, num_slots, layer_bytes).transpose(0, 1)
    host = flat[1].view(num_slots, num_layers, layer_bytes)
    source, target = (device, host) if to_host else (host, device)
    here, there = [0, 262_144, num_slots - 1], [num_slots - 1, 1, 262_145]
    for slot in here:
        source[slot] = torch.randint(0, 256, (num_layers, layer_bytes), dtype=torch.uint8)
    launch(source, here, target, there)
    for one, other in zip(here, there, strict=True):
        assert torch.equal(target[other], source[one])


class FakeCupy:
    """CuPy as the kernel uses it; notes on which device it compiles and launches, and with what."""

    def __init__(self, error: Exception | None = None) -> None:
        self.notes: list[tuple[object, ...]] = []
        self.error = error
        self.cuda = SimpleNamespace(
            Device=partial(self._context, "device"), ExternalStream=partial(self._context, "stream")
        )

    @contextmanager
    def _context(self, *of: object) -> Iterator[None]:
        self.notes.append(of)
        yield

    def RawModule(self, *, code: str, options: tuple[str, ...]) -> FakeCupy:  # noqa: N802  as CuPy has it
        return self

    def get_function(self, name: str) -> FakeCupy:
        return self

    def compile(self) -> None:
        if self.error is not None:
            raise self.error
        self.notes.append(("compiled",))

    def __call__(self, grid: object, block: object, arguments: tuple[int, ...]) -> None:
        self.notes.append(arguments)


def test_the_kernel_is_compiled_on_its_device_before_the_first_copy() -> None:
    cupy = FakeCupy()
    CupyKernel(cupy, torch.device("cuda", 3))
    assert cupy.notes == [("device", 3), ("compiled",)]


def test_a_compiler_that_is_missing_is_told_at_once_and_copies_go_another_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copy_kernel.cache_clear()
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy(OSError("libnvrtc.so.13 is not found")))
    assert copy_kernel(torch.device("cuda", 0)) is None
    assert "libnvrtc.so.13" in caplog.text
    copy_kernel.cache_clear()
