"""A group whose ranks are processes, over gloo of ``torch.distributed``.

It is never the engine's default group: a collective of ours between two of the engine's would be taken for
one of them. Numbers live in CPU memory; no GPU is waited for.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch
import torch.distributed

from hicache.errors import ConfigError, RankGroupError
from hicache.ranks.group import Numbers

T = TypeVar("T")
GRACE_S = 5.0
"""So much later than it was told torch gives up by itself, if it does."""
RETRY_S = 0.1
"""How long after a vain try to reach the first rank the next one is."""
dist: Any = torch.distributed
"""Any: its stubs leave out much of what it documents."""


class GlooGroup:
    """One process's place in a group; made by ``connect``, or ``over`` a group that the engine made for it."""

    def __init__(
        self, process_group: Any, *, keeps: object = None
    ) -> None:  # Any: torch has no type for both
        self._group: Any = process_group
        self._keeps = keeps  # the rendezvous lives in the first rank, as long as its object
        self._is_closed = False
        self._options = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp.MIN
        self.rank = int(process_group.rank())
        self.size = int(process_group.size())

    @classmethod
    def connect(cls, address: str, *, rank: int, size: int, timeout_s: float) -> Self:
        """Meet the other ranks and make a group of our own; waits for all, bounded.

        Args:
            address: ``host:port`` of a free port where the first rank listens; the same on all ranks.
            timeout_s: how long any call waits for the slowest rank.

        Raises:
            RankGroupError: not all ranks came in time, or the address cannot be used.
        """
        name, _, number = address.rpartition(":")
        host, port, is_first = name.strip("[]"), int(number), rank == 0
        limit = timedelta(seconds=timeout_s)
        try:
            # torch tells of an address that it cannot use by pages of C++ frames on stderr: it is tried before.
            until_s = time.monotonic() + timeout_s
            own_address = _retried(lambda: _own_address(host), until_s)
            if is_first:
                _check_free(port)
            else:
                _retried(lambda: _reach(host, port, until_s), until_s)
            # The first one reaches its own end of the meeting point whatever the others call it.
            store = _bounded(
                lambda: dist.TCPStore(
                    "localhost" if is_first else host, port, size, is_master=is_first, timeout=limit
                ),
                timeout_s + GRACE_S,
            )
            options = dist.ProcessGroupGloo._Options()  # noqa: SLF001  torch names no other way to choose the interface
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address)]  # noqa: SLF001
            options._timeout = limit  # noqa: SLF001
            prefixed = dist.PrefixStore("hicache", store)
            group = dist.ProcessGroupGloo(prefixed, rank, size, options)
        except (RuntimeError, OSError, ValueError) as error:
            raise RankGroupError(
                f"rank {rank} of {size} found no group at {address} within {timeout_s:g} s: {_first_line(error)};"
                " start all ranks, and give all the same ranks.address, with a port that is free on the first"
            ) from error
        return cls(group, keeps=store)

    @classmethod
    def over(cls, process_group: Any) -> Self:  # Any: ``torch.distributed.ProcessGroup``
        """Use a group that the engine made for this: ``torch.distributed.new_group(backend="gloo", timeout=...)``.

        Raises:
            ConfigError: it is the engine's default group, or not one of gloo.
        """
        if process_group is None or (dist.is_initialized() and process_group is dist.group.WORLD):
            problem = (
                "ranks: the engine's default process group cannot be shared; make another one with"
                " torch.distributed.new_group(backend='gloo', timeout=...)"
            )
            raise ConfigError([problem])
        backend = dist.get_backend(process_group)
        if "gloo" not in backend:
            raise ConfigError(
                [f"ranks: the group's backend is {backend}; expected gloo, which works on CPU memory"]
            )
        return cls(process_group)

    def lowest(self, numbers: Numbers) -> Numbers:
        if self._is_closed:
            raise RankGroupError(f"rank {self.rank} has left its group")
        try:
            self._group.allreduce([torch.from_numpy(numbers)], self._options).wait()
        except RuntimeError as error:
            raise RankGroupError(
                f"rank {self.rank} of {self.size} waited for the others in vain: {_first_line(error)}"
            ) from error
        return numbers

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._keeps is None:
            return  # the engine's
        with contextlib.suppress(RuntimeError):  # it is broken already
            self._group.abort()
        self._group, self._keeps = None, None


def _check_free(port: int) -> None:
    """Raises ``OSError`` where nobody can listen."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", port))
        probe.listen(1)  # bound twice is told here


def _reach(host: str, port: int, until_s: float) -> None:
    """Raises ``OSError`` where nobody listens."""
    socket.create_connection((host, port), timeout=max(0.01, until_s - time.monotonic())).close()


def _retried(attempt: Callable[[], T], until_s: float) -> T:
    """What it gives once it succeeds: a name may not be known yet, and the first rank may start last.

    Raises:
        OSError: the last one, when it is too late.
    """
    while True:
        try:
            return attempt()
        except OSError:
            if time.monotonic() + RETRY_S > until_s:
                raise
        time.sleep(RETRY_S)


def _bounded(attempt: Callable[[], T], limit_s: float) -> T:
    """What it gives, or raises. torch waits for ever where something else listens and says nothing.

    Raises:
        TimeoutError: it is still waiting. Its thread does not keep the process from ending.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(attempt())
        except Exception as error:  # noqa: BLE001  for whoever waits
            outcome.set_exception(error)

    threading.Thread(target=run, name="hicache-meeting", daemon=True).start()
    try:
        return outcome.result(limit_s)
    except FutureTimeoutError as error:
        if outcome.done():
            raise
        raise TimeoutError("something else listens there, and does not answer") from error


def _own_address(host: str) -> str:
    """The address of ours from which ``host`` is reached: the others reach us there. Nothing is sent."""
    family, _, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def _first_line(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error)
    return (text.splitlines() or [type(error).__name__])[0][:200]
