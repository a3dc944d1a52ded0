"""The commands in a process of their own: what goes to which stream, and how signals end them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

import hicache

ROOT = Path(hicache.__file__).resolve().parents[1]
REQUESTS = 5000
"""More than are served before a signal comes; a tenth of them is told."""
MOONCAKE = str(ROOT / "traces" / "mooncake_conversation.jsonl.zst")
COMMAND = [sys.executable, "-c", "import sys; from hicache.cli import main; sys.exit(main(sys.argv[1:]))"]
TELLS_CAPACITIES = """
import sys
from hicache.cli import main
from hicache.replay import reference

def tell(*arguments, _replay=reference.reference_replay, **settings):
    print("a capacity begins", file=sys.stderr, flush=True)
    return _replay(*arguments, **settings)

reference.reference_replay = tell
sys.exit(main(sys.argv[1:]))
"""
PATIENCE_S = 250.0


def environment(folder: Path) -> dict[str, str]:
    """Temporary folders below ``folder``, and our checkout first."""
    return {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "COLUMNS": "150"}


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment(folder),
        timeout=PATIENCE_S,
        check=False,
    )


@contextmanager
def running(
    folder: Path, *arguments: str, command: Sequence[str] = COMMAND
) -> Iterator[subprocess.Popen[str]]:
    """A command that is killed, with all it started, when the test is over."""
    child = subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment(folder),
        start_new_session=True,
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def until_told(child: subprocess.Popen[str], words: str) -> None:
    """A line of its stderr has these words; what it says later is for ``communicate``."""
    assert child.stderr is not None
    told = []
    for line in child.stderr:
        told.append(line)
        if words in line:
            return
    raise AssertionError(f"it ended with {child.wait(PATIENCE_S)} and has only said {told}")


def until_replaying(child: subprocess.Popen[str]) -> None:
    """Some requests are through."""
    until_told(child, "replayed ")


def members(group: int) -> list[int]:
    """Live processes of a process group."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, owner = status.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(owner) == group and state != "Z":
            found.append(int(status.parent.name))
    return found


def test_stdout_is_one_object_while_progress_and_tables_go_to_stderr(tmp_path: Path) -> None:
    done = run(tmp_path, "replay", MOONCAKE, "--requests", "30", "--json", "-")
    assert done.returncode == 0
    report = json.loads(done.stdout)  # the whole of it
    assert report["requests"] == 30
    assert "Where prompt tokens came from" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_is_one_block_without_a_traceback(tmp_path: Path) -> None:
    done = run(tmp_path, "replay", MOONCAKE, "--config", "missing.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("hicache: refused, 1 problem:\n  missing.yaml: ")
    assert len(done.stderr.splitlines()) == 2


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("config show cpu", 0),
        ("config show cpu --yaml", 0),
        ("config check cpu", 0),
        ("store stat --path .", 2),
    ],
)
def test_a_reader_that_leaves_changes_no_exit_code(tmp_path: Path, command: str, code: int) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = run_alone(tmp_path, command, writing)
    os.close(writing)
    assert done.returncode == code
    assert "Error" not in done.stderr
    assert "Exception" not in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("command", ["config check cpu", "replay --help"])
def test_a_terminal_that_lacks_characters_gets_the_report_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, encoding: str
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    target = tmp_path / "out"
    with target.open("w") as out:
        done = run_alone(tmp_path, command, out.fileno(), columns=40)
    assert (done.returncode, done.stderr) == (0, "")
    told = target.read_text(encoding=encoding)
    assert "cpu: OK" in told or "?" in told  # a help is cut where its column is too narrow


def test_a_full_device_is_told_once(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = run_alone(tmp_path, "config show cpu", full.fileno())
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "cannot write the report: No space left on device" in done.stderr


def test_a_refusal_that_cannot_be_told_has_its_exit_code_all_the_same(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, "config", "check", "missing.yaml"],
            stdout=subprocess.PIPE,
            stderr=full,
            cwd=tmp_path,
            env=environment(tmp_path),
            timeout=PATIENCE_S,
            check=False,
        )
    assert (done.returncode, done.stdout) == (2, b"")


