"""L2: payload in host memory, page-first, so that a page is one run of bytes for a store or a copy."""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hicache.tiers.slots import SlotPool
from hicache.types import ComponentSpec

logger = logging.getLogger(__name__)
_LIBC = ctypes.CDLL(None)


class HostPool(SlotPool):
    """One allocation a component, ``uint8 [num_slots, num_layers, slot_bytes // num_layers]``.

    Args:
        specs, page_size, slots: see ``SlotPool``.
        pinned: ask for page-locked memory. Without CUDA the allocation is a plain one; an INFO line
            says so, and ``is_pinned`` tells.
    """

    slot_dim = 0

    def __init__(
        self, specs: Sequence[ComponentSpec], page_size: int, slots: Mapping[str, int], *, pinned: bool
    ) -> None:
        self.is_pinned = pinned and torch.cuda.is_available()
        if pinned and not self.is_pinned:
            logger.info("no CUDA here: the host pool is plain memory, not pinned")
        super().__init__(specs, page_size, slots, pinned=self.is_pinned)
        self._rows = {
            name: tensor.view(tensor.shape[0], self.slot_bytes(name)).numpy()
            for name, tensor in self._tensors.items()
        }

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

        Bytes that went; 0 where memory is pinned. A slot that is written again gets new memory.
        *Caller guarantees*: nobody reads or writes them.
        """
        return 0 if self.is_pinned else give_back(self[name], slots)

    def close(self) -> None:
        self._rows.clear()
        super().close()

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
