"""The ways a batch can take between a CUDA device and host memory, and the choice among them.

::

    kernel    device [layer, slot] <------- one launch, over pinned memory --------> host [slot, layer]
    runs      device [layer, slot] <- gather / scatter -> staging [slot, layer] <- runs of slots, one call -> host
    torch     the same, a call of torch for each run: needs nothing but torch, and host memory of any kind

All only put work into the current stream. Which is the fastest depends on the machine and on how much is copied,
so a ``PathChoice`` times the first copies of each size as they happen, and keeps to the best.

*None of it has run on a device so far; what they copy is tested on CPU tensors in the device's place.*
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from hicache.errors import TierUnavailableError
from hicache.radix.actions import Slots
from hicache.transfer.kernels import CupyKernel, copy_kernel

logger = logging.getLogger(__name__)

STAGING_BYTES = 64 << 20
"""Device memory that a batch passes through at a time where it takes another way than the kernel's."""
TRIALS = 3
"""Copies of a size that each way is timed on; the best time of each counts."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One copy of slots.

    Args:
        source, target: ``[slot, layer, word]`` of one dtype, a layer's words in a row.
        source_slots, target_slots: int64 ``[n]``, CPU.
        to_host: whether the source is the device's; else the target is.
    """

    source: torch.Tensor
    source_slots: Slots
    target: torch.Tensor
    target_slots: Slots
    to_host: bool

    @property
    def num_bytes(self) -> int:
        shape = self.source.shape
        return len(self.source_slots) * int(shape[1]) * int(shape[2]) * self.source.element_size()

    def part(self, first: int, last: int) -> Batch:
        """Slots ``first .. last - 1`` of it."""
        pairs = self.source_slots[first:last], self.target_slots[first:last]
        return Batch(self.source, pairs[0], self.target, pairs[1], self.to_host)


class CopyPath(Protocol):
    """One way to copy a batch."""

    name: str

    def can_copy(self, batch: Batch) -> bool:
        """Whether this way reaches both sides."""
        ...

    def copy(self, batch: Batch) -> None:
        """Put the copy into the current stream. *Raises*: anything; then rely on no byte."""
        ...


# ---- the kernel ------------------------------------------------------------------------------------------------------
class KernelPath:
    """One launch for all layers of all slots."""

    name = "kernel"

    def __init__(self, kernel: CupyKernel) -> None:
        self._kernel = kernel

    def can_copy(self, batch: Batch) -> bool:
        return self._kernel.can_copy(batch.source, batch.target)

    def copy(self, batch: Batch) -> None:
        device = batch.source.device if batch.to_host else batch.target.device
        slots = (upload(each, device) for each in (batch.source_slots, batch.target_slots))
        self._kernel.copy(batch.source, next(slots), batch.target, next(slots))


def upload(slots: Slots, device: torch.device) -> torch.Tensor:
    """Slot numbers on the device, without waiting for it: a copy from pageable memory would."""
    numbers = torch.from_numpy(slots if slots.flags.c_contiguous else np.ascontiguousarray(slots))
    if device.type != "cuda":
        return numbers
    return numbers.pin_memory().to(device, non_blocking=True)


# ---- through a staging buffer ----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Area:
    """``height`` rows of ``width`` bytes, as far apart as the pitches say; addresses are in bytes."""

    target: int
    target_pitch: int
    source: int
    source_pitch: int
    width: int
    height: int


MoveRuns = Callable[[torch.Tensor, NDArray[np.int64], torch.Tensor, bool], None]
"""Host tensor, its slots, staging ``[slot, layer, word]``, whether to the host: copy slot by slot."""


