"""What stores check of their callers before they change anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hicache.errors import ProtocolError
from hicache.tiers.framing import KEY_BYTES, MAX_COMPONENT_BYTES
from hicache.tiers.store import PageTarget, StoredPage
from hicache.types import PageKey


def check_keys(keys: Iterable[PageKey]) -> None:
    """Raise ``ProtocolError`` unless all keys have 32 bytes."""
    for key in keys:
        if len(key) != KEY_BYTES:
            raise ProtocolError(f"a page key has {KEY_BYTES} bytes, {key!r} has {len(key)}")


def check_pages(pages: Sequence[StoredPage]) -> None:
    """Raise ``ProtocolError`` unless all pages can be framed and hang under another page or none."""
    for page in pages:
        check_keys((page.key,) if page.parent is None else (page.key, page.parent))
        if page.parent == page.key:
            raise ProtocolError(f"page {page.key.hex()} is its own parent")
        _check_component(page.component)
        if not page.payload.c_contiguous:
            raise ProtocolError(f"payload of page {page.key.hex()} is not contiguous")


def check_targets(targets: Sequence[PageTarget]) -> None:
    """Raise ``ProtocolError`` unless all targets can be filled."""
    for target in targets:
        check_keys((target.key,))
        _check_component(target.component)
        if target.payload.readonly or not target.payload.c_contiguous:
            raise ProtocolError(f"target of page {target.key.hex()} is not writable and contiguous")


def _check_component(component: str) -> None:
    num_bytes = len(component.encode())
    if not 1 <= num_bytes <= MAX_COMPONENT_BYTES:
        raise ProtocolError(
            f"component name {component!r} has {num_bytes} bytes, 1 to {MAX_COMPONENT_BYTES} fit a header"
        )
