"""What an L1 cannot take even when it is empty: found out before anything leaves for it."""

from __future__ import annotations

from collections.abc import Sequence

from hicache.radix.forest import Forest
from hicache.radix.leases import LeaseState
from hicache.radix.node import DEVICE


def never_fits(forest: Forest, lease: LeaseState) -> dict[str, int]:
    """What the whole pools lack for the prompt with its mark, less what is free; empty if it fits.

    Without its mark it could not be reused, so it is not to displace what can. Path payload alone can be
    reused as far as it goes.
    """
    if all(rule.is_prefix for rule in forest.rules):
        return {}
    page = forest.page_size
    end = -(-lease.prompt_len // page) * page
    wanted = [
        # In one budget the state that it leaves is not to displace the prompt's own pages.
        (end - rule.span(end)) // page if rule.keeps_pages else 1 + pools[DEVICE].is_shared
        for rule, pools in zip(forest.rules, forest.pools, strict=True)
    ]
    return {
        spec.name: needed - pools[DEVICE].num_free
        for spec, pools, needed in zip(forest.specs, forest.pools, forest.needs(wanted, DEVICE), strict=True)
        if needed > pools[DEVICE].capacity
    }


def is_too_much(forest: Forest, lease: LeaseState, wanted: Sequence[int]) -> bool:
    """Whether an L1 of one budget lacks room for ``wanted`` slots beside what the lease holds itself.

    Of what it locks only path payload is counted; windows may share their nodes with what can still leave.
    Whoever asks a component's own pool for more than there is gets all that it can give up.
    """
    if not any(pools[DEVICE].is_shared for pools in forest.pools):
        return False
    held = [
        len(owned) + (lease.published // forest.page_size if rule.is_prefix else 0)
        if rule.keeps_pages
        else int(state is not None)
        for rule, owned, state in zip(forest.rules, lease.owned, lease.states, strict=True)
    ]
    together = [max(0, more) + own for more, own in zip(wanted, held, strict=True)]
    return any(
        needed > pools[DEVICE].capacity
        for needed, pools in zip(forest.needs(together, DEVICE), forest.pools, strict=True)
    )
