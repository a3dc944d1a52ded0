"""A trace through the caches of several ranks that agree, each with a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hicache.config import HiCacheConfig, load_config
from hicache.errors import ConfigError
from hicache.ranks.in_process import InProcessGroup, threads
from hicache.replay.result import ReplayResult
from hicache.replay.run import Progress, replay
from hicache.replay.timeline import Timeline
from hicache.workload import Request

RANK_TIMEOUT_S = 600.0
_OF_ONE_PROCESS = ("metrics", "events", "admin")


def rank_configs(config: HiCacheConfig, num_ranks: int) -> list[HiCacheConfig]:
    """The same for each tensor rank. Capacities are totals, so that each rank gets its part.

    Raises:
        ConfigError: it is a configuration of several ranks already, or a part is too small.
    """
    if config.ranks.count > 1:
        raise ConfigError(
            [
                f"--ranks: the configuration is one of {config.ranks.count} ranks already; leave out ranks there"
            ]
        )
    configs = []
    for rank in range(num_ranks):
        tree = config.model_dump(mode="json", exclude_none=True)
        tree["ranks"] = {"tp_size": num_ranks, "tp_rank": rank}
        if rank:  # one process has one port
            for section in _OF_ONE_PROCESS:
                tree.pop(section, None)
        configs.append(load_config(tree, environ={}))
    return configs


def replay_ranks(
    requests: Sequence[Request] | Any,  # Any: a trace, which can be gone through several times at once
    config: HiCacheConfig,
    num_ranks: int,
    *,
    on_request: Progress | None = None,
    timeline: Timeline | None = None,
    stop: threading.Event | None = None,
    **keywords: Any,  # Any: see ``replay``
) -> ReplayResult:
    """Serve all requests on every rank, and check every byte that any of them reuses.

    Returns:
        The first rank's counts, with the pages checked and the wrong bytes of all. A rank that reused other
        tokens than the first, or whose audit found something, stands under ``audit_errors``.
    """
    configs = rank_configs(config, num_ranks)
    groups = threads(num_ranks, timeout_s=RANK_TIMEOUT_S)
    stop = stop or threading.Event()

    def run(group: InProcessGroup) -> ReplayResult:
        first = group.rank == 0
        return replay(
            requests,
            configs[group.rank],
            group=group,
            on_request=on_request if first else None,
            timeline=timeline if first else None,
            stop=stop,
            **keywords,
        )

    with ThreadPoolExecutor(num_ranks, thread_name_prefix="replay-rank") as pool:
        futures = [pool.submit(run, group) for group in groups]
        try:
            results = [future.result() for future in futures]
        except KeyboardInterrupt:
            stop.set()
            raise
    return _together(results)


def _together(results: Sequence[ReplayResult]) -> ReplayResult:
    first = results[0]
    findings = [f"rank 0: {finding}" for finding in first.audit_errors]
    for rank, other in enumerate(results[1:], 1):
        first.pages_checked += other.pages_checked
        first.stamp_mismatches += other.stamp_mismatches
        findings += [f"rank {rank}: {finding}" for finding in other.audit_errors]
        if _reused(other) != _reused(first):
            findings.append(f"rank {rank} reused {_reused(other)} tokens by tier, rank 0 {_reused(first)}")
    first.audit_errors = findings
    return first


def _reused(result: ReplayResult) -> tuple[int, int, int, int]:
    return result.requests, result.device_tokens, result.host_tokens, result.store_tokens
