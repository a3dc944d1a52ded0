"""Small pools, a scripted store and an engine over them, with payload that proves what it is.

with TransferRig(streams="stepped") as rig:
rig.fill(Tier.HOST, "full", [3, 5])                   # each slot's bytes name tier and slot
rig.engine.submit(rig.copy(1, "full", Tier.HOST, [3, 5], Tier.DEVICE, [0, 1]))
rig.to_device.step()
assert rig.read(Tier.DEVICE, "full", 0) == rig.payload(Tier.HOST, "full", 3)
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from blake3 import blake3

from hicache.clock import Clock, ManualClock
from hicache.closing import Closing
from hicache.errors import CorruptPayloadError
from hicache.radix.actions import Copy, Fetch, Slots, Store
from hicache.testing.scripted_store import ScriptedStore
from hicache.testing.stepped_stream import SteppedStream
from hicache.tiers.device import DevicePool
from hicache.tiers.host import HostPool
from hicache.tiers.store import Store as PageStore
from hicache.tiers.store import StoredPage
from hicache.transfer.engine import TransferEngine
from hicache.transfer.jobs import Completion
from hicache.transfer.streams import Streams
from hicache.types import ComponentSpec, PageKey, TicketId, Tier

PATIENCE_S = 60.0
"""Bound of every wait for something that must happen."""
FULL = ComponentSpec("full", num_layers=2, bytes_per_token=64)
MAMBA = ComponentSpec("mamba", rule="checkpoint", num_layers=3, state_bytes=96)


def page_key(name: str | int) -> PageKey:
    """A key to a name."""
    return PageKey(blake3(str(name).encode()).digest())


def page_keys(names: Sequence[str | int]) -> tuple[PageKey, ...]:
    """Keys to names."""
    return tuple(page_key(name) for name in names)


def stamp(key: PageKey, num_bytes: int) -> bytes:
    """The payload that belongs to a key."""
    return blake3(key).digest(length=num_bytes)


def check_stamp(_operation: str, _component: str, key: PageKey, payload: memoryview) -> None:
    """An ``on_page`` that raises unless the payload is the key's stamp."""
    if payload != stamp(key, payload.nbytes):
        raise CorruptPayloadError(f"page {key.hex()[:8]} does not hold its stamp")


