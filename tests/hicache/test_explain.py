"""Why a request missed: every cause brought about on purpose."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hicache.clock import ManualClock
from hicache.errors import ProtocolError, TierUnavailableError
from hicache.events import Cause, ResidencyChange, ResidencyEvent
from hicache.explain import Explainer, Explanation, LossCause, Lost
from hicache.ledger import Departure, Ledger
from hicache.radix.interface import ProbeResult
from hicache.radix.keys import page_keys
from hicache.replay.losses import LossAccount
from hicache.testing.scripted_store import MISS, Raise
from hicache.transfer.jobs import Direction
from hicache.types import ComponentSpec, Namespace, PageKey, Tier, TierTokens

if TYPE_CHECKING:
    from tests.hicache.conftest import MakeRig, Rig

ON = {"explain__enabled": True}
PAGE_BYTES = 4 * 16


def ask(rig: Rig, prompt: Any, **keywords: Any) -> Explanation:  # Any: as serve takes them
    """Serve the prompt and return what its lease says."""
    served = rig.serve(prompt, **keywords)
    assert served.explanation is not None
    check(served.explanation)
    return served.explanation


def check(explanation: Explanation) -> None:
    """The ranges are whole, in order, and without gap or overlap."""
    at = explanation.reused
    for lost in explanation.lost:
        assert lost.begin == at < lost.end
        at = lost.end
    assert at == max(explanation.limit, explanation.reused)


def causes(explanation: Explanation) -> list[tuple[int, int, str]]:
    return [(lost.begin, lost.end, lost.cause.value) for lost in explanation.lost]


# ---- diverged --------------------------------------------------------------------------------------------------------


def test_a_first_prompt_is_new_throughout(make_rig: MakeRig) -> None:
    explanation = ask(make_rig(**ON), range(1, 18))
    assert causes(explanation) == [(0, 16, "new")]
    assert explanation.lost_tokens == {}
    assert explanation.diverged_at == 0


def test_a_prompt_that_parts_from_another_is_new_from_there(make_rig: MakeRig) -> None:
    rig = make_rig(**ON)
    rig.serve(range(1, 18))
    explanation = ask(rig, [*range(1, 9), *range(50, 59)])
    assert explanation.reused == 8
    assert causes(explanation) == [(8, 16, "new")]
    assert explanation.diverged_at == 8


def test_a_full_hit_has_nothing_to_explain(make_rig: MakeRig) -> None:
    rig = make_rig(**ON)
    rig.serve(range(1, 18))
    explanation = ask(rig, range(1, 18))
    assert explanation.reused == explanation.limit == 16
    assert explanation.lost == ()
    assert explanation.diverged_at is None


# ---- evicted ---------------------------------------------------------------------------------------------------------


def test_what_was_evicted_says_from_where_when_and_why(make_rig: MakeRig) -> None:
    clock = ManualClock()
    rig = make_rig(device=8, session_clock=clock, **ON)
    rig.serve(range(1, 17))
    clock.advance(7.0)
    rig.serve(range(100, 132))  # all eight slots
    clock.advance(5.0)
    explanation = ask(rig, range(1, 18))
    (lost,) = explanation.lost
    assert (lost.begin, lost.end, lost.cause, lost.component) == (0, 16, LossCause.EVICTED, "full")
    assert lost.departure == Departure(Tier.DEVICE, Cause.EVICT, 7.0)
    assert "left device at 7.000 s (evict)" in str(lost)


def test_only_the_tail_that_left_is_lost(make_rig: MakeRig) -> None:
    rig = make_rig(device=8, **ON)
    rig.serve(range(1, 17))
    rig.serve(range(100, 124))  # six slots: two of the first prompt's four have to go
    assert causes(ask(rig, range(1, 18))) == [(8, 16, "evicted")]


def test_the_last_tier_that_had_it_is_named(make_rig: MakeRig) -> None:
    rig = make_rig(device=8, host=8, **ON)
    rig.serve(range(1, 17))
    rig.cache.drain()
    rig.serve(range(100, 132))
    rig.cache.drain()
    rig.serve(range(200, 232))
    rig.cache.drain()
    explanation = ask(rig, range(1, 18))
    assert [lost.departure.tier for lost in explanation.lost if lost.departure] == [Tier.HOST]


def test_what_comes_back_is_not_lost_any_more(make_rig: MakeRig) -> None:
    rig = make_rig(device=8, **ON)
    rig.serve(range(1, 17))
    rig.serve(range(100, 132))
    rig.serve(range(1, 17))
    assert ask(rig, range(1, 18)).lost == ()


def test_a_reset_is_a_departure(make_rig: MakeRig) -> None:
    rig = make_rig(**ON)
    rig.serve(range(1, 17))
    rig.cache.reset()
    (lost,) = ask(rig, range(1, 18)).lost
    assert lost.departure is not None
    assert lost.departure.cause is Cause.RESET


# ---- no state, no window ---------------------------------------------------------------------------------------------


def test_a_missing_state_names_the_component_and_the_range(make_rig: MakeRig) -> None:
    rig = make_rig("full+mamba", **ON)
    rig.serve(range(1, 34))
    explanation = ask(rig, [*range(1, 17), *range(60, 70)])
    assert explanation.reused == 0
    assert causes(explanation) == [(0, 16, "no_checkpoint"), (16, 24, "new")]
    assert explanation.lost[0].component == "mamba"
    assert explanation.lost[0].detail == "no state between 0 and 16"


def test_a_window_that_was_let_go_is_a_missing_checkpoint(make_rig: MakeRig) -> None:
    rig = make_rig("full+swa", **ON)
    rig.serve(range(1, 49))
    explanation = ask(rig, [*range(1, 25), *range(60, 70)])
    assert explanation.lost[0].cause is LossCause.NO_CHECKPOINT
    assert explanation.lost[0].component == "swa"


@pytest.mark.parametrize(
    ("why", "cause"), [(Cause.WINDOW, LossCause.NO_CHECKPOINT), (Cause.EVICT, LossCause.EVICTED)]
)
def test_a_window_dropped_as_not_needed_was_not_evicted(why: Cause, cause: LossCause) -> None:
    """Payload that no mark needed left no hole by pressure; payload that had to go for room did."""
    specs = (
        ComponentSpec("full", "path", bytes_per_token=1),
        ComponentSpec("swa", "window", window_tokens=8, bytes_per_token=1),
    )
    tokens = np.arange(1, 18, dtype=np.int32)
    ledger = Ledger(ManualClock(), page_size=4, max_departures=99)
    for spec in specs:
        keys = page_keys(b"", spec, tokens, 4, Namespace())
        ledger.record([ResidencyEvent(ResidencyChange.STORED, Tier.DEVICE, spec.name, keys, Cause.INSERT)])
    gone = page_keys(b"", specs[1], tokens, 4, Namespace())
    ledger.record([ResidencyEvent(ResidencyChange.REMOVED, Tier.DEVICE, "swa", gone, why)])
    explainer = Explainer(ledger, specs, page_size=4, identity=b"")
    found = ProbeResult(0, 16, TierTokens(), {}, 16)
    (lost,) = explainer.unfound(tokens, Namespace(), found, store_answered=True)
    assert (lost.begin, lost.end, lost.component, lost.cause) == (0, 16, "swa", cause)


def test_what_a_component_besides_the_first_lost_is_named() -> None:
    specs = tuple(ComponentSpec(name, "path", bytes_per_token=1) for name in ("full", "draft"))
    tokens = np.arange(1, 18, dtype=np.int32)
    ledger = Ledger(ManualClock(), page_size=4, max_departures=99)
    for spec in specs:
        keys = page_keys(b"", spec, tokens, 4, Namespace())
        ledger.record([ResidencyEvent(ResidencyChange.STORED, Tier.DEVICE, spec.name, keys, Cause.INSERT)])
    gone = page_keys(b"", specs[1], tokens, 4, Namespace())[1:2]
    ledger.record([ResidencyEvent(ResidencyChange.REMOVED, Tier.DEVICE, "draft", gone, Cause.EVICT)])
    explainer = Explainer(ledger, specs, page_size=4, identity=b"")
    found = ProbeResult(4, 16, TierTokens(4), {}, None)
    (lost,) = explainer.unfound(tokens, Namespace(), found, store_answered=True)
    # The pages behind the hole are there, and of no use: they are lost for the same reason.
    assert (lost.begin, lost.end, lost.component, lost.cause) == (4, 16, "draft", LossCause.EVICTED)


def test_a_state_that_was_evicted_is_not_called_missing(make_rig: MakeRig) -> None:
    rig = make_rig("full+mamba", device={"full": 64, "mamba": 3}, **ON)
    rig.serve(range(1, 18))
    for start in (100, 200, 300):
        rig.serve(range(start, start + 17))
    explanation = ask(rig, range(1, 18))
    assert (explanation.lost[0].cause, explanation.lost[0].component) == (LossCause.EVICTED, "mamba")


def in_store_only(make_rig: MakeRig, **keywords: Any) -> Rig:  # Any: see Rig
    rig = make_rig(store="scripted", device=16, host=16, **ON, **keywords)
    rig.seed_store(range(1, 17))
    return rig


# ---- L3 and copies ---------------------------------------------------------------------------------------------------


def test_a_prefetch_that_is_too_slow_is_a_timeout(make_rig: MakeRig) -> None:
    clock = ManualClock()
    rig = in_store_only(make_rig, clock=clock, policy__prefetch={"mode": "best_effort", "min_tokens": 0})
    gate = rig.store.block("get")
    with rig.cache.match(list(range(1, 18))) as lease:
        assert lease.reused == 16
        lease.load()
        explanation = lease.explain()
        gate.release()
    check(explanation)
    assert causes(explanation) == [(0, 16, "store_timeout")]
    assert explanation.lost_tokens == {LossCause.STORE_TIMEOUT: 16}


def test_pages_that_prove_missing_are_said_to_be(make_rig: MakeRig) -> None:
    rig = in_store_only(make_rig)
    rig.store.script("get", MISS, key=rig.keys(range(1, 17))[2])
    explanation = ask(rig, range(1, 18))
    assert explanation.reused == 8
    assert causes(explanation) == [(8, 16, "store_missing")]


def test_a_store_that_could_not_be_asked_is_to_blame_for_what_nobody_knows(make_rig: MakeRig) -> None:
    rig = in_store_only(make_rig)
    rig.store.script("exists", Raise(TierUnavailableError("away")))
    explanation = ask(rig, range(1, 18))
    assert causes(explanation) == [(0, 16, "store_failed")]


def test_a_fetch_that_the_queue_has_no_room_for_is_said_to_be_turned_away(make_rig: MakeRig) -> None:
    """The queue is full of another request's fetch, which the store does not end."""
    settings: dict[str, Any] = {"policy__wait_limit": "10ms", "policy__queues": {"prefetch": 2 * PAGE_BYTES}}
    settings["policy__prefetch"] = {"mode": "wait_complete", "min_tokens": 0}
    rig = make_rig(store="scripted", device=16, host=16, **ON, **settings)
    rig.seed_store(range(1, 17))
    rig.seed_store(range(101, 117))
    gate = rig.store.block("get")
    with rig.cache.match(list(range(101, 118))), rig.cache.match(list(range(1, 18))) as lease:
        assert lease.reused == 16
        lease.load()
        explanation = lease.explain()
        gate.release()
    check(explanation)
    assert causes(explanation) == [(0, 16, "queue_full")]


