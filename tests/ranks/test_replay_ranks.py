"""A trace on several ranks: the first one's counts, the checks of all."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

import hicache
from hicache.cli import main
from hicache.config import load_config
from hicache.errors import ConfigError
from hicache.replay import ranks
from hicache.replay.ranks import rank_configs, replay_ranks
from hicache.replay.result import ReplayResult
from hicache.replay.run import replay
from hicache.workload import read_trace

TRACE = str(Path(hicache.__file__).resolve().parents[1] / "traces" / "mooncake_conversation.jsonl.zst")
LARGE = {"tiers.device.capacity": "8MiB", "tiers.host.capacity": "32MiB"}
TWICE = {"tiers.device.capacity": "16MiB", "tiers.host.capacity": "64MiB"}


def counts(result: ReplayResult) -> tuple[int, ...]:
    return (
        result.requests,
        result.prompt_tokens,
        result.device_tokens,
        result.host_tokens,
        result.store_tokens,
    )


def test_two_ranks_of_half_each_reuse_what_one_with_all_of_it_does() -> None:
    trace = read_trace(TRACE, limit=60)
    alone = replay(trace, load_config("cpu", overrides=LARGE, environ={}))
    both = replay_ranks(trace, load_config("cpu", overrides=TWICE, environ={}), 2)
    assert both.stamp_mismatches == 0
    assert both.audit_errors == []
    assert counts(both)[:2] == counts(alone)[:2]
    assert sum(counts(both)[2:]) == sum(counts(alone)[2:]) > 0
    assert both.pages_checked > alone.pages_checked


def test_the_command_says_what_the_ranks_reused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["replay", TRACE, "--requests", "20", "--ranks", "2", "--json", "-", "--quiet"])
    report = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0
    assert (report["requests"], report["stamp_mismatches"], report["audit_errors"]) == (20, 0, 0)


def test_a_stop_ends_all_ranks_after_the_same_request() -> None:
    stop = threading.Event()
    trace = read_trace(TRACE, limit=60)
    config = load_config("cpu", overrides=TWICE, environ={})
    result = replay_ranks(
        trace, config, 2, on_request=lambda so_far: stop.set() if so_far.requests == 3 else None, stop=stop
    )
    assert result.interrupted
    assert result.requests == 3
    assert result.audit_errors == []


def test_a_rank_that_reused_something_else_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    first = ReplayResult("", "", "lru", "rust", requests=2, device_tokens=64)
    other = replace(first, device_tokens=32, audit_errors=["a leak"], stamp_mismatches=1, pages_checked=5)
    together = ranks._together([first, other])
    assert together.audit_errors == [
        "rank 1: a leak",
        "rank 1 reused (2, 32, 0, 0) tokens by tier, rank 0 (2, 64, 0, 0)",
    ]
    assert (together.stamp_mismatches, together.pages_checked) == (1, 5)


def test_a_configuration_of_several_ranks_is_not_multiplied() -> None:
    config = load_config("cpu", overrides={"ranks.tp_size": 2}, environ={})
    with pytest.raises(ConfigError, match="--ranks: the configuration is one of 2 ranks already"):
        rank_configs(config, 2)


def test_ports_and_sockets_are_the_first_rank_s_alone() -> None:
    config = load_config("cpu", overrides={"metrics.port": 9400}, environ={})
    assert [each.metrics.port for each in rank_configs(config, 3)] == [9400, None, None]
    assert [each.ranks.tp_rank for each in rank_configs(config, 3)] == [0, 1, 2]
