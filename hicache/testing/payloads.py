"""Simulated payload: what a cache's slots and store would hold, with every unsafe access caught.

A *stamp* stands for the bytes of one page or state. It names all that the bytes depend on (component,
namespace, every token up to the page's end), so a slot that holds another stamp than its owner expects
is a wrong answer of the engine. ``PayloadExecutor`` runs a core's actions on stamps. It holds every
ticketed action until the test completes it, in whatever order and length the test likes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hicache.radix.actions import Action, Copy, Fetch, Forget, Free, Hint, Store, Ticketed
from hicache.radix.interface import NodeView, TreeConfig
from hicache.radix.keys import as_tokens, page_keys
from hicache.types import NO_SLOT, ComponentSpec, Namespace, NodeId, PageKey, Regard, TicketId, Tier

TOKEN_BYTES = 4
DEVICE, HOST, STORE = Tier.DEVICE, Tier.HOST, Tier.STORE

Place = tuple[str, Tier, int]
"""Component, tier, slot."""


class PayloadError(AssertionError):
    """An action or a test touched payload in a way that loses or mixes bytes."""


class Stamp(NamedTuple):
    """What one slot holds. ``tokens``: all tokens up to its end, int32 little-endian."""

    component: str
    namespace: Namespace
    tokens: bytes

    def __repr__(self) -> str:
        ids = np.frombuffer(self.tokens, dtype="<i4")
        shown = " ".join(map(str, ids[-8:]))
        return f"<{self.component} {self.namespace} [0,{len(ids)}) ..{shown}>"


def path_bytes(tokens: Sequence[int] | NDArray[np.integer]) -> bytes:
    """Tokens as a stamp holds them; a prefix of the tokens is a prefix of the bytes."""
    return as_tokens(tokens).astype("<i4", copy=False).tobytes()


class PlainKeys:
    """Page keys computed the plain way from the root, and remembered."""

    def __init__(self, config: TreeConfig) -> None:
        self._identity = config.identity
        self._page_size = config.page_size
        self._specs = {spec.name: spec for spec in config.components}
        self._known: dict[tuple[str, Namespace, bytes], tuple[PageKey, ...]] = {}

    def of(self, component: str, namespace: Namespace, path: bytes) -> tuple[PageKey, ...]:
        """Keys of all whole pages of ``path``."""
        where = (component, namespace, path)
        if where not in self._known:
            tokens = np.frombuffer(path, dtype="<i4")
            spec = self._specs[component]
            self._known[where] = page_keys(self._identity, spec, tokens, self._page_size, namespace)
        return self._known[where]

    def of_stamp(self, stamp: Stamp) -> PageKey:
        """What a page is called whose bytes the stamp stands for."""
        if not stamp.tokens or len(stamp.tokens) % (TOKEN_BYTES * self._page_size):
            raise PayloadError(f"{stamp} is no whole page, so it has no key")
        return self.of(*stamp)[-1]


def walk_views(views: Iterable[NodeView]) -> Iterator[tuple[NodeView, bytes]]:
    """Each node of a snapshot with all tokens up to its end."""
    paths: dict[NodeId, bytes] = {}
    for view in views:
        above = b"" if view.parent is None else paths[view.parent]
        paths[view.node] = above + np.array(view.tokens, dtype="<i4").tobytes()
        yield view, paths[view.node]


def node_stamps(view: NodeView, path: bytes, spec: ComponentSpec, page_size: int) -> tuple[Stamp, ...]:
    """What a node's slots of one component must hold: one stamp a page, or one state."""
    if spec.is_checkpoint:
        return (Stamp(spec.name, view.namespace, path),)
    first = view.start + page_size
    ends = range(first, view.start + len(view.tokens) + 1, page_size)
    return tuple(Stamp(spec.name, view.namespace, path[: TOKEN_BYTES * end]) for end in ends)


