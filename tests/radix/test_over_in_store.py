"""L3 is told which of its pages are over: what only ended sessions used, and nothing that others share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hicache.testing.harness import BuildHarness, Harness
from hicache.testing.payloads import path_bytes
from hicache.testing.trees import count_to
from hicache.types import LeaseId, Namespace, PageKey, Regard, SessionId

CHAT, OTHER = SessionId(1), SessionId(2)
OVER, WORTH = 0, 9


def rate(cache: Harness, lease: LeaseId, worth: int) -> None:
    """Rate a turn; what that makes the tree say comes with its next call."""
    cache.core.rate([lease], [worth])
    cache.executor.run(cache.core.persist().actions)


def over(cache: Harness) -> set[PageKey]:
    """What L3 was told to be over, and not otherwise since."""
    return regarded(cache, Regard.OVER)


def regarded(cache: Harness, regard: Regard) -> set[PageKey]:
    return {key for key, said in cache.executor.regards.items() if said is regard}


def pages_of(cache: Harness, tokens: list[int], component: str = "full") -> tuple[PageKey, ...]:
    return tuple(cache.executor.keys.of(component, Namespace(), path_bytes(tokens)))


@pytest.fixture
def cache(build: BuildHarness) -> Harness:
    return build(page_size=4, device=32, host=32, has_store=True, eviction="session")


def test_all_of_a_session_that_is_over_is_called_so(cache: Harness) -> None:
    first = cache.serve_into_store(count_to(8), CHAT)
    second = cache.serve_into_store(count_to(16), CHAT)
    assert over(cache) == set()
    rate(cache, first, OVER)
    rate(cache, second, OVER)
    assert over(cache) == set(pages_of(cache, count_to(16)))


def test_what_another_session_used_too_is_not(cache: Harness) -> None:
    head, mine, theirs = count_to(8), [50] * 8, [60] * 8
    chat = cache.serve_into_store([*head, *mine], CHAT)
    cache.serve_into_store([*head, *theirs], OTHER)
    rate(cache, chat, OVER)
    assert over(cache) == set(pages_of(cache, [*head, *mine])[2:])


def test_what_another_session_comes_to_use_is_over_no_more(cache: Harness) -> None:
    chat = cache.serve_into_store(count_to(16), CHAT)
    rate(cache, chat, OVER)
    cache.release(cache.match([*count_to(8), 99], session=OTHER))
    assert over(cache) == set(pages_of(cache, count_to(16))[2:])


def test_a_session_that_goes_on_is_over_no_more(cache: Harness) -> None:
    chat = cache.serve_into_store(count_to(16), CHAT)
    rate(cache, chat, OVER)
    rate(cache, chat, WORTH)
    assert over(cache) == set()


def test_a_turn_that_comes_back_is_over_no_more_without_a_word(cache: Harness) -> None:
    rate(cache, cache.serve_into_store(count_to(16), CHAT), OVER)
    cache.serve_into_store(count_to(20), CHAT)
    assert over(cache) == set()


@pytest.mark.parametrize("call", ["learn", "keep", "unkeep"])
def test_what_is_to_be_said_waits_for_a_call_that_can_say_it(cache: Harness, call: str) -> None:
    """These return no actions."""
    chat = cache.serve_into_store(count_to(8), CHAT)
    cache.core.rate([chat], [OVER])
    other = np.arange(900, 908, dtype=np.int32)
    if call == "learn":
        cache.core.learn(other, {"full": {0: False}})
    elif call == "keep":
        cache.core.keep(other)
    else:
        cache.core.unkeep(other)
    cache.executor.run(cache.core.persist().actions)
    assert over(cache) == set(pages_of(cache, count_to(8)))


def test_what_reaches_l3_when_it_is_over_already_is_called_so(cache: Harness) -> None:
    lease = cache.match(count_to(8), session=CHAT)
    assert cache.reserve_waiting(lease, 8)
    cache.compute(lease, 8)
    cache.release(lease, 8)
    rate(cache, lease.lease, OVER)
    assert over(cache) == set()
    cache.persist_all()
    assert over(cache) == set(pages_of(cache, count_to(8)))


def test_every_component_of_a_hybrid_is_over(build: BuildHarness) -> None:
    cache = build("full+swa+mamba", page_size=4, device=32, host=32, has_store=True, eviction="session")
    rate(cache, cache.serve_into_store(count_to(16), CHAT), OVER)
    assert over(cache) == set(cache.executor.store)
    named = {pages_of(cache, count_to(16), name)[-1] for name in ("full", "swa", "mamba")}
    assert named <= over(cache)


def test_a_policy_that_follows_no_sessions_says_nothing(build: BuildHarness) -> None:
    cache = build(page_size=4, device=32, host=32, has_store=True, eviction="lru")
    rate(cache, cache.serve_into_store(count_to(16), CHAT), OVER)
    assert over(cache) == set()


# ---- what is to be kept is not over ------------------------------------------------------------
def keep(cache: Harness, tokens: list[int]) -> None:
    cache.core.keep(np.array(tokens, dtype=np.int32))
    cache.executor.run(cache.core.persist().actions)


def test_a_kept_prefix_is_not_over_with_the_rest_of_its_session(cache: Harness) -> None:
    chat = cache.serve_into_store(count_to(16), CHAT)
    keep(cache, count_to(8))
    rate(cache, chat, OVER)
    assert over(cache) == set(pages_of(cache, count_to(16))[2:])


def test_what_is_to_be_kept_is_over_no_more_and_again_when_no_longer(cache: Harness) -> None:
    rate(cache, cache.serve_into_store(count_to(16), CHAT), OVER)
    keep(cache, count_to(8))
    assert over(cache) == set(pages_of(cache, count_to(16))[2:])
    cache.core.unkeep(np.array(count_to(8), dtype=np.int32))
    cache.executor.run(cache.core.persist().actions)
    assert over(cache) == set(pages_of(cache, count_to(16)))


def test_what_was_kept_in_vain_is_over_only_if_its_session_is(cache: Harness) -> None:
    cache.serve_into_store(count_to(16), CHAT)
    keep(cache, count_to(8))
    cache.core.unkeep(np.array(count_to(8), dtype=np.int32))
    cache.executor.run(cache.core.persist().actions)
    assert over(cache) == set()


# ---- another policy ----------------------------------------------------------------------------
def reorder(cache: Harness, eviction: str) -> None:
    cache.core.reconfigure(replace(cache.core.config, eviction=eviction))
    cache.executor.run(cache.core.persist().actions)


def test_under_a_policy_that_follows_no_sessions_nothing_is_over_any_more(cache: Harness) -> None:
    rate(cache, cache.serve_into_store(count_to(16), CHAT), OVER)
    cache.serve_into_store([70] * 8, OTHER)
    reorder(cache, "lru")
    assert over(cache) == set()


def test_under_another_policy_that_follows_sessions_what_came_before_is_rated_by_nobody(
    cache: Harness,
) -> None:
    """Whoever rates turns begins anew with it, so a worth of before would stand for ever."""
    rate(cache, cache.serve_into_store(count_to(16), CHAT), OVER)
    reorder(cache, "adaptive")
    assert over(cache) == set()
    rate(cache, cache.serve_into_store(count_to(16), CHAT), OVER)
    assert over(cache) == set(pages_of(cache, count_to(16)))
