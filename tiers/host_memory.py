"""Host memory for a device to copy from and to: near it, in huge pages, page-locked in the background.

::

    reserve address space -> prefer the device's NUMA node -> ask for huge pages     at once
    bring in pages, part by part -> page-lock the whole -> pinned                    in a thread

A pool serves from the first moment; until a block is pinned, its copies go by torch alone. A block is locked in
one call: a copy may not run across two locked ranges. ``PinnablePool`` is what pools of any kind have of this.

*Page-locking itself has never run on a device so far; it is tested with a stand-in.*
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import platform
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from hicache.errors import TierUnavailableError

logger = logging.getLogger(__name__)

HUGE_PAGE_BYTES = 2 << 20
PART_BYTES = 256 << 20
"""Memory brought in at a time: some tens of milliseconds, after which progress is noted and a close is seen."""
JOIN_TIMEOUT_S = 120.0
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long
_POPULATE_WRITE = 23
"""``MADV_POPULATE_WRITE`` of Linux 5.14: brings pages in without changing what they hold."""
_PROCESS_MADVISE = 440
"""Takes many areas in one call; of ``MADV_DONTNEED`` only since Linux 6.13."""
_THIS_PROCESS = -10_000
"""``PIDFD_SELF`` of Linux 6.14."""
_MOST_AREAS = 1024
"""``IOV_MAX``."""
_PREFER_NODE = 1
_MBIND = {"x86_64": 237, "aarch64": 235}
_REGISTER_PORTABLE_AND_MAPPED = 3
_PCI_DEVICES = Path("/sys/bus/pci/devices")


def allocate(num_bytes: int, *, node: int | None = None) -> NDArray[np.uint8]:
    """Zeroed memory, untouched until used, that starts at a huge page.

    Args:
        node: the NUMA node to take it from while that has room; None: the kernel's choice.
    """
    area = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = np.frombuffer(area, dtype=np.uint8)  # keeps the mapping
    first = -whole.ctypes.data % HUGE_PAGE_BYTES
    block = whole[first : first + num_bytes]
    if node is not None:
        _prefer_node(block, node)
    if _madvise(block, 0, num_bytes, mmap.MADV_HUGEPAGE):
        logger.debug("no huge pages for %d bytes of host memory: %s", num_bytes, _error())
    return block


def _prefer_node(block: NDArray[np.uint8], node: int) -> None:
    number = _MBIND.get(platform.machine())
    mask = (ctypes.c_ulong * (node // 64 + 1))()
    mask[node // 64] = 1 << node % 64
    if number is None or _LIBC.syscall(
        ctypes.c_long(number), ctypes.c_void_p(block.ctypes.data), ctypes.c_ulong(block.nbytes),
        ctypes.c_int(_PREFER_NODE), mask, ctypes.c_ulong(64 * len(mask) + 1), ctypes.c_uint(0),
    ):  # fmt: skip
        logger.info("host memory is not taken from NUMA node %d: %s", node, _error())


def _madvise(block: NDArray[np.uint8], first: int, num_bytes: int, advice: int) -> int:
    """0 if it was taken. The last page is asked for whole: it is the mapping's own."""
    whole = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    address = ctypes.c_void_p(block.ctypes.data + first)
    return int(_LIBC.madvise(address, ctypes.c_size_t(whole), ctypes.c_int(advice)))


def _error() -> str:
    number = ctypes.get_errno()
    return f"error {number}" if number else "unknown on this machine"


def node_of(device: torch.device, folder: Path = _PCI_DEVICES, cuda: Any = torch.cuda) -> int | None:
    """The NUMA node that a CUDA device hangs on; None if the machine does not say."""
    try:
        found = cuda.get_device_properties(device)
        address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        node = int((folder / address / "numa_node").read_text(encoding="ascii"))
    except (AttributeError, OSError, RuntimeError, ValueError):
        return None
    return node if node >= 0 else None


class Locker(Protocol):
    """Page-locks memory for a device."""

    def lock(self, address: int, num_bytes: int) -> None:
        """Raises ``TierUnavailableError`` if it cannot."""
        ...

    def unlock(self, address: int) -> None:
        """Let the memory at ``address``, locked before, go."""
        ...