def test_payload_that_finds_l1_full_of_locked_pages_had_no_room(make_rig: MakeRig) -> None:
    rig = make_rig(device=8, host=16, **ON)
    rig.serve(range(1, 17))
    rig.squeeze()
    with rig.cache.match([7_000_000]) as other:
        other.reserve(8 * rig.page)  # all of L1, and none of it may go
        with rig.cache.match(list(range(1, 18))) as lease:
            assert (lease.reused, lease.load()) == (16, 0)
            explanation = lease.explain()
    check(explanation)
    assert causes(explanation) == [(0, 16, "no_room")]


def test_a_copy_that_fails_is_named(make_rig: MakeRig) -> None:
    rig = make_rig(device=8, host=16, stepped=True, **ON)
    rig.serve_stepped(range(1, 17))
    rig.squeeze_stepped()
    for _ in range(8):  # a load is begun anew as long as that brings something
        rig.to_device.fail_next(OSError("a fault of the device"))
    with rig.stepping("to_device"), rig.cache.match(list(range(1, 18))) as lease:
        assert lease.reused == 16
        lease.load()
        explanation = lease.explain()
    check(explanation)
    assert causes(explanation) == [(0, 16, "copy_failed")]


def test_what_a_pool_refused_slots_for_was_never_kept() -> None:
    """Only a replay can tell: a request that is longer than L1 leaves nothing of its tail."""
    account = LossAccount((ComponentSpec("full", bytes_per_token=4),), 4)
    prompt, nothing = np.arange(16, dtype=np.int32), np.empty(0, np.int32)
    never = Explanation(16, 0, 0, (Lost(0, 12, LossCause.NEW),), 12)
    account.add(prompt, nothing, never, ledger_is_whole=True)
    assert account.lost_tokens == {}
    account.add(prompt, nothing, never, ledger_is_whole=True)
    assert account.lost_tokens == {"not_kept": 12}
    account.add(prompt, nothing, never, ledger_is_whole=False)
    assert account.lost_tokens == {"not_kept": 12, "forgotten": 12}


