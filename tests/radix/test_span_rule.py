"""Reuse rules written in Python: the same on both cores, and no harm where they fail."""

from __future__ import annotations

import logging

import pytest

from hicache.errors import ConfigError
from hicache.radix.core import core_kind, make_core
from hicache.radix.keys import as_tokens
from hicache.radix.rules.base import GuardedRule, SpanRule, Stop, make_rule
from hicache.testing.harness import BuildHarness
from hicache.testing.rules import UnreliableRule
from hicache.testing.trees import count_to, tree_config
from hicache.types import ComponentSpec, Tier

OWN = "hicache.testing.rules"


def test_a_rule_of_the_users_own_decides_what_is_needed(core_kind: str) -> None:
    """Chunks of three pages: at a chunk's end nothing is needed, a page further that page is."""
    core = make_core(tree_config("full+chunked", page_size=2, device=32), core_kind)
    tokens = as_tokens(count_to(16))
    lease = core.match(tokens).lease
    assert not core.reserve(lease, 16).short
    core.release(lease, tokens)
    held = {view.start: view.slots for view in core.snapshot()}
    assert {start for start, slots in held.items() if ("chunked", Tier.DEVICE) in slots} == {12}
    longer = as_tokens(count_to(17))
    assert core.probe(longer, cap=False).boundary == 16
    assert core.make_room("chunked", Tier.DEVICE, 32).free_slots == 32
    assert core.probe(longer, cap=False).boundary == 0
    assert core.audit() == []


def test_a_lease_holds_the_span_that_its_rule_names(core_kind: str) -> None:
    core = make_core(tree_config("full+chunked", page_size=2, device=32), core_kind)
    tokens = as_tokens(count_to(16))
    lease = core.match(tokens).lease
    core.reserve(lease, 16)
    core.insert(lease, tokens)
    assert core.make_room("chunked", Tier.DEVICE, 32).free_slots == 30
    core.release(lease)
    assert core.make_room("chunked", Tier.DEVICE, 32).free_slots == 32


def test_a_rule_that_fails_is_reported_once_and_reuses_no_wrong_page(
    core_kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="hicache.radix.rules.base"):
        core = make_core(tree_config("full+unreliable", device=32), core_kind)
        for _ in range(2):
            lease = core.match(as_tokens(count_to(12))).lease
            core.reserve(lease, 12)
            core.release(lease, as_tokens(count_to(12)))
    assert core.audit() == []
    assert [record.getMessage() for record in caplog.records] == [
        f"model.components.unreliable.rule: {OWN}.UnreliableRule failed"
    ]


@pytest.mark.parametrize("end", range(0, 17, 2))
def test_a_failing_span_needs_everything(end: int) -> None:
    guarded = make_rule(0, ComponentSpec("own", f"{OWN}.UnreliableRule"), 2, ())
    assert isinstance(guarded, GuardedRule)
    assert guarded.span(end) == (end - 2 if end % 8 == 6 else 0)


def test_a_failing_vote_vetoes() -> None:
    guarded = GuardedRule(UnreliableRule(0, ComponentSpec("own", "own"), 1))
    vote = guarded.validator(lambda stop: stop.is_resident)  # type: ignore[attr-defined]  # a Stop
    assert [vote(Stop(0, end, True), end) for end in range(1, 5)] == [True, True, False, True]  # type: ignore[arg-type]  # as Rust has it


def test_a_plain_span_rule_needs_no_python_core() -> None:
    assert "is written in Python" not in core_kind("auto", [ComponentSpec("own", f"{OWN}.ChunkedRule")])[1]


@pytest.mark.parametrize("name", ["StubbornRule", "Nothing"])
def test_a_rule_that_overrides_more_takes_the_python_core(name: str) -> None:
    kind, reason = core_kind("auto", [ComponentSpec("own", f"{OWN}.{name}")])
    assert kind == "python"
    assert f"{OWN}.{name} of own is written in Python, and is more than a SpanRule" in reason


def test_a_rule_that_cannot_be_loaded_is_refused(build: BuildHarness) -> None:
    config = tree_config()
    spec = ComponentSpec("own", f"{OWN}.Nothing")
    with pytest.raises(ConfigError, match=r"model\.components\.own\.rule: cannot load"):
        make_core(type(config)(1, (spec,), {"own": 4}), "python")


def test_the_default_vote_asks_for_an_unbroken_span() -> None:
    rule = make_rule(0, ComponentSpec("own", f"{OWN}.ChunkedRule"), 1, ())
    assert isinstance(rule, SpanRule)
    stops = [Stop(0, 2, True), Stop(2, 3, False), Stop(3, 5, True), Stop(5, 6, False), Stop(6, 7, True)]
    vote = rule.validator(lambda stop: stop.is_resident)  # type: ignore[attr-defined]  # a Stop
    assert [vote(stop, stop.end) for stop in stops] == [True, True, True, True, True]  # type: ignore[arg-type]  # as Rust has it
    late = rule.validator(lambda stop: stop.is_resident)  # type: ignore[attr-defined]  # the same
    assert not late(Stop(4, 5, True), 5)  # type: ignore[arg-type]  # token 3, of the same chunk, is lacking
