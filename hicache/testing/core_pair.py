"""Both tree cores, called in step and compared after every call."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from hicache.errors import HiCacheError
from hicache.radix.core import make_core
from hicache.radix.interface import TreeConfig, TreeCore
from hicache.types import TicketId, Tier


class CorePair:
    """The Python core and the Rust core of one configuration.

    Args:
        config: of both.
        calls: all calls so far, to be told when they differ.
        pending: tickets in flight, as of the last ``agree``.

    *Raises*: ``CoreUnavailableError`` where the Rust core was not built.
    """

    def __init__(self, config: TreeConfig) -> None:
        self.config = config
        self.page_size = config.page_size
        self.names = [spec.name for spec in config.components]
        self.cores: tuple[TreeCore, TreeCore] = (make_core(config, "python"), make_core(config, "rust"))
        self.pending: list[TicketId] = []
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []  # Any: as the methods have it

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:  # Any: as the method has it
        """Call both cores; they agree or this raises. Returns the result, None for a refusal."""
        self.calls.append((name, args, kwargs))
        outcomes = []
        for core in self.cores:
            try:
                outcomes.append(getattr(core, name)(*args, **kwargs))
            except HiCacheError as error:
                outcomes.append((type(error), str(error)))
        expected, actual = (_plain(outcome) for outcome in outcomes)
        assert actual == expected
        is_refused = isinstance(outcomes[0], tuple) and outcomes[0] and isinstance(outcomes[0][0], type)
        return None if is_refused else outcomes[0]

    def agree(self) -> None:
        """Compare the audit, which finds nothing, the counters, events, tickets, snapshot and dead slots."""
        for name in ("audit", "counters", "drain_events", "in_flight", "snapshot"):
            expected, actual = (getattr(core, name)() for core in self.cores)
            assert actual == expected, name
            assert name != "audit" or expected == []
        for name in self.names:
            for tier in Tier:
                expected, actual = (core.dead_slots(name, tier) for core in self.cores)
                assert actual == expected, f"dead slots of {name} in {tier.name}"
        self.pending = list(self.cores[0].in_flight())


def _plain(value: Any) -> Any:  # Any: whatever a core returns
    """A result as nested tuples, so that records with arrays compare by value."""
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.tolist())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (type(value), *(_plain(getattr(value, field.name)) for field in dataclasses.fields(value)))
    if isinstance(value, tuple | list):
        return tuple(_plain(item) for item in value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
