"""``hicache bench late-turns`` and ``agent``, and the comparison of policies: reports, pictures, exit codes."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import threading
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest

import hicache
from hicache.cli import _progress, bench, main
from hicache.replay.agent import with_workers
from hicache.workload import read_trace

AGENTS = str(Path(hicache.__file__).resolve().parents[1] / "traces" / "cc_agentic_small.jsonl.zst")
COMPARE = ["bench", "multi-turn", "--sessions", "4", "--turns", "3", "--system", "0", "--user", "90"]
LATE = [
    "bench",
    "late-turns",
    "--sessions",
    "24",
    "--turns",
    "10",
    "--first-turn",
    "8",
    "--stride",
    "2",
    "--quiet",
]


def late(option: str, value: str) -> list[str]:
    """``LATE`` with another value for one of its options."""
    place = LATE.index(option) + 1
    return [*LATE[:place], value, *LATE[place + 1 :]]


def run(*arguments: str) -> int:
    try:
        return main(list(arguments))
    except SystemExit as stop:
        return int(stop.code or 0)


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:  # Any: JSON
    assert run(*arguments, "--json", "-") == 0
    loaded = json.loads(capsys.readouterr().out)
    assert isinstance(loaded, dict)
    return loaded


# ---- late-turns --------------------------------------------------------------------------------------------------------
def test_late_turns_report_each_model_and_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, *LATE, "--components", "full,full+swa+mamba", "--store", "memory")
    assert [each["components"] for each in found["results"]] == ["full", "full+swa+mamba"]
    assert all(each["is_reached"] for each in found["results"])
    assert (found["settings"]["device_share"], found["settings"]["first_turn"]) == (0.05, 8)
    assert found["settings"]["requests"] == found["results"][0]["requests"] == 24 * 7
    assert {row["turn"] for row in found["results"][0]["rounds"]} == {2, 4, 6, 7, 8, 9, 10}
    assert set(found["results"][1]["rounds"][-1]["by_component"]) == {"full", "swa", "mamba"}


def test_late_turns_below_what_is_wanted_are_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--components", "full", "--set", "tiers.stores=[]", "--host", "10%"]
    assert run(*LATE, *small) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "full: below 99.5% of the closed form: " in told
    assert "evicted" in told


# ---- Ctrl-C ------------------------------------------------------------------------------------------------------------
def interrupt_at(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Ctrl-C after so many requests of all replays."""
    stop = threading.Event()
    served = itertools.count(1)

    def advance(_rate: float) -> None:
        if next(served) == at:
            stop.set()

    monkeypatch.setattr(bench, "stop_on_interrupt", lambda: contextlib.nullcontext(stop))
    monkeypatch.setattr(_progress, "replay_progress", lambda *_, **__: contextlib.nullcontext(advance))


@pytest.mark.parametrize(
    ("command", "each", "models"),
    [
        pytest.param([*COMPARE, "--quiet"], 12, 1, id="multi-turn"),
        pytest.param(
            [*COMPARE, "--policies", "lru,fifo", "--capacities", "50%,100%"], 12, 4, id="multi-turn-policies"
        ),
        pytest.param(
            [*LATE, "--components", "full,full+swa", "--store", "memory"], 24 * 7, 2, id="late-turns"
        ),
        pytest.param(["bench", "agent", AGENTS, "--requests", "25", "--device", "60%"], 25, 2, id="agent"),
    ],
)
@pytest.mark.parametrize("in_last", [False, True], ids=["first-replay", "last-replay"])
def test_an_interrupted_load_says_how_far_it_came_and_not_that_it_failed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    each: int,
    models: int,
    in_last: bool,
) -> None:
    done = 5 + in_last * each * (models - 1)
    interrupt_at(monkeypatch, done)
    assert run(*command) == 130
    told = capsys.readouterr()
    assert f"hicache: interrupted, {done} of {each * models} requests" in told.err
    assert "below" not in told.out


# ---- agent -------------------------------------------------------------------------------------------------------------
def test_agents_are_replayed_with_sessions_and_without(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "bench", "agent", AGENTS, "--requests", "25", "--device", "60%", "--quiet")
    (trace,) = found["results"]
    assert [each["policy"] for each in trace["policies"]] == ["lru", "session"]
    assert [each["session_aware"] for each in trace["policies"]] == [False, True]
    for each in trace["policies"]:
        times = each["first_token_s"]
        assert times["p50"] <= times["p90"] <= times["p99"]
        assert times["mean"] == pytest.approx(each["mean_first_token_s"])
        assert times["mean"] < times["mean_without_cache"]
        assert (each["stamp_mismatches"], each["audit_errors"]) == (0, 0)
    assert found["settings"]["cost"] == {"prefill_us": 100.0, "host_us": 4.0, "store_us": 33.0}


