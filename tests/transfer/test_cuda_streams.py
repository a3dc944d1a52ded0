"""What waits for what on a CUDA device, by the calls that are made; no device is needed."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import hicache.transfer
from hicache.cache import HiCache
from hicache.clock import ManualClock
from hicache.config import load_config
from hicache.radix.actions import Copy
from hicache.testing.fake_cuda import FakeCuda, FakeEvent, FakeStream
from hicache.testing.transfer_rig import PATIENCE_S, TransferRig, engine_threads
from hicache.transfer.cuda_streams import CudaStream, cuda_streams
from hicache.transfer.streams import Stream, StreamClosedError, Streams
from hicache.types import TicketId, Tier

DEVICE = torch.device("cuda", 0)


class Ends:
    """What was reported, and a wait for it."""

    def __init__(self) -> None:
        self.all: list[tuple[int, BaseException | None]] = []
        self._changed = threading.Condition()

    def on_done(self, done_slots: int, error: BaseException | None) -> None:
        with self._changed:
            self.all.append((done_slots, error))
            self._changed.notify_all()

    def wait_for(self, count: int) -> list[tuple[int, BaseException | None]]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.all) >= count, PATIENCE_S)
            return list(self.all)


class Work:
    """Puts its name into the stream that is current when it runs."""

    def __init__(self, cuda: FakeCuda, name: str = "copy", error: Exception | None = None) -> None:
        self.num_slots = 3
        self._cuda, self._name, self._error = cuda, name, error

    def run(self, first: int, last: int) -> None:
        self._cuda.current_stream(DEVICE).given.append((self._name, (first, last)))
        if self._error is not None:
            raise self._error


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def streams(cuda: FakeCuda) -> Iterator[Streams]:
    made = cuda_streams(DEVICE, cuda)
    yield made
    made.close()


@pytest.fixture
def ends() -> Ends:
    return Ends()


def names(stream: FakeStream) -> list[str]:
    return [name for name, _ in stream.given]


def of(cuda: FakeCuda, which: str) -> FakeStream:
    return cuda.streams[{"compute": 0, "to_host": 1, "to_device": 2, "local": 3}[which]]


# ---- one stream ------------------------------------------------------------------------------------------------------
def test_a_copy_runs_on_its_own_stream_with_an_event_behind_it(
    cuda: FakeCuda, streams: Streams, ends: Ends
) -> None:
    streams.to_device.submit(Work(cuda), ends.on_done)
    assert ends.wait_for(1) == [(3, None)]
    assert of(cuda, "to_device").given[0] == ("copy", (0, 3))
    assert names(of(cuda, "to_device")) == ["copy", "record"]
    assert names(of(cuda, "compute")) == []
    assert streams.num_pending == 0


def test_what_requests_wait_for_goes_first(cuda: FakeCuda, streams: Streams) -> None:
    priority = {which: of(cuda, which).priority for which in ("to_host", "to_device", "local")}
    assert priority["to_device"] == priority["local"] < priority["to_host"]


def test_a_copy_is_reported_when_its_event_has_passed_and_not_before(ends: Ends) -> None:
    cuda = FakeCuda(holds_events=True)
    stream = CudaStream("test", DEVICE, after=tuple, cuda=cuda)
    fence = stream.submit(Work(cuda), ends.on_done)
    assert fence is not None
    assert fence.pass_on(PATIENCE_S), "it is in the stream"
    assert (ends.all, stream.num_pending) == ([], 1)
    (_, event) = cuda.streams[1].given[-1]
    assert isinstance(event, FakeEvent)
    event.let_go()
    assert ends.wait_for(1) == [(3, None)]
    stream.close()


def test_the_next_copy_is_given_to_the_device_while_the_one_before_runs(ends: Ends) -> None:
    cuda = FakeCuda(holds_events=True)
    stream = CudaStream("test", DEVICE, after=tuple, cuda=cuda)
    fences = [stream.submit(Work(cuda, name), ends.on_done) for name in ("first", "second")]
    assert all(fence is not None and fence.pass_on(PATIENCE_S) for fence in fences)
    assert names(cuda.streams[1]) == ["first", "record", "second", "record"]
    assert ends.all == []
    for _, event in cuda.streams[1].given[1::2]:
        assert isinstance(event, FakeEvent)
        event.let_go()
    assert len(ends.wait_for(2)) == 2
    stream.close()


def test_a_copy_that_raises_is_reported_once_what_it_had_begun_has_passed(ends: Ends) -> None:
    cuda = FakeCuda(holds_events=True)
    stream = CudaStream("test", DEVICE, after=tuple, cuda=cuda)
    error = RuntimeError("no kernel image")
    fence = stream.submit(Work(cuda, error=error), ends.on_done)
    assert fence is not None
    assert not fence.pass_on(PATIENCE_S), "compute may not rely on it"
    assert names(cuda.streams[1]) == ["copy", "record"]
    assert ends.all == []
    (_, event) = cuda.streams[1].given[-1]
    assert isinstance(event, FakeEvent)
    event.let_go()
    assert ends.wait_for(1) == [(0, error)]
    stream.close()


def test_a_lost_device_fails_the_copy_and_the_threads_live(
    cuda: FakeCuda, streams: Streams, ends: Ends
) -> None:
    cuda.error = RuntimeError("device lost")
    streams.to_device.submit(Work(cuda), ends.on_done)
    ((done_slots, error),) = ends.wait_for(1)
    assert (done_slots, str(error)) == (0, "device lost")
    cuda.error = None
    streams.to_device.submit(Work(cuda), ends.on_done)
    assert ends.wait_for(2)[1] == (3, None)


def test_a_closed_stream_ends_copies_as_closed_and_leaves_no_thread(cuda: FakeCuda, ends: Ends) -> None:
    before = engine_threads()
    streams = cuda_streams(DEVICE, cuda)
    assert len(engine_threads() - before) == 6
    streams.close()
    streams.close()
    assert engine_threads() == before
    assert streams.to_host.submit(Work(cuda), ends.on_done) is None
    assert isinstance(ends.all[0][1], StreamClosedError)


def test_a_cuda_stream_is_a_stream(streams: Streams) -> None:
    stream: Stream = streams.to_host
    assert stream.num_pending == 0


def test_a_copy_is_told_how_long_the_device_took_and_not_how_long_it_took_to_begin_it(ends: Ends) -> None:
    """From the end of the one before it, where the device was busy with that."""

    class Timed(Work):
        def took(self, seconds: float) -> None:
            took.append(seconds)

    took: list[float] = []
    cuda = FakeCuda(holds_events=True)
    stream = CudaStream("test", DEVICE, after=tuple, cuda=cuda)
    fences = [stream.submit(Timed(cuda), ends.on_done) for _ in range(2)]
    assert all(fence is not None and fence.pass_on(PATIENCE_S) for fence in fences)
    assert took == []
    began = time.perf_counter()
    for _, event in cuda.streams[1].given[1::2]:
        assert isinstance(event, FakeEvent)
        event.let_go()
    ends.wait_for(2)
    assert took[0] > 0
    assert 0 <= took[1] <= time.perf_counter() - began, "the first one's time is not counted twice"
    stream.close()


# ---- between streams -------------------------------------------------------------------------------------------------
def test_a_copy_down_comes_after_the_compute_that_wrote_its_source(
    cuda: FakeCuda, streams: Streams, ends: Ends
) -> None:
    streams.compute.wrote()
    written = of(cuda, "compute").given[-1][1]
    streams.to_host.submit(Work(cuda), ends.on_done)
    ends.wait_for(1)
    assert of(cuda, "to_host").given[:2] == [("wait", written), ("copy", (0, 3))]


def test_a_copy_waits_for_what_was_published_when_it_was_submitted_and_no_longer(
    cuda: FakeCuda, streams: Streams, ends: Ends
) -> None:
    """The latest event of a stream stands for all before; what comes later is not waited for."""
    streams.compute.wrote()
    streams.compute.wrote()
    latest = of(cuda, "compute").given[-1][1]
    streams.to_host.submit(Work(cuda), ends.on_done)
    streams.compute.wrote()
    ends.wait_for(1)
    assert [event for name, event in of(cuda, "to_host").given if name == "wait"] == [latest]


def test_a_load_comes_after_the_compute_that_still_reads_its_target(
    cuda: FakeCuda, streams: Streams, ends: Ends
) -> None:
    streams.compute.ended()
    ended = of(cuda, "compute").given[-1][1]
    streams.to_device.submit(Work(cuda), ends.on_done)
    ends.wait_for(1)
    assert of(cuda, "to_device").given[:2] == [("wait", ended), ("copy", (0, 3))]


def test_a_load_does_not_wait_for_compute_that_only_published(
    cuda: FakeCuda, streams: Streams, ends: Ends
) -> None:
    """Its targets are free slots; else it would never run beside a prefill."""
    streams.compute.wrote()
    streams.to_device.submit(Work(cuda), ends.on_done)
    ends.wait_for(1)
    assert names(of(cuda, "to_device")) == ["copy", "record"]


def test_every_compute_stream_is_waited_for(cuda: FakeCuda, streams: Streams, ends: Ends) -> None:
    streams.compute.ended()
    other = cuda.Stream(DEVICE)
    with cuda.stream(other):
        streams.compute.ended()
    streams.to_device.submit(Work(cuda), ends.on_done)
    ends.wait_for(1)
    waited = [event for name, event in of(cuda, "to_device").given if name == "wait"]
    assert waited == [of(cuda, "compute").given[-1][1], other.given[-1][1]]


def test_who_gets_slots_waits_for_other_streams_that_read_them(cuda: FakeCuda, streams: Streams) -> None:
    streams.compute.ended()
    streams.compute.begin()
    assert names(of(cuda, "compute")) == ["record"], "a stream needs no wait for itself"
    other = cuda.Stream(DEVICE)
    with cuda.stream(other):
        streams.compute.begin()
    assert other.given == [("wait", of(cuda, "compute").given[0][1])]


def test_compute_goes_on_behind_the_layer_it_reads(cuda: FakeCuda, streams: Streams, ends: Ends) -> None:
    fences = [streams.to_device.submit(Work(cuda, name), ends.on_done) for name in ("layer 0", "layer 1")]
    for fence in fences:
        assert fence is not None
        assert fence.pass_on(PATIENCE_S)
    records = [event for name, event in of(cuda, "to_device").given if name == "record"]
    assert of(cuda, "compute").given == [("wait", event) for event in records]


def test_an_event_that_cannot_be_recorded_does_not_stop_a_request_from_ending(
    cuda: FakeCuda, streams: Streams, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.error = RuntimeError("device lost")
    streams.compute.ended()
    assert "no event can be recorded" in caplog.text


# ---- under an engine and a cache -------------------------------------------------------------------------------------
def test_a_wait_for_a_layer_waits_on_the_device_and_not_for_the_bytes() -> None:
    cuda = FakeCuda(holds_events=True)
    with TransferRig(streams=cuda_streams(DEVICE, cuda)) as rig:
        slots = np.arange(4)
        rig.engine.submit_by_layer([Copy(TicketId(1), "full", Tier.HOST, slots, Tier.DEVICE, slots)])
        assert rig.engine.wait_layer([TicketId(1)], 0, PATIENCE_S)
        records = [event for name, event in of(cuda, "to_device").given if name == "record"]
        assert of(cuda, "compute").given == [("wait", records[0])]
        assert rig.engine.completions() == []
        assert rig.engine.wait_layer([TicketId(1)], 1, PATIENCE_S)
        records = [event for name, event in of(cuda, "to_device").given if name == "record"]
        for event in records:
            assert isinstance(event, FakeEvent)
            event.let_go()
        assert rig.ended(1)[1].is_complete


def test_requests_tell_the_streams_when_they_publish_and_when_they_end() -> None:
    cuda = FakeCuda()
    component = {"rule": "path", "layers": 2, "bytes_per_token": 8}
    tree = {
        "model": {"name": "tiny", "page_size": 4, "components": {"full": component}},
        "tiers": {"device": {"kind": "cpu", "capacity": 1024}, "host": {"pinned": False, "capacity": 1024}},
        "policy": {"write": "write_through"},
    }
    config = load_config(tree, environ={})
    with HiCache(config, streams=cuda_streams(DEVICE, cuda), clock=ManualClock(), background=False) as cache:
        with cache.match(range(8)) as lease:
            lease.reserve(8)
            assert names(of(cuda, "compute")) == []
            lease.checkpoint(8)
            assert names(of(cuda, "compute")) == ["record"]
            assert cache.drain()
            assert names(of(cuda, "to_host")) == ["wait", "record"], "the copy down waits for the prefill"
            lease.release()
        assert names(of(cuda, "compute")) == ["record", "record"]
        cache.match(range(9)).abandon()
        assert names(of(cuda, "compute")) == ["record"] * 3


FOLDERS = [Path(hicache.transfer.__file__).resolve().parent, Path(hicache.__file__).resolve().parent]
DEVICE_WIDE = re.compile(
    r"cuda\.synchronize\(|[dD]eviceSynchronize|Device\([^)]*\)\.synchronize|CtxSynchronize"
)


def test_nothing_waits_for_the_whole_device() -> None:
    sources: list[Path] = []
    for folder in [*FOLDERS, FOLDERS[0].parent / "tiers"]:
        sources += [path for kind in ("*.py", "*.cu") for path in folder.rglob(kind)]
    assert len(sources) > 80
    found = [path.name for path in sources if DEVICE_WIDE.search(path.read_text(encoding="utf-8"))]
    assert found == []


@pytest.mark.parametrize(
    "call",
    ["torch.cuda.synchronize()", "cudart.cudaDeviceSynchronize()", "cupy.cuda.Device(0).synchronize()"],
)
def test_such_a_call_would_be_found(call: str) -> None:
    assert DEVICE_WIDE.search(call)
