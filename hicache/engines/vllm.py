"""HiCache as a KV connector of vLLM.

::

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "HiCacheConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "hicache.engines.vllm",
        "kv_connector_extra_config": {"config_file": "hicache.yaml"}}'

    scheduler's process                              worker's process, one a rank
    RequestIndex: HiCache, leases, stores            BlockCopies: vLLM's blocks
        |-- StepMetadata: what to load, to save -------->|
        |<- StepReport: what was saved, what was loaded -|
        |=== shared pool: the bytes =====================|

Importing this module needs vLLM.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hicache.cache import HiCache
from hicache.engines.vllm_copies import BlockCopies
from hicache.engines.vllm_events import TierEvents
from hicache.engines.vllm_geometry import read_geometry
from hicache.engines.vllm_index import RequestIndex
from hicache.engines.vllm_library import load_library, tensor_parallel_rank
from hicache.engines.vllm_messages import CopyJob
from hicache.engines.vllm_metrics import HiCachePromMetrics, HiCacheStats
from hicache.engines.vllm_settings import make_settings, model_section
from hicache.errors import ConfigError
from hicache.tiers.shared import SharedPool, SharedRegion

logger = logging.getLogger(__name__)

_vllm = load_library()


@dataclass
class StepMetadata(_vllm.Metadata):  # type: ignore[misc, name-defined]  # its base is known at run time only
    """From the scheduler to every worker, once a step."""

    region: SharedRegion
    loads: tuple[CopyJob, ...] = ()
    saves: tuple[CopyJob, ...] = ()


@dataclass
class StepReport(_vllm.WorkerMetadata):  # type: ignore[misc, name-defined]
    """From the workers to the scheduler: how many of them have ended each save, and which saves failed."""

    saves: Counter[int] = field(default_factory=Counter)
    failed: set[int] = field(default_factory=set)
    moved: Counter[str] = field(default_factory=Counter)
    """Bytes and seconds, by the names of ``hicache.engines.vllm_metrics``."""

    def aggregate(self, other: StepReport) -> StepReport:
        """Both workers' reports as one."""
        return StepReport(self.saves + other.saves, self.failed | other.failed, self.moved + other.moved)


