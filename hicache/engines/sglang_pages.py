"""Where the bytes of one page lie in a host pool of SGLang, and how they get into one run and back.

::

    host pool      K: |p0|p1|p2|...   V: |p0|p1|p2|...      a page is one or more regions, each in steps
    staging row    | K of p1 | V of p1 |                    one run: the payload of a stored page

A pool tells the regions of a page (``get_page_buffer_meta``). In every pool that can, a region of the next page lies
one fixed step further, so all pages are a few strided tensors, and a batch is one copy for each of them. A pool that
has no such regions (a layer-first indexer, a state with side states) hands out flat pages instead, one by one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from hicache.errors import ConfigError
from hicache.transfer.copy import PageCopier
from hicache.transfer.layout import WORD_BYTES, SlotView

PageNumbers = NDArray[np.int64]
_BUFFERS = ("kv_buffer", "index_k_with_scale_buffer")
"""Where pools keep their tensors."""


class HostPool(Protocol):
    """What is used of SGLang's ``HostKVCache``."""

    page_size: int
    """Slots a page: tokens, or 1 where a slot is a state."""
    size: int
    """Slots of the pool."""
    layout: str

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]] | None:
        """Address and bytes of each part of the pages at these slots; None where it has none to give."""
        ...

    def get_data_page(self, index: int) -> torch.Tensor:
        """The page that begins at slot ``index``, flat."""
        ...

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """An empty page of that shape."""
        ...

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        """Write a flat page back to slot ``index``."""
        ...


class PoolPages(Protocol):
    """Copies pages between a pool and rows of staging memory.

    *Thread*: any; the caller owns the pages meanwhile.
    """

    page_bytes: int
    form: str
    """How a page's bytes are ordered; part of its name in the store."""

    def gather(self, numbers: PageNumbers, rows: torch.Tensor) -> None:
        """Pages into ``rows``: uint8 ``[len(numbers), page_bytes]``, contiguous."""
        ...

    def scatter(self, rows: torch.Tensor, numbers: PageNumbers) -> None:
        """The opposite."""
        ...


def open_pages(name: str, pool: HostPool, copier: PageCopier) -> PoolPages | None:
    """How pages of this pool are copied; None for a logical anchor, which has no bytes.

    Raises:
        ConfigError: the pool can be read neither by regions nor as flat pages.
    """
    if is_logical(pool):
        return None
    pages: PoolPages
    try:
        pages = RegionPages(name, pool, copier)
    except (AttributeError, NotImplementedError, ValueError):  # this layout has no regions, or not in steps
        try:
            pages = FlatPages(pool)
        except (AttributeError, NotImplementedError, ValueError) as error:
            problem = (
                f"pages of the pool {name} cannot be stored with {pool.layout!r} ({error}); choose page_first"
            )
            raise ConfigError([f"--hicache-mem-layout: {problem}"]) from error
    return pages if pages.page_bytes else None


def is_logical(pool: HostPool) -> bool:
    """Whether it only counts slots, for others: their bytes are in other pools."""
    return getattr(pool, "kv_buffer", pool) is None


@dataclass(frozen=True, slots=True)
class _Group:
    """Regions of equal size, one fixed step apart: part of every page."""

    base: int
    region_bytes: int
    num_regions: int
    region_step: int
    page_step: int