def test_a_closed_stdout_is_no_error(tmp_path: Path) -> None:
    words = f"replay {MOONCAKE} --requests 12 --quiet --json -"
    command = [*COMMAND[:2], "import sys; from hicache.cli import main; sys.exit(main())", *words.split()]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command],
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment(tmp_path),
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0
    assert "Error" not in done.stderr


def run_alone(
    folder: Path, command: str, stdout: int, *, columns: int = 150
) -> subprocess.CompletedProcess[str]:
    """A command as its script runs it, with a stream of our own."""
    return subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from hicache.cli import main; sys.exit(main())",
            *command.split(),
        ],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment(folder) | {"COLUMNS": str(columns)},
        timeout=PATIENCE_S,
        check=False,
    )


def test_the_closed_form_is_met_and_said_so(tmp_path: Path) -> None:
    done = run(tmp_path, "bench", "multi-turn", "--sessions", "2", "--turns", "3", "--json", "-")
    assert done.returncode == 0
    assert json.loads(done.stdout)["equals_closed_form"] is True
    assert "equal to the closed form in every round, to the token" in " ".join(done.stderr.split())


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_in_mid_replay_ends_it_with_the_report(tmp_path: Path, signum: signal.Signals) -> None:
    """The figures so far, code 130, no folder and no process left; 1.2 s after it on a machine at rest."""
    with running(tmp_path, "replay", MOONCAKE, "--requests", str(REQUESTS), "--json", "-") as child:
        until_replaying(child)
        child.send_signal(signum)
        out, err = child.communicate(timeout=PATIENCE_S)
        assert members(child.pid) == []
    assert child.returncode == 130, err
    report = json.loads(out)
    assert (report["interrupted"], report["stamp_mismatches"], report["audit_errors"]) == (True, 0, 0)
    assert REQUESTS / 10 <= report["requests"] < REQUESTS
    assert sum(report["hit_tokens"].values()) + report["computed_tokens"] == report["prompt_tokens"]
    assert "interrupted: these are the figures so far" in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_signal_during_a_pause_of_the_trace_ends_it_at_once(tmp_path: Path) -> None:
    """With --speedup the replay mostly waits; it must not wait on after Ctrl-C."""
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [1, 2]}
    trace.write_text(json.dumps(line) + "\n" + json.dumps({**line, "timestamp": 3_600_000}) + "\n")
    with running(tmp_path, "replay", str(trace), "--speedup", "1") as child:
        until_replaying(child)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=PATIENCE_S)  # the pause is an hour long
    assert (child.returncode, "Traceback" in err) == (130, False)
    assert "interrupted: these are the figures so far" in out
    assert [path.name for path in tmp_path.iterdir()] == ["trace.jsonl"]


@pytest.mark.slow
def test_impatience_ends_it_too_and_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C again and again, while it serves, cleans up and exits: it ends, and nothing is left of it."""
    with running(tmp_path, "replay", MOONCAKE, "--requests", str(REQUESTS)) as child:
        until_replaying(child)
        deadline_s = time.monotonic() + PATIENCE_S
        while child.poll() is None:
            assert time.monotonic() < deadline_s
            child.send_signal(signal.SIGINT)
            time.sleep(0.1)
        assert members(child.pid) == []
    assert child.returncode in (1, 130, -signal.SIGINT)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_reference_can_be_interrupted(tmp_path: Path) -> None:
    many = ",".join(["5%"] * 2000)  # for half an hour
    command = [sys.executable, "-c", TELLS_CAPACITIES]
    with running(tmp_path, "replay", MOONCAKE, "--reference", "--capacity", many, command=command) as child:
        until_told(child, "a capacity begins")
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 130
    assert "Traceback" not in err
