"""The reference model against a simulator of a few lines, and what ``--capacity`` means."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest

import hicache
from hicache.config import device_slots, load_config
from hicache.errors import ConfigError
from hicache.replay.bound import ClairvoyantBound
from hicache.replay.capacity import Capacity, parse_capacity
from hicache.replay.cost import CostModel
from hicache.replay.reference import block_sequences, reference_replay, whole_leaf_replay
from hicache.replay.trace_tree import TraceTree
from hicache.types import TierTokens
from hicache.workload import Request, Trace, read_trace
from hicache.workload.records import BlockSource

TRACES = Path(hicache.__file__).resolve().parents[1] / "traces"
Blocks = tuple[int, ...]


@pytest.fixture(scope="module")
def agents() -> Trace:
    return read_trace(TRACES / "cc_agentic_small.jsonl.zst")


# ---- against a plain simulator ---------------------------------------------------------------------------------------
def trace_of(prompts: Sequence[Blocks]) -> Trace:
    """Requests whose prompts are these full blocks."""
    requests = []
    for index, blocks in enumerate(prompts):
        ids = np.array(blocks, dtype=np.int64)
        source = BlockSource(ids, 512 * len(blocks), 512 * len(blocks))
        empty = BlockSource(ids[:0], 0, 0)
        requests.append(Request(index, float(index), source, empty, block_ids=ids))
    return Trace("made", "blocks", tuple(requests))


def simulate(prompts: list[Blocks], capacity: int) -> int:
    """Hit blocks of LRU over leaf blocks: look up whole, store whole, then trim the oldest leaves."""
    used: dict[Blocks, int] = {}
    hits = 0
    for now, blocks in enumerate(prompts):
        chain = [blocks[:end] for end in range(1, len(blocks) + 1)]
        known = 0
        while known < len(chain) and chain[known] in used:
            known += 1
        hits += known
        used.update(dict.fromkeys(chain, now))
        while len(used) > capacity:
            parents = {prefix[:-1] for prefix in used}
            leaves = [prefix for prefix in used if prefix not in parents]
            del used[min(leaves, key=lambda prefix: (used[prefix], -len(prefix)))]
    return hits


def random_prompts(choice: random.Random) -> list[Blocks]:
    prompts: list[Blocks] = []
    for _ in range(120):
        head = choice.choice(prompts) if prompts and choice.random() < 0.7 else ()
        head = head[: choice.randrange(len(head) + 1)]
        tail = tuple(choice.randrange(1, 4) + 10 * (len(head) + i) for i in range(choice.randrange(1, 7)))
        prompts.append(head + tail)
    return prompts


@pytest.mark.parametrize("capacity", [1, 2, 5, 13, 40, 1000])
@pytest.mark.parametrize("round_", range(4))
def test_lru_equals_a_plain_simulation_block_for_block(
    seeded_random: random.Random, capacity: int, round_: int
) -> None:
    prompts = random_prompts(seeded_random)
    result = reference_replay(trace_of(prompts), capacity)
    assert result.hit_blocks == simulate(prompts, capacity)
    assert (result.requests, result.audit_errors) == (len(prompts), ())


def test_a_cache_without_limits_hits_what_the_trace_says(seeded_random: random.Random) -> None:
    trace = trace_of(random_prompts(seeded_random))
    result = reference_replay(trace, trace.distinct_blocks)
    assert result.token_hit_rate == pytest.approx(trace.infinite_hit_rate)
    assert result.capacity_share == 1


def test_the_report_of_one_capacity_adds_up(seeded_random: random.Random) -> None:
    trace = trace_of(random_prompts(seeded_random))
    report = reference_replay(trace, 20).as_json()
    hits, computed = report["hit_tokens"], report["computed_tokens"]
    assert isinstance(hits, dict)
    assert isinstance(computed, int)
    assert sum(hits.values()) + computed == report["prompt_tokens"] == trace.prompt_tokens
    assert report["token_hit_rate"] == hits["device"] / trace.prompt_tokens


def test_a_reference_replay_can_be_stopped(seeded_random: random.Random) -> None:
    stop = threading.Event()
    stop.set()
    assert reference_replay(trace_of(random_prompts(seeded_random)), 20, stop=stop).requests == 0


def test_no_room_at_all_is_refused(seeded_random: random.Random) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        reference_replay(trace_of(random_prompts(seeded_random)), 0)


# ---- the clairvoyant bound -------------------------------------------------------------------------------------------
def best_possible(prompts: list[Blocks], capacity: int) -> int:
    """Hits of the best of all policies, by trying every set of blocks that could be kept."""
    best: dict[frozenset[Blocks], int] = {frozenset(): 0}
    for blocks in prompts:
        chain = [blocks[:end] for end in range(1, len(blocks) + 1)]
        after: dict[frozenset[Blocks], int] = {}
        for kept, hits in best.items():
            known = 0
            while known < len(chain) and chain[known] in kept:
                known += 1
            there = sorted(kept | set(chain))
            for size in range(min(capacity, len(there)) + 1):
                for choice in combinations(there, size):
                    after[frozenset(choice)] = max(after.get(frozenset(choice), 0), hits + known)
        best = after
    return max(best.values())


@pytest.mark.parametrize("round_", range(6))
@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_the_bound_is_the_best_of_all_policies(
    seeded_random: random.Random, capacity: int, round_: int
) -> None:
    letters = [(1,), (1, 2), (1, 2, 3), (1, 4), (5,), (5, 6)]
    prompts = [seeded_random.choice(letters) for _ in range(8)]
    bound = ClairvoyantBound(block_sequences(trace_of(chained(prompts))))
    assert bound.hit_blocks(capacity) == best_possible(prompts, capacity)


def chained(prompts: list[Blocks]) -> list[Blocks]:
    """Block ids that are equal only where all before them is equal, too."""
    ids: dict[Blocks, int] = {}
    return [
        tuple(ids.setdefault(blocks[:end], len(ids)) for end in range(1, len(blocks) + 1))
        for blocks in prompts
    ]


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo"])
@pytest.mark.parametrize("capacity", [1, 2, 5, 13, 40])
def test_no_policy_beats_the_bound(seeded_random: random.Random, capacity: int, policy: str) -> None:
    trace = trace_of(chained(random_prompts(seeded_random)))
    bound = ClairvoyantBound(block_sequences(trace))
    result = reference_replay(trace, capacity, policy=policy, bound=bound)
    assert result.bound_hit_blocks is not None
    assert result.hit_blocks <= result.bound_hit_blocks


def test_with_room_for_all_the_bound_is_the_infinite_cache(seeded_random: random.Random) -> None:
    trace = trace_of(chained(random_prompts(seeded_random)))
    result = reference_replay(trace, 5, bound=ClairvoyantBound(block_sequences(trace)))
    assert result.bound_hit_rate is not None
    assert result.bound_hit_rate < trace.infinite_hit_rate
    hits = ClairvoyantBound(block_sequences(trace)).hit_blocks(trace.distinct_blocks)
    assert 512 * hits / trace.prompt_tokens == pytest.approx(trace.infinite_hit_rate)


def test_a_bound_of_nothing_is_nothing_and_no_capacity_is_refused() -> None:
    bound = ClairvoyantBound(block_sequences(trace_of([(), ()])))
    assert bound.hit_blocks(1) == 0
    with pytest.raises(ValueError, match="at least 1"):
        bound.hit_blocks(0)


BOUNDS = {
    "cc_agentic_small": (0.2771, 0.4523, 0.7364, 0.8887, 0.9413, 0.9451),
    "mooncake_conversation": (0.2445, 0.3134, 0.3734, 0.3734, 0.3734, 0.3734),
}


@pytest.mark.parametrize("name", sorted(BOUNDS))
def test_the_bound_is_the_published_one_to_four_digits(name: str) -> None:
    trace = read_trace(TRACES / f"{name}.jsonl.zst")
    bound = ClairvoyantBound(block_sequences(trace))
    shares = ("1%", "2%", "5%", "10%", "20%", "50%")
    hits = [bound.hit_blocks(parse_capacity(share).in_blocks(trace)) for share in shares]
    assert [round(512 * count / trace.prompt_tokens, 4) for count in hits] == list(BOUNDS[name])


# ---- whole leaves ----------------------------------------------------------------------------------------------------
def test_a_tree_of_a_trace_ends_nodes_at_forks_and_at_the_ends_of_prompts() -> None:
    tree = TraceTree(block_sequences(trace_of([(1, 2, 3, 4), (1, 2, 5), (1, 2, 3, 4, 6, 7), (), (8,)])))
    assert tree.paths == [(0, 1), (0, 2), (0, 1, 3), (), (4,)]
    assert (tree.parent, tree.num_blocks) == ([-1, 0, 0, 1, -1], [2, 2, 1, 2, 1])
    assert tree.end == [2, 4, 3, 6, 1]


def test_a_leaf_goes_whole_and_the_running_requests_own_by_the_block() -> None:
    prompts = [(1, 2, 3), (4, 5), (1, 2, 3)]
    tree = TraceTree(block_sequences(trace_of(prompts)))
    assert [whole_leaf_replay(trace_of(prompts), size, tree).hit_blocks for size in (5, 4, 2)] == [3, 0, 0]
    own = [(1, 2, 3, 4), (1, 2, 3, 4)]
    assert whole_leaf_replay(trace_of(own), 3, TraceTree(block_sequences(trace_of(own)))).hit_blocks == 3


@pytest.mark.parametrize(
    ("share", "published"),
    [("1%", 0.0727), ("2%", 0.1647), ("5%", 0.4881), ("10%", 0.7997), ("20%", 0.9182), ("50%", 0.9431)],
)
def test_lru_by_whole_leaves_of_the_trace_is_the_published_one_to_four_digits(
    agents: Trace, share: str, published: float
) -> None:
    tree = TraceTree(block_sequences(agents))
    result = whole_leaf_replay(agents, parse_capacity(share).in_blocks(agents), tree)
    assert round(result.token_hit_rate, 4) == published


# ---- three tiers -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "percent", "published"),
    [
        ("cc_agentic_small", 1, (0.0891, 0.4641, 0.3790)),
        ("cc_agentic_small", 2, (0.2126, 0.6171, 0.1134)),
        pytest.param("mooncake_conversation", 0.5, (0.0448, 0.0534, 0.2072), marks=pytest.mark.slow),
        pytest.param("mooncake_conversation", 1, (0.0532, 0.1445, 0.1623), marks=pytest.mark.slow),
        pytest.param("mooncake_conversation", 2, (0.0783, 0.2035, 0.0882), marks=pytest.mark.slow),
    ],
)
def test_what_each_of_three_tiers_serves_is_the_published_split_to_four_digits(
    name: str, percent: float, published: tuple[float, ...]
) -> None:
    """L2 is 4 times L1 and L3 20 times; for LRU one stack, cut at the summed capacities."""
    trace = read_trace(TRACES / f"{name}.jsonl.zst")
    sequences = block_sequences(trace)
    hits = [0.0]
    for times in (1, 5, 25):
        blocks = Capacity(percent=percent * times).in_blocks(trace)
        hits.append(reference_replay(trace, blocks, sequences=sequences).token_hit_rate)
    assert [round(upper - lower, 4) for lower, upper in pairwise(hits)] == list(published)


# ---- against the published figures -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("share", "published"), [("20%", 0.9182), pytest.param("50%", 0.9431, marks=pytest.mark.slow)]
)
def test_whole_leaves_are_within_a_point_of_the_published_figures(
    agents: Trace, share: str, published: float
) -> None:
    """``lru-leaf`` cuts leaves by the whole trace's tree, we by the tree of the moment: never better than pages."""
    blocks, sequences = parse_capacity(share).in_blocks(agents), block_sequences(agents)
    leaf = reference_replay(agents, blocks, granularity="leaf", sequences=sequences).token_hit_rate
    page = reference_replay(agents, blocks, sequences=sequences).token_hit_rate
    assert leaf == pytest.approx(published, abs=0.01)
    assert leaf <= page


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "published"), [("1%", 0.0727), ("2%", 0.1647), ("5%", 0.4881), ("10%", 0.7997)]
)
def test_whole_leaves_under_pressure_are_within_three_points(
    agents: Trace, share: str, published: float
) -> None:
    leaf = reference_replay(agents, parse_capacity(share).in_blocks(agents), granularity="leaf")
    assert published - 0.03 < leaf.token_hit_rate <= published