class RegionPages:
    """Pages that are regions in fixed steps.

    Raises:
        NotImplementedError, ValueError: the pool has none.
    """

    def __init__(self, name: str, pool: HostPool, copier: PageCopier) -> None:
        num_pages = pool.size // pool.page_size
        starts, sizes, steps = _probe(pool, num_pages)
        self.page_bytes = sum(sizes)
        self.form = f"regions {','.join(map(str, sizes))}"
        self._copier = copier
        self._where = f"the host pool {name}"
        # The memory lives as long as we may look at it, even if the pool lets go of it.
        self._owners = [getattr(pool, name, None) for name in _BUFFERS]
        groups = _groups(starts, sizes, steps)
        numbers = [n for g in groups for n in (g.base, g.region_bytes, g.region_step, g.page_step)]
        is_worded = not any(number % WORD_BYTES for number in numbers)
        self._dtype = torch.int64 if is_worded else torch.uint8
        self._parts: list[tuple[SlotView, int]] = []
        """Each group of the pool, and where it begins in a row."""
        offset = 0
        for group in groups:
            self._parts.append((self._view(group, num_pages), offset))
            offset += group.region_bytes * group.num_regions

    def gather(self, numbers: PageNumbers, rows: torch.Tensor) -> None:
        here = np.arange(len(numbers), dtype=np.int64)
        for part, row_part in self._pairs(rows):
            part.check(numbers)
            self._copier.copy(part, numbers, row_part, here)

    def scatter(self, rows: torch.Tensor, numbers: PageNumbers) -> None:
        here = np.arange(len(numbers), dtype=np.int64)
        for part, row_part in self._pairs(rows):
            part.check(numbers)
            self._copier.copy(row_part, here, part, numbers)

    def _pairs(self, rows: torch.Tensor) -> list[tuple[SlotView, SlotView]]:
        words = rows.view(self._dtype)
        item = words.element_size()
        pairs = []
        for part, offset in self._parts:
            _, num_regions, region_words = part.payload.shape
            end = offset // item + num_regions * region_words
            payload = words[:, offset // item : end].view(len(rows), num_regions, region_words)
            pairs.append((part, SlotView("staging", payload, part.slot_bytes)))
        return pairs

    def _view(self, group: _Group, num_pages: int) -> SlotView:
        item = self._dtype.itemsize
        last_page = (num_pages - 1) * group.page_step
        num_bytes = last_page + (group.num_regions - 1) * group.region_step + group.region_bytes
        raw = (ctypes.c_uint8 * num_bytes).from_address(group.base)
        flat = torch.frombuffer(raw, dtype=self._dtype)
        payload = flat.as_strided(
            (num_pages, group.num_regions, group.region_bytes // item),
            (group.page_step // item, group.region_step // item, 1),
        )
        return SlotView(self._where, payload, group.region_bytes * group.num_regions)


class FlatPages:
    """Pages that the pool itself packs and unpacks, one at a time."""

    def __init__(self, pool: HostPool) -> None:
        sample = pool.get_dummy_flat_data_page()
        self.page_bytes = sample.nbytes
        self.form = f"flat {self.page_bytes}"
        self._dtype = sample.dtype
        self._pool = pool
        if pool.get_data_page(0).nbytes != self.page_bytes:
            raise ValueError(f"a page has {pool.get_data_page(0).nbytes} bytes, {self.page_bytes} expected")

    def gather(self, numbers: PageNumbers, rows: torch.Tensor) -> None:
        for row, number in zip(rows, numbers.tolist(), strict=True):
            page = self._pool.get_data_page(number * self._pool.page_size)
            row.copy_(page.contiguous().view(torch.uint8).reshape(-1))

    def scatter(self, rows: torch.Tensor, numbers: PageNumbers) -> None:
        for row, number in zip(rows, numbers.tolist(), strict=True):
            self._pool.set_from_flat_data_page(number * self._pool.page_size, row.view(self._dtype))


class TensorPages:
    """Pages that were handed over as flat tensors of one size; only to be read."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.page_bytes = tensors[0].nbytes if tensors else 1
        self.form = "tensor"
        self._tensors = tensors

    def gather(self, numbers: PageNumbers, rows: torch.Tensor) -> None:
        for row, number in zip(rows, numbers.tolist(), strict=True):
            row.copy_(self._tensors[number].contiguous().view(torch.uint8).reshape(-1))

    def scatter(self, rows: torch.Tensor, numbers: PageNumbers) -> None:
        for row, number in zip(rows, numbers.tolist(), strict=True):
            self._tensors[number].view(torch.uint8).copy_(row)


def page_numbers(pool: HostPool, host_indices: torch.Tensor, num_pages: int) -> PageNumbers:
    """Slots of whole pages to page numbers.

    Args:
        host_indices: int64 ``[num_pages * page_size]``.

    Raises:
        ValueError: another number of slots, or a page that does not begin at a multiple of the page size.
    """
    page_size = pool.page_size
    if host_indices.numel() != num_pages * page_size:
        raise ValueError(
            f"{num_pages} pages of {page_size} slots need {num_pages * page_size} indices, got {host_indices.numel()}"
        )
    starts: PageNumbers = host_indices[::page_size].to("cpu", torch.int64).numpy()
    if (starts % page_size).any():
        raise ValueError(f"a page begins within another one: {starts[starts % page_size != 0][0]}")
    return starts // page_size


def _probe(pool: HostPool, num_pages: int) -> tuple[list[int], list[int], list[int]]:
    """Address and size of each region of the first page, and its step to the next page."""
    metas = []
    for number in (0, min(1, num_pages - 1), num_pages - 1):
        first = number * pool.page_size
        meta = pool.get_page_buffer_meta(torch.arange(first, first + pool.page_size, dtype=torch.int64))
        if meta is None or not meta[0]:
            raise ValueError("it has no regions")
        metas.append((list(map(int, meta[0])), list(map(int, meta[1]))))
    (starts, sizes), (second, _), (last, _) = metas
    steps = [after - before for before, after in zip(starts, second, strict=True)] if num_pages > 1 else sizes
    reached = [start + (num_pages - 1) * step for start, step in zip(starts, steps, strict=True)]
    if any(size != sizes for _, size in metas) or reached != last or min(steps) <= 0:
        raise ValueError("its pages do not lie in fixed steps")
    return starts, sizes, steps


def _groups(starts: Sequence[int], sizes: Sequence[int], steps: Sequence[int]) -> list[_Group]:
    """Neighbours of equal size, step and spacing put together, in order: fewer copies for the same bytes."""
    groups: list[_Group] = []
    for start, size, page_step in zip(starts, sizes, steps, strict=True):
        last = groups[-1] if groups else None
        if last is not None and (size, page_step) == (last.region_bytes, last.page_step):
            spacing = start - last.base if last.num_regions == 1 else last.region_step
            if spacing > 0 and start == last.base + last.num_regions * spacing:
                groups[-1] = _Group(last.base, size, last.num_regions + 1, spacing, page_step)
                continue
        groups.append(_Group(start, size, 1, size, page_step))
    return groups
