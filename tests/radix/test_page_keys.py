"""Page keys in two buffers behave as the tuple of pairs that they stand for."""

from __future__ import annotations

import pytest

from hicache.radix.keys import KEY_BYTES
from hicache.radix.page_keys import PageKeys
from hicache.testing.harness import BuildHarness
from hicache.types import PageKey

PAIRS = tuple((3 * page, PageKey(page.to_bytes(KEY_BYTES, "little"))) for page in range(2500))
KEYS = PageKeys.of([page for page, _ in PAIRS], [key for _, key in PAIRS])


def test_iteration_gives_plain_ints_and_bytes_in_order_beyond_one_piece() -> None:
    assert tuple(KEYS) == PAIRS
    assert {(type(page), type(key)) for page, key in KEYS} == {(int, bytes)}
    assert tuple(KEYS.pages()) == tuple(page for page, _ in PAIRS)
    assert tuple(KEYS.keys()) == tuple(key for _, key in PAIRS)


@pytest.mark.parametrize("at", [0, 1, 1024, 2499, -1, -2500])
def test_an_item_is_the_pair_at_that_place(at: int) -> None:
    assert KEYS[at] == PAIRS[at]


@pytest.mark.parametrize("at", [2500, -2501])
def test_an_item_beyond_the_ends_is_refused(at: int) -> None:
    with pytest.raises(IndexError):
        KEYS[at]


@pytest.mark.parametrize("part", [slice(0, 0), slice(10, 1100), slice(None, None, -7)])
def test_a_slice_is_such_a_sequence_itself(part: slice) -> None:
    assert isinstance(KEYS[part], PageKeys)
    assert KEYS[part] == PAIRS[part]
    assert len(KEYS[part]) == len(PAIRS[part])


def test_it_differs_from_what_has_another_key_page_or_length() -> None:
    assert KEYS[:3] == PAIRS[:3]
    assert KEYS[:3] != PAIRS[:2]
    assert KEYS[:2] != (PAIRS[0], (1, PAIRS[1][1]))
    assert KEYS[:2] != (PAIRS[0], (PAIRS[1][0], PAIRS[0][1]))
    assert KEYS[:2] != 2


def test_both_cores_hand_out_the_same_buffers(build: BuildHarness) -> None:
    asked = build(page_size=2, device=8, host=8, has_store=True).store_query(range(7)).keys["full"]
    assert [str(buffer.dtype) for buffer in (asked.indices, asked.raw)] == ["int64", "uint8"]
    assert asked.raw.shape == (3 * KEY_BYTES,)
    assert list(asked.pages()) == [0, 1, 2]
