"""A replay as one page of HTML that needs nothing else: no script, no network, light and dark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from hicache.errors import ConfigError
from hicache.replay.charts import Series, areas, bars, lines, percent, stacks, table
from hicache.replay.cost import CostModel
from hicache.replay.result import ReplayResult, TurnCounts
from hicache.replay.tables import turn_groups
from hicache.replay.timeline import Timeline
from hicache.replay.versus import Comparison
from hicache.types import TierTokens

SOURCES = ("device", "host", "store", "computed")
COLORS = ("c1", "c2", "c3", "c0")
_WHEN = 5
"""So many marks stand under a time axis."""


def check_report_target(target: str | None) -> None:
    """Refuse a file that cannot be written before the work, not after it."""
    if target is None:
        return
    try:
        Path(target).open("a", encoding="utf-8").close()
    except OSError as error:
        raise ConfigError(
            [f"--report {target}: {error.strerror}; name a file that can be written"]
        ) from error


def write_report(
    target: str, result: ReplayResult, timeline: Timeline, comparison: Comparison | None, cost: CostModel
) -> None:
    """Write the page. Raises ``ConfigError`` if the file cannot be written."""
    try:
        Path(target).write_text(page(result, timeline, comparison, cost), encoding="utf-8")
    except OSError as error:
        raise ConfigError([f"--report {target}: {error.strerror}"]) from error


def page(result: ReplayResult, timeline: Timeline, comparison: Comparison | None, cost: CostModel) -> str:
    """The whole page."""
    name = Path(result.trace).name or "replay"
    figures = [
        _figure(
            "Hit rate over time", "share of prompt tokens, by where they came from", _over_time(timeline)
        ),
        _figure(
            "Hit rate by turn of a session",
            "share of prompt tokens, by where they came from",
            _by_turn(result),
        ),
        _figure(
            "By component and tier",
            "reused payload, in tokens; a window counts what it needs",
            _by_component(result),
        ),
        _figure("Residency over time", "share of each pool's slots in use", _residency(timeline)),
        _figure("Lost tokens by cause", _lost_words(result), _lost(result)),
        _figure("What left a tier, and why", "pages and states", _left(result)),
        _figure("Policy against policy against the bound", _COMPARED, _compared(comparison)),
        _figure("Time to first token", _cost_words(cost), _first_token(result, timeline)),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(name)}: HiCache replay</title><style>{_STYLE}</style></head><body><main>"
        f"{_heading(result, name)}{''.join(figures)}</main></body></html>\n"
    )


def _figure(title: str, words: str, drawn: str) -> str:
    return f"<figure><figcaption><h2>{escape(title)}</h2><p>{escape(words)}</p></figcaption>{drawn}</figure>"


def _heading(result: ReplayResult, name: str) -> str:
    compared = f"{result.pages_checked:,} pages compared byte by byte, {result.stamp_mismatches} wrong;"
    compared += f" audit: {len(result.audit_errors)} errors"
    facts = [
        ("hit rate", f"{result.token_hit_rate:.2%}"),
        ("of at most", "–" if result.infinite_hit_rate is None else f"{result.infinite_hit_rate:.2%}"),
        ("requests", f"{result.requests:,}"),
        ("prompt tokens", f"{result.prompt_tokens:,}"),
    ]
    boxes = "".join(f"<div><b>{escape(value)}</b><span>{escape(what)}</span></div>" for what, value in facts)
    told = f"policy {result.policy}, configuration {result.config}, {result.core} core, {result.wall_s:.1f} s"
    if result.interrupted:
        told += "; interrupted: these are the figures so far"
    state = "wrong" if not result.is_sound else "sound" if result.pages_checked else "none"
    return (
        f"<header><h1>{escape(name)}</h1><p>{escape(told)}</p>"
        f'<p class="{state}">{escape(result.verdict)}: {escape(compared)}</p>'
        f'<div class="facts">{boxes}</div></header>'
    )


# ---- figures ---------------------------------------------------------------------------------
def _nothing(words: str) -> str:
    return f'<p class="none">{escape(words)}</p>'


def _times(timeline: Timeline) -> list[str]:
    steps = timeline.steps
    places = [n * (len(steps) - 1) // (_WHEN - 1) for n in range(_WHEN)] if len(steps) >= _WHEN else [0, -1]
    return [_duration(steps[place].end_s) for place in places]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _over_time(timeline: Timeline) -> str:
    if not timeline.steps:
        return _nothing("no request was served")
    shares = {
        name: [getattr(step.tokens, name) / max(1, step.tokens.prompt) for step in timeline.steps]
        for name in SOURCES[:3]
    }
    series = [Series(name, shares[name], color) for name, color in zip(SOURCES[:3], COLORS[:3], strict=True)]
    rows = [
        [_duration(step.end_s), f"{step.requests:,}", f"{step.tokens.hit_rate:.4f}"]
        + [f"{shares[name][n]:.4f}" for name in SOURCES[:3]]
        for n, step in enumerate(timeline.steps)
    ]
    drawn = areas(series, label="Hit rate over time", x=_times(timeline))
    drawn += table(["until", "requests", "hit rate", *SOURCES[:3]], rows)
    names = list(dict.fromkeys(name for step in timeline.steps for name in step.by_component))
    return drawn if len(names) < 2 else drawn + _components_over_time(timeline, names)


def _components_over_time(timeline: Timeline, names: Sequence[str]) -> str:
    """Beside each other what each component gave: a path its tokens, a window the part that is needed of it."""
    gave = {
        name: [
            step.by_component.get(name, TierTokens()).total / max(1, step.tokens.prompt)
            for step in timeline.steps
        ]
        for name in names
    }
    series = [Series(name, gave[name], f"c{1 + n % 6}") for n, name in enumerate(names)]
    rows = [
        [_duration(step.end_s), *(f"{gave[name][n]:.4f}" for name in names)]
        for n, step in enumerate(timeline.steps)
    ]
    drawn = lines(series, label="Reused payload by component over time", x=_times(timeline), top=1.0)
    return (
        _nothing("reused payload of each component, by prompt token") + drawn + table(["until", *names], rows)
    )


def _by_turn(result: ReplayResult) -> str:
    groups = list(turn_groups(result.turns))
    if not groups:
        return _nothing("no request was served")
    rows = [(f"turn {label}", _shares(counts), f"{counts.tokens.hit_rate:.1%}") for label, counts in groups]
    numbers = [
        [
            label,
            f"{counts.requests:,}",
            f"{counts.tokens.prompt:,}",
            *(f"{share:.4f}" for share in _shares(counts)),
        ]
        for label, counts in groups
    ]
    return stacks(rows, SOURCES, COLORS) + table(["turn", "requests", "prompt tokens", *SOURCES], numbers)


def _shares(counts: TurnCounts) -> list[float]:
    whole = max(1, counts.tokens.prompt)
    return [getattr(counts.tokens, name) / whole for name in SOURCES]


def _by_component(result: ReplayResult) -> str:
    if not result.by_component:
        return _nothing("nothing was reused")
    most = max(tokens.total for tokens in result.by_component.values()) or 1
    rows = [
        (name, [tokens.device / most, tokens.host / most, tokens.store / most], f"{tokens.total:,}")
        for name, tokens in result.by_component.items()
    ]
    numbers = [
        [name, f"{tokens.device:,}", f"{tokens.host:,}", f"{tokens.store:,}"]
        for name, tokens in result.by_component.items()
    ]
    return stacks(rows, SOURCES[:3], COLORS[:3]) + table(["component", *SOURCES[:3]], numbers)


def _residency(timeline: Timeline) -> str:
    pools = timeline.residency()
    if not pools:
        return _nothing("no request was served")
    colors = {pool: f"c{1 + n % 6}" for n, pool in enumerate(pools)}
    series = [
        Series(f"{name} in {tier}", shares, colors[name, tier]) for (name, tier), shares in pools.items()
    ]
    drawn = lines(series, label="Residency over time", x=_times(timeline), top=1.0)
    stored = [step.usage.store_bytes for step in timeline.steps if step.usage is not None]
    if any(each is not None for each in stored):
        drawn += _nothing(f"the stores held {(stored[-1] or 0) / 2**20:,.1f} MiB at the end")
    rows = [
        [_duration(step.end_s), *(f"{shares[n]:.4f}" for shares in pools.values())]
        for n, step in enumerate(timeline.steps)
    ]
    return drawn + table(["until", *(f"{name} {tier}" for name, tier in pools)], rows)


def _lost_words(result: ReplayResult) -> str:
    total = sum((result.lost_tokens or {}).values())
    return f"{total:,} tokens that a cache without limits would have reused besides"


def _lost(result: ReplayResult) -> str:
    if result.lost_tokens is None:
        return _nothing("not explained (--no-explain)")
    return _counted(result.lost_tokens, result.prompt_tokens, "c4")


def _left(result: ReplayResult) -> str:
    if result.stats is None:
        return _nothing("the replay was interrupted")
    counts: Counter[str] = Counter()
    for name, count in result.stats.tree.items():
        kind, _, rest = name.partition("_")
        tier, _, more = rest.partition("_")
        cause, _, component = more.partition("_")
        if kind == "left" and component:
            counts[f"{tier}: {cause} ({component})"] += count
    return _counted(counts, sum(counts.values()), "c2")


def _counted(counts: Mapping[str, int], whole: int, color: str) -> str:
    ordered = sorted(
        ((name, count) for name, count in counts.items() if count), key=lambda item: -abs(item[1])
    )
    if not ordered:
        return _nothing("nothing")
    rows = [
        (name.replace("_", " "), abs(count), f"{count:,} ({percent(count / max(1, whole))})")
        for name, count in ordered
    ]
    return bars(rows, color=color) + table(
        ["cause", "count"], [[name, f"{count:,}"] for name, count in ordered]
    )


_COMPARED = (
    "the trace's 512-token blocks in one tier, metadata only; capacity as a share of its distinct blocks."
    " No policy can hit more than the bound"
)


def _compared(comparison: Comparison | None) -> str:
    if comparison is None:
        return _nothing("not compared: the trace has no whole block, or it was interrupted or left out")
    series = [
        Series(policy, rates, f"c{1 + n % 5}") for n, (policy, rates) in enumerate(comparison.rates.items())
    ]
    series.append(Series("bound", comparison.bound, "c6", dashed=True))
    series.append(Series("infinite", [comparison.infinite] * len(comparison.bound), "c0", dashed=True))
    rows = [
        [
            word,
            f"{comparison.blocks[n]:,}",
            *(f"{rates[n]:.4f}" for rates in comparison.rates.values()),
            f"{comparison.bound[n]:.4f}",
        ]
        for n, word in enumerate(comparison.capacities)
    ]
    drawn = lines(series, label="Policies against the bound", x=comparison.capacities)
    return drawn + table(["capacity", "blocks", *comparison.rates, "bound"], rows)


def _cost_words(cost: CostModel) -> str:
    return (
        f"estimated, not measured: {cost.prefill_us:g} µs to compute a token, {cost.host_us:g} µs to load it from"
        f" host, {cost.store_us:g} µs more from a store"
    )


def _first_token(result: ReplayResult, timeline: Timeline) -> str:
    if not result.requests:
        return _nothing("no request was served")
    warm = [step.first_token_s / step.requests for step in timeline.steps]
    cold = [step.first_token_cold_s / step.requests for step in timeline.steps]
    series = [Series("with the cache", warm, "c1"), Series("without", cold, "c0", dashed=True)]
    mean = result.first_token_s / result.requests
    without = result.first_token_cold_s / result.requests
    words = f"{mean:.3f} s on average, {without:.3f} s without a cache"
    drawn = lines(
        series, label="Time to first token", x=_times(timeline), show=lambda value: f"{value:.3g} s"
    )
    rows = [
        [_duration(step.end_s), f"{warm[n]:.4f}", f"{cold[n]:.4f}"] for n, step in enumerate(timeline.steps)
    ]
    return drawn + _nothing(words) + table(["until", "with, s", "without, s"], rows)


_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1b1f24;--soft:#59636e;--rule:#d8dee4;--box:#f6f8fa;
--c0:#9aa4af;--c1:#1f6fc4;--c2:#c2620a;--c3:#1a7f4b;--c4:#a3324a;--c5:#7a4fc0;--c6:#14808a}
@media(prefers-color-scheme:dark){:root{--paper:#0e1116;--ink:#e6eaef;--soft:#9aa6b2;--rule:#2d343d;--box:#171c23;
--c0:#6b7682;--c1:#5aa5f0;--c2:#f0964a;--c3:#4cc38a;--c4:#f07590;--c5:#b392f0;--c6:#45c4cf}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:1180px;margin:0 auto;padding:24px 16px 64px}
h1{font-size:26px;margin:0;overflow-wrap:anywhere}
h2{font-size:18px;margin:0}
p{margin:4px 0;color:var(--soft);overflow-wrap:anywhere}
.sound{color:var(--c3)}.wrong{color:var(--c4);font-weight:700}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:16px 0}
.facts div{background:var(--box);border:1px solid var(--rule);border-radius:8px;padding:10px 14px}
.facts b{display:block;font-size:22px}
.facts span{color:var(--soft);font-size:14px}
figure{margin:28px 0 0;padding:16px;border:1px solid var(--rule);border-radius:8px}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;margin:8px 0;font-size:14px}
.key{display:inline-flex;align-items:center;gap:6px}
.key i{width:14px;height:10px;border-radius:2px;background:currentColor}
.key i.dashed{height:0;border-top:2px dashed;border-radius:0;background:none}
.plot{display:grid;grid-template-columns:auto minmax(0,1fr);gap:2px 8px;font-size:13px;color:var(--soft)}
.plot svg{width:100%;height:240px;display:block;overflow:visible}
.y{display:flex;flex-direction:column;justify-content:space-between;text-align:right;margin:-9px 0}
.x{grid-column:2;display:flex;justify-content:space-between}
.grid{stroke:var(--rule);vector-effect:non-scaling-stroke}
.line{fill:none;stroke:currentColor;stroke-width:2;vector-effect:non-scaling-stroke;stroke-linejoin:round}
.line.dashed{stroke-dasharray:6 5}
.area{fill:currentColor;fill-opacity:.8}
.c0{color:var(--c0)}.c1{color:var(--c1)}.c2{color:var(--c2)}.c3{color:var(--c3)}
.c4{color:var(--c4)}.c5{color:var(--c5)}.c6{color:var(--c6)}
.bars{display:grid;gap:6px;margin-top:10px;font-size:14px}
.bar{display:grid;grid-template-columns:190px minmax(0,1fr) 150px;gap:10px;align-items:center}
.track{display:flex;height:16px;background:var(--box);border-radius:3px;overflow:hidden}
.fill{background:currentColor;height:100%}
.value{text-align:right;font-variant-numeric:tabular-nums}
details{margin-top:12px;font-size:14px}
summary{cursor:pointer;color:var(--soft)}
.scroll{overflow-x:auto;max-height:320px}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:3px 10px;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}
@media(max-width:640px){.bar{grid-template-columns:minmax(0,1fr) auto}.track{grid-column:1/-1;grid-row:2}
figure{padding:12px}.plot svg{height:190px}}
"""