class HiCacheConnector(_vllm.Connector, _vllm.SupportsHMA):  # type: ignore[misc, name-defined]
    """One object in the scheduler's process, one in each worker's; vLLM makes both.

    Raises:
        ConfigError: the configuration, the model or vLLM's own settings do not allow it; names the place.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        parallel = vllm_config.parallel_config
        _check_parallel(parallel)
        self._geometry = read_geometry(kv_cache_config, int(parallel.tensor_parallel_size))
        self._index: RequestIndex | None = None
        self._events: TierEvents | None = None
        self._copies: BlockCopies | None = None
        self._report = StepReport()
        self._told: Counter[str] = Counter()
        if role is _vllm.SchedulerRole:
            self._index = self._make_index(vllm_config, kv_cache_config)

    def _make_index(self, vllm_config: Any, kv_cache_config: Any) -> RequestIndex:
        model = model_section(vllm_config, kv_cache_config, self._geometry, _vllm.version)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
        told = vllm_config.kv_events_config
        if told is not None and told.enable_kv_cache_events:
            self._events = TierEvents(self._geometry, _vllm.events)
        cache = HiCache(
            make_settings(extra, self._geometry, model),
            device_pool=SharedPool,
            on_events=None if self._events is None else self._events.listen,
        )
        pool = cache.device
        assert isinstance(pool, SharedPool)
        self._region = pool.region
        logger.info(
            "HiCache keeps %s of %s in %d bytes of shared memory, pages of %d tokens",
            ", ".join(component.name for component in self._geometry.components),
            vllm_config.model_config.model,
            pool.region.num_bytes,
            self._geometry.page_size,
        )
        return RequestIndex(cache, self._geometry)

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is lost costs a hit, no answer."""
        return False

    # ---- scheduler -----------------------------------------------------------------------------
    @property
    def index(self) -> RequestIndex:
        """What the scheduler's object follows requests with."""
        assert self._index is not None, "asked of a worker's connector"
        return self._index

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.index.bind(_HeldBlocks(gpu_block_pool))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        num_tokens = self.index.matched(request, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.index.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """The deepest tokens are the external ones; what stores had lies behind what memory had."""
        stored = min(num_external_tokens, self.index.found(request.request_id).source.store)
        kinds = {store.kind for store in self.index.cache.config.tiers.stores}
        behind = _vllm.HitSource.DISK if kinds == {"disk"} else _vllm.HitSource.EXTERNAL_UNSPECIFIED
        sources = {_vllm.HitSource.HOST: num_external_tokens - stored, behind: stored}
        return {source: count for source, count in sources.items() if count}

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        state = scheduler_output.kv_connector_block_state
        step = self.index.step(
            scheduler_output.num_scheduled_tokens, state.get_block_ids, state.boundary_state_offloads
        )
        return StepMetadata(self._region, step.loads, step.saves)

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta or StepReport()
        self.index.counts.update(report.moved)
        self.index.reported(
            report.saves,
            report.failed,
            connector_output.finished_recving or (),
            connector_output.failed_recving or (),
        )

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Blocks that are still read are held on their own, so vLLM may free the request's at once."""
        self.index.finished(request, block_ids, request.status.name.lower())
        return False, None

    def has_pending_push_work(self) -> bool:
        return self._index is not None and self._index.has_work

    def get_kv_connector_stats(self) -> HiCacheStats | None:
        """What has been counted since the last step; workers report theirs to the scheduler's object."""
        if self._index is None:
            return None
        counts = self._index.counts
        news = {name: counts[name] - self._told[name] for name in counts if counts[name] != self._told[name]}
        self._told = Counter(counts)
        return HiCacheStats(news) if news else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> HiCacheStats:
        return HiCacheStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> HiCachePromMetrics:
        return HiCachePromMetrics(*args, **kwargs)

    def take_events(self) -> Iterable[Any]:
        """What has changed in HiCache's tiers since the last step; vLLM publishes it with its own (``--kv-events-config``)."""
        return () if self._events is None else self._events.take()

    def reset_cache(self) -> bool:
        self.index.reset()
        return True

    # ---- worker --------------------------------------------------------------------------------
    @property
    def copies(self) -> BlockCopies:
        """What the worker's object copies with."""
        assert self._copies is not None, "vLLM has not registered its KV caches"
        return self._copies

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        num_blocks = int(self._kv_cache_config.num_blocks)
        self._copies = BlockCopies(self._geometry, tensor_parallel_rank(), kv_caches, num_blocks)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step: StepMetadata = self._get_connector_metadata()
        self.copies.attach(step.region)
        for job in step.loads:
            self.copies.submit(job, is_load=True)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are over before vLLM schedules their request."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Saves begin when the whole pass is over."""

    def wait_for_save(self) -> None:
        """Called when the pass is over; nothing is waited for, since the scheduler holds the blocks."""
        step: StepMetadata = self._get_connector_metadata()
        for job in step.saves:
            self.copies.submit(job, is_load=False)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = _vllm.TransferResults()
        for ended in self.copies.take_ended():
            kind = "load" if ended.is_load else "save"
            self._report.moved[f"{kind}_bytes"] += ended.num_bytes
            self._report.moved[f"{kind}_seconds"] += ended.seconds  # type: ignore[assignment]  # Counter adds floats, too
            if not ended.is_load:
                self._report.saves[ended.job.number] = 1
                if not ended.is_done:
                    self._report.failed.add(ended.job.number)
                continue
            results.finished_recving.add(ended.job.request)
            if not ended.is_done:
                results.failed_recving.add(ended.job.request)
        return results

    def build_connector_worker_meta(self) -> StepReport | None:
        report, self._report = self._report, StepReport()
        return report if report.moved else None

    def shutdown(self) -> None:
        if self._index is not None:
            self._index.close()
        if self._copies is not None:
            self._copies.close()


class _HeldBlocks:
    """Holds blocks of vLLM's pool by their reference count."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def hold(self, blocks: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[block] for block in blocks])

    def free(self, blocks: Sequence[int]) -> None:
        self._pool.free_blocks([self._pool.blocks[block] for block in reversed(blocks)])


def _check_parallel(parallel: Any) -> None:
    unsupported = {
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "decode_context_parallel_size": parallel.decode_context_parallel_size,
        "prefill_context_parallel_size": getattr(parallel, "prefill_context_parallel_size", 1),
        "nnodes": getattr(parallel, "nnodes", 1),
    }
    problems = [
        f"{name}: is {size}; HiCacheConnector supports 1" for name, size in unsupported.items() if size != 1
    ]
    if problems:
        raise ConfigError(problems, source="vllm")
