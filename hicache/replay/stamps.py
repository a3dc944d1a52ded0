"""Payload that proves where it belongs.

The bytes of a page (or state) are a pure function of its page key, so of identity, namespace, component,
rank and all tokens up to its end. Wherever the bytes turn up, in any tier, they can be checked in full.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from hicache.errors import CorruptPayloadError
from hicache.radix.keys import ComponentKeys, chain_links, namespace_seed
from hicache.types import ComponentSpec, Namespace, PageKey

POISON = 0xEE
"""What a simulated engine leaves where nothing may ever be reused."""


def stamp(key: PageKey, num_bytes: int) -> bytes:
    """The payload that belongs to ``key``: BLAKE3's extendable output."""
    return blake3(key).digest(length=num_bytes)


class Stamps:
    """The stamps of one request's pages, made on demand.

    Args:
        identity: the cache's identity digest.
        specs: components, whose stamps are asked for by name.
        page_size: tokens a page.
        namespace: of the request.
    """

    def __init__(
        self,
        identity: bytes,
        specs: Sequence[ComponentSpec],
        page_size: int,
        namespace: Namespace,
    ) -> None:
        self._page_size = page_size
        self._last = namespace_seed(identity, namespace)
        self._links: list[bytes] = []
        self._keys = {spec.name: ComponentKeys(spec) for spec in specs}
        self._bytes = {spec.name: spec.slot_bytes(page_size) for spec in specs}

    def extend(self, tokens: NDArray[np.int32]) -> None:
        """Know the whole pages of ``tokens``, the request's tokens from its start."""
        begin = len(self._links) * self._page_size
        whole = len(tokens) // self._page_size * self._page_size
        self._links += chain_links(self._last, tokens[begin:whole], self._page_size)
        if self._links:
            self._last = self._links[-1]

    def pages(self, component: str, first: int, last: int) -> NDArray[np.uint8]:
        """Stamps of pages [first, last): uint8 [last - first, slot_bytes]."""
        num_bytes = self._bytes[component]
        key = self._keys[component].key
        joined = b"".join(stamp(key(link), num_bytes) for link in self._links[first:last])
        return np.frombuffer(joined, dtype=np.uint8).reshape(last - first, num_bytes)

    def state(self, component: str, length: int) -> NDArray[np.uint8]:
        """Stamp of the state after ``length`` tokens (a whole number of pages): uint8 [1, bytes]."""
        page = length // self._page_size
        return self.pages(component, page - 1, page)


class PageChecker:
    """Checks each page on its way into and out of L3; give ``check`` to the cache as ``on_page``."""

    def __init__(self) -> None:
        self.checked = 0
        self.mismatches = 0

    def check(self, operation: str, component: str, key: PageKey, payload: memoryview) -> None:
        """Raises ``CorruptPayloadError`` if the bytes are not those of ``key``."""
        self.checked += 1
        if payload != stamp(key, len(payload)):
            self.mismatches += 1
            raise CorruptPayloadError(f"{operation} of a {component} page: wrong payload")
