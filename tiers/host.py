"""L2: payload in host memory, page-first, so that a page is one run of bytes for a store or a copy."""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hicache.tiers.host_memory import CudaLocker, Locker, Pinning, PinProgress, allocate, node_of
from hicache.tiers.slots import SlotPool
from hicache.types import ComponentSpec

logger = logging.getLogger(__name__)
_LIBC = ctypes.CDLL(None)


class HostPool(SlotPool):
    """One allocation a component, ``uint8 [num_slots, num_layers, slot_bytes // num_layers]``.

    Args:
        specs, page_size, slots: see ``SlotPool``.
        pinned: ask for page-locked memory. Without CUDA the allocation is a plain one; an INFO line
            says so. With it the pool is pinned in the background; ``pin_progress`` tells how far it is.
        near: the device that copies from and to it; default: the current one.
        locker: what locks pages; default: CUDA, where there is one.
    """

    slot_dim = 0

    def __init__(
        self,
        specs: Sequence[ComponentSpec],
        page_size: int,
        slots: Mapping[str, int],
        *,
        pinned: bool,
        near: torch.device | None = None,
        locker: Locker | None = None,
    ) -> None:
        self._near = near or torch.device("cuda")
        self._blocks: list[NDArray[np.uint8]] = []
        self._pinning: Pinning | None = None
        is_lockable = pinned and (locker is not None or torch.cuda.is_available())
        if pinned and not is_lockable:
            logger.info("no CUDA here: the host pool is plain memory, not pinned")
        super().__init__(specs, page_size, slots, pinned=is_lockable)
        if is_lockable:
            self._pinning = Pinning(self._blocks, locker or CudaLocker(self._near))
        self._rows = {
            name: tensor.view(tensor.shape[0], self.slot_bytes(name)).numpy()
            for name, tensor in self._tensors.items()
        }

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

    def page(self, name: str, slot: int) -> memoryview:
        """The bytes of one slot, in place: writable, contiguous, ``slot_bytes`` long.

        Raises:
            ValueError: the slot is out of range.
            ProtocolError: the pool is closed.
        """
        if not 0 <= slot < self[name].shape[0]:
            raise ValueError(f"slot {slot} is out of range: {name!r} has {self.num_slots(name)} slots")
        return memoryview(self._rows[name][slot])

    def give_back(self, name: str, slots: NDArray[np.int64]) -> int:
        """Let the system have the memory of these slots, as far as it is whole pages; what they hold is lost.

        Bytes that went; 0 where memory is pinned or about to be. A slot that is written again gets new memory.
        *Caller guarantees*: nobody reads or writes them.
        """
        return 0 if self._pinning is not None else give_back(self[name], slots)

    def close(self) -> None:
        if self._pinning is not None:
            self._pinning.close()
        self._rows.clear()
        super().close()
        self._blocks = []

    def _make_tensors(
        self, shapes: Mapping[str, tuple[int, int, int]], device: str, *, pinned: bool
    ) -> dict[str, torch.Tensor]:
        if not pinned:
            return super()._make_tensors(shapes, device, pinned=False)
        node = node_of(self._near)
        self._blocks = [allocate(math.prod(shape), node=node) for shape in shapes.values()]
        tensors = (torch.from_numpy(block) for block in self._blocks)
        return {
            name: tensor.view(shape) for (name, shape), tensor in zip(shapes.items(), tensors, strict=True)
        }

    def _shape(self, num_layers: int, num_slots: int, layer_bytes: int) -> tuple[int, int, int]:
        return num_slots, num_layers, layer_bytes


def give_back(rows: torch.Tensor, indices: NDArray[np.int64]) -> int:
    """Let the system have the memory of these rows of a tensor, as far as it is whole pages; bytes that went."""
    if not len(indices):
        return 0
    ordered = np.unique(indices)
    breaks = np.flatnonzero(np.diff(ordered) != 1) + 1
    base, row_bytes = rows.data_ptr(), rows.stride(0) * rows.element_size()
    num_bytes = 0
    for run in np.split(ordered, breaks):
        begin = -(-(base + int(run[0]) * row_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (base + (int(run[-1]) + 1) * row_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end and not _LIBC.madvise(
            ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED
        ):
            num_bytes += end - begin
    return num_bytes
