"""HiCache: asks the tree, executes its actions on tiers and transfers.

One lock guards the tree. It is held while the tree decides and while finished transfers are booked,
never while something is waited for::

    match   ask L3 (no lock) -> learn, vote, lock (lock) -> prefetch begins
    load    wait for the prefetch (no lock) -> book (lock) -> copy up, wait, book -> settle
    release publish (lock) -> backups and stores run on their own
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import TracebackType

from hicache.clock import Clock, MonotonicClock
from hicache.config import (
    DiskStoreConfig,
    HiCacheConfig,
    MemoryStoreConfig,
    device_slots,
    host_slots,
    load_config,
    store_bytes,
)
from hicache.errors import ConfigError, HiCacheError, ProtocolError
from hicache.lease import Lease, shortage
from hicache.policy.prefetch import PrefetchMode, PrefetchPolicy
from hicache.policy.watermarks import Watermark
from hicache.radix.actions import Action, Free, Slots
from hicache.radix.core import core_kind, make_core
from hicache.radix.interface import (
    Inserted,
    PlanStep,
    ProbeResult,
    StoreQuery,
    Tokens,
    TreeConfig,
)
from hicache.radix.keys import Identity, as_tokens
from hicache.sessions import DEFAULT_IDLE_AFTER_S, Sessions, check_name
from hicache.stats import CacheStats, TokenCounts
from hicache.tiers.device import DevicePool
from hicache.tiers.disk import AUTO_PATH
from hicache.tiers.host import HostPool
from hicache.tiers.registry import open_store
from hicache.tiers.store import Store
from hicache.transfer.engine import OnPage, TransferEngine
from hicache.transfer.jobs import Completion
from hicache.transfer.streams import Streams
from hicache.types import DEFAULT_NAMESPACE, Namespace, TicketId, Tier, TierTokens

logger = logging.getLogger(__name__)

_LOAD_ROUNDS = 8
_FLUSH_ROUNDS = 10_000
_POOLED = (Tier.DEVICE, Tier.HOST)


class HiCache:
    """A cache of one process (one rank).

    Args:
        config: validated settings (``hicache.config.load_config``).
        clock: time for sessions and time limits.
        core: ``auto``, ``rust`` or ``python``; None reads ``HICACHE_CORE``.
        store: a store to use instead of the configured one; the cache opens and closes it.
        streams: copy streams to use instead of the device's own (tests).
        on_page: called with each page that enters or leaves L3; see ``TransferEngine``.

    Raises:
        ConfigError, CapacityError: settings do not fit this machine.

    *Thread*: all public methods may be called from any thread; none holds the cache's lock while
    it waits.
    """

    def __init__(
        self,
        config: HiCacheConfig,
        *,
        clock: Clock | None = None,
        core: str | None = None,
        store: Store | None = None,
        streams: Streams | None = None,
        on_page: OnPage | None = None,
    ) -> None:
        self.config = config
        self.clock = clock or MonotonicClock()
        self._specs = config.model.specs()
        self.identity = _identity(config).digest()
        self.page_size = config.model.page_size
        self.is_hybrid = any(spec.rule != "path" for spec in self._specs)
        self.num_layers = max(spec.num_layers for spec in self._specs)
        self._lock = threading.RLock()
        self._closed = False
        self._requests = 0
        self._tokens = TokenCounts()
        self._by_component = {spec.name: TierTokens() for spec in self._specs}
        self._faults: Counter[str] = Counter()
        self._doomed: set[TicketId] = set()
        self._fetch_waiters: Counter[TicketId] = Counter()
        policy = config.policy
        self._prefetch = PrefetchPolicy(
            PrefetchMode(policy.prefetch.mode),
            policy.prefetch.min_tokens,
            policy.prefetch.timeout_base,
            policy.prefetch.timeout_per_1024_tokens,
            policy.prefetch.timeout_max,
            policy.wait_limit,
        )
        self._watermarks = {
            Tier.DEVICE: Watermark(policy.watermarks.device.low, policy.watermarks.device.high),
            Tier.HOST: Watermark(policy.watermarks.host.low, policy.watermarks.host.high),
        }
        idle_after = config.sessions.idle_after
        self.sessions = Sessions(
            self.clock,
            idle_after_s=DEFAULT_IDLE_AFTER_S if isinstance(idle_after, str) else idle_after,
            expire_after_s=config.sessions.expire_after,
        )
        self.core_kind, _ = core_kind(core)
        self._store = store if store is not None else _configured_store(config)
        slots = {
            Tier.DEVICE: device_slots(config),
            Tier.HOST: host_slots(config) if config.tiers.host is not None else {},
        }
        self._core = make_core(
            TreeConfig(
                page_size=self.page_size,
                components=self._specs,
                device_slots=slots[Tier.DEVICE],
                host_slots=slots[Tier.HOST],
                has_store=self._store is not None,
                write=policy.write,
                eviction=policy.eviction,
                granularity=policy.granularity,
                identity=self.identity,
            ),
            core,
        )
        device = config.tiers.device
        self.device = DevicePool(
            self._specs,
            self.page_size,
            slots[Tier.DEVICE],
            device="cpu" if device.kind == "cpu" else f"cuda:{device.index}",
        )
        self.host: HostPool | None = None
        if config.tiers.host is not None:
            self.host = HostPool(
                self._specs, self.page_size, slots[Tier.HOST], pinned=config.tiers.host.pinned
            )
        self._transfers = TransferEngine(
            specs=self._specs,
            page_size=self.page_size,
            device=self.device,
            host=self.host,
            store=self._store,
            streams=streams,
            clock=self.clock,
            store_queue_bytes=policy.queues.store,
            prefetch_queue_bytes=policy.queues.prefetch,
            store_timeout_s=policy.store_timeout,
            on_page=on_page,
        )

    @classmethod
    def from_yaml(
        cls,
        path: str | Path,
        *,
        overrides: Mapping[str, object] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> HiCache:
        """Build from a YAML file or the name of a preset (``cpu``, ``cuda``, ``redis``, ``hybrid``)."""
        return cls(load_config(path, overrides=overrides, environ=environ))

    # ---- requests ----------------------------------------------------------------------------
    def probe(self, tokens: object, *, namespace: Namespace = DEFAULT_NAMESPACE) -> ProbeResult:
        """What a match would find in L1, L2 and what the tree knows of L3; changes nothing."""
        checked = as_tokens(tokens)
        with self._lock:
            self._check_open()
            return self._core.probe(checked, namespace)

    def match(
        self, tokens: object, *, session: str | None = None, namespace: Namespace = DEFAULT_NAMESPACE
    ) -> Lease:
        """Open a lease for a prompt; L3 is asked for what L1 and L2 lack, and its prefetch begins.

        Args:
            tokens: int32 or int64 [num_tokens], each ``0 <= id < 2**31``.
            session: the conversation it belongs to.
            namespace: salt, LoRA adapter, extra key.

        Raises:
            ValueError: bad tokens or session name, with the position. ``ProtocolError`` when closed.
        """
        prompt = self._checked(tokens, session)
        query = self._store_query(prompt, namespace)
        answers = None
        if query.num_keys:
            keys = {name: [key for _, key in pairs] for name, pairs in query.keys.items()}
            answers = self._transfers.exists(keys, self.config.policy.store_timeout)
        return self._open(prompt, session, namespace, query, answers)

    async def amatch(
        self, tokens: object, *, session: str | None = None, namespace: Namespace = DEFAULT_NAMESPACE
    ) -> Lease:
        """``match`` for async code: never blocks the running loop on L3."""
        prompt = self._checked(tokens, session)
        query = self._store_query(prompt, namespace)
        answers = None
        if query.num_keys:
            keys = {name: [key for _, key in pairs] for name, pairs in query.keys.items()}
            answers = await self._transfers.aexists(keys, self.config.policy.store_timeout)
        return self._open(prompt, session, namespace, query, answers)

    def _checked(self, tokens: object, session: str | None) -> Tokens:
        prompt = as_tokens(tokens)
        if session is not None:
            check_name(session)
        self._check_open()
        return prompt

    def _store_query(self, prompt: Tokens, namespace: Namespace) -> StoreQuery:
        with self._lock:
            self._pump()
            query = self._core.store_query(prompt, namespace)
        longest = max((len(pairs) for pairs in query.keys.values()), default=0)
        if longest * self.page_size < self._prefetch.min_tokens:
            return StoreQuery({})
        return query

    def _open(
        self,
        prompt: Tokens,
        session: str | None,
        namespace: Namespace,
        query: StoreQuery,
        answers: Mapping[str, list[bool]] | None,
    ) -> Lease:
        with self._lock:
            self._check_open()
            self._pump()
            if answers is not None:
                found = {
                    name: {index: there for (index, _), there in zip(pairs, answers[name], strict=True)}
                    for name, pairs in query.keys.items()
                }
                self._core.learn(prompt, found, namespace)
            elif query.num_keys:
                self._faults["store_probe_failed"] += 1
            matched = self._core.match(prompt, namespace, session=session)
            if session is not None:
                self.sessions.begin(session)
            self._run(matched.actions)
            lease = Lease(self, prompt, matched, session, self.clock.now_s())
            if matched.found.boundary:
                self._begin_fetch(lease)
            return lease

    # ---- what leases call --------------------------------------------------------------------
    def _plan(self, lease: Lease) -> tuple[PlanStep, ...]:
        with self._lock:
            self._pump()
            return self._core.plan(lease.id)

    def _load(self, lease: Lease) -> None:
        for _ in range(_LOAD_ROUNDS):
            if not lease._fetch_tickets:
                break
            in_time = self._transfers.wait(lease._fetch_tickets, self._fetch_left_s(lease))
            late = self._leave_fetch(lease)
            if in_time:
                self._begin_fetch(lease)  # begins more only where pages proved missing
            else:
                self._transfers.wait(late, self.config.policy.store_timeout)
        for _ in range(_LOAD_ROUNDS):
            waits = self._begin_load(lease)
            if not waits or not self._wait(waits):
                break
        self._wait(self._settle(lease))
        self._settle(lease)

    async def _aload(self, lease: Lease) -> None:
        limit_s = self.config.policy.wait_limit
        for _ in range(_LOAD_ROUNDS):
            if not lease._fetch_tickets:
                break
            in_time = await self._transfers.await_(lease._fetch_tickets, self._fetch_left_s(lease))
            late = self._leave_fetch(lease)
            if in_time:
                self._begin_fetch(lease)  # begins more only where pages proved missing
            else:
                await self._transfers.await_(late, self.config.policy.store_timeout)
        for _ in range(_LOAD_ROUNDS):
            waits = self._begin_load(lease)
            if not waits or not await self._transfers.await_(waits, limit_s):
                break
        await self._transfers.await_(self._settle(lease), limit_s)
        self._settle(lease)

    def _begin_fetch(self, lease: Lease) -> None:
        with self._lock:
            self._pump()
            started = self._core.fetch(lease.id)
            self._run(started.actions)
            lease._fetch_tickets = started.tickets
            self._fetch_waiters.update(started.tickets)

    def _fetch_left_s(self, lease: Lease) -> float:
        """Seconds of the prefetch's time limit that are left."""
        elapsed_s = self.clock.now_s() - lease._fetch_began_s
        num_tokens = lease._matched.found.source.store
        return max(0.0, self._prefetch.limit_s(num_tokens) - elapsed_s)

    def _leave_fetch(self, lease: Lease) -> tuple[TicketId, ...]:
        """The lease waits no longer. Cancels what nobody waits for; returns what still runs of it."""
        with self._lock:
            self._pump()
            running = set(self._core.in_flight())
            left: list[TicketId] = []
            for ticket in lease._fetch_tickets:
                self._fetch_waiters[ticket] -= 1
                if self._fetch_waiters[ticket] > 0:
                    continue
                del self._fetch_waiters[ticket]
                if ticket in running:
                    self._faults["prefetch_stopped"] += 1
                    self._transfers.cancel(ticket)
                    left.append(ticket)
            lease._fetch_tickets = ()
        return tuple(left)

    def _begin_load(self, lease: Lease) -> tuple[TicketId, ...]:
        with self._lock:
            self._pump()
            started = self._core.load(lease.id)
            self._run(started.actions)
            lease._load_tickets += started.tickets
            return started.tickets

    def _settle(self, lease: Lease) -> tuple[TicketId, ...]:
        with self._lock:
            self._pump()
            settled = self._core.settle(lease.id)
            self._run(settled.actions)
            if settled.boundary < lease._matched.found.boundary and lease._settled is None:
                self._faults["shortened"] += 1
            lease._settled = settled
            return settled.tickets

    def _reserve(self, lease: Lease, num_tokens: int) -> None:
        if num_tokens < 0:
            raise ValueError(f"cannot reserve {num_tokens} tokens")
        if lease._settled is None:
            self._wait(self._settle(lease))
            self._settle(lease)
        deadline_s = self.clock.now_s() + self.config.policy.wait_limit
        while True:
            with self._lock:
                self._pump()
                reserved = self._core.reserve(lease.id, num_tokens)
                self._run(reserved.actions)
                if not reserved.short:
                    return
                free = {
                    name: self._core.free_slots(name, Tier.DEVICE)[1] for name in reserved.short
                }
            left_s = deadline_s - self.clock.now_s()
            waited = left_s > 0 and self._transfers.wait(reserved.tickets[:1], left_s)
            if not reserved.tickets or not waited:
                with self._lock:
                    self._faults["reserve_refused"] += 1
                raise shortage(reserved.short, free)

    def _slots(self, lease: Lease, component: str) -> Slots:
        with self._lock:
            return self._core.lease_slots(lease.id, component)

    def _state(self, lease: Lease, component: str) -> int | None:
        with self._lock:
            return self._core.lease_state(lease.id, component)

    def _checkpoint(self, lease: Lease, tokens: Tokens, *, mark: bool) -> Inserted:
        with self._lock:
            self._pump()
            inserted = self._core.insert(lease.id, tokens, mark=mark)
            self._run(inserted.actions)
        if inserted.tickets and not self._wait(inserted.tickets):
            # The request goes on writing its state, so what is copied now is worth nothing.
            with self._lock:
                self._doomed.update(set(inserted.tickets) & set(self._core.in_flight()))
                self._faults["state_copy_late"] += 1
        return inserted

    def _release(self, lease: Lease, tokens: Tokens | None, *, stop: str) -> Inserted:
        with self._lock:
            self._pump()
            inserted = self._core.release(lease.id, tokens)
            self._ended(lease, stop)
            self._run(inserted.actions)
            self._demote_ahead()
        return inserted

    def _abandon(self, lease: Lease) -> None:
        """Leave a lease on any way out; after ``reset`` or ``close`` there is nothing to give back."""
        with self._lock:
            lease._released = True
            if self._closed:
                return
            try:
                inserted = self._core.release(lease.id)
            except ProtocolError:
                return
            self._ended(lease, "")
            self._run(inserted.actions)

    def _ended(self, lease: Lease, stop: str) -> None:
        lease._released = True
        self._leave_fetch(lease)
        self._requests += 1
        settled = lease._settled
        reused = settled.source if settled is not None else TierTokens()
        self._tokens.add(len(lease._prompt), reused)
        for name, got in (settled.by_component if settled is not None else {}).items():
            have = self._by_component[name]
            self._by_component[name] = TierTokens(
                have.device + got.device, have.host + got.host, have.store + got.store
            )
        if lease._session is not None:
            self.sessions.end(lease._session, stop=stop)

    # ---- transfers ---------------------------------------------------------------------------
    def _run(self, actions: Iterable[Action]) -> None:
        """Hand actions to the transfer engine. Frees are the tree's own business on this device."""
        for action in actions:
            if not isinstance(action, Free):
                self._transfers.submit(action)

    def _pump(self) -> None:
        """Book what has ended, and start what that allows."""
        for completion in self._transfers.completions():
            self._run(self._book(completion))

    def _book(self, done: Completion) -> tuple[Action, ...]:
        doomed = done.ticket in self._doomed
        self._doomed.discard(done.ticket)
        if done.error is None and done.done_slots == done.num_slots and not doomed:
            return self._core.commit(done.ticket)
        self._faults[f"{done.kind}_{done.error or 'missing'}".replace(" ", "_")] += 1
        arrived = 0 if doomed else done.done_slots
        return self._core.abort(done.ticket, arrived, missing=done.error is None)

    def poll(self) -> None:
        """Book finished transfers now. Every other call does it too; an idle engine may want to."""
        with self._lock:
            self._check_open()
            self._pump()

    def _wait(self, tickets: Collection[TicketId]) -> bool:
        """Wait, bounded, and book. True if all ended in time."""
        ended = not tickets or self._transfers.wait(tickets, self.config.policy.wait_limit)
        with self._lock:
            self._pump()
        if not ended:
            self._faults["wait_limit"] += 1
        return ended

    def _demote_ahead(self) -> None:
        """Between the watermarks demotion runs in the background, ahead of the next allocation."""
        for spec in self._specs:
            for tier in _POOLED:
                capacity, free = self._core.free_slots(spec.name, tier)
                wanted = self._watermarks[tier].wanted_free(free_slots=free, capacity_slots=capacity)
                if wanted is not None:
                    self._run(self._core.make_room(spec.name, tier, wanted).actions)

    # ---- the whole cache ---------------------------------------------------------------------
    def drain(self) -> bool:
        """Wait, bounded, until no transfer is under way. True if that was reached."""
        for _ in range(_FLUSH_ROUNDS):
            with self._lock:
                self._pump()
                running = self._core.in_flight()
            if not running:
                return True
            if not self._transfers.wait(running, self.config.policy.wait_limit):
                return False
        return False

    def flush(self) -> bool:
        """Write everything that L3 lacks; True if all of it is there now.

        A store that fails ends it early: what is not written stays where it is.
        """
        if self._store is None:
            return self.drain()
        for _ in range(_FLUSH_ROUNDS):
            if not self.drain():
                return False
            with self._lock:
                failed = self._failed_stores()
                started = self._core.persist()
                self._run(started.actions)
            if not started.tickets:
                return True
            if not self.drain():
                return False
            with self._lock:
                if self._failed_stores() > failed:
                    return False
        return False

    def _failed_stores(self) -> int:
        return sum(count for cause, count in self._faults.items() if cause.startswith("store_"))

    def reset(self) -> None:
        """Become as new: no payload in L1 and L2, open leases void. L3 keeps its pages."""
        with self._lock:
            for ticket in self._core.in_flight():
                self._transfers.cancel(ticket)
        self._transfers.drain(self.config.policy.wait_limit)
        with self._lock:
            self._pump()
            self._core.reset()
            self.sessions.clear()

    def audit(self) -> list[str]:
        """Every broken invariant, one sentence each; empty when all is sound."""
        with self._lock:
            self._pump()
            findings = self._core.audit()
            counts = self._tokens
            if counts.hit + counts.computed != counts.prompt:
                findings.append(
                    f"{counts.hit} reused and {counts.computed} computed tokens are not the "
                    f"{counts.prompt} of the prompts"
                )
            running, known = set(self._transfers.outstanding()), set(self._core.in_flight())
            if not running <= known:
                findings.append(f"transfers {sorted(running - known)} run without a ticket")
        return findings

    def stats(self) -> CacheStats:
        """A moment's view of all counters."""
        with self._lock:
            self._pump()
            return CacheStats(
                requests=self._requests,
                tokens=TokenCounts(
                    self._tokens.prompt,
                    self._tokens.device,
                    self._tokens.host,
                    self._tokens.store,
                    self._tokens.computed,
                ),
                by_component=dict(self._by_component),
                pools={
                    (spec.name, tier.name.lower()): self._core.pool_count(spec.name, tier)
                    for spec in self._specs
                    for tier in _POOLED
                },
                tree=self._core.counters(),
                transfers=self._transfers.stats(),
                store=None if self._store is None else self._store.stats(),
                sessions=self.sessions.count(),
                faults=dict(self._faults),
                core=self.core_kind,
            )

    def close(self, *, flush: bool | None = None, drain: bool = True) -> None:
        """Let go of threads, files and memory. Idempotent.

        Args:
            flush: write what L3 lacks first; default only under ``write_back``, whose pages may be
                nowhere else.
            drain: give what is under way its bounded time to end; otherwise it is cancelled.
        """
        with self._lock:
            if self._closed:
                return
            wants_flush = self.config.policy.write == "write_back" if flush is None else flush
        try:
            if self._store is not None and wants_flush:
                self.flush()
            elif drain:
                self.drain()
        finally:
            with self._lock:
                self._closed = True
            self._transfers.close()
            self.device.close()
            if self.host is not None:
                self.host.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ProtocolError("the cache is closed")

    def __enter__(self) -> HiCache:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _identity(config: HiCacheConfig) -> Identity:
    ranks = config.ranks
    return Identity(
        model=config.model.name,
        weights=config.model.weights,
        dtype=config.model.dtype,
        page_size=config.model.page_size,
        tp_size=ranks.tp_size,
        tp_rank=ranks.tp_rank,
        pp_size=ranks.pp_size,
        pp_rank=ranks.pp_rank,
        cp_size=ranks.cp_size,
        cp_rank=ranks.cp_rank,
    )


def _configured_store(config: HiCacheConfig) -> Store | None:
    if not config.tiers.stores:
        return None
    if len(config.tiers.stores) > 1:
        raise ConfigError(["tiers.stores: stacked stores are not supported yet; keep one"])
    section = config.tiers.stores[0]
    capacity = store_bytes(config)[0]
    match section:
        case DiskStoreConfig():
            path = AUTO_PATH if section.directory is None else str(section.directory)
            return open_store("disk", path=path, capacity_bytes=capacity)
        case MemoryStoreConfig():
            return open_store("memory", capacity_bytes=capacity)
        case _:
            return open_store(section.kind)


__all__ = ["HiCache", "HiCacheError"]
