"""The wire: replies in pieces of any size, values that land, what breaks a connection, flow control."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import InvalidResponse, OutOfMemoryError, RedisError, ResponseError

from hicache.tiers import redis_wire
from hicache.tiers.redis_wire import Command, Landing, RedisWire, Reply


def parse_error(text: str) -> RedisError:
    return OutOfMemoryError(text) if text.startswith("OOM") else ResponseError(text)


class FakeTransport(asyncio.Transport):
    """Keeps what is written; the test is the network."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.is_aborted = False
        self.protocol: RedisWire | None = None

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, RedisWire)
        self.protocol = protocol

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:  # Any: as in typeshed
        self.written.append(bytes(data))

    def abort(self) -> None:
        self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_aborted


class CountedLanding(Landing):
    """Remembers that it was filled, and with what."""

    def __init__(self, head_bytes: int, body_bytes: int) -> None:
        super().__init__(bytearray(head_bytes), memoryview(bytearray(body_bytes)))
        self.found: bytes | None = None

    def landed(self) -> None:
        assert self.found is None
        self.found = bytes(self.head) + bytes(self.body)


Test = Callable[[RedisWire, FakeTransport], Coroutine[Any, Any, None]]  # Any: asyncio's


def run(test: Test) -> None:
    async def main() -> None:
        wire, transport = RedisWire(parse_error), FakeTransport()
        wire.take(transport)
        await test(wire, transport)

    asyncio.run(asyncio.wait_for(main(), timeout=120))


def feed(wire: RedisWire, data: bytes, sizes: list[int] | None = None) -> None:
    """Let bytes arrive, in pieces of these sizes (over and over) as far as the wire's buffers allow."""
    position, turn = 0, 0
    while position < len(data):
        buffer = wire.get_buffer(-1)
        assert len(buffer) > 0
        wanted = sizes[turn % len(sizes)] if sizes else len(data)
        count = min(wanted, len(buffer), len(data) - position)
        buffer[:count] = data[position : position + count]
        position += count
        turn += 1
        wire.buffer_updated(count)


async def answer(
    wire: RedisWire, data: bytes, landings: list[Landing | None], sizes: list[int] | None = None
) -> list[Reply]:
    """Run a pipeline whose answer is ``data``."""
    replies: list[Reply] = []
    commands = [Command((b"PING\r\n",), landing) for landing in landings]
    call = asyncio.ensure_future(wire.run(commands, replies))
    await asyncio.sleep(0)
    feed(wire, data, sizes)
    await call
    return replies


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


VALUES = st.sampled_from([0, 1, 2, 159, 160, 161, 4096, 4097, 9000]).map(
    lambda n: bytes(i % 251 for i in range(n))
)


@given(
    values=st.lists(VALUES, min_size=1, max_size=6),
    sizes=st.lists(st.integers(1, 6000), min_size=1, max_size=5),
)
def test_replies_are_the_same_however_they_are_cut(values: list[bytes], sizes: list[int]) -> None:
    """Each value with a landing that fits, one that does not, and none; other kinds between them."""
    data = b"".join(b":7\r\n" + bulk(value) * 3 + b"$-1\r\n+OK\r\n" for value in values)

    async def test(wire: RedisWire, transport: FakeTransport) -> None:
        landings: list[Landing | None] = []
        for value in values:
            head = min(len(value), 160)
            fits, other = CountedLanding(head, len(value) - head), CountedLanding(head, len(value) + 1)
            landings += [None, fits, other, None, None, None]
        replies = await answer(wire, data, landings, sizes)
        assert len(replies) == 6 * len(values)
        for n, value in enumerate(values):
            number, landed, misfit, plain, nothing, ok = replies[6 * n : 6 * n + 6]
            assert (number, misfit, plain, nothing, ok) == (7, value, value, None, b"OK")
            expected = landings[6 * n + 1]
            assert isinstance(expected, CountedLanding)
            if value:
                assert landed is expected
                assert expected.found == value
            else:
                assert landed == b""
        assert wire.is_usable

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis_wire, "SCRATCH_BYTES", 64)  # so that scratch fills, moves and grows
        run(test)


def test_lists_may_be_nested_and_larger_than_the_scratch() -> None:
    async def test(wire: RedisWire, transport: FakeTransport) -> None:
        names = [b"name-%d" % n for n in range(20_000)]
        data = b"*2\r\n" + bulk(b"17") + b"*%d\r\n" % len(names) + b"".join(map(bulk, names))
        assert await answer(wire, data, [None]) == [[b"17", names]]
        assert await answer(wire, b"*0\r\n", [None]) == [[]]

    run(test)


def test_an_error_is_a_reply_of_its_own_kind() -> None:
    async def test(wire: RedisWire, transport: FakeTransport) -> None:
        full, other = await answer(wire, b"-OOM no room\r\n-ERR what\r\n", [None, None])
        assert isinstance(full, OutOfMemoryError)
        assert isinstance(other, ResponseError)
        assert wire.is_usable

    run(test)


