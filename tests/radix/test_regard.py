"""L3 is told how to regard what it has: once it is there, when that changes, and no longer than the tree knows of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hicache.radix.keys import as_tokens
from hicache.testing.harness import BuildHarness, Harness
from hicache.testing.payloads import path_bytes
from hicache.testing.trees import count_to
from hicache.types import LeaseId, Namespace, PageKey, Regard, SessionId

CHAT, OTHER = SessionId(1), SessionId(2)
WORTH = 9
SAID = [Regard.LOW, Regard.HIGH]


@pytest.fixture
def cache(build: BuildHarness) -> Harness:
    return build(page_size=4, device=32, host=32, has_store=True, eviction="session")


def hear(cache: Harness) -> None:
    """What the tree has to say comes with its next call."""
    cache.executor.run(cache.core.persist().actions)


def rate(cache: Harness, lease: LeaseId, regard: Regard, worth: int = WORTH) -> None:
    cache.core.rate([lease], [worth], [regard])
    hear(cache)


def keep(cache: Harness, tokens: list[int]) -> None:
    cache.core.keep(as_tokens(tokens))
    hear(cache)


def pages(cache: Harness, tokens: list[int]) -> tuple[PageKey, ...]:
    return tuple(cache.executor.keys.of("full", Namespace(), path_bytes(tokens)))


def heard(cache: Harness, tokens: list[int]) -> list[Regard]:
    """How L3 regards each page."""
    return [cache.executor.regards.get(key, Regard.PLAIN) for key in pages(cache, tokens)]


# ---- what is to be kept ------------------------------------------------------------------------
@pytest.mark.parametrize("policy", ["lru", "session"])
def test_a_kept_prefix_is_kept_in_l3_and_plain_when_it_is_to_be_kept_no_longer(
    build: BuildHarness, policy: str
) -> None:
    cache = build(page_size=4, device=32, host=32, has_store=True, eviction=policy)
    cache.serve_into_store(count_to(16), CHAT)
    keep(cache, count_to(8))
    assert heard(cache, count_to(16)) == [Regard.KEPT, Regard.KEPT, Regard.PLAIN, Regard.PLAIN]
    cache.core.unkeep(as_tokens(count_to(8)))
    hear(cache)
    assert cache.executor.regards == {}


def test_what_reaches_l3_when_it_is_to_be_kept_already_is_called_so(cache: Harness) -> None:
    lease = cache.match(count_to(8), session=CHAT)
    assert cache.reserve_waiting(lease, 8)
    cache.compute(lease, 8)
    cache.release(lease, 8)
    keep(cache, count_to(8))
    assert cache.executor.regards == {}
    cache.persist_all()
    assert heard(cache, count_to(8)) == [Regard.KEPT] * 2


def test_every_component_of_a_kept_prefix_is_kept(build: BuildHarness) -> None:
    cache = build("full+swa+mamba", page_size=4, device=32, host=32, has_store=True, eviction="session")
    cache.serve_into_store(count_to(16), CHAT)
    keep(cache, count_to(16))
    assert set(cache.executor.regards) == set(cache.executor.store)
    assert set(cache.executor.regards.values()) == {Regard.KEPT}


@pytest.mark.parametrize("how", ["reset", "forget_store"])
@pytest.mark.parametrize("is_waiting", [False, True])
def test_what_the_tree_gives_up_is_plain_in_l3(cache: Harness, how: str, is_waiting: bool) -> None:
    """Nobody could take it back later, nor say what waits to be said."""
    high = cache.serve_into_store([50] * 8, OTHER)
    cache.serve_into_store(count_to(16), CHAT)
    keep(cache, count_to(8))
    rate(cache, high, Regard.HIGH)
    assert len(cache.executor.regards) == 4
    if is_waiting:
        cache.core.unkeep(as_tokens(count_to(8)))
    if how == "reset":
        cache.reset()
    else:
        cache.core.forget_store()
    hear(cache)
    assert cache.executor.regards == {}


def test_a_page_that_l3_is_found_to_lack_is_plain_and_kept_again_when_it_is_written_anew(
    cache: Harness,
) -> None:
    cache.serve_into_store(count_to(8), CHAT)
    keep(cache, count_to(8))
    cache.core.learn(as_tokens(count_to(8)), {"full": {0: False, 1: False}})
    hear(cache)
    assert heard(cache, count_to(8)) == [Regard.PLAIN] * 2
    cache.persist_all()
    assert heard(cache, count_to(8)) == [Regard.KEPT] * 2


# ---- what is said of turns ---------------------------------------------------------------------
@pytest.mark.parametrize("regard", SAID)
def test_a_turn_is_regarded_as_it_is_rated_until_it_is_rated_otherwise(
    cache: Harness, regard: Regard
) -> None:
    chat = cache.serve_into_store(count_to(16), CHAT)
    rate(cache, chat, regard)
    assert heard(cache, count_to(16)) == [regard] * 4
    rate(cache, chat, regard, worth=0)
    assert heard(cache, count_to(16)) == [Regard.OVER] * 4
    rate(cache, chat, Regard.PLAIN)
    assert cache.executor.regards == {}


@pytest.mark.parametrize(("priority", "regard"), [(0, Regard.LOW), (49, Regard.LOW), (51, Regard.HIGH)])
def test_until_it_is_rated_a_turn_is_regarded_by_its_priority(
    cache: Harness, priority: int, regard: Regard
) -> None:
    cache.serve_into_store(count_to(16), CHAT, priority=priority)
    assert heard(cache, count_to(16)) == [regard] * 4


@pytest.mark.parametrize("regard", SAID)
def test_what_another_session_shares_with_a_turn_is_plain(cache: Harness, regard: Regard) -> None:
    head, mine, theirs = count_to(8), [50] * 8, [60] * 8
    rate(cache, cache.serve_into_store([*head, *mine], CHAT), regard)
    cache.serve_into_store([*head, *theirs], OTHER)
    assert heard(cache, [*head, *mine]) == [Regard.PLAIN] * 2 + [regard] * 2


def test_what_is_to_be_kept_is_so_whatever_is_said_of_its_turn(cache: Harness) -> None:
    chat = cache.serve_into_store(count_to(16), CHAT)
    keep(cache, count_to(8))
    rate(cache, chat, Regard.LOW)
    assert heard(cache, count_to(16)) == [Regard.KEPT] * 2 + [Regard.LOW] * 2


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_under_another_policy_only_what_is_to_be_kept_is_regarded_highly(cache: Harness, policy: str) -> None:
    rate(cache, cache.serve_into_store(count_to(16), CHAT), Regard.HIGH)
    keep(cache, count_to(8))
    cache.core.reconfigure(replace(cache.core.config, eviction=policy))
    hear(cache)
    assert heard(cache, count_to(16)) == [Regard.KEPT] * 2 + [Regard.PLAIN] * 2


def test_what_is_no_regard_is_refused_and_nothing_changes(cache: Harness) -> None:
    chat = cache.serve_into_store(count_to(8), CHAT)
    with pytest.raises(ValueError, match="3 is not a valid Regard"):
        cache.core.rate([chat], [WORTH], [3])  # type: ignore[list-item]  # on purpose
    with pytest.raises(ValueError, match="1 leases, 1 worths and 0 regards"):
        cache.core.rate([chat], [WORTH], [])
    hear(cache)
    assert cache.executor.regards == {}
