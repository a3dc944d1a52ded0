from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.workload import Request, Trace, read_trace
from hicache.workload.ceiling import PrefixSet, id_hits, token_hits
from hicache.workload.records import ArraySource
from hicache.workload.tokens import mix64

TRACES = Path(__file__).parents[2] / "traces"


@pytest.fixture(scope="module")
def mooncake() -> Trace:
    return read_trace(TRACES / "mooncake_conversation.jsonl.zst")


@pytest.fixture(scope="module")
def agentic() -> Trace:
    return read_trace(TRACES / "cc_agentic_small.jsonl.zst")


# ---- the figures of traces/README.md -----------------------------------------------------------------------------


def test_the_mooncake_trace_has_the_stated_blocks_and_infinite_hit_rate(mooncake: Trace) -> None:
    assert mooncake.distinct_blocks == 170_899
    assert round(mooncake.infinite_hit_rate, 4) == 0.3734


def test_the_agent_trace_has_the_stated_blocks_and_infinite_hit_rate(agentic: Trace) -> None:
    assert agentic.distinct_blocks == 28_874
    assert round(agentic.infinite_hit_rate, 4) == 0.9451


def test_counting_tokens_gives_what_counting_block_ids_gives(mooncake: Trace) -> None:
    by_tokens = token_hits(mooncake, 512, keep_one=False, store_answers=False, last_token_written=True)
    assert by_tokens.distinct_pages == mooncake.distinct_blocks
    assert by_tokens.hit_tokens / mooncake.prompt_tokens == mooncake.infinite_hit_rate


def test_stored_answers_add_what_the_reference_simulator_says(mooncake: Trace) -> None:
    assert round(mooncake.infinite_hit_tokens(512) / mooncake.prompt_tokens, 4) == 0.3827


# ---- against the plainest model ----------------------------------------------------------------------------------


@dataclass
class Call:
    prompt: list[int]
    answer: list[int]

    @property
    def prompt_length(self) -> int:
        return len(self.prompt)

    def prompt_tokens(self) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.array(self.prompt, dtype=np.int32)

    def answer_tokens(self) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.array(self.answer, dtype=np.int32)


def plain_hits(
    calls: Sequence[Call], page: int, *, keep_one: bool, store_answers: bool, last_token_written: bool
) -> tuple[int, int]:
    """Hit tokens and stored pages, from the prefixes themselves."""
    stored: set[tuple[int, ...]] = set()
    hit_tokens = 0
    for call in calls:
        best = 0
        while (best + 1) * page <= len(call.prompt) - keep_one and tuple(
            call.prompt[: (best + 1) * page]
        ) in stored:
            best += 1
        hit_tokens += best * page
        answer = call.answer if last_token_written else call.answer[:-1]
        kept = call.prompt + (answer if store_answers else [])
        stored.update(tuple(kept[:end]) for end in range(page, len(kept) + 1, page))
    return hit_tokens, len(stored)


few_tokens = st.lists(st.integers(0, 1), max_size=9)
calls_of_few_tokens = st.lists(
    st.builds(Call, st.lists(st.integers(0, 1), min_size=1, max_size=9), few_tokens), max_size=9
)


@given(calls_of_few_tokens, st.integers(1, 4), st.booleans(), st.booleans(), st.booleans())
def test_hits_are_those_of_a_set_of_prefixes(
    calls: list[Call], page: int, keep_one: bool, store_answers: bool, last_token_written: bool
) -> None:
    found = token_hits(
        calls, page, keep_one=keep_one, store_answers=store_answers, last_token_written=last_token_written
    )
    assert found == plain_hits(
        calls, page, keep_one=keep_one, store_answers=store_answers, last_token_written=last_token_written
    )


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=8))
def test_block_hits_are_those_of_a_set_of_prefixes_even_where_ids_are_not_chained(
    prompts: list[list[int]],
) -> None:
    expected = plain_hits(
        [Call(prompt, []) for prompt in prompts],
        1,
        keep_one=False,
        store_answers=False,
        last_token_written=True,
    )
    hits = id_hits(np.array(prompt, dtype=np.int64) for prompt in prompts)
    assert (hits.hit_tokens, hits.distinct_pages) == (512 * expected[0], expected[1])


def test_a_trace_of_text_counts_its_tokens_in_blocks() -> None:
    tokens = np.arange(1200, dtype=np.int32)
    request = Request(0, 0.0, ArraySource(tokens, 0, 1100), ArraySource(tokens, 1100, 1200))
    trace = Trace("two.jsonl", "calls", (request, request))
    assert (trace.distinct_blocks, trace.infinite_hit_rate) == (2, 1024 / 2200)


@pytest.mark.parametrize(
    ("page", "options", "expected"),
    [
        (100, {}, 1000),
        (100, {"store_answers": False}, 1000),
        (1, {}, 1099),
        (7, {"last_token_written": False}, 1099 // 7 * 7),
    ],
)
def test_a_repeated_request_leaves_itself_one_token_to_compute(
    page: int, options: dict[str, bool], expected: int
) -> None:
    tokens = np.arange(1200, dtype=np.int32)
    request = Request(0, 0.0, ArraySource(tokens, 0, 1100), ArraySource(tokens, 1100, 1200))
    assert Trace("two.jsonl", "calls", (request, request)).infinite_hit_tokens(page, **options) == expected


def test_whether_the_last_token_is_written_decides_about_a_page_that_it_ends() -> None:
    tokens = np.arange(300, dtype=np.int32)
    first = Request(0, 0.0, ArraySource(tokens, 0, 100), ArraySource(tokens, 100, 200))
    second = Request(1, 1.0, ArraySource(tokens, 0, 300), ArraySource(tokens, 0, 0))
    trace = Trace("two.jsonl", "calls", (first, second))
    assert trace.infinite_hit_tokens(100) == 200
    assert trace.infinite_hit_tokens(100, last_token_written=False) == 100


def test_a_page_of_no_tokens_is_refused(agentic: Trace) -> None:
    with pytest.raises(ValueError, match="page_size is 0"):
        agentic.infinite_hit_tokens(0)


def test_a_set_poured_into_sorted_arrays_knows_what_was_added() -> None:
    stored = PrefixSet()
    chains = [mix64(np.arange(chain << 32, (chain << 32) + 100_000, dtype=np.uint64)) for chain in range(9)]
    for chain in chains:
        stored.add(chain)
    assert len(stored) == 900_000
    assert [stored.known_pages(chain) for chain in chains] == [100_000] * 9
    absent = mix64(np.arange(2**60, 2**60 + 1000, dtype=np.uint64))
    assert stored.known_pages(absent) == 0
    assert stored.known_pages(np.concatenate([chains[3][:777], absent])) == 777
