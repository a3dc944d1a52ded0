"""Reads residency events and asks again for what it missed."""

from __future__ import annotations

from collections.abc import Iterator

import zmq

from hicache.closing import Closing
from hicache.kvevents.wire import END_OF_REPLAY, SEQUENCE_BYTES, Batch, decode

_MS = 1000


class GapError(Exception):
    """Batches are gone for good. Whoever reads on has to forget what it knew.

    ``first`` and ``last`` are the numbers that are missing.
    """

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        super().__init__(f"batches {first} to {last} cannot be had any more; start again from nothing known")


class EventSubscriber(Closing):
    """Batches of one publisher in order, without a gap.

    Args:
        endpoint, replay_endpoint: the publisher's.
        topic: only messages whose first frame begins so.
        timeout_s: how long to wait for each message of a replay.

    *Thread*: one.
    """

    def __init__(
        self, endpoint: str, replay_endpoint: str, *, topic: str = "", timeout_s: float = 5.0
    ) -> None:
        self._timeout_ms = int(timeout_s * _MS)
        self._zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sub = self._zmq.socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._sub.connect(endpoint)
        self._replay_endpoint = replay_endpoint
        self._dealer = self._connected()
        self.next_sequence = 0

    def _connected(self) -> zmq.Socket[bytes]:
        dealer: zmq.Socket[bytes] = self._zmq.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RCVHWM, 0)
        dealer.connect(self._replay_endpoint)
        return dealer

    def read(self, timeout_s: float = 0.0) -> Iterator[Batch]:
        """The batches that have come, and those before them that had not.

        Args:
            timeout_s: how long to wait for the first.

        Raises:
            GapError: some are gone for good; the next call goes on behind them. Or nobody answers in time;
                then the next call asks again.
            ValueError: a message is none of KV events.
        """
        wait_ms = int(timeout_s * _MS)
        while self._sub.poll(wait_ms):
            wait_ms = 0
            _, number, payload = self._sub.recv_multipart()
            sequence = int.from_bytes(number, "big")
            if sequence > self.next_sequence:
                yield from self.catch_up(sequence)
            if sequence == self.next_sequence:
                self.next_sequence += 1
                yield decode(sequence, payload)

    def catch_up(self, before: int | None = None) -> Iterator[Batch]:
        """Ask for what was sent since the last batch read, up to ``before``; all there is by default."""
        self._dealer.send_multipart((b"", self.next_sequence.to_bytes(SEQUENCE_BYTES, "big")))
        kept: list[Batch] = []
        while True:
            if not self._dealer.poll(self._timeout_ms):
                # What is still answered does not say to which question, so it goes to a socket that is gone.
                self._dealer.close(linger=0)
                self._dealer = self._connected()
                raise GapError(self.next_sequence, (before or self.next_sequence + 1) - 1)
            _, _, number, payload = self._dealer.recv_multipart()
            if number == END_OF_REPLAY:
                break
            kept.append(decode(int.from_bytes(number, "big"), payload))
        for batch in kept:
            if before is not None and batch.sequence >= before:
                break
            self._check_follows(batch.sequence)
            self.next_sequence += 1
            yield batch
        if before is not None:
            self._check_follows(before)

    def _check_follows(self, sequence: int) -> None:
        """Raise for what is missing before ``sequence``, and go on from there next time."""
        if sequence > self.next_sequence:
            first, self.next_sequence = self.next_sequence, sequence
            raise GapError(first, sequence - 1)

    def close(self) -> None:
        """Let go of the sockets. Idempotent."""
        self._zmq.destroy(linger=0)
