"""Sends residency events; never holds up the cache.

::

    cache (lock held)              the publisher's thread
    publish(events) -> queue  -->  encode -> PUB, and into the buffer
                                   ROUTER <- "from sequence n": the buffer from n on, then the end mark

Every batch has a number, also one that the full queue turned away. So a reader sees each loss as a gap in the numbers, and asks for it;
what is not in the buffer any more it cannot have, and it starts again from nothing known.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from hicache.closing import Closing
from hicache.errors import ConfigError
from hicache.events import ResidencyEvent
from hicache.kvevents.wire import END_OF_REPLAY, SEQUENCE_BYTES, BatchEncoder

logger = logging.getLogger(__name__)

JOIN_S = 5.0
LINGER_MS = 1000
"""How long ``close`` lets ZeroMQ send what subscribers have not yet taken."""
REPLAY_FRAMES = 3


@dataclass(frozen=True, slots=True)
class EventStats:
    """Monotonic, but for ``queued``. Batches: published, turned away by the full queue, waiting, replayed."""

    published: int
    dropped: int
    queued: int
    replayed: int


class EventPublisher(Closing):
    """Publishes batches of events on one socket and replays them on another.

    Args:
        encoder: writes batches; used by the publisher's thread only.
        endpoint: where to bind, like ``tcp://127.0.0.1:5557``; port ``*`` takes a free one.
        replay_endpoint: where to answer those who missed something; None: nowhere.
        topic: first frame of every message.
        buffer_batches: how many to keep for replay.
        queue_batches: how many may wait to be sent.
        now_s: seconds since 1970, for the batches.

    The first batch, number 0, says that nothing is anywhere: a cache that starts again has forgotten.

    Raises:
        ConfigError: an endpoint cannot be bound.
    """

    def __init__(
        self,
        encoder: BatchEncoder,
        *,
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        buffer_batches: int = 10_000,
        queue_batches: int = 10_000,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._encoder = encoder
        self._topic = topic.encode()
        self._queue_batches = queue_batches
        self._now_s = now_s
        self._lock = threading.Lock()
        self._queue: deque[tuple[int, Sequence[ResidencyEvent] | None]] = deque([(0, None)])
        self._next_sequence = 1
        self._num_published = self._num_dropped = self._num_replayed = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_batches)
        self._is_closed = False
        self._zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub = self._zmq.socket(zmq.PUB)
        self._router = self._zmq.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.SNDHWM, 0)  # a replay is as long as the buffer, and all of it counts
        try:
            self.endpoint = _bind(self._pub, endpoint, "events.endpoint")
            self.replay_endpoint = (
                None
                if replay_endpoint is None
                else _bind(self._router, replay_endpoint, "events.replay_endpoint")
            )
        except ConfigError:
            self._zmq.destroy(linger=0)
            raise
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="hicache-events", daemon=True)
        self._thread.start()
        self._nudge()

    def publish(self, events: Sequence[ResidencyEvent]) -> None:
        """Queue a batch. *Thread*: any; never blocks, never raises. After ``close`` it is turned away."""
        with self._lock:
            sequence = self._next_sequence
            self._next_sequence += 1
            if self._is_closed or len(self._queue) >= self._queue_batches:
                self._num_dropped += 1
                return
            self._queue.append((sequence, events))
        self._nudge()

    def stats(self) -> EventStats:
        with self._lock:
            return EventStats(self._num_published, self._num_dropped, len(self._queue), self._num_replayed)

    def close(self) -> None:
        """Send what is queued, then let go of sockets and thread. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._nudge()
        self._thread.join(JOIN_S)
        self._wake.close()
        self._woken.close()

    def _nudge(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake already; closed: nobody is to wake
            self._wake.send(b"!")

    # ---- the publisher's thread ----------------------------------------------------------------
    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        try:
            while True:
                with self._lock:
                    closing = self._is_closed
                try:
                    self._send_queued()
                    self._answer_replays()
                except Exception:
                    logger.exception("events could not be sent; the publisher goes on")
                if closing:
                    return
                poller.poll()
                with contextlib.suppress(BlockingIOError):
                    while self._woken.recv(4096):
                        pass
        finally:
            self._zmq.destroy(linger=LINGER_MS)

    def _send_queued(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    return
                sequence, events = self._queue.popleft()
            now_s = self._now_s()
            payload = self._encoder.cleared(now_s) if events is None else self._encoder.encode(events, now_s)
            self._buffer.append((sequence, payload))
            self._pub.send_multipart((self._topic, sequence.to_bytes(SEQUENCE_BYTES, "big"), payload))
            with self._lock:
                self._num_published += 1

    def _answer_replays(self) -> None:
        while self._router.poll(0):
            frames = self._router.recv_multipart()
            if len(frames) != REPLAY_FRAMES or len(frames[2]) != SEQUENCE_BYTES:
                logger.warning(
                    "a replay was asked for in %d frames; expected an empty one and 8 bytes", len(frames)
                )
                continue
            reader, _, wanted = frames
            first = int.from_bytes(wanted, "big")
            for sequence, payload in self._buffer:
                if sequence >= first:
                    number = sequence.to_bytes(SEQUENCE_BYTES, "big")
                    self._router.send_multipart((reader, b"", self._topic, number, payload))
                    with self._lock:
                        self._num_replayed += 1
            self._router.send_multipart((reader, b"", b"", END_OF_REPLAY, b""))


def _bind(made: zmq.Socket[bytes], endpoint: str, setting: str) -> str:
    """Bind and tell the address that was taken."""
    try:
        made.bind(endpoint)
    except zmq.ZMQError as error:
        remedy = "take another port, * for a free one, or another address"
        raise ConfigError([f"{setting}: {endpoint} cannot be bound: {error.strerror}; {remedy}"]) from None
    return made.getsockopt_string(zmq.LAST_ENDPOINT)
