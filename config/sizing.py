"""Capacities in bytes to slots per component.

A pool's bytes are a hard total: the slots handed out never add up to more. L2 is one budget for all
components of a model that has several, in *units*: a slot takes as many whole ones as its bytes need. So is
an L1 on the CPU, whose units are bytes, since a slot's memory goes to the system and comes back from there.

An L1 on a GPU is split. What a conversation of ``n`` tokens costs a component::

    path, custom   bytes_per_token x n                              at least 1 page
    window(w)      bytes_per_token x max(page, min(w, n)) x marks   at least two windows
    checkpoint     state_bytes x marks                              at least 3 states

    marks = one where the last turn ended, and the spare ones that the tree keeps on the way

So the share of marks that fits short chats is far above that of long agent prompts. Without ``split`` marks get
the share ``s`` that serves both equally well: where a short one would want ``short`` and a long one ``long``,
a pool holds ``s / short`` of the short conversations that it could (marks are short), and
``(1 - s) / (1 - long)`` of the long ones (pages are). How long those are goes by the pool, for a small one is not
meant for prompts that hardly fit it (decision 0029). A component whose share would be under the least above gets
that, and the others share the rest; where the least would take more than two thirds of the pool (of states alone
five sixths), what one request needs: then next to nothing is reused, which ``config_warnings`` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from hicache.config.fields import Problem, nearest
from hicache.config.marks import keeps_marks, spacing_of
from hicache.config.tiers import HostConfig, PoolConfig, write_bytes
from hicache.types import ComponentSpec, ReuseRule

if TYPE_CHECKING:  # schema checks itself with this module
    from hicache.config.schema import HiCacheConfig

UNIT_ALIGNMENT = 8
MOST_UNITS = 8
"""The smallest slot is divided into at most so many units."""
MOST_WASTE = Fraction(1, 32)
"""Of a slot's units; where more parts keep it, no more are made."""
SHORT_TOKENS = (512, 8192)
LONG_TOKENS = (1024, 131_072)
"""A short and a long conversation, at least and at most."""
SHORT_CONVERSATIONS = 256
LONG_CONVERSATIONS = 4
"""How many of them a pool of path payload is to hold, between those bounds."""
SOME_MARKS = 8
MOST_SOME = Fraction(1, 4)
"""Each component that keeps marks has room for so many, or this part of the pool if that is less."""
MOST_LEAST = Fraction(2, 3)
MOST_LEAST_STATES = Fraction(5, 6)
"""Of a pool, for what next to nothing is reused without. A window that is longer than the paths beside it is of no
use; a state costs the same behind the shortest prompt."""
CHUNK_PARTS = 8
"""The part of a shared L1 that a chunk's windows may take while it is computed."""
TURN_MARKS = 1
"""Of a conversation: where its last turn ended."""


