"""Bytes to slots."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.config import device_slots, host_slots, load_config, slots_bytes, store_bytes
from hicache.config.sizing import (
    chunk_pages,
    conversation_bytes,
    needed_slots,
    nominal_lengths,
    nominal_weights,
    pool_problems,
    share_out,
)
from hicache.config.tiers import PoolConfig
from hicache.types import ComponentSpec

Refused = Callable[..., tuple[str, ...]]

FULL = ComponentSpec("full", "path", 0, 2, 16)
SWA = ComponentSpec("swa", "window", 1000, 2, 16)
MAMBA = ComponentSpec("mamba", "checkpoint", 0, 2, 0, 1024)
CUSTOM = ComponentSpec("own", "my.rules.Sparse", 0, 1, 8)


def test_one_request_needs_a_page_a_window_and_a_page_and_two_states() -> None:
    assert [needed_slots(spec, 16) for spec in (FULL, SWA, MAMBA, CUSTOM)] == [1, 64, 2, 1]


def test_a_conversation_costs_its_tokens_and_the_marks_that_the_tree_keeps_of_it() -> None:
    # A state costs as much as 64 tokens of path: spare marks stand 1448 x 8 = 11,584 tokens apart.
    costs = conversation_bytes((FULL, MAMBA), 16, 11_584)
    assert costs == {"full": 16 * 11_584, "mamba": 1024 * 2}
    assert conversation_bytes((SWA, CUSTOM), 16, 8192) == {"swa": 16 * 1000, "own": 8 * 8192}
    assert conversation_bytes((SWA,), 2048, 8192) == {"swa": 16 * 2048}


@pytest.mark.parametrize("capacity_bytes", [1 << 20, 1 << 25, 1 << 40])
@pytest.mark.parametrize("state_bytes", [1024, 1 << 17, 1 << 20])
def test_short_chats_and_long_prompts_are_served_equally_well(state_bytes: int, capacity_bytes: int) -> None:
    """Of the conversations that the best split for each would hold, the default holds the same part."""
    specs = (FULL, ComponentSpec("mamba", "checkpoint", 0, 2, 0, state_bytes))
    shares = nominal_weights(specs, 16, capacity_bytes)
    short, long = nominal_lengths(specs, capacity_bytes)
    assert sum(shares.values()) == 1

    def part_held(num_tokens: int) -> Fraction:
        costs = conversation_bytes(specs, 16, num_tokens)
        return min(shares[name] * sum(costs.values()) / costs[name] for name in costs)

    assert part_held(short) == part_held(long) > Fraction(1, 2)
    assert part_held(4 * short) > part_held(short)


@pytest.mark.parametrize(
    ("capacity_bytes", "lengths"),
    [(16 * 4096, (512, 1024)), (16 << 20, (4096, 131_072)), (16 << 30, (8192, 131_072))],
    ids=["small", "middling", "large"],
)
def test_conversations_are_taken_to_be_as_long_as_the_pool_can_hold_some_of(
    capacity_bytes: int, lengths: tuple[int, int]
) -> None:
    assert nominal_lengths((FULL, MAMBA), capacity_bytes) == lengths
    assert nominal_lengths((MAMBA,), capacity_bytes) == (8192, 131_072)  # nothing to measure tokens by


def test_a_window_costs_a_shorter_conversation_no_more_than_its_tokens() -> None:
    assert conversation_bytes((SWA,), 16, 500) == {"swa": 16 * 500}
    assert conversation_bytes((SWA,), 16, 10) == {"swa": 16 * 16}


def test_a_small_pool_has_marks_for_more_than_the_running_request() -> None:
    """1 MiB with states of 4 KiB had 3 of them: a hit rate of 0.02 on short chats, where equal shares gave 0.72."""
    specs = (ComponentSpec("full", "path", 0, 2, 64), ComponentSpec("mamba", "checkpoint", 0, 2, 0, 4096))
    assert share_out(specs, 16, capacity_bytes=1 << 20) == {"full": 916, "mamba": 26}


@pytest.mark.parametrize(
    ("capacity_bytes", "states"),
    [(16 << 10, 4), (32 << 10, 8), (64 << 10, 8)],
    ids=["a quarter", "eight", "by cost"],
)
def test_a_small_pool_has_room_for_the_marks_of_some_requests(capacity_bytes: int, states: int) -> None:
    assert share_out((FULL, MAMBA), 16, capacity_bytes=capacity_bytes)["mamba"] == states


@pytest.mark.parametrize(
    ("specs", "capacity_bytes", "expected"),
    [
        ((FULL, MAMBA), 3994, {"full": 3, "mamba": 3}),  # five sixths of it: three states, one page
        ((FULL, MAMBA), 3993, {"full": 7, "mamba": 2}),  # what one request needs
        ((FULL, SWA), 129 * 256 * 3 // 2, {"full": 65, "swa": 128}),
        ((FULL, SWA), 129 * 256 * 3 // 2 - 1, {"full": 96, "swa": 96}),
    ],
    ids=["states", "a byte less", "windows", "a byte less of windows"],
)
def test_a_tiny_pool_keeps_what_another_request_left(
    specs: tuple[ComponentSpec, ...], capacity_bytes: int, expected: dict[str, int]
) -> None:
    assert share_out(specs, 16, capacity_bytes=capacity_bytes) == expected


def test_paths_and_marks_share_among_themselves_by_what_they_cost() -> None:
    narrow = ComponentSpec("narrow", "window", 500, 2, 16)
    draft = ComponentSpec("draft", "path", 0, 1, 4)
    shares = nominal_weights((FULL, draft, SWA, narrow), 4, 1 << 40)
    assert shares["full"] == 4 * shares["draft"]
    assert shares["swa"] == 2 * shares["narrow"]
    assert nominal_weights((SWA, narrow), 4, 1 << 40) == {"swa": Fraction(2, 3), "narrow": Fraction(1, 3)}
    assert nominal_weights((FULL, draft), 4, 1 << 40) == {"full": Fraction(4, 5), "draft": Fraction(1, 5)}


def test_one_component_gets_the_whole_pool() -> None:
    assert share_out((FULL,), 16, capacity_bytes=10 * 256 + 255) == {"full": 10}


def test_a_component_whose_share_is_too_small_gets_what_a_request_needs() -> None:
    large = ComponentSpec("large", "checkpoint", 0, 1, 0, 10_000)
    wide = ComponentSpec("wide", "path", 0, 1, 1_000)
    # by cost alone, large would get 40,000 of 8,232,000 bytes: no slot
    slots = share_out((wide, large), 1, capacity_bytes=30_000)
    assert slots == {"wide": 10, "large": 2}


def test_fractions_say_how_to_share() -> None:
    slots = share_out((FULL, MAMBA), 16, capacity_bytes=10_240, split={"full": 0.5, "mamba": 0.5})
    assert slots == {"full": 20, "mamba": 5}


def test_ranks_share_the_total_and_each_gets_its_part(tree: dict[str, Any]) -> None:
    one = load_config(tree, environ={})
    four = load_config(
        tree,
        environ={},
        overrides={
            "ranks": {"tp_size": 2, "pp_size": 2, "tp_rank": 1},
            "tiers.device.capacity": "4MiB",
            "tiers.host": {"capacity": None, "capacity_per_rank": "4MiB"},
            "tiers.stores.0.capacity": "64MiB",
        },
    )
    assert device_slots(four) == device_slots(one)
    assert host_slots(four) == host_slots(one)
    assert store_bytes(four) == store_bytes(one) == (16 * 2**20,)


def test_without_a_host_tier_there_are_no_host_slots(tree: dict[str, Any]) -> None:
    assert (
        host_slots(load_config(tree, environ={}, overrides={"tiers.host": None, "tiers.stores": None})) == {}
    )


def test_a_store_without_a_bound_of_ours_has_none(tree: dict[str, Any]) -> None:
    for store in ({"kind": "memory"}, {"kind": "redis", "url": "redis://h"}):
        assert store_bytes(load_config(tree, environ={}, overrides={"tiers.stores": [store]})) == (None,)


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ({"full": 0.5, "swa": 0.5}, ["tiers.device.split (argument): says nothing about mamba"]),
        (
            {"full": 0.5, "swa": 0.3, "manba": 0.2},
            [
                "tiers.device.split.manba (argument): unknown component; did you mean mamba?",
                "tiers.device.split (argument): says nothing about mamba",
            ],
        ),
        ({"full": 0.5, "swa": 0.3, "mamba": 0.1}, ["tiers.device.split (argument): the shares sum to 0.9"]),
        ({"full": 0, "swa": 0, "mamba": 0}, ["tiers.device.split (argument): the shares sum to 0"]),
        (
            {"full": "50GiB", "swa": 0, "mamba": 0},
            ["tiers.device.split.full (argument): found '50GiB', which"],
        ),
        (
            {"full": "99.9%", "swa": 0.0005, "mamba": 0.0005},
            [
                (
                    "tiers.device.split.swa (argument): 0.0005 of 1048576 bytes gives 2 slots of 256, but one request"
                    " needs 5; expected at least 0.0012"
                ),
                (
                    "tiers.device.split.mamba (argument): 0.0005 of 1048576 bytes gives 0 slots of 1024, but one"
                    " request needs 2; expected at least 0.0020"
                ),
            ],
        ),
    ],
    ids=str,
)
def test_a_split_that_cannot_be_is_refused_with_numbers(
    tree: dict[str, Any], refused: Refused, split: dict[str, Any], expected: list[str]
) -> None:
    found = refused(tree, overrides={"tiers.device.split": split})
    assert len(found) == len(expected), found
    assert all(line.startswith(start) for line, start in zip(found, expected, strict=True)), found


def test_a_split_may_be_off_by_a_thousandth_and_still_never_gives_more_than_the_total(
    tree: dict[str, Any],
) -> None:
    split = {"full": 0.5005, "swa": 0.25, "mamba": 0.25}
    config = load_config(tree, environ={}, overrides={"tiers.device.split": split})
    assert slots_bytes(config, device_slots(config)) <= 2**20


specs = st.one_of(
    st.builds(lambda n: ComponentSpec("", "path", 0, 1, n), st.integers(1, 4096)),
    st.builds(lambda n, w: ComponentSpec("", "window", w, 1, n), st.integers(1, 4096), st.integers(1, 5000)),
    st.builds(lambda n: ComponentSpec("", "checkpoint", 0, 1, 0, n), st.integers(1, 10**7)),
)


@given(
    components=st.lists(specs, min_size=1, max_size=4),
    page_size=st.integers(1, 512),
    spare_bytes=st.integers(0, 10**10),
)
def test_slots_never_exceed_the_capacity_and_always_serve_one_request(
    components: list[ComponentSpec], page_size: int, spare_bytes: int
) -> None:
    named = [
        ComponentSpec(f"c{i}", s.rule, s.window_tokens, 1, s.bytes_per_token, s.state_bytes)
        for i, s in enumerate(components)
    ]
    capacity = spare_bytes + sum(needed_slots(s, page_size) * s.slot_bytes(page_size) for s in named)
    assert not list(pool_problems(PoolConfig(capacity=capacity), named, page_size, num_ranks=1))
    slots = share_out(named, page_size, capacity_bytes=capacity)
    used = sum(slots[s.name] * s.slot_bytes(page_size) for s in named)
    assert used <= capacity
    assert all(slots[s.name] >= needed_slots(s, page_size) for s in named)
    assert capacity - used < sum(s.slot_bytes(page_size) for s in named) + len(named)


def test_a_pool_one_byte_short_of_a_request_is_refused() -> None:
    needed = sum(needed_slots(s, 16) * s.slot_bytes(16) for s in (FULL, SWA, MAMBA))
    assert list(pool_problems(PoolConfig(capacity=needed - 1), (FULL, SWA, MAMBA), 16, num_ranks=1))
    assert not list(pool_problems(PoolConfig(capacity=needed), (FULL, SWA, MAMBA), 16, num_ranks=1))


@pytest.mark.parametrize(
    ("split", "pages"),
    [("shared", 25), ({"full": 0.75, "swa": 0.25}, 45), ("fixed", None)],
    ids=["shared", "given", "chosen"],
)
def test_a_chunk_leaves_room_in_l1(tree: dict[str, Any], split: object, pages: int | None) -> None:
    """200 pages of 8 KiB, a window of 4 pages; a chunk has a window's slots for all of its tokens."""
    overrides = {
        "model.page_size": 4,
        "model.components": {
            "mamba": None,
            "full": {"rule": "path", "layers": 2, "bytes_per_token": 2048},
            "swa": {"rule": "window", "window": 16, "layers": 2, "bytes_per_token": 2048},
        },
        "tiers.device": {"kind": "cpu", "capacity": 200 * 8192, "split": split},
    }
    config = load_config(tree, overrides=overrides, environ={})
    expected = device_slots(config)["swa"] - 5 if pages is None else pages
    assert chunk_pages(config, 8192) == expected
    assert chunk_pages(config, 40) == 10
    assert chunk_pages(config, 3) == 1


def test_a_chunk_that_takes_no_more_than_its_prompt_is_as_long_as_asked(tree: dict[str, Any]) -> None:
    overrides = {
        "model.page_size": 4,
        "model.components": {
            "full": {"rule": "path", "layers": 2, "bytes_per_token": 2048},
            "mamba": {"rule": "checkpoint", "layers": 2, "state_bytes": 8192},
        },
        "tiers.device": {"kind": "cpu", "capacity": 200 * 8192},
    }
    assert chunk_pages(load_config(tree, overrides=overrides, environ={}), 8192) == 2048
