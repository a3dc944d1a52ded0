"""What each of a few orders would hold of the sampled requests: one tree of blocks for all of them.

A *run* is a chain of blocks between two branches. It stands in the tree once, and each order has how many of its
blocks it holds, from its beginning. A request finds its runs once and leaves all its blocks with every order; then
each order gives up tails until it holds no more than its capacity.

``rust/hicache-radix/src/shadow_tree.rs`` is the same for the Rust core, to the number.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

from hicache.radix.turns import AGE_SHIFT, SHARED_BONUS
from hicache.types import LeaseId, SessionId

_USED_BITS = 40
"""Of a rank: below them is when a run was used, above what its turn is worth."""
_SLACK = 64
"""A queue may have so many entries beside twice as many as there are runs."""


class _Turn:
    """A request that has ended, while runs are left that no later one used: a chain up from ``last``."""

    __slots__ = ("graces", "last", "lease", "num_runs", "session", "worth")

    def __init__(self, session: SessionId, lease: LeaseId | None, worth: int, graces: list[int]) -> None:
        self.session = session
        self.lease = lease
        self.worth = worth
        self.graces = graces  # by order: so much later does what is shared count as used
        self.num_runs = 0
        self.last: _Run | None = None


class _Run:
    __slots__ = ("blocks", "held", "is_shared", "num_kids", "number", "parent", "queued", "turn", "used")

    def __init__(self, number: int, blocks: list[int], parent: _Run | None, turn: _Turn, orders: int) -> None:
        self.number = number
        self.blocks = blocks
        self.parent = parent  # None: the root
        self.turn = turn
        self.used = 0
        # By order: how many blocks it holds, and of how many children some; whether sessions share it; its rank.
        self.held = [0] * orders
        self.num_kids = [0] * orders
        self.is_shared = [False] * orders
        self.queued: list[int | None] = [None] * orders


class ShadowTree:
    """The tree.

    Args:
        graces: an order each: by the worth of turns if None, else by recency, where what more than one session
            used counts as used later by so many ages (as in ``radix/turns.py``).
        capacity: blocks that an order holds.
    """

    def __init__(self, graces: Sequence[int | None], capacity: int) -> None:
        self._graces = tuple(graces)
        self._orders = range(len(self._graces))
        self._capacity = capacity
        self._now = 0  # requests served
        self._ages = [0] * len(
            self._graces
        )  # of what goes first and is not shared; smoothed, 16ths of a request
        self._num_held = [0] * len(self._graces)
        self._num_made = 0
        self._runs: dict[int, _Run] = {}  # by their first block, with which all before it is mixed
        self._turns: dict[LeaseId | None, _Turn] = {}
        self._queues: list[list[tuple[int, int, _Run]]] = [[] for _ in self._graces]
        self._root = self._made([], None, _Turn(SessionId(0), None, 0, []))

    def serve(
        self, session: SessionId, lease: LeaseId | None, worth: int, blocks: list[int], num_prompt: int
    ) -> list[int]:
        """Serve one request whole; returns how many blocks of its prompt each order had.

        Args:
            lease: what ``rate`` will call it.
            worth: what it is worth now that it has ended.
            blocks: of prompt and answer, each mixed with all before it; no more than the capacity.
        """
        if not blocks:
            return [0 for _ in self._orders]
        self._now += 1
        path, found = self._find(blocks)
        hits = [min(num_prompt, sum(run.held[order] for run in path)) for order in self._orders]
        ages = zip(self._graces, self._ages, strict=True)
        turn = _Turn(session, lease, worth, [(grace or 0) * age >> AGE_SHIFT for grace, age in ages])
        self._take_over(path, turn)
        if found < len(blocks):
            self._add(path, blocks[found:], turn)
        turn.last = path[-1]
        self._turns[lease] = turn
        for order in self._orders:
            self._fill(order, path)
        self._merge(path)
        for order in self._orders:
            self._trim(order)
        return hits

    def rate(self, lease: LeaseId, worth: int) -> None:
        """Set what a turn is worth, if the tree has something of it."""
        turn = self._turns.get(lease)
        if turn is None:
            return
        fell = worth < turn.worth
        turn.worth = worth
        for order in self._orders:
            if fell and self._graces[order] is None:
                run = turn.last
                while run is not None and run.turn is turn and not run.held[order]:
                    run = run.parent
                if run is not None and run.turn is turn:
                    self._offer(order, run)

    # ---- a request's path ----------------------------------------------------------------------
    def _find(self, blocks: list[int]) -> tuple[list[_Run], int]:
        """The runs that the request has in common with the tree, whole, and how many blocks they have."""
        path: list[_Run] = []
        run, found = self._root, 0
        while found < len(blocks):
            child = self._runs.get(blocks[found])
            if child is None or child.parent is not run:
                break
            same = _num_equal(child.blocks, blocks[found : found + len(child.blocks)])
            # Where an order holds no more, what comes back to it is no part of what sessions share there.
            same = min((held for held in child.held if 0 < held < same), default=same)
            run = child if same == len(child.blocks) else self._split(child, same)
            path.append(run)
            found += same
        return path, found

    def _split(self, run: _Run, at: int) -> _Run:
        """Cut a run in two; returns the upper part. *Caller guarantees*: a request takes that over next."""
        upper = self._made(run.blocks[:at], run.parent, run.turn)
        upper.held = [min(held, at) for held in run.held]
        upper.is_shared = list(run.is_shared)
        run.held = [held - above for held, above in zip(run.held, upper.held, strict=True)]
        run.is_shared = [shared and held > 0 for shared, held in zip(run.is_shared, run.held, strict=True)]
        upper.num_kids = [int(held > 0) for held in run.held]
        run.blocks = run.blocks[at:]
        run.parent = upper
        self._runs[upper.blocks[0]] = upper
        self._runs[run.blocks[0]] = run
        return upper

    def _take_over(self, path: list[_Run], turn: _Turn) -> None:
        for run in path:
            if run.turn.session != turn.session:
                run.is_shared = [held > 0 for held in run.held]
            self._lose_run(run.turn)
            run.turn = turn
            run.used = self._now
            turn.num_runs += 1

    def _lose_run(self, turn: _Turn) -> None:
        turn.num_runs -= 1
        if turn.num_runs == 0 and self._turns.get(turn.lease) is turn:
            del self._turns[turn.lease]

    def _add(self, path: list[_Run], blocks: list[int], turn: _Turn) -> None:
        """Go on where the tree does not: in the last run if that ends there and only this session used it."""
        last = path[-1] if path else self._root
        if path and not any(last.num_kids) and not any(last.is_shared):
            last.blocks = last.blocks + blocks
            return
        run = self._made(blocks, last, turn)
        self._runs[blocks[0]] = run
        path.append(run)

    def _merge(self, path: list[_Run]) -> None:
        """Make one of two runs that nothing but a cut has parted. *Caller guarantees*: all orders hold them."""
        for upper, lower in pairwise(path):
            if upper.is_shared == lower.is_shared and all(num_kids == 1 for num_kids in upper.num_kids):
                self._runs.pop(lower.blocks[0], None)
                self._runs[upper.blocks[0]] = lower
                lower.blocks = upper.blocks + lower.blocks
                lower.held = [len(lower.blocks) for _ in self._orders]
                lower.parent = upper.parent
                upper.queued = [None for _ in self._orders]
                self._lose_run(upper.turn)

    def _made(self, blocks: list[int], parent: _Run | None, turn: _Turn) -> _Run:
        run = _Run(self._num_made, blocks, parent, turn, len(self._graces))
        self._num_made += 1
        run.used = self._now
        turn.num_runs += 1
        return run

    # ---- what an order holds -------------------------------------------------------------------
    def _fill(self, order: int, path: list[_Run]) -> None:
        """Have an order hold all of the path."""
        for run in path:
            if not run.held[order] and run.parent is not None:
                run.parent.num_kids[order] += 1
            self._num_held[order] += len(run.blocks) - run.held[order]
            run.held[order] = len(run.blocks)
        self._offer(order, path[-1])

    def _trim(self, order: int) -> None:
        """Have an order hold no more than it may."""
        while self._num_held[order] > self._capacity:
            run = self._first(order)
            if not run.is_shared[order]:
                self._ages[order] += self._now - run.used - (self._ages[order] >> AGE_SHIFT)
            lost = min(run.held[order], self._num_held[order] - self._capacity)
            self._num_held[order] -= lost
            run.held[order] -= lost
            parent = run.parent
            if not run.held[order] and parent is not None:
                run.is_shared[order] = False
                parent.num_kids[order] -= 1
                self._offer(order, parent)
            if not any(run.held):
                self._drop(run)
            del run.blocks[max(run.held) :]

    def _drop(self, run: _Run) -> None:
        """No order holds anything of it any more."""
        if self._runs.get(run.blocks[0]) is run:
            del self._runs[run.blocks[0]]
        if run.turn.last is run:
            run.turn.last = run.parent
        self._lose_run(run.turn)
        run.queued = [None for _ in self._orders]

    def _rank(self, order: int, run: _Run) -> int:
        """What the order holds of lower rank goes first."""
        if self._graces[order] is None:
            return (run.turn.worth + SHARED_BONUS * run.is_shared[order] << _USED_BITS) + run.used
        return run.used + run.turn.graces[order] * run.is_shared[order]

    def _offer(self, order: int, run: _Run) -> None:
        """Queue a run if its tail may go, or went up; what went down is noticed when it comes out."""
        if run.parent is None or not run.held[order] or run.num_kids[order]:
            return
        rank, queued = self._rank(order, run), run.queued[order]
        if queued is None or rank < queued:
            run.queued[order] = rank
            queue = self._queues[order]
            heapq.heappush(queue, (rank, run.number, run))
            if len(queue) > 2 * len(self._runs) + _SLACK:
                queue[:] = {entry[1]: entry for entry in queue if entry[0] == entry[2].queued[order]}.values()
                heapq.heapify(queue)

    def _first(self, order: int) -> _Run:
        """The run whose tail goes first; it stays in the queue."""
        queue = self._queues[order]
        while True:
            rank, number, run = queue[0]
            if rank != run.queued[order]:
                heapq.heappop(queue)
            elif not run.held[order] or run.num_kids[order]:
                heapq.heappop(queue)
                run.queued[order] = None
            elif (now := self._rank(order, run)) > rank:
                run.queued[order] = now
                heapq.heapreplace(queue, (now, number, run))
            else:
                return run


def _num_equal(one: list[int], other: list[int]) -> int:
    """How many blocks are equal from the beginning. Each is mixed with those before it, so one look may do."""
    shorter = min(len(one), len(other))
    if one[shorter - 1] == other[shorter - 1]:
        return shorter
    return next(at for at in range(shorter) if one[at] != other[at])