class TransferRig(Closing):
    """An engine on CPU pools.

    Args:
        streams: ``stepped`` (``to_host``, ``to_device``, ``local`` are then to be stepped), ``cpu``, or others.
        store: L3; default: a new ``ScriptedStore``, which is ``self.store``. ``None``: no L3.
        page_size, num_slots: of both pools and all components.
        settings: further arguments of ``TransferEngine``.
    """

    def __init__(
        self,
        *,
        streams: Literal["stepped", "cpu"] | Streams = "stepped",
        store: PageStore | Literal["scripted"] | None = "scripted",
        page_size: int = 4,
        num_slots: int = 16,
        specs: Sequence[ComponentSpec] = (FULL, MAMBA),
        clock: Clock | None = None,
        **settings: Any,  # Any: see TransferEngine
    ) -> None:
        slots = {spec.name: num_slots for spec in specs}
        self.device = DevicePool(specs, page_size, slots)
        self.host = HostPool(specs, page_size, slots, pinned=False)
        self.clock = ManualClock() if clock is None else clock
        self.store = ScriptedStore()
        self.to_host, self.to_device, self.local = SteppedStream(), SteppedStream(), SteppedStream()
        arguments = {
            "store_queue_bytes": 1 << 20,
            "prefetch_queue_bytes": 1 << 20,
            "store_timeout_s": 300.0,  # of a manual clock; never reached in real time
        } | settings
        self.engine = TransferEngine(
            specs=specs,
            page_size=page_size,
            device=self.device,
            host=self.host,
            store=self.store if store == "scripted" else store,
            streams=self._streams(streams),
            clock=self.clock,
            **arguments,
        )

    def _streams(self, given: str | Streams) -> Streams | None:
        if isinstance(given, Streams):
            return given
        return Streams(self.to_host, self.to_device, self.local) if given == "stepped" else None

    # ---- actions ---------------------------------------------------------------------------------------------

    def copy(
        self,
        ticket: int,
        component: str,
        source: Tier,
        source_slots: Sequence[int],
        target: Tier,
        target_slots: Sequence[int],
    ) -> Copy:
        """A copy, not submitted."""
        return Copy(
            TicketId(ticket), component, source, as_slots(source_slots), target, as_slots(target_slots)
        )

    def put(self, ticket: int, names: Sequence[str | int], slots: Sequence[int] | None = None) -> Store:
        """A store of ``full`` pages called so, whose stamps are written to the slots (default 0, 1 ..)."""
        keys = page_keys(names)
        where = list(range(len(keys))) if slots is None else list(slots)
        for key, slot in zip(keys, where, strict=True):
            self.host.write("full", slot, stamp(key, self.host.slot_bytes("full")))
        return Store(TicketId(ticket), "full", keys, (None, *keys[:-1])[: len(keys)], as_slots(where))

    def fetch(self, ticket: int, names: Sequence[str | int], slots: Sequence[int] | None = None) -> Fetch:
        """A fetch of ``full`` pages called so, into the slots (default 0, 1 ..)."""
        keys = page_keys(names)
        return Fetch(TicketId(ticket), "full", keys, as_slots(range(len(keys)) if slots is None else slots))

    # ---- payload ---------------------------------------------------------------------------------------------

    def payload(self, tier: Tier, component: str, slot: int) -> bytes:
        """What ``fill`` writes there."""
        return blake3(f"{tier.name} {component} {slot}".encode()).digest(
            length=self.host.slot_bytes(component)
        )

    def fill(self, tier: Tier, component: str, slots: Sequence[int]) -> None:
        """Give slots bytes of their own."""
        pool = self.device if tier == Tier.DEVICE else self.host
        for slot in slots:
            pool.write(component, slot, self.payload(tier, component, slot))

    def fill_states(self, keys: Sequence[PageKey], slots: Sequence[int]) -> None:
        """Write states' stamps to host slots of ``mamba``."""
        for key, slot in zip(keys, slots, strict=True):
            self.host.write("mamba", slot, stamp(key, self.host.slot_bytes("mamba")))

    def read(self, tier: Tier, component: str, slot: int) -> bytes:
        """A slot's bytes now."""
        return (self.device if tier == Tier.DEVICE else self.host).read(component, slot)

    def holds_stamp(self, slot: int, name: str | int) -> bool:
        """Whether a host slot of ``full`` holds the page of that name."""
        return self.host.read("full", slot) == stamp(page_key(name), self.host.slot_bytes("full"))

    def seed(self, names: Sequence[str | int]) -> None:
        """Put pages of ``full`` into the store behind the engine's back."""
        num_bytes = self.host.slot_bytes("full")
        pages = [StoredPage(key, None, "full", memoryview(stamp(key, num_bytes))) for key in page_keys(names)]
        self.engine.run_store(lambda _: self.store.inner.put(pages))

    def stored(self, names: Sequence[str | int]) -> list[bool]:
        """Which pages the store has."""
        return self.engine.run_store(lambda _: self.store.inner.exists(page_keys(names)))

    # ---- outcomes --------------------------------------------------------------------------------------------

    def ended(self, *tickets: int) -> dict[int, Completion]:
        """Wait for these, then take all completions; by ticket, each of which stands once."""
        assert self.engine.wait([TicketId(ticket) for ticket in tickets], PATIENCE_S), "did not end"
        taken = self.engine.completions()
        by_ticket = {int(completion.ticket): completion for completion in taken}
        assert len(by_ticket) == len(taken), "a ticket completed twice"
        return by_ticket

    def advance(self, seconds: float) -> None:
        """Move the manual clock and let the engine look at it."""
        assert isinstance(self.clock, ManualClock)
        self.clock.advance(seconds)
        self.engine.clock_moved()

    def close(self) -> None:
        """Close engine and pools. Idempotent."""
        self.store.release()
        self.engine.close()
        self.device.close()
        self.host.close()


def as_slots(slots: Sequence[int]) -> Slots:
    """Slots as actions carry them."""
    return np.asarray(list(slots), dtype=np.int64)


def engine_threads() -> set[str]:
    """Names of our threads, but for the one that waits for the process's end, to close what vLLM left."""
    names = {thread.name for thread in threading.enumerate() if thread.name.startswith("hicache-")}
    return names - {"hicache-exit"}