class StagedPath:
    """Gather on the device, then runs of slots to the host; or the other way round.

    Args:
        name: of the way.
        move: copies between the staging buffer and runs of host slots.
        needs_pinned: whether ``move`` may only touch pinned host memory.
    """

    def __init__(self, name: str, move: MoveRuns, *, needs_pinned: bool) -> None:
        self.name = name
        self._move = move
        self._needs_pinned = needs_pinned

    def can_copy(self, batch: Batch) -> bool:
        return not self._needs_pinned or (batch.target if batch.to_host else batch.source).is_pinned()

    def copy(self, batch: Batch) -> None:
        slot_bytes = max(1, batch.num_bytes // max(1, len(batch.source_slots)))
        step = max(1, STAGING_BYTES // slot_bytes)
        for first in range(0, len(batch.source_slots), step):
            self._copy_part(batch.part(first, first + step))

    def _copy_part(self, part: Batch) -> None:
        # The buffer belongs to the current stream, as the allocator knows: the next part may have its memory.
        if part.to_host:
            device_slots = upload(part.source_slots, part.source.device)
            self._move(part.target, part.target_slots, part.source.index_select(0, device_slots), True)
        else:
            shape = (len(part.source_slots), *part.source.shape[1:])
            staging = torch.empty(shape, dtype=part.target.dtype, device=part.target.device)
            self._move(part.source, part.source_slots, staging, False)
            part.target.index_copy_(0, upload(part.target_slots, part.target.device), staging)


def torch_move(host: torch.Tensor, slots: NDArray[np.int64], staging: torch.Tensor, to_host: bool) -> None:
    """A call of torch for each run of slots."""
    # A strided run would go through a temporary that torch does not wait for.
    is_whole = host[:1].stride(0) == host.shape[1] * host.shape[2]
    runs = runs_of(slots) if is_whole else [(int(slot), row, 1) for row, slot in enumerate(slots)]
    for first, row, count in runs:
        here, there = host[first : first + count], staging[row : row + count]
        if to_host:
            here.copy_(there, non_blocking=True)
        else:
            there.copy_(here, non_blocking=True)


def runs_of(slots: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Runs of consecutive slots: first slot, its position, length."""
    starts = np.concatenate(([0], np.flatnonzero(np.diff(slots) != 1) + 1, [len(slots)]))
    return [(int(slots[a]), int(a), int(b - a)) for a, b in itertools.pairwise(starts) if b > a]


class RuntimeMove:
    """The CUDA runtime's own calls, all runs at once where it can: ``cudaMemcpyBatchAsync`` (12.8 and newer), else
    ``cudaMemcpy2DAsync`` a run.

    Args:
        library: the runtime.
        release: of it, such as (13, 0).
        stream: the handle of the current stream.
    """

    def __init__(self, library: Any, release: tuple[int, int], stream: Callable[[], int]) -> None:
        self._library = library
        self._release = release
        self._stream = stream

    @property
    def name(self) -> str:
        return "batch" if self.is_batched else "2d"

    @property
    def is_batched(self) -> bool:
        return self._release >= (12, 8)

    def __call__(
        self, host: torch.Tensor, slots: NDArray[np.int64], staging: torch.Tensor, to_host: bool
    ) -> None:
        areas = areas_of(host, slots, staging, to_host=to_host)
        if self.is_batched and self._stream() not in _LEGACY_STREAMS:
            self._batch(areas)
        else:
            for area in areas:
                self._ask(
                    self._library.cudaMemcpy2DAsync(
                        ctypes.c_void_p(area.target), ctypes.c_size_t(area.target_pitch),
                        ctypes.c_void_p(area.source), ctypes.c_size_t(area.source_pitch),
                        ctypes.c_size_t(area.width), ctypes.c_size_t(area.height),
                        ctypes.c_int(_TO_HOST if to_host else _TO_DEVICE), ctypes.c_void_p(self._stream()),
                    ),
                    "cudaMemcpy2DAsync",
                )  # fmt: skip

    def _batch(self, areas: Sequence[Area]) -> None:
        rows = [
            (area.target + row * area.target_pitch, area.source + row * area.source_pitch, area.width)
            for area in areas
            for row in range(area.height)
        ]
        count = len(rows)
        targets, sources = (np.array([row[i] for row in rows], dtype=np.uint64) for i in (0, 1))
        sizes = np.array([row[2] for row in rows], dtype=np.uint64)
        attributes, first = _Attributes(srcAccessOrder=_STREAM_ORDER), ctypes.c_size_t(0)
        failed_at = ctypes.c_size_t(0)
        arguments = [
            *(ctypes.c_void_p(array.ctypes.data) for array in (targets, sources, sizes)),
            ctypes.c_size_t(count),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
            *([ctypes.byref(failed_at)] if self._release < (13, 0) else []),
            ctypes.c_void_p(self._stream()),
        ]
        self._ask(self._library.cudaMemcpyBatchAsync(*arguments), "cudaMemcpyBatchAsync")

    def _ask(self, failed: int, call: str) -> None:
        if failed:
            self._library.cudaGetLastError()  # else torch's next launch in this thread finds it, and fails for it
            raise TierUnavailableError(f"{call} answers with error {failed}")


_TO_HOST, _TO_DEVICE = 2, 1
_LEGACY_STREAMS = (0, 1)
"""The default stream, which a batch is not allowed in."""
_STREAM_ORDER = 1
"""``cudaMemcpySrcAccessOrderStream``: the source is read in the stream's order."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """``cudaMemcpyAttributes``; the hints are for managed memory only and stay empty."""

    _fields_ = (
        ("srcAccessOrder", ctypes.c_int),
        ("srcLocHint", _Location),
        ("dstLocHint", _Location),
        ("flags", ctypes.c_uint),
    )


def areas_of(
    host: torch.Tensor, slots: NDArray[np.int64], staging: torch.Tensor, *, to_host: bool
) -> list[Area]:
    """The runs as areas: one row each where whole slots lie in a row, a row a slot where only a layer is copied."""
    size = host.element_size()
    row_bytes = int(host.shape[1]) * int(host.shape[2]) * size
    pitch = host.stride(0) * size
    areas = []
    for first, row, count in runs_of(slots):
        width, height = (count * row_bytes, 1) if pitch == row_bytes else (row_bytes, count)
        here, there = host.data_ptr() + first * pitch, staging.data_ptr() + row * row_bytes
        pitches = max(pitch, width), max(row_bytes, width)  # a row is no wider than its pitch
        ends = (here, pitches[0], there, pitches[1]) if to_host else (there, pitches[1], here, pitches[0])
        areas.append(Area(*ends, width, height))
    return areas


# ---- the choice ------------------------------------------------------------------------------------------------------
class Timer(Protocol):
    """Times what is put into the current stream."""

    def start(self) -> Any:
        """Begin; gives a token."""
        ...

    def stop(self, token: Any) -> None:
        """End."""
        ...

    def seconds(self, token: Any) -> float | None:
        """How long it took; None while it runs. Never blocks."""
        ...


class EventTimer:
    """By a pair of CUDA events."""

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda

    def start(self) -> Any:
        pair = [self._cuda.Event(enable_timing=True) for _ in range(2)]
        pair[0].record()
        return pair

    def stop(self, token: Any) -> None:
        token[1].record()

    def seconds(self, token: Any) -> float | None:
        began, ended = token
        return began.elapsed_time(ended) / 1e3 if ended.query() else None


@dataclass(slots=True)
class _Size:
    """What is known of copies of one size and direction."""

    num_begun: dict[str, int] = field(default_factory=dict)
    running: deque[tuple[str, int, Any]] = field(default_factory=deque)
    best: dict[str, float] = field(default_factory=dict)
    """Bytes a second."""


class PathChoice:
    """Takes each way a few times for each size of copy, and from then on the fastest.

    Sizes are powers of two of a batch's bytes; directions, and layers of a slot against whole ones, count apart.

    Args:
        paths: the ways, the one to take where nothing is known yet first.
        timer: times them.

    *Thread*: several streams' threads may copy at once.
    """

    def __init__(self, paths: Sequence[CopyPath], timer: Timer) -> None:
        self.paths = tuple(paths)
        self._timer = timer
        self._sizes: dict[tuple[bool, bool, int], _Size] = {}
        self._told: set[str] = set()  # ways that have failed

    def copy(self, batch: Batch) -> None:
        """Put the copy into the current stream, the best way that can take it.

        A way that fails is not tried again for this size, and the next one takes the copy.

        *Raises*: ``TierUnavailableError`` if none can; what the last way raises.
        """
        able = [path for path in self.paths if path.can_copy(batch)]
        if not able:
            raise TierUnavailableError(f"no way to copy from {batch.source.device} to {batch.target.device}")
        size = self._sizes.setdefault(_class_of(batch), _Size())
        self._read_times(size)
        while True:
            path, is_trial = _next_way(size, able)
            token = self._timer.start() if is_trial else None
            try:
                path.copy(batch)
            except Exception as error:
                # What it has begun comes before the next way in the stream, which writes the same slots.
                size.num_begun[path.name] = TRIALS
                size.best.pop(path.name, None)
                able.remove(path)
                if not able:
                    raise
                if path.name not in self._told:
                    self._told.add(path.name)
                    logger.warning(
                        "a copy by %s failed (said once); the next way is taken: %s", path.name, error
                    )
                continue
            if token is not None:
                self._timer.stop(token)
                size.running.append((path.name, batch.num_bytes, token))
            return

    def table(self) -> list[dict[str, object]]:
        """What was measured: direction, whether whole slots, size, and bytes a second of each way."""
        return [
            {
                "direction": "to_host" if to_host else "to_device",
                "whole_slots": is_whole,
                "bytes": 1 << exponent,
                "bytes_per_s": dict(size.best),
            }
            for (to_host, is_whole, exponent), size in sorted(self._sizes.items())
        ]

    def _read_times(self, size: _Size) -> None:
        while size.running:
            name, num_bytes, token = size.running[0]
            seconds = self._timer.seconds(token)
            if seconds is None:
                return
            size.running.popleft()
            size.best[name] = max(size.best.get(name, 0.0), num_bytes / max(seconds, 1e-9))


def _next_way(size: _Size, able: Sequence[CopyPath]) -> tuple[CopyPath, bool]:
    """Which way to take, and whether it is timed."""
    untried = [path for path in able if size.num_begun.get(path.name, 0) < TRIALS]
    if len(able) == 1 or not untried:
        return max(able, key=lambda path: size.best.get(path.name, 0.0)), False
    path = min(untried, key=lambda path: size.num_begun.get(path.name, 0))
    size.num_begun[path.name] = size.num_begun.get(path.name, 0) + 1
    return path, True


def _class_of(batch: Batch) -> tuple[bool, bool, int]:
    host = batch.target if batch.to_host else batch.source
    is_whole = host.stride(0) == host.shape[1] * host.shape[2]
    return batch.to_host, bool(is_whole), max(0, batch.num_bytes - 1).bit_length()


@functools.cache
def choice_for(device: torch.device) -> PathChoice:
    """The device's own choice, with every way that this machine offers."""
    paths: list[CopyPath] = []
    kernel = copy_kernel(device)
    if kernel is not None:
        paths.append(KernelPath(kernel))
    move = _runtime_move(device)
    if move is not None:
        paths.append(StagedPath(move.name, move, needs_pinned=True))
    paths.append(StagedPath("torch", torch_move, needs_pinned=False))
    logger.info("copies on %s may go by %s", device, ", ".join(path.name for path in paths))
    return PathChoice(paths, EventTimer())


def _runtime_move(device: torch.device) -> RuntimeMove | None:
    """The CUDA runtime that torch has loaded; None, said once, where it is not found."""
    try:
        major = int(str(torch.version.cuda).split(".", maxsplit=1)[0])
        library = ctypes.CDLL(f"libcudart.so.{major}")
        number = ctypes.c_int(0)
        library.cudaRuntimeGetVersion(ctypes.byref(number))
    except (OSError, ValueError, AttributeError) as error:
        logger.info("copies on %s do without batches of the CUDA runtime: %s", device, error)
        return None
    release = (number.value // 1000, number.value % 1000 // 10)
    return RuntimeMove(library, release, lambda: torch.cuda.current_stream(device).cuda_stream)


def copy_on_device(
    source: torch.Tensor, source_slots: Slots, target: torch.Tensor, target_slots: Slots
) -> None:
    """Put a copy that touches a CUDA device into the current stream; its event tells when it is done."""
    if source.is_cuda and target.is_cuda:
        slots = (upload(each, source.device) for each in (source_slots, target_slots))
        gathered = source.index_select(0, next(slots))
        target.index_copy_(0, next(slots), gathered)
        return
    device = source.device if source.is_cuda else target.device
    choice_for(device).copy(Batch(source, source_slots, target, target_slots, to_host=source.is_cuda))
