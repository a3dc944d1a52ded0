"""What both cores refuse to be built with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hicache.errors import ConfigError, ProtocolError
from hicache.radix.interface import TreeConfig
from hicache.radix.ordering import make_ordering
from hicache.types import MAX_PAGE_SIZE, MAX_PRIORITY

CHANGEABLE = (
    "eviction",
    "granularity",
    "tail_tokens",
    "write",
    "pauses_writes",
    "admission",
    "store_admission",
    "has_store",
    "max_stored_pages",
)
"""What of a ``TreeConfig`` may be another while the tree serves."""


def check_priority(priority: object) -> None:
    """Raises ``ValueError`` unless ``priority`` is a whole number of 0 to ``MAX_PRIORITY``."""
    if not isinstance(priority, int) or isinstance(priority, bool) or not 0 <= priority <= MAX_PRIORITY:
        raise ValueError(f"priority: expected a whole number of 0 to {MAX_PRIORITY}, got {priority!r:.80}")


def check_config(config: TreeConfig) -> None:
    """What the tree itself relies on; the YAML's own checks are stricter and name the key.

    Raises:
        ConfigError: with one line for each problem.
    """
    problems = []
    names = [spec.name for spec in config.components]
    if not names:
        problems.append("components: a model needs at least one")
    if len(set(names)) != len(names):
        problems.append(f"components: names must differ, got {names}")
    if not 1 <= config.page_size <= MAX_PAGE_SIZE:
        problems.append(f"page_size: {config.page_size} is not within 1 to {MAX_PAGE_SIZE}")
    if config.write not in ("write_through", "write_through_selective", "write_back"):
        problems.append(f"write: {config.write!r} is not a write policy")
    if config.admission not in ("all", "ranked"):
        problems.append(f"admission: {config.admission!r} is not all or ranked")
    if config.store_admission not in ("all", "unless_over"):
        problems.append(f"store_admission: {config.store_admission!r} is not all or unless_over")
    if config.granularity not in ("page", "leaf"):
        problems.append(f"granularity: {config.granularity!r} is not page or leaf")
    if config.tail_tokens < 0:
        problems.append(f"tail_tokens: {config.tail_tokens} is below 0")
    if config.mark_spacing < 0 or config.mark_spacing % max(1, config.page_size):
        problems.append(f"mark_spacing: {config.mark_spacing} is no whole number of pages")
    problems += [
        f"device_slots: {name} needs at least one slot"
        for name in names
        if config.device_slots.get(name, 0) < 1
    ]
    problems += _budget_problems("host", config.host_units, config.host_costs, config.host_slots)
    problems += _budget_problems("device", config.device_units, config.device_costs, config.device_slots)
    if config.has_store and not any(config.host_slots.values()):
        problems.append("has_store: pages travel to L3 through L2, which has no slots")
    try:
        make_ordering(config.eviction)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)


def _budget_problems(tier: str, units: int, costs: Mapping[str, int], slots: Mapping[str, int]) -> list[str]:
    if not costs:
        return [] if not units else [f"{tier}_units: nothing shares them; name {tier}_costs, too"]
    if any(cost < 1 for cost in costs.values()):
        return [f"{tier}_costs: at least one unit a slot expected, got {dict(costs)}"]
    alone = {name: units // cost for name, cost in costs.items()}
    if dict(slots) != alone:
        return [f"{tier}_slots: {units} units hold {alone}, not {dict(slots)}"]
    return []


def check_change(before: TreeConfig, config: TreeConfig) -> bool:
    """Whether what leaves first may be another under ``config``.

    Raises:
        ConfigError: it is refused.
        ProtocolError: it differs in what cannot change while a tree serves.
    """
    check_config(config)
    allowed = replace(before, **{name: getattr(config, name) for name in CHANGEABLE})
    if allowed != config:
        raise ProtocolError(f"only {', '.join(CHANGEABLE)} can change while a tree serves")
    return (before.eviction, before.tail_tokens) != (config.eviction, config.tail_tokens)
