"""HiCache: asks the tree, executes its actions on tiers and transfers.

::

    match   ask L3 (no lock) -> learn, vote, lock (lock) -> prefetch begins
    load    wait for the prefetch (no lock) -> book (lock) -> copy up, wait, book -> settle
    release publish (lock) -> backups and stores run on their own
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch

from hicache.admin import Admin
from hicache.admin_socket import AdminSocket
from hicache.assembly import (
    explainer_of,
    host_pool,
    identity_of,
    log_warnings,
    make_device_pool,
    own_room,
    publish_events,
    serve_metrics,
    session_order,
    tree_of,
)
from hicache.clock import Clock, MonotonicClock, checked_seconds
from hicache.closing import Closing
from hicache.config import (
    HiCacheConfig,
    load_config,
)
from hicache.errors import ConfigError, RankGroupError, TierTimeoutError
from hicache.exits import OpenThings
from hicache.explain import Explainer
from hicache.inspection import audited, read_stats, read_usage
from hicache.keeper import Keeper
from hicache.kept import KeptPrefixes
from hicache.lease import Lease
from hicache.matcher import Matcher, Presence, check_namespace, checked_request
from hicache.policies import prefetch_policy, watermarks
from hicache.policy.recompute import LoadOrRecompute
from hicache.radix.core import core_kind, make_core
from hicache.radix.interface import ProbeResult
from hicache.radix.keys import as_tokens
from hicache.ranks.agreement import Agreement, AgreementStats
from hicache.ranks.group import RankGroup
from hicache.ranks.opening import agreed_room, closes_its_group, open_group
from hicache.runtime import OnEvents, Runtime
from hicache.sessions import DEFAULT_IDLE_AFTER_S, Sessions
from hicache.stats import CacheStats, Usage
from hicache.stores import OPEN_TIMEOUT_S, StoreSet
from hicache.tiers.device import DevicePool
from hicache.tiers.shared_device import SharedDevicePool
from hicache.tiers.shared_host import SharedHostPool
from hicache.tiers.store import Store
from hicache.tracing import OFF, OtelTracing
from hicache.transfer.engine import TransferEngine
from hicache.transfer.store_port import OnPage
from hicache.transfer.streams import Streams
from hicache.types import DEFAULT_NAMESPACE, DEFAULT_PRIORITY, Namespace, Tier
from hicache.version import hicache_version

if TYPE_CHECKING:
    from hicache.kvevents.publisher import EventPublisher
    from hicache.metrics import MetricsServer

logger = logging.getLogger(__name__)

_FLUSH_ROUNDS = 10_000


class HiCache(Closing):
    """A cache of one process (one rank).

    In a group of ranks every rank has one, and makes the same calls in the same order, from one thread; all get the
    same answers. ``docs/ranks.md`` says what that asks of an engine.

    Args:
        config: validated settings (``hicache.config.load_config``).
        clock: time for every time limit.
        session_clock: time for sessions and explanations, where it is another (a replay's); default ``clock``.
        core: ``auto``, ``rust`` or ``python``; None reads ``HICACHE_CORE``.
        store: a store to use instead of the configured one; the cache opens and closes it.
        streams: copy streams to use instead of the device's own (tests).
        device_pool: what makes L1's memory; an adapter's own class where another process reads it, too.
        on_page: called with each page that enters or leaves L3; see ``TransferEngine``.
        group: the ranks to agree with; default: those of ``ranks.backend``. The cache closes it.
        on_events: told of every change in residency, in order, with the lock held; must neither block nor raise.
        background: keep going between calls, by a thread of the cache's own: book what has ended, store
            on, try again, demote ahead. Without it only calls (``poll`` among them) do. Never in a group.

    Raises:
        ConfigError, CapacityError, TierUnavailableError: settings do not fit this machine.
        RankGroupError: the other ranks did not come, differ in their settings, or could not open theirs.

    *Thread*: all public methods may be called from any thread; none holds the cache's lock while
    it waits.
    """

    @closes_its_group
    def __init__(
        self,
        config: HiCacheConfig,
        *,
        clock: Clock | None = None,
        session_clock: Clock | None = None,
        core: str | None = None,
        store: Store | None = None,
        streams: Streams | None = None,
        device_pool: type[DevicePool] = DevicePool,
        on_page: OnPage | None = None,
        group: RankGroup | None = None,
        on_events: OnEvents | None = None,
        background: bool = True,
    ) -> None:
        if not isinstance(config, HiCacheConfig):
            raise ConfigError(
                [
                    f"HiCache: a {type(config).__name__} is no HiCacheConfig; use HiCache.from_yaml or load_config"
                ]
            )
        self.config = config
        log_warnings(config)
        self.clock = clock or MonotonicClock()
        self._ranks = Agreement(open_group(config, group), self.clock, session_clock or self.clock)
        self.core_kind, _ = core_kind(core, config.model.specs())
        self.identity = identity_of(config).digest()
        self.page_size = config.model.page_size
        specs, policy = config.model.specs(), config.policy
        emits_events = config.explain.enabled or config.events.endpoint is not None or on_events is not None
        self._tracing = OtelTracing(hicache_version()) if config.tracing.enabled else OFF
        self._stores = StoreSet(config, self.identity, self.clock, store, self._tracing)
        has_store = self._stores.top is not None
        room = agreed_room(self._ranks, config, own_room(config), has_store=has_store)
        tree_config = tree_of(config, room, self.identity, has_store=has_store, emits_events=emits_events)
        tree = make_core(tree_config, core)
        section = config.tiers.device
        device = torch.device("cpu" if section.kind == "cpu" else f"cuda:{section.index}")
        self.device = make_device_pool(config, room, device, device_pool)
        self.host = host_pool(config, room, device)
        transfers = TransferEngine(
            specs=specs,
            page_size=self.page_size,
            device=self.device,
            host=self.host,
            store=self._stores.top,
            streams=streams,
            clock=self.clock,
            store_queue_bytes=policy.queues.store,
            prefetch_queue_bytes=policy.queues.prefetch,
            store_timeout_s=policy.store_timeout,
            on_page=on_page,
            open_timeout_s=OPEN_TIMEOUT_S,
            tracing=self._tracing,
        )
        idle_after = config.sessions.idle_after
        self.sessions = Sessions(
            self._ranks.session_clock,
            idle_after_s=DEFAULT_IDLE_AFTER_S if isinstance(idle_after, str) else idle_after,
            expire_after_s=config.sessions.expire_after,
            order=session_order(config, room, self.core_kind, policy.eviction),
            page_size=self.page_size,
        )
        self._runtime = Runtime(
            core=tree,
            transfers=transfers,
            sessions=self.sessions,
            kept=KeptPrefixes(self._ranks.session_clock, self.page_size),
            ranks=self._ranks,
            prefetch=prefetch_policy(policy),
            recompute=LoadOrRecompute(policy.prefetch.recompute_per_1024_tokens),
            watermarks=watermarks(policy),
            wait_limit_s=policy.wait_limit,
            store_timeout_s=policy.store_timeout,
            explainer=explainer_of(config, self.identity, self._ranks.session_clock),
            tracing=self._tracing,
            give_back=self.device.give_back if isinstance(self.device, SharedDevicePool) else None,
        )
        if on_events is not None:
            self._runtime.listen(on_events)
        self.admin = Admin(
            config=config,
            runtime=self._runtime,
            stores=self._stores,
            sessions=self.sessions,
            host=self.host,
            make_order=lambda eviction: session_order(
                self.config, own_room(self.config), self.core_kind, eviction
            ),
            on_config=self._take_config,
            read_stats=self.stats,
        )
        self._matcher = Matcher(self._runtime, self._stores, self.admin.prompts)
        self._keeper = Keeper(self._runtime) if background and self._ranks.is_alone else None
        self.metrics: MetricsServer | None = None
        self._admin_socket: AdminSocket | None = None
        self.events: EventPublisher | None = None
        try:
            if config.metrics.port is not None:
                self.metrics = serve_metrics(config, config.metrics.port, self.stats)
            if config.events.endpoint is not None:
                self.events = publish_events(config, config.events.endpoint)
                with self._runtime.lock:
                    self._runtime.listen(self.events.publish)
            if config.admin.path is not None:
                self._admin_socket = AdminSocket(self.admin, config.admin.path)
            self._runtime.step("opened")
            _open.add(self)
        except BaseException:
            self.close(flush=False, drain=False)
            raise

    @classmethod
    def from_yaml(
        cls,
        path: str | Path,
        *,
        overrides: Mapping[str, object] | None = None,
        environ: Mapping[str, str] | None = None,
        group: RankGroup | None = None,
    ) -> Self:
        """Build from a YAML file or the name of a preset (``cpu``, ``cuda``, ``redis``, ``hybrid``)."""
        return cls(load_config(path, overrides=overrides, environ=environ), group=group)

    def _take_config(self, config: HiCacheConfig) -> None:
        self.config = config

    @property
    def is_hybrid(self) -> bool:
        """Whether some component needs marks: a window or a state at the boundary."""
        return self._runtime.is_hybrid

    @property
    def explainer(self) -> Explainer | None:
        """What says why requests missed; None unless ``explain.enabled``."""
        return self._runtime.explainer

    # ---- requests ----------------------------------------------------------------------------
    def probe(self, tokens: object, *, namespace: Namespace = DEFAULT_NAMESPACE) -> ProbeResult:
        """What a match would find in L1, L2 and what the tree knows of L3; changes nothing."""
        checked = as_tokens(tokens)
        check_namespace(namespace)
        with self._runtime.lock:
            self._runtime.check_open()
            return self._runtime.core.probe(checked, namespace)

    def match(
        self,
        tokens: object,
        *,
        session: str | None = None,
        namespace: Namespace = DEFAULT_NAMESPACE,
        priority: int = DEFAULT_PRIORITY,
    ) -> Lease:
        """Open a lease for a prompt; L3 is asked for what L1 and L2 lack, and its prefetch begins.

        Args:
            tokens: int32 or int64 [num_tokens], each ``0 <= id < 2**31``; any other array or sequence
                of integers will do too, strided or read-only. The lease keeps a copy of its own.
            session: the conversation it belongs to.
            namespace: salt, LoRA adapter, extra key.
            priority: 0 to 100; ``priority``, ``adaptive`` and ``session`` keep what higher ones use longer.

        Raises:
            ValueError: bad tokens, with the position; a bad session name or priority.
            ProtocolError: the cache is closed.
            RankGroupError: the ranks of a group cannot agree any more; so say ``load``, ``reserve`` and ``release``.
        """
        request = checked_request(tokens, session, namespace, priority)
        runtime, matcher = self._runtime, self._matcher
        with self._tracing.span("hicache.match", tokens=len(request.prompt)) as span:
            question = matcher.question(request)
            answers: Presence | None = None
            if question.num_keys:
                answers = runtime.transfers.exists(question.keys(), runtime.store_timeout_s)
            return matcher.open(request, question, matcher.agreed(question, answers), span)

    async def amatch(
        self,
        tokens: object,
        *,
        session: str | None = None,
        namespace: Namespace = DEFAULT_NAMESPACE,
        priority: int = DEFAULT_PRIORITY,
    ) -> Lease:
        """``match`` for async code: never blocks the running loop on L3. Not in a group of ranks."""
        runtime, matcher = self._runtime, self._matcher
        runtime.check_alone("amatch", "match")
        request = checked_request(tokens, session, namespace, priority)
        with self._tracing.span("hicache.match", tokens=len(request.prompt)) as span:
            question = matcher.question(request)
            answers: Presence | None = None
            if question.num_keys:
                answers = await runtime.transfers.aexists(question.keys(), runtime.store_timeout_s)
            return matcher.open(request, question, answers, span)

    # ---- keeping -----------------------------------------------------------------------------
    def keep(self, tokens: object, *, for_s: float, namespace: Namespace = DEFAULT_NAMESPACE) -> int:
        """Prefer to keep a prefix, like a system prompt, for so long; said again, the time starts anew.

        It goes after all else that may go in every tier, under every policy. It is no pin: where nothing else is left it goes, too. It may be said before the prefix has ever come: the first request
        of a hybrid model then leaves a state and a window at its end (``Lease.checkpoints``), so that the next is reused.

        Args:
            tokens: floored to a page; the last one may be cut off by that.
            for_s: seconds from now.

        Returns:
            how many tokens the tree has of it now.

        Raises:
            ValueError: bad tokens, less than a page of them, or no finite time above 0.
            CapacityError: ``MAX_KEPT`` prefixes or ``MAX_KEPT_TOKENS`` tokens are kept already.
            ProtocolError: the cache is closed.
        """
        checked = as_tokens(tokens)
        seconds = checked_seconds("keep: for_s", for_s)
        check_namespace(namespace)
        runtime = self._runtime
        with runtime.lock:
            runtime.check_open()
            return runtime.kept.keep(runtime.core, checked, namespace, seconds)

    def unkeep(self, tokens: object, *, namespace: Namespace = DEFAULT_NAMESPACE) -> bool:
        """Take ``keep`` back. False if just this prefix is not kept (any more)."""
        checked = as_tokens(tokens)
        check_namespace(namespace)
        runtime = self._runtime
        with runtime.lock:
            runtime.check_open()
            return runtime.kept.unkeep(runtime.core, checked, namespace)

    # ---- the whole cache ---------------------------------------------------------------------
    def poll(self) -> None:
        """Book finished transfers now. Every other call does it too; an idle engine may want to.

        In a group of ranks, which has no thread of its own for that, it is part of each step of the engine.
        """
        with self._runtime.lock:
            self._runtime.check_open()
            self._runtime.pump()
        if not self._ranks.is_alone:
            self._runtime.tend()

    def drain(self) -> bool:
        """Wait, bounded, until no transfer is under way. True if that was reached."""
        self._runtime.check_open()
        return self._runtime.drain()

    def flush(self) -> bool:
        """Write everything that L3 lacks; True if all of it is there now.

        A store that fails ends it early: what is not written stays where it is.
        """
        self._runtime.check_open()
        return self._flush()

    def _flush(self) -> bool:
        runtime = self._runtime
        if self._stores.top is None:
            return runtime.drain()
        for _ in range(_FLUSH_ROUNDS):
            if not runtime.drain():
                return False
            with runtime.lock:
                failed = runtime.num_store_failures
                started = runtime.core.persist()
                runtime.run(started.actions)
                if not started.tickets:
                    return self._all_stored()
            if not runtime.drain():
                return False
            with runtime.lock:
                if runtime.num_store_failures > failed:
                    return self._all_stored()  # what failed may have been tried again meanwhile
        return False

    def _all_stored(self) -> bool:
        """Whether L3 has all payload that L1 or L2 has (lock held)."""
        return all(
            (component, Tier.STORE) in view.slots
            for view in self._runtime.core.snapshot()
            for component, _ in view.slots
        )

    def reset(self) -> None:
        """Become as new: no payload in L1 and L2, open leases void. L3 keeps its pages.

        Raises:
            TierTimeoutError: transfers did not end in time, so their slots cannot be given away;
                nothing was changed.
        """
        runtime = self._runtime
        runtime.step("reset")
        limit_s = runtime.wait_limit_s + runtime.store_timeout_s
        deadline_s = time.monotonic() + limit_s
        while True:
            with runtime.lock:
                runtime.check_open()
                runtime.pump()
                running = runtime.core.in_flight()
                if not running:
                    runtime.core.reset()
                    if isinstance(self.host, SharedHostPool):
                        self.host.placement.clear()
                    if isinstance(self.device, SharedDevicePool):
                        self.device.give_back_all()
                    runtime.tell()
                    self._stores.must_ask = True
                    runtime.forget_leases()
                    self.sessions.clear()
                    self.admin.prompts.forget()
                    return
                for ticket in running:
                    runtime.transfers.cancel(ticket)
            if not runtime.have_ended(running, deadline_s - time.monotonic()):
                raise TierTimeoutError(
                    f"reset: {len(running)} transfers are still under way after {limit_s:g} s; try again"
                )

    def audit(self) -> list[str]:
        """Every broken invariant, one sentence each; empty when all is sound."""
        return audited(self._runtime, self.host)

    def stats(self) -> CacheStats:
        """A moment's view of all counters."""
        events = None if self.events is None else self.events.stats()
        return read_stats(
            self._runtime,
            self._stores,
            core=self.core_kind,
            eviction=self.config.policy.eviction,
            event_batches={} if events is None else asdict(events),
        )

    def agreement_stats(self) -> AgreementStats:
        """What agreeing with the other ranks has cost so far; nothing for one rank alone."""
        return self._ranks.stats()

    def usage(self) -> Usage:
        """Who holds how much; costs next to nothing, however large the tree."""
        return read_usage(self._runtime, self._stores)

    def close(self, *, flush: bool | None = None, drain: bool = True) -> None:
        """Let go of threads, files and memory. Idempotent; nothing in a process that was forked while it was open.

        Args:
            flush: write what L3 lacks first; default only under ``write_back``, whose pages may be
                nowhere else.
            drain: give what is under way its bounded time to end; otherwise it is cancelled.
        """
        runtime = self._runtime
        with runtime.lock:
            if runtime.closed:
                return
            runtime.closed = True  # from here on requests are refused, so that draining comes to an end
        _open.discard(self)
        if self._admin_socket is not None:
            self._admin_socket.close()
        if self.metrics is not None:
            self.metrics.close()
        if self._keeper is not None:
            self._keeper.close()
        wants_flush = self.config.policy.write == "write_back" if flush is None else flush
        try:
            if self._stores.top is not None and wants_flush:
                self._flush()
            elif drain:
                runtime.drain()
        except RankGroupError as error:
            logger.warning("closing without the other ranks: %s", error)
        finally:
            self._ranks.close()
            runtime.transfers.close()
            if self.events is not None:
                self.events.close()
            self.device.close()
            if self.host is not None:
                self.host.close()

    def disown(self) -> None:
        """This process is a fork of the one that opened the cache: here it counts as closed, and nothing is touched."""
        self._runtime.disown()


_open = OpenThings(complaint="a cache was not closed before the end of the process; use it in a with block")
