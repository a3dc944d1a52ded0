"""Explained replays: what was lost adds up, and explaining changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hicache
from hicache.cli import main
from hicache.config import load_config
from hicache.radix.core import core_kind
from hicache.replay.run import replay
from hicache.workload import read_trace

TRACES = Path(hicache.__file__).resolve().parents[1] / "traces"
MOONCAKE = TRACES / "mooncake_conversation.jsonl.zst"
AGENTS = TRACES / "cc_agentic_small.jsonl.zst"
TIGHT = {
    "cpu": {"tiers.device.capacity": "1MiB", "tiers.host.capacity": "2MiB", "tiers.stores": []},
    "hybrid": {"tiers.device.capacity": "4MiB", "tiers.host.capacity": "4MiB", "tiers.stores": []},
}
LAYOUTS: dict[str, dict[str, object]] = {
    "L1": {"tiers.host": None, "tiers.stores": []},
    "L1 and L2": {},
    "a store that evicts": {"tiers.stores": [{"kind": "memory", "capacity": "2MiB"}]},
    "a stack": {
        "tiers.stores": [
            {"kind": "memory", "name": "near", "capacity": "1MiB"},
            {"kind": "disk", "name": "far", "path": "auto", "capacity": "2MiB", "min_free": 1},
        ]
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("trace_file", "num_requests"), [(MOONCAKE, 150), (AGENTS, 40)], ids=["chats", "agents"]
)
@pytest.mark.parametrize("preset", TIGHT)
def test_lost_tokens_add_up_whatever_tiers_there_are(
    preset: str, trace_file: Path, num_requests: int, layout: str
) -> None:
    trace = read_trace(trace_file, limit=num_requests)
    overrides: dict[str, object] = {**TIGHT[preset], **LAYOUTS[layout], "explain.enabled": True}
    if layout == "L1":
        del overrides["tiers.host.capacity"]
    config = load_config(preset, overrides=overrides, environ={})
    result = replay(trace, config)
    reachable = trace.infinite_hit_tokens(config.model.page_size, last_token_written=False)
    assert result.lost_tokens is not None
    assert sum(result.lost_tokens.values()) == reachable - result.hit_tokens > 0
    assert (result.stamp_mismatches, result.audit_errors) == (0, [])


@pytest.mark.parametrize("core", ["python", "rust"])
@pytest.mark.parametrize("preset", TIGHT)
def test_lost_tokens_add_up_to_the_distance_from_a_cache_without_limits(preset: str, core: str) -> None:
    trace = read_trace(MOONCAKE, limit=200)
    config = load_config(preset, overrides={**TIGHT[preset], "explain.enabled": True}, environ={})
    if core_kind("auto", config.model.specs())[0] != "rust" and core == "rust":
        pytest.skip("the Rust core is not built here")
    result = replay(trace, config, core=core)
    reachable = trace.infinite_hit_tokens(config.model.page_size, last_token_written=False)
    assert result.lost_tokens is not None
    assert result.lost_tokens["evicted"] > 0
    assert sum(result.lost_tokens.values()) == reachable - result.hit_tokens > 0
    assert "forgotten" not in result.lost_tokens


def test_explaining_changes_nothing_that_a_replay_reports() -> None:
    trace = read_trace(MOONCAKE, limit=100)
    results = []
    for enabled in (False, True):
        # One tier: what two of them do depends on when copies end.
        overrides: dict[str, object] = {
            "tiers.device.capacity": "1MiB",
            "tiers.host": None,
            "tiers.stores": [],
        }
        overrides["explain.enabled"] = enabled
        results.append(replay(trace, load_config("cpu", overrides=overrides, environ={})))
    reports = [dict(result.as_json()) for result in results]
    for report in reports:
        for name in ("wall_s", "lost_tokens"):
            del report[name]
    assert reports[0] == reports[1]


def test_a_ledger_that_is_too_small_says_forgotten_and_the_sum_still_holds() -> None:
    trace = read_trace(MOONCAKE, limit=150)
    overrides = {**TIGHT["cpu"], "explain.enabled": True, "explain.ledger_pages": 50}
    config = load_config("cpu", overrides=overrides, environ={})
    result = replay(trace, config)
    reachable = trace.infinite_hit_tokens(config.model.page_size, last_token_written=False)
    assert result.lost_tokens is not None
    assert result.lost_tokens["forgotten"] > 0
    assert sum(result.lost_tokens.values()) == reachable - result.hit_tokens


def test_the_command_explains_one_request(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["explain", str(MOONCAKE), "--request", "40", "--json", "-"])
    assert ended.value.code == 0
    report = json.loads(capsys.readouterr().out)
    assert report["request"] == 40
    at = report["reused_tokens"]
    for lost in report["lost"]:
        assert lost["begin"] == at
        at = lost["end"]
    assert at == report["reusable_tokens"]
    known = [lost["begin"] for lost in report["lost"] if lost["cause"] == "new"]
    assert report["diverged_at"] // 512 * 512 == (known or [report["reusable_tokens"]])[0]


def test_the_command_refuses_a_request_that_the_trace_has_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(MOONCAKE), "--request", "99999999"]) == 2
    assert "the trace has requests 1 to" in capsys.readouterr().err
