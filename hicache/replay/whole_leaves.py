"""LRU that frees whole leaves, as the reference's ``lru-leaf`` does: leaves of the whole trace's tree.

The tree core's own ``leaf`` granularity cuts by the tree of the moment, where a leaf is longer: it has not
been split yet by requests still to come. This model exists to compare with published figures.
"""

from __future__ import annotations

import heapq

from hicache.replay.trace_tree import NO_NODE, TraceTree


def whole_leaf_hits(tree: TraceTree, capacity_blocks: int) -> int:
    """Hit blocks over all requests. The running request's own leaves go last, and block by block."""
    return _WholeLeaves(tree, capacity_blocks).run()


class _WholeLeaves:
    def __init__(self, tree: TraceTree, capacity_blocks: int) -> None:
        self._tree = tree
        self._capacity = capacity_blocks
        self._held = [0] * len(tree)  # leading blocks of each node that are resident
        self._used = [-1] * len(tree)
        self._num_kids = [0] * len(tree)  # resident children
        self._num_blocks = 0
        self._leaves: list[
            tuple[int, int, int]
        ] = []  # heap of (last use, -end, node); stale ones are skipped

    def run(self) -> int:
        hits = 0
        for request, path in enumerate(self._tree.paths):
            hits += self._look_up(path)
            self._store(path, request)
            while self._num_blocks > self._capacity:
                self._free_a_leaf(request)
        return hits

    def _look_up(self, path: tuple[int, ...]) -> int:
        hits = 0
        for node in path:
            hits += self._held[node]
            if self._held[node] < self._tree.num_blocks[node]:
                break
        return hits

    def _store(self, path: tuple[int, ...], request: int) -> None:
        for node in path:
            if not self._held[node] and self._tree.parent[node] != NO_NODE:
                self._num_kids[self._tree.parent[node]] += 1
            self._num_blocks += self._tree.num_blocks[node] - self._held[node]
            self._held[node] = self._tree.num_blocks[node]
            self._used[node] = request
        if path:
            self._offer(path[-1])

    def _offer(self, node: int) -> None:
        heapq.heappush(self._leaves, (self._used[node], -self._tree.end[node], node))

    def _free_a_leaf(self, request: int) -> None:
        used, _, node = heapq.heappop(self._leaves)
        if used != self._used[node] or not self._held[node] or self._num_kids[node]:
            return
        gone = self._held[node]
        if used == request:
            gone = min(gone, self._num_blocks - self._capacity)
        self._held[node] -= gone
        self._num_blocks -= gone
        parent = self._tree.parent[node]
        if self._held[node]:
            self._offer(node)
        elif parent != NO_NODE:
            self._num_kids[parent] -= 1
            if not self._num_kids[parent]:
                self._offer(parent)