class PayloadExecutor:
    """Runs actions on stamps; raises ``PayloadError`` at the first unsafe one.

    Checks: a slot that a pending ticket reads is not written, freed or given away; a slot that one
    writes is besides not read; a freed slot is poisoned and never read; a slot has one owner; a page
    is stored under its plain key and, if its rule is *path*, not before its parent.

    Args:
        config: of the core whose actions run here.
        store: stands for L3; pass another executor's to share or outlive it.
    """

    def __init__(self, config: TreeConfig, *, store: dict[PageKey, Stamp] | None = None) -> None:
        self.keys = PlainKeys(config)
        self.store: dict[PageKey, Stamp] = {} if store is None else store
        self.pending: dict[TicketId, Ticketed] = {}
        self.lost: set[PageKey] = set()
        self.regards: dict[PageKey, Regard] = {}
        """What the core regards as more or less than plain, by its latest word."""
        self.stored_early: list[Stamp] = []
        """Pages of windows and states whose named parent was not in L3 when their store was issued."""
        self.held: dict[tuple[str, Tier], set[int]] = {}
        self._config = config
        self._capacity = {(name, DEVICE): n for name, n in config.device_slots.items()}
        self._capacity |= {(name, HOST): n for name, n in config.host_slots.items()}
        self._specs = {spec.name: spec for spec in config.components}
        self._contents: dict[Place, Stamp] = {}
        self._readers: Counter[Place] = Counter()
        self._writers: set[Place] = set()
        self._private: set[Place] = set()
        self.reset()

    # ---- what the core asks ------------------------------------------------------------------
    def run(self, actions: Iterable[Action]) -> None:
        """Run a call's actions in order; ticketed ones become pending."""
        for action in actions:
            match action:
                case Free():
                    self._free(action)
                case Copy():
                    self._begin(action, self._sources(action), self._targets(action))
                case Store():
                    self._check_store(action)
                    self._begin(action, self._sources(action), [])
                case Fetch():
                    _check_lengths(action, len(action.keys))
                    self._begin(action, [], self._targets(action))
                case Forget():
                    for key in action.keys:
                        self.store.pop(key, None)
                        self.regards.pop(key, None)
                case Hint():
                    for key in action.keys:
                        self.regards.pop(key, None)
                        if action.regard is not Regard.PLAIN:
                            self.regards[key] = action.regard

    def num_arrivable(self, ticket: TicketId) -> int:
        """How many leading slots of a pending action can be moved: all, or up to a page L3 lacks."""
        action = self.pending[ticket]
        if isinstance(action, Fetch):
            for position, key in enumerate(action.keys):
                if key not in self.store:
                    return position
        return action.num_slots

    def move(self, ticket: TicketId, num_slots: int | None = None) -> int:
        """Carry out the first ``num_slots`` slots of a pending action (default: all) and end it.

        The caller reports the ticket to the core right after, and runs the actions it returns.
        Returns how many slots were moved.
        """
        action = self.pending.pop(ticket)
        count = action.num_slots if num_slots is None else num_slots
        sources, targets = self._sources(action), self._targets(action)
        for place in sources:
            self._readers[place] -= 1
        self._writers.difference_update(targets)
        match action:
            case Copy():
                for source, target in zip(sources[:count], targets[:count], strict=True):
                    self._contents[target] = self._read(source)
            case Store():
                for source, key in zip(sources[:count], action.keys[:count], strict=True):
                    self.store[key] = self._read(source)
            case Fetch():
                for key, target in zip(action.keys[:count], targets[:count], strict=True):
                    if key not in self.store:
                        raise PayloadError(f"ticket {ticket}: L3 lacks page {key.hex()[:8]}")
                    self._contents[target] = self.store[key]
        return count

    # ---- what the engine and the test do -----------------------------------------------------
    def take(self, component: str, slots: Iterable[int]) -> None:
        """Note that a lease was given these device slots."""
        for slot in slots:
            self._hold((component, DEVICE, int(slot)))
            self._private.add((component, DEVICE, int(slot)))

    def write(self, component: str, slot: int, stamp: Stamp) -> None:
        """The engine computes a page or state into a device slot."""
        place = (component, DEVICE, int(slot))
        self._check_held(place)
        if place in self._writers or self._readers[place]:
            raise PayloadError(f"{place} is written while a copy uses it: {self._users(place)}")
        self._contents[place] = stamp

    def read(self, component: str, tier: Tier, slot: int) -> Stamp:
        """What a slot holds. Raises ``PayloadError`` if it is free, unwritten or being written."""
        return self._read((component, tier, int(slot)))

    def seed_store(self, component: str, namespace: Namespace, path: bytes, pages: Iterable[int]) -> None:
        """Put pages into L3 behind the core's back. ``path``: all tokens, whole pages."""
        keys = self.keys.of(component, namespace, path)
        step = TOKEN_BYTES * self._config.page_size
        for page in pages:
            self.store[keys[page]] = Stamp(component, namespace, path[: step * (page + 1)])

    def lose(self, key: PageKey) -> None:
        """L3 drops a page without a word; the core may go on believing in it."""
        self.store.pop(key, None)
        self.lost.add(key)

    def reset(self) -> None:
        """Forget all but L3: what the core's ``reset`` means for payload."""
        self.pending.clear()
        self.held = {pool: set() for pool in self._capacity}
        self._contents.clear()
        self._readers.clear()
        self._writers.clear()
        self._private.clear()

    def check_views(self, views: Iterable[tuple[NodeView, bytes]]) -> None:
        """Every slot a node owns is held and holds that node's payload."""
        owners: dict[Place, NodeView] = {}
        for view, path in views:
            for (component, tier), slots in view.slots.items():
                if tier == STORE:
                    continue
                spec = self._specs[component]
                stamps = node_stamps(view, path, spec, self._config.page_size)
                for slot, stamp in zip(slots, stamps, strict=True):
                    place = (component, tier, slot)
                    if place in owners:
                        raise PayloadError(f"{place} belongs to {owners[place]} and to {view}")
                    owners[place] = view
                    found = self._read(place)
                    if found != stamp:
                        raise PayloadError(f"{place} of {view} holds {found}, not {stamp}")

    def claims(self) -> set[TicketId]:
        """Pending copies within L1: a state that goes from the tree to a lease or back."""
        return {
            ticket
            for ticket, action in self.pending.items()
            if isinstance(action, Copy) and action.source == action.target
        }

    def places_in_flight(self) -> set[Place]:
        """Slots that pending tickets own: their targets, and a private state that a copy reads."""
        private = (place for ticket in self.claims() for place in self._sources(self.pending[ticket]))
        return self._writers.union(private)

    # ---- checks ------------------------------------------------------------------------------
    def _free(self, action: Free) -> None:
        for slot in action.slots.tolist():
            place = (action.component, action.tier, slot)
            self._check_held(place)
            if place in self._writers or self._readers[place]:
                raise PayloadError(f"{place} is freed while a copy uses it: {self._users(place)}")
            self.held[action.component, action.tier].remove(slot)
            self._private.discard(place)
            self._contents.pop(place, None)

    def _begin(self, action: Ticketed, sources: list[Place], targets: list[Place]) -> None:
        if action.ticket in self.pending:
            raise PayloadError(f"ticket {action.ticket} is pending already")
        if not action.num_slots:
            raise PayloadError(f"{action} moves nothing")
        for place in sources:
            self._read(place)
        is_claim = isinstance(action, Copy) and action.source == action.target
        for place in targets:
            if is_claim and place in self._private and not self._readers[place]:
                continue  # the lease had its slot before
            self._hold(place)
        self._readers.update(sources)
        self._writers.update(targets)
        self.pending[action.ticket] = action

    def _check_store(self, action: Store) -> None:
        _check_lengths(action, len(action.keys))
        _check_lengths(action, len(action.parents))
        is_path = self._specs[action.component].rule == "path"
        before = set(self.store)
        for place, key, parent in zip(self._sources(action), action.keys, action.parents, strict=True):
            stamp = self._read(place)
            if key != self.keys.of_stamp(stamp):
                raise PayloadError(f"{stamp} is stored under the key of another page")
            if is_path:
                chain = self.keys.of(*stamp)
                if parent != (chain[-2] if len(chain) > 1 else None):
                    raise PayloadError(f"{stamp} is stored with a parent that is not its own")
            if parent is not None and parent not in before and parent not in self.lost:
                if is_path:
                    raise PayloadError(f"{stamp} is stored before its parent is in L3")
                self.stored_early.append(stamp)
            before.add(key)

    def _hold(self, place: Place) -> None:
        component, tier, slot = place
        if not 0 <= slot < self._capacity[component, tier]:
            raise PayloadError(f"{place} lies outside its pool")
        if slot in self.held[component, tier]:
            raise PayloadError(f"{place} is given away while somebody has it")
        self.held[component, tier].add(slot)
        self._contents.pop(place, None)

    def _check_held(self, place: Place) -> None:
        component, tier, slot = place
        if slot not in self.held[component, tier]:
            raise PayloadError(f"{place} is used though it is free")

    def _read(self, place: Place) -> Stamp:
        self._check_held(place)
        if place in self._writers:
            raise PayloadError(f"{place} is read while {self._users(place)} writes it")
        if place not in self._contents:
            raise PayloadError(f"{place} is read though nothing was written to it")
        return self._contents[place]

    def _users(self, place: Place) -> list[Ticketed]:
        return [
            action
            for action in self.pending.values()
            if place in self._sources(action) or place in self._targets(action)
        ]

    def _sources(self, action: Ticketed) -> list[Place]:
        match action:
            case Copy():
                return _places(action.component, action.source, action.source_slots)
            case Store():
                return _places(action.component, HOST, action.slots)
            case Fetch():
                return []

    def _targets(self, action: Ticketed) -> list[Place]:
        match action:
            case Copy():
                _check_lengths(action, len(action.target_slots))
                return _places(action.component, action.target, action.target_slots)
            case Fetch():
                return _places(action.component, HOST, action.slots)
            case Store():
                return []


def _places(component: str, tier: Tier, slots: NDArray[np.int64]) -> list[Place]:
    listed = slots.tolist()
    if len(set(listed)) != len(listed) or NO_SLOT in listed:
        raise PayloadError(f"{component} in {tier.name}: a slot stands twice or is none in {listed}")
    return [(component, tier, slot) for slot in listed]


def _check_lengths(action: Ticketed, length: int) -> None:
    if action.num_slots != length:
        raise PayloadError(f"{action}: {action.num_slots} slots do not pair with {length}")
