"""``hicache replay`` and ``hicache bench`` in process: options, reports, exit codes."""

from __future__ import annotations

import json
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import hicache
from hicache.cache import HiCache
from hicache.cli import main
from hicache.errors import CorruptPayloadError
from hicache.replay.stamps import PageChecker

TRACES = Path(hicache.__file__).resolve().parents[1] / "traces"
MOONCAKE = str(TRACES / "mooncake_conversation.jsonl.zst")
AGENTS = str(TRACES / "cc_agentic_small.jsonl.zst")


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


def write_trace(path: Path, *timestamps: int) -> str:
    """One session that grows by a block a request."""
    records = [
        {"timestamp": when, "input_length": 512 * (n + 1), "output_length": 8, "hash_ids": list(range(n + 1))}
        for n, when in enumerate(timestamps)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


# ---- replay ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("trace", "config"),
    [(MOONCAKE, "cpu"), (MOONCAKE, "hybrid"), (AGENTS, "cpu")],
    ids=["chat", "hybrid", "agents"],
)
def test_the_numbers_of_a_report_add_up(capsys: pytest.CaptureFixture[str], config: str, trace: str) -> None:
    found = report(capsys, "replay", trace, "--requests", "12", "--config", config, "--quiet")
    hits = found["hit_tokens"]
    assert sum(hits.values()) + found["computed_tokens"] == found["prompt_tokens"]
    assert found["token_hit_rate"] == pytest.approx(sum(hits.values()) / found["prompt_tokens"])
    assert found["token_hit_rate"] <= found["infinite_hit_rate"] <= 1
    assert (found["stamp_mismatches"], found["audit_errors"], found["audit_findings"]) == (0, 0, [])
    assert found["interrupted"] is False
    assert found["pages_checked"] > 0
    turns = found["by_turn"].values()
    assert sum(turn["requests"] for turn in turns) == found["requests"] == 12
    for name in ("prompt", "device", "host", "store", "computed"):
        whole = {"prompt": "prompt_tokens", "computed": "computed_tokens"}.get(name)
        assert sum(turn[name] for turn in turns) == (found[whole] if whole else hits[name])


@pytest.mark.slow
def test_a_small_device_moves_hits_down_and_not_away(capsys: pytest.CaptureFixture[str]) -> None:
    large = report(capsys, "replay", AGENTS, "--requests", "30", "--quiet")
    small = report(capsys, "replay", AGENTS, "--requests", "30", "--capacity", "900", "--quiet")
    assert small["token_hit_rate"] == large["token_hit_rate"]
    assert small["hit_tokens"]["device"] < large["hit_tokens"]["device"]
    assert sum(row["slots"] for row in small["moved"] if row["direction"] == "to_device") > 0


def test_one_number_of_blocks_means_the_same_as_its_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["replay", MOONCAKE, "--requests", "60", "--quiet", "--capacity"]
    blocks = report(capsys, *arguments, "300")
    size = report(capsys, *arguments, str(300 * 512 * 16) + "B")
    assert blocks["hit_tokens"] == size["hit_tokens"]


@pytest.mark.slow
def test_a_replay_is_the_same_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    """Hits do not depend on how fast copies and stores happen to be."""
    arguments = ["replay", MOONCAKE, "--requests", "60", "--capacity", "300", "--quiet"]
    first, second = (report(capsys, *arguments) for _ in range(2))
    assert first["token_hit_rate"] == second["token_hit_rate"]


def test_pauses_are_kept_so_many_times_faster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", 0, 1000, 3000)
    began_s = time.monotonic()
    found = report(capsys, "replay", trace, "--speedup", "10", "--quiet")
    assert time.monotonic() - began_s >= 0.3
    assert found["hit_tokens"]["device"] == 512 + 1024


def test_without_speedup_nothing_waits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", 0, 10**12)
    assert report(capsys, "replay", trace, "--quiet")["requests"] == 2


def test_the_first_requests_are_those_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", 0, 1, 2, 3)
    found = report(capsys, "replay", trace, "--requests", "2", "--quiet")
    assert found["prompt_tokens"] == 512 + 1024


def test_stated_costs_change_the_estimate_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", 0, 1)
    cheap = report(capsys, "replay", trace, "--quiet", "--prefill-us", "1")
    dear = report(capsys, "replay", trace, "--quiet", "--prefill-us", "1000")
    assert dear["mean_first_token_s"] == pytest.approx(1000 * cheap["mean_first_token_s"])
    assert dear["hit_tokens"] == cheap["hit_tokens"]


