"""The header of every stored page: who it is, how long it is, and whether it is whole.

::

    offset  bytes  field (little-endian)
         0      8  magic            b"HICPAGE" and a zero byte
         8      2  format version   1
        10      2  codec            0: payload as it is; others: see ``codecs``
        12      2  name length      bytes of the component's name
        14      2  flags            bit 0: the page has a parent
        16      8  payload length   bytes that follow the header
        24      8  payload checksum xxh3_64 of those bytes
        32     32  key              the page's key
        64     56  component        UTF-8, padded with zero bytes
       120     32  parent           the key of the page it hangs under, or zero bytes
       152      8  header checksum  xxh3_64 of the 152 bytes before it
       160         payload

Every later version keeps the magic, the version and the header checksum where they are. So a reader
tells a newer header (``UnsupportedFormatError``: leave it to its owner) from a damaged one
(``CorruptPayloadError``: remove it), whatever bit was flipped.
"""

from __future__ import annotations

import struct
from typing import NamedTuple, TypeAlias

import xxhash

from hicache.errors import CorruptPayloadError, TierError
from hicache.types import PageKey

BytesLike: TypeAlias = bytes | bytearray | memoryview

MAGIC = b"HICPAGE\0"
FRAME_VERSION = 1
HEADER_BYTES = 160
KEY_BYTES = 32
MAX_COMPONENT_BYTES = 56
CODEC_NONE = 0

_HAS_PARENT = 1

_FIELDS = struct.Struct("<8sHHHHQQ32s56s32s")
_CHECKSUM = struct.Struct("<Q")
_HASH_CHUNK_BYTES = 4 << 20
"""How much one call hashes: bounds how long the interpreter lock may be held (under 1 ms)."""


class UnsupportedFormatError(TierError):
    """A whole page of a format or codec that this version does not know; not ours to remove."""


class PageHeader(NamedTuple):
    """A decoded header whose own checksum was right; a tuple, since every page that is read makes one.

    Args:
        key: the page's key; 32 bytes.
        parent: the page it hangs under; None for a first page.
        component: name of the component.
        payload_bytes: how many bytes follow the header.
        checksum: of those bytes.
        codec: how they are encoded; 0 means not at all.
        version: of the frame's format.
    """

    key: PageKey
    parent: PageKey | None
    component: str
    payload_bytes: int
    checksum: int
    codec: int = CODEC_NONE
    version: int = FRAME_VERSION

    def check_identity(self, key: PageKey) -> None:
        """Raise ``CorruptPayloadError`` unless this is the header of ``key``'s page."""
        if self.key != key:
            raise CorruptPayloadError(f"key differs: header of {self.key.hex()}, page {key.hex()} was asked")


def payload_checksum(payload: BytesLike) -> int:
    """xxh3_64 of contiguous bytes."""
    view = memoryview(payload).cast("B")
    if len(view) <= _HASH_CHUNK_BYTES:
        return xxhash.xxh3_64_intdigest(view)
    hasher = xxhash.xxh3_64()
    for begin in range(0, len(view), _HASH_CHUNK_BYTES):
        hasher.update(view[begin : begin + _HASH_CHUNK_BYTES])
    return hasher.intdigest()


def encode_header(
    key: PageKey,
    component: str,
    payload: BytesLike,
    *,
    parent: PageKey | None = None,
    codec: int = CODEC_NONE,
) -> bytes:
    """Give the header of ``payload``; ``HEADER_BYTES`` bytes.

    Args:
        payload: the bytes as they will be stored, after the codec; contiguous.

    Raises:
        ValueError: a key is not 32 bytes, or the component's name is empty or over 56 bytes.
    """
    name = component.encode()
    if len(key) != KEY_BYTES or (parent is not None and len(parent) != KEY_BYTES):
        raise ValueError(f"a page key has {KEY_BYTES} bytes: {key!r}, parent {parent!r}")
    if not 1 <= len(name) <= MAX_COMPONENT_BYTES:
        raise ValueError(
            f"component name {component!r} has {len(name)} bytes, 1 to {MAX_COMPONENT_BYTES} fit"
        )
    view = memoryview(payload)
    fields = _FIELDS.pack(
        MAGIC,
        FRAME_VERSION,
        codec,
        len(name),
        0 if parent is None else _HAS_PARENT,
        view.nbytes,
        payload_checksum(view),
        key,
        name,
        b"" if parent is None else parent,
    )
    return fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))


def decode_header(raw: BytesLike) -> PageHeader:
    """Read a header.

    Args:
        raw: at least the first ``HEADER_BYTES`` bytes of a page; what follows is not looked at.

    Raises:
        CorruptPayloadError: too short, wrong magic, wrong header checksum, or fields out of range.
        UnsupportedFormatError: a whole header of a newer format.
    """
    head = bytes(memoryview(raw)[:HEADER_BYTES])
    if len(head) < HEADER_BYTES:
        raise CorruptPayloadError(f"header differs: {len(head)} bytes, {HEADER_BYTES} expected")
    fields = _FIELDS.unpack_from(head)
    magic, version, codec, name_bytes, flags, payload_bytes, checksum, key, name, parent = fields
    if magic != MAGIC:
        raise CorruptPayloadError(f"magic differs: {magic!r}, {MAGIC!r} expected")
    (expected,) = _CHECKSUM.unpack_from(head, _FIELDS.size)
    if expected != (found := xxhash.xxh3_64_intdigest(head[: _FIELDS.size])):
        raise CorruptPayloadError(f"header checksum differs: {found:016x} computed, {expected:016x} stored")
    if version > FRAME_VERSION:
        raise UnsupportedFormatError(
            f"format version {version} is newer than {FRAME_VERSION}, the newest this version reads"
        )
    if (
        version < 1
        or flags & ~_HAS_PARENT
        or not 1 <= name_bytes <= MAX_COMPONENT_BYTES
        or name[name_bytes:].strip(b"\0")
    ):
        raise CorruptPayloadError(
            f"header differs from its format: version {version}, flags {flags:#x}, name of {name_bytes} bytes"
        )
    try:
        component = name[:name_bytes].decode()
    except UnicodeDecodeError as error:
        raise CorruptPayloadError(f"component name differs from UTF-8: {name[:name_bytes]!r}") from error
    above = PageKey(parent) if flags & _HAS_PARENT else None
    return PageHeader(PageKey(key), above, component, payload_bytes, checksum, codec, version)


def check_payload(header: PageHeader, payload: BytesLike) -> None:
    """Raise ``CorruptPayloadError`` unless ``payload`` is what ``header`` was made for."""
    view = memoryview(payload)
    if view.nbytes != header.payload_bytes:
        raise CorruptPayloadError(
            f"payload length differs: {view.nbytes} bytes, header says {header.payload_bytes}"
        )
    found = payload_checksum(view)
    if found != header.checksum:
        raise CorruptPayloadError(
            f"payload checksum differs: {found:016x} computed, {header.checksum:016x} stored"
        )
