"""The vote: the deepest boundary that every component accepts, and nothing less or more."""

from __future__ import annotations

import itertools
import random

import pytest

from hicache.testing.harness import BuildHarness, Harness
from hicache.testing.oracle import BruteForceModel
from hicache.testing.payloads import path_bytes
from hicache.testing.trees import count_to
from hicache.types import Namespace, Tier

DEVICE, HOST, STORE = Tier.DEVICE, Tier.HOST, Tier.STORE


def place(cache: Harness, tokens: list[int], **pages: list[int]) -> None:
    """Let L3 have these pages (of a checkpoint: the states after them), and the tree know it."""
    for component, indices in pages.items():
        cache.executor.seed_store(component, Namespace(), path_bytes(tokens), indices)
    cache.learn(tokens, cap=False)


@pytest.mark.parametrize(
    ("vetoed", "swa", "mamba"),
    [
        ("n3 and n4 by the window", [1], [0, 1, 2, 3]),
        ("n3 and n4 by the state", [0, 1, 2, 3], [1]),
        ("n4 by the window, n3 by the state", [1, 2], [1, 3]),
        ("n4 by the state, n3 by the window", [1, 3], [1, 2]),
    ],
)
def test_the_figure_of_the_vote(build: BuildHarness, vetoed: str, swa: list[int], mamba: list[int]) -> None:
    """The path is walked to n4; n3 and n4 are each vetoed by some component; n2 is the boundary."""
    cache = build("full+swa+mamba", page_size=4, window=4, device=16, host=16, has_store=True)
    place(cache, count_to(16), full=[0, 1, 2, 3], swa=swa, mamba=mamba)
    prompt = [*count_to(16), 99]
    found = cache.probe(prompt)
    assert (found.walked, found.boundary, found.fork) == (16, 8, 16)
    lease = cache.match(prompt)
    assert lease.found == found
    assert {(s.component, s.first_page, s.last_page) for s in cache.plan(lease)} == {
        ("full", 0, 2),
        ("swa", 1, 2),
        ("mamba", 1, 2),
    }
    assert cache.restore(lease).boundary == 8


def test_the_figure_of_the_vote_in_l1(build: BuildHarness) -> None:
    """The same from inserts alone: marks at n1 and n2, then a chunk without a mark to n4."""
    cache = build("full+swa+mamba", page_size=4, window=4, device=16)
    lease = cache.match(count_to(16))
    cache.reserve(lease, 16)
    for end, mark in ((4, True), (8, True), (12, False), (16, False)):
        cache.compute(lease, end)
        cache.insert(lease, mark=mark)
        cache.complete_all()
    cache.release(lease)
    found = cache.probe([*count_to(16), 99])
    assert (found.walked, found.boundary, found.fork) == (16, 8, 16)


@pytest.mark.parametrize("cap", [True, False])
def test_the_last_token_is_kept_to_compute(build: BuildHarness, cap: bool) -> None:
    cache = build(page_size=4, device=16)
    cache.serve(count_to(16))
    assert cache.probe(count_to(16), cap=cap).boundary == (12 if cap else 16)
    assert cache.probe(count_to(15), cap=cap).boundary == 12
    assert cache.probe([], cap=cap).boundary == 0
    assert cache.probe([1], cap=cap).boundary == 0


def test_a_match_may_end_inside_a_node_unless_a_state_is_needed(build: BuildHarness) -> None:
    plain = build(page_size=4, device=16)
    plain.serve(count_to(16))
    assert plain.probe([*count_to(10), 99]).boundary == 8
    hybrid = build("full+mamba", page_size=4, device=16)
    hybrid.serve(count_to(16), marks=[])
    found = hybrid.probe([*count_to(10), 99])
    assert (found.boundary, found.fork) == (0, 8)


