"""L1 on the CPU where all components share one budget: a tensor for each, memory for what is in use."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from hicache.tiers.device import DevicePool
from hicache.tiers.host_memory import give_back
from hicache.types import ComponentSpec


class SharedDevicePool(DevicePool):
    """``DevicePool`` with as many slots of each component as the whole budget holds.

    Addresses are had for all of them, memory comes with the first write, and what ``give_back`` is told of goes
    back to the system. So kernels read the same tensors as ever, and which component has how much may move while
    they do. Memory goes by the system's pages: what a slot's layer has of one that others use stays.

    Args:
        specs, page_size, slots: see ``SlotPool``.
        capacity_bytes: of the budget.
    """

    def __init__(
        self,
        specs: Sequence[ComponentSpec],
        page_size: int,
        slots: Mapping[str, int],
        *,
        capacity_bytes: int,
    ) -> None:
        self._capacity_bytes = capacity_bytes
        super().__init__(specs, page_size, slots, device="cpu")

    @property
    def nbytes(self) -> int:
        """Bytes of the budget; 0 once closed. The tensors are larger together."""
        return self._capacity_bytes if self._is_open else 0

    def give_back(self, slots: Mapping[str, NDArray[np.int64]]) -> int:
        """Let the system have the memory of these slots, by component; bytes that went.

        A slot that is written again gets new memory. *Caller guarantees*: nobody reads or writes them.
        """
        return sum(give_back(list(self[name]), slots[name]) for name in slots)

    def give_back_all(self) -> int:
        """The same for all slots: the tree has become as new."""
        return self.give_back({name: np.arange(self.num_slots(name)) for name in self.names})

    def _required_bytes(self) -> int:
        return self._capacity_bytes

    def _zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        # A mapping of its own begins with a page of the system.
        # Private: what is shared between processes stays when it is given back.
        mapped = mmap.mmap(-1, max(1, prod(shape)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Huge ones come and go whole, wherever the system would give them unasked.
        with suppress(OSError):  # a kernel without them
            mapped.madvise(mmap.MADV_NOHUGEPAGE)
        memory = np.frombuffer(mapped, dtype=np.uint8)
        return torch.from_numpy(memory[: prod(shape)]).view(shape)
