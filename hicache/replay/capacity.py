"""What ``--capacity`` means: bytes, blocks, or percent of a trace's distinct blocks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from hicache.config import HiCacheConfig, device_slots
from hicache.config.sizing import needed_slots
from hicache.config.units import parse_bytes
from hicache.errors import ConfigError
from hicache.types import ReuseRule
from hicache.workload import Trace
from hicache.workload.tokens import BLOCK_TOKENS

MAX_PERCENT = 1000


@dataclass(frozen=True, slots=True)
class Capacity:
    """Exactly one is set. Percent and blocks count full prompt blocks of 512 tokens."""

    percent: float | None = None
    blocks: int | None = None
    num_bytes: int | None = None

    def in_blocks(self, trace: Trace) -> int:
        """As the reference counts: a share is rounded down. Raises ``ConfigError`` for bytes."""
        if self.percent is not None:
            # Scaled to whole millionths first, so that 0.1 % of 1,000 is 1 whatever binary makes of it.
            return round(self.percent * 1e6) * trace.distinct_blocks // 100_000_000
        if self.blocks is not None:
            return self.blocks
        raise ConfigError(["--capacity: the reference model has no bytes; give blocks or percent, like 5%"])

    def override(self, config: HiCacheConfig, trace: Trace) -> Mapping[str, object]:
        """The override that gives the device tier this capacity: the fewest bytes in which path payload has so many
        blocks, however the tier is split among components.
        """
        if self.num_bytes is not None:
            return {"tiers.device.capacity": self.num_bytes, "tiers.device.capacity_per_rank": None}
        specs, page_size, num_ranks = config.model.specs(), config.model.page_size, config.ranks.count
        primary = next((spec for spec in specs if spec.rule == ReuseRule.PATH), specs[0])
        wanted = -(-self.in_blocks(trace) * BLOCK_TOKENS // page_size)

        def pages(num_bytes: int) -> int:
            tiers = config.tiers
            device = tiers.device.model_copy(update={"capacity": num_bytes, "capacity_per_rank": None})
            tiers = tiers.model_copy(update={"device": device})
            return device_slots(config.model_copy(update={"tiers": tiers}))[primary.name]

        least = num_ranks * sum(needed_slots(spec, page_size) * spec.slot_bytes(page_size) for spec in specs)
        most = least
        while pages(most) < wanted:
            most *= 2
        capacity = bisect_left(range(most), wanted, lo=least, key=pages)
        return {"tiers.device.capacity": capacity, "tiers.device.capacity_per_rank": None}


def parse_capacity(text: str) -> Capacity:
    """``5%``, ``8192`` (blocks), ``64MiB``. Raises ``ConfigError`` for anything else."""
    word = text.strip()
    if "," in word:
        raise ConfigError([f"--capacity: {text!r} is a list; only --reference takes several capacities"])
    try:
        if word.endswith("%"):
            capacity = Capacity(percent=float(word[:-1]))
        elif word.isascii() and word.isdigit():
            capacity = Capacity(blocks=int(word))
        else:
            capacity = Capacity(num_bytes=parse_bytes(word))
    except ValueError as error:
        raise _refusal(text, str(error)) from error
    if capacity.percent is not None and not 0 < capacity.percent <= MAX_PERCENT:
        raise _refusal(text, f"expected a share above 0% and up to {MAX_PERCENT}%")
    if capacity.blocks == 0 or capacity.num_bytes == 0:
        raise _refusal(text, "expected more than nothing")
    return capacity


def _refusal(text: str, problem: str) -> ConfigError:
    forms = "percent of the distinct blocks (5%), 512-token blocks (8192), or bytes (64MiB)"
    return ConfigError([f"--capacity: {text!r}: {problem}; write {forms}"])