def test_an_account_counts_what_a_store_kept_from_before_below_zero() -> None:
    account = LossAccount((ComponentSpec("full", "path", bytes_per_token=1),), 4)
    tokens = np.arange(1, 18, dtype=np.int32)
    rest = (Lost(8, 16, LossCause.NEW),)
    account.add(tokens, tokens[:0], Explanation(17, 8, 8, rest, 16), ledger_is_whole=True)
    assert account.infinite_hit_tokens == 0
    assert account.lost_tokens == {"from_before": -8}


def test_every_cause_is_brought_about_in_this_file() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert [
        cause
        for cause in LossCause
        if f'"{cause.value}"' not in text and f"LossCause.{cause.name}" not in text
    ] == []


def test_computing_because_it_is_sooner_is_said(make_rig: MakeRig) -> None:
    rig = in_store_only(make_rig, policy__prefetch={"min_tokens": 0, "recompute_per_1024_tokens": "1ms"})
    rig.cache._runtime.transfers._counters.measured(Direction.FETCH, "full", 2 << 20, 1e6)
    assert causes(ask(rig, range(1, 18))) == [(0, 16, "recompute_sooner")]


def test_a_request_that_ends_before_it_loads_has_abandoned_what_was_there(make_rig: MakeRig) -> None:
    rig = make_rig(**ON)
    rig.serve(range(1, 18))
    with rig.cache.match(list(range(1, 18))) as lease:
        pass
    assert causes(lease.explain()) == [(0, 16, "abandoned")]
    assert rig.cache.stats().lost_tokens == {"abandoned": 16}


