"""How far apart the spare marks of a long prefix stand: sized by what a mark costs.

A mark is a boundary kept on purpose: a state, or the end of a whole window. With marks at the ends of turns
alone, giving up one page of a conversation's tail makes everything back to the mark before it useless, and a
session that came back whole has only one. A few spare marks along the way bound that loss.
"""

from __future__ import annotations

import math

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
