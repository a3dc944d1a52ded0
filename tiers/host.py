"""L2: payload in host memory, page-first, so that a page is one run of bytes for a store or a copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hicache.tiers.host_memory import Locker, PinnablePool
from hicache.tiers.slots import SlotPool
from hicache.types import ComponentSpec


class HostPool(PinnablePool, SlotPool):
    """One allocation a component, ``uint8 [num_slots, num_layers, slot_bytes // num_layers]``.

    Args:
        specs, page_size, slots: see ``SlotPool``.
        pinned, near, locker: see ``PinnablePool``.
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
        PinnablePool.__init__(self, pinned=pinned, near=near, locker=locker)
        SlotPool.__init__(self, specs, page_size, slots)
        self._begin_pinning()
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

        Bytes that went; 0 where memory is pinned or about to be. A slot that is written again gets new memory.
        *Caller guarantees*: nobody reads or writes them.
        """
        return self._give_back(self[name], slots)

    def close(self) -> None:
        self._unpin()
        self._rows.clear()
        SlotPool.close(self)

    def _shape(self, num_layers: int, num_slots: int, layer_bytes: int) -> tuple[int, int, int]:
        return num_slots, num_layers, layer_bytes