@dataclass(frozen=True, slots=True)
class TierBudget:
    """One rank's L1 or L2 where its components share it.

    Args:
        num_units, unit_bytes: of the allocation.
        costs: units of a slot, by component.
    """

    num_units: int
    unit_bytes: int
    costs: Mapping[str, int]

    @property
    def slots(self) -> dict[str, int]:
        """As many slots of each component as the whole holds."""
        return {name: self.num_units // cost for name, cost in self.costs.items()}


def device_slots(config: HiCacheConfig) -> dict[str, int]:
    """Slots of each component in one rank's L1. Of a shared one, of each alone."""
    budget = device_budget(config)
    return _slots(config, config.tiers.device) if budget is None else budget.slots


def device_budget(config: HiCacheConfig) -> TierBudget | None:
    """One rank's L1 where the components share it; None where there is one, or each has its own pool."""
    device, specs = config.tiers.device, config.model.specs()
    if not device.is_shared or len(specs) == 1:
        return None
    sizes = {spec.name: spec.slot_bytes(config.model.page_size) for spec in specs}
    return TierBudget(device.rank_bytes(config.ranks.count), 1, sizes)


def chunk_pages(config: HiCacheConfig, chunk_tokens: int) -> int:
    """Whole pages of a prefill chunk of at most ``chunk_tokens``, at least one, that L1 has room for.

    While it is computed, a chunk has slots of every window for all of its tokens. Where components share L1, others
    lose these, so they may take an eighth of it; where they do not, all of the window's pool beside the window itself.
    """
    page_size = config.model.page_size
    pages = max(1, chunk_tokens // page_size)
    windows = [spec for spec in config.model.specs() if spec.rule == ReuseRule.WINDOW]
    budget = device_budget(config)
    if windows and budget is not None:
        of_page = sum(budget.costs[spec.name] for spec in windows)
        return min(pages, max(1, budget.num_units // CHUNK_PARTS // of_page))
    slots = device_slots(config)
    for spec in windows:
        pages = min(pages, max(1, slots[spec.name] - needed_slots(spec, page_size)))
    return pages


def host_slots(config: HiCacheConfig) -> dict[str, int]:
    """Slots of each component in one rank's L2; empty without a host tier. Of a shared one, of each alone."""
    budget = host_budget(config)
    if budget is not None:
        return budget.slots
    return {} if config.tiers.host is None else _slots(config, config.tiers.host)


def host_budget(config: HiCacheConfig) -> TierBudget | None:
    """One rank's L2 where the components share it; None where there is none, or each has its own pool."""
    host, specs = config.tiers.host, config.model.specs()
    if host is None or not host.is_shared or len(specs) == 1:
        return None
    return share_units(specs, config.model.page_size, host.rank_bytes(config.ranks.count))


def share_units(specs: Sequence[ComponentSpec], page_size: int, capacity_bytes: int) -> TierBudget:
    """A budget of ``capacity_bytes`` in units: the smallest slot, or a part of it where that wastes less."""
    sizes = {spec.name: spec.slot_bytes(page_size) for spec in specs}
    smallest = min(sizes.values())
    aligned = [
        -(-smallest // (parts * UNIT_ALIGNMENT)) * UNIT_ALIGNMENT for parts in range(1, MOST_UNITS + 1)
    ]
    wasted = {
        unit: max(1 - Fraction(size, -(-size // unit) * unit) for size in sizes.values()) for unit in aligned
    }
    good = [unit for unit, waste in wasted.items() if waste <= MOST_WASTE]
    unit_bytes = good[0] if good else min(aligned, key=lambda unit: wasted[unit])
    costs = {name: -(-size // unit_bytes) for name, size in sizes.items()}
    return TierBudget(capacity_bytes // unit_bytes, unit_bytes, costs)


def slots_bytes(config: HiCacheConfig, slots: Mapping[str, int]) -> int:
    """Bytes that these slots take in one rank."""
    page_size = config.model.page_size
    return sum(slots[s.name] * s.slot_bytes(page_size) for s in config.model.specs() if s.name in slots)


def store_bytes(config: HiCacheConfig) -> tuple[int | None, ...]:
    """Bytes that one rank may keep in each store; None where we set no bound."""
    totals = (getattr(store, "capacity", None) for store in config.tiers.stores)
    return tuple(None if total is None else total // config.ranks.count for total in totals)


def needed_slots(spec: ComponentSpec, page_size: int) -> int:
    """The fewest slots of this component that let one request run."""
    if spec.is_checkpoint:
        return 2
    if spec.rule == ReuseRule.WINDOW:
        return -(-spec.window_tokens // page_size) + 1
    return 1


def useful_slots(spec: ComponentSpec, page_size: int) -> int:
    """With fewer next to nothing is reused: what a request needs to run, and beside it what another has left.

    Of states its own, the one that it began with, and the one that it leaves.
    """
    if spec.is_checkpoint:
        return 3
    return needed_slots(spec, page_size) * (2 if spec.rule == ReuseRule.WINDOW else 1)


def most_least(specs: Sequence[ComponentSpec]) -> Fraction:
    """The share of a pool that ``useful_slots`` of all components may take."""
    has_windows = any(spec.rule == ReuseRule.WINDOW for spec in specs)
    return MOST_LEAST if has_windows else MOST_LEAST_STATES


def conversation_bytes(
    specs: Sequence[ComponentSpec], page_size: int, num_tokens: int
) -> dict[str, Fraction]:
    """What a conversation of so many tokens costs each component."""
    spacing = spacing_of(specs, page_size)
    marks = TURN_MARKS + (Fraction(num_tokens, spacing) if spacing else 0)

    def cost(spec: ComponentSpec) -> Fraction:
        if spec.is_checkpoint:
            return spec.state_bytes * Fraction(marks)
        if spec.rule == ReuseRule.WINDOW:
            return (
                spec.bytes_per_token * max(page_size, min(spec.window_tokens, num_tokens)) * Fraction(marks)
            )
        return Fraction(spec.bytes_per_token * num_tokens)

    return {spec.name: cost(spec) for spec in specs}


def nominal_lengths(specs: Sequence[ComponentSpec], capacity_bytes: int) -> tuple[int, int]:
    """Tokens of a short and of a long conversation, as a pool of so many bytes is taken to be made for them."""
    path_bytes = sum(spec.bytes_per_token for spec in specs if spec.rule == ReuseRule.PATH)
    if not path_bytes:
        return SHORT_TOKENS[1], LONG_TOKENS[1]
    pool_tokens = capacity_bytes // path_bytes
    kinds = ((SHORT_TOKENS, SHORT_CONVERSATIONS), (LONG_TOKENS, LONG_CONVERSATIONS))
    short, long = (min(most, max(least, pool_tokens // count)) for (least, most), count in kinds)
    return short, long


def nominal_weights(
    specs: Sequence[ComponentSpec], page_size: int, capacity_bytes: int
) -> dict[str, Fraction]:
    """The shares of components in a fixed split that nobody wrote; they sum to 1."""
    names = [spec.name for spec in specs if keeps_marks(spec)]
    lengths = nominal_lengths(specs, capacity_bytes)
    short, long = (conversation_bytes(specs, page_size, length) for length in lengths)
    of_short, of_long = (
        sum((cost[name] for name in names), Fraction(0)) / sum(cost.values()) for cost in (short, long)
    )
    share = of_short / (of_short + 1 - of_long) if of_short else Fraction(0)
    return {
        name: cost
        / sum(short.values())
        * (share / of_short if name in names else (1 - share) / (1 - of_short))
        for name, cost in short.items()
    }


def share_out(
    specs: Sequence[ComponentSpec],
    page_size: int,
    *,
    capacity_bytes: int,
    split: Mapping[str, float] | None = None,
) -> dict[str, int]:
    """Slots of each component in a pool of ``capacity_bytes``.

    *Caller guarantees*: ``pool_problems`` found none.
    """
    if split is not None:
        return _by_weight(specs, page_size, capacity_bytes, {s.name: Fraction(split[s.name]) for s in specs})
    weights = nominal_weights(specs, page_size, capacity_bytes)
    least = _least_slots(specs, page_size, capacity_bytes)
    slots: dict[str, int] = {}
    sharing, left_bytes = list(specs), capacity_bytes
    while sharing:
        shares = _by_weight(sharing, page_size, left_bytes, weights)
        starved = [spec for spec in sharing if shares[spec.name] < least[spec.name]]
        if not starved:
            slots.update(shares)
            break
        for spec in starved:
            slots[spec.name] = least[spec.name]
            left_bytes -= slots[spec.name] * spec.slot_bytes(page_size)
            sharing.remove(spec)
    return {spec.name: slots[spec.name] for spec in specs}


def _least_slots(specs: Sequence[ComponentSpec], page_size: int, capacity_bytes: int) -> dict[str, int]:
    """Room for the marks of some requests, or what is of use at all, or where that is too much what one request needs."""
    sizes = {spec.name: spec.slot_bytes(page_size) for spec in specs}
    useful = {spec.name: useful_slots(spec, page_size) for spec in specs}
    roomy = dict(useful)
    for spec in specs:
        if keeps_marks(spec):
            some = SOME_MARKS * -(-max(1, spec.window_tokens) // page_size)
            affordable = int(capacity_bytes * MOST_SOME) // sizes[spec.name]
            roomy[spec.name] = max(useful[spec.name], min(some, affordable))
    for least in (roomy, useful):
        if sum(count * sizes[name] for name, count in least.items()) <= most_least(specs) * capacity_bytes:
            return least
    return {spec.name: needed_slots(spec, page_size) for spec in specs}


def pool_problems(
    pool: PoolConfig, specs: Sequence[ComponentSpec], page_size: int, *, num_ranks: int
) -> Iterator[Problem]:
    """Why this pool cannot serve these components, with the numbers; paths start at the pool."""
    key = "capacity" if pool.capacity is not None else "capacity_per_rank"
    capacity_bytes = pool.rank_bytes(num_ranks)
    sizes = {spec.name: spec.slot_bytes(page_size) for spec in specs}
    if isinstance(pool, HostConfig) and pool.is_shared and len(specs) > 1:
        budget = share_units(specs, page_size, capacity_bytes)
        sizes = {name: cost * budget.unit_bytes for name, cost in budget.costs.items()}
    needs = {spec.name: needed_slots(spec, page_size) * sizes[spec.name] for spec in specs}
    needed_bytes = sum(needs.values())
    if capacity_bytes < needed_bytes:
        parts = ", ".join(
            f"{spec.name} {needed_slots(spec, page_size)} x {sizes[spec.name]}" for spec in specs
        )
        total = needed_bytes * num_ranks if key == "capacity" else needed_bytes
        yield Problem(
            (key,),
            f"{capacity_bytes} bytes for each of {num_ranks} rank(s), but one request needs"
            f" {needed_bytes} ({parts}); expected at least {write_bytes(total)}",
        )
    split = pool.shares
    if split is None:
        return
    yield from _split_problems(split, specs)
    if set(split) != set(needs) or capacity_bytes < needed_bytes or not sum(split.values()):
        return
    slots = share_out(specs, page_size, capacity_bytes=capacity_bytes, split=split)
    for spec in specs:
        if slots[spec.name] < needed_slots(spec, page_size):
            yield Problem(
                ("split", spec.name),
                f"{split[spec.name]:g} of {capacity_bytes} bytes gives {slots[spec.name]} slots of"
                f" {spec.slot_bytes(page_size)}, but one request needs {needed_slots(spec, page_size)};"
                f" expected at least {needs[spec.name] / capacity_bytes:.4f}",
            )


def _split_problems(split: Mapping[str, float], specs: Sequence[ComponentSpec]) -> Iterator[Problem]:
    names = [spec.name for spec in specs]
    for name in split:
        if name not in names:
            near = nearest(name, names)
            hint = f"did you mean {near}? " if near else ""
            yield Problem(("split", name), f"unknown component; {hint}the components are {', '.join(names)}")
    missing = [name for name in names if name not in split]
    if missing:
        yield Problem(("split",), f"says nothing about {', '.join(missing)}; expected every component")


def _by_weight(
    specs: Sequence[ComponentSpec], page_size: int, capacity_bytes: int, weights: Mapping[str, Fraction]
) -> dict[str, int]:
    total = sum((weights[spec.name] for spec in specs), Fraction(0))
    return {
        spec.name: int(capacity_bytes * weights[spec.name] / total) // spec.slot_bytes(page_size)
        for spec in specs
    }


def _slots(config: HiCacheConfig, pool: PoolConfig) -> dict[str, int]:
    return share_out(
        config.model.specs(),
        config.model.page_size,
        capacity_bytes=pool.rank_bytes(config.ranks.count),
        split=pool.shares,
    )
