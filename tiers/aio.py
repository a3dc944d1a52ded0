"""Many reads under way at once from one thread: Linux's own asynchronous I/O (``io_submit``), past the page cache.

A thread for each read would give the disk the same depth, but each of them needs the interpreter's lock
after each read, and they take longer to pass it round than a small read takes. It works with O_DIRECT only:
without that the kernel reads within ``io_submit``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Sequence
from typing import NamedTuple

MAX_READS = 256
"""Reads that are under way at once."""
_IOCB = struct.Struct("<QIiHhIQQqQII")
"""Linux's ``struct iocb``: tag, key, flags, opcode, priority, descriptor, address, bytes, offset, reserved, flags,
descriptor of an event."""
_EVENT = struct.Struct("<QQqq")
"""``struct io_event``: tag, address of the iocb, result, second result."""
_OPCODE_READ = 0
_NUMBERS = {  # io_setup, io_destroy, io_getevents, io_submit
    "x86_64": (206, 207, 208, 209),
    "aarch64": (0, 1, 4, 2),
}

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long


class Read(NamedTuple):
    """One read: what names it in ``wait``, a descriptor opened with O_DIRECT, and memory aligned to blocks."""

    tag: int
    descriptor: int
    address: int
    num_bytes: int
    offset: int


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
        self._blocks = ctypes.create_string_buffer(MAX_READS * _IOCB.size)
        first = ctypes.addressof(self._blocks)
        self._pointers = (ctypes.c_uint64 * MAX_READS)(
            *(first + number * _IOCB.size for number in range(MAX_READS))
        )
        self._events = ctypes.create_string_buffer(MAX_READS * _EVENT.size)
        self.num_under_way = 0

    def submit(self, reads: Sequence[Read]) -> None:
        """Begin to read.

        *Caller guarantees*: at most ``MAX_READS`` are under way, and the memory is used for nothing else before
        ``wait`` or ``drain`` told that a read has ended.
        """
        for number, (tag, descriptor, address, num_bytes, offset) in enumerate(reads):
            _IOCB.pack_into(
                self._blocks, number * _IOCB.size,
                tag, 0, 0, _OPCODE_READ, 0, descriptor, address, num_bytes, offset, 0, 0, 0,
            )  # fmt: skip
        num_submitted = 0
        while num_submitted < len(reads):
            num_new = self._call(
                self._submit,
                self._queue,
                ctypes.c_long(len(reads) - num_submitted),
                ctypes.byref(self._pointers, 8 * num_submitted),
            )
            num_submitted += num_new
            self.num_under_way += num_new

    def wait(self) -> list[tuple[int, int]]:
        """Wait until at least one read has ended; the tag of each, and bytes or minus an errno."""
        while True:
            try:
                num_ended = self._call(
                    self._get_events,
                    self._queue,
                    ctypes.c_long(1),
                    ctypes.c_long(MAX_READS),
                    self._events,
                    None,
                )
            except InterruptedError:
                continue
            self.num_under_way -= num_ended
            events = memoryview(self._events)[: num_ended * _EVENT.size]
            return [(tag, result) for tag, _, result, _ in _EVENT.iter_unpack(events)]

    def drain(self) -> None:
        """Wait until nothing is under way."""
        while self.num_under_way:
            self.wait()

    def close(self) -> None:
        """Give the queue back to the kernel."""
        if self._queue.value:
            self._call(self._destroy, self._queue)
            self._queue.value = 0

    @staticmethod
    def _call(number: int, *arguments: object) -> int:
        result = int(_syscall(ctypes.c_long(number), *arguments))
        if result < 0:
            failure = ctypes.get_errno()
            raise OSError(failure, os.strerror(failure))
        return result
