"""The prepared GPU script: its checks run here on CPU tensors and find faults that are put in; without a device it says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hicache.testing.device_checks import check_cache, check_path, check_streams
from hicache.transfer.copy_paths import Batch, StagedPath, torch_move
from hicache.transfer.engine import TransferEngine

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_check.py"
CPU = torch.device("cpu")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device: run the script itself")
def test_without_a_device_it_says_so_with_a_code_of_its_own(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path / "out.json"))
    assert done.returncode == 3, done.stderr
    assert "no CUDA device 0 here" in done.stdout
    assert "hicache doctor" in done.stdout
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["machine"]["device"] is None
    assert "checks" not in report


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
