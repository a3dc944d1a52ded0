"""Token ids from what a trace gives: block ids, streams, text. Pure functions of their arguments.

Block ids and streams share one 64-bit counter space, which SplitMix64's finaliser (a bijection) scrambles;
a token id is the upper 31 bits. Different places in the space give unrelated tokens::

    0                                     2**61        2**63                                     2**64
    |  id * 512 + k: token k of block id  |   unused   |  stream << 25 + k: token k of a stream  |

Nothing here depends on the process, the hash seed or the machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

BLOCK_TOKENS = 512
"""Tokens of one block of a hash trace."""

MAX_BLOCK_ID = 2**52 - 1
MAX_REQUEST_TOKENS = 2**24
"""Longest prompt or answer that a trace may state; far beyond any context window."""

_STREAM_BASE = 1 << 63
_STREAM_BITS = 25
_MAX_STREAM = (1 << 37) - 1
_WORD = (1 << 64) - 1
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_POSITION = np.uint64(0xD1342543DE82EF95)

# A word with the space before it, punctuation likewise, or a run of spaces: about four characters each. What is
# matched depends on nothing behind it but one character, so a longer text keeps all pieces but the last.
_PIECE = re.compile(r"\s?\w{1,8}|\s?[^\w\s]{1,4}|\s{1,16}")

Tokens = NDArray[np.int32]


def mix64(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble each word with SplitMix64's step, in place; a bijection on 64 bits."""
    words += _GAMMA
    words ^= words >> np.uint64(30)
    words *= _FIRST
    words ^= words >> np.uint64(27)
    words *= _SECOND
    words ^= words >> np.uint64(31)
    return words


def block_tokens(block_ids: NDArray[np.int64], num_tokens: int | None = None) -> Tokens:
    """The tokens of blocks, one after the other.

    Args:
        block_ids: int64 [n], each at most ``MAX_BLOCK_ID``.
        num_tokens: how many of them from the start; default all ``512 * n``.
    """
    count = len(block_ids) * BLOCK_TOKENS if num_tokens is None else num_tokens
    starts = block_ids.astype(np.uint64) * np.uint64(BLOCK_TOKENS)
    words = np.add.outer(starts, np.arange(BLOCK_TOKENS, dtype=np.uint64))
    return _to_tokens(words.reshape(-1)[:count])


def stream_tokens(stream: int, begin: int, end: int, *, seed: int = 0) -> Tokens:
    """Tokens [begin, end) of one endless stream; streams of one seed never share a counter."""
    if not 0 <= stream <= _MAX_STREAM or not 0 <= begin <= end <= 1 << _STREAM_BITS:
        raise ValueError(f"stream {stream}, tokens [{begin}, {end}): out of the counter space")
    offset = int(mix64(np.array([seed & _WORD], dtype=np.uint64))[0]) if seed else 0
    base = _STREAM_BASE | (((stream << _STREAM_BITS) + offset) & (_STREAM_BASE - 1))
    # Wraps only if a seed puts a stream across the end of the space; the tokens are as unrelated there.
    return _to_tokens(np.arange(begin, end, dtype=np.uint64) + np.uint64(base))


def _to_tokens(words: NDArray[np.uint64]) -> Tokens:
    return (mix64(words) >> np.uint64(33)).astype(np.int32)


def prefix_hashes(values: NDArray[np.integer], page_size: int) -> NDArray[np.uint64]:
    """One hash for each whole page's end, of all values up to there: uint64 [len // page_size].

    The sum of a scrambled word per (position, value), so equal prefixes hash alike, and n different ones collide
    with a chance of about ``n**2 / 2**65`` (one in 3,700 for a hundred million). Not for hostile input.
    """
    count = len(values) // page_size * page_size
    words = values[:count].astype(np.uint64) * _GAMMA
    words += np.arange(1, count + 1, dtype=np.uint64) * _POSITION
    sums = np.cumsum(mix64(words), dtype=np.uint64)
    return sums[page_size - 1 :: page_size]


class TextTokenizer:
    """Splits text into pieces of about four characters and hashes each piece to an id.

    The tokens of a text that another one continues are a prefix of that one's, save possibly the last. Made-up
    tokens: they keep what a cache sees of a text, equal prefixes and lengths, and need no model.
    """

    def __init__(self) -> None:
        self._ids = _PieceIds()

    def tokens(self, text: str) -> Tokens:
        """int32 [n]; empty for an empty text."""
        return np.array([self._ids[piece] for piece in _PIECE.findall(text)], dtype=np.int32)

    def marker(self, name: str) -> Tokens:
        """The one token of a control word such as a role's; longer than any piece, so never in a text."""
        return np.array([self._ids[f"<|control:{name}|>"]], dtype=np.int32)

    def message_body(self, content: str | None, tool_calls: Iterable[Mapping[str, object]]) -> Tokens:
        """A message without its role: its text, then the function of each tool call, then the end marker.

        Call ids are left out: chat templates do not show them to the model.
        """
        calls = [call.get("function", call) for call in tool_calls]
        parts = [self.tokens(content or "")]
        if calls:
            rendered = json.dumps(calls, ensure_ascii=False, sort_keys=True)
            parts += [self.marker("tool_calls"), self.tokens(rendered)]
        return np.concatenate([*parts, self.marker("end")])


class _PieceIds(dict[str, int]):
    """Remembers the id of every piece seen."""

    __slots__ = ()

    def __missing__(self, piece: str) -> int:
        digest = blake3(piece.encode("utf-8", "surrogatepass")).digest(4)
        token = int.from_bytes(digest, "little") >> 1
        self[piece] = token
        return token
