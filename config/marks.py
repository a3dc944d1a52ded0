"""How far apart the spare marks of a long prefix stand: sized by what a mark costs.

A mark is a boundary kept on purpose: a state, or the end of a whole window. With marks at the ends of turns
alone, giving up one page of a conversation's tail makes everything back to the mark before it useless, and a
session that came back whole has only one. A few spare marks along the way bound that loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hicache.types import ComponentSpec, ReuseRule

SPARE_FACTOR = 1448
"""Tokens between spare marks for a mark that costs as much as one token of a path: 64 blocks of 512 for one
that costs a block. Picked on agent traffic; within half a point from 1/2 to 3/2 of it (decision 0015)."""


def spare_spacing(mark_tokens: float) -> int:
    """Tokens between spare marks, at least 1.

    Spare marks ``k`` apart take ``mark_tokens / k`` of the room, and a cut tail wastes ``k / 2`` tokens. The
    sum is least where ``k`` grows as the square root of the cost.

    Args:
        mark_tokens: bytes of one mark in tokens of path payload.
    """
    return max(1, round(SPARE_FACTOR * math.sqrt(mark_tokens)))


def spacing_of(specs: Sequence[ComponentSpec], page_size: int) -> int:
    """The spacing for a model, in tokens and whole pages; 0 where it needs no marks, or has no path to measure by."""
    path_bytes = sum(spec.bytes_per_token for spec in specs if spec.rule == ReuseRule.PATH)
    cost_bytes = sum(mark_bytes(spec, page_size) for spec in specs if keeps_marks(spec))
    if not path_bytes or not cost_bytes:
        return 0
    return max(1, round(spare_spacing(cost_bytes / path_bytes) / page_size)) * page_size


def keeps_marks(spec: ComponentSpec) -> bool:
    """Whether the component keeps something at marks, and nothing between them."""
    return spec.is_checkpoint or spec.rule == ReuseRule.WINDOW


def mark_bytes(spec: ComponentSpec, page_size: int) -> int:
    """Bytes of one mark: a state, or a whole window."""
    return spec.state_bytes or spec.bytes_per_token * max(spec.window_tokens, page_size)
