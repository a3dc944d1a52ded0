"""Device slots for what an engine is going to compute: waiting for them, and saying why there are none."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hicache.errors import CapacityError, ProtocolError
from hicache.hold import Hold
from hicache.types import NO_SLOT, Tier


def check_size(hold: Hold, num_tokens: int) -> None:
    """Raises ``CapacityError`` for more tokens than L1 takes when it is empty; nothing is demoted for them."""
    runtime = hold.runtime
    for component, room in runtime.device_tokens.items():
        if num_tokens <= room:
            continue
        with hold.booked() as core:
            runtime.faults["reserve_refused"] += 1
            free = core.free_slots(component, Tier.DEVICE)[1]
        message = (
            f"cannot reserve {num_tokens} tokens: L1 takes {room} of {component} in all."
            " Reserve less at a time, or raise tiers.device.capacity or the component's split"
        )
        raise CapacityError(message, required_slots=-(-num_tokens // runtime.page_size), free_slots=free)


def reserve(hold: Hold, num_tokens: int) -> None:
    """Give the request slots for so many more tokens, after what copies under way free, until ``Runtime.deadline_s``.

    Raises ``CapacityError`` where even that is too little; the request keeps what it had.
    """
    runtime = hold.runtime
    deadline_s: float | None = None
    while True:
        with hold.booked() as core:
            reserved = core.reserve(hold.id, num_tokens)
            runtime.run(reserved.actions)
            if not reserved.short:
                runtime.transfers.compute.begin()
                return
            pool = core.free_slots(next(iter(reserved.short)), Tier.DEVICE)
            some = (reserved.tickets or runtime.copies())[:1]
        if deadline_s is None:
            deadline_s = runtime.deadline_s("reserve")
        left_s = deadline_s - runtime.clock.now_s()
        with hold.waiting():
            has_room = bool(some) and left_s > 0 and runtime.have_ended(some, left_s)
        if not has_room:
            with runtime.lock:
                runtime.faults["reserve_refused"] += 1
                raise _shortage(hold, reserved.short, *pool)


def _shortage(hold: Hold, short: Mapping[str, int], capacity: int, free: int) -> CapacityError:
    """The error for a reservation that cannot be met (lock held).

    Args:
        capacity, free: slots of the first component that is short.
    """
    component, lacking = next(iter(short.items()))
    wanted, own = lacking + free, _num_own(hold, component)
    every = ", ".join(f"{count} of {name}" for name, count in short.items())
    if hold.runtime.core.config.device_costs and wanted > capacity:
        why = (
            f"with all components, which share L1, this request wants room for {wanted} of {component}, and there is"
            f" room for {capacity} in all. Reserve less at a time, or raise tiers.device.capacity"
        )
    elif wanted + own > capacity:
        why = (
            f"{component} has {capacity} in all, and this request wants {wanted} beside the {own} that it holds."
            " Reserve less at a time, or raise tiers.device.capacity or the component's split"
        )
    else:
        why = (
            "everything else is locked by open leases or in flight. Release leases, reserve less at a time,"
            " or raise tiers.device.capacity"
        )
    message = f"device slots are lacking: {every}; {why}"
    return CapacityError(message, required_slots=wanted, free_slots=free)


def _num_own(hold: Hold, component: str) -> int:
    """Pages that the request holds (lock held); none after a reset."""
    if hold.runtime.keeps_states(component):
        return 0
    try:
        slots = hold.runtime.core.lease_slots(hold.id, component)
    except ProtocolError:
        return 0
    return int(np.count_nonzero(slots != NO_SLOT))