# ---- namespaces ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["salt", "lora", "extra"])
def test_another_namespace_names_the_part_and_not_its_value(make_rig: MakeRig, part: str) -> None:
    rig = make_rig(**ON)
    rig.serve(range(1, 18), namespace=Namespace(**{part: "hidden"}))
    explanation = ask(rig, range(1, 22), namespace=Namespace(**{part: "mine"}))
    assert causes(explanation) == [(0, 16, "other_namespace"), (16, 20, "new")]
    assert explanation.lost[0].detail == f"known in a namespace with another {part}"
    assert "hidden" not in str(explanation)
    assert explanation.lost_tokens == {}


# ---- the switch ------------------------------------------------------------------------------------------------------


def test_without_the_switch_nothing_is_kept_and_the_remedy_is_named(make_rig: MakeRig) -> None:
    rig = make_rig()
    assert rig.cache.explainer is None
    with rig.cache.match([1, 2, 3]) as lease, pytest.raises(ProtocolError, match=r"explain\.enabled"):
        lease.explain()
    rig.serve(range(1, 18))
    assert rig.cache._runtime.core.drain_events() == ()


def test_the_counter_of_the_cache_is_the_sum_over_requests(make_rig: MakeRig) -> None:
    rig = make_rig(device=8, **ON)
    total = 0
    for start in (1, 100, 1, 200, 1):
        total += sum(ask(rig, range(start, start + 25)).lost_tokens.values())
    assert total > 0
    assert sum(rig.cache.stats().lost_tokens.values()) == total


