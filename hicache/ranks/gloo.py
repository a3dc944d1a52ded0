"""A group whose ranks are processes, over gloo of ``torch.distributed``.

It is never the engine's default group: a collective of ours between two of the engine's would be taken for
one of them. Numbers live in CPU memory; no GPU is waited for.
"""

from __future__ import annotations

import contextlib
import socket
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed

from hicache.errors import ConfigError, RankGroupError
from hicache.ranks.group import Numbers

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
        host, _, port = address.rpartition(":")
        limit = timedelta(seconds=timeout_s)
        try:
            store = dist.TCPStore(host.strip("[]"), int(port), size, is_master=rank == 0, timeout=limit)
            options = dist.ProcessGroupGloo._Options()  # noqa: SLF001  torch names no other way to choose the interface
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(host.strip("[]")))]  # noqa: SLF001
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


def _own_address(host: str) -> str:
    """The address of ours from which ``host`` is reached: the others reach us there. Nothing is sent."""
    family, _, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
