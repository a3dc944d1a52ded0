"""How a pool's tensor is read as slots, whatever the order of its dimensions.

::

    device, layer first            host, page first           what a copy sees, in both
    [layer, slot, layer_bytes]     [slot, layer, layer_bytes]  [slot, layer, word]

Where components share L2, a slot is units of one allocation in any places; ``UnitView`` says which.
What copies are given of either view are *places*: slots, or the units of each slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from hicache.errors import ProtocolError
from hicache.radix.actions import Slots
from hicache.tiers.placement import Placement
from hicache.tiers.shared_host import SharedHostPool
from hicache.types import ComponentSpec, Tier

WORD_BYTES = 8


class TensorPool(Protocol):
    """Owns one uint8 tensor per component; an unknown name raises ``KeyError`` or ``ProtocolError``."""

    def __getitem__(self, name: str, /) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class SlotView:
    """One component's payload in one tier, slot first.

    Args:
        where: component and tier, for messages.
        payload: uint8 or int64 ``[num_slots, num_layers, words]``, a view on the pool.
        slot_bytes: bytes of one slot over all layers.
    """

    where: str
    payload: torch.Tensor
    slot_bytes: int

    @property
    def num_slots(self) -> int:
        return int(self.payload.shape[0])

    @property
    def num_layers(self) -> int:
        return int(self.payload.shape[1])

    @property
    def separable_layers(self) -> int:
        """Layers that can be copied one by one; 1 where a slot is copied whole."""
        return int(self.payload.shape[1])

    @property
    def slot_words(self) -> int:
        return int(self.payload.shape[1] * self.payload.shape[2])

    def locate(self, slots: Slots) -> Slots:
        """Where the slots are."""
        return slots

    def place(self, slots: Slots) -> Slots:
        """Where slots that the tree has just handed out are."""
        return slots

    def let_go(self, slots: Slots) -> None:
        """The tree has taken the slots back."""

    def rows(self) -> torch.Tensor:
        """The payload as uint8 ``[num_slots, slot_bytes]``. *Caller guarantees*: page first."""
        return self.payload.view(torch.uint8).view(self.num_slots, self.slot_bytes)

    def check(self, slots: Slots) -> None:
        """Raise ``ProtocolError`` unless these are slots of this pool, each named once."""
        if slots.ndim != 1 or slots.dtype != np.int64:
            raise ProtocolError(f"{self.where}: slots are int64 [n], got {slots.dtype} {list(slots.shape)}")
        if not slots.size:
            return
        lowest, highest = int(slots.min()), int(slots.max())
        if lowest < 0 or highest >= self.num_slots:
            raise ProtocolError(
                f"{self.where}: slots {lowest}..{highest} do not lie in a pool of {self.num_slots}"
            )
        if np.unique(slots).size != slots.size:
            raise ProtocolError(f"{self.where}: a slot stands twice in {slots.tolist()}")


@dataclass(frozen=True, slots=True, eq=False)
class UnitView(SlotView):
    """One component's payload in an L2 whose components share one allocation.

    Args:
        payload: uint8 or int64 ``[num_units, 1, words]``, all of the allocation.
        placement: which units a slot has.
        component: its name there.
        layers: of a slot.
    """

    placement: Placement
    component: str
    layers: int

    @property
    def num_slots(self) -> int:
        return self.placement.num_slots(self.component)

    @property
    def num_layers(self) -> int:
        return self.layers

    @property
    def slot_words(self) -> int:
        return self.slot_bytes // self.payload.element_size()

    @property
    def unit_words(self) -> int:
        return int(self.payload.shape[2])

    def locate(self, slots: Slots) -> Slots:
        """Their units: int64 ``[n, units of a slot]``."""
        return self.placement.units(self.component, slots)

    def place(self, slots: Slots) -> Slots:
        return self.placement.place(self.component, slots)

    def let_go(self, slots: Slots) -> None:
        self.placement.release(self.component, slots)


@dataclass(frozen=True, slots=True, eq=False)
class PlacedView(UnitView):
    """The same where a slot is one whole unit: it is copied as any other slot.

    Args:
        payload: uint8 or int64 ``[num_units, num_layers, words]``.
    """

    def locate(self, slots: Slots) -> Slots:
        return self.placement.units(self.component, slots)[:, 0]

    def place(self, slots: Slots) -> Slots:
        return self.placement.place(self.component, slots)[:, 0]


class Layout:
    """The slot views of all components in both pools.

    Args:
        specs: the model's components.
        page_size: tokens a page.
        device, host: the pools; a component that a pool does not know, or has no slots for, has no
            payload there.

    *Raises*: ``ProtocolError`` when a tensor's shape does not fit its component.
    """

    def __init__(
        self,
        specs: Sequence[ComponentSpec],
        page_size: int,
        *,
        device: TensorPool,
        host: TensorPool | SharedHostPool | None,
    ) -> None:
        self.slot_bytes = {spec.name: spec.slot_bytes(page_size) for spec in specs}
        self._views: dict[tuple[str, Tier], SlotView] = {}
        for spec in specs:
            for tier, pool in ((Tier.DEVICE, device), (Tier.HOST, host)):
                if isinstance(pool, SharedHostPool):
                    self._views[spec.name, tier] = _unit_view(pool, spec, self.slot_bytes[spec.name])
                    continue
                tensor = None if pool is None else _find(pool, spec.name)
                if tensor is not None and tensor.numel():
                    view = _slot_view(tensor, spec, self.slot_bytes[spec.name], tier)
                    self._views[spec.name, tier] = view

    @property
    def device(self) -> torch.device:
        """Where L1 is."""
        on_device = (view.payload.device for (_, tier), view in self._views.items() if tier == Tier.DEVICE)
        return next(on_device, torch.device("cpu"))

    def view(self, component: str, tier: Tier) -> SlotView:
        """Raises ``ProtocolError`` when the component has no pool there."""
        found = self._views.get((component, tier))
        if found is None:
            raise ProtocolError(f"{component} has no pool in {tier.name}")
        return found

    def let_go(self, component: str, tier: Tier, slots: Slots) -> None:
        """The tree has taken slots back."""
        view = self._views.get((component, tier))
        if view is not None:
            view.let_go(slots)


def _unit_view(pool: SharedHostPool, spec: ComponentSpec, slot_bytes: int) -> UnitView:
    where = f"{spec.name} in {Tier.HOST.name}"
    layer_bytes = slot_bytes // spec.num_layers
    units = pool.units if layer_bytes % WORD_BYTES else pool.units.view(torch.int64)
    of_slot = (pool.placement, spec.name, spec.num_layers)
    if slot_bytes == pool.unit_bytes:
        return PlacedView(where, units.view(len(units), spec.num_layers, -1), slot_bytes, *of_slot)
    return UnitView(where, units.unsqueeze(1), slot_bytes, *of_slot)


def _find(pool: TensorPool, name: str) -> torch.Tensor | None:
    try:
        return pool[name]
    except (KeyError, ProtocolError):
        return None


def _slot_view(tensor: torch.Tensor, spec: ComponentSpec, slot_bytes: int, tier: Tier) -> SlotView:
    where = f"{spec.name} in {tier.name}"
    slot_first = tensor.transpose(0, 1) if tier == Tier.DEVICE and tensor.ndim == 3 else tensor
    expected = (spec.num_layers, slot_bytes // spec.num_layers)
    if tensor.dtype != torch.uint8 or slot_first.ndim != 3 or tuple(slot_first.shape[1:]) != expected:
        raise ProtocolError(
            f"{where}: want uint8 with {expected[0]} layers of {expected[1]} bytes, "
            f"got {tensor.dtype} {list(tensor.shape)}"
        )
    if expected[1] % WORD_BYTES:
        return SlotView(where, slot_first, slot_bytes)
    if tensor.data_ptr() % WORD_BYTES:
        raise ProtocolError(f"{where}: the tensor does not start at a multiple of {WORD_BYTES} bytes")
    return SlotView(where, slot_first.view(torch.int64), slot_bytes)
