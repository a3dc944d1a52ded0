"""The cache as a whole: building, asking, bad input, counters, reset, close."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import yaml

from hicache.cache import HiCache
from hicache.clock import ManualClock
from hicache.config import load_config
from hicache.errors import ConfigError, ProtocolError, TierTimeoutError, TierUnavailableError
from hicache.radix.core import core_kind
from hicache.testing.scripted_store import MISS, OK, Raise, ScriptedStore
from hicache.types import Tier, TierTokens

if TYPE_CHECKING:
    from tests.hicache.conftest import MakeRig, Rig, Tokens

T = Callable[..., "Tokens"]
EVERY = "full+swa+mamba"


@pytest.fixture
def aside() -> Iterator[Callable[..., Future[Any]]]:  # Any: whatever the call gives
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit


def our_threads() -> set[str]:
    """All but the one that waits for the process's end, to close what vLLM left; a test before may have started it."""
    names = {thread.name for thread in threading.enumerate() if thread.name.startswith("hicache-")}
    return names - {"hicache-exit"}


# ---- building ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("preset", ["cpu", "hybrid"])
def test_a_preset_serves_a_request(preset: str, t: T) -> None:
    with HiCache.from_yaml(preset, environ={}) as cache:
        tokens = t(2 * cache.page_size)
        with cache.match(tokens, session="chat") as lease:
            lease.load()
            lease.reserve(len(tokens))
            lease.release(tokens)
        assert cache.probe([*tokens, 1]).boundary == len(tokens)
        assert cache.audit() == []
        assert cache.stats().core == core_kind()[0]
    assert our_threads() == set()


def test_a_policy_of_the_users_own_is_named_in_the_configuration(t: T) -> None:
    path = "hicache.testing.orderings.UsesOverAge"
    with HiCache.from_yaml("cpu", environ={}, overrides={"policy.eviction": path}) as cache:
        tokens = t(2 * cache.page_size)
        with cache.match(tokens) as lease:
            lease.reserve(len(tokens))
            lease.release(tokens)
        assert cache.config.policy.eviction == path
        assert cache.stats().core == core_kind()[0]
        assert cache.audit() == []


def test_what_is_no_configuration_is_refused_with_what_makes_one() -> None:
    with pytest.raises(
        ConfigError, match=r"a dict is no HiCacheConfig; use HiCache\.from_yaml or load_config"
    ):
        HiCache({"model": {}})  # type: ignore[arg-type]


def test_a_policy_that_cannot_be_loaded_is_refused_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"policy\.eviction: cannot load 'nowhere\.Policy'"):
        HiCache.from_yaml("cpu", environ={}, overrides={"policy.eviction": "nowhere.Policy"})
    assert our_threads() == set()


def test_a_yaml_file_with_overrides_and_environment_is_what_runs(tmp_path: Path) -> None:
    path = tmp_path / "hicache.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "model": {
                    "name": "m",
                    "page_size": 4,
                    "components": {"full": {"rule": "path", "bytes_per_token": 16}},
                },
                "tiers": {"device": {"kind": "cpu", "capacity": "64KiB"}},
            }
        )
    )
    environ = {"HICACHE__MODEL__PAGE_SIZE": "8"}
    with HiCache.from_yaml(path, overrides={"policy.eviction": "fifo"}, environ=environ) as cache:
        assert (cache.page_size, cache.config.policy.eviction) == (8, "fifo")
        assert cache.device.num_slots("full") == 512


def test_all_that_is_wrong_is_refused_at_once() -> None:
    overrides = {"policy.eviction": "lur", "model.page_size": 0, "tiers.device.capacity": "12XB"}
    with pytest.raises(ConfigError) as caught:
        HiCache.from_yaml("cpu", overrides=overrides, environ={})
    assert len(caught.value.problems) == 3


