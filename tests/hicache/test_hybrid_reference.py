"""Hybrid models in the reference's model: published figures, a plain simulation, and what is refused."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import hicache
from hicache.config.marks import spacing_of, spare_spacing
from hicache.errors import ConfigError
from hicache.replay.components import HybridComponents, parse_components
from hicache.replay.hybrid import HybridResult, hybrid_replay
from hicache.replay.reference import block_sequences, reference_replay
from hicache.types import ComponentSpec, ReuseRule
from hicache.workload import Request, Trace, read_trace
from hicache.workload.records import BlockSource

TRACES = Path(hicache.__file__).resolve().parents[1] / "traces"
Blocks = tuple[int, ...]
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def agents() -> Trace:
    return read_trace(TRACES / "cc_agentic_small.jsonl.zst")


def replayed(trace: Trace, components: str, percent: int, marks: str | None = None) -> HybridResult:
    capacity = trace.distinct_blocks * percent // 100
    result = hybrid_replay(trace, capacity, parse_components(components, marks), block_sequences(trace))
    assert (result.audit_errors, result.requests) == ((), trace.num_requests)
    return result


# ---- published figures -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("components", "percent", "published"),
    [
        ("full+mamba=2", 5, 0.4522),
        ("full+mamba=2", 10, 0.7759),
        pytest.param("full+mamba=2", 1, 0.0769, marks=slow),
        pytest.param("full+mamba=2", 2, 0.1946, marks=slow),
        pytest.param("full+mamba=2", 20, 0.9107, marks=slow),
        pytest.param("full+mamba=16", 1, 0.0700, marks=slow),
        pytest.param("full+mamba=16", 5, 0.4061, marks=slow),
        ("full+mamba=16", 10, 0.7180),
        ("full+mamba=16", 20, 0.8825),
        pytest.param("full+swa=0.5x2", 1, 0.0777, marks=slow),
        pytest.param("full+swa=0.5x8", 5, 0.4519, marks=slow),
    ],
)
def test_marks_at_ends_alone_are_as_published(
    agents: Trace, components: str, percent: int, published: float
) -> None:
    assert replayed(agents, components, percent, "ends").token_hit_rate == pytest.approx(
        published, abs=5.1e-5
    )


@slow
@pytest.mark.parametrize(("percent", "published"), [(5, 0.4552), (10, 0.7791), (20, 0.9133)])
def test_windows_dropped_at_once_cost_less_than_a_thousandth(
    agents: Trace, percent: int, published: float
) -> None:
    """The reference drops what no mark needs when room is short; until then it hits a little more."""
    found = replayed(agents, "full+swa=0.5x2", percent, "ends").token_hit_rate
    assert published - 0.001 < found <= published


@pytest.mark.parametrize(
    ("percent", "published"), [(5, 0.3749), (10, 0.6719), pytest.param(20, 0.8926, marks=slow)]
)
def test_windows_kept_everywhere_are_as_published(agents: Trace, percent: int, published: float) -> None:
    found = replayed(agents, "full+swa=0.5x2", percent, "everywhere").token_hit_rate
    assert found == pytest.approx(published, abs=5.1e-5)


@slow
def test_a_cache_without_limits_makes_the_published_marks(agents: Trace) -> None:
    model = parse_components("full+mamba=2", "ends")
    result = hybrid_replay(agents, 10**9, model, block_sequences(agents))
    assert (round(result.token_hit_rate, 4), result.num_marks) == (0.9385, 1743)


@pytest.mark.parametrize(
    ("components", "percent", "least"),
    [
        ("full+mamba=2", 5, 0.529),
        ("full+mamba=2", 10, 0.805),
        ("full+mamba=16", 10, 0.744),
        ("full+mamba=16", 20, 0.906),
        ("full+swa=0.5x2", 5, 0.488),
        ("full+swa=0.5x2", 10, 0.792),
    ],
)
def test_one_configuration_reaches_every_target(
    agents: Trace, components: str, percent: int, least: float
) -> None:
    assert replayed(agents, components, percent).token_hit_rate >= least


@slow
@pytest.mark.parametrize(
    ("components", "percent", "published"),
    [
        ("full+mamba=2", 5, 0.1698),
        ("full+mamba=2", 20, 0.3167),
        ("full+mamba=16", 5, 0.1119),
        ("full+mamba=16", 20, 0.2718),
    ],
)
def test_chats_gain_from_the_same_configuration(components: str, percent: int, published: float) -> None:
    chats = read_trace(TRACES / "mooncake_conversation.jsonl.zst")
    ends = replayed(chats, components, percent, "ends").token_hit_rate
    assert ends == pytest.approx(published, abs=5.1e-5)
    assert replayed(chats, components, percent).token_hit_rate > ends + 0.003


# ---- against a plain simulation --------------------------------------------------------------------------------------
def trace_of(prompts: Sequence[Blocks], sessions: Sequence[str]) -> Trace:
    requests = []
    for index, (blocks, session) in enumerate(zip(prompts, sessions, strict=True)):
        ids = np.array(blocks, dtype=np.int64)
        source = BlockSource(ids, 512 * len(blocks), 512 * len(blocks))
        empty = BlockSource(ids[:0], 0, 0)
        requests.append(Request(index, float(index), source, empty, session=session, block_ids=ids))
    return Trace("made", "blocks", tuple(requests))


def random_load(choice: random.Random) -> tuple[list[Blocks], list[str]]:
    """Prompts whose blocks are numbered by their prefixes, and the sessions they belong to."""
    numbers: dict[tuple[int, ...], int] = {}
    words: list[tuple[int, ...]] = []
    for _ in range(80):
        head = choice.choice(words) if words and choice.random() < 0.7 else ()
        head = head[: choice.randrange(len(head) + 1)]
        words.append(head + tuple(choice.randrange(3) for _ in range(choice.randrange(1, 9))))
    prompts = [
        tuple(numbers.setdefault(word[: end + 1], len(numbers)) for end in range(len(word))) for word in words
    ]
    return prompts, [f"s{choice.randrange(12)}" for _ in prompts]


class Plain:
    """The rules from scratch after every step: blocks and marks with their last uses, and sums over them."""

    def __init__(self, model: HybridComponents, capacity: int, spacing: int | None) -> None:
        self.model, self.capacity, self.spacing = model, capacity, spacing
        self.used: dict[Blocks, int] = {}
        self.marks: dict[Blocks, int] = {}
        self.spare: set[Blocks] = set()

    def units(self) -> int:
        total = 1_000_000 * len(self.used) + self.model.state_units * len(self.marks)
        for window in self.model.windows:
            held = {
                mark[:end]
                for mark in self.marks
                for end in range(max(1, len(mark) - window.blocks + 1), len(mark) + 1)
            }
            total += window.units * len(held)
        return total

    def serve(self, prompt: Blocks, shared: int, now: int) -> int:
        chain = [prompt[:end] for end in range(1, len(prompt) + 1)]
        known = sum(block in self.used for block in chain)
        boundary = max((end for end in range(1, known + 1) if chain[end - 1] in self.marks), default=0)
        if boundary:
            self.marks[chain[boundary - 1]] = now
        least = len(prompt) * 1_000_000 + self.model.mark_units(len(prompt))
        if least > self.capacity * 1_000_000:
            self.used.update(dict.fromkeys(chain[:known], now))
            return boundary
        self.used.update(dict.fromkeys(chain, now))
        ends = {len(prompt)}
        if self.spacing is not None:
            ends |= {known, shared}
            spare = set(range(self.spacing, len(prompt), self.spacing)) - ends
            self.spare |= {chain[end - 1] for end in spare if end > boundary} - set(self.marks)
            ends |= spare
        self.marks.update({chain[end - 1]: now for end in ends if end > boundary})
        while self.units() > self.capacity * 1_000_000:
            self.evict()
        return boundary

    def evict(self) -> None:
        parents = {block[:-1] for block in self.used}
        tails = [block for block in self.used if block not in parents]
        tail = min(tails, key=lambda b: (b in self.marks, self.used[b], -len(b)))
        ageing = [] if self.spacing is None else [mark for mark in self.marks if mark not in self.spare]
        oldest = min(ageing, key=lambda mark: self.marks[mark], default=tail)
        if tail in self.marks and self.marks.get(oldest, 0) < self.used[tail] and oldest in ageing:
            del self.marks[oldest]
            return
        del self.used[tail]
        self.marks.pop(tail, None)
        self.spare.discard(tail)


@pytest.mark.parametrize("components", ["full+mamba=2", "full+swa=0.5x2", "full+swa=1.5x3+mamba=0.25"])
@pytest.mark.parametrize("marks", ["ends", "chosen"])
@pytest.mark.parametrize("capacity", [5, 12, 30, 1000])
def test_every_request_reuses_what_a_plain_simulation_says(
    seeded_random: random.Random,
    monkeypatch: pytest.MonkeyPatch,
    components: str,
    marks: str,
    capacity: int,
) -> None:
    monkeypatch.setattr("hicache.replay.hybrid.spare_spacing", lambda _tokens: 3 * 512)
    prompts, sessions = random_load(seeded_random)
    model = parse_components(components, marks)
    plain = Plain(model, capacity, 3 if marks == "chosen" else None)
    owners: dict[int, set[str]] = {}
    for blocks, session in zip(prompts, sessions, strict=True):
        for block in blocks:
            owners.setdefault(block, set()).add(session)
    expected = 0
    for now, blocks in enumerate(prompts):
        shared = next((i for i, block in enumerate(blocks) if len(owners[block]) < 2), len(blocks))
        expected += plain.serve(blocks, shared, now)
    trace = trace_of(prompts, sessions)
    result = hybrid_replay(trace, capacity, model, block_sequences(trace))
    assert (result.hit_blocks, result.audit_errors) == (expected, ())
    assert expected > 0


def test_free_payload_everywhere_is_the_path_alone(seeded_random: random.Random) -> None:
    trace = trace_of(*random_load(seeded_random))
    model = parse_components("full+mamba=0", "everywhere")
    hybrid = hybrid_replay(trace, 20, model, block_sequences(trace))
    assert hybrid.hit_blocks == reference_replay(trace, 20).hit_blocks > 0


def test_a_prompt_that_does_not_fit_with_its_mark_displaces_nothing() -> None:
    prompts = [(0, 1), (10, 11, 12, 13), (0, 1)]
    trace = trace_of(prompts, ["a", "b", "a"])
    result = hybrid_replay(trace, 5, parse_components("full+mamba=2", "ends"), block_sequences(trace))
    assert result.hit_blocks == 2


def test_the_second_request_that_diverges_at_a_fork_leaves_a_mark_there() -> None:
    prompts = [(0, 1, 2), (0, 1, 3), (0, 1, 4)]
    trace = trace_of(prompts, ["a", "a", "a"])
    sequences = block_sequences(trace)
    assert hybrid_replay(trace, 99, parse_components("full+mamba=1", "ends"), sequences).hit_blocks == 0
    assert hybrid_replay(trace, 99, parse_components("full+mamba=1"), sequences).hit_blocks == 2


def test_a_told_prefix_is_marked_by_the_first_request() -> None:
    prompts = [(0, 1, 2), (0, 1, 3)]
    trace = trace_of(prompts, ["a", "b"])
    assert hybrid_replay(trace, 99, parse_components("full+mamba=1"), block_sequences(trace)).hit_blocks == 2


@pytest.mark.parametrize(
    ("mark_blocks", "spacing_blocks"), [(0.5, 45), (1, 64), (2, 90), (16, 256), (24, 314)]
)
def test_spare_marks_stand_further_apart_where_they_cost_more(
    mark_blocks: float, spacing_blocks: int
) -> None:
    assert round(spare_spacing(mark_blocks * 512) / 512) == spacing_blocks
    assert spare_spacing(0) == 1


FULL = ComponentSpec("full", ReuseRule.PATH, bytes_per_token=24 << 10)
STATE = ComponentSpec("mamba", ReuseRule.CHECKPOINT, state_bytes=19 << 20)
WINDOW = ComponentSpec("swa", ReuseRule.WINDOW, window_tokens=1024, bytes_per_token=12 << 10)


@pytest.mark.parametrize(
    ("specs", "page_size", "spacing"),
    [
        ((FULL, STATE), 64, 644 * 64),  # a state is worth 811 tokens
        ((FULL, WINDOW), 64, 512 * 64),
        ((FULL, STATE, WINDOW), 64, 823 * 64),
        ((FULL,), 64, 0),
        ((STATE,), 64, 0),
        ((FULL, ComponentSpec("tiny", ReuseRule.CHECKPOINT, state_bytes=1)), 64, 64),
    ],
)
def test_the_spacing_of_a_model_follows_from_its_bytes(
    specs: tuple[ComponentSpec, ...], page_size: int, spacing: int
) -> None:
    assert spacing_of(specs, page_size) == spacing


def test_a_hybrid_replay_can_be_stopped(seeded_random: random.Random) -> None:
    stop = threading.Event()
    stop.set()
    trace = trace_of(*random_load(seeded_random))
    model = parse_components("full+mamba=2")
    assert hybrid_replay(trace, 20, model, block_sequences(trace), stop=stop).requests == 0


def test_no_room_at_all_is_refused(seeded_random: random.Random) -> None:
    trace = trace_of(*random_load(seeded_random))
    with pytest.raises(ConfigError, match="at least 1"):
        hybrid_replay(trace, 0, parse_components("full+mamba=2"), block_sequences(trace))


# ---- the option ------------------------------------------------------------------------------------------------------
def test_components_are_states_and_windows_in_any_number() -> None:
    model = parse_components(" full+mamba=2+conv=0.25+swa=0.5x2+wide=0.1x8 ")
    assert model.state_units == 2_250_000
    assert [(window.units, window.blocks) for window in model.windows] == [(500_000, 2), (100_000, 8)]
    assert model.mark_blocks == 2.25 + 1 + 0.8
    assert model.mark_units(1) == 2_250_000 + 500_000 + 100_000


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "at least one more"),
        ("full", "at least one more"),
        ("mamba=2", "at least one more"),
        ("full+mamba", "mamba"),
        ("full+mamba=", "mamba"),
        ("full+mamba=-1", "-1"),
        ("full+mamba=nan", "nan"),
        ("full+mamba=inf", "inf"),
        ("full+mamba=two", "two"),
        ("full+=2", "=2"),
        ("full+full=2", "twice"),
        ("full+a=2+a=3", "twice"),
        ("full+swa=0.5x", "window"),
        ("full+swa=0.5x0", "window"),
        ("full+swa=0.5x2.5", "window"),
        ("full+swa=0.5x-2", "window"),
        ("full+swa=0.5x9999999", "window"),
    ],
)
def test_components_that_make_no_sense_are_refused_with_the_form(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match="--components") as refused:
        parse_components(text)
    assert named in str(refused.value)
    assert "full+mamba=2" in str(refused.value)
