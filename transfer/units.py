"""Copies between slots and the units that they have in a shared L2.

::

    slot, layer first      [ layer 0 | layer 1 | layer 2 ]         three layers
    its units              [ unit 9   | unit 10  | unit 4 ]        of 9 and 10 a run, and 4
    pieces                 [ layers 0, 1      |][|layer 2 ]        whole layers together, the rest apart

Short runs go through a buffer instead: a view for each would cost more than a second pass over the bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hicache.radix.actions import Slots
from hicache.transfer.layout import SlotView, UnitView

PIECE_WORDS = 32_768
"""Torch copies up to this many elements in the calling thread (its grain size)."""
SMALL_RUN_BYTES = 16 << 10
"""Where runs are shorter than this on average, a view for each costs more than a second pass over the bytes."""
BUFFER_BYTES = 4 << 20
"""Bytes that go through a buffer at a time where runs are short."""


class Piece(NamedTuple):
    """Words ``first .. last - 1`` of a slot, and where the first of them is in the allocation."""

    slot: int
    first: int
    last: int
    word: int


def are_small(view: UnitView, units: Slots) -> bool:
    """Whether the runs of units are so short that they are copied through a buffer."""
    num_runs = len(units) + np.count_nonzero(np.diff(units, axis=1) != 1)
    return bool(len(units) * view.slot_bytes < SMALL_RUN_BYTES * num_runs)


def pieces_of(view: UnitView, units: Slots, slots: Slots) -> list[Piece]:
    """What to copy for slots of the other side, which have these units each; int64 ``[n, k]``, ``[n]``."""
    layer_words = view.slot_words // view.num_layers
    pieces: list[Piece] = []
    for slot, row in zip(slots.tolist(), units, strict=True):
        for begin, end, word in _runs(row, view.unit_words, view.slot_words):
            pieces += (
                Piece(slot, first, last, word + first - begin)
                for first, last in _cuts(begin, end, layer_words)
            )
    return pieces


def _runs(row: NDArray[np.int64], unit_words: int, slot_words: int) -> Iterator[tuple[int, int, int]]:
    """Units that lie together: first and last word of the slot, first word of the allocation."""
    starts = [0, *(np.flatnonzero(np.diff(row) != 1) + 1).tolist(), len(row)]
    for start, stop in itertools.pairwise(starts):
        yield start * unit_words, min(stop * unit_words, slot_words), int(row[start]) * unit_words


def _cuts(begin: int, end: int, layer_words: int) -> Iterator[tuple[int, int]]:
    """Parts of a run: a part of one layer, or whole layers; at most ``PIECE_WORDS`` each."""
    while begin < end:
        within = begin % layer_words
        if within or end - begin < layer_words or layer_words > PIECE_WORDS:
            stop = min(end, begin - within + layer_words, begin + PIECE_WORDS)
        else:
            stop = begin + min((end - begin) // layer_words, PIECE_WORDS // layer_words) * layer_words
        yield begin, stop
        begin = stop


def copy_pieces(view: UnitView, other: SlotView, pieces: Sequence[Piece], *, to_units: bool) -> None:
    """Copy pieces in the calling thread."""
    allocation, payload = view.payload.view(-1), other.payload
    layer_words = int(payload.shape[2])
    ours: list[torch.Tensor] = []
    theirs: list[torch.Tensor] = []
    for slot, first, last, word in pieces:
        layer, within = divmod(first, layer_words)
        part = allocation[word : word + last - first]
        if within or last - first < layer_words:
            theirs.append(payload[slot, layer, within : within + last - first])
        else:
            part = part.view(-1, layer_words)
            theirs.append(payload[slot, layer : layer + len(part)])
        ours.append(part)
    into, out_of = (ours, theirs) if to_units else (theirs, ours)
    if into:
        # Private by name, but the only batched copy torch has.
        torch._foreach_copy_(into, out_of)  # pyright: ignore[reportPrivateImportUsage]


def copy_through_buffer(
    view: UnitView, units: Slots, other: SlotView, slots: Slots, *, to_units: bool
) -> None:
    """Copy slots whose runs are short, some at a time."""
    allocation = view.payload.view(-1, view.unit_words).numpy()
    slot_words, padded_words = view.slot_words, units.shape[1] * view.unit_words
    step = max(1, BUFFER_BYTES // view.slot_bytes)
    for first in range(0, len(slots), step):
        some, at = slots[first : first + step], units[first : first + step]
        if to_units:
            rows = np.empty((len(some), padded_words), dtype=allocation.dtype)  # nobody reads beyond the slot
            rows[:, :slot_words] = _gather(other.payload, some).reshape(len(some), -1)
            allocation[at] = rows.reshape(*at.shape, -1)
        else:
            rows = allocation[at].reshape(len(some), -1)[:, :slot_words]
            _scatter(other.payload, some, rows.reshape(len(some), *other.payload.shape[1:]))


def _gather(payload: torch.Tensor, slots: Slots) -> NDArray[np.generic]:
    if not payload.is_cuda:
        return payload.numpy()[slots]  # torch's indexing starts threads even for little
    return payload.index_select(0, torch.from_numpy(slots).to(payload.device)).cpu().numpy()


def _scatter(payload: torch.Tensor, slots: Slots, rows: NDArray[np.generic]) -> None:
    if not payload.is_cuda:
        payload.numpy()[slots] = rows
        return
    moved = torch.from_numpy(np.ascontiguousarray(rows)).to(payload.device)
    payload.index_copy_(0, torch.from_numpy(slots).to(payload.device), moved)
