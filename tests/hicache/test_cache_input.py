"""Tokens and names that a cache refuses, and those that it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from tests.hicache.conftest import MakeRig, Tokens

T = Callable[..., "Tokens"]
EVERY = "full+swa+mamba"
BAD_TOKENS: dict[str, tuple[Any, str]] = {
    "negative": ([1, 2, -3, 4], "token -3 at position 2"),
    "too large": ([5, 2**31], "position 1"),
    "a truth value among integers": ([5, True], "position 1"),
    "floats": (np.array([1.0, 2.5]), "position 0"),
    "booleans": (np.array([True, False]), "position 0"),
    "text": ("abc", "shape"),
    "two dimensions": ([[1, 2], [3, 4]], "shape"),
    "no dimension": (np.array(5), "shape"),
    "ragged": ([[1, 2], [3]], "not an array of integers"),
    "none": (None, "shape"),
    "objects": ([object()], "position 0"),
    "unsigned and large": (np.array([1, 2**63], dtype=np.uint64), "position 1"),
}


@pytest.mark.parametrize("name", BAD_TOKENS)
def test_bad_tokens_are_refused_with_the_position(make_rig: MakeRig, t: T, name: str) -> None:
    tokens, told = BAD_TOKENS[name]
    rig = make_rig(EVERY, host=64, store="scripted")
    rig.serve(t(8))
    before = rig.cache.stats()
    for call in (rig.cache.match, rig.cache.probe):
        with pytest.raises(ValueError, match=told):
            call(tokens)
    assert rig.cache.stats().requests == before.requests
    rig.check_idle()


@pytest.mark.parametrize("tokens", [[1, 2.5, 3], [1, "two"]], ids=["float", "word"])
def test_the_position_is_that_of_the_item_that_is_no_integer(make_rig: MakeRig, tokens: list[object]) -> None:
    with pytest.raises(ValueError, match="position 1"):
        make_rig().cache.match(tokens)


GOOD_TOKENS: dict[str, Any] = {
    "int32": np.arange(1, 10, dtype=np.int32),
    "int64": np.arange(1, 10, dtype=np.int64),
    "a view with strides": np.arange(2, 20, dtype=np.int64)[::2] // 2,
    "a list": list(range(1, 10)),
    "a tuple": tuple(range(1, 10)),
    "uint16": np.arange(1, 10, dtype=np.uint16),
    "read-only": np.frombuffer(np.arange(1, 10, dtype=np.int32).tobytes(), dtype=np.int32),
    "big-endian": np.arange(1, 10, dtype=">i4"),
}


@pytest.mark.parametrize("name", GOOD_TOKENS)
def test_tokens_mean_the_same_in_whatever_array_they_come(make_rig: MakeRig, t: T, name: str) -> None:
    rig = make_rig()
    rig.serve(t(9))
    assert rig.cache.probe(GOOD_TOKENS[name]).boundary == 8
    with rig.cache.match(GOOD_TOKENS[name]) as lease:
        assert lease.load() == 8
        lease.reserve(1)
        assert lease.checkpoint(9, GOOD_TOKENS[name]).published == 8
        assert lease.release(GOOD_TOKENS[name]).published == 8
    rig.check_idle()


def test_a_prompt_may_be_changed_after_the_match(make_rig: MakeRig, t: T) -> None:
    """The cache keeps its own tokens: an engine reuses its buffers."""
    rig = make_rig()
    prompt = t(9)
    with rig.cache.match(prompt) as lease:
        lease.reserve(9)
        rig.write(lease, t(9), 0, 9)
        prompt[:] = 7
        lease.release(t(9))
    assert rig.cache.probe(t(10)).boundary == 8
    rig.check_idle()


def test_the_largest_token_and_an_empty_prompt_are_fine(make_rig: MakeRig) -> None:
    rig = make_rig(page_size=1)
    assert rig.serve([0, 2**31 - 1]).source.total == 0
    assert rig.cache.probe([0, 2**31 - 1, 5]).boundary == 2
    assert rig.serve([]).prompt_tokens == 0
    assert rig.cache.probe([]).boundary == 0
    rig.check_idle()


@pytest.mark.parametrize("name", ["", "x" * 1025, 7, b"chat"], ids=["empty", "too long", "number", "bytes"])
def test_a_bad_session_name_is_refused_before_anything_happens(make_rig: MakeRig, t: T, name: Any) -> None:
    rig = make_rig()
    with pytest.raises(ValueError, match="session"):
        rig.cache.match(t(4), session=name)
    assert len(rig.cache.sessions) == 0
    assert rig.cache.stats().tree.get("matches", 0) == 0
    rig.check_idle()
