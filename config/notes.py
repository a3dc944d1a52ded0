"""What a configuration comes to where that is more than was written: sizes that are rounded up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hicache.config.sizing import host_budget

if TYPE_CHECKING:  # schema checks itself with what this module imports
    from hicache.config.schema import HiCacheConfig


def size_notes(config: HiCacheConfig) -> list[str]:
    """What is rounded up, and to what; one line each, key first."""
    return [*_padded_states(config), *_partly_used_units(config)]


def _padded_states(config: HiCacheConfig) -> Iterator[str]:
    for name, component in config.model.components.items():
        asked, taken = component.state_bytes or 0, component.spec(name).state_bytes
        if taken > asked:
            yield (
                f"model.components.{name}.state_bytes: {asked} bytes do not divide over {component.layers} layers; a"
                f" state takes {taken}, of which {taken - asked} are padding"
            )


def _partly_used_units(config: HiCacheConfig) -> Iterator[str]:
    """Of a shared L2; a slot of a shared L1 takes its bytes and no more."""
    budget = host_budget(config)
    if budget is None:
        return
    for spec in config.model.specs():
        slot_bytes = spec.slot_bytes(config.model.page_size)
        taken = budget.costs[spec.name] * budget.unit_bytes
        if taken > slot_bytes:
            yield (
                f"tiers.host: a slot of {spec.name} is {slot_bytes} bytes and takes {budget.costs[spec.name]} units of"
                f" {budget.unit_bytes}, {(taken - slot_bytes) / slot_bytes:.1%} more"
            )