def test_workers_run_so_many_sessions_at_once_and_keep_their_pauses() -> None:
    recorded = read_trace(AGENTS, limit=200)
    moved = with_workers(recorded, 3)
    assert sorted(len(request.prompt_tokens()) for request in moved) == sorted(
        len(request.prompt_tokens()) for request in recorded
    )
    assert [request.index for request in moved] == list(range(200))
    spans: dict[str | None, list[float]] = {}
    for request in moved:
        spans.setdefault(request.session, []).append(request.arrival_s)
        if request.continues is not None:
            assert moved.requests[request.continues].session == request.session
    pauses = {name: np.diff(times) for name, times in spans.items()}
    before: dict[str | None, list[float]] = {}
    for request in recorded:
        before.setdefault(request.session, []).append(request.arrival_s)
    for name, times in before.items():
        np.testing.assert_allclose(pauses[name], np.diff(times), atol=1e-6)
    for times in spans.values():
        at_once = sum(other[0] <= times[0] <= other[-1] for other in spans.values())
        assert at_once <= 3


def test_a_device_below_the_longest_request_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "agent", AGENTS, "--requests", "25", "--device", "1%") == 2
    told = capsys.readouterr().err
    assert "--device: 1.0% of the trace's" in told
    assert "expected at least" in told


# ---- policies ----------------------------------------------------------------------------------------------------------
def test_policies_are_compared_over_capacities(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, *COMPARE, "--policies", "lru,session", "--capacities", "40%,200%")
    assert [row["capacity_share"] for row in found["by_capacity"]] == [0.4, 2]
    for row in found["by_capacity"]:
        for result in row["policies"].values():
            assert result["token_hit_rate"] <= row["bound_hit_rate"]
            assert result["rounds"][-1]["by_component"]["full"]["device"] == result["rounds"][-1]["device"]


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_the_picture_shows_every_policy_and_the_bound(tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / f"rates.{ending}"
    arguments = [*COMPARE, "--policies", "lru,session", "--capacities", "40%,200%", "--plot", str(target)]
    assert run(*arguments) == 0
    drawn = target.read_bytes()
    if ending == "png":
        assert drawn.startswith(b"\x89PNG")
        return
    for element in ET.fromstring(drawn).iter():
        assert element.tag.rpartition("}")[2] not in {"image", "script", "foreignObject"}
        links = [value for name, value in element.attrib.items() if name.endswith("href")]
        assert all(link.startswith("#") for link in links), "the picture needs another file"
    text = drawn.decode()
    for name in ("lru", "session", "clairvoyant bound", "room for everything", "40%", "200%"):
        assert f"<!-- {name} -->" in text, f"{name} is not in the picture"
    assert "token hit rate" in text
    run(*arguments)
    assert target.read_bytes() == drawn, "the same figures give another file"


def test_a_picture_needs_the_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(*COMPARE, "--policies", "lru", "--plot", str(tmp_path / "x.svg")) == 2
    assert "pip install 'hicache[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*COMPARE, "--policies", "lru,best"], "--policies: 'lru,best'; expected some of adaptive"),
        ([*COMPARE, "--policies", "lru,lru"], "each once"),
        ([*COMPARE, "--policies", "lru", "--config", "cpu"], "leave out --config"),
        ([*COMPARE, "--capacities", "5%"], "--capacities: compares policies; add --policies"),
        ([*COMPARE, "--plot", "x.svg"], "--plot: compares policies; add --policies"),
        (
            [*COMPARE, "--policies", "lru", "--plot", "x.gif"],
            "--plot: 'x.gif'; expected a file that ends in .svg",
        ),
        ([*COMPARE, "--policies", "lru", "--plot", "/no/x.svg"], "there is no folder '/no'"),
        ([*LATE, "--device", "0%"], "--device: '0%'; expected a share"),
        ([*LATE, "--store", "tape"], "--store: found 'tape'; expected disk or memory"),
        ([*LATE, "--components", "full,swap"], "--components: 'swap'; expected some of full+swa+mamba"),
        (late("--first-turn", "11"), "--first-turn: found 11; expected 2 to 10"),
        (late("--stride", "0"), "bench late-turns: stride is 0"),
        ([*LATE, "--page-size", "65536"], "bench late-turns: turns 8 to 10 could reuse nothing"),
        (["bench", "agent", AGENTS, "--host", "x"], "--host: 'x'; expected a share"),
        (["bench", "agent", AGENTS, "--prefill-us", "-1"], "--prefill-us: found -1.0"),
    ],
)
def test_what_makes_no_sense_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err
