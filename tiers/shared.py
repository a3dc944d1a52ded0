"""A device pool in memory that other processes of this machine map as well.

The memory has no name and no file: it is reached through the owner's file descriptor, and gone when the last process
that maps it is, however that process ended.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

from hicache.errors import TierUnavailableError
from hicache.tiers.device import DevicePool

ALIGNMENT = 4096
"""Each component begins at a multiple of this."""


@dataclass(frozen=True, slots=True)
class SharedPart:
    """One component's slots: ``num_slots`` times ``slot_bytes``, from ``offset`` on."""

    component: str
    offset: int
    num_slots: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class SharedRegion:
    """What another process needs to map the pool.

    Args:
        path: opens the memory as long as the owner lives.
        num_bytes: all of it.
        parts: the components, in the order of the specs.
    """

    path: str
    num_bytes: int
    parts: tuple[SharedPart, ...]


class SharedPool(DevicePool):
    """L1 in shared memory. *Caller guarantees*: every component has one layer, so that a slot is one run of bytes."""

    region: SharedRegion

    def _make_tensors(self, shapes: Mapping[str, tuple[int, int, int]]) -> dict[str, torch.Tensor]:
        assert self._device == "cpu"
        assert all(layers == 1 for layers, _, _ in shapes.values())
        parts, end = [], 0
        for name, (_, num_slots, slot_bytes) in shapes.items():
            parts.append(SharedPart(name, end, num_slots, slot_bytes))
            end += -(-num_slots * slot_bytes // ALIGNMENT) * ALIGNMENT
        self._descriptor = os.memfd_create("hicache")
        os.ftruncate(self._descriptor, end)
        self.region = SharedRegion(f"/proc/{os.getpid()}/fd/{self._descriptor}", end, tuple(parts))
        mapped = mmap.mmap(self._descriptor, end)
        return {part.component: _tensor(mapped, part).view(shapes[part.component]) for part in parts}

    def close(self) -> None:
        """Let go of the memory; processes that have mapped it keep theirs. Idempotent."""
        if self._is_open:
            os.close(self._descriptor)
        super().close()


def map_region(region: SharedRegion) -> dict[str, torch.Tensor]:
    """The pool of another process, or of this one: uint8 ``[num_slots, slot_bytes]`` a component, writable.

    Raises:
        TierUnavailableError: the owner is gone, or runs as another user or in another container.
    """
    try:
        descriptor = os.open(region.path, os.O_RDWR)
    except OSError as error:
        raise TierUnavailableError(
            f"the cache's memory {region.path} cannot be opened ({error.strerror}); its owner must run on this"
            " machine, as the same user and in the same container"
        ) from error
    try:
        mapped = mmap.mmap(descriptor, region.num_bytes)
    finally:
        os.close(descriptor)
    return {part.component: _tensor(mapped, part) for part in region.parts}


def _tensor(mapped: mmap.mmap, part: SharedPart) -> torch.Tensor:
    shape = (part.num_slots, part.slot_bytes)
    if not part.num_slots:
        return torch.empty(shape, dtype=torch.uint8)
    flat = torch.frombuffer(mapped, dtype=torch.uint8, offset=part.offset, count=prod(shape))
    return flat.view(shape)
