"""Small models and configurations for tests of a tree core."""

from __future__ import annotations

from collections.abc import Mapping

from hicache.radix.interface import TreeConfig
from hicache.types import ComponentSpec, Namespace, ReuseRule

IDENTITY = b"test identity"
UNEQUAL_NAMESPACES = {
    "none": Namespace(),
    "salt x": Namespace(salt="x"),
    "lora x": Namespace(lora="x"),
    "extra x": Namespace(extra="x"),
    "salt a, extra bc": Namespace(salt="a", extra="bc"),
    "salt ab, extra c": Namespace(salt="ab", extra="c"),
    "salt empty": Namespace(salt=""),
    "extra empty": Namespace(extra=""),
    "lora empty": Namespace(lora=""),
    "salt a, lora b": Namespace(salt="a", lora="b"),
    "lora a, salt b": Namespace(salt="b", lora="a"),
}
"""By what they are called: none finds what another left. Absent is not empty, and parts are not run together."""


def count_to(last: int, *, start: int = 1) -> list[int]:
    """Tokens ``start .. last``; two of them agree as far as both go."""
    return list(range(start, last + 1))


def components(model: str, *, window: int = 4, wide: int = 8) -> tuple[ComponentSpec, ...]:
    """The components a name such as ``full+swa+mamba`` lists; ``wide`` is a second window."""
    known = {
        "full": ComponentSpec("full", ReuseRule.PATH, bytes_per_token=8),
        "draft": ComponentSpec("draft", ReuseRule.PATH, bytes_per_token=2),
        "swa": ComponentSpec("swa", ReuseRule.WINDOW, window_tokens=window, bytes_per_token=4),
        "wide": ComponentSpec("wide", ReuseRule.WINDOW, window_tokens=wide, bytes_per_token=4),
        "chunked": ComponentSpec("chunked", "hicache.testing.rules.ChunkedRule", bytes_per_token=4),
        "picky": ComponentSpec("picky", "hicache.testing.rules.PickyRule", bytes_per_token=4),
        "unreliable": ComponentSpec("unreliable", "hicache.testing.rules.UnreliableRule", bytes_per_token=4),
        "mamba": ComponentSpec("mamba", ReuseRule.CHECKPOINT, state_bytes=64),
    }
    return tuple(known[name] for name in model.split("+"))


def tree_config(
    model: str = "full",
    *,
    page_size: int = 1,
    window: int = 4,
    wide: int = 8,
    device: int | Mapping[str, int] = 64,
    host: int | Mapping[str, int] = 0,
    host_costs: Mapping[str, int] | None = None,
    device_costs: Mapping[str, int] | None = None,
    has_store: bool = False,
    write: str = "write_through",
    eviction: str = "lru",
    granularity: str = "page",
    admission: str = "all",
    store_admission: str = "all",
    tail_tokens: int = 0,
    mark_spacing: int = 0,
    max_stored_pages: int = 4_000_000,
    identity: bytes = IDENTITY,
    emit_events: bool = True,
) -> TreeConfig:
    """A configuration; capacities given as one number hold for every component. Host 0: no L2.

    With ``host_costs`` the components share ``host`` units, with ``device_costs`` ``device`` units.
    """
    specs = components(model, window=window, wide=wide)
    names = [spec.name for spec in specs]
    device_slots = dict.fromkeys(names, device) if isinstance(device, int) else dict(device)
    host_slots = dict.fromkeys(names, host) if isinstance(host, int) else dict(host)
    host_units = 0
    if host_costs:
        assert isinstance(host, int), "a shared budget is one number"
        host_units = host
        host_slots = {name: host // cost for name, cost in host_costs.items()}
    device_units = 0
    if device_costs:
        assert isinstance(device, int), "a shared budget is one number"
        device_units = device
        device_slots = {name: device // cost for name, cost in device_costs.items()}
    return TreeConfig(
        page_size=page_size,
        components=specs,
        device_slots=device_slots,
        host_slots=host_slots if host_costs else {name: count for name, count in host_slots.items() if count},
        host_units=host_units,
        host_costs=dict(host_costs or {}),
        device_units=device_units,
        device_costs=dict(device_costs or {}),
        has_store=has_store,
        max_stored_pages=max_stored_pages,
        write=write,
        eviction=eviction,
        granularity=granularity,
        admission=admission,
        store_admission=store_admission,
        tail_tokens=tail_tokens,
        mark_spacing=mark_spacing,
        identity=identity,
        emit_events=emit_events,
    )
