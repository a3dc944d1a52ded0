"""The numbers of a replay for people, as rich tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hicache.config.units import approximate_bytes
from hicache.replay.hybrid import HybridResult
from hicache.replay.reference import ReferenceResult
from hicache.replay.result import ReplayResult, TurnCounts
from hicache.stats import TokenCounts
from hicache.tiers.store import StoreStats
from hicache.types import Tier, TierTokens

_TURN_EDGES = (1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50, 100, 200)


def print_replay(console: Console, result: ReplayResult) -> None:
    """Overall figures, then per turn, per component and tier, then what went wrong."""
    console.print(_overall(result))
    console.print(_by_turn(result))
    console.print(_by_component(result))
    if result.lost_tokens is not None:
        console.print(_losses(result, result.lost_tokens))
    if result.stats is not None:
        console.print(_moved(result))
        if result.stats.store is not None:
            console.print(_stores(result.stats.store))
    console.print(_verdict(result))


def table(title: str, *columns: str) -> Table:
    """An empty table: names stand left in the first column, numbers right in the others.

    It is as wide as its title, which would be broken otherwise.
    """
    empty = Table(
        title=title, title_justify="left", title_style="bold", header_style="dim", min_width=len(title)
    )
    empty.add_column(columns[0])
    for column in columns[1:]:
        empty.add_column(column, justify="right")
    return empty


def share(part: float, whole: float) -> str:
    return f"{part / whole:.2%}" if whole else "-"


def _overall(result: ReplayResult) -> RenderableType:
    rows = table("Where prompt tokens came from", "source", "tokens", "share")
    sources = (
        ("device (L1)", result.device_tokens),
        ("host (L2)", result.host_tokens),
        ("store (L3)", result.store_tokens),
        ("computed", result.computed_tokens),
    )
    for name, tokens in sources:
        rows.add_row(name, f"{tokens:,}", share(tokens, result.prompt_tokens))
    rows.add_section()
    rows.add_row("prompt tokens", f"{result.prompt_tokens:,}", "100.00%")
    hit_rate = Text.assemble((f"token hit rate {result.token_hit_rate:.4f}", "bold"))
    if result.infinite_hit_rate is not None:
        hit_rate.append(f" of {result.infinite_hit_rate:.4f} that a cache without limits would reach")
    lines: list[RenderableType] = [
        f"{result.requests:,} requests, policy {result.policy}, {result.core} core, {result.wall_s:.1f} s",
        f"L1 of {approximate_bytes(result.device_bytes)}",
        hit_rate,
    ]
    if result.requests:
        warm, cold = result.first_token_s / result.requests, result.first_token_cold_s / result.requests
        lines.append(
            f"time to first token, estimated from the stated costs: {warm:.3f} s on average,"
            f" {cold:.3f} s without a cache"
        )
    return Group(rows, *lines)


def _by_turn(result: ReplayResult) -> RenderableType:
    rows = table("By turn of a session", "turn", "requests", "prompt tokens", "hit rate", "L1", "L2", "L3")
    for label, counts in turn_groups(result.turns):
        rows.add_row(label, f"{counts.requests:,}", *_rates(counts.tokens))
    return rows


def _rates(tokens: TokenCounts) -> Sequence[str]:
    whole = tokens.prompt
    return (
        f"{whole:,}",
        share(tokens.hit, whole),
        share(tokens.device, whole),
        share(tokens.host, whole),
        share(tokens.store, whole),
    )


def turn_groups(turns: dict[int, TurnCounts]) -> Iterable[tuple[str, TurnCounts]]:
    """Single turns first, then ranges, so that a long session still fits a screen."""
    edges = [*_TURN_EDGES, max(turns, default=0) + 1]
    for low, high in pairwise(edges):
        members = [counts for turn, counts in turns.items() if low <= turn < high]
        if not members:
            continue
        total = TurnCounts()
        for counts in members:
            total.requests += counts.requests
            total.tokens.merge(counts.tokens)
            for name, got in counts.by_component.items():
                total.by_component[name] = total.by_component.get(name, TierTokens()) + got
        yield (str(low) if high == low + 1 else f"{low}-{high - 1}"), total


def _by_component(result: ReplayResult) -> RenderableType:
    rows = table("By component: reused payload by tier, in tokens", "component", "device", "host", "store")
    for name, tokens in result.by_component.items():
        rows.add_row(name, f"{tokens.device:,}", f"{tokens.host:,}", f"{tokens.store:,}")
    return rows


def _losses(result: ReplayResult, lost: Mapping[str, int]) -> RenderableType:
    rows = table("Lost, by cause", "cause", "tokens", "share")
    for cause, tokens in sorted(lost.items(), key=lambda item: -item[1]):
        rows.add_row(cause.replace("_", " "), f"{tokens:,}", share(tokens, result.prompt_tokens))
    rows.add_section()
    total = sum(lost.values())
    rows.add_row("all", f"{total:,}", share(total, result.prompt_tokens))
    return Group(rows, "lost: what a cache without limits would have hit besides")


def _moved(result: ReplayResult) -> RenderableType:
    stats = result.stats
    assert stats is not None
    moved = table("Bytes moved", "direction", "component", "slots", "MiB")
    for row in stats.transfers.moved:
        moved.add_row(row.direction, row.component, f"{row.slots:,}", f"{row.num_bytes / 2**20:,.1f}")
    left = table(
        "What left a tier, in slots", "tier", "demoted", "dropped", "with its path", "outside a window"
    )
    for tier in (Tier.DEVICE, Tier.HOST):
        name = tier.name.lower()
        left.add_row(
            name,
            *(
                f"{stats.tree.get(f'removed_{name}_{cause}', 0):,}"
                for cause in ("demote", "evict", "cascade", "window")
            ),
        )
    return Group(moved, left)


def _stores(store: StoreStats) -> RenderableType:
    rows = table(
        "Stores, in pages", "store", "read", "missed", "written", "refused", "corrupt", "errors", "breaker"
    )
    for each in (*store.stores, store) if store.stores else (store,):
        rows.add_row(
            each.name or each.kind,
            *(f"{n:,}" for n in (each.pages_read, each.pages_missed, each.pages_written)),
            *(f"{n:,}" for n in (each.pages_refused, each.pages_corrupt, sum(each.errors.values()))),
            each.breaker.state if each.breaker is not None else "-",
        )
    return rows


def _verdict(result: ReplayResult) -> RenderableType:
    compared = f"{result.pages_checked:,} pages and states compared byte by byte"
    lines: list[RenderableType] = [
        f"{compared}, {result.stamp_mismatches} wrong; audit: {len(result.audit_errors)} errors",
    ]
    lines += [f"  audit: {finding}" for finding in result.audit_errors[:20]]
    if result.blocked_tokens:
        lines.append(f"{result.blocked_tokens:,} tokens found but not usable: no state or window there")
    if result.recomputed_tokens:
        lines.append(f"{result.recomputed_tokens:,} tokens found, and computed because that was sooner")
    if result.shortened_tokens:
        lines.append(f"{result.shortened_tokens:,} tokens promised, then lost to a failed or late transfer")
    if result.refused_requests:
        lines.append(f"{result.refused_requests:,} requests did not fit the device pool whole")
    faults = result.stats.faults if result.stats is not None else {}
    if faults:
        lines.append("faults: " + ", ".join(f"{name} {count}" for name, count in sorted(faults.items())))
    if result.skipped_lines:
        lines.append(f"{result.skipped_lines} lines of the trace skipped")
    if result.interrupted:
        lines.append(Text("interrupted: these are the figures so far", "yellow"))
    colour = "red" if not result.is_sound else "green" if result.pages_checked else "yellow"
    lines.append(Text(result.verdict, colour))
    return Group(*lines)


def print_reference(console: Console, results: Sequence[ReferenceResult]) -> None:
    """One row per capacity, to be held against the published figures."""
    rows = table(
        "Reference model: full 512-token blocks, one tier, metadata only",
        "capacity",
        "blocks",
        "token hit rate",
        "bound",
        "seconds",
    )
    for result in results:
        bound = result.bound_hit_rate
        rows.add_row(
            f"{result.capacity_share:.2%}",
            f"{result.capacity_blocks:,}",
            f"{result.token_hit_rate:.4f}",
            "-" if bound is None else f"{bound:.4f}",
            f"{result.wall_s:.1f}",
        )
    console.print(rows)
    first = results[0]
    if isinstance(first, HybridResult):
        spare = f", spare ones {first.spacing_blocks} blocks apart" if first.spacing_blocks else ""
        console.print("; ".join(first.read_as))
        console.print(f"{first.components}, one budget for all payload; marks: {first.marks}{spare}")
    console.print(
        f"{first.requests:,} requests, policy {first.policy}, {first.core} core;"
        f" infinite cache {first.infinite_hit_rate:.4f}"
    )
