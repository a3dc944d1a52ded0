"""L1: payload where the model runs, layer-first, as attention kernels read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hicache.tiers.slots import SlotPool
from hicache.types import ComponentSpec


class DevicePool(SlotPool):
    """One tensor a component, ``uint8 [num_layers, num_slots, slot_bytes // num_layers]``.

    Args:
        specs, page_size, slots: see ``SlotPool``.
        device: ``cpu``, ``cuda``, ``cuda:0`` …; the class is the same for all.
    """

    slot_dim = 1

    def __init__(
        self, specs: Sequence[ComponentSpec], page_size: int, slots: Mapping[str, int], *, device: str = "cpu"
    ) -> None:
        super().__init__(specs, page_size, slots, device=device)

    def _shape(self, num_layers: int, num_slots: int, layer_bytes: int) -> tuple[int, int, int]:
        return num_layers, num_slots, layer_bytes
