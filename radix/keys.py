"""Token arrays, and what a page is called in L3.

::

    seed   = H(version, identity, namespace)                 one per subtree
    link 0 = H(seed,     tokens of page 0)                   the token chain
    link i = H(link i-1, tokens of page i)
    key    = H(link i, component)                            one per component and page

``H`` is BLAKE3 over an injective encoding: every part carries a tag and its length, and *absent* has
a tag of its own. A key therefore depends on identity, namespace, component and all tokens up to the
page's end, and on nothing else: no process, no hash seed, no tree shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from typing import cast

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from hicache.types import MAX_TOKEN_ID, ComponentSpec, Namespace, PageKey

KEY_BYTES = 32
FORMAT_VERSION = 1

_REMEDY = "pass what hicache.radix.keys.as_tokens makes of them"


@dataclass(frozen=True, slots=True)
class Identity:
    """Which bytes mean the same. Two caches share pages exactly if all of this is equal.

    Args:
        model, weights: the served model and a digest or revision of its weights.
        dtype: of the payload, with its quantisation's scale format where there is one.
        layout: of a page's bytes in host memory and stores.
        page_size: tokens a page.
        tp_size, tp_rank, pp_size, pp_rank, cp_size, cp_rank: rank geometry.
    """

    model: str
    weights: str | None = None
    dtype: str = "uint8"
    layout: str = "page_first"
    page_size: int = 1
    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    cp_size: int = 1
    cp_rank: int = 0

    def digest(self) -> bytes:
        parts = ((field.name, getattr(self, field.name)) for field in fields(self))
        return blake3(encode_parts("identity", *(part for pair in parts for part in pair))).digest()


def encode_parts(*parts: str | int | bytes | None) -> bytes:
    """Injective encoding of a sequence: equal bytes only for equal parts, absent unlike empty."""
    out = bytearray()
    for part in parts:
        if part is None:
            out += b"n"
            continue
        match part:
            case bytes():
                tag, raw = b"b", part
            case str():
                tag, raw = b"s", part.encode("utf-8", "surrogatepass")
            case int():
                tag, raw = b"i", str(part).encode()
        out += tag + len(raw).to_bytes(8, "little") + raw
    return bytes(out)


def namespace_seed(identity: bytes, namespace: Namespace) -> bytes:
    """The digest a namespace's token chain starts from; 32 bytes."""
    return blake3(encode_parts("hicache", FORMAT_VERSION, identity, *astuple(namespace))).digest()


def chain_links(previous: bytes, tokens: NDArray[np.int32], page_size: int) -> list[bytes]:
    """Chain the pages of ``tokens`` (int32 [n * page_size]) onto ``previous``; one link a page."""
    raw = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    page_bytes = 4 * page_size
    links = []
    for begin in range(0, len(raw), page_bytes):
        hasher = blake3(previous)
        hasher.update(raw[begin : begin + page_bytes])
        previous = hasher.digest()
        links.append(previous)
    return links


class ComponentKeys:
    """Turns links into the page keys of one component."""

    def __init__(self, spec: ComponentSpec) -> None:
        self._suffix = encode_parts(
            "component",
            spec.name,
            str(spec.rule),
            spec.num_layers,
            spec.bytes_per_token,
            spec.state_bytes,
        )

    def key(self, link: bytes) -> PageKey:
        """The key of the page whose chain ends with ``link``."""
        return PageKey(blake3(link + self._suffix).digest())

    def keys(self, links: Iterable[bytes]) -> tuple[PageKey, ...]:
        """The same for each."""
        return tuple(self.key(link) for link in links)


def page_keys(
    identity: bytes,
    spec: ComponentSpec,
    tokens: Sequence[int] | NDArray[np.integer],
    page_size: int,
    namespace: Namespace,
) -> tuple[PageKey, ...]:
    """Keys of all whole pages of ``tokens``, the slow and plain way (for tests and tools)."""
    array = as_tokens(tokens)
    whole = array[: len(array) // page_size * page_size]
    return ComponentKeys(spec).keys(chain_links(namespace_seed(identity, namespace), whole, page_size))


def token_buffer(tokens: object) -> NDArray[np.int32] | NDArray[np.int64]:
    """The memory that tokens lie in, if a core can read them there; it is not copied.

    Args:
        tokens: an array, or another object with the buffer protocol: int32 or int64 [num_tokens],
            contiguous, aligned, in native byte order and writeable.

    Raises:
        ValueError: it is not; says what is wrong and what to do.
    """
    try:
        array = tokens if isinstance(tokens, np.ndarray) else np.asarray(memoryview(tokens))  # type: ignore[arg-type]  # raises then
    except TypeError:
        raise ValueError(f"tokens are a {type(tokens).__name__}; {_REMEDY}") from None
    if array.dtype not in (np.int32, np.int64):
        raise ValueError(f"tokens have dtype {array.dtype.str}; {_REMEDY}")
    if array.ndim != 1:
        raise ValueError(f"tokens have shape {array.shape}, expected one dimension; {_REMEDY}")
    if not array.flags.c_contiguous:
        raise ValueError(f"tokens are not contiguous, they lie {array.strides[0]} bytes apart; {_REMEDY}")
    if not array.flags.writeable:
        raise ValueError(f"tokens are read-only; {_REMEDY}")
    if not array.flags.aligned:
        raise ValueError(f"tokens are not aligned to {array.itemsize} bytes; {_REMEDY}")
    return array


def as_tokens(tokens: object) -> NDArray[np.int32]:
    """Check token ids and give them as an array that a core takes (see ``token_buffer``).

    Args:
        tokens: a one-dimensional array or sequence of integers, each ``0 <= id < 2**31``. Such an
            array of int32 is returned as it is, all else is copied.

    Raises:
        ValueError: wrong shape, not integers, or an id out of range; names the first position.
    """
    if isinstance(tokens, np.ndarray):
        array = tokens
    else:
        try:
            array = np.asarray(tokens)
        except (ValueError, OverflowError) as error:
            raise ValueError(f"tokens are not an array of integers: {error}") from error
        if isinstance(tokens, list | tuple) and bool in set(map(type, tokens)):
            raise ValueError(_not_integer(tokens))  # the array of a mixed list would take True for 1
    if array.ndim != 1:
        raise ValueError(f"tokens have shape {array.shape}, expected one dimension")
    if array.size == 0:
        return np.empty(0, dtype=np.int32)
    if array.dtype == np.int32:
        if array.min() < 0:
            position = int(np.argmax(array < 0))
            raise ValueError(f"token {int(array[position])} at position {position} is negative")
        return np.require(array, np.int32, ["C", "A", "W"])
    if array.dtype.kind not in "iu":
        raise ValueError(_not_integer(array if tokens is array else tokens))
    if array.min() < 0 or array.max() > MAX_TOKEN_ID:
        position = int(np.argmax((array < 0) | (array > MAX_TOKEN_ID)))
        value = int(array[position])
        problem = "is negative" if value < 0 else f"is over {MAX_TOKEN_ID}"
        raise ValueError(f"token {value} at position {position} {problem}")
    return np.require(array, np.int32, ["C", "A", "W"])


def _not_integer(tokens: object) -> str:
    """Name the first item that is no integer; a mixed list has lost that in its array."""
    items = tokens.tolist() if isinstance(tokens, np.ndarray) else list(cast("Iterable[object]", tokens))
    sizes: list[int] = []
    for position, value in enumerate(items):
        if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
            return f"token {value!r} at position {position} is not an integer"
        sizes.append(abs(int(value)))
    position = sizes.index(max(sizes))
    return f"token {items[position]} at position {position} is over {MAX_TOKEN_ID}"
