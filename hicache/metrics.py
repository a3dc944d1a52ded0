"""A cache's numbers for Prometheus.

Nothing is counted here. A scrape reads ``cache.stats()`` and says it in Prometheus' words, so the numbers
are those of every other report, and a request costs nothing more for being measured.

``cache.stats`` counts slots by owner from scratch under the cache's lock: a scrape costs time in proportion to the
tree (docs/operations.md has what was measured).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from hicache.closing import Closing
from hicache.errors import ConfigError
from hicache.radix.interface import PoolCount
from hicache.ranks.agreement import AgreementStats
from hicache.stats import CacheStats
from hicache.tiers.store import BreakerState, StoreStats
from hicache.transfer.stats import CALL_BOUNDS_S, TransferStats
from hicache.types import ComponentSpec, ReuseRule, TierTokens

PREFIX = "hicache"
SLOT_STATES = ("free", "evictable", "protected", "lease_owned", "in_flight", "others")
JOIN_S = 5.0


class CacheCollector(Collector):
    """Says a cache's numbers whenever a registry asks for them.

    Args:
        read: gives the numbers, ``cache.stats``.
        specs: the model's components.
        version: of the package, for ``hicache_info``.

    *Thread*: any.
    """

    def __init__(
        self, read: Callable[[], CacheStats], specs: Sequence[ComponentSpec], *, version: str = ""
    ) -> None:
        self._read = read
        self._specs = {spec.name: spec for spec in specs}
        self._version = version

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not read the cache."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        stats = self._read()
        yield InfoMetricFamily(
            PREFIX, "Version of the package and the tree core", {"version": self._version, "core": stats.core}
        )
        eviction, followed = stats.policy
        yield InfoMetricFamily(
            f"{PREFIX}_policy",
            "The eviction policy, and which one it goes by at the moment",
            {"eviction": eviction, "followed": followed},
        )
        yield from self._requests(stats)
        yield from _pools(stats.pools)
        yield _by_pool(
            "dead_weight_bytes",
            "Payload that no request can reuse, for lack of a state or a window beside it",
            stats.dead_weight_bytes,
        )
        yield _by_pool("pool_used_bytes", "Bytes of the slots that are not free", stats.used_bytes)
        yield from self._removals(stats.tree)
        yield from _transfers(stats.transfers)
        if stats.store is not None:
            yield from store_metrics(stats.store)
        events = dict(stats.event_batches)
        queued = events.pop("queued", 0)
        yield _labelled(
            _counter("event_batches", "Batches of KV events by what became of them", "outcome"), events
        )
        yield GaugeMetricFamily(f"{PREFIX}_event_queue_batches", "Batches of KV events not sent yet", queued)
        yield _labelled(_gauge("sessions", "Sessions by state", "state"), stats.sessions)
        yield from _hints(stats)
        yield from _ranks(stats.agreement)
        yield _labelled(_counter("faults", "What shortened a hit, by cause", "cause"), stats.faults)
        yield _counted("audits", "Audits of the cache's invariants", stats.audits)
        yield _counted("audit_findings", "Broken invariants that audits found", stats.audit_findings)

    # ---- requests ------------------------------------------------------------------------------
    def _requests(self, stats: CacheStats) -> Iterator[Metric]:
        tokens = stats.tokens
        yield _counted("requests", "Requests that ended", stats.requests)
        yield _labelled(
            _counter(
                "prompt_tokens",
                "Prompt tokens by where their payload came from; all are the prompts",
                "source",
            ),
            {
                "device": tokens.device,
                "host": tokens.host,
                "store": tokens.store,
                "computed": tokens.computed,
            },
        )
        hits = _counter("hit_tokens", "Tokens of reused payload", "component", "tier")
        misses = _counter(
            "miss_tokens",
            "Prompt tokens for which neither this tier nor a faster one had payload to reuse; no windows, which need"
            " only the last tokens",
            "component",
            "tier",
        )
        for component in self._specs:
            got = stats.by_component.get(component, TierTokens())
            by_tier = {"device": got.device, "host": got.host, "store": got.store}
            so_far = accumulate(by_tier.values())
            for (tier, count), reached in zip(by_tier.items(), so_far, strict=True):
                hits.add_metric([component, tier], count)
                if self._specs[component].rule != ReuseRule.WINDOW:
                    misses.add_metric([component, tier], tokens.prompt - reached)
        yield hits
        yield misses
        yield _counted(
            "recomputed_tokens",
            "Prompt tokens found and computed all the same, as that was expected to be sooner",
            stats.recomputed_tokens,
        )
        yield _labelled(
            _counter(
                "lost_tokens",
                "Prompt tokens that were once known and not reused, by cause; only with explain.enabled",
                "cause",
            ),
            stats.lost_tokens,
        )

    def _removals(self, tree: Mapping[str, int]) -> Iterator[Metric]:
        left = _counter(
            "removed_slots",
            "Pages and states that left a tier; demote: a lower tier has them, evict: none has",
            "component",
            "tier",
            "cause",
        )
        for name, count in tree.items():
            if name.startswith("left_"):
                _, tier, cause, component = name.split("_", 3)
                left.add_metric([component, tier, cause], count)
        yield left
        yield _counted(
            "fork_tokens",
            "Tokens with path payload that matches could not use for lack of a state or a window",
            tree.get("fork_tokens", 0),
        )
        yield _counted(
            "forgotten_stored_nodes",
            "Nodes of which the tree remembers no longer what L3 has, for lack of room; L3 is asked again",
            tree.get("beliefs_forgotten", 0),
        )
        yield _counted(
            "declined_store_pages",
            "Pages and states that left L2 and that L3 does not have since they were over",
            tree.get("stores_declined", 0),
        )
        yield _labelled(
            _counter("refusals", "What a pool had no room for", "what"),
            {what: tree.get(f"{what}_refused", 0) for what in ("backups", "states", "claims")},
        )


def _hints(stats: CacheStats) -> Iterator[Metric]:
    hints = _counter(
        "hints",
        "What clients said of sessions, requests and prefixes, by kind; unknown: of a session or prefix that is not there",
        "kind",
        "outcome",
    )
    for (kind, is_known), count in sorted(stats.hints.items()):
        hints.add_metric([kind, "taken" if is_known else "unknown"], count)
    yield hints
    num_prefixes, num_tokens = stats.kept
    yield GaugeMetricFamily(f"{PREFIX}_kept_prefixes", "Prefixes that are kept for a time", num_prefixes)
    yield GaugeMetricFamily(f"{PREFIX}_kept_tokens", "Tokens of the prefixes that are kept", num_tokens)


def _ranks(stats: AgreementStats) -> Iterator[Metric]:
    yield GaugeMetricFamily(f"{PREFIX}_ranks", "Ranks that agree; 1 agrees with nobody", stats.num_ranks)
    yield _counted("rank_agreements", "Steps that the ranks have agreed on", stats.num_steps)
    yield _counted("rank_exchanges", "Calls of the rank group for them", stats.num_calls)
    yield _counted("rank_sent_bytes", "Bytes that this rank gave in exchanges", stats.num_bytes)
    yield CounterMetricFamily(
        f"{PREFIX}_rank_exchange_seconds",
        "Time in exchanges, waiting for slower ranks included",
        value=stats.seconds,
    )
    yield _counted(
        "rank_shortened_transfers",
        "Transfers that ended worse for all than here, as another rank got less of them",
        stats.num_shortened,
    )
    yield _counted("rank_shortened_slots", "Slots that had arrived here for nothing", stats.shortened_slots)
    yield _counted(
        "rank_absent_pages",
        "Pages that L3 had for this rank, and not for another one",
        stats.absent_pages,
    )


def _pools(pools: Mapping[tuple[str, str], PoolCount]) -> Iterator[Metric]:
    slots = _gauge(
        "slots", "Slots by owner; a pool's states sum to its capacity", "component", "tier", "state"
    )
    for (component, tier), count in pools.items():
        for state in SLOT_STATES:
            slots.add_metric([component, tier, state], getattr(count, state))
    yield slots


def _by_pool(name: str, text: str, num_bytes: Mapping[tuple[str, str], int]) -> Metric:
    family = _gauge(name, text, "component", "tier")
    for (component, tier), count in num_bytes.items():
        family.add_metric([component, tier], count)
    return family


def _transfers(stats: TransferStats) -> Iterator[Metric]:
    moved = _counter("moved_bytes", "Bytes that arrived", "component", "direction")
    slots = _counter("moved_slots", "Pages and states that arrived", "component", "direction")
    ended = _counter("transfers", "Transfers that ended, complete or not", "component", "direction")
    for row in stats.moved:
        labels = [row.component, row.direction.value]
        moved.add_metric(labels, row.num_bytes)
        slots.add_metric(labels, row.slots)
        ended.add_metric(labels, row.transfers)
    yield from (moved, slots, ended)
    times = HistogramMetricFamily(
        f"{PREFIX}_transfer_call_duration_seconds",
        "Duration of copies between L1 and L2, and of store calls (probe: asking what is there, which a match waits"
        " for); those that overlap count each in full",
        labels=["direction"],
    )
    for direction, calls in stats.calls.items():
        bounds = [*(str(bound) for bound in CALL_BOUNDS_S), "+Inf"]
        buckets = list(zip(bounds, (float(n) for n in accumulate(calls.counts)), strict=True))
        times.add_metric([direction], buckets, calls.seconds)
    yield times
    yield _labelled(_counter("transfer_failures", "Transfers that fell short", "cause"), stats.failures)
    yield _labelled(
        _counter("queue_drops", "Transfers dropped because their queue was full", "direction"),
        {direction.value: count for direction, count in stats.queue_drops.items()},
    )
    asked = _counter("probed_pages", "Pages that L3 was asked for before a fetch, by its answer", "outcome")
    asked.add_metric(["present"], stats.probed_pages - stats.absent_pages)
    asked.add_metric(["absent"], stats.absent_pages)
    deleted = _counter("deleted_pages", "Pages to be deleted in L3; dropped: too many were queued", "outcome")
    deleted.add_metric(["deleted"], stats.forgotten_pages)
    deleted.add_metric(["dropped"], stats.forget_drops)
    told = _counter(
        "hinted_pages",
        "Pages that L3 was told are over or not any more; dropped: too many were queued",
        "outcome",
    )
    told.add_metric(["told"], stats.hinted_pages)
    told.add_metric(["dropped"], stats.hint_drops)
    yield from (asked, deleted, told)
    queues = {"store": stats.store_queue, "fetch": stats.fetch_queue}
    jobs = _gauge("queue_jobs", "Stores and fetches queued or running", "queue")
    used = _gauge("queue_bytes", "Bytes queued or running", "queue")
    limit = _gauge("queue_limit_bytes", "Bytes beyond which a queue drops work", "queue")
    for name, depth in queues.items():
        jobs.add_metric([name], depth.jobs)
        used.add_metric([name], depth.used_bytes)
        limit.add_metric([name], depth.limit_bytes)
    yield from (jobs, used, limit)
    yield GaugeMetricFamily(f"{PREFIX}_transfers_outstanding", "Transfers under way", stats.outstanding)
    yield GaugeMetricFamily(
        f"{PREFIX}_store_stuck_calls", "Store calls that did not end when cancelled", stats.stuck_calls
    )


def store_metrics(top: StoreStats) -> Iterator[Metric]:
    """One set of series for each store. A stack is told by its parts: its own counters would double theirs."""
    stores = _named(top)
    stored = _gauge("store_stored_pages", "Pages a store holds", "store")
    used = _gauge("store_used_bytes", "Bytes a store holds", "store")
    capacity = _gauge(
        "store_capacity_bytes", "Bytes a store may hold, where it has a limit of its own", "store"
    )
    pages = _counter("store_pages", "Pages by what a store did with them", "store", "outcome")
    read = _counter("store_read_bytes", "Bytes read from a store", "store")
    written = _counter("store_written_bytes", "Bytes written to a store", "store")
    errors = _counter("store_errors", "Faults inside a store", "store", "error")
    state = _gauge(
        "store_breaker_state", "1 for the state that a store's circuit breaker is in", "store", "state"
    )
    opened = _counter("store_breaker_opened", "How often a circuit breaker has opened", "store")
    rejected = _counter("store_breaker_rejected_calls", "Calls answered in a store's place", "store")
    for name, stats in stores.items():
        stored.add_metric([name], stats.num_pages)
        used.add_metric([name], stats.used_bytes)
        if stats.capacity_bytes is not None:
            capacity.add_metric([name], stats.capacity_bytes)
        for outcome in ("read", "written", "missed", "corrupt", "evicted", "refused"):
            pages.add_metric([name, outcome], getattr(stats, f"pages_{outcome}"))
        read.add_metric([name], stats.bytes_read)
        written.add_metric([name], stats.bytes_written)
        for error, count in stats.errors.items():
            errors.add_metric([name, error], count)
        if stats.breaker is not None:
            for each in BreakerState:
                state.add_metric([name, each.value], float(stats.breaker.state is each))
            opened.add_metric([name], stats.breaker.num_opened)
            rejected.add_metric([name], stats.breaker.num_rejected)
    yield from (stored, used, capacity, pages, read, written, errors, state, opened, rejected)


def _named(top: StoreStats) -> dict[str, StoreStats]:
    """Stores by name, else by kind; the second of a name gets its place."""
    named: dict[str, StoreStats] = {}
    for place, stats in enumerate(top.stores or (top,)):
        name = stats.name or stats.kind
        named[name if name not in named else f"{name}_{place}"] = stats
    return named


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"{PREFIX}_{name}", text, labels=labels)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=labels)


def _counted(name: str, text: str, count: int) -> Metric:
    return CounterMetricFamily(f"{PREFIX}_{name}", text, value=count)


def _labelled(family: CounterMetricFamily | GaugeMetricFamily, counts: Mapping[str, int]) -> Metric:
    """A family of one label filled in; label values have no spaces."""
    for value, count in counts.items():
        family.add_metric([value.replace(" ", "_")], count)
    return family


class MetricsServer(Closing):
    """Serves ``/metrics`` over HTTP, on threads of its own.

    Args:
        registry: what is served.
        port: 0 takes a free one; ``port`` has the one that was taken.
        host: address to listen on.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    def __init__(self, registry: CollectorRegistry, *, port: int, host: str) -> None:
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            place = f"metrics.port: {host}:{port} cannot be listened on: {error.strerror or error}"
            remedy = "take another port, 0 for a free one, or another metrics.host"
            raise ConfigError([f"{place}; {remedy}"]) from None
        self.port = int(self._server.server_port)
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Stop listening. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(JOIN_S)


def registry_of(collector: Collector) -> CollectorRegistry:
    """A registry of its own: nothing of the process's default one is told, and two caches do not collide."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return registry
