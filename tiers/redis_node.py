"""One Redis server: connections, and pipelines that survive whatever happens to them.

A connection is used again only after every reply that it owes has been read. After anything else (a
cancelled call, a time limit, a reset, a reply that is no reply) it may be out of step, so it is torn
down at once, unsent bytes included: nothing of it touches the caller's buffers any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from ssl import SSLCertVerificationError
from typing import Any, TypeAlias

from redis.asyncio.connection import Connection, SSLConnection
from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    OutOfMemoryError,
    RedisError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

from hicache.errors import ConfigError, TierError, TierTimeoutError, TierUnavailableError
from hicache.tiers.breaker import Breaker
from hicache.tiers.redis_wire import Command, Landing, RedisWire, Reply

Address: TypeAlias = tuple[str, int]


class _Connection(Connection):
    """redis-py's connection until it has logged in; from then on a wire of our own."""

    wire: RedisWire | None = None

    async def open(self) -> RedisWire:
        """Connect and log in."""
        await self.connect()  # type: ignore[no-untyped-call]  # redis-py's
        assert self._writer is not None
        self.wire = RedisWire(self._parser.parse_error)
        self.wire.take(self._writer.transport)
        return self.wire

    async def disconnect(self, nowait: bool = False, *args: Any, **kwargs: Any) -> None:  # Any: redis-py's
        """As in redis-py, but unsent bytes are thrown away, and nobody waits for the peer's goodbye."""
        self.wire = None
        if self._writer is not None:
            self._writer.transport.abort()
        await super().disconnect(True, *args, **kwargs)


class _TlsConnection(_Connection, SSLConnection):
    """The same over TLS."""


class RedisNode:
    """One server.

    Args:
        address: host and port; names the server in messages.
        settings: keyword arguments for redis-py's connections, credentials among them.
        tls: whether to speak TLS.
        max_connections: the most connections; further calls wait, within their limit.
        timeout_s: limit of one pipeline, connecting included.
        breaker: leaves the server alone while it fails, so that a node of a cluster that hangs does not
            hold up every batch; a pipeline is its probe.

    *Thread*: one event loop.
    """

    def __init__(
        self,
        address: Address,
        settings: dict[str, Any],  # Any: each setting has its own type
        *,
        tls: bool,
        max_connections: int,
        timeout_s: float,
        breaker: Breaker | None = None,
    ) -> None:
        self.address = address
        self._breaker = breaker
        self.timeout_s = timeout_s
        host, port = address
        kind = _TlsConnection if tls else _Connection
        self._connect: Callable[[], _Connection] = lambda: kind(host=host, port=port, **settings)
        self._free = asyncio.Semaphore(max_connections)
        self._idle: list[_Connection] = []
        self._is_closed = False

    def __str__(self) -> str:
        host, port = self.address
        return f"{host}:{port}"

    async def run(self, commands: Sequence[Command]) -> list[Reply]:
        """Send all commands in one pipeline; one reply each, in order.

        Never raises for what the server or the network does: what was not answered is a ``TierError``.
        """
        if self._breaker is None:
            return await self._bounded(commands)
        is_probe = self._breaker.begin_probe()
        if not is_probe and not self._breaker.admits():
            alone = f"redis {self} is left alone for now: {self._breaker.stats().reason}"
            return [TierUnavailableError(alone)] * len(commands)
        lost: object = "cancelled"
        try:
            replies = await self._bounded(commands)
            lost = next((reply for reply in reversed(replies) if isinstance(reply, TierError)), None)
        finally:
            if is_probe and lost is not None:
                self._breaker.fail_probe()
            elif is_probe:
                self._breaker.end_probe(0.0)
            elif isinstance(lost, TierError):
                self._breaker.failed(lost)
            elif lost is None:
                self._breaker.succeeded(0.0)
        return replies

    async def _bounded(self, commands: Sequence[Command]) -> list[Reply]:
        """``run``, whatever the breaker says."""
        replies: list[Reply] = []
        try:
            async with asyncio.timeout(self.timeout_s), self._free:
                await self._run(commands, replies)
        except TimeoutError:
            lost: TierError = TierTimeoutError(f"redis {self} did not answer within {self.timeout_s:g} s")
        except (RedisError, OSError) as error:
            lost = TierUnavailableError(f"redis {self}: {describe(error)}")
            lost.__cause__ = error
        except ConfigError as error:  # a password that is nowhere to be found
            lost = TierUnavailableError(f"redis {self}: {error}")
            lost.__cause__ = error
        else:
            return [self._heard(reply) for reply in replies]
        return replies + [lost] * (len(commands) - len(replies))

    def _heard(self, reply: Reply) -> Reply:
        """A reply, or the ``TierError`` that it comes to: a server that answers and does not serve."""
        if not isinstance(reply, RedisConnectionError):
            return reply
        lost = TierUnavailableError(f"redis {self}: {describe(reply)}")
        lost.__cause__ = reply
        return lost

    async def close(self) -> None:
        """Drop all idle connections, and those in use once they come back."""
        self._is_closed = True
        while self._idle:
            await self._idle.pop().disconnect()

    async def _run(self, commands: Sequence[Command], replies: list[Reply]) -> None:
        connection = await self._take()
        wire = connection.wire
        is_well = False
        try:
            if wire is None:
                wire = await connection.open()
            await wire.run(commands, replies)
            # Not let in, not ready yet: the next connection may be.
            is_well = wire.is_usable and not any(isinstance(reply, RedisConnectionError) for reply in replies)
        finally:
            if is_well and not self._is_closed:
                self._idle.append(connection)
            else:
                await connection.disconnect()

    async def _take(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.wire is not None and connection.wire.is_usable:
                return connection
            await connection.disconnect()
        return self._connect()


def command(*arguments: bytes, landing: Landing | None = None) -> Command:
    """A command of short arguments."""
    words = b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in arguments)
    return Command((b"*%d\r\n%b" % (len(arguments), words),), landing)


def set_command(name: bytes, header: bytes, payload: memoryview, ttl_ms: int | None) -> Command:
    """``SET`` of header and payload as one value, without joining them."""
    num_words, end = 3, b"\r\n"
    if ttl_ms is not None:
        num_words, digits = 5, b"%d" % ttl_ms
        end = b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(digits), digits)
    num_bytes = len(header) + payload.nbytes
    start = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (num_words, len(name), name, num_bytes)
    return Command((start + header, payload, end))


def describe(error: BaseException) -> str:
    """What happened and what to do, without anything secret."""
    text = str(error) or type(error).__name__
    if isinstance(error.__context__, SSLCertVerificationError):
        return f"{error.__context__.verify_message}; check ca_file, and that the certificate names this host"
    match error:
        case AuthenticationError() | AuthorizationError():
            return f"{text}; check username and the password that password_env or password_file names"
        case NoPermissionError():
            return f"{text}; allow this user +get +getex +getrange +set +exists +unlink +strlen +scan on its prefix"
        case OutOfMemoryError():
            return f"{text}; raise the server's maxmemory, or give it an eviction policy"
        case AskError():
            return f"the key is at another node: {text}"
    return text


def is_lasting(error: BaseException | None) -> bool:
    """Whether time will not heal it: a refused login, a missing password, a certificate that does not fit."""
    lasting = (
        AuthenticationError,
        AuthorizationError,
        NoPermissionError,
        ConfigError,
        SSLCertVerificationError,
    )
    while error is not None:
        if isinstance(error, lasting):
            return True
        error = error.__cause__ or error.__context__
    return False
