"""A synthetic multi-turn load, held against its closed form turn by turn."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from hicache.config import HiCacheConfig
from hicache.replay.result import ReplayResult
from hicache.replay.run import OnServed, Progress, replay
from hicache.stats import TokenCounts
from hicache.types import TierTokens
from hicache.workload import MultiTurn, closed_form, multi_turn

NO_CHECKPOINT = "no checkpoint"
LATE = "failed or late"
REFUSED = "refused"
EVICTED = "evicted"
UNEXPLAINED = "unexplained"


@dataclass(frozen=True, slots=True)
class Round:
    """One turn of all sessions.

    Args:
        turn: from 1.
        tokens: where its prompts' tokens came from.
        expected_tokens: the closed form's hits.
        lost: by cause where the rest of them went.
        by_component: reused payload by tier, in tokens; a window or state counts only what it needs.
    """

    turn: int
    tokens: TokenCounts
    expected_tokens: int
    lost: Mapping[str, int]
    by_component: Mapping[str, TierTokens] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MultiTurnResult:
    """All rounds, and the replay they come from."""

    load: MultiTurn
    rounds: Sequence[Round]
    replay: ReplayResult
    causes: Sequence[str] = field(default=(NO_CHECKPOINT, LATE, REFUSED, EVICTED, UNEXPLAINED))

    @property
    def deficit_tokens(self) -> int:
        return sum(row.expected_tokens - row.tokens.hit for row in self.rounds)

    @property
    def is_sound(self) -> bool:
        """Every byte right, the audit clean, and each missing token explained."""
        unexplained = sum(row.lost.get(UNEXPLAINED, 0) for row in self.rounds)
        run = self.replay
        return not (unexplained or run.stamp_mismatches or run.audit_errors)

    def share_of_closed_form(self, first: int = 1, last: int | None = None) -> float:
        """Hits of turns ``first`` to ``last`` over those of the closed form; 1 where that has none."""
        rows = [row for row in self.rounds if first <= row.turn and (last is None or row.turn <= last)]
        expected = sum(row.expected_tokens for row in rows)
        return sum(row.tokens.hit for row in rows) / expected if expected else 1.0

    def verdict(self) -> str:
        run = self.replay
        checked = f"{run.pages_checked:,} pages and states compared, {run.stamp_mismatches} wrong"
        if run.interrupted:
            return f"interrupted after {run.requests} requests; {checked}"
        if self.deficit_tokens == 0:
            return f"equal to the closed form in every round, to the token; {checked}"
        causes = []
        for cause in self.causes:
            tokens = sum(row.lost.get(cause, 0) for row in self.rounds)
            if tokens:
                causes.append(f"{cause} {tokens:,}")
        return f"{self.deficit_tokens:,} tokens short of the closed form: {', '.join(causes)}; {checked}"

    def as_json(self) -> Mapping[str, object]:
        return {
            **self.replay.as_json(),
            "load": asdict(self.load),
            "rounds": [
                {
                    "turn": row.turn,
                    **asdict(row.tokens),
                    "expected": row.expected_tokens,
                    "hit_rate": row.tokens.hit_rate,
                    "expected_hit_rate": row.expected_tokens / row.tokens.prompt,
                    "lost": dict(row.lost),
                    "by_component": {name: asdict(got) for name, got in row.by_component.items()},
                }
                for row in self.rounds
            ],
            "equals_closed_form": self.deficit_tokens == 0 and not self.replay.interrupted,
            "deficit_tokens": self.deficit_tokens,
        }


def run_multi_turn(
    load: MultiTurn,
    config: HiCacheConfig,
    *,
    core: str | None = None,
    seed: int = 0,
    on_request: Progress | None = None,
    on_served: OnServed | None = None,
    stop: threading.Event | None = None,
) -> MultiTurnResult:
    """Serve the load on a cache of its own and compare each turn with the closed form; see ``replay``."""
    result = replay(
        multi_turn(load, seed=seed),
        config,
        trace="multi-turn",
        core=core,
        on_request=on_request,
        on_served=on_served,
        stop=stop,
    )
    expected = closed_form(load, config.model.page_size, last_token_written=False)
    dropped = _dropped_slots(result)
    rounds = []
    unkept = 0
    for row in expected:
        counts = result.turns.get(row.turn + 1)
        if counts is None or counts.requests < load.sessions:
            break  # interrupted: an unfinished round has no closed form
        lost: dict[str, int] = {}
        left = row.hit_tokens - counts.tokens.hit
        for cause, tokens in (
            (NO_CHECKPOINT, counts.blocked),
            (LATE, counts.shortened),
            (REFUSED, unkept),
        ):
            lost[cause] = min(left, tokens)
            left -= lost[cause]
        unkept += counts.unkept
        # What was there, and is in no tier any more, was dropped; without any drop it is a riddle.
        lost[EVICTED if dropped else UNEXPLAINED] = left
        rounds.append(Round(row.turn + 1, counts.tokens, row.hit_tokens, lost, dict(counts.by_component)))
    return MultiTurnResult(load, rounds, result)


def _dropped_slots(result: ReplayResult) -> int:
    stats = result.stats
    if stats is None:
        return 0
    return sum(
        count
        for name, count in stats.tree.items()
        if name.startswith("removed_") and not name.endswith("_window")
    )
