"""Late turns of long chats: the hit rate that is left when L1 is far too small and L2 and L3 are large."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from hicache.config import load_config
from hicache.replay.footprint import component_names, tight_config
from hicache.replay.multiturn import MultiTurnResult, run_multi_turn
from hicache.replay.result import ReplayResult
from hicache.workload import MultiTurn

COMBINATIONS = ("full", "full+swa", "full+mamba", "full+swa+mamba")
WANTED_SHARE = 0.995
"""Of the closed form's hits."""
FIRST_LATE_TURN = 176


@dataclass(frozen=True, slots=True)
class LateTurns:
    """The setting: chats whose last turns are measured.

    Args:
        load: all turns; those from ``first_turn`` on count.
        device_share, host_share: of the footprint, which each component has in L1 and L2.
        store: the L3 store's section.
    """

    load: MultiTurn
    page_size: int
    first_turn: int = FIRST_LATE_TURN
    device_share: float = 0.05
    host_share: float = 0.5
    store: Mapping[str, object] | None = None

    def run(
        self,
        components: str,
        *,
        overrides: Mapping[str, object] | None = None,
        seed: int = 0,
        on_request: Callable[[ReplayResult], None] | None = None,
        stop: threading.Event | None = None,
    ) -> LateTurnsResult:
        """One model, like ``full+swa``, on a cache of its own."""
        config = tight_config(
            self.load,
            component_names(components, self.page_size),
            self.page_size,
            device_share=self.device_share,
            host_share=self.host_share,
            store=self.store,
        )
        result = run_multi_turn(
            self.load,
            load_config(config, overrides=overrides),
            seed=seed,
            on_request=on_request,
            stop=stop,
        )
        return LateTurnsResult(components, self.first_turn, result)

    def as_json(self) -> Mapping[str, object]:
        """The settings."""
        return {**asdict(self), "requests": self.load.num_requests, "wanted_share": WANTED_SHARE}


@dataclass(frozen=True, slots=True)
class LateTurnsResult:
    """What one model's late turns hit."""

    components: str
    first_turn: int
    result: MultiTurnResult

    @property
    def share_of_closed_form(self) -> float:
        """Hits of the late turns over those that a cache with room for all has."""
        return self.result.share_of_closed_form(self.first_turn)

    @property
    def is_reached(self) -> bool:
        return self.share_of_closed_form >= WANTED_SHARE and not self.result.replay.interrupted

    @property
    def late(self) -> Mapping[str, int]:
        """Prompt tokens of the late turns by source, and what the closed form says."""
        rows = [row for row in self.result.rounds if row.turn >= self.first_turn]
        sums = {
            name: sum(getattr(row.tokens, name) for row in rows)
            for name in ("prompt", "device", "host", "store", "computed")
        }
        return {**sums, "expected": sum(row.expected_tokens for row in rows)}

    def as_json(self) -> Mapping[str, object]:
        """The object that ``--json`` lists for each model."""
        return {
            "components": self.components,
            "share_of_closed_form": None if self.result.replay.interrupted else self.share_of_closed_form,
            "is_reached": self.is_reached,
            "late": dict(self.late),
            **self.result.as_json(),
        }
