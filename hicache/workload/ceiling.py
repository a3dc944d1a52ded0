"""What an infinite cache hits, by a set of prefix hashes and without any tree.

So it can stand beside the tree's own result as a second opinion. Everything that was stored is closed under "shorter
prefix", so how much of a request is known is found by bisection.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hicache.workload.tokens import BLOCK_TOKENS, Tokens, prefix_hashes

Hashes = NDArray[np.uint64]

_LOOSE_HASHES = 1 << 18


class Hits(NamedTuple):
    """Prompt tokens served from the cache, and how many different pages were stored in the end."""

    hit_tokens: int
    distinct_pages: int


class Call(Protocol):
    """The part of a request that counts here."""

    @property
    def prompt_length(self) -> int: ...
    def prompt_tokens(self) -> Tokens: ...
    def answer_tokens(self) -> Tokens: ...


class PrefixSet:
    """A growing set of prefix hashes: a Python set that is poured into sorted arrays as it fills.

    Arrays of like size are merged, so there are only about log2(n / 2**18) of them, at 8 bytes a hash.
    """

    def __init__(self) -> None:
        self._loose: set[int] = set()
        self._runs: list[Hashes] = []

    def __len__(self) -> int:
        return len(self._loose) + sum(len(run) for run in self._runs)

    def known_pages(self, hashes: Hashes) -> int:
        """How many leading pages of this prefix chain are in the set."""
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high) // 2
            if self._has(hashes[middle]):
                low = middle + 1
            else:
                high = middle
        return low

    def add(self, hashes: Hashes) -> None:
        """*Caller guarantees*: none of them is in the set, and they differ."""
        self._loose.update(hashes.tolist())
        if len(self._loose) < _LOOSE_HASHES:
            return
        run = np.sort(np.fromiter(self._loose, dtype=np.uint64, count=len(self._loose)))
        self._loose.clear()
        while self._runs and len(self._runs[-1]) < 2 * len(run):
            run = np.sort(np.concatenate([self._runs.pop(), run]))
        self._runs.append(run)

    def _has(self, value: np.uint64) -> bool:
        if int(value) in self._loose:
            return True
        for run in self._runs:
            place = int(run.searchsorted(value))
            if place < len(run) and run[place] == value:
                return True
        return False


class InfiniteCache:
    """A cache without limits, request by request: what each would hit.

    Args:
        keep_one: leave a request at least one token to compute.
        store_answers, last_token_written: what is stored besides the prompt.
    """

    def __init__(
        self, page_size: int, *, keep_one: bool, store_answers: bool, last_token_written: bool
    ) -> None:
        self._page_size = page_size
        self._keep_one = keep_one
        self._store_answers = store_answers
        self._last_token_written = last_token_written
        self._stored = PrefixSet()

    def serve(self, prompt: Tokens, answer: Tokens) -> int:
        """Prompt tokens that the request would hit; then it is stored.

        Args:
            prompt, answer: int32 [num_tokens].
        """
        tokens = prompt
        if self._store_answers:
            tokens = np.concatenate([prompt, answer if self._last_token_written else answer[:-1]])
        hashes = prefix_hashes(tokens, self._page_size)
        known = self._stored.known_pages(hashes)
        usable = (len(prompt) - self._keep_one) // self._page_size
        self._stored.add(hashes[known:])
        return min(known, usable) * self._page_size

    @property
    def distinct_pages(self) -> int:
        """How many different pages are stored."""
        return len(self._stored)


def token_hits(
    requests: Iterable[Call],
    page_size: int,
    *,
    keep_one: bool,
    store_answers: bool,
    last_token_written: bool,
) -> Hits:
    """Count hits over the requests' tokens; one request is stored before the next is looked up.

    Args:
        keep_one: leave a request at least one token to compute.
        store_answers, last_token_written: what is stored besides the prompt.
    """
    cache = InfiniteCache(
        page_size, keep_one=keep_one, store_answers=store_answers, last_token_written=last_token_written
    )
    nothing = np.empty(0, dtype=np.int32)
    hit_tokens = sum(
        cache.serve(request.prompt_tokens(), request.answer_tokens() if store_answers else nothing)
        for request in requests
    )
    return Hits(hit_tokens, cache.distinct_pages)


def id_hits(prompts: Iterable[NDArray[np.int64]]) -> Hits:
    """The same over the full-block ids of prompts, with no token kept back: the reference model."""
    stored = PrefixSet()
    hit_blocks = 0
    for block_ids in prompts:
        hashes = prefix_hashes(block_ids, 1)
        known = stored.known_pages(hashes)
        hit_blocks += known
        stored.add(hashes[known:])
    return Hits(hit_blocks * BLOCK_TOKENS, len(stored))
