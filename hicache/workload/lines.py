"""The numbered lines of a trace file, whatever it is packed with.

Compression is told by the first bytes, not by the name. A stream that ends early or is damaged gives all the lines
before the damage, then raises; the line that it cuts is not given.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

import zstandard

from hicache.errors import TraceError

MAX_LINE_BYTES = 256 * 2**20
_READ_BYTES = 4096  # small, so that a hostile frame cannot unfold into gigabytes at one step
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_GZIP_MAGIC = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"


class _Stream(Protocol):
    """What zlib's and zstandard's decompression objects share."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


class _BrokenStreamError(Exception):
    """The packed data ends early or is damaged; the message says how."""


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Give (line number from 1, line without its end) for each line that is not blank.

    Raises:
        TraceError: the file cannot be opened or read (line 0), is empty, ends inside its compressed stream, is
            damaged, or has a line over ``MAX_LINE_BYTES``.
    """
    try:
        with path.open("rb") as file:
            yield from _split(_unpacked(file), str(path))
    except OSError as error:
        reason = error.strerror or str(error)
        raise TraceError(f"cannot be read: {reason}", path=str(path), line=0) from error


def _split(chunks: Iterator[bytes], path: str) -> Iterator[tuple[int, bytes]]:
    line, rest = 1, bytearray()
    started = False
    try:
        for chunk in chunks:
            rest += chunk if started else chunk.removeprefix(_BOM)
            started = started or bool(chunk)
            if b"\n" in chunk:
                *whole, tail = rest.split(b"\n")
                rest = bytearray(tail)
                for raw in whole:
                    if raw.strip():
                        yield line, bytes(raw)
                    line += 1
            if len(rest) > MAX_LINE_BYTES:
                raise TraceError(f"line is longer than {MAX_LINE_BYTES} bytes", path=path, line=line)
    except _BrokenStreamError as error:
        raise TraceError(str(error), path=path, line=line) from error
    if not started:
        raise TraceError("the file is empty", path=path, line=1)
    if rest.strip():
        yield line, bytes(rest)


def _unpacked(file: BinaryIO) -> Iterator[bytes]:
    head = file.read(_READ_BYTES)
    if head.startswith(_ZSTD_MAGIC):
        yield from _frames(file, head, "zstd", zstandard.ZstdDecompressor().decompressobj)
    elif head.startswith(_GZIP_MAGIC):
        yield from _frames(file, head, "gzip", lambda: zlib.decompressobj(wbits=31))
    else:
        while head:
            yield head
            head = file.read(_READ_BYTES)


def _frames(file: BinaryIO, head: bytes, kind: str, start: Callable[[], _Stream]) -> Iterator[bytes]:
    """Unpack the frames that follow one another in a file; each has to be whole."""
    stream = start()
    data = head
    while True:
        try:
            yield stream.decompress(data)
        except (zlib.error, zstandard.ZstdError) as error:
            raise _BrokenStreamError(f"the {kind} stream is damaged here: {error}") from error
        if stream.eof:
            data = stream.unused_data or file.read(_READ_BYTES)
            if kind == "gzip":
                while data and not data.strip(b"\0"):  # gzip files may be padded with zeros
                    data = file.read(_READ_BYTES)
            if not data:
                return
            stream = start()
        else:
            data = file.read(_READ_BYTES)
            if not data:
                raise _BrokenStreamError(f"the {kind} stream ends early here: the file is truncated")
