"""Many reads under way at once from one thread: Linux's own asynchronous I/O (``io_submit``), past the page cache.

A thread for each read would give the disk the same depth, but each of them needs the interpreter's lock
after each read, and they take longer to pass it round than a small read takes. It works with O_DIRECT only:
without that the kernel reads within ``io_submit``.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
from collections.abc import Generator, Sequence

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

MAX_READS = 256
"""Reads that are under way at once."""
_IOCB = np.dtype(
    [
        ("data", "<u8"),
        ("key", "<u4"),
        ("rw_flags", "<i4"),
        ("opcode", "<u2"),
        ("priority", "<i2"),
        ("descriptor", "<u4"),
        ("buffer", "<u8"),
        ("num_bytes", "<u8"),
        ("offset", "<i8"),
        ("reserved", "<u8"),
        ("flags", "<u4"),
        ("event_descriptor", "<u4"),
    ]
)
_EVENT = np.dtype([("data", "<u8"), ("iocb", "<u8"), ("result", "<i8"), ("result2", "<i8")])
_OPCODE_READ = 0
_NUMBERS = {  # io_setup, io_destroy, io_getevents, io_submit
    "x86_64": (206, 207, 208, 209),
    "aarch64": (0, 1, 4, 2),
}

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long


class AsyncReads:
    """A queue of reads into memory that the caller owns.

    *Thread*: one at a time.

    Raises:
        OSError: the kernel, or a sandbox around it, has no such queue.
    """

    def __init__(self) -> None:
        numbers = _NUMBERS.get(platform.machine())
        if numbers is None:
            raise OSError(errno.ENOSYS, f"no numbers of system calls for {platform.machine()}")
        self._setup, self._destroy, self._get_events, self._submit = numbers
        self._queue = ctypes.c_ulong(0)
        self._call(self._setup, ctypes.c_uint(MAX_READS), ctypes.byref(self._queue))
        self._num_under_way = 0

    def read(
        self, descriptors: Sequence[int], buffers: Sequence[int], sizes: Sequence[int], offsets: Sequence[int]
    ) -> Generator[tuple[int, int], None, None]:
        """Begin to read, and give each read when it has ended: its position, and bytes or minus an errno.

        Args:
            descriptors, offsets: where to read, opened with O_DIRECT; at most ``MAX_READS``.
            buffers, sizes: addresses and lengths of memory, aligned to blocks.

        *Caller guarantees*: exhausts or closes the iterator before the memory is used for anything else.
        """
        blocks = np.zeros(len(sizes), _IOCB)
        blocks["data"] = np.arange(len(sizes))
        blocks["opcode"] = _OPCODE_READ
        blocks["descriptor"], blocks["buffer"] = descriptors, buffers
        blocks["num_bytes"], blocks["offset"] = sizes, offsets
        pointers = (blocks.ctypes.data + np.arange(len(sizes)) * _IOCB.itemsize).astype(np.uint64)
        events = np.zeros(MAX_READS, _EVENT)
        num_submitted = 0
        try:
            while num_submitted < len(sizes):
                num_submitted += self._call(
                    self._submit,
                    self._queue,
                    ctypes.c_long(len(sizes) - num_submitted),
                    ctypes.c_void_p(pointers.ctypes.data + 8 * num_submitted),
                )
                self._num_under_way = num_submitted
            while self._num_under_way:
                yield from self._reap(events)
        finally:
            while self._num_under_way:
                self._reap(events)

    def close(self) -> None:
        """Give the queue back to the kernel."""
        if self._queue.value:
            self._call(self._destroy, self._queue)
            self._queue.value = 0

    def _reap(self, events: NDArray[np.void]) -> list[tuple[int, int]]:
        """Wait for at least one read to end."""
        while True:
            try:
                num_ended = self._call(
                    self._get_events,
                    self._queue,
                    ctypes.c_long(1),
                    ctypes.c_long(len(events)),
                    ctypes.c_void_p(events.ctypes.data),
                    None,
                )
            except InterruptedError:
                continue
            self._num_under_way -= num_ended
            ended = events[:num_ended]
            return list(zip(ended["data"].tolist(), ended["result"].tolist(), strict=True))

    @staticmethod
    def _call(number: int, *arguments: object) -> int:
        result = int(_syscall(ctypes.c_long(number), *arguments))
        if result < 0:
            failure = ctypes.get_errno()
            raise OSError(failure, os.strerror(failure))
        return result
