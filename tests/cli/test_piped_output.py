"""What goes to a pipe or a file is whole and can be searched: a row is a line, and names are as they were given."""

from __future__ import annotations

from pathlib import Path

import pytest

import hicache
from hicache.cli import main
from hicache.testing.disk_folder import fill_folder
from hicache.testing.store_pages import make_chain

AGENTS = str(Path(hicache.__file__).resolve().parents[1] / "traces" / "cc_agentic_small.jsonl.zst")
NAME = "[red]a [b] :bug: " + "long" * 40
"""Markup, an emoji's name, and more than a terminal is wide."""


@pytest.fixture(autouse=True)
def narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a shell around a pipe says of its own width."""
    monkeypatch.setenv("COLUMNS", "40")


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> list[str]:
    try:
        found = main(list(arguments))
    except SystemExit as stop:
        found = int(stop.code or 0)
    out = capsys.readouterr().out
    assert found == code
    assert "…" not in out
    return out.splitlines()


def test_each_key_of_a_configuration_is_one_line_with_its_whole_value(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file, folder = tmp_path / f"{NAME}.yaml", tmp_path / NAME
    preset = Path(AGENTS).parents[1] / "config" / "presets" / "cpu.yaml"
    file.write_text(preset.read_text().replace("path: auto", f"path: {str(folder)!r}"))
    lines = told(capsys, "config", "show", str(file))
    assert lines[0] == f"effective configuration of {file}"
    (line,) = (line for line in lines if "tiers.stores.0.path" in line)
    assert str(folder) in line
    assert f"file {file}:" in line
    assert told(capsys, "config", "check", str(file))[0] == f"{file}: OK"


@pytest.mark.parametrize(
    "command", ["config show", "config check", "store stat --config", "store scrub --config"]
)
def test_of_what_is_refused_nothing_is_shown(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert told(capsys, *command.split(), "missing.yaml", code=2) == []


def test_a_folder_of_pages_is_named_whole(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / NAME
    fill_folder(folder, make_chain(1, 3))
    for command in ("stat", "scrub"):
        lines = told(capsys, "store", command, "--path", str(folder))
        assert lines[0] == f"store {folder}"
        (row,) = (line for line in lines if line.startswith("│ pages"))
        assert row.split("│")[2].strip() == "3"


@pytest.mark.parametrize(
    ("command", "whole", "end"),
    [
        ("replay", "time to first token, estimated from the stated costs: ", "without a cache"),
        ("explain --request 12", "prompt tokens reused (", "found)"),
        ("bench agent --device 1000% --policies lru", "Agents: ", ".zst"),
    ],
    ids=["replay", "explain", "bench agent"],
)
def test_a_trace_is_named_as_it_was_and_sentences_are_not_broken(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, whole: str, end: str
) -> None:
    trace = tmp_path / f"{NAME}.jsonl.zst"
    trace.symlink_to(AGENTS)
    options = [] if "explain" in command else ["--requests", "12", "--quiet"]
    lines = told(capsys, *command.split(), str(trace), *options)
    (line,) = (line for line in lines if whole in line)
    assert command == "replay" or str(trace) in line
    assert line.rstrip().endswith(end)


def test_a_multi_turn_load_tells_what_it_expected_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, "bench", "multi-turn", "--sessions", "2", "--turns", "2", "--quiet")
    assert sum(line.startswith("expected: ") and line.endswith("is never computed") for line in lines) == 1
    assert "Reused payload by turn, component and tier, in tokens" in map(str.strip, lines)