def test_a_store_that_does_not_open_is_told_and_leaves_nothing_behind(make_rig: MakeRig) -> None:
    class Refusing(ScriptedStore):
        async def open(self) -> None:
            raise TierUnavailableError("no such server")

    with pytest.raises(TierUnavailableError, match="no such server"):
        make_rig(host=8, store=Refusing())
    assert our_threads() == set()


def test_a_store_is_opened_once(make_rig: MakeRig) -> None:
    rig = make_rig(host=8, store="scripted")
    rig.cache.close()
    operations = [call.operation for call in rig.store.calls]
    assert (operations.count("open"), operations.count("close")) == (1, 1)


def test_only_models_with_windows_or_states_are_hybrid(make_rig: MakeRig, model: str) -> None:
    assert make_rig(model).cache.is_hybrid == (model != "full")


# ---- bad input -----------------------------------------------------------------------------------------------------
BAD_TOKENS: dict[str, tuple[Any, str]] = {
    "negative": ([1, 2, -3, 4], "token -3 at position 2"),
    "too large": ([5, 2**31], "position 1"),
    "a truth value among integers": ([5, True], "position 1"),
    "floats": (np.array([1.0, 2.5]), "position 0"),
    "booleans": (np.array([True, False]), "position 0"),
    "text": ("abc", "shape"),
    "two dimensions": ([[1, 2], [3, 4]], "shape"),
    "no dimension": (np.array(5), "shape"),
    "ragged": ([[1, 2], [3]], "not an array of integers"),
    "none": (None, "shape"),
    "objects": ([object()], "position 0"),
    "unsigned and large": (np.array([1, 2**63], dtype=np.uint64), "position 1"),
}


@pytest.mark.parametrize("name", BAD_TOKENS)
def test_bad_tokens_are_refused_with_the_position(make_rig: MakeRig, t: T, name: str) -> None:
    tokens, told = BAD_TOKENS[name]
    rig = make_rig(EVERY, host=64, store="scripted")
    rig.serve(t(8))
    before = rig.cache.stats()
    for call in (rig.cache.match, rig.cache.probe):
        with pytest.raises(ValueError, match=told):
            call(tokens)
    assert rig.cache.stats().requests == before.requests
    rig.check_idle()


@pytest.mark.parametrize("tokens", [[1, 2.5, 3], [1, "two"]], ids=["float", "word"])
def test_the_position_is_that_of_the_item_that_is_no_integer(make_rig: MakeRig, tokens: list[object]) -> None:
    with pytest.raises(ValueError, match="position 1"):
        make_rig().cache.match(tokens)


GOOD_TOKENS: dict[str, Any] = {
    "int32": np.arange(1, 10, dtype=np.int32),
    "int64": np.arange(1, 10, dtype=np.int64),
    "a view with strides": np.arange(2, 20, dtype=np.int64)[::2] // 2,
    "a list": list(range(1, 10)),
    "a tuple": tuple(range(1, 10)),
    "uint16": np.arange(1, 10, dtype=np.uint16),
    "read-only": np.frombuffer(np.arange(1, 10, dtype=np.int32).tobytes(), dtype=np.int32),
    "big-endian": np.arange(1, 10, dtype=">i4"),
}


@pytest.mark.parametrize("name", GOOD_TOKENS)
def test_tokens_mean_the_same_in_whatever_array_they_come(make_rig: MakeRig, t: T, name: str) -> None:
    rig = make_rig()
    rig.serve(t(9))
    assert rig.cache.probe(GOOD_TOKENS[name]).boundary == 8
    with rig.cache.match(GOOD_TOKENS[name]) as lease:
        assert lease.load() == 8
        lease.reserve(1)
        assert lease.checkpoint(9, GOOD_TOKENS[name]).published == 8
        assert lease.release(GOOD_TOKENS[name]).published == 8
    rig.check_idle()


