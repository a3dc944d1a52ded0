"""What the benchmarks found, for people, as rich tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from hicache.replay.agent import AgentResult
from hicache.replay.compare import Comparison
from hicache.replay.late_turns import WANTED_SHARE, LateTurnsResult
from hicache.replay.multiturn import MultiTurnResult
from hicache.replay.tables import share, table, turn_groups


def print_multi_turn(console: Console, result: MultiTurnResult) -> None:
    """Per turn: expected, measured, every token of a difference by its cause; then by component and tier."""
    causes = [cause for cause in result.causes if any(row.lost.get(cause) for row in result.rounds)]
    rows = table(
        "Multi-turn: hit rate by turn",
        *("turn", "prompt", "expected", "measured", "L1", "L2", "L3", *causes),
    )
    for row in result.rounds:
        whole = row.tokens.prompt
        rows.add_row(
            str(row.turn),
            f"{whole:,}",
            f"{row.expected_tokens / whole:.4f}",
            f"{row.tokens.hit / whole:.4f}",
            share(row.tokens.device, whole),
            share(row.tokens.host, whole),
            share(row.tokens.store, whole),
            *(f"{row.lost.get(cause, 0):,}" for cause in causes),
        )
    console.print(rows)
    console.print(
        "expected: the closed form, whole pages of all that was sent and answered before, in a cache with room for"
        " everything; of each answer all but the last token, which is never computed"
    )
    parts = table(
        "Reused payload by turn, component and tier, in tokens", "turn", "component", "L1", "L2", "L3"
    )
    for label, counts in turn_groups(result.replay.turns):
        for name, got in counts.by_component.items():
            parts.add_row(label, name, f"{got.device:,}", f"{got.host:,}", f"{got.store:,}")
    console.print(parts)
    console.print(result.verdict())
    console.print(f"{result.replay.requests:,} requests in {result.replay.wall_s:.1f} s", highlight=False)


def print_comparison(console: Console, comparison: Comparison) -> None:
    """One row per capacity, one column per policy, the bound last."""
    policies = list(comparison.rows[0].by_policy) if comparison.rows else []
    rows = table("Hit rate by policy", "capacity", "slots", *policies, "bound")
    for row in comparison.rows:
        rows.add_row(
            f"{row.share:.1%}",
            " + ".join(f"{count:,}" for count in row.slots.values()),
            *(f"{result.replay.token_hit_rate:.4f}" for result in row.by_policy.values()),
            "-" if row.bound_hit_rate is None else f"{row.bound_hit_rate:.4f}",
        )
    console.print(rows)
    console.print("capacity: of the load's footprint")
    console.print(f"with room for everything: {comparison.closed_form_hit_rate:.4f}")
    runs = [result.replay for row in comparison.rows for result in row.by_policy.values()]
    seconds = sum(run.wall_s for run in runs)
    checked, wrong = sum(run.pages_checked for run in runs), sum(run.stamp_mismatches for run in runs)
    console.print(
        f"{len(runs)} replays in {seconds:.1f} s; {checked:,} pages compared byte by byte, {wrong} wrong",
        highlight=False,
    )


def print_late_turns(console: Console, results: Sequence[LateTurnsResult]) -> None:
    """One row per model."""
    first = results[0].first_turn
    rows = table(
        f"Late turns: {first} to {results[0].result.load.turns}",
        "model",
        "hit rate",
        "of most",
        "L1",
        "L2",
        "L3",
        "checked",
        "seconds",
    )
    for result in results:
        late, run = result.late, result.result.replay
        hits = late["device"] + late["host"] + late["store"]
        rows.add_row(
            result.components,
            share(hits, late["prompt"]),
            f"{result.share_of_closed_form:.4f}",
            *(share(late[tier], late["prompt"]) for tier in ("device", "host", "store")),
            f"{run.pages_checked:,}",
            f"{run.wall_s:.0f}",
        )
    console.print(rows)
    for result in results:
        if not result.is_reached:
            console.print(
                f"{result.components}: below {WANTED_SHARE:.1%} of the closed form: {result.result.verdict()}"
            )


def print_agent(console: Console, trace: str, results: Sequence[AgentResult]) -> None:
    """One row per policy of one trace."""
    console.print(f"Agents: {trace}", style="bold")
    rows = table("", "policy", "hit rate", "L1", "L2", "L3", "mean s", "p50", "p90", "p99")
    for result in results:
        run, first = result.result, result.first_token()
        rows.add_row(
            result.policy,
            f"{run.token_hit_rate:.4f}",
            *(
                share(part, run.prompt_tokens)
                for part in (run.device_tokens, run.host_tokens, run.store_tokens)
            ),
            *(f"{first[name]:.3f}" for name in ("mean", "p50", "p90", "p99") if first),
        )
    console.print(rows)
    cold = results[0].first_token().get("mean_without_cache")
    if cold is not None:
        console.print(
            f"seconds to the first token, from the stated cost model; {cold:.3f} in the mean without a cache"
        )
    checked = sum(result.result.pages_checked for result in results)
    wrong = sum(result.result.stamp_mismatches for result in results)
    seconds = sum(result.result.wall_s for result in results)
    console.print(f"{checked:,} pages compared byte by byte, {wrong} wrong; {seconds:.1f} s", highlight=False)
