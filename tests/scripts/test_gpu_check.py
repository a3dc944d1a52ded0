"""The prepared GPU script: its checks run here on CPU tensors and find faults that are put in; without a device it says so."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from hicache.testing.device_checks import check_cache, check_path, check_streams
from hicache.transfer.copy_paths import Batch, StagedPath, torch_move
from hicache.transfer.engine import TransferEngine

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_check.py"
CPU = torch.device("cpu")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a device: run the script itself")
def test_without_a_device_it_says_so_with_a_code_of_its_own(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path / "out.json"))
    assert done.returncode == 3, done.stderr
    assert "no CUDA device 0 here" in done.stdout
    assert "hicache doctor" in done.stdout
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["machine"]["device"] is None
    assert (report["checks"], report["is_right"]) == ([], False)


@pytest.mark.slow
def test_its_checks_run_on_the_cpu_and_write_one_json(tmp_path: Path) -> None:
    done = run("--cpu", "--out", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["is_right"]
    names = [check["name"] for check in report["checks"]]
    assert names == ["path torch", "streams", "cache full", "cache full+swa", "cache full+swa+mamba"]
    assert all(check["num_cases"] >= 10 for check in report["checks"])
    assert "speed" not in report, "nothing measured here says anything of a GPU"


# ---- what is wrong is found ------------------------------------------------------------------------------------------
class Wrong(StagedPath):
    """A way with a fault."""

    def __init__(self, fault: str) -> None:
        super().__init__(fault, torch_move, needs_pinned=False)

    def copy(self, batch: Batch) -> None:
        if self.name == "one slot short":
            batch = batch.part(0, len(batch.source_slots) - 1)
        super().copy(batch)
        if self.name == "a neighbour written":
            batch.target[int(set(range(48)).difference(batch.target_slots.tolist()).pop())] = 0
        if self.name == "a byte wrong":
            batch.target[int(batch.target_slots[0]), 0, 0] += 1


@pytest.mark.parametrize("fault", ["one slot short", "a neighbour written", "a byte wrong"])
def test_a_faulty_way_is_found(fault: str) -> None:
    checked = check_path(Wrong(fault), CPU, seed=1)
    assert len(checked.wrong) == 10
    assert "wrong bytes" in checked.wrong[0]


def test_a_layer_that_is_read_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait that does not wait."""
    monkeypatch.setattr(TransferEngine, "wait_layer", lambda *_: True)
    checked = check_streams(CPU, num_rounds=5, seed=2)
    assert any("before it was there" in wrong for wrong in checked.wrong)


def test_wrong_bytes_in_a_cache_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies up that bring nothing."""
    monkeypatch.setattr("hicache.transfer.layers._Layer.run", lambda *_: None)
    checked = check_cache(CPU, "full", num_requests=40, seed=3)
    assert any("pages are wrong" in wrong for wrong in checked.wrong)


# ---- what a first run on a device may meet ---------------------------------------------------------------------------
class HostEvent:
    """An event of a device that does everything at once."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at_s = 0.0

    def record(self) -> None:
        self.at_s = time.perf_counter()

    def synchronize(self) -> None:
        assert self.at_s, "waiting for an event that was not recorded is no wait at all"

    def elapsed_time(self, other: HostEvent) -> float:
        return max(1e-3, (other.at_s - self.at_s) * 1e3)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, for small batches and a device that is this machine's processor."""
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, small in {
        "PAGES": ((4096, 2), (8192, 4)), "TOTALS": (1 << 15, 1 << 16), "MANY_PAGES": 20, "ENGINE_BYTES": 1 << 18,
        "MATRIX": 64, "ROUNDS": 2, "LARGE_BYTES": 1 << 16, "CHECKS_SHARE": 0.0,
    }.items():  # fmt: skip
        monkeypatch.setattr(module, name, small)
    monkeypatch.setattr(torch.cuda, "Event", HostEvent)
    return module


