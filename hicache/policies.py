"""The rules that a configuration asks for."""

from __future__ import annotations

from hicache.config import PolicyConfig
from hicache.policy.prefetch import PrefetchMode, PrefetchPolicy
from hicache.policy.watermarks import Watermark
from hicache.types import Tier


def prefetch_policy(policy: PolicyConfig) -> PrefetchPolicy:
    """How long a request waits for L3."""
    prefetch = policy.prefetch
    return PrefetchPolicy(
        PrefetchMode(prefetch.mode),
        prefetch.min_tokens,
        prefetch.timeout_base,
        prefetch.timeout_per_1024_tokens,
        prefetch.timeout_max,
        policy.wait_limit,
    )


def watermarks(policy: PolicyConfig) -> dict[Tier, Watermark]:
    """When demotion begins ahead of need, and when it ends."""
    marks = policy.watermarks
    return {
        Tier.DEVICE: Watermark(marks.device.low, marks.device.high),
        Tier.HOST: Watermark(marks.host.low, marks.host.high),
    }