def test_a_prompt_may_be_changed_after_the_match(make_rig: MakeRig, t: T) -> None:
    """The cache keeps its own tokens: an engine reuses its buffers."""
    rig = make_rig()
    prompt = t(9)
    with rig.cache.match(prompt) as lease:
        lease.reserve(9)
        rig.write(lease, t(9), 0, 9)
        prompt[:] = 7
        lease.release(t(9))
    assert rig.cache.probe(t(10)).boundary == 8
    rig.check_idle()


def test_the_largest_token_and_an_empty_prompt_are_fine(make_rig: MakeRig) -> None:
    rig = make_rig(page_size=1)
    assert rig.serve([0, 2**31 - 1]).source.total == 0
    assert rig.cache.probe([0, 2**31 - 1, 5]).boundary == 2
    assert rig.serve([]).prompt_tokens == 0
    assert rig.cache.probe([]).boundary == 0
    rig.check_idle()


@pytest.mark.parametrize("name", ["", "x" * 1025, 7, b"chat"], ids=["empty", "too long", "number", "bytes"])
def test_a_bad_session_name_is_refused_before_anything_happens(make_rig: MakeRig, t: T, name: Any) -> None:
    rig = make_rig()
    with pytest.raises(ValueError, match="session"):
        rig.cache.match(t(4), session=name)
    assert len(rig.cache.sessions) == 0
    assert rig.cache.stats().tree.get("matches", 0) == 0
    rig.check_idle()


# ---- asking --------------------------------------------------------------------------------------------------------
def test_a_probe_changes_nothing(make_rig: MakeRig, t: T, model: str) -> None:
    rig = make_rig(model, host=64, store="scripted")
    rig.serve(t(20))
    rig.cache.drain()
    before, tree = rig.cache.stats(), rig._views()
    calls = len(rig.store.calls)
    found = rig.cache.probe([*t(12), 99, 98])
    assert found.walked == 12
    assert rig.cache.stats() == before
    assert rig._views() == tree
    assert len(rig.store.calls) == calls


def test_a_probe_says_what_a_match_will_find(make_rig: MakeRig, t: T, model: str) -> None:
    rig = make_rig(model, host=64, store="scripted")
    rig.serve(t(20))
    rig.serve([*t(12), *t(120, 101)])
    for prompt in (t(20), t(21), [*t(12), 99], [*t(12), *t(130, 101)], [99]):
        probed = rig.cache.probe(prompt)
        with rig.cache.match(prompt) as lease:
            assert lease.reused == probed.boundary
            assert lease.source == probed.source
            assert lease.load() == probed.boundary


