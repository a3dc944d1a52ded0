"""A load cut by layers: what a request computes first arrives first.

::

    whole copies, in order     full 0 1 2 3 | swa 0 1 | ...          layer 0 is there when all of it is
    by layer, all components   full 0 | swa 0 | full 1 | full 2 | swa 1 | full 3

Each layer of each copy is a work of its own on the stream, so a load by layer is the same on every kind of
stream. A component with fewer layers than another one has them spread over the whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hicache.errors import TierUnavailableError
from hicache.radix.actions import Slots
from hicache.transfer.jobs import Job
from hicache.transfer.layout import SlotView
from hicache.transfer.streams import SlotWork, Stream, TimedWork

OnLayer = Callable[[Job], None]
"""Told that one more layer of a job is in place."""
OnEnd = Callable[[Job, int, BaseException | None], None]
"""Told once how many slots of a job are in place: all, or none and why."""
MakeWork = Callable[[Job, tuple[SlotView, Slots], tuple[SlotView, Slots]], SlotWork]


@dataclass(frozen=True, slots=True, eq=False)
class LayeredCopy:
    """One copy of a load by layer.

    Args:
        job: its ticket, with the ``num_layers`` that can be copied one by one; 1: slots are copied whole.
        source, target: the whole slots' views and which slots.
    """

    job: Job
    source: tuple[SlotView, Slots]
    target: tuple[SlotView, Slots]


class LayerFailedError(TierUnavailableError):
    """An earlier layer of the same copy failed, so the others are not worth copying."""


def layer_view(view: SlotView, layer: int) -> SlotView:
    """One layer of every slot."""
    num_layers = int(view.payload.shape[1])
    return SlotView(view.where, view.payload[:, layer : layer + 1], view.slot_bytes // num_layers)


def submit_layers(
    stream: Stream, copies: Sequence[LayeredCopy], make_work: MakeWork, on_layer: OnLayer, on_end: OnEnd
) -> None:
    """Queue copies layer after layer, all components abreast; what is copied whole comes first, since every layer waits for it.

    Args:
        make_work: a work that copies one view's slots to another's, for a job.
        on_layer, on_end: called by the stream; ``on_end`` once for each job.
    """
    ends = [_Layers(copy, on_layer, on_end) for copy in copies]
    turns = [
        (0.0 if end.is_whole else (layer + 1) / end.num_layers, position, layer)
        for position, end in enumerate(ends)
        for layer in range(end.num_layers)
    ]
    for _, position, layer in sorted(turns):
        end, copy = ends[position], copies[position]
        fence = stream.submit(_Layer(end, copy, layer, make_work), end.layer_done)
        if fence is not None:
            copy.job.fences[layer] = fence


class _Layers:
    """What has become of one copy's layers so far."""

    def __init__(self, copy: LayeredCopy, on_layer: OnLayer, on_end: OnEnd) -> None:
        self.job = copy.job
        self.num_layers = copy.job.num_layers
        self.is_whole = self.num_layers < copy.source[0].num_layers
        self.has_failed = False
        self._num_left = self.num_layers
        self._error: BaseException | None = None
        self._lock = threading.Lock()  # a stream that is closed ends works from the closing thread
        self._on_layer = on_layer
        self._on_end = on_end

    def layer_done(self, done_slots: int, error: BaseException | None) -> None:
        with self._lock:
            if error is None and done_slots < self.job.num_slots:
                error = TierUnavailableError(
                    f"a layer stopped after {done_slots} of {self.job.num_slots} slots"
                )
            if error is not None and not self.has_failed:
                self.has_failed, self._error = True, error
            self._num_left -= 1
            is_last = self._num_left == 0
        # Its slots belong to the stream until no layer is under way any more.
        if not self.has_failed:
            self._on_layer(self.job)
        if is_last:
            self._on_end(self.job, 0 if self.has_failed else self.job.num_slots, self._error)


class _Layer:
    """One layer of one copy, as a stream runs it. Made ready only then: the first layer is not to wait for that."""

    __slots__ = ("_copy", "_layer", "_layers", "_make_work", "_work")

    def __init__(self, layers: _Layers, copy: LayeredCopy, layer: int, make_work: MakeWork) -> None:
        self._layers = layers
        self._copy = copy
        self._layer = layer
        self._make_work = make_work
        self._work: object = None  # once it runs

    @property
    def num_slots(self) -> int:
        return self._copy.job.num_slots

    def run(self, first: int, last: int) -> None:
        if self._layers.has_failed:
            raise LayerFailedError("an earlier layer of this copy failed")
        ends = [self._copy.source, self._copy.target]
        if self._layers.num_layers > 1:
            ends = [(layer_view(view, self._layer), slots) for view, slots in ends]
        work = self._work = self._make_work(self._copy.job, *ends)
        work.run(first, last)

    def took(self, seconds: float) -> None:
        if isinstance(self._work, TimedWork):
            self._work.took(seconds)