@pytest.mark.parametrize(
    ("data", "landing"),
    [
        (b"?what\r\n", None),
        (b"$x\r\n", None),
        (b":1:2\r\n", None),
        (b"\r\n", None),
        (b"$5\r\nhelloXX+OK\r\n", CountedLanding(2, 3)),
        (b"HTTP/1.1 400 Bad Request\r\n", None),
    ],
    ids=["kind", "length", "number", "empty", "longer", "http"],
)
def test_what_is_no_reply_breaks_the_connection(data: bytes, landing: Landing | None) -> None:
    async def test(wire: RedisWire, transport: FakeTransport) -> None:
        with pytest.raises(InvalidResponse, match="no reply of a Redis server"):
            await answer(wire, data, [landing])
        assert transport.is_aborted
        assert not wire.is_usable

    run(test)


def test_an_answer_that_nobody_asked_for_breaks_the_connection() -> None:
    """Else it would be taken for the answer to the next question."""

    async def test(wire: RedisWire, transport: FakeTransport) -> None:
        with pytest.raises(InvalidResponse, match="nobody asked for"):
            await answer(wire, b"+OK\r\n+OK\r\n", [None])
        assert not wire.is_usable

    run(test)


def test_an_answer_that_comes_between_two_pipelines_breaks_the_connection() -> None:
    async def test(wire: RedisWire, transport: FakeTransport) -> None:
        assert await answer(wire, b"+OK\r\n", [None]) == [b"OK"]
        feed(wire, b"+OK\r\n")
        assert not wire.is_usable
        with pytest.raises(InvalidResponse):
            await wire.run([Command((b"PING\r\n",))], [])

    run(test)


@pytest.mark.parametrize("sent", [b"", b"$300\r\nabc"], ids=["before", "inside a value"])
def test_a_connection_that_ends_fails_the_pipeline_and_keeps_what_was_answered(sent: bytes) -> None:
    async def test(wire: RedisWire, transport: FakeTransport) -> None:
        replies: list[Reply] = []
        call = asyncio.ensure_future(wire.run([Command((b"PING\r\n",)), Command((b"GET a\r\n",))], replies))
        await asyncio.sleep(0)
        feed(wire, b"+PONG\r\n" + sent)
        wire.eof_received()
        with pytest.raises(ConnectionResetError, match="the server closed the connection"):
            await call
        assert replies == [b"PONG"]
        assert not wire.is_usable

    run(test)


def test_a_cancelled_pipeline_lets_go_of_its_landings() -> None:
    async def test(wire: RedisWire, transport: FakeTransport) -> None:
        landing = CountedLanding(160, 10_000)
        call = asyncio.ensure_future(wire.run([Command((b"GET a\r\n",), landing)], []))
        await asyncio.sleep(0)
        feed(wire, b"$10160\r\n" + bytes(5000))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        landing.body[:] = b"\x11" * 10_000  # the caller's again
        assert wire.get_buffer(-1).obj is not landing.body.obj
        assert landing.found is None

    run(test)


def test_long_pieces_are_sent_as_they_are_and_short_ones_together() -> None:
    async def test(wire: RedisWire, transport: FakeTransport) -> None:
        long = bytes(redis_wire.SEND_BYTES)
        commands = [
            Command((b"a", b"b")),
            Command((b"c", memoryview(long), b"d")),
            Command((b"e",)),
        ]
        call = asyncio.ensure_future(wire.run(commands, []))
        await asyncio.sleep(0)
        assert transport.written == [b"abc", long, b"de"]
        feed(wire, b"+1\r\n+2\r\n+3\r\n")
        await call

    run(test)


def test_a_transport_that_is_full_is_waited_for() -> None:
    async def test(wire: RedisWire, transport: FakeTransport) -> None:
        long = bytes(redis_wire.SEND_BYTES)
        wire.pause_writing()
        call = asyncio.ensure_future(wire.run([Command((long,)), Command((long,))], []))
        await asyncio.sleep(0)
        assert len(transport.written) == 1
        wire.resume_writing()
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(transport.written) == 2
        feed(wire, b"+1\r\n+2\r\n")
        await call

    run(test)


def test_a_connection_that_breaks_while_it_is_full_fails_the_pipeline() -> None:
    async def test(wire: RedisWire, transport: FakeTransport) -> None:
        wire.pause_writing()
        call = asyncio.ensure_future(wire.run([Command((bytes(redis_wire.SEND_BYTES),))], []))
        await asyncio.sleep(0)
        wire.connection_lost(ConnectionResetError("reset"))
        with pytest.raises(ConnectionResetError, match="reset"):
            await call

    run(test)