def test_a_wrong_byte_is_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(self: PageChecker, operation: str, *_: object) -> None:
        self.mismatches += 1
        raise CorruptPayloadError(f"{operation}: not the bytes that belong there")

    monkeypatch.setattr(PageChecker, "check", check)
    trace = write_trace(tmp_path / "trace.jsonl", 0, 1)
    assert run("replay", trace, "--quiet", "--json", "-") == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["stamp_mismatches"] > 0
    assert "NOT sound" in err


def test_a_broken_invariant_is_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HiCache, "audit", lambda _: ["a slot has two owners"])
    trace = write_trace(tmp_path / "trace.jsonl", 0, 1)
    assert run("replay", trace, "--quiet", "--json", "-") == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["audit_findings"] == ["a slot has two owners"]
    assert "audit: a slot has two owners" in err


def test_nothing_is_left_after_a_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    report(capsys, "replay", MOONCAKE, "--requests", "10", "--quiet")
    assert list(tmp_path.iterdir()) == []


def test_the_reference_of_some_capacities_is_the_published_one(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "replay", AGENTS, "--reference", "--capacity", "5%,20%", "--quiet")
    assert [round(row["token_hit_rate"], 4) for row in found["by_capacity"]] == [0.5533, 0.9229]
    assert round(found["infinite_hit_rate"], 4) == 0.9451
    assert (found["requests"], found["policy"], found["model"]) == (1903, "lru", "reference")


# ---- bench -------------------------------------------------------------------------------------------------------------
SMALL = ["bench", "multi-turn", "--sessions", "3", "--turns", "3", "--user", "70", "--output", "30"]


@pytest.mark.parametrize("components", ["full", "full+swa", "full+mamba", "full+swa+mamba", "swa", "mamba"])
@pytest.mark.parametrize("page_size", ["1", "16", "64"])
def test_the_bench_says_that_it_equals_the_closed_form(
    capsys: pytest.CaptureFixture[str], components: str, page_size: str
) -> None:
    sizes = ["--system", "0", "--components", components, "--page-size", page_size]
    assert run(*SMALL, *sizes, "--json", "-") == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["equals_closed_form"], found["deficit_tokens"]) == (True, 0)
    assert [row["device"] for row in found["rounds"]] == [row["expected"] for row in found["rounds"]]
    assert found["load"]["sessions"] == 3
    assert "equal to the closed form in every round, to the token" in " ".join(err.split())


def test_a_deficit_is_named_and_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*SMALL, "--system", "0", "--set", "tiers.device.capacity=8KiB") == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "tokens short of the closed form: " in told
    assert "unexplained" not in told.rpartition("closed form")[2]


def test_a_riddle_is_exit_code_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that forgets without a trace in its counters is not sound."""
    load = HiCache.match

    def forgetful(self: HiCache, tokens: object, **keywords: Any) -> object:  # Any: passed on
        if self.stats().requests == 5:
            self.reset()
        return load(self, tokens, **keywords)

    monkeypatch.setattr(HiCache, "match", forgetful)
    assert run(*SMALL, "--system", "0") == 1
    assert "unexplained" in " ".join(capsys.readouterr().out.split())


def test_the_bench_takes_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, *SMALL, "--config", "hybrid", "--system", "0")
    assert set(found["by_component"]) == {"full", "swa", "mamba"}
    assert found["equals_closed_form"] is True


def test_another_seed_is_another_load_with_the_same_hits(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (report(capsys, *SMALL, "--seed", seed) for seed in ("1", "2"))
    assert [row["device"] for row in first["rounds"]] == [row["device"] for row in second["rounds"]]


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"hicache {metadata.version('hicache')}\n"


@pytest.mark.parametrize(
    "arguments",
    [["replay", AGENTS, "--requests", "12", "--config", "hybrid", "--quiet"], ["config", "check", "hybrid"]],
    ids=["replay", "config"],
)
def test_a_narrow_terminal_gets_every_figure_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    assert run(*arguments) == 0
    told = capsys.readouterr().out
    assert "│" in told
    assert "…" not in told


@pytest.mark.parametrize("columns", ["20", "200"])
def test_progress_without_a_terminal_is_a_line_for_every_tenth_however_wide_one_would_be(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert run("replay", AGENTS, "--requests", "30") == 0
    err = capsys.readouterr().err
    assert [line.split(" requests")[0] for line in err.splitlines()] == [
        f"replayed {number} of 30" for number in range(3, 31, 3)
    ]
