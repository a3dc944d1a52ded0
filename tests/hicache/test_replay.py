"""Verified and reference replay of the bundled traces."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path

import pytest
from rich.console import Console

import hicache
from hicache.cache import HiCache
from hicache.config import load_config
from hicache.replay.capacity import parse_capacity
from hicache.replay.reference import block_sequences, reference_replay
from hicache.replay.result import ReplayResult
from hicache.replay.run import replay
from hicache.replay.tables import print_replay
from hicache.workload import Trace, read_trace

TRACES = Path(hicache.__file__).resolve().parents[1] / "traces"
MOONCAKE = TRACES / "mooncake_conversation.jsonl.zst"
AGENTS = TRACES / "cc_agentic_small.jsonl.zst"


@pytest.fixture(scope="module")
def agents() -> Trace:
    return read_trace(AGENTS)


def check(result: ReplayResult, trace: Trace) -> None:
    assert result.stamp_mismatches == 0
    assert result.audit_errors == []
    assert result.pages_checked > 0
    assert result.requests == trace.num_requests
    assert result.prompt_tokens == trace.prompt_tokens
    assert result.hit_tokens + result.computed_tokens == result.prompt_tokens
    assert sum(counts.tokens.prompt for counts in result.turns.values()) == result.prompt_tokens


@pytest.mark.parametrize("preset", ["cpu", "hybrid"])
def test_every_reused_byte_is_the_right_one(preset: str) -> None:
    trace = read_trace(MOONCAKE, limit=150)
    result = replay(trace, load_config(preset, environ={}))
    check(result, trace)
    assert result.refused_requests == 0


@pytest.mark.parametrize("names", [("full", "local"), ("local",)])
def test_a_rule_of_the_user_s_own_is_replayed_and_checked(names: tuple[str, ...]) -> None:
    components = {
        "full": {"rule": "path", "bytes_per_token": 16, "layers": 2},
        "local": {"rule": "hicache.testing.rules.ChunkedRule", "bytes_per_token": 16, "layers": 2},
    }
    config = {
        "model": {"name": "x", "page_size": 64, "components": {name: components[name] for name in names}},
        "tiers": {"device": {"kind": "cpu", "capacity": "8MiB"}, "host": {"capacity": "16MiB"}},
    }
    trace = read_trace(MOONCAKE, limit=40)
    result = replay(trace, load_config(config, environ={}))
    check(result, trace)


def test_a_report_has_a_row_for_each_store() -> None:
    overrides = {
        "tiers.stores": [{"kind": "memory", "name": "near"}, {"kind": "memory", "name": "far"}],
        "tiers.stack": {"write": "all"},
    }
    result = replay(read_trace(MOONCAKE, limit=40), load_config("cpu", overrides=overrides, environ={}))
    assert result.stats is not None
    assert result.stats.store is not None
    near, far = result.stats.store.stores
    assert near.pages_written == far.pages_written > 0

    report = json.loads(json.dumps(result.as_json()))
    assert [store["name"] for store in report["store"]["stores"]] == ["near", "far"]
    assert report["store"]["stores"][0]["breaker"]["state"] == "closed"

    text = io.StringIO()
    print_replay(Console(file=text, width=120), result)
    rows = [line.split("│") for line in text.getvalue().splitlines() if line.startswith("│")]
    written = {row[1].strip(): row[4].strip() for row in rows if row[1].strip() in {"near", "far", "stacked"}}
    assert written == dict.fromkeys(["near", "far", "stacked"], f"{near.pages_written:,}")


def test_a_small_device_pool_serves_from_all_three_tiers() -> None:
    """Almost the hits of a cache without limits, wherever they come from."""
    trace = read_trace(MOONCAKE, limit=400)
    overrides = {
        "tiers.device.capacity": "3MiB",
        "tiers.host.capacity": "32MiB",
        "policy.watermarks.device": {"low": 0, "high": 0},
    }
    result = replay(trace, load_config("cpu", overrides=overrides, environ={}))
    check(result, trace)
    # Under a backlog L2 may give up a page before L3 has it; how many depends on the machine.
    assert result.hit_tokens >= 0.97 * trace.infinite_hit_tokens(512, last_token_written=False)
    assert min(result.device_tokens, result.host_tokens, result.store_tokens) > 0


def test_a_prompt_larger_than_the_device_pool_is_served_as_far_as_it_goes() -> None:
    trace = read_trace(MOONCAKE, limit=60)
    overrides = {"tiers.device.capacity": "128KiB", "tiers.host.capacity": "1MiB"}
    result = replay(trace, load_config("cpu", overrides=overrides, environ={}))
    check(result, trace)
    assert result.refused_requests > 0


def test_a_replay_that_is_stopped_reports_what_it_did_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    stop = threading.Event()

    def after(result: ReplayResult) -> None:
        if result.requests == 20:
            stop.set()

    result = replay(
        read_trace(MOONCAKE, limit=100), load_config("cpu", environ={}), on_request=after, stop=stop
    )
    assert result.interrupted
    assert result.requests == 20
    assert result.audit_errors == []
    assert list(tmp_path.iterdir()) == []


def test_a_keyboard_interrupt_ends_a_replay_in_good_order() -> None:
    def interrupt(result: ReplayResult) -> None:
        if result.requests == 5:
            raise KeyboardInterrupt

    result = replay(read_trace(MOONCAKE, limit=20), load_config("cpu", environ={}), on_request=interrupt)
    assert result.interrupted
    assert result.requests == 5


def test_wrong_bytes_do_not_go_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: one page changed behind the cache's back is one mismatch or more."""
    trace = read_trace(MOONCAKE, limit=40)
    caches: list[HiCache] = []
    made = HiCache.__init__

    def remember(self: HiCache, *args: object, **kwargs: object) -> None:
        made(self, *args, **kwargs)  # type: ignore[arg-type]  # passed on as they came
        caches.append(self)

    monkeypatch.setattr(HiCache, "__init__", remember)

    def spoil(result: ReplayResult) -> None:
        if result.requests == 20:
            caches[0].device["full"][0, :, 0] ^= 1

    result = replay(trace, load_config("cpu", environ={}), on_request=spoil)
    assert result.stamp_mismatches > 0


@pytest.mark.parametrize(
    ("share", "rate"),
    [("1%", 0.0891), ("2%", 0.2126), ("5%", 0.5533), ("10%", 0.8297), ("20%", 0.9229), ("50%", 0.9431)],
)
def test_lru_equals_the_reference_on_agents(agents: Trace, share: str, rate: float) -> None:
    result = reference_replay(agents, parse_capacity(share).in_blocks(agents))
    assert round(result.token_hit_rate, 4) == rate
    assert round(result.infinite_hit_rate, 4) == 0.9451
    assert result.audit_errors == ()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_lru_equals_the_reference_on_chat() -> None:
    trace = read_trace(MOONCAKE)
    sequences = block_sequences(trace)
    wanted = {"1%": 0.0532, "2%": 0.0783, "5%": 0.1977, "10%": 0.2818, "20%": 0.3505, "50%": 0.37}
    found = {
        share: round(
            reference_replay(
                trace, parse_capacity(share).in_blocks(trace), sequences=sequences
            ).token_hit_rate,
            4,
        )
        for share in wanted
    }
    assert found == wanted
    assert round(trace.infinite_hit_rate, 4) == 0.3734
