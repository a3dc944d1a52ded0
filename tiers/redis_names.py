"""How a page is called and cut up in Redis.

::

    hicache:<namespace>:{<key in hex>}                          header, then the payload
                                                                or header, then a manifest
    hicache:<namespace>:{<key in hex>}:<checksum>-<bytes>:<n>   part n of a payload that was cut

The braces are a hash tag: in a cluster a page and its parts share one slot. A part is named after the
payload's checksum and the size of a part, so writers that cut differently, or hold other bytes for
the key, never mix; a page that is written again has the same parts again.

Manifest, little-endian: magic ``b"HICPARTS"``, bytes a part (8), number of parts (8).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from hicache.tiers.framing import HEADER_BYTES, PageHeader
from hicache.types import PageKey

_MANIFEST = struct.Struct("<8sQQ")
_MAGIC = b"HICPARTS"
HEAD_BYTES = HEADER_BYTES + _MANIFEST.size
"""The most that has to be read of a value to know whether the page has parts."""
_GLOB_SPECIALS = frozenset(b"*?[]\\^-")


@dataclass(frozen=True, slots=True)
class Manifest:
    """How a payload was cut: ``num_parts`` of ``part_bytes``, the last one shorter."""

    part_bytes: int
    num_parts: int

    def encode(self) -> bytes:
        return _MANIFEST.pack(_MAGIC, self.part_bytes, self.num_parts)

    def spans(self, payload_bytes: int) -> list[tuple[int, int]]:
        """Begin and end of each part."""
        begins = range(0, self.num_parts * self.part_bytes, self.part_bytes)
        return [(begin, min(begin + self.part_bytes, payload_bytes)) for begin in begins]


def cut(payload_bytes: int, value_bytes: int) -> Manifest | None:
    """How to cut a payload for values of at most ``value_bytes``; None if it fits into one.

    What is no longer than a manifest is never cut: then no payload can be taken for one.
    """
    if HEADER_BYTES + payload_bytes <= value_bytes or payload_bytes <= _MANIFEST.size:
        return None
    return Manifest(value_bytes, -(-payload_bytes // value_bytes))


def manifest_of(value: memoryview, header: PageHeader) -> Manifest | None:
    """The manifest in a page's value; None if the value holds the payload, or neither."""
    if value.nbytes != HEAD_BYTES or header.payload_bytes <= _MANIFEST.size:
        return None
    magic, part_bytes, num_parts = _MANIFEST.unpack_from(value, HEADER_BYTES)
    if magic != _MAGIC or part_bytes < 1 or num_parts != -(-header.payload_bytes // part_bytes):
        return None
    return Manifest(part_bytes, num_parts)


class PageNames:
    """Names of one store's pages.

    Args:
        prefix: what every name starts with.
        namespace: sets apart who shares a prefix and nothing else, such as two models.
    """

    def __init__(self, prefix: str, namespace: str) -> None:
        if "{" in prefix or "}" in prefix:
            raise ValueError(f"prefix is {prefix!r}; braces choose the slot in a cluster, leave them out")
        self._head = f"{prefix}:{namespace}:{{".encode() if namespace else f"{prefix}:{{".encode()
        self._name_bytes = len(self._head) + 2 * 32 + 1

    def page(self, key: PageKey) -> bytes:
        return b"%b%b}" % (self._head, key.hex().encode())

    def parts(self, header: PageHeader, manifest: Manifest) -> list[bytes]:
        """Names of a page's parts, in order."""
        stem = b"%b:%016x-%d:" % (self.page(header.key), header.checksum, manifest.part_bytes)
        return [b"%b%d" % (stem, n) for n in range(manifest.num_parts)]

    def is_page(self, name: bytes) -> bool:
        """Whether this is a page, not a part. *Caller guarantees*: it matches ``pattern``."""
        return len(name) == self._name_bytes

    @property
    def pattern(self) -> bytes:
        """A glob for ``SCAN`` that all of this store's names match, and no other store's."""
        escaped = b"".join(b"\\%c" % byte if byte in _GLOB_SPECIALS else b"%c" % byte for byte in self._head)
        return escaped + b"*"
