"""Pages for tests of stores: keys, payloads, chains, targets, and ways to spoil what was stored."""

from __future__ import annotations

import hashlib
import random
from enum import Enum

from hicache.tiers.codecs import CodecSettings
from hicache.tiers.framing import HEADER_BYTES, encode_header
from hicache.tiers.store import PageTarget, StoredPage
from hicache.types import PageKey

COMPONENT = "full"
PAYLOAD_BYTES = 1000
"""Payload of a page where its size does not matter."""


SECRET = bytes(range(32))
CODECS = {
    "plain": CodecSettings(),
    "lz4": CodecSettings("lz4"),
    "zstd": CodecSettings("zstd", width=2),
    "aes": CodecSettings(key=SECRET, encrypts=True),
    "zstd+aes": CodecSettings("zstd", width=2, key=SECRET, encrypts=True),
}
"""One way of writing pages of each kind."""


class Corruption(Enum):
    """Ways in which a stored page goes bad."""

    FLIPPED_PAYLOAD = "one bit of the payload"
    FLIPPED_HEADER = "one bit of the header"
    TRUNCATED = "the last byte is missing"
    EMPTY = "nothing is left of it"
    OTHER_KEY = "the bytes of another, valid page"
    VANISHED = "it was removed behind the store's back"


def make_key(name: object) -> PageKey:
    """A page key for a test: 32 bytes that depend on ``name`` alone."""
    return PageKey(hashlib.blake2b(str(name).encode(), digest_size=32).digest())


def make_payload(key: PageKey, num_bytes: int = PAYLOAD_BYTES) -> bytes:
    """The bytes that belong to ``key``: unlike those of any other key."""
    return random.Random(key).randbytes(num_bytes)


def make_page(
    name: object, parent: object | None = None, *, num_bytes: int = PAYLOAD_BYTES, component: str = COMPONENT
) -> StoredPage:
    """A page called ``name`` under the page called ``parent``."""
    key = make_key(name)
    above = None if parent is None else make_key(parent)
    return StoredPage(key, above, component, memoryview(make_payload(key, num_bytes)))


def make_chain(first: int, last: int, *, prefix: str = "") -> list[StoredPage]:
    """Pages ``first`` … ``last`` of a chain; page ``n`` hangs under ``n - 1``, page 1 under nothing."""
    return [make_page(f"{prefix}{n}", None if n == 1 else f"{prefix}{n - 1}") for n in range(first, last + 1)]


def make_target(key: PageKey, num_bytes: int = PAYLOAD_BYTES, *, component: str = COMPONENT) -> PageTarget:
    """A buffer to read ``key`` into, filled with a pattern that no payload has."""
    return PageTarget(key, component, memoryview(bytearray(b"\xee" * num_bytes)))


def spoil(stored: bytes, how: Corruption) -> bytes | None:
    """What is left of a stored page (header and payload) after ``how``; None: nothing, not even a name."""
    spoilt = bytearray(stored)
    match how:
        case Corruption.FLIPPED_PAYLOAD:
            spoilt[HEADER_BYTES + (len(spoilt) - HEADER_BYTES) // 2] ^= 0x10
        case Corruption.FLIPPED_HEADER:
            spoilt[40] ^= 0x01
        case Corruption.TRUNCATED:
            del spoilt[-1]
        case Corruption.EMPTY:
            spoilt.clear()
        case Corruption.OTHER_KEY:
            other = make_key("of another page")
            payload = make_payload(other, len(spoilt) - HEADER_BYTES)
            spoilt = bytearray(encode_header(other, COMPONENT, payload) + payload)
        case Corruption.VANISHED:
            return None
    return bytes(spoilt)
