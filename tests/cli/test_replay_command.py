"""``hicache replay`` and ``hicache bench`` as a user types them."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import hicache
from hicache.cli import main
from hicache.cli import replay as command
from hicache.replay.result import ReplayResult
from hicache.replay.tables import print_replay

ROOT = Path(hicache.__file__).resolve().parents[1]
MOONCAKE = str(ROOT / "traces" / "mooncake_conversation.jsonl.zst")
ISSUE_FIELDS = {
    "requests",
    "prompt_tokens",
    "hit_tokens",
    "computed_tokens",
    "token_hit_rate",
    "infinite_hit_rate",
    "stamp_mismatches",
    "audit_errors",
    "policy",
    "core",
    "wall_s",
}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = 0
    try:
        code = main(list(arguments))
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def line(timestamp: int = 0, length: int = 1024, output: int = 10, ids: object = None) -> str:
    hash_ids = list(range(-(-length // 512))) if ids is None else ids
    record = {
        "timestamp": timestamp,
        "input_length": length,
        "output_length": output,
        "hash_ids": hash_ids,
    }
    return json.dumps(record) + "\n"


def test_json_on_stdout_is_one_object_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "replay", MOONCAKE, "--requests", "40", "--json", "-", "--quiet")
    report = json.loads(out)
    assert code == 0
    assert set(report) >= ISSUE_FIELDS
    assert set(report["hit_tokens"]) == {"device", "host", "store"}
    assert sum(report["hit_tokens"].values()) + report["computed_tokens"] == report["prompt_tokens"]
    assert (report["requests"], report["stamp_mismatches"], report["audit_errors"]) == (40, 0, 0)
    assert "verified" in err


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"pages_checked": 3}, "verified"),
        ({"pages_checked": 3, "interrupted": True}, "verified, as far as it went"),
        ({}, "nothing compared"),
        ({"interrupted": True}, "nothing compared"),
        ({"pages_checked": 3, "stamp_mismatches": 1}, "NOT sound"),
        ({"audit_errors": ["a slot has two owners"], "interrupted": True}, "NOT sound"),
    ],
)
def test_a_run_claims_no_more_than_it_has_compared(changes: dict[str, Any], verdict: str) -> None:
    console = Console(record=True, width=200, file=io.StringIO())
    print_replay(console, ReplayResult("trace", "cpu", "lru", "python", **changes))
    assert console.export_text().splitlines()[-1].startswith(verdict)


@pytest.mark.parametrize("command", ["replay", "bench agent"])
def test_a_run_that_compared_nothing_is_no_success(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    trace = tmp_path / "short.jsonl"
    trace.write_text(line(0, 100, ids=[1]) + line(5, 100, ids=[2]))
    code, out, err = run(capsys, *command.split(), str(trace), "--quiet", "--json", "-", *ROOMY[command])
    assert code == 1
    assert json.loads(out)
    told = err.splitlines()[-1]
    assert told.startswith("hicache: nothing compared: ")
    assert "model.page_size" in told


ROOMY = {"replay": (), "bench agent": ("--device", "1000%", "--host", "1000%")}


TIGHT = ("--set", "tiers.device.capacity=1MiB", "--set", "tiers.host=null", "--set", "tiers.stores=[]")


def test_lost_tokens_are_the_distance_from_a_cache_without_limits(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "replay", MOONCAKE, "--requests", "200", "--json", "-", "--quiet", *TIGHT)
    report = json.loads(out)
    lost = report["lost_tokens"]
    assert code == 0
    assert sum(lost.values()) == report["infinite_hit_tokens"] - sum(report["hit_tokens"].values()) > 0
    assert "lost: what a cache without limits would have hit besides" in err
    assert f"{lost['evicted']:,}" in err


def test_explanations_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "replay", MOONCAKE, "--requests", "20", "--json", "-", "--quiet", "--no-explain"
    )
    assert (code, json.loads(out)["lost_tokens"]) == (0, None)


def test_json_goes_to_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    code, out, _ = run(capsys, "replay", MOONCAKE, "--requests", "10", "--json", str(target), "--quiet")
    assert code == 0
    assert json.loads(target.read_text())["requests"] == 10
    assert "token hit rate" in out


def test_a_json_file_that_cannot_be_written_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = tmp_path / "missing" / "report.json"
    code, _, err = run(capsys, "replay", MOONCAKE, "--requests", "2", "--json", str(target), "--quiet")
    assert code == 2
    assert str(target) in err


@pytest.mark.parametrize("capacity", ["64MiB", "4096", "3%"])
def test_capacity_is_bytes_blocks_or_percent(capsys: pytest.CaptureFixture[str], capacity: str) -> None:
    code, out, _ = run(
        capsys, "replay", MOONCAKE, "--requests", "20", "--capacity", capacity, "--json", "-", "--quiet"
    )
    assert code == 0
    assert json.loads(out)["stamp_mismatches"] == 0
    assert capacity != "64MiB" or json.loads(out)["device_bytes"] == 64 << 20


def test_the_policy_of_the_command_line_wins(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "replay", MOONCAKE, "--requests", "5", "--policy", "lfu", "--json", "-", "--quiet"
    )
    assert (code, json.loads(out)["policy"]) == (0, "lfu")


def test_the_reference_model_reports_the_same_fields(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "replay", MOONCAKE, "--requests", "500", "--reference", "--capacity", "5%,20%", "--json", "-"
    )
    report = json.loads(out)
    assert code == 0
    assert set(report) >= ISSUE_FIELDS
    assert [round(each["capacity_share"], 3) for each in report["by_capacity"]] == [0.05, 0.2]
    assert report["token_hit_rate"] == report["by_capacity"][-1]["token_hit_rate"]


def test_the_reference_model_reports_the_bound_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    common = ("replay", MOONCAKE, "--requests", "500", "--reference", "--capacity", "5%", "--json", "-")
    _, out, _ = run(capsys, *common, "--bound")
    report = json.loads(out)
    assert report["token_hit_rate"] <= report["bound_hit_rate"] <= report["infinite_hit_rate"]
    _, out, _ = run(capsys, *common, "--granularity", "leaf")
    report = json.loads(out)
    assert (report["policy"], report["bound_hit_rate"]) == ("lru-leaf", None)


def test_a_component_without_a_window_is_said_to_be_read_as_a_state(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = run(
        capsys,
        "replay",
        MOONCAKE,
        "--requests",
        "50",
        "--reference",
        "--capacity",
        "5%",
        "--components",
        "full+swa=1",
    )
    assert code == 0
    assert "full: a path; swa: a state of 1 block" in " ".join(out.split())


def test_the_reference_model_takes_hybrid_components(capsys: pytest.CaptureFixture[str]) -> None:
    common = ("replay", MOONCAKE, "--requests", "500", "--reference", "--capacity", "5%", "--json", "-")
    code, out, err = run(capsys, *common, "--components", "full+swa=0.5x2")
    report = json.loads(out)
    assert code == 0
    assert (report["components"], report["marks"], report["spacing_blocks"]) == (
        "full+swa=0.5x2",
        "chosen",
        64,
    )
    assert "spare ones 64 blocks" in " ".join(err.split())
    assert "swa: 0.5 blocks for each block of a window of 2" in " ".join(err.split())
    _, out, _ = run(capsys, *common, "--components", "full+swa=0.5x2", "--marks", "ends")
    assert json.loads(out)["token_hit_rate"] < report["token_hit_rate"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--bound"], "--bound"),
        (["--granularity", "block"], "--granularity"),
        (["--reference", "--granularity", "leaf", "--policy", "lfu"], "--granularity"),
        (["--policy", "best"], "--policy"),
        (["--capacity", "5 parsecs"], "--capacity"),
        (["--capacity", "0"], "--capacity"),
        (["--capacity", "-5%"], "--capacity"),
        (["--capacity", "nan%"], "--capacity"),
        (["--speedup", "0"], "--speedup"),
        (["--speedup", "nan"], "--speedup"),
        (["--prefill-us", "-1"], "--prefill-us"),
        (["--ranks", "0"], "--ranks: found 0; expected 1 to 64"),
        (["--ranks", "1000"], "--ranks: found 1000; expected 1 to 64"),
        (["--config", "no-such-preset"], "no-such-preset"),
        (["--set", "tiers.device.capasity=1MiB"], "capasity"),
        (["--reference", "--capacity", "64MiB"], "--capacity"),
        (["--components", "full+mamba=2"], "--reference"),
        (["--reference", "--components", "full+mamba"], "--components"),
        (["--reference", "--components", "full+mamba=2", "--policy", "lfu"], "--policy"),
        (["--reference", "--components", "full+mamba=2", "--granularity", "leaf"], "--granularity"),
        (["--reference", "--components", "full+mamba=2", "--marks", "some"], "--marks"),
        (["--reference", "--marks", "ends"], "--marks"),
    ],
)
def test_wrong_arguments_are_refused_by_name(
    capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    code, out, err = run(capsys, "replay", MOONCAKE, "--requests", "3", *arguments)
    assert (code, out) == (2, "")
    assert named in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (line() + line(timestamp=-1), "2:"),
        (line(timestamp=5) + line(timestamp=4), "2:"),
        (line() + line(ids=[1]), "2:"),
        (line() + '{"timestamp": 0}\n', "2:"),
        (line() + "not json\n", "2:"),
        (line(length=-3, ids=[]), "1:"),
        ("", "trace"),
    ],
    ids=["negative time", "time steps back", "too few ids", "missing fields", "no json", "length", "empty"],
)
def test_a_bad_trace_is_refused_with_its_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, reason: str
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(text)
    code, out, err = run(capsys, "replay", str(trace), "--quiet")
    assert (code, out) == (2, "")
    assert reason in err
    assert "Traceback" not in err


def test_skip_bad_skips_and_counts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(line() + "nonsense\n" + line(timestamp=7))
    code, out, err = run(capsys, "replay", str(trace), "--skip-bad", "--json", "-", "--quiet")
    report = json.loads(out)
    assert (code, report["requests"], report["skipped_lines"]) == (0, 2, 1)
    assert "line 2" in err


def test_truncated_compression_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl.gz"
    trace.write_bytes(gzip.compress((line() * 50).encode())[:-20])
    code, _, err = run(capsys, "replay", str(trace), "--quiet")
    assert code == 2
    assert "trace.jsonl.gz" in err


def test_multi_turn_says_that_it_equals_the_closed_form(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "bench", "multi-turn", "--sessions", "2", "--turns", "3", "--system", "0")
    assert code == 0
    assert "equal to the closed form in every round" in " ".join(out.split())


@pytest.mark.parametrize("bad", [["--components", "full+full"], ["--page-size", "0"], ["--turns", "0"]])
def test_multi_turn_refuses_sizes_that_make_no_sense(
    capsys: pytest.CaptureFixture[str], bad: list[str]
) -> None:
    code, _, err = run(capsys, "bench", "multi-turn", *bad)
    assert code == 2
    assert "Traceback" not in err


@pytest.mark.slow
def test_ctrl_c_ends_a_replay_in_the_middle_and_leaves_nothing(tmp_path: Path) -> None:
    """The report so far on stdout, exit code 130, no temporary folder, no process."""
    report = tmp_path / "report.json"
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from hicache.cli import main; sys.exit(main(sys.argv[1:]))",
            "replay",
            MOONCAKE,
            "--json",
            str(report),
            "--quiet",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    try:
        deadline_s = time.monotonic() + 200
        while not list(tmp_path.glob("hicache-*")):  # the store is open: it is in the middle of the trace
            assert child.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=250)
    finally:
        child.kill()
    assert child.returncode == 130, err
    assert "interrupted" in out
    assert "Traceback" not in err
    assert json.loads(report.read_text())["interrupted"] is True
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize("options", [[], ["--components", "full+mamba=2"]], ids=["path", "hybrid"])
@pytest.mark.parametrize("whole", [0, 2])
def test_an_interrupted_reference_says_how_far_it_came(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], whole: int
) -> None:
    """It printed what was complete, as if no more had been asked for."""
    asked_for = 40 * whole + whole + 1 + 7  # once a capacity, and once a request
    monkeypatch.setattr(command, "stop_on_interrupt", lambda: contextlib.nullcontext(StopsAfter(asked_for)))
    arguments = ["--reference", "--requests", "40", "--capacity", "5%,10%,20%", "--quiet", *options]
    code, out, err = run(capsys, "replay", MOONCAKE, *arguments)
    assert code == 130
    assert f"hicache: interrupted, {40 * whole + 7} of 120 requests" in err
    assert out.count("%") == whole


class StopsAfter(threading.Event):
    """Is set once it has been asked so many times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self._left = times

    def is_set(self) -> bool:
        self._left -= 1
        return self._left < 0
