"""Numbers of a running cache: where reused tokens came from, what moved, who holds what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hicache.radix.interface import PoolCount
from hicache.ranks.agreement import AgreementStats
from hicache.tiers.store import StoreStats
from hicache.transfer.stats import TransferStats
from hicache.types import ComponentSpec, TierTokens


@dataclass(slots=True)
class TokenCounts:
    """Prompt tokens by where their payload came from. Monotonic; the four sum to ``prompt``."""

    prompt: int = 0
    device: int = 0
    host: int = 0
    store: int = 0
    computed: int = 0

    def add(self, prompt_len: int, reused: TierTokens) -> None:
        """Count one prompt, and from which tiers it was reused."""
        self.prompt += prompt_len
        self.device += reused.device
        self.host += reused.host
        self.store += reused.store
        self.computed += prompt_len - reused.total

    def merge(self, other: TokenCounts) -> None:
        """Add another's counts to these."""
        self.prompt += other.prompt
        self.device += other.device
        self.host += other.host
        self.store += other.store
        self.computed += other.computed

    @property
    def hit(self) -> int:
        return self.device + self.host + self.store

    @property
    def hit_rate(self) -> float:
        return self.hit / self.prompt if self.prompt else 0.0


class RequestCounts:
    """What ended requests got, all together and per component."""

    def __init__(self, specs: Sequence[ComponentSpec]) -> None:
        self.num_requests = 0
        self.tokens = TokenCounts()
        self.by_component = {spec.name: TierTokens() for spec in specs}

    def add(self, prompt_len: int, source: TierTokens, by_component: Mapping[str, TierTokens]) -> None:
        self.num_requests += 1
        self.tokens.add(prompt_len, source)
        for name, got in by_component.items():
            self.by_component[name] += got


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A moment's view. Counters are monotonic since the cache was made.

    Args:
        requests: leases that have ended.
        tokens: prompt tokens by source.
        by_component: tokens of reused payload per component and tier (a window counts its pages).
        pools: slots by owner, per (component, tier name).
        tree: the core's counters.
        transfers, store: bytes and faults; ``store`` is None without L3.
        sessions: number of sessions by state.
        faults: what shortened a hit, by cause.
        core: which tree core runs.
        lost_tokens: prompt tokens once known and not reused, by cause; empty unless explanations are kept.
        event_batches: KV events ``published``, ``dropped``, ``replayed`` and ``queued`` now; empty without them.
        recomputed_tokens: found, and computed again because that was expected to be sooner.
        dead_weight_bytes: payload that no request can reuse, by (component, tier name).
        used_bytes: of the pools, by (component, tier name).
        hints: how often each kind came, by (kind, whether what it was about is known).
        kept: prefixes that ``keep`` was asked for, and their tokens.
        agreement: what agreeing with the other ranks has cost and taken.
        policy: the eviction policy's name, and the one that it follows now (itself, but for ``adaptive``).
        audits, audit_findings: how often ``audit`` ran, and how many broken invariants it found in all.
    """

    requests: int
    tokens: TokenCounts
    by_component: Mapping[str, TierTokens]
    pools: Mapping[tuple[str, str], PoolCount]
    tree: Mapping[str, int]
    transfers: TransferStats
    store: StoreStats | None
    sessions: Mapping[str, int]
    faults: Mapping[str, int] = field(default_factory=dict)
    core: str = "python"
    lost_tokens: Mapping[str, int] = field(default_factory=dict)
    event_batches: Mapping[str, int] = field(default_factory=dict)
    recomputed_tokens: int = 0
    hints: Mapping[tuple[str, bool], int] = field(default_factory=dict)
    kept: tuple[int, int] = (0, 0)
    agreement: AgreementStats = field(default_factory=AgreementStats)
    policy: tuple[str, str] = ("", "")
    audits: int = 0
    audit_findings: int = 0
    dead_weight_bytes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    used_bytes: Mapping[tuple[str, str], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Usage:
    """Who holds how much right now.

    Args:
        pools: slots in use by now out of how many there are, (capacity, used), by (component, tier name).
        store_bytes: what the stores hold; None without L3.
    """

    pools: Mapping[tuple[str, str], tuple[int, int]]
    store_bytes: int | None


def copy_counts(counts: TokenCounts) -> TokenCounts:
    """A snapshot of counts that go on changing."""
    return replace(counts)
