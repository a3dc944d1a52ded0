"""What the connector tells vLLM's log and its ``/metrics``. Importing this module needs vLLM.

The cache's own numbers (tiers, stores, sessions) are on HiCache's endpoint, ``metrics.port``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hicache.engines.vllm_library import load_library

_vllm = load_library()

COUNTERS: Mapping[str, str] = {
    "requests": "Requests that were looked up and admitted",
    "external_tokens": "Prompt tokens loaded instead of computed",
    "deferred": "Look-ups that took longer than a step could wait for",
    "loads_failed": "Loads that failed; their requests are computed, or fail, as kv_load_failure_policy says",
    "saves": "Saves that were published",
    "saves_failed": "Saves that were dropped: no room, or a copy failed",
    "saves_too_late": "Saves that were not begun because vLLM had let go of a block",
    "load_bytes": "Bytes copied into vLLM's blocks",
    "load_seconds": "Seconds spent copying into vLLM's blocks",
    "save_bytes": "Bytes copied out of vLLM's blocks",
    "save_seconds": "Seconds spent copying out of vLLM's blocks",
}


class HiCacheStats(_vllm.Stats):  # type: ignore[misc, name-defined]  # its base is known at run time only
    """Increments since the last step, by the names of ``COUNTERS``; what is zero is left out."""

    data: dict[str, float]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: HiCacheStats) -> HiCacheStats:
        names = {**self.data, **other.data}
        return HiCacheStats({name: self.data.get(name, 0) + other.data.get(name, 0) for name in names})

    def reduce(self) -> dict[str, float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class HiCachePromMetrics(_vllm.PromMetrics):  # type: ignore[misc, name-defined]
    """``vllm:hicache_<name>_total`` for each of ``COUNTERS``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._counters = {
            name: _vllm.per_engine(
                self._counter_cls(
                    name=f"vllm:hicache_{name}", documentation=text, labelnames=self._labelnames
                ),
                self.per_engine_labelvalues,
            )
            for name, text in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, increment in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(increment)