@pytest.mark.parametrize(
    ("first", "second"),
    list(itertools.combinations_with_replacement([DEVICE, HOST, STORE], 2)),
    ids=lambda tier: tier.name,
)
def test_residency_in_any_tier_counts_and_the_fastest_is_reported(
    build: BuildHarness, first: Tier, second: Tier
) -> None:
    """A prefix that went as far down as ``first``, and a suffix as far as ``second``.

    Host copies of what the device has leave L2 first.
    """
    cache = build(page_size=4, device=8, host=8, has_store=True)
    cache.serve(count_to(16))
    for tier, gone in ((DEVICE, (first > DEVICE, second > DEVICE)), (HOST, (first > HOST, second > HOST))):
        if gone == (True, True):
            cache.empty("full", tier)
        elif gone[1]:
            cache.make_room("full", tier, 6 if first == HOST or tier == DEVICE else 8)
    found = cache.probe(count_to(17))
    by_tier = {DEVICE: found.source.device, HOST: found.source.host, STORE: found.source.store}
    expected = dict.fromkeys(Tier, 0)
    expected[first] += 8
    expected[second] += 8
    assert (found.boundary, by_tier) == (16, expected)


def test_store_query_asks_for_everything_that_could_move_the_boundary(build: BuildHarness) -> None:
    cache = build("full+swa+mamba", page_size=4, window=4, device=16, host=16, has_store=True)
    cache.serve(count_to(8), marks=[])
    asked = {
        name: [page for page, _ in pages] for name, pages in cache.store_query(count_to(17)).keys.items()
    }
    assert asked["full"] == [2, 3]
    assert {2, 3} <= set(asked["swa"]) <= {0, 2, 3}
    assert {2, 3} <= set(asked["mamba"]) <= {0, 2, 3}


def test_store_query_is_empty_without_l3(build: BuildHarness) -> None:
    cache = build(page_size=4, device=16, host=16)
    assert cache.store_query(count_to(17)).num_keys == 0


def test_a_request_with_nothing_to_reuse_has_an_empty_plan(build: BuildHarness) -> None:
    cache = build("full+swa+mamba", page_size=4, device=16)
    lease = cache.match(count_to(9))
    assert cache.plan(lease) == ()
    assert cache.settle(lease).boundary == 0
    assert cache.core.lease_state(lease.lease, "mamba") is None


@pytest.mark.parametrize("model", ["full+swa", "full+mamba", "full+swa+mamba", "swa", "mamba"])
def test_match_and_probe_agree_with_brute_force_on_random_endpoints(
    build: BuildHarness, model: str, seeded_random: random.Random
) -> None:
    """Every component gets a random set of pages in L3; the path is mostly whole."""
    for _ in range(40):
        window = seeded_random.choice([1, 4, 6, 12])
        cache = build(model, page_size=4, window=window, device=16, host=16, has_store=True)
        tokens = count_to(24)
        truth = BruteForceModel(cache.config)
        pages = {}
        for name in model.split("+"):
            share = 0.95 if name == "full" else 0.6
            pages[name] = [page for page in range(6) if seeded_random.random() < share]
            truth.place(Namespace(), path_bytes(tokens), name, STORE, pages[name])
        place(cache, tokens, **pages)
        for length in range(1, 26):
            prompt = [*tokens, 99][:length]
            expected = truth.expect(Namespace(), path_bytes(prompt)).boundary
            assert cache.probe(prompt).boundary == expected, pages
        lease = cache.match([*tokens, 99])
        assert cache.restore(lease).boundary == lease.found.boundary
        cache.release(lease)


@pytest.mark.parametrize("model", ["full", "full+swa", "full+mamba", "full+swa+mamba", "swa", "mamba"])
def test_without_pressure_the_tree_finds_what_the_model_published(
    build: BuildHarness, model: str, seeded_random: random.Random
) -> None:
    """The model follows its own rules from the requests alone and never looks at the core."""
    for page_size in (1, 2, 4):
        cache = build(model, page_size=page_size, window=2 * page_size, device=2_000)
        cache.is_checked = False
        model_of = BruteForceModel(cache.config)
        for _ in range(25):
            length = seeded_random.randrange(1, 9 * page_size)
            prompt = [seeded_random.randrange(2) for _ in range(length)]
            path = path_bytes(prompt)
            expected = model_of.expect(Namespace(), path)
            found = cache.probe(prompt)
            assert found.boundary == expected.boundary
            assert found.fork == expected.fork
            mark = (length - 1) // page_size * page_size
            cache.serve(prompt, marks=[mark] if mark else [])
            for end in (mark, length):
                if end > found.boundary:
                    model_of.publish(Namespace(), path[: 4 * end])
        cache.is_checked = True
        cache.check()
