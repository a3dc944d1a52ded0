"""The clairvoyant bound: the most blocks that any policy could hit in the reference's model.

Furthest next use goes first, the running request's blocks too. A block's next use is never later than
that of a block behind it, so the furthest block is always a leaf: what stays is closed under "shorter
prefix" by itself, and with blocks of one size nothing that stores only what requests bring does better.

The blocks whose next use is request *r* are, at any moment, a contiguous stretch of *r*'s own prompt,
and the deepest of them goes first. So one count per awaited request is the whole state: when *r* comes,
its count is its hits. A capacity costs O(runs log requests), where a run is what one request brings for
one later request; single blocks are never looked at.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class _Run:
    """Blocks of one request that the same later request uses next."""

    next_request: int
    num_blocks: int


class ClairvoyantBound:
    """The bound of one trace, for any number of capacities.

    Args:
        sequences: per request int32 [blocks]; equal ids mean that the block and all before it are equal.
        looked_up: how many leading blocks each request may hit, where it stores more than that (an answer, the
            last block of a prompt of which one token is always computed); default all.
    """

    def __init__(
        self, sequences: Sequence[NDArray[np.int32]], looked_up: Sequence[int] | None = None
    ) -> None:
        self._runs = _runs(sequences, looked_up)

    def hit_blocks(self, capacity_blocks: int) -> int:
        """Blocks hit with ``capacity_blocks`` slots. Raises ``ValueError`` for fewer than 1."""
        if capacity_blocks < 1:
            raise ValueError(f"capacity is {capacity_blocks} blocks, expected at least 1")
        awaited = [0] * len(self._runs)  # blocks kept for each later request
        furthest: list[int] = []  # heap of -request, one entry for each request once awaited
        kept = hits = 0
        for request, runs in enumerate(self._runs):
            hits += awaited[request]
            kept -= awaited[request]
            awaited[request] = 0
            for run in runs:
                if not awaited[run.next_request]:
                    heapq.heappush(furthest, -run.next_request)
                awaited[run.next_request] += run.num_blocks
                kept += run.num_blocks
            while kept > capacity_blocks:
                last = -furthest[0]
                gone = min(awaited[last], kept - capacity_blocks)
                awaited[last] -= gone
                kept -= gone
                if not awaited[last]:
                    heapq.heappop(furthest)
        return hits


def _runs(sequences: Sequence[NDArray[np.int32]], looked_up: Sequence[int] | None) -> list[list[_Run]]:
    lengths = np.array([len(ids) for ids in sequences], dtype=np.int64)
    runs: list[list[_Run]] = [[] for _ in sequences]
    if not lengths.sum():
        return runs
    ids = np.concatenate(sequences)
    owner = np.repeat(np.arange(len(sequences), dtype=np.int64), lengths)
    by_block = np.argsort(ids, kind="stable")  # uses of a block stand together, in order of time
    next_use = np.full(len(ids), len(sequences), dtype=np.int64)
    again = ids[by_block[1:]] == ids[by_block[:-1]]
    use = by_block[1:][again]
    next_use[by_block[:-1][again]] = owner[use]
    if looked_up is not None:  # who computes a block anyway has no use for an earlier one
        place = np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        computed = place[use] >= np.asarray(looked_up, dtype=np.int64)[owner[use]]
        next_use[by_block[:-1][again][computed]] = len(sequences)
    starts = np.flatnonzero(np.diff(owner, prepend=-1) | np.diff(next_use, prepend=-1))
    sizes = np.diff(starts, append=len(ids))
    for request, later, size in zip(
        owner[starts].tolist(), next_use[starts].tolist(), sizes.tolist(), strict=True
    ):
        if later < len(sequences):
            runs[request].append(_Run(later, size))
    return runs
