"""A TCP proxy on loopback that lets a connection hang, break or crawl when a test says so.

    with TcpProxy(server.port) as proxy:
        proxy.hold()                    # what the server answers from now on stays here
        proxy.holding.wait(5)           # ... and something does
        proxy.release()                 # all of it goes on its way

It has a thread of its own. Nothing is decided by time, except by ``slow_down``.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from hicache.closing import Closing

T = TypeVar("T")

_CHUNK_BYTES = 1 << 16
_CALL_LIMIT_S = 60.0
_NO_LINGER = struct.pack("ii", 1, 0)
"""Closing then sends a reset."""


class TcpProxy(Closing):
    """Forwards to a port of loopback.

    Args:
        target_port: of the server behind.

    *Thread*: any. ``holding`` is set while an answer of the server is being held back.
    """

    def __init__(self, target_port: int) -> None:
        self.holding = threading.Event()
        self.num_connections = 0
        self._target_port = target_port
        self._may_pass = asyncio.Event()
        self._may_pass.set()
        self._delay_s = 0.0
        self._refuses = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tcp-proxy")
        self._thread.start()
        self._server = self._call(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port: int = self._server.sockets[0].getsockname()[1]

    # ---- what a test may do ----------------------------------------------------------------------------------

    def hold(self) -> None:
        """Keep back what the server answers from now on; to a client it hangs."""
        self._do(self._may_pass.clear)

    def release(self) -> None:
        """Send on what was kept back, and forward again."""

        def release() -> None:
            self.holding.clear()
            self._may_pass.set()

        self._do(release)

    def slow_down(self, delay_s: float) -> None:
        """Send each piece of an answer on this much later."""
        self._do(lambda: setattr(self, "_delay_s", delay_s))

    def reset(self) -> None:
        """Break all connections with a reset, and every new one, until ``accept``."""

        def reset() -> None:
            self._refuses = True
            for writer in list(self._writers):
                _break(writer)

        self._do(reset)

    def accept(self) -> None:
        """Take connections again after ``reset``."""
        self._do(lambda: setattr(self, "_refuses", False))

    def close(self) -> None:
        """Break all connections and end the thread. Idempotent."""
        if not self._thread.is_alive():
            return
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CALL_LIMIT_S)
        self._loop.close()

    # ---- forwarding ------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.num_connections += 1
        self._writers.add(writer)
        try:
            if self._refuses:
                return
            back_reader, back_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
            self._writers.add(back_writer)
            try:
                there = asyncio.ensure_future(self._forward(reader, back_writer, is_answer=False))
                back = asyncio.ensure_future(self._forward(back_reader, writer, is_answer=True))
                await asyncio.wait((there, back), return_when=asyncio.FIRST_COMPLETED)
                for half in (there, back):
                    half.cancel()
                await asyncio.wait((there, back))
            finally:
                self._writers.discard(back_writer)
                _break(back_writer)
        except (OSError, asyncio.CancelledError):
            pass  # the server behind is away, or the proxy is closed: the client hears of it by the reset
        finally:
            self._writers.discard(writer)
            _break(writer)
            self._tasks.discard(task)

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(_CHUNK_BYTES):
                if is_answer:
                    if self._delay_s:
                        await asyncio.sleep(self._delay_s)
                    if not self._may_pass.is_set():
                        self.holding.set()
                        await self._may_pass.wait()
                writer.write(chunk)
                await writer.drain()

    async def _stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        await asyncio.sleep(0)  # sockets are closed in the loop's next turn

    # ---- from other threads ----------------------------------------------------------------------------------

    def _call(self, call: Coroutine[Any, Any, T]) -> T:  # Any: asyncio's
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(_CALL_LIMIT_S)

    def _do(self, act: Callable[[], object]) -> None:
        """Act in the loop's thread, and see it done."""

        async def run() -> None:
            act()

        self._call(run())


def _break(writer: asyncio.StreamWriter) -> None:
    raw = writer.get_extra_info("socket")
    if raw is not None and raw.fileno() >= 0:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    writer.transport.abort()
