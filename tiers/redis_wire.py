r"""The bytes between us and one Redis server: pipelines out, replies in, values straight into their buffers.

redis-py makes the connection and logs in; then this protocol takes its transport over. What redis-py does
with a value (socket, stream, parser, ``bytes``) is four copies of it; here it is received where it is to
lie, apart from what came along with the line before it::

    $65696\r\n  header 160 bytes  payload 65536 bytes         \r\n$65696\r\n ...
    scratch     Landing.head      Landing.body, from the socket scratch
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from redis.exceptions import InvalidResponse, RedisError

from hicache.errors import TierError

SCRATCH_BYTES = 128 << 10
"""What one read takes that goes to no landing. More: fewer reads; less: fewer bytes are copied."""
MAX_SCRATCH_BYTES = 64 << 20
"""A reply that goes to no landing has to fit: it is understood once all of it is there."""
DIRECT_BYTES = 4096
"""A longer value gets memory of its own at once."""
SEND_BYTES = 256 << 10
"""Short pieces are joined up to about this size; longer ones are sent as they are."""


class Landing:
    """Where the value of one reply goes, if it has exactly the length of ``head`` and ``body`` together.

    Args:
        head: memory for its first bytes.
        body: for the rest; nothing writes to it once the pipeline has ended, however it ended.
    """

    def __init__(self, head: bytearray, body: memoryview) -> None:
        self.head = head
        self.body = body

    def landed(self) -> None:
        """All bytes are there. Runs while more are on their way, so that checking them costs no time."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command as it goes over the wire, in pieces, and where its reply goes."""

    pieces: tuple[bytes | memoryview, ...]
    landing: Landing | None = None


Reply: TypeAlias = bytes | bytearray | Landing | int | list[Any] | RedisError | TierError | None
"""A value; its landing, if it went there; an answer that is an error; a ``TierError`` if there is no answer.

``Any``: replies may be nested.
"""


