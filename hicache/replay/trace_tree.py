"""The radix tree of a whole trace: nodes end where prompts diverge and where a prompt ends.

Models of the reference that need no payload work on it: which node is resident, and how far, is a few
integers a node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

NO_NODE = -1


class TraceTree:
    """Nodes are numbered from 0, a parent before its children.

    Attributes:
        parent: each node's parent, or ``NO_NODE``.
        num_blocks: blocks on each node's edge.
        end: blocks from the root to each node's end.
        paths: for each request its nodes from the root on; their blocks are the prompt's, exactly.
    """

    def __init__(self, sequences: Sequence[NDArray[np.int32]]) -> None:
        """Build from per-request int32 [blocks]; equal ids mean equal up to and with that block."""
        prompts = [ids.tolist() for ids in sequences]
        before: dict[int, int] = {}
        ends: set[int] = set()
        for ids in prompts:
            above = NO_NODE
            for block in ids:
                before.setdefault(block, above)
                above = block
            ends.add(above)
        num_children = Counter(before.values())
        self.parent: list[int] = []
        self.num_blocks: list[int] = []
        self.end: list[int] = []
        self.paths: list[tuple[int, ...]] = []
        node_of: dict[int, int] = {NO_NODE: NO_NODE}
        for ids in prompts:
            above = NO_NODE
            for depth, block in enumerate(ids, start=1):
                if block not in node_of:
                    begins = above == NO_NODE or num_children[above] > 1 or above in ends
                    node_of[block] = self._add(node_of[above]) if begins else node_of[above]
                    self.num_blocks[node_of[block]] += 1
                    self.end[node_of[block]] = depth
                above = block
            self.paths.append(tuple(dict.fromkeys(node_of[block] for block in ids)))

    def _add(self, parent: int) -> int:
        self.parent.append(parent)
        self.num_blocks.append(0)
        self.end.append(0)
        return len(self.parent) - 1

    def __len__(self) -> int:
        return len(self.parent)
