"""Batched copies between slot views: gather and scatter across layouts, and claims within one pool.

A batch is cut into *pieces*: runs of slots that are consecutive on both sides, no larger than what
torch copies in one thread. The pieces of a chunk go down in one call that lets go of the interpreter
lock; a few *lanes* (the caller and helper threads) take chunk after chunk::

    pairs    3>7 4>8 5>9 | 12>2 | 13>0      (source slot > target slot)
    pieces   [3:6]>[7:10], [12:13]>[2:3], [13:14]>[0:1]
    lanes    caller: chunk 0, chunk 2 ...   helper: chunk 1, ...

Why lanes: pages of 64 KiB fit the caches, so one thread copies them at about half the speed of one
large ``memcpy``, which writes past the caches; two threads make up for it. Why not torch's own
threads: they meet at a barrier after every piece, which a busy machine turns into milliseconds.
Why not gather and scatter through a buffer: that reads and writes every byte twice
(``benchmarks/copy_cpu.py``).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from hicache.closing import Closing
from hicache.errors import ProtocolError
from hicache.radix.actions import Slots
from hicache.threads import DaemonExecutor
from hicache.transfer.copy_paths import copy_on_device
from hicache.transfer.layout import PlacedView, SlotView, UnitView
from hicache.transfer.units import (
    BUFFER_BYTES,
    PIECE_WORDS,
    SMALL_RUN_BYTES,
    Piece,
    are_small,
    copy_pieces,
    copy_through_buffer,
    pieces_of,
)

LANE_BYTES = 1 << 20
"""A lane takes at least this much at a time, so small batches need no helper."""
MAX_LANES = 4
CHUNKS_PER_LANE = 4

Run = tuple[int, int, int]
P = TypeVar("P")
Area = tuple[slice, slice]


def pair_runs(source_slots: Slots, target_slots: Slots) -> NDArray[np.int64]:
    """Maximal runs consecutive on both sides: int64 ``[num_runs, 3]`` of source, target, length."""
    if not source_slots.size:
        return np.empty((0, 3), dtype=np.int64)
    breaks = np.flatnonzero((np.diff(source_slots) != 1) | (np.diff(target_slots) != 1)) + 1
    starts = np.concatenate((np.zeros(1, dtype=np.int64), breaks))
    lengths = np.diff(np.append(starts, source_slots.size))
    return np.stack((source_slots[starts], target_slots[starts], lengths), axis=1)


def check_pairs(source: SlotView, source_slots: Slots, target: SlotView, target_slots: Slots) -> None:
    """Raise ``ProtocolError`` unless each source slot has one target slot, inside both pools.

    Within one pool no slot may be both: then the outcome would hang on the order of the copies.
    """
    if source_slots.size != target_slots.size:
        raise ProtocolError(f"{source_slots.size} source slots do not pair with {target_slots.size} targets")
    if (source.num_layers, source.slot_words) != (target.num_layers, target.slot_words):
        raise ProtocolError(f"slots of {source.where} and of {target.where} differ in shape")
    source.check(source_slots)
    target.check(target_slots)
    if source.where == target.where and np.intersect1d(source_slots, target_slots).size:
        raise ProtocolError(f"{source.where}: a slot is source and target of one copy")


class PageCopier(Closing):
    """Copies slots between views, on the calling thread and its helpers.

    Args:
        num_lanes: threads that copy one large batch, the caller included; default: one a core, at
            most 4. Helpers start with the first large batch.

    *Thread*: several threads may copy at once; ``copy`` blocks until the bytes are in place.
    """

    def __init__(self, num_lanes: int | None = None) -> None:
        self._num_lanes = num_lanes or min(MAX_LANES, os.cpu_count() or 1)
        self._helpers = DaemonExecutor(max(1, self._num_lanes - 1), name="hicache-copy")

    def copy(self, source: SlotView, source_slots: Slots, target: SlotView, target_slots: Slots) -> None:
        """Copy slot by slot. On return all bytes are in place, or, where a CUDA device takes part, in its current
        stream; after an error rely on none.

        Args:
            source_slots, target_slots: places, as ``SlotView.locate`` gives them.

        *Caller guarantees*: ``check_pairs`` passed; meanwhile nobody writes a source slot or uses a
        target slot.
        """
        if not source_slots.size:
            return
        for view, units, other, slots in (
            (source, source_slots, target, target_slots),
            (target, target_slots, source, source_slots),
        ):
            if isinstance(view, UnitView) and not isinstance(view, PlacedView):
                self._copy_units(view, units, other, slots, to_units=view is target)
                return
        if source.payload.is_cuda or target.payload.is_cuda:
            copy_on_device(source.payload, source_slots, target.payload, target_slots)
            return
        runs = pair_runs(source_slots, target_slots)
        if source_slots.size * source.slot_bytes < SMALL_RUN_BYTES * len(runs):
            _copy_indexed(source, source_slots, target, target_slots)
        else:
            self._copy_runs(source.payload, target.payload, runs)

    def close(self) -> None:
        """Let go of the helpers. Idempotent. *Caller guarantees*: no copy is under way."""
        self._helpers.shutdown(wait=True)

    def _copy_runs(self, source: torch.Tensor, target: torch.Tensor, runs: NDArray[np.int64]) -> None:
        num_layers, words = int(source.shape[1]), int(source.shape[2])
        areas = _areas(num_layers, words)
        cut = _cut(runs, max(1, PIECE_WORDS // (num_layers * words)))
        total_bytes = int(runs[:, 2].sum()) * num_layers * words * source.element_size()
        pieces: list[Run] = [(s, t, n) for s, t, n in cut.tolist()]

        def copy_some(some: Sequence[Run]) -> None:
            _copy_pieces(source, target, some, areas)

        self._in_lanes(pieces, total_bytes, copy_some)

    def _copy_units(
        self, view: UnitView, units: Slots, other: SlotView, slots: Slots, *, to_units: bool
    ) -> None:
        if are_small(view, units):
            copy_through_buffer(view, units, other, slots, to_units=to_units)
            return

        def copy_some(some: Sequence[Piece]) -> None:
            copy_pieces(view, other, some, to_units=to_units)

        pieces = pieces_of(view, units, slots)
        if not other.payload.is_cuda:
            self._in_lanes(pieces, slots.size * view.slot_bytes, copy_some)
            return
        copy_some(pieces)

    def _in_lanes(
        self, pieces: Sequence[P], total_bytes: int, copy_some: Callable[[Sequence[P]], None]
    ) -> None:
        """Have the pieces copied chunk after chunk, by the calling thread and helpers."""
        num_lanes = max(1, min(self._num_lanes, total_bytes // LANE_BYTES, len(pieces)))
        num_chunks = 1 if num_lanes == 1 else min(len(pieces), num_lanes * CHUNKS_PER_LANE)
        bounds = [len(pieces) * chunk // num_chunks for chunk in range(num_chunks + 1)]
        chunks = iter([pieces[low:high] for low, high in itertools.pairwise(bounds)])
        helpers = [self._helpers.submit(_copy_chunks, chunks, copy_some) for _ in range(num_lanes - 1)]
        try:
            _copy_chunks(chunks, copy_some)
        finally:
            _join(helpers)


def _copy_chunks(chunks: Iterator[Sequence[P]], copy_some: Callable[[Sequence[P]], None]) -> None:
    # Lanes share the iterator: next() on a list's iterator is one step under the interpreter lock.
    for pieces in chunks:
        copy_some(pieces)


def _copy_pieces(
    source: torch.Tensor, target: torch.Tensor, pieces: Sequence[Run], areas: list[Area]
) -> None:
    # Making views is what holds the interpreter lock; plain indices are several times faster than slices.
    if len(areas) > 1:
        into = [target[t, layers, words] for _, t, _ in pieces for layers, words in areas]
        out_of = [source[s, layers, words] for s, _, _ in pieces for layers, words in areas]
    else:
        into = [target[t] if n == 1 else target[t : t + n] for _, t, n in pieces]
        out_of = [source[s] if n == 1 else source[s : s + n] for s, _, n in pieces]
    # Private by name, but the only batched copy torch has.
    torch._foreach_copy_(into, out_of)  # pyright: ignore[reportPrivateImportUsage]


def _join(helpers: list[Future[None]]) -> None:
    """Wait until no helper writes any more, then raise the first error of any."""
    errors = [helper.exception() for helper in helpers if not helper.cancel()]
    for error in errors:
        if error is not None:
            raise error


def _areas(num_layers: int, words: int) -> list[Area]:
    """Layers and words of a slot, in parts of at most ``PIECE_WORDS``; one part if the slot fits."""
    layer_step = max(1, PIECE_WORDS // words)
    word_step = min(words, PIECE_WORDS)
    return [
        (slice(layer, layer + layer_step), slice(word, word + word_step))
        for layer in range(0, num_layers, layer_step)
        for word in range(0, words, word_step)
    ]


def _cut(runs: NDArray[np.int64], max_length: int) -> NDArray[np.int64]:
    """The same runs in parts of at most ``max_length`` slots."""
    source, target, length = runs.T
    num_parts = -(-length // max_length)
    run_idx = np.repeat(np.arange(len(runs)), num_parts)
    offset = (np.arange(len(run_idx)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)) * max_length
    lengths = np.minimum(length[run_idx] - offset, max_length)
    return np.stack((source[run_idx] + offset, target[run_idx] + offset, lengths), axis=1)


def _copy_indexed(source: SlotView, source_slots: Slots, target: SlotView, target_slots: Slots) -> None:
    """Gather into a buffer, scatter from it. NumPy: torch's indexing starts threads even for little."""
    out_of, into = source.payload.numpy(), target.payload.numpy()
    step = max(1, BUFFER_BYTES // source.slot_bytes)
    for first in range(0, source_slots.size, step):
        part = slice(first, first + step)
        into[target_slots[part]] = out_of[source_slots[part]]
