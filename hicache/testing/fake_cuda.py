"""A stand-in for the few calls of ``torch.cuda`` that copies use: it records their order and runs nothing.

Each stream is a list of what it was given: a copy (noted by the test's work), ``("record", event)`` or
``("wait", event)``. An event passes when the test says so, or at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class FakeEvent:
    """An event that passes once it was recorded and is let go.

    Args:
        cuda: whose event.
    """

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._passed = threading.Event()
        self.stream: FakeStream | None = None

    def record(self, stream: FakeStream) -> None:
        if self._cuda.error is not None:
            raise self._cuda.error
        self.stream = stream
        stream.given.append(("record", self))
        if not self._cuda.holds_events:
            self._passed.set()

    def synchronize(self) -> None:
        assert self.stream is not None, "waiting for an event that was not recorded is no wait at all"
        assert self._passed.wait(20)

    def let_go(self) -> None:
        self._passed.set()


class FakeStream:
    """What a stream was given, in order."""

    def __init__(self, cuda: FakeCuda, number: int, priority: int = 0) -> None:
        self._cuda = cuda
        self.cuda_stream = number
        self.priority = priority
        self.given: list[tuple[str, object]] = []

    def wait_event(self, event: FakeEvent) -> None:
        assert event.stream is not None, "waiting for an event that was not recorded is no wait at all"
        self.given.append(("wait", event))


class FakeCuda:
    """``torch.cuda`` as copies see it.

    Args:
        holds_events: events pass only when they are let go.
    """

    def __init__(self, *, holds_events: bool = False) -> None:
        self.holds_events = holds_events
        self.error: Exception | None = None
        self.streams: list[FakeStream] = [FakeStream(self, 0)]
        self._current = threading.local()

    def Stream(self, device: torch.device, priority: int = 0) -> FakeStream:  # noqa: N802  as torch has it
        made = FakeStream(self, len(self.streams), priority)
        self.streams.append(made)
        return made

    def Event(self) -> FakeEvent:  # noqa: N802  as torch has it
        return FakeEvent(self)

    def current_stream(self, device: torch.device) -> FakeStream:
        stream: FakeStream = getattr(self._current, "stream", self.streams[0])
        return stream

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = self.current_stream(torch.device("cpu"))
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before
