"""Hybrid models in one tier, metadata only: which boundaries are kept, and what goes first.

The reference's model with payload besides the path's. A boundary is usable where a *mark* stands: a state,
and the last blocks of each window. Marks are made only where a request computes; all payload shares one
budget. A request is looked up whole, then stored with its marks, then the tier is trimmed::

    root ──────────── m ─────────────── f ───────── s ───────── e
                      boundary          fork        spare mark  end
                      └──── computed again: may leave marks ────┘

What goes first: dead weight (tail blocks that no mark needs), then by last use whichever is older, a tail block
with what it carries, or a mark alone. A mark's last use is its own as a boundary; a spare mark is insurance for
the blocks behind it, so it goes with its block only.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hicache.config.marks import spare_spacing
from hicache.errors import ConfigError
from hicache.replay.bound import ClairvoyantBound
from hicache.replay.components import UNITS, HybridComponents, Placement, Window
from hicache.replay.reference import ReferenceResult
from hicache.workload import Trace
from hicache.workload.tokens import BLOCK_TOKENS

ROOT = -1


@dataclass(frozen=True, slots=True)
class HybridResult(ReferenceResult):
    """One capacity of a hybrid model. ``num_marks`` were made, ``spacing_blocks`` apart where spare."""

    components: str = ""
    read_as: tuple[str, ...] = ()
    marks: str = ""
    num_marks: int = 0
    spacing_blocks: int | None = None

    def as_json(self) -> Mapping[str, object]:
        added = ("components", "marks", "num_marks", "spacing_blocks")
        return {**ReferenceResult.as_json(self), **{name: getattr(self, name) for name in added}}


def hybrid_replay(
    trace: Trace,
    capacity_blocks: int,
    components: HybridComponents,
    sequences: Sequence[NDArray[np.int32]],
    *,
    bound: ClairvoyantBound | None = None,
    stop: threading.Event | None = None,
) -> HybridResult:
    """Replay a hybrid model at one capacity, by the last use of tail blocks.

    Args:
        capacity_blocks: the one budget for all payload, in blocks of the path component's; at least 1.
        sequences: ``block_sequences(trace)``.
        bound: ``ClairvoyantBound(sequences)``, for what the path component alone could hit.
        stop: once set, the replay ends early; ``requests`` of the result says how far it came.
    """
    if capacity_blocks < 1:
        raise ConfigError([f"capacity: {capacity_blocks} blocks; expected at least 1"])
    began_s = time.monotonic()
    tier = HybridTier(sequences, capacity_blocks, components)
    shared_ends = _shared_ends(trace, sequences)
    hit_blocks = requests = 0
    for ids, shared_end in zip(sequences, shared_ends, strict=True):
        if stop is not None and stop.is_set():
            break
        hit_blocks += tier.serve(ids.tolist(), shared_end)
        requests += 1
    return HybridResult(
        policy="lru",
        core="no",
        capacity_blocks=capacity_blocks,
        capacity_share=capacity_blocks / trace.distinct_blocks,
        requests=requests,
        prompt_tokens=trace.prompt_tokens,
        hit_blocks=hit_blocks,
        infinite_hit_rate=trace.infinite_hit_rate,
        audit_errors=tuple(tier.audit()),
        wall_s=time.monotonic() - began_s,
        bound_hit_blocks=None if bound is None else bound.hit_blocks(capacity_blocks),
        components=components.text,
        read_as=components.read_as,
        marks=str(components.placement),
        num_marks=tier.num_made,
        spacing_blocks=tier.spacing,
    )


def _shared_ends(trace: Trace, sequences: Sequence[NDArray[np.int32]]) -> list[int]:
    """Per request the blocks of its prompt that another session has, too: what a client would tell."""
    first_session: dict[int, str | None] = {}
    shared: set[int] = set()
    for request, ids in zip(trace, sequences, strict=True):
        name = request.session or f"request {request.index}"
        shared.update(block for block in ids.tolist() if first_session.setdefault(block, name) != name)
    return [
        next((end for end, block in enumerate(ids) if block not in shared), len(ids))
        for ids in map(list, sequences)
    ]


class HybridTier:
    """Blocks of a trace by their number; what is resident is closed under "shorter prefix".

    Args:
        sequences: per request int32 [blocks]; equal ids mean that the block and all before it are equal.
    """

    def __init__(
        self,
        sequences: Sequence[NDArray[np.int32]],
        capacity_blocks: int,
        components: HybridComponents,
    ) -> None:
        self._capacity = capacity_blocks * UNITS
        self._components = components
        self._keeps_all = components.placement is Placement.EVERYWHERE
        spacing = max(1, round(spare_spacing(components.mark_blocks * BLOCK_TOKENS) / BLOCK_TOKENS))
        self.spacing = spacing if components.placement is Placement.CHOSEN else None
        self.num_made = 0
        self._now = 0
        self._units = 0
        num_blocks = 1 + max((int(ids.max()) for ids in sequences if len(ids)), default=ROOT)
        self._parent = [ROOT] * num_blocks
        self._depth = [0] * num_blocks
        for ids in sequences:
            above = ROOT
            for depth, block in enumerate(ids.tolist(), start=1):
                self._parent[block], self._depth[block] = above, depth
                above = block
        self._resident = [False] * num_blocks
        self._num_kids = [0] * num_blocks  # resident children
        self._used = [ROOT] * num_blocks  # a parent learns it when its last child goes
        self._marked_use: dict[int, int] = {}  # each mark's last use as a boundary
        self._needed = [[0] * num_blocks for _ in components.windows]  # marks that need the block, per window
        self._tails: list[
            tuple[bool, int, int, int]
        ] = []  # heap of (lives, used, -depth, block); may be stale
        self._ageing: list[tuple[int, int]] = []  # heap of (last use, block) of marks that age alone

    # ---- one request -------------------------------------------------------------------------
    def serve(self, blocks: list[int], shared_end: int) -> int:
        """Look up, store and trim; returns the blocks that were reused.

        Args:
            shared_end: blocks of the prompt that other sessions have, too.
        """
        self._now += 1
        if not blocks:
            return 0
        known = next((i for i, block in enumerate(blocks) if not self._resident[block]), len(blocks))
        boundary = next((i for i in range(known, 0, -1) if self._is_boundary(blocks[i - 1])), 0)
        if boundary and blocks[boundary - 1] in self._marked_use:
            self._marked_use[blocks[boundary - 1]] = self._now
        if self._fits(len(blocks)):
            self._store(blocks, known)
            self._leave_marks(blocks, boundary, known, shared_end)
            self._trim()
        elif known:
            self._touch(blocks[known - 1])
        return boundary

    def _is_boundary(self, block: int) -> bool:
        return self._keeps_all or block in self._marked_use

    def _fits(self, num_blocks: int) -> bool:
        """A prompt whose end could not be marked would displace others for nothing."""
        if self._keeps_all:
            return True
        return num_blocks * UNITS + self._components.mark_units(num_blocks) <= self._capacity

    def _store(self, blocks: list[int], known: int) -> None:
        for block in blocks[known:]:
            self._resident[block] = True
            self._used[block] = self._now
            self._units += self._block_units()
            if self._parent[block] != ROOT:
                self._num_kids[self._parent[block]] += 1
        self._touch(blocks[-1])

    def _block_units(self) -> int:
        if not self._keeps_all:
            return UNITS
        return UNITS + self._components.state_units + sum(window.units for window in self._components.windows)

    def _touch(self, block: int) -> None:
        self._used[block] = self._now
        self._offer(block)

    # ---- marks -------------------------------------------------------------------------------
    def _leave_marks(self, blocks: list[int], boundary: int, known: int, shared_end: int) -> None:
        if self._keeps_all:
            return
        ends = {len(blocks)}
        if self.spacing is not None:
            ends |= {known, shared_end}  # FULL known beyond the boundary ends at a fork
            for end in range(self.spacing, len(blocks), self.spacing):
                if end > boundary and end not in ends:
                    self._mark(blocks[end - 1], ages_alone=False)
        for end in sorted(ends):
            if end > boundary:
                self._mark(blocks[end - 1], ages_alone=self.spacing is not None)
        self._offer(blocks[-1])

    def _mark(self, block: int, *, ages_alone: bool) -> None:
        is_new = block not in self._marked_use
        self._marked_use[block] = self._now
        if not is_new:
            return
        self.num_made += 1
        self._units += self._components.state_units
        for window, needed in zip(self._components.windows, self._needed, strict=True):
            for place in self._window(block, window):
                needed[place] += 1
                self._units += window.units * (needed[place] == 1)
        if ages_alone:
            heapq.heappush(self._ageing, (self._now, block))

    def _unmark(self, block: int) -> None:
        del self._marked_use[block]
        self._units -= self._components.state_units
        for window, needed in zip(self._components.windows, self._needed, strict=True):
            for place in self._window(block, window):
                needed[place] -= 1
                self._units -= window.units * (needed[place] == 0)

    def _window(self, block: int, window: Window) -> Iterator[int]:
        """The blocks that a boundary behind ``block`` needs of the window."""
        for _ in range(min(window.blocks, self._depth[block])):
            yield block
            block = self._parent[block]

    # ---- pressure ----------------------------------------------------------------------------
    def _offer(self, block: int) -> None:
        if self._resident[block] and not self._num_kids[block]:
            heapq.heappush(self._tails, self._rank(block))

    def _rank(self, block: int) -> tuple[bool, int, int, int]:
        return (self._is_boundary(block), self._used[block], -self._depth[block], block)

    def _trim(self) -> None:
        while self._units > self._capacity:
            lives, used, _, block = self._first_tail()
            mark_use, marked = self._first_mark()
            if lives and mark_use < used:
                self._unmark(marked)
                self._offer(marked)  # a tail is dead weight without it
            else:
                self._drop(block)

    def _first_tail(self) -> tuple[bool, int, int, int]:
        """The tail block that goes first. *Caller guarantees*: something is resident."""
        while True:
            rank = self._tails[0]
            block = rank[-1]
            if not self._resident[block] or self._num_kids[block]:
                heapq.heappop(self._tails)
            elif rank != self._rank(block):
                heapq.heapreplace(self._tails, self._rank(block))
            else:
                return rank

    def _first_mark(self) -> tuple[int, int]:
        """The mark that goes first by its own age, and its last use; later than now if there is none."""
        while self._ageing:
            used, block = self._ageing[0]
            latest = self._marked_use.get(block)
            if latest is None:
                heapq.heappop(self._ageing)
            elif latest != used:
                heapq.heapreplace(self._ageing, (latest, block))
            else:
                return used, block
        return self._now + 1, ROOT

    def _drop(self, block: int) -> None:
        if block in self._marked_use:
            self._unmark(block)
        self._resident[block] = False
        self._units -= self._block_units()
        parent = self._parent[block]
        if parent != ROOT:
            self._num_kids[parent] -= 1
            self._used[parent] = max(self._used[parent], self._used[block])
            self._offer(parent)

    # ---- doubt -------------------------------------------------------------------------------
    def audit(self) -> list[str]:
        """What does not add up, counted from scratch; empty when sound."""
        resident = {block for block, is_there in enumerate(self._resident) if is_there}
        units = len(resident) * self._block_units() + len(self._marked_use) * self._components.state_units
        for window in self._components.windows:
            held = {place for block in self._marked_use for place in self._window(block, window)}
            units += len(held) * window.units
        findings = []
        if units != self._units:
            findings.append(f"{self._units} units are booked, {units} are there")
        if units > self._capacity:
            findings.append(f"{units} units are there, {self._capacity} may be")
        if not self._marked_use.keys() <= resident:
            findings.append("a mark stands at a block that is not resident")
        if any(self._parent[block] != ROOT and self._parent[block] not in resident for block in resident):
            findings.append("a block is resident without its parent")
        return findings
