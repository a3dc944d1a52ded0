"""What goes between scheduler and workers: which blocks are copied to or from which slots, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class CopyPart:
    """Blocks of one group, and the pages of the shared pool that they are copied from or to.

    Args:
        component, group: indices into ``Geometry.components`` and the component's ``groups``.
        slots, blocks: int64 ``[num_blocks]`` each, in the same order.
    """

    component: int
    group: int
    slots: Ids
    blocks: Ids


@dataclass(frozen=True, slots=True, eq=False)
class CopyJob:
    """One load (slots to blocks) or save (blocks to slots) of one request."""

    number: int
    request: str
    parts: tuple[CopyPart, ...]
