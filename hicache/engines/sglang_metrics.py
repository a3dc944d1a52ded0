"""The backend's numbers for Prometheus, on a port of their own: SGLang's own page has no place for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from hicache.config import MetricsConfig
from hicache.engines.sglang_counters import BackendStats
from hicache.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from hicache.metrics import MetricsServer


def serve_metrics(
    read: Callable[[], BackendStats],
    section: MetricsConfig,
    storage_config: Any,  # Any: SGLang's
) -> MetricsServer | None:
    """Listen on this rank's port; None if no port is configured.

    Raises:
        ConfigError: prometheus-client is missing, or the port is taken.
    """
    if section.port is None:
        return None
    try:
        from hicache.metrics import MetricsServer, registry_of
    except ModuleNotFoundError as error:
        raise ConfigError(
            ["metrics.port: needs the package prometheus-client; pip install 'hicache[metrics]'"]
        ) from error
    port = section.port + rank_number(storage_config) if section.port else 0
    return MetricsServer(registry_of(_collector(read)), port=port, host=section.host)


def rank_number(storage_config: Any) -> int:  # Any: SGLang's
    """This rank's place among all that share a configuration."""
    place = storage_config.dp_rank
    for rank, size in (
        (storage_config.pp_rank, storage_config.pp_size),
        (storage_config.attn_cp_rank, storage_config.attn_cp_size),
        (storage_config.tp_rank, storage_config.tp_size),
    ):
        place = place * size + rank
    return int(place)


def _collector(
    read: Callable[[], BackendStats],
) -> Any:  # Any: a class that exists where prometheus-client is
    from prometheus_client.metrics_core import CounterMetricFamily
    from prometheus_client.registry import Collector

    from hicache.metrics import PREFIX, store_metrics

    class BackendCollector(Collector):
        """Says a backend's numbers whenever a registry asks for them."""

        def describe(self) -> Iterator[Metric]:
            return iter(())

        def collect(self) -> Iterator[Metric]:
            stats = read()
            pages = CounterMetricFamily(
                f"{PREFIX}_sglang_pages",
                "Pages that SGLang read and wrote, by pool and what became of them",
                labels=["pool", "outcome"],
            )
            for (pool, outcome), count in stats.pages.items():
                pages.add_metric([pool, outcome], count)
            queries = CounterMetricFamily(
                f"{PREFIX}_sglang_queried_pages",
                "Pages that SGLang asked for, and how many of them were found from the first on",
                labels=["outcome"],
            )
            queries.add_metric(["asked"], stats.asked_pages)
            queries.add_metric(["found"], stats.found_pages)
            faults = CounterMetricFamily(
                f"{PREFIX}_faults", "What shortened a hit, by cause", labels=["cause"]
            )
            for cause, count in stats.faults.items():
                faults.add_metric([cause], count)
            yield from (pages, queries, faults)
            if stats.store is not None:
                yield from store_metrics(stats.store)

    return BackendCollector()
