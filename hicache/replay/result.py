"""What came out of a replay, as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from hicache.replay.cost import CostModel
from hicache.replay.simulated import Served
from hicache.stats import CacheStats, TokenCounts
from hicache.types import TierTokens


@dataclass(slots=True)
class TurnCounts:
    """Requests that were the n-th of their session, and where their prompt tokens came from.

    ``by_component`` is reused payload by tier; a window or state counts only what it needs.
    ``blocked`` and ``shortened`` are tokens lost for lack of a state or window, and to a transfer;
    ``unkept`` those that the pool refused slots for, so that no later request can reuse them.
    """

    requests: int = 0
    tokens: TokenCounts = field(default_factory=TokenCounts)
    blocked: int = 0
    shortened: int = 0
    unkept: int = 0
    first_token_s: float = 0.0
    by_component: dict[str, TierTokens] = field(default_factory=dict)


@dataclass(slots=True)
class ReplayResult:
    """A replay's report. Counts are tokens unless the name says otherwise.

    Args:
        hit_tokens: reused prompt tokens by tier; with ``computed_tokens`` they sum to ``prompt_tokens``.
        blocked_tokens: path payload found but not usable for lack of a state or a window.
        shortened_tokens: promised by matches, lost to failed or late transfers.
        recomputed_tokens: found, and computed again because that was expected to be sooner.
        refused_requests: requests the device pool could not hold whole.
        infinite_hit_tokens: what a cache without limits would have served in the same model, or None
            where it was not worked out (an interrupted replay counts only what it served).
        lost_tokens: the distance from that cache by cause, which adds up to it exactly; None if misses were not
            explained.
        stamp_mismatches: pages whose bytes were not the right ones, in any tier. Must be 0.
        interrupted: ended before the trace did.
        device_bytes: of L1, over all ranks.
    """

    trace: str
    config: str
    policy: str
    core: str
    requests: int = 0
    skipped_lines: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    computed_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    store_tokens: int = 0
    blocked_tokens: int = 0
    shortened_tokens: int = 0
    refused_requests: int = 0
    infinite_hit_tokens: int | None = None
    lost_tokens: Mapping[str, int] | None = None
    pages_checked: int = 0
    stamp_mismatches: int = 0
    audit_errors: list[str] = field(default_factory=list)
    wall_s: float = 0.0
    interrupted: bool = False
    turns: dict[int, TurnCounts] = field(default_factory=dict)
    by_component: dict[str, TierTokens] = field(default_factory=dict)
    stats: CacheStats | None = None
    first_token_s: float = 0.0
    first_token_cold_s: float = 0.0
    device_bytes: int = 0

    @property
    def hit_tokens(self) -> int:
        return self.device_tokens + self.host_tokens + self.store_tokens

    @property
    def token_hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def infinite_hit_rate(self) -> float | None:
        if self.infinite_hit_tokens is None or not self.prompt_tokens:
            return None
        return self.infinite_hit_tokens / self.prompt_tokens

    @property
    def recomputed_tokens(self) -> int:
        return self.stats.recomputed_tokens if self.stats else 0

    def add(self, served: Served, turn: int, output_tokens: int, cost: CostModel) -> None:
        """Count one request."""
        self.requests += 1
        self.prompt_tokens += served.prompt_tokens
        self.output_tokens += output_tokens
        self.computed_tokens += served.prompt_tokens - served.source.total
        self.device_tokens += served.source.device
        self.host_tokens += served.source.host
        self.store_tokens += served.source.store
        self.blocked_tokens += served.blocked_tokens
        self.shortened_tokens += served.shortened_tokens
        self.refused_requests += served.unkept_tokens > 0
        self.pages_checked += served.pages_checked
        self.stamp_mismatches += served.mismatches
        first_token_s = cost.first_token_s(served.source, served.prompt_tokens)
        self.first_token_s += first_token_s
        self.first_token_cold_s += cost.first_token_s(TierTokens(), served.prompt_tokens)
        counts = self.turns.setdefault(turn, TurnCounts())
        counts.requests += 1
        counts.tokens.add(served.prompt_tokens, served.source)
        counts.blocked += served.blocked_tokens
        counts.shortened += served.shortened_tokens
        counts.unkept += served.unkept_tokens
        counts.first_token_s += first_token_s
        for sums in (self.by_component, counts.by_component):
            for name, got in served.by_component.items():
                sums[name] = sums.get(name, TierTokens()) + got

    @property
    def is_sound(self) -> bool:
        """No byte was wrong, and the audit found nothing."""
        return not (self.stamp_mismatches or self.audit_errors)

    @property
    def is_proof(self) -> bool:
        """Sound, and something was compared: without that nothing could have been found wrong."""
        return self.is_sound and self.pages_checked > 0

    @property
    def verdict(self) -> str:
        """What the run says of the cache, where nothing was compared that it says nothing."""
        if not self.is_sound:
            return "NOT sound"
        if not self.pages_checked:
            return (
                "nothing compared: no page was reused or stored, so this run proves nothing; replay more requests,"
                " or set model.page_size below the length of the prompts"
            )
        return "verified, as far as it went" if self.interrupted else "verified"

    def as_json(self) -> Mapping[str, object]:
        """The object that ``--json`` writes."""
        stats = self.stats
        return {
            "trace": self.trace,
            "config": self.config,
            "policy": self.policy,
            "core": self.core,
            "device_bytes": self.device_bytes,
            "requests": self.requests,
            "skipped_lines": self.skipped_lines,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "hit_tokens": {
                "device": self.device_tokens,
                "host": self.host_tokens,
                "store": self.store_tokens,
            },
            "computed_tokens": self.computed_tokens,
            "token_hit_rate": self.token_hit_rate,
            "infinite_hit_rate": self.infinite_hit_rate,
            "blocked_tokens": self.blocked_tokens,
            "shortened_tokens": self.shortened_tokens,
            "recomputed_tokens": self.recomputed_tokens,
            "refused_requests": self.refused_requests,
            "infinite_hit_tokens": self.infinite_hit_tokens,
            "lost_tokens": None if self.lost_tokens is None else dict(self.lost_tokens),
            "verdict": self.verdict,
            "pages_checked": self.pages_checked,
            "stamp_mismatches": self.stamp_mismatches,
            "audit_errors": len(self.audit_errors),
            "audit_findings": self.audit_errors,
            "interrupted": self.interrupted,
            "wall_s": round(self.wall_s, 3),
            "mean_first_token_s": self.first_token_s / self.requests if self.requests else None,
            "by_component": {name: asdict(tokens) for name, tokens in self.by_component.items()},
            "by_turn": {
                str(turn): {"requests": counts.requests, **asdict(counts.tokens)}
                for turn, counts in sorted(self.turns.items())
            },
            "evictions": {
                name: count
                for name, count in (stats.tree if stats else {}).items()
                if name.startswith("removed_")
            },
            "faults": dict(stats.faults) if stats else {},
            "store": asdict(stats.store) if stats and stats.store else None,
            "moved": [asdict(row) for row in stats.transfers.moved] if stats else [],
        }
