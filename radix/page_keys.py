"""Pages and their keys in two buffers, so that a long prompt's come out of a core without an object each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from hicache.radix.keys import KEY_BYTES
from hicache.types import PageKey

_PIECE = 1024  # items made by one call into numpy, which does not let other threads run meanwhile


@dataclass(frozen=True, slots=True, eq=False)
class PageKeys(Sequence[tuple[int, PageKey]]):
    """A sequence of (page index, key); the objects are made when asked for.

    Args:
        indices: int64 [num_pages], ascending.
        raw: uint8 [num_pages * KEY_BYTES], the keys one after the other.
    """

    indices: NDArray[np.int64]
    raw: NDArray[np.uint8]

    @classmethod
    def of(cls, indices: Sequence[int], keys: Iterable[PageKey]) -> PageKeys:
        """One key an index."""
        return cls(np.array(indices, dtype=np.int64), np.frombuffer(b"".join(keys), dtype=np.uint8))

    def pages(self) -> Iterator[int]:
        """The page indices."""
        for begin in range(0, len(self.indices), _PIECE):
            yield from self.indices[begin : begin + _PIECE].tolist()

    def keys(self) -> Iterator[PageKey]:
        """The keys, in the same order."""
        for begin in range(0, len(self.raw), _PIECE * KEY_BYTES):
            piece = self.raw[begin : begin + _PIECE * KEY_BYTES].tobytes()
            for at in range(0, len(piece), KEY_BYTES):
                yield PageKey(piece[at : at + KEY_BYTES])

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[tuple[int, PageKey]]:
        return zip(self.pages(), self.keys(), strict=True)

    @overload
    def __getitem__(self, at: int) -> tuple[int, PageKey]: ...
    @overload
    def __getitem__(self, at: slice) -> PageKeys: ...
    def __getitem__(self, at: int | slice) -> tuple[int, PageKey] | PageKeys:
        keys = self.raw.reshape(-1, KEY_BYTES)[at]
        if isinstance(at, slice):
            return PageKeys(self.indices[at], keys.reshape(-1))
        return int(self.indices[at]), PageKey(keys.tobytes())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))
