"""The private memory that pages pass through on their way between host slots and a store.

A store reads and writes *staging* memory, never host slots. So a call that was given up, however long
its threads go on, can neither fill a slot that belongs to somebody else by now nor store what a new
owner wrote there. The price is one memcpy. Memory of a call that did not end well is left to it; only
a clean end gives it back for reuse. Staging is allocated, never waited for, so no two transfers can
block each other over it; the number of calls under way bounds it.
"""

from __future__ import annotations

import numpy as np
import torch

from hicache.radix.actions import Slots
from hicache.transfer.copy import PageCopier
from hicache.transfer.layout import Layout, SlotView
from hicache.types import Tier

STAGING_BYTES = 16 << 20
"""A batch holds at most so many bytes, but always one page."""
ALIGNMENT = 64


class StagedPages:
    """Pages of one component in a buffer.

    Args:
        payloads: each page's bytes.
        end: where in the buffer the next pages may begin.
    """

    def __init__(self, view: SlotView, host: SlotView, copier: PageCopier, *, end: int) -> None:
        self.payloads = page_views(view)
        self.end = end
        self._view = view
        self._host = host
        self._copier = copier

    def copy_from_host(self, places: Slots) -> None:
        """Fill the first ``len(places)`` pages from these places in L2."""
        self._copier.copy(self._host, places, self._view, np.arange(len(places), dtype=np.int64))

    def copy_to_host(self, places: Slots) -> None:
        """Write the first ``len(places)`` pages to these places in L2."""
        self._copier.copy(self._view, np.arange(len(places), dtype=np.int64), self._host, places)


class Staging:
    """Buffers of one size for batches of pages.

    Args:
        layout: says where L2 has what, and how large a page may be.
        batch_pages: the most pages in a batch.
        max_spare: how many buffers are kept for reuse.

    *Thread*: one event loop.
    """

    def __init__(self, layout: Layout, copier: PageCopier, *, batch_pages: int, max_spare: int) -> None:
        slot_bytes = max(layout.slot_bytes.values())
        self.batch_pages = batch_pages
        self.buffer_bytes = max(min(STAGING_BYTES, batch_pages * slot_bytes), slot_bytes)
        self._alloc_bytes = self.buffer_bytes + ALIGNMENT * batch_pages
        self._layout = layout
        self._copier = copier
        self._max_spare = max_spare
        self._spare: list[torch.Tensor] = []

    def take(self) -> torch.Tensor:
        """A buffer nobody else uses: uint8, ``buffer_bytes`` and room to align each page."""
        return self._spare.pop() if self._spare else torch.empty(self._alloc_bytes, dtype=torch.uint8)

    def give_back(self, buffer: torch.Tensor) -> None:
        """*Caller guarantees*: the call that used it ended without an exception."""
        if len(self._spare) < self._max_spare:
            self._spare.append(buffer)

    def pages(self, buffer: torch.Tensor, component: str, num_pages: int, *, offset: int = 0) -> StagedPages:
        """Room for pages of a component in a buffer from byte ``offset`` on."""
        host = self._layout.view(component, Tier.HOST)
        view = staged(buffer, offset, num_pages, host)
        end = offset + num_pages * host.slot_bytes
        return StagedPages(view, host, self._copier, end=-(-end // ALIGNMENT) * ALIGNMENT)


def staged(buffer: torch.Tensor, offset: int, num_slots: int, like: SlotView) -> SlotView:
    """``num_slots`` slots of the same shape as another view's, in a buffer from ``offset`` on."""
    part = buffer[offset : offset + num_slots * like.slot_bytes]
    payload = part.view(like.payload.dtype).view(num_slots, like.num_layers, -1)
    return SlotView("staging", payload, like.slot_bytes)


def page_views(view: SlotView) -> list[memoryview]:
    """Each slot's bytes. *Caller guarantees*: page first."""
    return [memoryview(row) for row in view.rows().numpy()]
