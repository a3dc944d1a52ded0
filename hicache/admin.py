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

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from hicache.admin_reports import CapacityReport, ClearReport, PolicyReport, StoreReport
from hicache.beliefs import distrust, forget_beliefs
from hicache.clearing import Clearing, merged
from hicache.config import HiCacheConfig, config_warnings, host_slots, load_config
from hicache.errors import ConfigError, ProtocolError, TierTimeoutError
from hicache.host_size import HostSize
from hicache.last_prompts import LastPrompts
from hicache.matcher import check_namespace
from hicache.policies import prefetch_policy, watermarks
from hicache.policy.recompute import LoadOrRecompute
from hicache.policy.session_order import SessionOrder
from hicache.radix.keys import as_tokens
from hicache.runtime import Runtime
from hicache.sessions import Sessions
from hicache.stats import CacheStats
from hicache.stores import OPEN_TIMEOUT_S, StoreSet, make_stack, max_stored_pages, member_bytes
from hicache.tiers.host import HostPool
from hicache.tiers.shared_host import SharedHostPool
from hicache.tiers.stacked import CLOSE_GRACE_S, StackedStore
from hicache.tiers.store import Store
from hicache.types import Namespace, TicketId
from hicache.version import hicache_version

__all__ = [
    "OPEN_TIMEOUT_S",
    "Admin",
    "CapacityReport",
    "ClearReport",
    "LastPrompts",
    "PolicyReport",
    "StoreReport",
]

