"""The hit-rate test that users run: it passes where it should, fails where it should, and says why."""

from __future__ import annotations

from typing import Any

import pytest

from hicache.config import load_config
from hicache.errors import ConfigError
from hicache.replay.footprint import roomy_config, tight_config
from hicache.replay.stamps import Stamps
from hicache.testing.multi_turn import MultiTurnShortfallError, check_multi_turn
from hicache.workload import MultiTurn

pytest_plugins = ["pytester"]

SIZES: dict[str, Any] = {"sessions": 6, "turns": 6, "user": 90, "output": 30}  # Any: passed on
LOAD = MultiTurn(**SIZES)
COMBINATIONS = ["full", "full+swa", "full+mamba", "full+swa+mamba"]


def roomy(components: str) -> dict[str, object]:
    return roomy_config(LOAD, components.split("+"), 16)


def small(components: str, **options: Any) -> dict[str, object]:  # Any: those of tight_config
    return tight_config(LOAD, components.split("+"), 16, device_share=0.4, **options)


@pytest.mark.parametrize("components", COMBINATIONS)
def test_a_cache_with_room_passes(components: str) -> None:
    result = check_multi_turn(roomy(components), **SIZES, from_turn=2, least_share=1)
    assert result.share_of_closed_form(2) == 1
    assert [row.turn for row in result.rounds] == [1, 2, 3, 4, 5, 6]
    assert set(result.rounds[3].by_component) == set(components.split("+"))


@pytest.mark.parametrize("components", COMBINATIONS)
def test_a_small_device_with_large_tiers_below_passes(components: str) -> None:
    config = small(components, host_share=1, store={"kind": "memory"})
    result = check_multi_turn(config, **SIZES, from_turn=2, least_share=1)
    late = result.rounds[-1]
    assert late.tokens.host + late.tokens.store > 0
    assert late.by_component["full"].total == late.tokens.hit


def test_too_small_a_device_fails_and_says_which_turn_component_and_tier() -> None:
    with pytest.raises(MultiTurnShortfallError) as caught:
        check_multi_turn(small("full"), **SIZES)
    turns = [turn.turn for turn in caught.value.short_turns]
    assert turns == [4, 5, 6]
    told = str(caught.value)
    assert told.startswith(
        "3 of turns 4 to 6 hit less than 99.5% of what a cache with room for everything hits"
    )
    assert "full evicted from device (evict)" in told
    assert "turn 5: " in told
    assert "no host tier; no store. Raise tiers.<tier>.capacity" in told
    for turn in caught.value.short_turns:
        assert sum(turn.causes.values()) == turn.expected_tokens - turn.hit_tokens


def test_a_write_policy_that_drops_what_was_used_once_is_named() -> None:
    """The host tier has room for everything, and gets nothing before it is used again."""
    overrides = {"policy.write": "write_through_selective"}
    config = load_config(small("full", host_share=1), overrides=overrides, environ={})
    with pytest.raises(MultiTurnShortfallError, match=r"set policy\.write to write_through or write_back"):
        check_multi_turn(config, **SIZES)


@pytest.mark.parametrize("component", ["swa", "mamba"])
def test_the_component_that_is_short_is_named(component: str) -> None:
    """Room for every path and too few windows or states."""
    config = load_config(
        roomy(f"full+{component}"),
        overrides={
            "tiers.device.capacity": "2MiB",
            "tiers.device.split": {"full": 0.96, component: 0.04},
        },
        environ={},
    )
    with pytest.raises(MultiTurnShortfallError) as caught:
        check_multi_turn(config, **{**SIZES, "sessions": 12})
    assert all(
        any(cause.startswith(f"{component} ") for cause in turn.causes) for turn in caught.value.short_turns
    )