# ---- counters ------------------------------------------------------------------------------------------------------
def test_sources_sum_to_the_prompts_whatever_way_a_request_takes(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(EVERY, host=64, store="scripted")
    rig.serve(t(20))
    rig.serve(t(21))
    rig.squeeze()
    rig.serve(t(22))
    rig.cache.drain()
    rig.cache.reset()
    rig.serve(t(23))
    with rig.cache.match(t(24)):
        pass
    with rig.cache.match(t(24)) as lease:
        lease.load()
    counts = rig.cache.stats().tokens
    # 1 token of the request that squeezes; two of 24 that were given up, one of them after its load.
    assert counts.prompt == 20 + 21 + 1 + 22 + 23 + 24 + 24
    assert (counts.device, counts.host, counts.store) == (20 + 20, 20, 20)
    assert counts.computed == counts.prompt - 80
    assert rig.cache.stats().by_component["mamba"] == TierTokens(40, 20, 20)
    assert rig.cache.stats().by_component["swa"] == TierTokens(16, 8, 8)


def test_overlapping_tiers_are_counted_once(make_rig: MakeRig, t: T) -> None:
    """O-64: L1 has 48 and L3 has 64 of 80 tokens: 48 + 16 + 16."""
    rig = make_rig(host=64, store="scripted")
    rig.seed_store(t(64))
    with rig.cache.match(t(48)) as lease:  # computed here, not read
        lease.reserve(48)
        rig.write(lease, t(48), 0, 48)
        lease.release(t(48))
    assert rig.serve(t(80)).source == TierTokens(48, 0, 16)
    counts = rig.cache.stats().tokens
    assert (counts.prompt, counts.computed) == (128, 48 + 16)
    rig.check_idle()


def test_a_snapshot_of_the_counters_does_not_move(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(EVERY, host=64, store="scripted")
    rig.serve(t(20), session="a")
    rig.cache.drain()
    before = rig.cache.stats()
    copied = dataclasses.asdict(before)
    rig.serve(t(40), session="b")
    rig.cache.drain()
    assert dataclasses.asdict(before) == copied
    assert before.store is not None
    assert before.store.num_pages == 5 + 3 + 2  # full pages, the windows and the states at 16 and 20


def test_fresh_payload_never_enters_a_window_that_no_mark_needs(make_rig: MakeRig, t: T) -> None:
    rig = make_rig("full+swa")
    rig.serve(t(40))
    assert rig.resident("full", Tier.DEVICE) == 10
    assert rig.resident("swa", Tier.DEVICE) == 3  # [28, 36) for the mark at 36, and [32, 40)


# ---- reset and close -----------------------------------------------------------------------------------------------
def test_after_a_reset_the_cache_is_as_new(make_rig: MakeRig, t: T, model: str) -> None:
    """O-31: the same script gives the same, on the old cache and on a new one."""

    def script(rig: Rig) -> list[tuple[int, int, int]]:
        rows = []
        for prompt in (t(20), t(24), [*t(12), *t(130, 101)], t(25)):
            source = rig.serve(prompt, session="chat").source
            rig.cache.drain()
            rows.append((source.device, source.host, source.store))
        return rows

    rig = make_rig(model, device=24, host=12)
    rig.serve(t(60, 30), session="old")
    rig.cache.reset()
    rig.cache.reset()
    rig.check_idle()
    assert all(count.free == count.capacity for count in rig.cache.stats().pools.values())
    assert len(rig.cache.sessions) == 0
    assert script(rig) == script(make_rig(model, device=24, host=12))


def test_a_reset_keeps_what_l3_has(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(EVERY, host=64, store="scripted")
    rig.serve(t(20))
    rig.cache.drain()
    rig.cache.reset()
    assert rig.cache.probe(t(21)).boundary == 0
    assert rig.serve(t(21)).source == TierTokens(0, 0, 20)


def test_a_reset_with_reads_under_way_leaves_nothing_reserved(make_rig: MakeRig, t: T) -> None:
    """O-31: a prefetch holds host slots, and ends while it is reset; two resets equal one."""
    rig = make_rig(host=8, store="scripted", policy__store_timeout="1s")
    rig.seed_store(t(12))
    gate = rig.store.block("get")
    lease = rig.cache.match(t(13))
    assert gate.reached.wait(20)
    assert rig.free("full", "host") == 5
    rig.cache.reset()
    rig.cache.reset()
    rig.check_idle()
    assert rig.free("full", "host") == 8
    lease.abandon()
    rig.check_idle()
    rig.store.unscript()
    assert rig.serve(t(13)).source == TierTokens(0, 0, 12)


def test_a_reset_never_hands_out_slots_that_a_copy_still_writes(make_rig: MakeRig, t: T) -> None:
    """O-31 and class 1: what does not end in time makes the reset fail, and nothing is changed."""
    rig = make_rig(EVERY, host=64, stepped=True)
    rig.serve_stepped(t(24))
    rig.squeeze_stepped()
    with rig.cache.match(t(25)) as lease:
        rig.cache._runtime.run(rig.cache._runtime.core.load(lease.id).actions)
        with rig.impatient(), pytest.raises(TierTimeoutError, match="under way"):
            rig.cache.reset()
        with rig.stepping():
            assert lease.load() == 24
            assert rig.wrong_pages(lease, t(25)) == 0
        rig.cache.reset()
    rig.check_idle()
    assert rig.free() == 64


@pytest.mark.parametrize("store", ["disk", "memory"])
def test_close_leaves_no_thread_and_no_file(
    make_rig: MakeRig, t: T, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    stores = [{"kind": "disk", "path": "auto", "capacity": "1MiB"} if store == "disk" else {"kind": "memory"}]
    rig = make_rig(EVERY, host=64, tiers__stores=stores)
    rig.serve(t(20))
    rig.cache.drain()
    assert our_threads() != set()
    assert len(list(tmp_path.iterdir())) == (store == "disk")
    rig.cache.close()
    assert our_threads() == set()
    assert list(tmp_path.iterdir()) == []
    assert rig.cache.device.nbytes == 0


def test_close_may_be_called_again(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(host=8, store="scripted")
    rig.serve(t(8))
    rig.cache.close()
    rig.cache.close()
    assert [call.operation for call in rig.store.calls].count("close") == 1


CALLS: dict[str, Callable[[HiCache], object]] = {
    "match": lambda cache: cache.match([1, 2]),
    "probe": lambda cache: cache.probe([1, 2]),
    "reset": lambda cache: cache.reset(),
    "poll": lambda cache: cache.poll(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_closed_cache_refuses_service(make_rig: MakeRig, name: str) -> None:
    rig = make_rig(host=8)
    rig.cache.close()
    with pytest.raises(ProtocolError, match="closed"):
        CALLS[name](rig.cache)


def test_numbers_can_be_read_after_close(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(EVERY, host=64, store="scripted")
    rig.serve(t(20))
    rig.cache.close()
    assert rig.cache.stats().requests == 1
    assert rig.cache.audit() == []


def test_close_waits_for_a_slow_store_and_not_for_a_dead_one(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(host=64, store="scripted", policy__store_timeout="200ms", policy__wait_limit="200ms")
    rig.store.block("put")
    rig.serve(t(20))
    rig.cache.close()
    assert our_threads() == set()


def test_close_without_drain_gives_up_what_is_under_way(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(host=64, store="scripted")  # limits of 20 s: waiting for the store would show
    gate = rig.store.block("put")
    rig.serve(t(20))
    while not gate.reached.is_set():
        rig.cache.poll()
    rig.cache.close(drain=False)
    assert our_threads() == set()


def test_drain_is_bounded_and_says_whether_all_is_done(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(host=64, store="scripted")
    gate = rig.store.block("put")
    rig.serve(t(20))
    while (
        not gate.reached.is_set()
    ):  # a put that begins while all are impatient would be given up, and drained
        rig.cache.poll()
    with rig.impatient():
        assert not rig.cache.drain()
    gate.release()
    while not rig.cache.drain():
        pass
    assert all(rig.stored(t(20)))


def test_poll_books_what_has_ended(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(host=64, stepped=True)
    rig.serve(t(20))
    assert rig.cache.probe(t(21)).source.host == 0
    rig.to_host.step_all()
    rig.cache.poll()
    assert rig.resident("full", Tier.HOST) == 5
    rig.check_idle()


def test_demotion_runs_ahead_between_the_watermarks(make_rig: MakeRig, t: T) -> None:
    """Below 25 % free, half of the pool is made free; nothing was asked for."""
    marks = {"device": {"low": 0.25, "high": 0.5}, "host": {"low": 0, "high": 0}}
    rig = make_rig(device=16, host=32, policy__watermarks=marks)
    rig.serve(t(48))
    rig.check_idle()
    assert rig.free() == 4
    rig.serve(t(104, 101))
    rig.check_idle()
    assert (rig.free(), rig.resident("full", Tier.HOST)) == (8, 13)
    assert rig.serve(t(49)).source == TierTokens(28, 20, 0)  # its tail went, page by page


def test_time_limits_follow_the_clock_that_was_given(make_rig: MakeRig, t: T) -> None:
    """A store that never answers is given up when the clock says so, not before."""
    clock = ManualClock()
    rig = make_rig(host=64, store="scripted", clock=clock)
    rig.seed_store(t(8))
    gate = rig.store.block("exists")
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(rig.serve(t(9)).source.total))
    thread.start()
    assert gate.reached.wait(20)
    clock.advance(19.0)
    rig.cache._runtime.transfers.clock_moved()
    thread.join(0.05)
    assert thread.is_alive()
    clock.advance(2.0)
    rig.cache._runtime.transfers.clock_moved()
    thread.join(20)
    assert found == [0]
    assert rig.cache.stats().faults["probe_failed"] == 1


def test_flush_says_whether_l3_has_everything(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(EVERY, host=64, store="scripted", policy__write="write_back")
    rig.serve(t(20))
    rig.cache.drain()
    assert rig.stored(t(20)) == [False] * 5
    rig.store.script("put", Raise(OSError(28, "no space")), times=1)
    assert not rig.cache.flush()
    rig.check_idle()
    assert rig.cache.flush()
    assert all(rig.stored(t(20)))
    assert rig.stored(t(20), "mamba")[-1]
    rig.store.script("put", MISS)
    rig.serve(t(40))
    assert not rig.cache.flush()
    rig.check_idle()


def test_a_flush_whose_failed_write_was_tried_again_meanwhile_says_what_is_there_now(
    make_rig: MakeRig, t: T, aside: Callable[..., Future[bool]]
) -> None:
    clock = ManualClock()
    rig = make_rig(host=64, store="scripted", policy__write="write_back", clock=clock)
    rig.serve(t(16))
    rig.serve(t(116, 101))
    rig.cache.drain()
    later, first = rig.keys(t(16))[0], rig.keys(t(116, 101))[0]
    rig.store.script("put", Raise(OSError(5, "cable")), key=first)
    gate = rig.store.block("put", key=later)
    flushing = aside(rig.cache.flush)
    assert gate.reached.wait(60)
    rig.cache.poll()
    assert rig.cache._runtime.num_store_failures == 1
    rig.store.script("put", OK, key=first)
    clock.advance(2.0)
    rig.cache.poll()
    assert rig.cache.stats().faults["store_retries"] == 1
    gate.release()
    assert flushing.result(60)
    assert rig.stored(t(16)) + rig.stored(t(116, 101)) == [True] * 8
    rig.check_idle()


def test_a_retry_that_is_due_during_a_flush_does_not_end_it(
    make_rig: MakeRig, t: T, aside: Callable[..., Future[bool]]
) -> None:
    """L1 is larger than L2, so it takes rounds; nothing fails in any of them."""
    clock = ManualClock()
    rig = make_rig(device=64, host=8, store="scripted", policy__write="write_back", clock=clock)
    rig.cache._runtime._store_backoff.failed(0.0)
    rig.serve(t(160))
    gate = rig.store.block("put", call=1)
    flushing = aside(rig.cache.flush)
    assert gate.reached.wait(60)
    clock.advance(2.0)
    gate.release()
    assert flushing.result(60)
    assert rig.cache.stats().faults["store_retries"] == 1
    assert rig.stored(t(160)) == [True] * 40


def test_a_probe_that_fails_does_not_make_a_flush_fail(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(host=64, store="scripted", policy__write="write_back")
    rig.store.script("exists", Raise(OSError("gone")))
    rig.serve(t(20))
    assert rig.cache._runtime.num_store_failures == 0
    assert rig.cache.flush()


def test_config_objects_are_shared_safely(t: T) -> None:
    config = load_config("hybrid", environ={})
    with HiCache(config) as first, HiCache(config) as second:
        assert first.identity == second.identity
        assert first.device is not second.device
