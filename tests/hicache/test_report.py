"""The report of a replay: its numbers are the replay's, and a browser shows it whole."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import hicache
from hicache.cli import main
from hicache.config import load_config
from hicache.replay.charts import Series, bars, lines
from hicache.replay.cost import CostModel
from hicache.replay.reference import reference_replay
from hicache.replay.report import page
from hicache.replay.result import ReplayResult
from hicache.replay.run import replay
from hicache.replay.timeline import Timeline
from hicache.replay.versus import compare
from hicache.workload import Trace, read_trace

if TYPE_CHECKING:
    from playwright.sync_api import Browser

TRACE = str(Path(hicache.__file__).resolve().parents[1] / "traces" / "cc_agentic_small.jsonl.zst")
REQUESTS = 40
FIGURES = 8
PATIENCE_MS = 120_000
"""Of the browser, which may start while every core is busy."""


@pytest.fixture(scope="module")
def trace() -> Trace:
    return read_trace(TRACE, limit=REQUESTS)


@pytest.fixture(scope="module")
def made(trace: Trace) -> tuple[ReplayResult, Timeline, str]:
    """A small replay of a hybrid model under pressure, and its page."""
    overrides = {"explain.enabled": True, "tiers.device.capacity": "24MiB"}
    config = load_config("hybrid", overrides=overrides, environ={})
    cost = CostModel()
    timeline = Timeline(trace.num_requests, cost, num_steps=16)
    result = replay(trace, config, trace="<b>&.jsonl", timeline=timeline, cost=cost)
    comparison = compare(trace, policies=("lru", "session"), capacities=("5%", "20%"))
    return result, timeline, page(result, timeline, comparison, cost)


# ---- numbers -----------------------------------------------------------------------------------------------------------
def test_the_timeline_adds_up_to_the_replay(made: tuple[ReplayResult, Timeline, str]) -> None:
    result, timeline, _ = made
    assert len(timeline.steps) <= 16
    assert sum(step.requests for step in timeline.steps) == result.requests == REQUESTS
    assert sum(step.tokens.hit for step in timeline.steps) == result.hit_tokens
    assert sum(step.tokens.prompt for step in timeline.steps) == result.prompt_tokens
    assert sum(step.first_token_s for step in timeline.steps) == pytest.approx(result.first_token_s)
    for name, tokens in result.by_component.items():
        assert sum(step.by_component[name].total for step in timeline.steps) == tokens.total
    for shares in timeline.residency().values():
        assert len(shares) == len(timeline.steps)
        assert all(0 <= share <= 1 for share in shares)
    assert max(timeline.residency()["full", "device"]) > 0.5


def test_the_comparison_is_the_references(trace: Trace) -> None:
    found = compare(trace, policies=("lru", "session", "lru"), capacities=("0.001%", "5%", "20%"))
    assert found is not None
    assert found.capacities == ("5%", "20%")  # a share of no block is left out
    alone = reference_replay(trace, found.blocks[1], policy="session")
    assert found.rates["session"][1] == alone.token_hit_rate
    assert list(found.rates) == ["lru", "session"]
    for rates in found.rates.values():
        assert all(rate <= bound <= found.infinite for rate, bound in zip(rates, found.bound, strict=True))


def test_every_number_of_a_figure_stands_in_its_table(made: tuple[ReplayResult, Timeline, str]) -> None:
    result, timeline, text = made
    assert f"{result.token_hit_rate:.2%}" in text
    for step in timeline.steps:
        assert f"<td>{step.tokens.hit_rate:.4f}</td>" in text
    for cause, count in (result.lost_tokens or {}).items():
        if count:
            assert f"<td>{cause}</td><td>{count:,}</td>" in text
    for tokens in result.by_component.values():
        assert f"<td>{tokens.device:,}</td><td>{tokens.host:,}</td><td>{tokens.store:,}</td>" in text


def test_an_empty_replay_has_a_page() -> None:
    text = page(ReplayResult("none", "cpu", "lru", "rust"), Timeline(0, CostModel()), None, CostModel())
    assert text.count("<figure>") == FIGURES


def test_a_line_is_drawn_where_its_values_are() -> None:
    drawn = lines([Series("a", [0.0, 0.5, 1.0], "c1")], label="a", x=["0", "1"], top=1.0)
    assert 'points="0.0,300.0 500.0,150.0 1000.0,0.0"' in drawn
    assert 'style="width:50.00%"' in bars([("a", 1.0, "1"), ("b", 2.0, "2")])


# ---- the page ----------------------------------------------------------------------------------------------------------
class Links(HTMLParser):
    """Whatever a browser would fetch, and whether all that opens closes."""

    VOID = frozenset({"meta", "link", "polyline", "polygon", "line", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag == "script":
            self.found.append("script")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_nothing_else_and_names_are_escaped(made: tuple[ReplayResult, Timeline, str]) -> None:
    text = made[2]
    links = Links()
    links.feed(text)
    assert links.open == []
    assert links.found == ["data:,"]
    assert "<b>&.jsonl" not in text
    assert "&lt;b&gt;&amp;.jsonl" in text
    assert not re.search(r"url\(|@import|https?://", text)


def run(*arguments: str) -> int:
    try:
        return main(list(arguments))
    except SystemExit as stop:
        return int(stop.code or 0)


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.html"
    arguments = ["replay", TRACE, "--requests", "12", "--quiet", "--report"]
    assert run(*arguments, str(target)) == 0
    text = target.read_text()
    assert text.count("<figure>") == FIGURES
    assert "verified: " in text
    assert "slru" in text
    assert run(*arguments, str(tmp_path / "none" / "out.html")) == 2
    assert "name a file that can be written" in capsys.readouterr().err
    assert run(*arguments, str(target), "--reference") == 2
    assert "leave out --reference" in capsys.readouterr().err


# ---- in a browser ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium on this machine")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra dev)")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox"], timeout=PATIENCE_MS
        )
        yield started
        started.close()


_MEASURE = """() => {
    const root = document.documentElement;
    const colors = getComputedStyle(document.body);
    const small = [...document.querySelectorAll('p, h2, span, td, summary')]
        .filter(each => each.textContent && each.checkVisibility())
        .filter(each => parseFloat(getComputedStyle(each).fontSize) < 12);
    const outside = [...document.querySelectorAll('figure, svg, .bar, .legend, .facts div, header')]
        .filter(each => each.getBoundingClientRect().right > root.clientWidth + 0.5);
    return {
        overflow: root.scrollWidth - root.clientWidth,
        outside: outside.map(each => each.outerHTML.slice(0, 80)),
        small: small.length,
        plots: [...document.querySelectorAll('svg')].map(each => each.getBoundingClientRect().width),
        ink: colors.color, paper: colors.backgroundColor,
    };
}"""


def _brightness(color: str) -> float:
    red, green, blue = (int(part) for part in re.findall(r"\d+", color)[:3])
    return (299 * red + 587 * green + 114 * blue) / 1000


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_the_page_whole(
    browser: Browser, made: tuple[ReplayResult, Timeline, str], tmp_path: Path, width: int, scheme: Any
) -> None:
    """No message on the console, no request, nothing beyond the screen's edge, ink that shows on its paper."""
    target = tmp_path / "report.html"
    target.write_text(made[2], encoding="utf-8")
    told: list[str] = []
    fetched: list[str] = []
    screen = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    screen.set_default_timeout(PATIENCE_MS)
    screen.on("console", lambda message: told.append(message.text))
    screen.on("pageerror", lambda error: told.append(str(error)))
    screen.on("request", lambda request: fetched.append(request.url))
    screen.goto(target.as_uri())
    seen = screen.evaluate(_MEASURE)
    screen.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    for each in (seen, screen.evaluate(_MEASURE)):  # as it comes, and with all tables unfolded
        assert (each["overflow"], each["outside"], each["small"]) == (0, [], 0)
        assert len(each["plots"]) == 5
        assert min(each["plots"]) > 0.7 * width - 100
    is_dark = _brightness(seen["paper"]) < 128
    assert is_dark == (scheme == "dark")
    assert abs(_brightness(seen["ink"]) - _brightness(seen["paper"])) > 150
    assert told == []
    assert fetched == [target.as_uri()]
    screen.close()