@pytest.mark.parametrize(
    ("share", "published"), [("5%", 0.5518), pytest.param("10%", 0.8307, marks=pytest.mark.slow)]
)
def test_fifo_is_within_a_point_of_the_published_figures(agents: Trace, share: str, published: float) -> None:
    result = reference_replay(agents, parse_capacity(share).in_blocks(agents), policy="fifo")
    assert result.token_hit_rate == pytest.approx(published, abs=0.01)


# ---- what a capacity means -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "capacity"),
    [
        ("5%", Capacity(percent=5.0)),
        ("0.1%", Capacity(percent=0.1)),
        (" 250% ", Capacity(percent=250.0)),
        ("8192", Capacity(blocks=8192)),
        ("64MiB", Capacity(num_bytes=64 << 20)),
        ("1.5GB", Capacity(num_bytes=1_500_000_000)),
    ],
)
def test_a_capacity_is_percent_blocks_or_bytes(text: str, capacity: Capacity) -> None:
    assert parse_capacity(text) == capacity


@pytest.mark.parametrize(
    "text",
    [
        "",
        "%",
        "0",
        "0%",
        "-5%",
        "-3",
        "nan%",
        "inf%",
        "1e9%",
        "0B",
        "5 %%",
        "many",
        "64 parsecs",
        "1.5",
        "٣",
        "²",
    ],
)
def test_what_is_no_capacity_is_refused_with_the_three_forms(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_capacity(text)
    assert str(caught.value).startswith(f"--capacity: {text!r}")
    assert "64MiB" in str(caught.value)


def test_percent_of_the_distinct_blocks_is_rounded_down_as_the_reference_does(agents: Trace) -> None:
    assert agents.distinct_blocks == 28_874
    assert [parse_capacity(f"{share}%").in_blocks(agents) for share in (1, 2, 5, 0.1)] == [288, 577, 1443, 28]
    assert parse_capacity("77").in_blocks(agents) == 77


def test_the_device_pool_gets_at_least_the_blocks_that_were_asked_for(agents: Trace) -> None:
    for preset in ("cpu", "hybrid"):
        config = load_config(preset, environ={})
        changed = load_config(preset, overrides=parse_capacity("1000").override(config, agents), environ={})
        tokens = device_slots(changed)["full"] * changed.model.page_size
        assert 1000 * 512 <= tokens <= 1001 * 512
        before, after = device_slots(config), device_slots(changed)
        assert after.keys() == before.keys()


def test_bytes_are_taken_as_they_are(agents: Trace) -> None:
    config = load_config("cpu", environ={})
    changed = load_config("cpu", overrides=parse_capacity("1MiB").override(config, agents), environ={})
    assert changed.tiers.device.capacity == 1 << 20


# ---- the stated costs ------------------------------------------------------------------------------------------------
def test_time_to_first_token_is_loaded_plus_computed() -> None:
    cost = CostModel(prefill_us=100.0, host_us=4.0, store_us=33.0)
    assert cost.first_token_s(TierTokens(), 1000) == pytest.approx(0.1)
    assert cost.first_token_s(TierTokens(device=1000), 1000) == 0
    source = TierTokens(device=500, host=200, store=100)
    assert cost.first_token_s(source, 1000) == pytest.approx((200 * 4 + 100 * 37 + 200 * 100) / 1e6)