class CudaLocker:
    """By the CUDA runtime, for all devices, mapped into them.

    Args:
        device: whose context the calls are made in: another device is not to get one for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def lock(self, address: int, num_bytes: int) -> None:
        with torch.cuda.device(self._device):
            runtime: Any = torch.cuda.cudart  # has no types
            failed = int(runtime().cudaHostRegister(address, num_bytes, _REGISTER_PORTABLE_AND_MAPPED))
        if failed:
            raise TierUnavailableError(f"cudaHostRegister of {num_bytes:,} bytes answers with error {failed}")

    def unlock(self, address: int) -> None:
        with torch.cuda.device(self._device):
            runtime: Any = torch.cuda.cudart  # has no types
            failed = int(runtime().cudaHostUnregister(address))
        if failed:
            logger.warning("cudaHostUnregister answers with error %d", failed)


@dataclass(frozen=True, slots=True)
class PinProgress:
    """How far it is.

    Args:
        total_bytes: to be pinned.
        present_bytes: brought in, not all of them pinned yet.
        pinned_bytes: of whole blocks.
        error: why it went no further; None while it goes on or all is done.
    """

    total_bytes: int
    present_bytes: int
    pinned_bytes: int
    error: str | None

    @property
    def is_complete(self) -> bool:
        return self.pinned_bytes == self.total_bytes


class Pinning:
    """Pins blocks one after the other, in a thread of its own.

    Args:
        blocks: memory of ``allocate``.
        locker: what locks it.

    *Thread*: any. ``close`` waits for the part at hand.
    """

    def __init__(self, blocks: Sequence[NDArray[np.uint8]], locker: Locker) -> None:
        self._blocks = [block for block in blocks if block.nbytes]
        self._locker = locker
        self._total_bytes = sum(block.nbytes for block in self._blocks)
        self._present_bytes = self._pinned_bytes = 0
        self._error: str | None = None
        self._locked: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hicache-pin", daemon=True)
        self._thread.start()

    def progress(self) -> PinProgress:
        return PinProgress(self._total_bytes, self._present_bytes, self._pinned_bytes, self._error)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until it has ended, well or not; False when real time is over first."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Stop, and unlock everything. Idempotent. *Caller guarantees*: no copy is under way."""
        self._stop.set()
        if not self.wait(JOIN_TIMEOUT_S):
            logger.error("the host pool is still being pinned after %.0f s; it stays locked", JOIN_TIMEOUT_S)
            return
        while self._locked:
            self._locker.unlock(self._locked.pop())

    def _run(self) -> None:
        began = time.monotonic()
        try:
            for block in self._blocks:
                if not self._bring_in(block):
                    return
                self._locker.lock(block.ctypes.data, block.nbytes)
                self._locked.append(block.ctypes.data)
                self._pinned_bytes += block.nbytes
        except Exception as error:  # noqa: BLE001  whatever a driver says, the pool serves without
            self._error = str(error)
            logger.warning(
                "%d of %d bytes of the host pool are not pinned: %s. Copies of these go by torch alone, through "
                "the driver's own buffer: the host reads and writes each byte once more, and no kernel reaches "
                "them. Let more be locked (ulimit -l unlimited; docker run --ulimit memlock=-1), lower "
                "tiers.host.capacity, or set tiers.host.pinned: false",
                self._total_bytes - self._pinned_bytes,
                self._total_bytes,
                error,
            )
        else:
            logger.info(
                "the host pool's %d bytes are pinned, after %.1f s",
                self._total_bytes,
                time.monotonic() - began,
            )

    def _bring_in(self, block: NDArray[np.uint8]) -> bool:
        """False if it is to stop. Where the kernel cannot, locking brings the pages in, without progress."""
        for first in range(0, block.nbytes, PART_BYTES):
            if self._stop.is_set():
                return False
            num_bytes = min(PART_BYTES, block.nbytes - first)
            if _madvise(block, first, num_bytes, _POPULATE_WRITE):
                logger.debug("pages cannot be brought in ahead: %s", _error())
            self._present_bytes += num_bytes
        return not self._stop.is_set()


