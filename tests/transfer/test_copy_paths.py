"""Every way between a device and the host copies the right bytes, on CPU tensors in the device's place; and which is taken."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import TierUnavailableError
from hicache.transfer import copy_paths
from hicache.transfer.copy_paths import (
    TRIALS,
    Batch,
    CopyPath,
    EventTimer,
    KernelPath,
    PathChoice,
    RuntimeMove,
    StagedPath,
    areas_of,
    torch_move,
)

STREAM = 0xBEEF


class FakeRuntime:
    """The CUDA runtime's copies, done at once by ``memmove``; as strict about its arguments as the real one.

    Args:
        release: which signature the batch call has.
        answer: the error code.
    """

    def __init__(self, release: tuple[int, int], answer: int = 0) -> None:
        self.release = release
        self.answer = answer
        self.num_calls = 0
        self.num_errors_read = 0
        self.kinds: set[int] = set()

    def cudaMemcpy2DAsync(  # noqa: N802
        self, target: Any, target_pitch: Any, source: Any, source_pitch: Any, width: Any, height: Any, kind: Any, stream: Any
    ) -> int:  # fmt: skip
        assert (stream.value or 0) == STREAM
        assert width.value <= min(target_pitch.value, source_pitch.value), "cudaErrorInvalidPitchValue"
        self.kinds.add(kind.value)
        self.num_calls += 1
        for row in range(height.value):
            ctypes.memmove(
                target.value + row * target_pitch.value, source.value + row * source_pitch.value, width.value
            )
        return self.answer

    def cudaGetLastError(self) -> int:  # noqa: N802
        self.num_errors_read += 1
        return self.answer

    def cudaMemcpyBatchAsync(self, *arguments: Any) -> int:  # noqa: N802
        if self.release < (13, 0):
            targets, sources, sizes, count, attributes, first, num_attributes, failed_at, stream = arguments
            assert failed_at._obj.value == 0
        else:
            targets, sources, sizes, count, attributes, first, num_attributes, stream = arguments
        assert stream.value == STREAM
        assert (first._obj.value, num_attributes.value) == (0, 1)
        assert attributes._obj.srcAccessOrder == 1
        assert ctypes.sizeof(attributes._obj) == 24
        self.num_calls += 1
        rows = [np.ctypeslib.as_array((ctypes.c_uint64 * count.value).from_address(a.value)) for a in (targets, sources, sizes)]  # fmt: skip
        for target, source, size in zip(*(row.tolist() for row in rows), strict=True):
            ctypes.memmove(target, source, size)
        return self.answer


def runtime_path(release: tuple[int, int]) -> StagedPath:
    move = RuntimeMove(FakeRuntime(release), release, lambda: STREAM)
    return StagedPath(move.name, move, needs_pinned=False)


PATHS: dict[str, Callable[[], CopyPath]] = {
    "torch": lambda: StagedPath("torch", torch_move, needs_pinned=False),
    "2d": lambda: runtime_path((12, 4)),
    "batch of 12.8": lambda: runtime_path((12, 8)),
    "batch of 13": lambda: runtime_path((13, 2)),
}


def pool(num_slots: int, num_layers: int, layer_bytes: int, *, layer_first: bool) -> torch.Tensor:
    """``[slot, layer, byte]`` over memory of that order."""
    if layer_first:
        return torch.empty((num_layers, num_slots, layer_bytes), dtype=torch.uint8).transpose(0, 1)
    return torch.empty((num_slots, num_layers, layer_bytes), dtype=torch.uint8)


# ---- bytes -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", PATHS)
@given(data=st.data())
def test_a_way_copies_what_it_is_told_and_nothing_else(name: str, data: st.DataObject) -> None:
    """Pages and states of odd sizes, random tables, whole slots or one layer, poisoned targets, small parts."""
    num_slots = data.draw(st.integers(1, 12), "slots")
    num_layers = data.draw(st.integers(1, 5), "layers")
    layer_bytes = data.draw(st.sampled_from([1, 7, 16, 100, 528]), "layer bytes")
    to_host = data.draw(st.booleans(), "to host")
    device, host = (pool(num_slots, num_layers, layer_bytes, layer_first=first) for first in (True, False))
    source, target = (device, host) if to_host else (host, device)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000), "seed"))
    source.copy_(torch.randint(0, 256, source.shape, generator=generator, dtype=torch.uint8))
    target.fill_(0xEE)
    count = data.draw(st.integers(1, num_slots), "count")
    tables = [
        np.array(data.draw(st.permutations(range(num_slots)), "table")[:count], dtype=np.int64)
        for _ in range(2)
    ]
    if data.draw(st.booleans(), "in order"):
        tables = [np.sort(table) for table in tables]
    layers = slice(None)
    if data.draw(st.booleans(), "one layer"):
        layer = data.draw(st.integers(0, num_layers - 1), "layer")
        layers = slice(layer, layer + 1)
    expected = target.clone()
    expected[torch.from_numpy(tables[1]), layers] = source[torch.from_numpy(tables[0]), layers]
    staging = data.draw(st.sampled_from([1, layer_bytes * num_layers * 2, 1 << 20]), "staging")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy_paths, "STAGING_BYTES", staging)
        PATHS[name]().copy(Batch(source[:, layers], tables[0], target[:, layers], tables[1], to_host))
    assert torch.equal(target, expected)


def test_a_run_of_whole_slots_is_one_area_and_a_layer_of_it_a_row_a_slot() -> None:
    host, slots = pool(8, 4, 16, layer_first=False), np.array([2, 3, 4, 7])
    staging = torch.empty((4, 4, 16), dtype=torch.uint8)
    whole = areas_of(host, slots, staging, to_host=True)
    assert [(area.width, area.height) for area in whole] == [(3 * 64, 1), (64, 1)]
    layer = areas_of(host[:, 1:2], slots, staging[:, :1].contiguous(), to_host=False)
    assert [(area.width, area.height, area.source_pitch, area.target_pitch) for area in layer] == [
        (16, 3, 64, 16),
        (16, 1, 64, 16),
    ]


@pytest.mark.parametrize(("release", "num_calls"), [((12, 4), 3), ((12, 8), 1), ((13, 0), 1)])
def test_a_batch_is_one_call_where_the_runtime_can(release: tuple[int, int], num_calls: int) -> None:
    runtime = FakeRuntime(release)
    path = StagedPath("", RuntimeMove(runtime, release, lambda: STREAM), needs_pinned=False)
    device, host = (pool(9, 2, 16, layer_first=first) for first in (True, False))
    slots = np.array([0, 1, 4, 7, 8])
    path.copy(Batch(device, np.arange(5), host, slots, to_host=True))
    path.copy(Batch(host, slots, device, np.arange(5), to_host=False))
    assert runtime.num_calls == 2 * num_calls
    assert runtime.kinds == ({1, 2} if num_calls > 1 else set())


@pytest.mark.parametrize("release", [(12, 4), (13, 0)])
def test_an_error_of_the_runtime_is_raised_with_its_number(release: tuple[int, int]) -> None:
    runtime = FakeRuntime(release, answer=700)
    move = RuntimeMove(runtime, release, lambda: STREAM)
    host = pool(4, 2, 16, layer_first=False)
    with pytest.raises(TierUnavailableError, match="error 700"):
        move(host, np.arange(2), torch.empty((2, 2, 16), dtype=torch.uint8), to_host=True)
    assert runtime.num_errors_read == 1, "else torch's next launch in this thread finds it"


@pytest.mark.parametrize("stream", [0, 1])
def test_the_default_stream_takes_no_batch(monkeypatch: pytest.MonkeyPatch, stream: int) -> None:
    """The runtime refuses one there."""
    monkeypatch.setitem(globals(), "STREAM", stream)
    runtime = FakeRuntime((13, 0))
    host, staging = pool(4, 2, 16, layer_first=False), torch.ones((2, 2, 16), dtype=torch.uint8)
    RuntimeMove(runtime, (13, 0), lambda: stream)(host, np.array([0, 3]), staging, to_host=True)
    assert runtime.kinds == {2}
    assert torch.equal(host[[0, 3]], staging)


def test_the_kernel_gets_both_tables() -> None:
    class Kernel:
        def can_copy(self, source: torch.Tensor, target: torch.Tensor) -> bool:
            return True

        def copy(
            self, source: Any, source_slots: torch.Tensor, target: Any, target_slots: torch.Tensor
        ) -> None:
            target[target_slots] = source[source_slots]

    device, host = (pool(6, 2, 16, layer_first=first) for first in (True, False))
    device.copy_(torch.randint(0, 256, device.shape, dtype=torch.uint8))
    KernelPath(Kernel()).copy(Batch(device, np.array([5, 1]), host, np.array([0, 3]), to_host=True))  # type: ignore[arg-type]  # a stand-in
    assert torch.equal(host[[0, 3]], device[[5, 1]])


# ---- the choice ------------------------------------------------------------------------------------------------------
class Scripted:
    """A way that takes as long as it is told, by size."""

    def __init__(
        self, name: str, timer: FakeTimer, seconds: Callable[[int], float], *, able: bool = True
    ) -> None:
        self.name = name
        self.taken: list[int] = []
        self._timer, self._seconds, self._able = timer, seconds, able

    def can_copy(self, batch: Batch) -> bool:
        return self._able

    def copy(self, batch: Batch) -> None:
        self.taken.append(batch.num_bytes)
        self._timer.now += self._seconds(batch.num_bytes)


class FakeTimer:
    """A clock that ways move; times are known once ``is_known``."""

    def __init__(self) -> None:
        self.now = 0.0
        self.is_known = True
        self.num_timed = 0

    def start(self) -> list[float]:
        self.num_timed += 1
        return [self.now]

    def stop(self, token: list[float]) -> None:
        token.append(self.now)

    def seconds(self, token: list[float]) -> float | None:
        return token[1] - token[0] if self.is_known else None


def batch(num_slots: int, *, to_host: bool = True, layers: int = 2) -> Batch:
    """Of 32 bytes a slot, or 16 where one layer alone is copied."""
    device, host = (pool(64, 2, 16, layer_first=first) for first in (True, False))
    ends = (device, host) if to_host else (host, device)
    source, target = (end[:, :layers] for end in ends)
    return Batch(source, np.arange(num_slots), target, np.arange(num_slots), to_host)


def test_each_way_is_tried_and_then_the_fastest_is_taken_for_that_size() -> None:
    """One has a high start and much speed, the other the reverse: small copies go by one, large ones by the other."""
    timer = FakeTimer()
    steep = Scripted("steep", timer, lambda size: size / 10)
    flat = Scripted("flat", timer, lambda size: 50 + size / 100)
    choice = PathChoice([steep, flat], timer)
    for _ in range(2 * TRIALS + 10):
        choice.copy(batch(2))
        choice.copy(batch(60))
    assert steep.taken.count(64) == TRIALS + 10
    assert flat.taken.count(64) == TRIALS
    assert flat.taken.count(60 * 32) == TRIALS + 10
    assert steep.taken.count(60 * 32) == TRIALS
    assert timer.num_timed == 4 * TRIALS, "once it is known, nothing is timed"


@pytest.mark.parametrize("other", [{"to_host": False}, {"layers": 1}], ids=["direction", "one layer"])
def test_directions_and_layers_are_judged_apart(other: dict[str, Any]) -> None:
    timer = FakeTimer()
    ways = [Scripted("a", timer, lambda _: 1.0), Scripted("b", timer, lambda _: 2.0)]
    choice = PathChoice(ways, timer)
    for _ in range(2 * TRIALS):
        choice.copy(batch(8))
    count = len(ways[1].taken)
    for _ in range(2 * TRIALS):
        choice.copy(batch(8, **other))
    assert len(ways[1].taken) == count + TRIALS, "the slower one was tried there as well"
    assert len(choice.table()) == 2


def test_one_slow_copy_does_not_decide() -> None:
    """The best of a few counts: the first launch of a kernel loads it."""
    timer = FakeTimer()
    first = itertools.chain([100.0], itertools.repeat(1.0))
    kernel = Scripted("kernel", timer, lambda _: next(first))
    other = Scripted("torch", timer, lambda _: 2.0)
    choice = PathChoice([kernel, other], timer)
    for _ in range(2 * TRIALS + 5):
        choice.copy(batch(8))
    assert len(kernel.taken) == TRIALS + 5


def test_a_way_that_cannot_is_never_taken_and_a_single_one_never_timed() -> None:
    timer = FakeTimer()
    fast = Scripted("fast", timer, lambda _: 0.1, able=False)
    slow = Scripted("slow", timer, lambda _: 9.0)
    choice = PathChoice([fast, slow], timer)
    for _ in range(10):
        choice.copy(batch(8))
    assert (fast.taken, len(slow.taken), timer.num_timed) == ([], 10, 0)


def test_copies_go_on_while_times_are_not_known_yet() -> None:
    timer = FakeTimer()
    ways = [Scripted("a", timer, lambda _: 2.0), Scripted("b", timer, lambda _: 1.0)]
    choice = PathChoice(ways, timer)
    timer.is_known = False
    for _ in range(2 * TRIALS + 1):
        choice.copy(batch(8))
    assert len(ways[0].taken) == TRIALS + 1, "the first of the list where nothing is known"
    timer.is_known = True
    choice.copy(batch(8))
    assert len(ways[1].taken) == TRIALS + 1
    (row,) = choice.table()
    assert row == {
        "direction": "to_host",
        "whole_slots": True,
        "bytes": 256,
        "bytes_per_s": {"a": 128.0, "b": 256.0},
    }


class Failing(Scripted):
    """A way that a driver refuses."""

    def copy(self, batch: Batch) -> None:
        super().copy(batch)
        raise TierUnavailableError("cudaMemcpyBatchAsync answers with error 801")


def test_a_way_that_fails_costs_no_copy_and_is_not_taken_again_for_that_size(
    caplog: pytest.LogCaptureFixture,
) -> None:
    timer = FakeTimer()
    broken, sound = Failing("batch", timer, lambda _: 0.1), Scripted("torch", timer, lambda _: 9.0)
    choice = PathChoice([broken, sound], timer)
    for _ in range(3 * TRIALS):
        choice.copy(batch(8))
    assert (len(broken.taken), len(sound.taken)) == (1, 3 * TRIALS)
    choice.copy(batch(60))
    assert (len(broken.taken), len(sound.taken)) == (2, 3 * TRIALS + 1), "of another size it is tried"
    assert caplog.text.count("error 801") == 1, "said once"
    assert "torch" in choice.table()[0]["bytes_per_s"]  # type: ignore[operator]  # a dict


def test_a_way_that_fails_once_it_was_the_best_hands_the_copy_on() -> None:
    timer = FakeTimer()
    fast, slow = Scripted("kernel", timer, lambda _: 0.1), Scripted("torch", timer, lambda _: 9.0)
    choice = PathChoice([fast, slow], timer)
    for _ in range(2 * TRIALS):
        choice.copy(batch(8))

    def out_of_memory(of: Batch) -> None:
        raise RuntimeError("out of memory")

    fast.copy = out_of_memory  # type: ignore[method-assign, assignment]
    choice.copy(batch(8))
    assert len(slow.taken) == TRIALS + 1


def test_if_every_way_fails_the_last_one_s_error_is_raised() -> None:
    timer = FakeTimer()
    ways = [Failing("batch", timer, lambda _: 1.0), Failing("torch", timer, lambda _: 1.0)]
    with pytest.raises(TierUnavailableError, match="801"):
        PathChoice(ways, timer).copy(batch(2))
    assert [len(way.taken) for way in ways] == [1, 1]


def test_no_way_at_all_is_an_error() -> None:
    timer = FakeTimer()
    with pytest.raises(TierUnavailableError, match="no way to copy"):
        PathChoice([Scripted("a", timer, lambda _: 1.0, able=False)], timer).copy(batch(2))


def test_a_pair_of_events_tells_seconds_once_the_second_has_passed() -> None:
    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            self.has_passed = False

        def record(self) -> None:
            made.append(self)

        def query(self) -> bool:
            return self.has_passed

        def elapsed_time(self, other: Event) -> float:
            return 1500.0

    made: list[Event] = []
    timer = EventTimer(type("cuda", (), {"Event": Event}))
    token = timer.start()
    timer.stop(token)
    assert timer.seconds(token) is None
    made[1].has_passed = True
    assert timer.seconds(token) == 1.5
