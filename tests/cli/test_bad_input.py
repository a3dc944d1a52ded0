"""What a command is given that it cannot use: exit code 2, one block on stderr that says why, no traceback."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

import hicache
from hicache.cli import main

TRACES = Path(hicache.__file__).resolve().parents[1] / "traces"
AGENTS = str(TRACES / "cc_agentic_small.jsonl.zst")


def run(*arguments: str) -> int:
    try:
        return main(list(arguments))
    except SystemExit as stop:
        return int(stop.code or 0)


def record(**changes: Any) -> dict[str, Any]:  # Any: fields of a trace, right or wrong
    fields = {"timestamp": 9, "input_length": 1024, "output_length": 10, "hash_ids": [1, 2]} | changes
    return {name: value for name, value in fields.items() if value is not ...}


def lines(*records: object) -> bytes:
    return b"".join(
        entry if isinstance(entry, bytes) else json.dumps(entry).encode() + b"\n" for entry in records
    )


BAD_LINES: dict[str, tuple[object, str]] = {
    "no timestamp": (record(timestamp=...), "timestamp"),
    "no input length": (record(input_length=...), "input_length"),
    "no output length": (record(output_length=...), "output_length"),
    "no hash ids": (record(hash_ids=...), "hash_ids"),
    "negative timestamp": (record(timestamp=-1), "timestamp"),
    "decreasing timestamp": (record(timestamp=4), "before"),
    "timestamp as text": (record(timestamp="now"), "timestamp"),
    "infinite timestamp": (b'{"timestamp": Infinity, "input_length": 1, "output_length": 1, "hash_ids": [1]}\n', "Infinity"),
    "timestamp is true": (record(timestamp=True), "timestamp"),
    "no tokens": (record(input_length=0, hash_ids=[]), "input_length"),
    "negative length": (record(input_length=-512), "input_length"),
    "fractional length": (record(input_length=10.5), "input_length"),
    "negative output": (record(output_length=-1), "output_length"),
    "absurd length": (record(input_length=10**12), "input_length"),
    "too few ids": (record(hash_ids=[1]), "hash_ids"),
    "too many ids": (record(hash_ids=[1, 2, 3]), "hash_ids"),
    "negative id": (record(hash_ids=[1, -2]), "hash_ids"),
    "id as text": (record(hash_ids=["a", "b"]), "hash_ids"),
    "ids as a number": (record(hash_ids=12), "hash_ids"),
    "an array": ([1, 2, 3], "object"),
    "no JSON": (b"{not json}\n", "JSON"),
    "not UTF-8": (b'{"timestamp": "\xff"}\n', "UTF-8"),
    "nested for ever": (b"[" * 100_000 + b"\n", "JSON"),
    "a number of 5,000 digits": (b'{"timestamp": ' + b"9" * 5000 + b"}\n", "line"),
}  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> Callable[..., str]:
    """``trace(*records)`` writes a trace of a good line, these, and another good one."""

    def write(*records: object, name: str = "trace.jsonl") -> str:
        path = tmp_path / name
        path.write_bytes(lines(record(timestamp=5), *records, record(timestamp=10)))
        return str(path)

    return write


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_refused_with_its_number_and_reason(
    trace: Callable[..., str], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    bad, reason = BAD_LINES[name]
    path = trace(bad)
    assert run("replay", path, "--quiet") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{path}:2: " in err
    assert reason in err or reason == "line"
    assert "Traceback" not in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_skipped_and_counted_when_that_is_asked_for(
    trace: Callable[..., str], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = trace(BAD_LINES[name][0])
    assert run("replay", path, "--quiet", "--skip-bad", "--json", "-") == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert (report["requests"], report["skipped_lines"]) == (2, 1)
    assert "skipped line 2: " in err


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress], ids=["gzip", "zstd"])
@pytest.mark.parametrize("keep", [0.2, 0.6, 0.99])
def test_truncated_compression_is_refused_and_can_be_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], compress: Callable[[bytes], bytes], keep: float
) -> None:
    path = tmp_path / "trace.jsonl.gz"
    whole = b"".join(
        lines(record(timestamp=number, hash_ids=[7 * number, 13 * number + 1])) for number in range(5000)
    )
    packed = compress(whole)
    path.write_bytes(packed[: int(keep * len(packed))])
    assert run("replay", str(path), "--quiet") == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert f"{path}:" in err
    code = run("replay", str(path), "--quiet", "--skip-bad", "--requests", "20", "--json", "-")
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    if code == 0:
        assert json.loads(out)["requests"] <= 20
    else:  # nothing whole stands before the damage
        assert (code, out, len(err.splitlines())) == (2, "", 1)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "missing.jsonl", tmp_path):
        assert run("replay", str(path), "--quiet") == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert f"{path}: cannot be read" in err
        assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "text",
    [b"", b"\n\n\n", b"TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,3\n", b'{"a": 1}\n', b"\x00\x01\x02"],
    ids=["empty", "blank lines", "lengths only", "unknown fields", "bytes"],
)
@pytest.mark.parametrize("skip", [False, True], ids=["strict", "skip bad"])
def test_a_file_that_is_no_trace_is_refused_even_with_skip_bad(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: bytes, skip: bool
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(text)
    assert run("replay", str(path), "--quiet", *(["--skip-bad"] if skip else [])) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert str(path) in err
    assert "Traceback" not in err


# ---- arguments ---------------------------------------------------------------------------------------------------------
REFUSED: dict[str, tuple[list[str], str]] = {
    "an unknown store": (["--set", "tiers.stores.0.kind=tape"], "tiers.stores.0.kind"),
    "a path that cannot be written": (
        ["--set", f"tiers.stores.0.path={AGENTS}/below"],
        "tiers.stores.0.path",
    ),
    "a capacity below one page": (["--set", "tiers.device.capacity=100B"], "tiers.device.capacity"),
    "a capacity below one page on the command line": (["--capacity", "100B"], "tiers.device.capacity"),
    "an unknown key": (["--set", "policy.evictoin=lru"], "did you mean eviction?"),
    "a value of the wrong kind": (["--set", "model.page_size=many"], "model.page_size"),
    "a setting that is no pair": (["--set", "policy.eviction"], "KEY=VALUE"),
    "an unknown preset": (["--config", "gpu"], "gpu"),
    "a file without a name": (["--config", ""], "a preset: cpu, cuda, hybrid, redis"),
    "several capacities without a reference": (["--capacity", "1%,5%"], "only --reference"),
    "a missing file": (["--config", "missing.yaml"], "missing.yaml"),
    "an unknown policy": (["--policy", "random"], "--policy"),
    "a negative speed": (["--speedup", "-3"], "--speedup"),
    "an infinite speed": (["--speedup", "inf"], "--speedup"),
    "no requests": (["--requests", "0"], "--requests"),
    "a word for requests": (["--requests", "all"], "--requests"),
    "a cost below nothing": (["--host-us", "-1"], "--host-us"),
    "an unknown option": (["--fast"], "--fast"),
    "bytes for the reference": (["--reference", "--capacity", "64MiB"], "--capacity"),
    "no block at all for the reference": (["--reference", "--capacity", "0.0001%"], "capacity"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_arguments_are_refused_by_name(capsys: pytest.CaptureFixture[str], name: str) -> None:
    arguments, told = REFUSED[name]
    assert run("replay", AGENTS, "--requests", "2", "--quiet", *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["doctor", "--config", "cpu", "--config", "redis"], "--config"),
        (["replay", AGENTS, "--policy=lru", "--policy", "session"], "--policy"),
        (["bench", "multi-turn", "--turns", "2", "--turns=3"], "--turns"),
        (["store", "stat", "--path", "/a", "--path", "/b"], "--path"),
        (["ctl", "capacity", "1GiB", "--socket", "/a", "--store", "x", "--store", "y"], "--store"),
        (["top", "--socket", "/a", "--socket", "/b"], "--socket"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_an_option_that_holds_one_value_is_not_given_twice(
    capsys: pytest.CaptureFixture[str], command: list[str], option: str
) -> None:
    """The last one counted, and nobody heard of the other."""
    assert run(*command) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{option}: given 2 times; it takes one value, keep one" in err


def test_what_follows_the_end_of_options_is_no_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("replay", "--quiet", "--policy", "lru", "--", "--policy") == 2
    assert "--policy: cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option",
    ["--config cpu", "--set policy.eviction=lru", "--speedup 2", "--ranks 1", "--host-us 4", "--no-explain"],
)
def test_the_reference_refuses_what_it_would_not_look_at(
    capsys: pytest.CaptureFixture[str], option: str
) -> None:
    assert run("replay", AGENTS, "--requests", "2", "--reference", *option.split()) == 2
    assert "belongs to a verified replay; leave it out" in capsys.readouterr().err


def test_several_mistakes_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["policy.eviction=lur", "model.page_size=0", "tiers.host.capacity=3XB"]
    arguments = [part for setting in settings for part in ("--set", setting)]
    assert run("replay", AGENTS, "--requests", "2", "--quiet", *arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("hicache: refused, 3 problems:\n")
    assert len(err.splitlines()) == 4


@pytest.mark.parametrize(
    "arguments",
    [
        ["--sessions", "0"],
        ["--turns", "0"],
        ["--user", "0"],
        ["--system", "-1"],
        ["--output", "-1"],
        ["--page-size", "65537"],
        ["--components", ""],
        ["--components", "full+gru"],
        ["--components", "full+full"],
        ["--turns", "1000000000"],
        ["--config", "no-such-preset"],
        ["--set", "policy.write=never"],
    ],
    ids=" ".join,
)
def test_a_load_that_makes_no_sense_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert run("bench", "multi-turn", *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("hicache: refused, ")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments", [["replay"], ["bench", "one-turn"], ["replai"], ["bench", "multi-turn", "x"]]
)
def test_a_command_line_that_is_none_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Usage" in err
