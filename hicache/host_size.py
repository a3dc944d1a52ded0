"""How much of L2 is used, and changing it while others are served."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from hicache.config.units import format_bytes
from hicache.errors import ConfigError
from hicache.runtime import Runtime
from hicache.tiers.host import HostPool
from hicache.tiers.shared_host import SharedHostPool
from hicache.types import TicketId, Tier

FREED_AT_ONCE_BYTES = 64 << 20
"""So much memory goes back to the system under one hold of the lock."""


class HostSize:
    """The part of L2 that one cache uses. *Thread*: one change at a time; blocks, bounded."""

    def __init__(self, runtime: Runtime, host: HostPool | SharedHostPool, *, made_bytes: int) -> None:
        """``made_bytes``: what all ranks' pools were made with, for messages."""
        self._runtime = runtime
        self._host = host
        self._made_bytes = made_bytes

    def slots(self) -> dict[str, int]:
        """How many of each component are used now."""
        runtime = self._runtime
        with runtime.lock:
            return {spec.name: runtime.core.free_slots(spec.name, Tier.HOST)[0] for spec in runtime.specs}

    def resize(self, wanted: Mapping[str, int], asked_bytes: int) -> tuple[bool, int]:
        """Use so many slots of each component from now on: what ``asked_bytes`` over all ranks come to.

        What is too much leaves in the policy's order, and its memory goes back to the system unless it is pinned.

        Returns:
            whether the pools have that size now, and the bytes that went back.

        Raises:
            ConfigError: L2 was made with fewer.
        """
        if any(slots > self._host.num_slots(name) for name, slots in wanted.items()):
            asked, made = format_bytes(asked_bytes), format_bytes(self._made_bytes)
            remedy = "ask for no more than that, or restart with more"
            raise ConfigError([f"tiers.host.capacity: found {asked}, but L2 was made with {made}; {remedy}"])
        if isinstance(self._host, SharedHostPool):
            return self._resize_budget(self._host, wanted)
        return self._resize_pools(wanted), self._give_back(self._host)

    def _resize_budget(self, host: SharedHostPool, wanted: Mapping[str, int]) -> tuple[bool, int]:
        """The same for a budget: told in slots of the cheapest component, which waste least."""
        placement = host.placement
        name = min(placement.costs, key=lambda each: placement.costs[each])
        most = placement.num_units - ((wanted[name] + 1) * placement.costs[name] - 1)
        with self._runtime.lock:
            if most < placement.num_withheld:
                host.withhold(max(0, most))  # the tree will use these: they need to be there first
        is_reached = self._resize_pools({name: wanted[name]})
        freed_bytes, is_done = 0, False
        while not is_done:  # a little at a time: the lock is held meanwhile
            with self._runtime.lock:
                self._runtime.check_open()
                # The part of a slot that a budget may have beyond whole ones stays.
                in_use = (self._runtime.core.free_slots(name, Tier.HOST)[0] + 1) * placement.costs[name] - 1
                most = max(0, placement.num_units - in_use)
                step = placement.num_withheld + max(1, FREED_AT_ONCE_BYTES // host.unit_bytes)
                freed_bytes += host.withhold(min(most, step))
                is_done = step >= most
        return is_reached, freed_bytes

    def _give_back(self, host: HostPool) -> int:
        """The memory of slots that are not used, a little at a time: the lock keeps them so meanwhile."""
        runtime = self._runtime
        freed_bytes = 0
        for spec in runtime.specs:
            with runtime.lock:
                slots = np.sort(runtime.core.withheld_slots(spec.name, Tier.HOST))
            at_once = max(1, FREED_AT_ONCE_BYTES // host.slot_bytes(spec.name))
            for begin in range(0, len(slots), at_once):
                with runtime.lock:
                    runtime.check_open()
                    unused = runtime.core.withheld_slots(spec.name, Tier.HOST)
                    some = np.intersect1d(slots[begin : begin + at_once], unused)
                    freed_bytes += host.give_back(spec.name, some)
        return freed_bytes

    def _resize_pools(self, wanted: Mapping[str, int]) -> bool:
        """Have the pools shrink or grow; True once they have, False when that takes too long."""
        runtime = self._runtime
        until_s = time.monotonic() + runtime.wait_limit_s
        while True:
            with runtime.lock:
                runtime.check_open()
                runtime.pump()
                tickets: list[TicketId] = []
                for name, slots in wanted.items():
                    room = runtime.core.resize(name, Tier.HOST, slots)
                    runtime.run(room.actions)
                    tickets += room.tickets
            if self.slots().items() >= wanted.items():
                return True
            left_s = until_s - time.monotonic()
            if not tickets or left_s <= 0:
                return False
            runtime.wait(tickets, left_s)