class PinnablePool:
    """What pools of host memory have in common: blocks that are pinned in the background where that was asked for.

    Args:
        pinned: ask for page-locked memory. Without CUDA blocks are plain memory; an INFO line says so.
        near: the device that copies from and to them; default: the current one.
        locker: what locks pages; default: CUDA, where there is one.
    """

    def __init__(self, *, pinned: bool, near: torch.device | None, locker: Locker | None) -> None:
        self._near = near or torch.device("cuda")
        self._locker = locker
        self._is_lockable = pinned and (locker is not None or torch.cuda.is_available())
        self._blocks: list[NDArray[np.uint8]] = []
        self._pinning: Pinning | None = None
        if pinned and not self._is_lockable:
            logger.info("no CUDA here: the host pool is plain memory, not pinned")

    @property
    def is_pinned(self) -> bool:
        """Whether all of it is page-locked by now."""
        return self._pinning is not None and self._pinning.progress().is_complete

    @property
    def pin_progress(self) -> PinProgress | None:
        """How far pinning is; None where the pool is plain memory."""
        return None if self._pinning is None else self._pinning.progress()

    def wait_pinned(self, timeout_s: float | None = None) -> bool:
        """Block until pinning has ended; whether all of the pool is pinned then."""
        return self._pinning is not None and self._pinning.wait(timeout_s) and self.is_pinned

    def _zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        """One block, uint8."""
        if not self._is_lockable:
            return torch.from_numpy(np.zeros(shape, dtype=np.uint8))  # untouched until first used
        block = allocate(math.prod(shape), node=node_of(self._near))
        self._blocks.append(block)
        return torch.from_numpy(block).view(shape)

    def _begin_pinning(self) -> None:
        """Once all blocks are there."""
        if self._is_lockable:
            self._pinning = Pinning(self._blocks, self._locker or CudaLocker(self._near))

    def _give_back(self, rows: torch.Tensor, indices: NDArray[np.int64]) -> int:
        """``give_back``; nothing where memory is pinned or about to be."""
        return 0 if self._is_lockable else give_back([rows], indices)

    def _unpin(self) -> None:
        """Before the memory goes. Idempotent."""
        if self._pinning is not None:
            self._pinning.close()
        self._blocks = []


def give_back(layers: Sequence[torch.Tensor], indices: NDArray[np.int64]) -> int:
    """Let the system have the memory of these rows of each tensor, as far as it is whole pages; bytes that went.

    *Caller guarantees*: the tensors' rows are equally large.
    """
    if not len(layers) or not len(indices):
        return 0
    ordered = np.unique(indices)
    starts = np.flatnonzero(np.diff(ordered, prepend=-2) != 1)  # of runs, the same in each layer
    stops = np.append(starts[1:], len(ordered)) - 1
    row_bytes = layers[0].stride(0) * layers[0].element_size()
    bases = np.array([[rows.data_ptr()] for rows in layers], dtype=np.int64)
    begins = -(-(bases + ordered[starts] * row_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    ends = (bases + (ordered[stops] + 1) * row_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    areas = np.stack([begins, ends - begins], axis=-1).reshape(-1, 2)
    areas = areas[areas[:, 1] > 0]
    return sum(_drop(areas[first : first + _MOST_AREAS]) for first in range(0, len(areas), _MOST_AREAS))


def _drop(areas: NDArray[np.int64]) -> int:
    """Give up whole pages of the system: int64 [num_areas, 2], address and bytes, as ``iovec`` has them."""
    dropped = _LIBC.syscall(
        ctypes.c_long(_PROCESS_MADVISE), ctypes.c_long(_THIS_PROCESS), ctypes.c_void_p(areas.ctypes.data),
        ctypes.c_size_t(len(areas)), ctypes.c_long(mmap.MADV_DONTNEED), ctypes.c_long(0),
    )  # fmt: skip
    if dropped == areas[:, 1].sum():
        return int(dropped)
    num_bytes = 0
    for address, size in areas.tolist():  # an older kernel, or over 2 GiB; what went already may go again
        if not _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.MADV_DONTNEED):
            num_bytes += size
    return num_bytes
