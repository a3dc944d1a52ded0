"""An agent load through three tiers, session-aware and not: hit rate by tier and time to the first token."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from hicache.config import load_config
from hicache.errors import ConfigError
from hicache.replay.cost import CostModel
from hicache.replay.footprint import pool_of
from hicache.replay.result import ReplayResult
from hicache.replay.run import replay
from hicache.replay.simulated import Served
from hicache.workload import Request, Trace

POLICIES = ("lru", "session")
"""Session-aware off, and on."""
PAUSE_S = 5.0
"""Between two sessions of one worker."""
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def with_workers(trace: Trace, num_workers: int) -> Trace:
    """The trace as ``num_workers`` agents would have sent it at the same time.

    Each takes the next session, in the trace's order, when its last one is over. Pauses within a session stay.
    """
    sessions: dict[str | None, list[Request]] = {}
    for request in trace:
        sessions.setdefault(request.session, []).append(request)
    free_s = [0.0] * num_workers
    moved: list[tuple[float, Request]] = []
    for requests in sessions.values():
        begin_s = heapq.heappop(free_s)
        shift_s = begin_s - requests[0].arrival_s
        moved += [(request.arrival_s + shift_s, request) for request in requests]
        heapq.heappush(free_s, moved[-1][0] + PAUSE_S)
    moved.sort(key=lambda entry: (entry[0], entry[1].index))
    places = {request.index: place for place, (_, request) in enumerate(moved)}
    return replace(
        trace,
        requests=tuple(
            replace(
                request,
                index=place,
                arrival_s=arrival_s,
                continues=places.get(request.continues) if request.continues is not None else None,
                continued_by=places.get(request.continued_by) if request.continued_by is not None else None,
            )
            for place, (arrival_s, request) in enumerate(moved)
        ),
    )


@dataclass(frozen=True, slots=True)
class AgentBench:
    """The setting.

    Args:
        page_size: tokens a page.
        device_share, host_share: of the trace's distinct full 512-token prompt blocks, which L1 and L2 hold.
        store: the L3 store's section; None: no L3.
        cost: what computing and loading a token takes.
    """

    page_size: int
    device_share: float
    host_share: float
    store: Mapping[str, object] | None
    cost: CostModel

    def run(
        self,
        trace: Trace,
        policy: str,
        *,
        overrides: Mapping[str, object] | None = None,
        on_request: Callable[[ReplayResult], None] | None = None,
        stop: threading.Event | None = None,
    ) -> AgentResult:
        """The whole trace with one policy, on a cache of its own."""
        first_token_s: list[float] = []

        def note(request: Request, served: Served) -> None:
            first_token_s.append(self.cost.first_token_s(served.source, request.prompt_length))

        config = load_config(
            self._settings(trace), overrides={**(overrides or {}), "policy.eviction": policy}
        )
        result = replay(
            trace,
            config,
            trace=trace.path,
            cost=self.cost,
            on_served=note,
            on_request=on_request,
            stop=stop,
        )
        return AgentResult(policy, result, first_token_s)

    def _settings(self, trace: Trace) -> dict[str, object]:
        blocks = trace.distinct_blocks
        longest = max(request.prompt_length + request.output_length for request in trace)
        per_block = 512 / self.page_size
        pages = {
            name: max(1, round(blocks * share * per_block))
            for name, share in (("device", self.device_share), ("host", self.host_share))
        }
        needed = -(-longest // self.page_size)
        if pages["device"] < needed:
            least = needed / per_block / max(1, blocks)
            found = f"{self.device_share:.1%} of the trace's {blocks:,} blocks is {pages['device']:,} pages"
            wanted = f"its longest request has {needed:,}; expected at least {least:.1%}"
            raise ConfigError([f"--device: {found}, but {wanted}"])
        tiers: dict[str, object] = {
            "device": {"kind": "cpu", **pool_of({"full": pages["device"]}, self.page_size)}
        }
        if self.host_share:
            tiers["host"] = {"pinned": False, **pool_of({"full": pages["host"]}, self.page_size)}
        if self.store is not None:
            tiers["stores"] = [dict(self.store)]
        return {
            "model": {
                "name": "agent",
                "page_size": self.page_size,
                "components": {"full": {"rule": "path", "layers": 2, "bytes_per_token": 16}},
            },
            "tiers": tiers,
            "policy": {"write": "write_through"},
        }

    def as_json(self) -> Mapping[str, object]:
        """The settings."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class AgentResult:
    """One policy's replay. ``first_token_s``: each request's, in order of arrival, from the cost model."""

    policy: str
    result: ReplayResult
    first_token_s: Sequence[float]

    @property
    def is_sound(self) -> bool:
        return not (self.result.stamp_mismatches or self.result.audit_errors)

    def first_token(self) -> Mapping[str, float]:
        """Mean and quantiles over requests, in seconds; without a cache, too."""
        if not self.first_token_s:
            return {}
        times = np.array(self.first_token_s)
        return {
            "mean": float(times.mean()),
            **{name: float(np.quantile(times, at)) for name, at in QUANTILES.items()},
            "mean_without_cache": self.result.first_token_cold_s / self.result.requests,
        }

    def as_json(self) -> Mapping[str, object]:
        """The object that ``--json`` lists for each policy."""
        return {
            "session_aware": self.policy == "session",
            "first_token_s": dict(self.first_token()),
            **self.result.as_json(),
        }
