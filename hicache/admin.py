"""Changes to a cache while it serves: ``cache.admin``.

::

    clear              payload leaves every tier
    pause, resume      write-through
    attach, detach     a store
    set_capacity       of L2, of a store
    set_policy         eviction, writing, prefetch, watermarks

Each change is a change of the configuration, checked as a whole by the loader before anything is done, so
that it is refused with the key's path. Requests go on meanwhile: the cache's lock is held while the tree
decides, never while something is waited for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hicache.config import HiCacheConfig, host_slots, load_config
from hicache.errors import ConfigError, ProtocolError, TierTimeoutError
from hicache.policies import prefetch_policy, watermarks
from hicache.policy.recompute import LoadOrRecompute
from hicache.policy.session_order import SessionOrder
from hicache.radix.actions import Forget
from hicache.radix.interface import Tokens
from hicache.radix.keys import as_tokens
from hicache.runtime import Runtime
from hicache.sessions import Sessions
from hicache.stats import CacheStats
from hicache.stores import StoreSet, make_stack, max_stored_pages, member_bytes
from hicache.tiers.host import HostPool
from hicache.tiers.shared_host import SharedHostPool
from hicache.tiers.stacked import CLOSE_GRACE_S, StackedStore
from hicache.tiers.store import Store
from hicache.types import Namespace, TicketId, Tier
from hicache.version import hicache_version

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 60.0
"""Opening a store, or emptying it, takes longer than any single batch."""
MAX_SESSION_TOKENS = 16 << 20
"""Tokens of prompts that are kept to find sessions by; the longest unused are forgotten first."""
FREED_AT_ONCE_BYTES = 64 << 20
"""So much memory goes back to the system under one hold of the lock."""
CHANGEABLE_POLICIES = (
    "eviction",
    "granularity",
    "tail_tokens",
    "admission",
    "write",
    "prefetch",
    "watermarks",
)


@dataclass(frozen=True, slots=True)
class ClearReport:
    """What went.

    Args:
        slots: pages and states that went, by tier (``device``, ``host``, ``store``) and component. Where
            everything was cleared ``store`` is one number, under ``""``: pages of all stores.
        kept_slots: what open leases still held when the time was over; it goes when it is cleared again.
        undeleted_pages: deletions in L3 that were dropped, because too many were queued.
    """

    slots: Mapping[str, Mapping[str, int]]
    kept_slots: int
    undeleted_pages: int = 0

    @property
    def is_complete(self) -> bool:
        return not (self.kept_slots or self.undeleted_pages)


@dataclass(frozen=True, slots=True)
class CapacityReport:
    """Slots in use by component before and after, and whether the new number is reached.

    A pool that is full of locked payload gets there as leases end. ``freed_bytes`` is what went back to the
    system: of L2, where it is not pinned.
    """

    before: Mapping[str, int]
    after: Mapping[str, int]
    is_reached: bool
    freed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StoreReport:
    """The stores of L3 by name, in the order in which they are asked."""

    stores: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """What changed: key under ``policy`` to (before, after)."""

    changed: Mapping[str, tuple[object, object]]


class LastPrompts:
    """The last two prompts of each session, as long as there is room: where its payload is found.

    *Thread*: the cache's lock.
    """

    def __init__(self, max_tokens: int = MAX_SESSION_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._prompts: OrderedDict[str, deque[tuple[Namespace, Tokens]]] = OrderedDict()

    def note(self, session: str, namespace: Namespace, prompt: Tokens) -> None:
        """*Caller guarantees*: nobody writes to ``prompt`` any more."""
        prompts = self._prompts.setdefault(session, deque())
        prompts.appendleft((namespace, prompt))
        self._num_tokens += len(prompt)
        if len(prompts) > 2:
            self._num_tokens -= len(prompts.pop()[1])
        self._prompts.move_to_end(session)
        while self._num_tokens > self._max_tokens:
            _, oldest = self._prompts.popitem(last=False)
            self._num_tokens -= sum(len(tokens) for _, tokens in oldest)

    def of(self, session: str) -> tuple[tuple[Namespace, Tokens], ...]:
        """Latest first; empty if it is not known."""
        return tuple(self._prompts.get(session, ()))

    def forget(self, session: str | None = None) -> None:
        """One session, or all."""
        if session is None:
            self._prompts.clear()
            self._num_tokens = 0
            return
        self._num_tokens -= sum(len(tokens) for _, tokens in self._prompts.pop(session, ()))


class Admin:
    """See the module. One change at a time; a second one waits, bounded.

    *Raises*, all: ``ConfigError`` with the key's path for what the loader refuses; ``ProtocolError`` for
    what makes no sense now; ``TierError`` where a store fails. Nothing has changed then.

    *Thread*: any but the cache's own; blocks, bounded.
    """

    def __init__(
        self,
        *,
        config: HiCacheConfig,
        runtime: Runtime,
        stores: StoreSet,
        sessions: Sessions,
        host: HostPool | SharedHostPool | None,
        make_order: Callable[[str], SessionOrder | None],
        on_config: Callable[[HiCacheConfig], None],
        read_stats: Callable[[], CacheStats],
    ) -> None:
        self._config = config
        self._runtime = runtime
        self._stores = stores
        self._sessions = sessions
        self._host = host
        self._make_order = make_order
        self._on_config = on_config
        self._read_stats = read_stats
        self._changing = threading.Lock()
        self.prompts = LastPrompts()

    # ---- payload -----------------------------------------------------------------------------
    def clear(
        self,
        *,
        everything: bool = False,
        namespace: Namespace | None = None,
        session: str | None = None,
        tokens: object = None,
        wait_s: float | None = None,
    ) -> ClearReport:
        """Throw payload away in every tier, and say how much.

        Args:
            everything: all payload, and all that the stores have.
            namespace: all of it.
            session: what its last request used and leads nowhere else, and what was added to that.
            tokens: what begins with these: the last whole page of them and all below it, in ``namespace``.
                Pages before it may belong to others.
            wait_s: how long to wait for leases that hold some; default: not at all. Transfers are waited
                for in any case, bounded.

        One of the first three, or ``tokens``, is given. Of a namespace, a session or a prefix L3 loses what the tree remembers of it. A store that was filled
        by others, or before a restart, may have more; nothing but clearing everything finds that.
        """
        in_namespace = namespace is not None or tokens is not None
        if everything + (session is not None) + in_namespace != 1:
            raise ProtocolError("clear takes one of: everything, a session, or a namespace and tokens")
        with self._change():
            if session is None:
                prefix = None if tokens is None else as_tokens(tokens)
                return self._clear(namespace, prefix, wait_s=wait_s)
            with self._runtime.lock:
                prompts = self.prompts.of(session)
            if not prompts:
                raise ProtocolError(
                    f"session {session!r:.80} is not known (it sent nothing lately); clear its tokens instead"
                )
            reports = [
                self._clear(namespace, prompt, alone=True, wait_s=wait_s)
                for namespace, prompt in prompts
                if len(prompt) >= self._runtime.page_size
            ]
            with self._runtime.lock:
                self.prompts.forget(session)
            return _merge(reports)

    def _clear(
        self, namespace: Namespace | None, tokens: Tokens | None, *, alone: bool = False, wait_s: float | None
    ) -> ClearReport:
        runtime = self._runtime
        is_all = namespace is None and tokens is None
        until_s = time.monotonic() + runtime.wait_limit_s
        leases_until_s = time.monotonic() + (wait_s or 0.0)
        removed: Counter[tuple[str, Tier]] = Counter()
        drops = runtime.transfers.stats().forget_drops
        while True:
            with runtime.lock:
                runtime.check_open()
                runtime.pump()
                cleared = runtime.core.clear(namespace, tokens, alone=alone)
                # A store that is emptied as a whole need not be told page by page.
                told = cleared.actions
                runtime.run(action for action in told if not (is_all and isinstance(action, Forget)))
            removed.update(cleared.removed)
            now_s = time.monotonic()
            if cleared.tickets and now_s < until_s:
                runtime.wait(cleared.tickets, until_s - now_s)
            elif cleared.kept and now_s < leases_until_s:
                time.sleep(min(0.01, leases_until_s - now_s))
            else:
                break
        by_tier = _by_tier(removed)
        if is_all and self._stores.top is not None:
            by_tier["store"] = {"": self._empty_stores()}
        return ClearReport(by_tier, cleared.kept, runtime.transfers.stats().forget_drops - drops)

    def _empty_stores(self) -> int:
        runtime = self._runtime
        num_pages = runtime.transfers.run_store(lambda store: store.clear(), OPEN_TIMEOUT_S)
        with runtime.lock:
            runtime.core.forget_store()
            runtime.tell()
            self._stores.must_ask = True
        return num_pages

    # ---- writing -----------------------------------------------------------------------------
    def pause_writes(self) -> bool:
        """Copy nothing down because it was used; what is queued for L3 is still written. False if it was so.

        What leaves L1 meanwhile still goes to L2; what leaves L2 is dropped, unless it was queued for L3.
        """
        if self._config.policy.write == "write_back":
            raise ProtocolError("policy.write is write_back: there is no write-through to pause")
        return self._set_pause(paused=True)

    def resume_writes(self) -> bool:
        """Take ``pause_writes`` back; what came meanwhile is written at its next use. False if it was so."""
        return self._set_pause(paused=False)

    @property
    def is_paused(self) -> bool:
        """Whether write-through is paused."""
        return self._runtime.core.config.pauses_writes

    def _set_pause(self, *, paused: bool) -> bool:
        with self._change():
            if self.is_paused == paused:
                return False
            self._reconfigure(pauses_writes=paused)
            return True

    # ---- stores ------------------------------------------------------------------------------
    def attach(self, section: Mapping[str, object]) -> StoreReport:
        """Ask one more store, after those that there are.

        Args:
            section: as it would stand in ``tiers.stores``.
        """
        with self._change():
            tree = self._tree()
            tree["tiers"].setdefault("stores", []).append(dict(section))
            config = _loaded(tree)
            name = config.tiers.stores[-1].name or ""
            store = self._stores.make_last(config)
            top = self._stores.top
            transfers = self._runtime.transfers
            if top is None:
                transfers.open_store(store)
                top = store
            elif isinstance(top, StackedStore):
                stack = top
                transfers.run_store(lambda _: stack.attach(store), OPEN_TIMEOUT_S)
            else:
                transfers.run_store(lambda _: store.open(), OPEN_TIMEOUT_S)
                top = make_stack([top, store], config)
                transfers.exchange_store(top)
            self._stores.members[name] = store
            self._take_stores(config, top)
            return StoreReport(tuple(self._stores.members))

    def detach(self, name: str) -> StoreReport:
        """Ask a store no more, and close it. Its pages stay in it; what is queued for it is written first.

        The tree forgets what it believed of L3, and asks the stores that are left.
        """
        with self._change():
            store = self._member(name)
            tree = self._tree()
            tree["tiers"]["stores"] = [
                section for section in tree["tiers"].get("stores", []) if section.get("name") != name
            ]
            config = _loaded(tree)
            top = self._stores.top
            if isinstance(top, StackedStore) and len(self._stores.members) > 1:
                self._leave_stack(top, store)
            else:
                self._leave_last()
                top = None
            del self._stores.members[name]
            self._take_stores(config, top)
            return StoreReport(tuple(self._stores.members))

    def _leave_stack(self, stack: StackedStore, store: Store) -> None:
        runtime = self._runtime
        limit_s = CLOSE_GRACE_S + runtime.store_timeout_s + OPEN_TIMEOUT_S
        runtime.transfers.run_store(lambda _: stack.detach(store), limit_s)
        with runtime.lock:
            # Until these have ended, what they wrote may be in the store that has left.
            running = runtime.store_tickets()
        runtime.wait(running, runtime.wait_limit_s)
        with runtime.lock:
            self._forget_store()

    def _leave_last(self) -> None:
        runtime = self._runtime
        until_s = time.monotonic() + runtime.wait_limit_s + runtime.store_timeout_s
        with runtime.lock:
            runtime.core.reconfigure(replace(runtime.core.config, has_store=False))
        while True:
            with runtime.lock:
                runtime.pump()
                self._forget_store()
                running = runtime.store_tickets()
                if not running or time.monotonic() > until_s:
                    self._stores.top = None
                    break
            self._cancel_and_wait(running, until_s)
        runtime.transfers.close_store()
        with runtime.lock:
            runtime.pump()
            self._forget_store()

    def _cancel_and_wait(self, tickets: tuple[TicketId, ...], until_s: float) -> None:
        for ticket in tickets:
            self._runtime.transfers.cancel(ticket)
        self._runtime.wait(tickets, max(0.0, until_s - time.monotonic()))

    def _forget_store(self) -> None:
        self._runtime.core.forget_store()
        self._runtime.tell()

    def _take_stores(self, config: HiCacheConfig, top: Store | None) -> None:
        with self._runtime.lock:
            self._stores.top = top
            self._stores.must_ask = True
            self._reconfigure(has_store=top is not None, max_stored_pages=max_stored_pages(config))
            self._take(config)

    def _member(self, name: str) -> Store:
        store = self._stores.members.get(name)
        if store is None:
            known = ", ".join(self._stores.members) or "none"
            raise ProtocolError(f"no store is called {name!r:.80}; there are: {known}")
        return store

    # ---- capacities --------------------------------------------------------------------------
    def set_host_capacity(self, capacity: object) -> CapacityReport:
        """Use so much of L2, in total over all ranks: at most what it was made with.

        What is too much leaves in the policy's order, and its memory goes back to the system unless it is
        pinned.
        """
        with self._change():
            tree = self._tree()
            if self._host is None or "host" not in tree["tiers"]:
                raise ProtocolError("there is no L2 (tiers.host); it can only be had by a restart")
            tree["tiers"]["host"].pop("capacity_per_rank", None)
            tree["tiers"]["host"]["capacity"] = capacity
            config = _loaded(tree)
            wanted = host_slots(config)
            self._check_fits(wanted)
            before = self._host_capacity()
            if isinstance(self._host, SharedHostPool):
                is_reached, freed_bytes = self._resize_budget(self._host, wanted)
            else:
                is_reached, freed_bytes = self._resize_host(wanted), self._give_back()
            self._take(config)
            return CapacityReport(before, self._host_capacity(), is_reached, freed_bytes)

    def _resize_budget(self, host: SharedHostPool, wanted: Mapping[str, int]) -> tuple[bool, int]:
        """The same for a budget: told in slots of the cheapest component, which waste least."""
        placement = host.placement
        name = min(placement.costs, key=lambda each: placement.costs[each])
        most = placement.num_units - ((wanted[name] + 1) * placement.costs[name] - 1)
        with self._runtime.lock:
            if most < placement.num_withheld:
                host.withhold(max(0, most))  # the tree will use these: they need to be there first
        is_reached = self._resize_host({name: wanted[name]})
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

    def _give_back(self) -> int:
        """The memory of slots that are not used, a little at a time: the lock keeps them so meanwhile."""
        runtime, host = self._runtime, self._host
        assert isinstance(host, HostPool)
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

    def _check_fits(self, wanted: Mapping[str, int]) -> None:
        host = self._host
        assert host is not None
        problems = [
            f"tiers.host.capacity: {slots} slots of {name}, but L2 was made with {host.num_slots(name)};"
            " ask for less, or restart with more"
            for name, slots in wanted.items()
            if slots > host.num_slots(name)
        ]
        if problems:
            raise ConfigError(problems)

    def _host_capacity(self) -> dict[str, int]:
        runtime = self._runtime
        with runtime.lock:
            return {spec.name: runtime.core.free_slots(spec.name, Tier.HOST)[0] for spec in runtime.specs}

    def _resize_host(self, wanted: Mapping[str, int]) -> bool:
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
            if self._host_capacity().items() >= wanted.items():
                return True
            left_s = until_s - time.monotonic()
            if not tickets or left_s <= 0:
                return False
            runtime.wait(tickets, left_s)

    def set_store_capacity(self, name: str, capacity: object) -> CapacityReport:
        """Have a disk or memory store hold at most so much; what is too much is evicted at once."""
        with self._change():
            store = self._member(name)
            tree = self._tree()
            places = [n for n, each in enumerate(tree["tiers"].get("stores", [])) if each["name"] == name]
            if not places:
                raise ProtocolError(f"store {name!r} was handed over by the program, not configured")
            tree["tiers"]["stores"][places[0]]["capacity"] = capacity
            config = _loaded(tree)
            num_bytes = member_bytes(config, places[0])
            if num_bytes is None:
                raise ProtocolError(f"store {name!r}: a capacity is needed")
            before = {"bytes": store.stats().capacity_bytes or 0}
            self._runtime.transfers.run_store(lambda _: store.resize(num_bytes), OPEN_TIMEOUT_S)
            with self._runtime.lock:
                self._reconfigure(max_stored_pages=max_stored_pages(config))
                self._take(config)
            stats = store.stats()
            return CapacityReport(before, {"bytes": num_bytes}, stats.used_bytes <= num_bytes)

    # ---- policies ----------------------------------------------------------------------------
    def set_policy(self, changes: Mapping[str, object]) -> PolicyReport:
        """Go on under other rules.

        Args:
            changes: keys under ``policy`` with what the YAML would say: ``{"eviction": "slru"}``,
                ``{"prefetch": {"mode": "best_effort"}}``. One of ``CHANGEABLE_POLICIES`` each.
        """
        fixed = sorted(set(changes) - set(CHANGEABLE_POLICIES))
        if fixed:
            known = ", ".join(CHANGEABLE_POLICIES)
            raise ConfigError([f"policy.{key}: cannot change while serving; {known} can" for key in fixed])
        with self._change():
            tree = self._tree()
            for key, value in changes.items():
                _merge_in(tree["policy"], key, value)
            config = _loaded(tree)
            before, after = self._config.policy, config.policy
            changed = {
                key: (_plain(getattr(before, key)), _plain(getattr(after, key)))
                for key in CHANGEABLE_POLICIES
                if getattr(before, key) != getattr(after, key)
            }
            runtime = self._runtime
            with runtime.lock:
                self._reconfigure(
                    eviction=after.eviction,
                    granularity=after.granularity,
                    tail_tokens=after.tail_tokens,
                    admission=after.admission,
                    write=after.write,
                    pauses_writes=self.is_paused and after.write != "write_back",
                )
                if before.eviction != after.eviction:
                    self._sessions.follow(self._make_order(after.eviction))
                runtime.rule(prefetch_policy(after), watermarks(after))
                cost = after.prefetch.recompute_per_1024_tokens
                if before.prefetch.recompute_per_1024_tokens != cost:
                    runtime.recompute = LoadOrRecompute(cost)
                self._take(config)
            return PolicyReport(changed)

    # ---- what there is -----------------------------------------------------------------------
    def status(self) -> dict[str, object]:
        """What can be changed, as it is now; JSON's types only."""
        runtime = self._runtime
        policy = self._config.policy
        with runtime.lock:
            runtime.check_open()
            return {
                "policy": {key: _plain(getattr(policy, key)) for key in CHANGEABLE_POLICIES},
                "writes_paused": self.is_paused,
                "stores": list(self._stores.members),
                "host_slots": {} if self._host is None else self._host_capacity(),
            }

    def numbers(self) -> list[tuple[str, dict[str, str], float]]:
        """The samples that Prometheus would be told: name, labels, value. Needs ``hicache[metrics]``."""
        try:
            from hicache.metrics import CacheCollector
        except ImportError as error:
            raise ConfigError(
                ["numbers: needs the package prometheus-client; pip install 'hicache[metrics]'"]
            ) from error
        collector = CacheCollector(self._read_stats, self._runtime.specs, version=hicache_version())
        return [
            (sample.name, dict(sample.labels), float(sample.value))
            for family in collector.collect()
            for sample in family.samples
        ]

    # ---- helpers -----------------------------------------------------------------------------
    @contextmanager
    def _change(self) -> Iterator[None]:
        self._runtime.check_alone("a change while serving", "a restart of all ranks")
        limit_s = self._runtime.wait_limit_s
        if not self._changing.acquire(timeout=limit_s):
            raise TierTimeoutError(f"another change is still under way after {limit_s:g} s; try again")
        try:
            with self._runtime.lock:
                self._runtime.check_open()
            yield
        finally:
            self._changing.release()

    def _tree(self) -> dict[str, Any]:  # Any: what a YAML may hold
        return self._config.model_dump(mode="json", exclude_none=True)

    def _reconfigure(self, **changes: Any) -> None:  # Any: as the fields of ``TreeConfig``
        with self._runtime.lock:
            core = self._runtime.core
            core.reconfigure(replace(core.config, **changes))

    def _take(self, config: HiCacheConfig) -> None:
        self._config = config
        self._on_config(config)


def _loaded(tree: Mapping[str, object]) -> HiCacheConfig:
    return load_config(tree, environ={})


def _plain(value: object) -> object:
    dump = getattr(value, "model_dump", None)
    return value if dump is None else dump(mode="json")


def _merge_in(tree: dict[str, Any], key: str, value: object) -> None:  # Any: what a YAML may hold
    if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
        for name, inner in value.items():
            _merge_in(tree[key], name, inner)
    else:
        tree[key] = value


def _by_tier(removed: Mapping[tuple[str, Tier], int]) -> dict[str, dict[str, int]]:
    by_tier: dict[str, dict[str, int]] = {tier.name.lower(): {} for tier in Tier}
    for (component, tier), count in removed.items():
        by_tier[tier.name.lower()][component] = count
    return by_tier


def _merge(reports: list[ClearReport]) -> ClearReport:
    slots: dict[str, Counter[str]] = {tier.name.lower(): Counter() for tier in Tier}
    for report in reports:
        for tier, counts in report.slots.items():
            slots[tier].update(counts)
    return ClearReport(
        {tier: dict(counts) for tier, counts in slots.items()},
        reports[0].kept_slots if reports else 0,
        sum(report.undeleted_pages for report in reports),
    )