class RedisWire(asyncio.BufferedProtocol):
    """One connection's protocol.

    Args:
        parse_error: turns the text of an error reply into an exception.

    *Thread*: one event loop.
    """

    def __init__(self, parse_error: Callable[[str], RedisError]) -> None:
        self._parse_error = parse_error
        self._transport: asyncio.WriteTransport | None = None
        self._lost: BaseException | None = None
        self._can_write: asyncio.Future[None] | None = None
        self._scratch = bytearray(SCRATCH_BYTES)  # never resized: views of it are out
        self._begin = self._end = 0  # of what is in scratch and not understood yet
        self._segments: deque[memoryview] = deque()  # memory that the value being received goes to
        self._value: bytearray | Landing | None = None
        self._expected: deque[Landing | None] = deque()
        self._replies: list[Reply] = []
        self._done: asyncio.Future[None] | None = None

    def take(self, transport: asyncio.WriteTransport) -> None:
        """Become the protocol of a connected transport."""
        self._transport = transport
        transport.set_protocol(self)

    @property
    def is_usable(self) -> bool:
        """Whether another pipeline may be sent: connected, and nothing is owed."""
        return self._transport is not None and not self._transport.is_closing() and self._lost is None

    async def run(self, commands: Sequence[Command], replies: list[Reply]) -> None:
        """Send commands and append their replies as they come.

        Raises:
            OSError: the connection broke.
            InvalidResponse: what came is no reply.

        *Caller guarantees*: after any exception the connection is aborted, and never used again.
        """
        if self._lost is not None:
            raise self._lost
        self._expected.extend(each.landing for each in commands)
        self._replies = replies
        self._done = asyncio.get_running_loop().create_future()
        try:
            await self._send(commands)
            await self._done
        finally:
            self._done = None
            self._expected.clear()
            self._segments.clear()  # no landing is written to from here on
            self._value = None

    # ---- out -------------------------------------------------------------------------------------------------

    async def _send(self, commands: Sequence[Command]) -> None:
        run: list[bytes | memoryview] = []
        num_bytes = 0
        for each in commands:
            for piece in each.pieces:
                run.append(piece)
                num_bytes += len(piece)
                if num_bytes >= SEND_BYTES:
                    await self._write(run)
                    run, num_bytes = [], 0
        if run:
            await self._write(run)

    async def _write(self, run: list[bytes | memoryview]) -> None:
        assert self._transport is not None
        if self._lost is not None:
            raise self._lost
        *short, last = run
        if len(last) >= SEND_BYTES // 2:  # not worth a copy
            if short:
                self._transport.write(b"".join(short))
            self._transport.write(last)
        else:
            self._transport.write(b"".join(run))
        if self._can_write is not None:
            await self._can_write

    def pause_writing(self) -> None:
        self._can_write = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        can_write, self._can_write = self._can_write, None
        if can_write is not None and not can_write.done():
            can_write.set_result(None)

    # ---- in --------------------------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._segments:
            return self._segments[0]
        if self._begin == self._end:
            self._begin = self._end = 0
            if len(self._scratch) > SCRATCH_BYTES:
                self._scratch = bytearray(SCRATCH_BYTES)
        elif self._end == len(self._scratch):
            rest = self._scratch[self._begin : self._end]
            if self._begin == 0:
                if len(rest) >= MAX_SCRATCH_BYTES:
                    raise InvalidResponse(f"{len(rest)} bytes came, and no reply is whole")
                self._scratch = bytearray(2 * len(rest))
            self._scratch[: len(rest)] = rest
            self._begin, self._end = 0, len(rest)
        return memoryview(self._scratch)[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if self._segments:
                self._fill(nbytes)
            else:
                self._end += nbytes
            while self._expected and self._take_reply():
                pass
        except (ValueError, IndexError) as error:
            self._break(InvalidResponse(f"no reply of a Redis server: {error}"))
            return
        if not self._expected:
            if self._begin != self._end:
                self._break(InvalidResponse("the server sent what nobody asked for"))
            elif self._done is not None and not self._done.done():
                self._done.set_result(None)

    def eof_received(self) -> bool:
        self._break(ConnectionResetError("the server closed the connection"))
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._break(exc or ConnectionResetError("the connection was closed"))

    def _break(self, error: BaseException) -> None:
        """The connection is of no use any more; tell whoever waits."""
        if self._lost is None:
            self._lost = error
        for waiter in (self._done, self._can_write):
            if waiter is not None and not waiter.done():
                waiter.set_exception(self._lost)
                waiter.exception()  # seen: the one who waited may be gone
        if self._transport is not None:
            self._transport.abort()

    # ---- replies ---------------------------------------------------------------------------------------------

    def _take_reply(self) -> bool:
        """Understand the next reply, or begin to receive its value; False: more bytes are needed."""
        if self._segments:
            return False
        if self._value is not None:
            return self._end_value()
        line = self._line(self._begin)
        if line is None:
            return False
        kind, text, after = line
        if kind == b"$" and (num_bytes := int(text)) > 0:
            landing = self._expected[0]
            fits = landing is not None and len(landing.head) + landing.body.nbytes == num_bytes
            if fits or num_bytes > DIRECT_BYTES:
                self._begin = after
                self._begin_value(landing if fits else None, num_bytes)
                return True
        parsed = self._parse_line(kind, text, after)
        if parsed is None:
            return False
        reply, self._begin = parsed
        self._complete(reply)
        return True

    def _begin_value(self, landing: Landing | None, num_bytes: int) -> None:
        if landing is None:
            value = bytearray(num_bytes)
            self._value = value
            parts = [memoryview(value)]
        else:
            self._value = landing
            parts = [memoryview(landing.head), landing.body]
        self._segments.extend(part for part in parts if part.nbytes)
        while self._segments and self._begin < self._end:
            count = min(len(self._segments[0]), self._end - self._begin)
            self._segments[0][:count] = memoryview(self._scratch)[self._begin : self._begin + count]
            self._begin += count
            self._fill(count)

    def _fill(self, num_bytes: int) -> None:
        """So many bytes of the first segment have arrived."""
        if num_bytes == len(self._segments[0]):
            self._segments.popleft()
        else:
            self._segments[0] = self._segments[0][num_bytes:]

    def _end_value(self) -> bool:
        if self._end - self._begin < 2:
            return False
        if self._scratch[self._begin : self._begin + 2] != b"\r\n":
            raise ValueError("a value is longer than it said")
        self._begin += 2
        value, self._value = self._value, None
        if isinstance(value, Landing):
            value.landed()
        self._complete(value)
        return True

    def _complete(self, reply: Reply) -> None:
        self._expected.popleft()
        self._replies.append(reply)

    def _line(self, begin: int) -> tuple[bytes, bytes, int] | None:
        """Kind, text, and end of a line; None if it is not whole."""
        end = self._scratch.find(b"\r\n", begin, self._end)
        if end < 0:
            return None
        return bytes(self._scratch[begin : begin + 1]), bytes(self._scratch[begin + 1 : end]), end + 2

    def _parse(self, begin: int) -> tuple[Reply, int] | None:
        """A reply that lies in scratch, and where it ends; None if it is not whole."""
        line = self._line(begin)
        return None if line is None else self._parse_line(*line)

    def _parse_line(self, kind: bytes, text: bytes, after: int) -> tuple[Reply, int] | None:
        """The reply whose first line this is."""
        match kind:
            case b"+":
                return text, after
            case b":":
                return int(text), after
            case b"-":
                return self._parse_error(text.decode(errors="replace")), after
            case b"$":
                return self._parse_value(int(text), after)
            case b"*":
                return self._parse_list(int(text), after)
        raise ValueError(f"a line begins with {kind!r}")

    def _parse_value(self, num_bytes: int, begin: int) -> tuple[Reply, int] | None:
        if num_bytes < 0:
            return None, begin
        if self._end < begin + num_bytes + 2:
            return None
        return bytes(self._scratch[begin : begin + num_bytes]), begin + num_bytes + 2

    def _parse_list(self, length: int, begin: int) -> tuple[Reply, int] | None:
        entries: list[Reply] = []
        for _ in range(length):
            parsed = self._parse(begin)
            if parsed is None:
                return None
            entry, begin = parsed
            entries.append(entry)
        return entries, begin
