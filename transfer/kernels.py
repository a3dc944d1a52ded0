"""The copy kernel: compiled by NVRTC, launched by CuPy on torch's stream and memory.

One launch copies all layers of all slots of a batch straight between device memory and pinned host memory
that is mapped into the device. CuPy is optional (``pip install 'hicache[cuda]'``); without it copies go
through torch, with a buffer in between.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import site
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hicache.errors import TierUnavailableError

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("page_copy.cu")
KERNEL = "copy_pages"
THREADS = 256
"""In a block: eight warps."""
MAX_BLOCKS = 1024
"""Enough to fill a device with copies that wait for memory; more only queue."""
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
"""Compiled in CI, without a device."""


@dataclass(frozen=True, slots=True)
class Strides:
    """What the kernel has to know of two pools; all in bytes.

    Args:
        num_layers, layer_bytes: of a slot, the same on both sides.
        source_slot, source_layer, target_slot, target_layer: distances of neighbours.
    """

    num_layers: int
    layer_bytes: int
    source_slot: int
    source_layer: int
    target_slot: int
    target_layer: int

    @classmethod
    def of(cls, source: torch.Tensor, target: torch.Tensor) -> Strides:
        """Of two tensors ``[slot, layer, word]``. *Caller guarantees*: a layer's words are in a row."""
        size = source.element_size()
        return cls(
            int(source.shape[1]),
            int(source.shape[2]) * size,
            source.stride(0) * size,
            source.stride(1) * size,
            target.stride(0) * size,
            target.stride(1) * size,
        )

    def arguments(self, num_slots: int) -> tuple[int, ...]:
        """What follows the four pointers in the kernel's parameters."""
        return (
            num_slots,
            self.num_layers,
            self.layer_bytes,
            self.source_slot,
            self.source_layer,
            self.target_slot,
            self.target_layer,
        )

    def num_blocks(self, num_slots: int) -> int:
        """A warp for each layer of each slot, as far as that makes sense."""
        return max(1, min(MAX_BLOCKS, -(-num_slots * self.num_layers * 32 // THREADS)))


@functools.cache
def copy_kernel(device: torch.device) -> CupyKernel | None:
    """The kernel on a device; None, said once, where CuPy or the device cannot run it."""
    try:
        return CupyKernel(importlib.import_module("cupy"), device)
    except ModuleNotFoundError:
        logger.info("copies go through torch: CuPy is not installed; pip install 'hicache[cuda]'")
    except Exception as error:  # noqa: BLE001  whatever a driver or compiler says, torch can still copy
        logger.warning("copies go through torch: the kernel cannot be used: %s", error)
    return None


class CupyKernel:
    """Launches the kernel.

    Args:
        cupy: the module.
        device: where it is compiled, now: a compiler that is missing is told here, and no copy waits for it.

    *Raises*: whatever CuPy, its compiler or the driver say.

    *Thread*: any; the launch goes to torch's current stream of the calling thread.
    """

    def __init__(self, cupy: Any, device: torch.device) -> None:  # Any: CuPy has no types
        self._cupy = cupy
        module = cupy.RawModule(code=SOURCE.read_text(encoding="utf-8"), options=("-std=c++17",))
        self._function = module.get_function(KERNEL)
        with cupy.cuda.Device(device.index or 0):
            self._function.compile()

    @staticmethod
    def can_copy(source: torch.Tensor, target: torch.Tensor) -> bool:
        """Whether the device reaches both sides: device memory, or host memory that is pinned as a whole."""
        return all(side.is_cuda or side.is_pinned() for side in (source, target))

    def copy(
        self,
        source: torch.Tensor,
        source_slots: torch.Tensor,
        target: torch.Tensor,
        target_slots: torch.Tensor,
    ) -> None:
        """Begin to copy slots on the current stream.

        Args:
            source, target: ``[slot, layer, word]`` of one dtype, ``can_copy``.
            source_slots, target_slots: int64 ``[n]`` on the device.
        """
        num_slots = source_slots.numel()
        strides = Strides.of(source, target)
        device = source.device if source.is_cuda else target.device
        stream = self._cupy.cuda.ExternalStream(torch.cuda.current_stream(device).cuda_stream, device.index)
        pointers = (t.data_ptr() for t in (source, target, source_slots, target_slots))
        with self._cupy.cuda.Device(device.index or 0), stream:
            self._function(
                (strides.num_blocks(num_slots),), (THREADS,), (*pointers, *strides.arguments(num_slots))
            )


# ---- compiling without a device --------------------------------------------------------------------------------------
def compile_kernels(architecture: str) -> bytes:
    """The kernels as a cubin for one architecture, such as ``sm_90``; needs no device.

    Raises ``TierUnavailableError`` with the compiler's log, or if NVRTC is not installed.
    """
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    source = SOURCE.read_bytes()
    _ask(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, SOURCE.name.encode(), 0, None, None))
    try:
        options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
        failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        if failed:
            raise TierUnavailableError(
                f"{SOURCE.name} does not compile for {architecture}: {_log(nvrtc, program)}"
            )
        size = ctypes.c_size_t()
        _ask(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        cubin = ctypes.create_string_buffer(size.value)
        _ask(nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    for path in _nvrtc_files():
        return ctypes.CDLL(str(path))
    raise TierUnavailableError("NVRTC is not installed; pip install nvidia-cuda-nvrtc")


def _nvrtc_files() -> Iterator[Path]:
    """The library of NVIDIA's wheels, wherever they lie on the import path."""
    folders = {sysconfig.get_path("purelib"), *site.getsitepackages(), str(Path(torch.__file__).parents[1])}
    for folder in sorted(folders):
        yield from sorted(Path(folder).glob("nvidia/*/lib/libnvrtc.so.*"))


def _log(nvrtc: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    _ask(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
    log = ctypes.create_string_buffer(size.value)
    _ask(nvrtc.nvrtcGetProgramLog(program, log))
    return log.value.decode(errors="replace")


def _ask(failed: int) -> None:
    if failed:
        raise TierUnavailableError(f"NVRTC answers with error {failed}")
