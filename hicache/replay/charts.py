"""Figures of a report as HTML: lines and areas as inline SVG, bars and words as boxes.

Nothing in an SVG is text, so that it can be stretched to any width; axes are boxes around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 1000, 300
NUM_TICKS = 4
Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Series:
    """Values with a name. ``color``: which of the page's colours; ``dashed`` for a limit, not a measurement."""

    name: str
    values: Sequence[float]
    color: str
    dashed: bool = False


def percent(value: float) -> str:
    return f"{value:.0%}" if value in (0, 1) or value >= 0.1 else f"{value:.1%}"


def lines(
    series: Sequence[Series],
    *,
    label: str,
    x: Sequence[str],
    top: float | None = None,
    show: Format = percent,
) -> str:
    """Lines over the same positions, from 0 to ``top`` (default: what the greatest needs)."""
    most = _top(max((value for each in series for value in each.values), default=0.0), top)
    shapes = []
    for each in series:
        points = " ".join(f"{px:.1f},{py:.1f}" for px, py in _points(each.values, most))
        dashed = " dashed" if each.dashed else ""
        shapes.append(f'<polyline class="line {each.color}{dashed}" points="{points}"/>')
    return _plot("".join(shapes), label, series, x, most, show)


def areas(series: Sequence[Series], *, label: str, x: Sequence[str], show: Format = percent) -> str:
    """Shares on top of each other, from 0 to 1."""
    shapes = []
    below = [0.0] * len(series[0].values) if series else []
    for each in series:
        above = [low + value for low, value in zip(below, each.values, strict=True)]
        outline = [*_points(above, 1.0), *reversed(_points(below, 1.0))]
        points = " ".join(f"{px:.1f},{py:.1f}" for px, py in outline)
        shapes.append(f'<polygon class="area {each.color}" points="{points}"/>')
        below = above
    return _plot("".join(shapes), label, series, x, 1.0, show)


def bars(rows: Sequence[tuple[str, float, str]], *, color: str = "c1") -> str:
    """Rows of (name, value, words), each as long as its share of the greatest."""
    most = max((value for _, value, _ in rows), default=0.0) or 1.0
    drawn = [
        f'<div class="bar"><span class="name">{escape(name)}</span>'
        f'<span class="track"><span class="fill {color}" style="width:{100 * value / most:.2f}%"></span></span>'
        f'<span class="value">{escape(words)}</span></div>'
        for name, value, words in rows
    ]
    return f'<div class="bars">{"".join(drawn)}</div>'


def stacks(
    rows: Sequence[tuple[str, Sequence[float], str]], names: Sequence[str], colors: Sequence[str]
) -> str:
    """Rows of (name, shares of a whole, words), the shares beside each other."""
    drawn = []
    for name, shares, words in rows:
        parts = "".join(
            f'<span class="fill {color}" style="width:{100 * share:.2f}%" title="{escape(part)}"></span>'
            for part, share, color in zip(names, shares, colors, strict=True)
        )
        drawn.append(
            f'<div class="bar"><span class="name">{escape(name)}</span><span class="track">{parts}</span>'
            f'<span class="value">{escape(words)}</span></div>'
        )
    legend = _legend([Series(name, (), color) for name, color in zip(names, colors, strict=True)])
    return f'{legend}<div class="bars">{"".join(drawn)}</div>'


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The numbers, folded away behind a word."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<details><summary>numbers</summary><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div></details>"
    )


def _plot(
    shapes: str, label: str, series: Sequence[Series], x: Sequence[str], most: float, show: Format
) -> str:
    grid = "".join(
        f'<line class="grid" x1="0" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
        for y in (HEIGHT * n / NUM_TICKS for n in range(NUM_TICKS + 1))
    )
    ticks = "".join(f"<span>{escape(show(most * n / NUM_TICKS))}</span>" for n in range(NUM_TICKS, -1, -1))
    marks = "".join(f"<span>{escape(word)}</span>" for word in x)
    return (
        f'{_legend(series)}<div class="plot"><div class="y">{ticks}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{escape(label)}">'
        f'{grid}{shapes}</svg><div class="x">{marks}</div></div>'
    )


def _legend(series: Sequence[Series]) -> str:
    words = "".join(
        f'<span class="key"><i class="{each.color}{" dashed" if each.dashed else ""}"></i>{escape(each.name)}</span>'
        for each in series
    )
    return f'<div class="legend">{words}</div>'


def _points(values: Sequence[float], most: float) -> list[tuple[float, float]]:
    if len(values) == 1:
        values = [values[0], values[0]]
    last = max(1, len(values) - 1)
    return [(WIDTH * n / last, HEIGHT * (1 - min(1.0, value / most))) for n, value in enumerate(values)]


def _top(greatest: float, top: float | None) -> float:
    """A round number that nothing stands above."""
    if top is not None:
        return top
    if greatest <= 0:
        return 1.0
    step = 10.0 ** len(str(int(greatest))) / 10 if greatest >= 1 else 1.0
    while greatest < step:
        step /= 10
    return next(step * factor for factor in (1, 2, 4, 5, 8, 10) if step * factor >= greatest)