def report_of(path: Path) -> Any:
    return json.loads(path.read_text())


def test_speed_measures_every_target_and_names_what_did_not_fit(script: ModuleType, tmp_path: Path) -> None:
    report = script.Report(tmp_path / "out.json")
    script.speed(CPU, report, 1000.0)
    facts = report_of(tmp_path / "out.json")
    assert (facts["errors"], facts["left_out"]) == ({}, [])
    assert len(facts["speed"]["engine"]) == 2
    directions = [(row["page_bytes"], row["pages"], row["direction"]) for row in facts["speed"]["paths"]]
    assert len(directions) == len(set(directions)) == 2 * 5
    assert script.reached(report.facts).keys() == script.TARGETS.keys()

    late = script.Report(tmp_path / "late.json")
    script.speed(CPU, late, 0.0)
    assert late.facts["speed"] == {"engine": [], "paths": []}
    assert len(late.facts["left_out"]) == 2 + 5
    assert script.reached(late.facts) == {}


def test_a_fault_in_one_part_is_in_the_report_and_the_next_part_runs(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(script, "engine_speed", refuse)
    monkeypatch.setattr(script, "gpu_tests", lambda _: {"code": 0, "output": ""})
    report = script.Report(tmp_path / "out.json")
    script.everything(CPU, report, 1000.0)
    assert not report.close()
    facts = report_of(tmp_path / "out.json")
    assert list(facts["errors"]) == ["engine with pages of 4096", "engine with pages of 8192"]
    assert "no kernel image" in facts["errors"]["engine with pages of 4096"]
    assert len(facts["checks"]) == 5
    assert len(facts["speed"]["paths"]) == 10
    assert facts["reached"].keys() == {"path / memcpy", "host us a batch of 1000 pages"}


def test_what_was_known_is_on_disk_before_the_next_part_begins(script: ModuleType, tmp_path: Path) -> None:
    """The machine may be taken away at any moment."""
    report = script.Report(tmp_path / "out.json")
    report.stage("first", lambda: report.facts.update(known=1))

    def second() -> None:
        assert report_of(tmp_path / "out.json")["known"] == 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        report.stage("second", second)
    assert report_of(tmp_path / "out.json")["is_right"] is False


def test_a_way_that_fails_is_a_row_and_the_others_are_measured(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(StagedPath):
        def copy(self, batch: Batch) -> None:
            raise OSError("error 801")

    ways = [
        Broken("batch", torch_move, needs_pinned=False),
        StagedPath("torch", torch_move, needs_pinned=False),
    ]
    monkeypatch.setattr(script, "paths_of", lambda _: ways)
    rows = list(script.paths_table(CPU, 4096, 2, 1 << 15))
    assert [(row["path"], "error" in row) for row in rows] == [("batch", True), ("torch", False)] * 2


def test_copies_that_fail_are_no_figure(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be the fastest of all."""

    def refuse(*_: object) -> None:
        raise OSError("no way")

    monkeypatch.setattr("hicache.transfer.copy.PageCopier.copy", refuse)
    with pytest.raises(RuntimeError, match="were to end"):
        script.engine_speed(CPU, 4096, 2)


def test_checks_stop_when_their_time_is_over_but_each_makes_a_round(
    script: ModuleType, tmp_path: Path
) -> None:
    report = script.Report(tmp_path / "out.json")
    script.checks(CPU, report, num_rounds=1000, seconds=0.0)
    assert [check["num_cases"] for check in report.facts["checks"][1:]] == [1, 1, 1, 1]
    assert report.close()


@pytest.mark.slow
def test_tests_for_a_device_are_found_and_run_without_the_tools_of_a_developer(script: ModuleType) -> None:
    done = script.gpu_tests(100.0)
    skipped = not torch.cuda.is_available()
    assert done["code"] == 0, done["output"]
    assert ("skipped" if skipped else "passed") in done["output"]
