import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.types import MAX_TOKEN_ID
from hicache.workload.tokens import (
    BLOCK_TOKENS,
    MAX_BLOCK_ID,
    TextTokenizer,
    block_tokens,
    prefix_hashes,
    stream_tokens,
)

# As a plain SplitMix64 in Python's integers, and blake3, give them.
GOLDEN_BLOCK_0 = [1896895516, 1216681718, 1269570287, 243632754]
GOLDEN_BLOCK_1 = [875558710, 1435341481, 1287659324, 1690843240]
GOLDEN_BLOCK_LAST = [1055563082, 1848687312, 421433076, 1711944676]
GOLDEN_STREAM = [1399153784, 331900611, 1249077579, 1229293576]
GOLDEN_SEEDED = [762165894, 1959794020, 1899530381, 35856822]
GOLDEN_TEXT = [2099622937, 632437810, 96741666, 320156238, 1924109678, 1217414798, 1844129281, 1141398737]

ids = st.integers(0, MAX_BLOCK_ID)


def blocks(*block_ids: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return block_tokens(np.array(block_ids, dtype=np.int64))


def test_a_block_id_gives_the_same_tokens_on_every_machine_and_in_every_version() -> None:
    assert blocks(0)[:4].tolist() == GOLDEN_BLOCK_0
    assert blocks(1)[-4:].tolist() == GOLDEN_BLOCK_1
    assert blocks(MAX_BLOCK_ID)[:4].tolist() == GOLDEN_BLOCK_LAST


def test_a_stream_gives_the_same_tokens_on_every_machine_and_in_every_version() -> None:
    assert stream_tokens(7, 0, 4).tolist() == GOLDEN_STREAM
    assert stream_tokens(7, 0, 4, seed=1).tolist() == GOLDEN_SEEDED


def test_a_text_gives_the_same_tokens_on_every_machine_and_in_every_version() -> None:
    assert TextTokenizer().tokens("A cache, wonderfully\n\n  warm.").tolist() == GOLDEN_TEXT


@given(st.lists(ids, max_size=5))
def test_the_tokens_of_blocks_depend_on_each_id_alone(block_ids: list[int]) -> None:
    assert blocks(*block_ids).tolist() == [token for one in block_ids for token in blocks(one).tolist()]


@given(ids, st.integers(0, 600))
def test_fewer_tokens_are_the_first_ones(block: int, count: int) -> None:
    pair = np.array([block, 3], dtype=np.int64)
    assert block_tokens(pair, count).tolist() == block_tokens(pair).tolist()[:count]


@given(ids)
def test_tokens_are_int32_ids_that_the_tree_accepts(block: int) -> None:
    tokens = blocks(block)
    assert tokens.dtype == np.int32
    assert len(tokens) == BLOCK_TOKENS
    assert tokens.min() >= 0
    assert tokens.max() <= MAX_TOKEN_ID


@given(ids, ids)
def test_different_blocks_differ_at_most_places(first: int, second: int) -> None:
    equal = int((blocks(first) == blocks(second)).sum())
    assert equal == BLOCK_TOKENS if first == second else equal <= 2


def test_token_ids_spread_evenly() -> None:
    tokens = block_tokens(np.arange(200, dtype=np.int64))
    counts, _ = np.histogram(tokens, bins=64, range=(0, 2**31))
    assert abs(counts - len(tokens) / 64).max() < 5 * (len(tokens) / 64) ** 0.5


def test_streams_of_different_numbers_and_seeds_and_blocks_share_no_run() -> None:
    runs = [stream_tokens(0, 0, 512), stream_tokens(1, 0, 512), stream_tokens(0, 0, 512, seed=1), blocks(0)]
    distinct = {tuple(run.reshape(-1, 2)[place].tolist()) for run in runs for place in range(256)}
    assert len(distinct) == 4 * 256


@given(st.integers(0, 1000), st.integers(0, 300), st.integers(0, 300), st.integers(-5, 2**70))
def test_a_stream_can_be_read_in_pieces(stream: int, begin: int, length: int, seed: int) -> None:
    whole = stream_tokens(stream, 0, begin + length, seed=seed)
    assert stream_tokens(stream, begin, begin + length, seed=seed).tolist() == whole[begin:].tolist()


@pytest.mark.parametrize(
    ("stream", "begin", "end"), [(-1, 0, 1), (2**37, 0, 1), (0, -1, 1), (0, 2, 1), (0, 0, 2**25 + 1)]
)
def test_a_stream_out_of_its_space_is_refused(stream: int, begin: int, end: int) -> None:
    with pytest.raises(ValueError, match="out of the counter space"):
        stream_tokens(stream, begin, end)


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40), st.integers(1, 5))
def test_prefix_hashes_are_equal_exactly_where_the_prefixes_are(
    first: list[int], second: list[int], page: int
) -> None:
    ours, theirs = (prefix_hashes(np.array(v, dtype=np.int64), page) for v in (first, second))
    assert len(ours) == len(first) // page
    for count in range(1, min(len(ours), len(theirs)) + 1):
        same_prefix = first[: count * page] == second[: count * page]
        assert (ours[count - 1] == theirs[count - 1]) == same_prefix


@given(st.text(), st.text())
def test_a_longer_text_keeps_all_tokens_but_the_last(start: str, more: str) -> None:
    tokenizer = TextTokenizer()
    kept = tokenizer.tokens(start)[:-1].tolist()
    assert tokenizer.tokens(start + more)[: len(kept)].tolist() == kept


@given(st.text(alphabet="ab1 \n.,_", max_size=60), st.text(alphabet="ab1 \n.,_", max_size=60))
def test_a_longer_text_of_spaces_and_dots_keeps_all_tokens_but_the_last(start: str, more: str) -> None:
    tokenizer = TextTokenizer()
    kept = tokenizer.tokens(start)[:-1].tolist()
    assert tokenizer.tokens(start + more)[: len(kept)].tolist() == kept


@given(st.text(), st.text())
def test_different_texts_have_different_tokens(first: str, second: str) -> None:
    tokenizer = TextTokenizer()
    same_tokens = tokenizer.tokens(first).tolist() == tokenizer.tokens(second).tolist()
    assert same_tokens == (first == second)


def test_tokens_do_not_depend_on_what_was_tokenised_before() -> None:
    used = TextTokenizer()
    used.tokens("something else entirely")
    assert used.tokens("entirely new").tolist() == TextTokenizer().tokens("entirely new").tolist()


def test_english_has_about_four_characters_a_token() -> None:
    text = (
        "A request that contains all but the last block of an earlier one continues it. Its answer, too, is part of"
        " the next prompt, so a cache that keeps both has (nearly) nothing left to compute; measure it, don't guess!"
    )
    assert 3.5 < len(text) / len(TextTokenizer().tokens(text)) < 4.5


def test_a_lone_surrogate_has_a_token_of_its_own() -> None:
    tokenizer = TextTokenizer()
    assert tokenizer.tokens("\ud800").tolist() != tokenizer.tokens("\ud801").tolist()


def test_a_marker_is_one_token_that_no_text_contains() -> None:
    tokenizer = TextTokenizer()
    marker = tokenizer.marker("user")
    assert len(marker) == 1
    assert marker[0] not in tokenizer.tokens("<|control:user|> user")
