"""Numbers of a running cache: where reused tokens came from, what moved, who holds what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hicache.radix.interface import PoolCount
from hicache.tiers.store import StoreStats
from hicache.transfer.engine import TransferStats
from hicache.types import TierTokens


@dataclass(slots=True)
class TokenCounts:
    """Prompt tokens by where their payload came from. Monotonic; the four sum to ``prompt``."""

    prompt: int = 0
    device: int = 0
    host: int = 0
    store: int = 0
    computed: int = 0

    def add(self, prompt_len: int, reused: TierTokens) -> None:
        self.prompt += prompt_len
        self.device += reused.device
        self.host += reused.host
        self.store += reused.store
        self.computed += prompt_len - reused.total

    @property
    def hit(self) -> int:
        return self.device + self.host + self.store

    @property
    def hit_rate(self) -> float:
        return self.hit / self.prompt if self.prompt else 0.0


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
