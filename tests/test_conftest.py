"""The promises of tests/conftest.py, kept in a pytest run of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]


def run_pytest(folder: Path, source: str, *arguments: str, **variables: str) -> str:
    """Output of pytest over one file of tests, under our conftest and settings, as from a shell's background."""
    shutil.copy(ROOT / "tests/conftest.py", folder / "conftest.py")
    (folder / "test_inner.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder)]
    command += ["-p", "no:cacheprovider", *arguments, str(folder / "test_inner.py")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"HICACHE_SKIP_REPORT": str(folder / "skips"), "HICACHE_TEST_SEED": "0", **variables}
    in_background = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh"]
    run = subprocess.run(
        [*in_background, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    return run.stdout + run.stderr


def test_a_test_that_leaves_a_thread_running_fails(tmp_path: Path) -> None:
    source = """
import threading

def test_leaves_a_thread():
    threading.Thread(target=threading.Event().wait, args=(8.0,), name="stray").start()
"""
    assert "the test left threads running: stray" in run_pytest(tmp_path, source)


def test_a_thread_that_is_ending_is_waited_for(tmp_path: Path) -> None:
    source = """
import threading

def test_closes_its_thread():
    threading.Thread(target=threading.Event().wait, args=(0.2,)).start()
"""
    assert "1 passed" in run_pytest(tmp_path, source)


def test_a_test_that_leaves_a_store_s_folder_fails(tmp_path: Path) -> None:
    source = """
import tempfile

def test_leaves_a_folder():
    tempfile.mkdtemp(prefix="hicache-")
"""
    assert "the test left folders behind: hicache-" in run_pytest(tmp_path, source)


@pytest.mark.parametrize("workers", ["0", "1"])
def test_what_terminals_shells_and_users_set_reaches_no_test(tmp_path: Path, workers: str) -> None:
    source = """
import os, signal, subprocess, sys, tempfile
from pathlib import Path

def test_is_alone(tmp_path_factory):
    assert {"COLUMNS", "FORCE_COLOR", "HICACHE__MODEL__PAGE_SIZE"}.isdisjoint(os.environ)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    show = "import tempfile; print(tempfile.gettempdir())"
    told = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True).stdout
    for folder in (tempfile.gettempdir(), told.strip()):
        assert Path(folder).is_relative_to(tmp_path_factory.getbasetemp())
"""
    variables = {"COLUMNS": "40", "FORCE_COLOR": "1", "HICACHE__MODEL__PAGE_SIZE": "7"}
    assert "1 passed" in run_pytest(tmp_path, source, "-n", workers, "--color=no", **variables)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_each_skip_is_reported_with_its_markers_and_reason(tmp_path: Path, workers: str) -> None:
    source = """
import pytest

@pytest.mark.slow
@pytest.mark.skip(reason="no such disk")
def test_skipped(): ...

@pytest.mark.xfail(reason="known", strict=False)
def test_expected_to_fail():
    raise AssertionError
"""
    run_pytest(tmp_path, source, "-n", workers)
    lines = set((tmp_path / "skips").read_text().splitlines())
    assert lines == {"test_inner.py::test_skipped\tskip,slow\tSkipped: no such disk"}


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_module_that_skips_itself_is_reported(tmp_path: Path, workers: str) -> None:
    source = """
import pytest
pytest.importorskip("no_such_module_anywhere")
"""
    run_pytest(tmp_path, source, "-n", workers)
    lines = set((tmp_path / "skips").read_text().splitlines())
    assert [line.split("\t")[:2] for line in lines] == [["test_inner.py", ""]]


def test_the_seed_given_is_the_one_that_random_tests_use(tmp_path: Path) -> None:
    source = """
from hypothesis import core

def test_seeds(seeded_random):
    raise AssertionError(core.global_force_seed)
"""
    output = run_pytest(tmp_path, source, "--hypothesis-seed=17")
    assert "AssertionError: 17" in output
    assert "seeded_random: '0:test_inner.py::test_seeds'" in output


def test_an_unknown_marker_is_refused(tmp_path: Path) -> None:
    source = """
import pytest

@pytest.mark.gpus
def test_marked(): ...
"""
    assert "'gpus' not found in `markers`" in run_pytest(tmp_path, source)