def test_what_is_asked_for_may_be_less() -> None:
    asked: dict[str, Any] = {**SIZES, "shuffled": True}  # Any: passed on
    config = tight_config(LOAD, ["full"], 16, device_share=0.7)
    with pytest.raises(MultiTurnShortfallError) as caught:
        check_multi_turn(config, **asked, least_share=1)
    lowest = min(turn.hit_tokens / turn.expected_tokens for turn in caught.value.short_turns)
    assert 0 < lowest < 0.95
    check_multi_turn(config, **asked, least_share=lowest)
    with pytest.raises(MultiTurnShortfallError, match="1 of turns 4 to 6"):
        check_multi_turn(config, **asked, least_share=lowest + 0.001)


def test_wrong_bytes_fail_whatever_the_hit_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    stamps = Stamps.pages

    def wrong(self: Stamps, component: str, first: int, last: int) -> Any:  # Any: uint8 [pages, bytes]
        pages = stamps(self, component, first, last).copy()
        pages[:, 0] += last % 2  # what is written for a page and what is compared differ now and then
        return pages

    monkeypatch.setattr(Stamps, "pages", wrong)
    with pytest.raises(MultiTurnShortfallError, match="pages had wrong bytes"):
        check_multi_turn(roomy("full"), **SIZES)


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"from_turn": 7}, ValueError, "from_turn is 7, expected 1 to 6, the last turn"),
        ({"from_turn": 0}, ValueError, "from_turn is 0"),
        ({"least_share": 0}, ValueError, "least_share is 0"),
        ({"least_share": 1.01}, ValueError, "least_share is 1.01"),
        ({"sessions": 0}, ValueError, "sessions is 0, expected at least 1"),
        ({"turns": 1}, ValueError, "turns 1 to 1 could reuse nothing even with room for everything"),
        ({"user": 1, "output": 1}, ValueError, "prompts of up to 11 tokens, pages of 16"),
        ({"overrides": {"tiers.device.capacity": "none"}}, ConfigError, "tiers.device.capacity"),
    ],
)
def test_what_makes_no_sense_is_refused(
    keywords: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        check_multi_turn(roomy("full"), **{**SIZES, **keywords})


def test_overrides_come_before_loading() -> None:
    config = load_config(roomy("full"), environ={})
    with pytest.raises(ValueError, match="not loaded yet"):
        check_multi_turn(config, **SIZES, overrides={"policy.eviction": "lru"})


# ---- the fixture -------------------------------------------------------------------------------------------------------
YAML = """
model: {name: m, page_size: 16, components: {full: {rule: path, layers: 2, bytes_per_token: 16}}}
tiers: {device: {kind: cpu, capacity: %s}}
policy: {watermarks: {device: {low: 0, high: 0}}}
"""
TEST = """
def test_late_turns(hicache_multi_turn):
    hicache_multi_turn(sessions=4, turns=6, user=90, output=30)
"""


@pytest.mark.parametrize(
    ("capacity", "passed"), [("1MiB", True), ("16KiB", False)], ids=["room", "too small"]
)
def test_the_fixture_tests_the_configuration_of_the_ini_file(
    pytester: pytest.Pytester, capacity: str, passed: bool
) -> None:
    pytester.makeconftest('pytest_plugins = ["hicache.testing.plugin"]')
    pytester.makeini("[pytest]\nhicache_config = cache.yaml")
    pytester.path.joinpath("cache.yaml").write_text(YAML % capacity)
    pytester.makepyfile(TEST)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=int(passed), failed=int(not passed))
    if not passed:
        result.stdout.fnmatch_lines(["*MultiTurnShortfallError: 3 of turns 4 to 6 hit less than 99.5%*"])
        result.stdout.fnmatch_lines(["*full evicted from device (evict)*"])


def test_the_fixture_without_a_configuration_says_where_to_name_it(pytester: pytest.Pytester) -> None:
    pytester.makeconftest('pytest_plugins = ["hicache.testing.plugin"]')
    pytester.makepyfile(TEST)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.stdout.fnmatch_lines(["*give a config, or set hicache_config in the ini file*"])