CHANGEABLE_POLICIES = (
    "eviction",
    "granularity",
    "tail_tokens",
    "admission",
    "store_admission",
    "write",
    "prefetch",
    "watermarks",
)


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
        self._clearing = Clearing(runtime, stores)
        self._host = None if host is None else HostSize(runtime, host, made_bytes=_host_bytes(config))
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
        if not isinstance(everything, bool):
            raise ProtocolError(f"clear: everything is True or False, got {everything!r:.80}")
        if namespace is not None:
            check_namespace(namespace)
        if session is not None and not isinstance(session, str):
            raise ProtocolError(f"clear: a session's name is a string, got {session!r:.80}")
        if wait_s is not None:
            _check_wait(wait_s)
        in_namespace = namespace is not None or tokens is not None
        if everything + (session is not None) + in_namespace != 1:
            raise ProtocolError("clear takes one of: everything, a session, or a namespace and tokens")
        with self._change():
            if session is None:
                prefix = None if tokens is None else as_tokens(tokens)
                return self._clearing.clear(namespace, prefix, wait_s=wait_s)
            with self._runtime.lock:
                prompts = self.prompts.of(session)
            if not prompts:
                raise ProtocolError(
                    f"session {session!r:.80} is not known (it sent nothing lately); clear its tokens instead"
                )
            reports = [
                self._clearing.clear(namespace, prompt, alone=True, wait_s=wait_s)
                for namespace, prompt in prompts
                if len(prompt) >= self._runtime.page_size
            ]
            with self._runtime.lock:
                self.prompts.forget(session)
            return merged(reports)

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
        _check_mapping("attach: a store's section", section)
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
            warnings = self._new_warnings(config)
            self._take_stores(config, top)
            return StoreReport(tuple(self._stores.members), warnings)

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
            warnings = self._new_warnings(config)
            self._take_stores(config, top)
            return StoreReport(tuple(self._stores.members), warnings)

    def _leave_stack(self, stack: StackedStore, store: Store) -> None:
        runtime = self._runtime
        limit_s = CLOSE_GRACE_S + runtime.store_timeout_s + OPEN_TIMEOUT_S
        runtime.transfers.run_store(lambda _: stack.detach(store), limit_s)
        distrust(runtime, self._stores)

    def _leave_last(self) -> None:
        runtime = self._runtime
        until_s = time.monotonic() + runtime.wait_limit_s + runtime.store_timeout_s
        with runtime.lock:
            runtime.core.reconfigure(replace(runtime.core.config, has_store=False))
        while True:
            with runtime.lock:
                runtime.pump()
                forget_beliefs(runtime, self._stores)
                running = runtime.store_tickets()
                if not running or time.monotonic() > until_s:
                    self._stores.top = None
                    break
            self._cancel_and_wait(running, until_s)
        runtime.transfers.close_store()
        with runtime.lock:
            runtime.pump()
            forget_beliefs(runtime, self._stores)

    def _cancel_and_wait(self, tickets: tuple[TicketId, ...], until_s: float) -> None:
        for ticket in tickets:
            self._runtime.transfers.cancel(ticket)
        self._runtime.wait(tickets, max(0.0, until_s - time.monotonic()))

    def _take_stores(self, config: HiCacheConfig, top: Store | None) -> None:
        with self._runtime.lock:
            self._stores.top = top
            self._stores.must_ask = True
            self._reconfigure(has_store=top is not None, max_stored_pages=max_stored_pages(config))
            self._take(config)

    def _member(self, name: object) -> Store:
        store = self._stores.members.get(name) if isinstance(name, str) else None
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
            before = self._host.slots()
            is_reached, freed_bytes = self._host.resize(host_slots(config), _host_bytes(config))
            warnings = self._new_warnings(config)
            self._take(config)
            return CapacityReport(before, self._host.slots(), is_reached, freed_bytes, warnings)

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
                warnings = self._new_warnings(config)
                self._take(config)
            after, is_reached = {"bytes": num_bytes}, store.stats().used_bytes <= num_bytes
            return CapacityReport(before, after, is_reached, warnings=warnings)

    # ---- policies ----------------------------------------------------------------------------
    def set_policy(self, changes: Mapping[str, object]) -> PolicyReport:
        """Go on under other rules.

        Args:
            changes: keys under ``policy`` with what the YAML would say: ``{"eviction": "slru"}``,
                ``{"prefetch": {"mode": "best_effort"}}``. One of ``CHANGEABLE_POLICIES`` each.
        """
        _check_mapping("set_policy: changes", changes)
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
                    store_admission=after.store_admission,
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
            about = tuple(line for line in config_warnings(config) if line.startswith("policy."))
            return PolicyReport(changed, about)

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
                "host_slots": {} if self._host is None else self._host.slots(),
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

    def _new_warnings(self, config: HiCacheConfig) -> tuple[str, ...]:
        """What ``config check`` would warn of from now on, and did not before."""
        known = config_warnings(self._config)
        return tuple(line for line in config_warnings(config) if line not in known)

    def _take(self, config: HiCacheConfig) -> None:
        self._config = config
        self._on_config(config)


def _loaded(tree: Mapping[str, object]) -> HiCacheConfig:
    """The configuration with a change in it; what is wrong is told without the place, which is the caller's own."""
    try:
        return load_config(tree, environ={})
    except ConfigError as error:
        raise ConfigError([line.replace(" (mapping): ", ": ", 1) for line in error.problems]) from None


def _host_bytes(config: HiCacheConfig) -> int:
    """L2 over all ranks; 0 where there is none."""
    return 0 if config.tiers.host is None else config.tiers.host.total_bytes(config.ranks.count)


def _check_mapping(what: str, given: object) -> None:
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise ProtocolError(f"{what}: keys with values as the YAML has them expected, got {given!r:.80}")


def _check_wait(wait_s: object) -> None:
    is_number = isinstance(wait_s, int | float) and not isinstance(wait_s, bool)
    if not is_number or not 0 <= wait_s < float("inf"):  # type: ignore[operator]  # a number by now
        raise ProtocolError(f"clear: wait_s is {wait_s!r:.80}, expected seconds of 0 or more")


def _plain(value: object) -> object:
    dump = getattr(value, "model_dump", None)
    return value if dump is None else dump(mode="json")


def _merge_in(tree: dict[str, Any], key: str, value: object) -> None:  # Any: what a YAML may hold
    if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
        for name, inner in value.items():
            _merge_in(tree[key], name, inner)
    else:
        tree[key] = value
