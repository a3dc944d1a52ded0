"""L2 where all components share one budget: one allocation of equal units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hicache.closing import Closing
from hicache.errors import ConfigError, ProtocolError
from hicache.tiers.host_memory import Locker, PinnablePool
from hicache.tiers.placement import Placement
from hicache.tiers.slots import PoolMemoryError, Slots, available_memory
from hicache.types import ComponentSpec

UNIT_ALIGNMENT = 8


class SharedHostPool(PinnablePool, Closing):
    """``uint8 [num_units, unit_bytes]``; a slot is as many units as its bytes need, in any place.

    A slot's bytes stand in page order (layer after layer) in its units, one after the other; the end of the
    last may be unused.

    Args:
        specs: the components that L2 keeps.
        page_size: tokens a page.
        num_units, unit_bytes: of the allocation; whole words of 8 bytes a unit.
        costs: units of a slot, by component.
        pinned, near, locker: see ``PinnablePool``.

    Raises:
        ConfigError: a slot does not fit its units.
        PoolMemoryError: the pool does not fit memory; nothing was touched.

    *Thread*: bytes of different slots may move at the same time; ``placement`` is under the cache's lock.
    """

    def __init__(
        self,
        specs: Sequence[ComponentSpec],
        page_size: int,
        *,
        num_units: int,
        unit_bytes: int,
        costs: Mapping[str, int],
        pinned: bool,
        near: torch.device | None = None,
        locker: Locker | None = None,
    ) -> None:
        self._slot_bytes = {spec.name: spec.slot_bytes(page_size) for spec in specs}
        problems = [
            f"{name}: a slot of {size} bytes does not fit {costs[name]} units of {unit_bytes}"
            for name, size in self._slot_bytes.items()
            if size > costs[name] * unit_bytes
        ]
        if unit_bytes % UNIT_ALIGNMENT:
            problems.append(f"units of {unit_bytes} bytes: multiples of {UNIT_ALIGNMENT} expected")
        if problems:
            raise ConfigError(problems)
        required_bytes, available_bytes = num_units * unit_bytes, available_memory("cpu")
        if required_bytes > available_bytes:
            raise PoolMemoryError(
                required_bytes=required_bytes, available_bytes=available_bytes, device="cpu"
            )
        PinnablePool.__init__(self, pinned=pinned, near=near, locker=locker)
        self.unit_bytes = unit_bytes
        self.placement = Placement(num_units, costs)
        self._units: torch.Tensor | None = self._zeros((num_units, unit_bytes))
        self._begin_pinning()

    # ---- what there is ---------------------------------------------------------------------------------------

    @property
    def units(self) -> torch.Tensor:
        """All bytes; uint8 [num_units, unit_bytes]. Raises ``ProtocolError`` once closed."""
        if self._units is None:
            raise ProtocolError("the pool is closed")
        return self._units

    @property
    def names(self) -> tuple[str, ...]:
        """The components, in the order of the specs."""
        return tuple(self._slot_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the allocation; 0 once closed."""
        return 0 if self._units is None else self._units.nbytes

    def num_slots(self, name: str) -> int:
        """As many slots as there could be of the component alone."""
        return self.placement.num_slots(name)

    def slot_bytes(self, name: str) -> int:
        """Bytes of one slot of a component."""
        return self._slot_bytes[name]

    # ---- bytes in and out ------------------------------------------------------------------------------------

    def read(self, name: str, slot: int) -> bytes:
        """The bytes of one slot in page order. Raises ``ProtocolError`` if it has no place."""
        return self.read_many(name, (slot,)).tobytes()

    def read_many(self, name: str, slots: Slots) -> NDArray[np.uint8]:
        """Rows of slots in page order; uint8 [n, slot_bytes], a copy."""
        units = self.placement.units(name, np.asarray(slots, dtype=np.int64))
        rows: NDArray[np.uint8] = self.units.numpy()[units].reshape(len(units), -1)
        return rows[:, : self._slot_bytes[name]]

    def write(self, name: str, slot: int, payload: bytes | bytearray | memoryview) -> None:
        """Fill one slot from bytes in page order.

        *Raises*: ``ValueError`` on a wrong length, ``ProtocolError`` if the slot has no place.
        """
        if len(payload) != self._slot_bytes[name]:
            raise ValueError(f"{name}: {len(payload)} bytes, {self._slot_bytes[name]} expected")
        units = self.placement.units(name, np.array([slot]))[0]
        row = np.zeros(len(units) * self.unit_bytes, dtype=np.uint8)
        row[: len(payload)] = np.frombuffer(payload, dtype=np.uint8)
        self.units.numpy()[units] = row.reshape(len(units), -1)

    # ---- life ------------------------------------------------------------------------------------------------

    def withhold(self, num_units: int) -> int:
        """Keep so many units out of use, as far as they are free; bytes that went back to the system.

        *Caller guarantees*: the tree uses that many fewer.
        """
        units = self.placement.withhold(num_units)
        return self._give_back(self.units, units)

    def close(self) -> None:
        """Let go of the memory; views that were handed out keep it alive. Idempotent."""
        self._unpin()
        self._units = None