def event(change: ResidencyChange, tier: Tier, *names: int) -> ResidencyEvent:
    keys = tuple(PageKey(bytes([name]) * 32) for name in names)
    return ResidencyEvent(change, tier, "full", keys, Cause.EVICT)


def test_the_sum_holds_while_a_store_fails_and_forgets(make_rig: MakeRig) -> None:
    """Every third get fails, every fifth finds nothing: what that costs is accounted for to the token."""
    rig = make_rig("full+mamba", store="scripted", device=12, host=10, **ON)
    for call in range(1, 400):
        if call % 3 == 0:
            rig.store.script("get", Raise(TierUnavailableError("away")), call=call)
        elif call % 5 == 0:
            rig.store.script("get", MISS, call=call)
    account = LossAccount(rig.specs, rig.page)
    hit = 0
    for turn in range(40):
        start = 100 * (turn * 7 % 5)
        prompt = np.arange(start + 1, start + 18 + turn % 8, dtype=np.int32)
        explanation = ask(rig, prompt)
        account.add(prompt, prompt[:0], explanation, ledger_is_whole=True)
        hit += explanation.reused
        rig.cache.drain()
    assert sum(account.lost_tokens.values()) == account.infinite_hit_tokens - hit > 0
    assert account.lost_tokens["store_failed"] + account.lost_tokens["store_missing"] > 0


# ---- the ledger ------------------------------------------------------------------------------------------------------


def test_a_ledger_forgets_the_oldest_departures_and_says_so() -> None:
    ledger = Ledger(ManualClock(), page_size=4, max_departures=2)
    ledger.record([event(ResidencyChange.STORED, Tier.DEVICE, 1, 2, 3)])
    ledger.record([event(ResidencyChange.REMOVED, Tier.DEVICE, n) for n in (1, 2, 3)])
    assert (len(ledger), ledger.num_forgotten) == (2, 1)
    assert ledger.departure(PageKey(bytes([1]) * 32)) is None
    assert ledger.departure(PageKey(bytes([3]) * 32)) is not None


def test_a_page_departs_when_it_leaves_its_last_tier() -> None:
    ledger = Ledger(ManualClock(), page_size=4, max_departures=9)
    key = PageKey(bytes([1]) * 32)
    ledger.record([event(ResidencyChange.STORED, tier, 1) for tier in (Tier.DEVICE, Tier.HOST)])
    ledger.record([event(ResidencyChange.REMOVED, Tier.DEVICE, 1)])
    assert ledger.tiers_of(key) == (Tier.HOST,)
    assert ledger.departure(key) is None
    ledger.record([event(ResidencyChange.REMOVED, Tier.HOST, 1)])
    assert not ledger.is_resident(key)
    departure = ledger.departure(key)
    assert departure is not None
    assert departure.tier is Tier.HOST
