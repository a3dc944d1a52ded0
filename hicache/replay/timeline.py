"""What a replay was like along the way: hit rates and residency in about as many steps as a picture has room for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hicache.replay.cost import CostModel
from hicache.replay.simulated import Served
from hicache.stats import TokenCounts, Usage
from hicache.types import TierTokens
from hicache.workload import Request

STEPS = 160


@dataclass(slots=True)
class Step:
    """Some requests in a row.

    Args:
        begin_s, end_s: arrival of the first and the last.
        by_component: reused payload in tokens, by component and tier.
        usage: who held what after the last of them.
    """

    begin_s: float
    end_s: float = 0.0
    requests: int = 0
    tokens: TokenCounts = field(default_factory=TokenCounts)
    by_component: dict[str, TierTokens] = field(default_factory=dict)
    first_token_s: float = 0.0
    first_token_cold_s: float = 0.0
    usage: Usage | None = None


class Timeline:
    """Takes note of a replay, request by request.

    Args:
        num_requests: how many there will be.
        cost: estimates the time to first token.
        num_steps: how many steps they become, at most.
    """

    def __init__(self, num_requests: int, cost: CostModel, *, num_steps: int = STEPS) -> None:
        self._per_step = max(1, -(-num_requests // num_steps))
        self._cost = cost
        self.steps: list[Step] = []

    def add(self, request: Request, served: Served, usage: Usage) -> None:
        """One more request, in the order of service."""
        if not self.steps or self.steps[-1].requests == self._per_step:
            self.steps.append(Step(request.arrival_s))
        step = self.steps[-1]
        step.requests += 1
        step.end_s = request.arrival_s
        step.tokens.add(served.prompt_tokens, served.source)
        for name, got in served.by_component.items():
            step.by_component[name] = step.by_component.get(name, TierTokens()) + got
        step.first_token_s += self._cost.first_token_s(served.source, served.prompt_tokens)
        step.first_token_cold_s += self._cost.first_token_s(TierTokens(), served.prompt_tokens)
        step.usage = usage

    def residency(self) -> Mapping[tuple[str, str], list[float]]:
        """Share of its slots that each pool (component, tier) had in use, step by step."""
        shares: dict[tuple[str, str], list[float]] = {}
        for step in self.steps:
            assert step.usage is not None
            for pool, (capacity, used) in step.usage.pools.items():
                if capacity:
                    shares.setdefault(pool, []).append(used / capacity)
        return shares
