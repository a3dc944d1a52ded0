"""How large pools are for a synthetic load: all of it, or a share of what it leaves behind.

The *footprint* is what has to be kept so that every session's next turn reuses all that it can: each page of a path,
the last window, the last state. A tree keeps more where there is room (older marks).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hicache.errors import ConfigError
from hicache.types import MAX_PAGE_SIZE
from hicache.workload import MultiTurn

COMPONENTS: Mapping[str, Mapping[str, object]] = {
    "full": {"rule": "path", "layers": 2, "bytes_per_token": 16},
    "swa": {"rule": "window", "window": 1024, "layers": 2, "bytes_per_token": 16},
    "mamba": {"rule": "checkpoint", "layers": 2, "state_bytes": 16384},
}
"""The small components that the benchmarks' models are made of."""
MIN_STATES = 3
"""A running request's own, the one that it began with, and the one that it leaves."""
_NO_WATERMARKS = {"device": {"low": 0, "high": 0}, "host": {"low": 0, "high": 0}}


def component_names(text: str, page_size: int) -> list[str]:
    """``full+swa`` as names. Raises ``ConfigError`` for what no model can be made of."""
    names = text.split("+")
    unknown = sorted(set(names) - set(COMPONENTS))
    if unknown or len(set(names)) != len(names):
        known = "+".join(COMPONENTS)
        raise ConfigError([f"--components: {text!r}; expected some of {known}, each once"])
    if not 1 <= page_size <= MAX_PAGE_SIZE:
        raise ConfigError([f"--page-size: found {page_size}; expected 1 to {MAX_PAGE_SIZE}"])
    return names


def footprint_slots(load: MultiTurn, names: Sequence[str], page_size: int) -> dict[str, int]:
    """Slots of each component that hold the footprint: pages, or states."""
    own = load.prompt_length(load.turns - 1) - load.system + load.output
    pages = -(-load.system // page_size) + load.sessions * -(-own // page_size)
    states = load.sessions
    return {
        name: {"path": pages, "window": load.sessions * _window_pages(name, page_size), "checkpoint": states}[
            str(COMPONENTS[name]["rule"])
        ]
        for name in names
    }


def pool_of(slots: Mapping[str, int], page_size: int) -> dict[str, object]:
    """Capacity and split of a pool that come to exactly these slots."""
    sizes = {name: count * _slot_bytes(name, page_size) for name, count in slots.items()}
    total = sum(sizes.values())
    return {
        "capacity": total + len(sizes),  # a byte each, so that no share is rounded below its slots
        "split": {name: size / total for name, size in sizes.items()},
    }


def share_of(footprint: Mapping[str, int], share: float, page_size: int) -> dict[str, int]:
    """That share of the footprint, rounded up, and never less than one request needs."""
    slots = {}
    for name, count in footprint.items():
        rule = COMPONENTS[name]["rule"]
        least = {"window": 2 * _window_pages(name, page_size), "checkpoint": MIN_STATES}.get(str(rule), 1)
        slots[name] = max(least, -(-round(count * share * 1e6) // 1_000_000))
    return slots


def roomy_config(load: MultiTurn, names: Sequence[str], page_size: int) -> dict[str, object]:
    """Settings under which the whole load fits the device pool of kind cpu, whatever the components share of it."""
    longest = load.prompt_length(load.turns - 1) + load.output + 2 * page_size
    tokens = load.sessions * (longest + load.turns * 2 * page_size)
    needed: dict[str, int] = {}
    for name in names:
        settings = COMPONENTS[name]
        if settings["rule"] == "checkpoint":
            states = load.sessions * load.turns * 4 + 16
            needed[name] = states * int(str(settings["state_bytes"]))
        else:
            window = int(str(settings.get("window", 0)))  # of a short load a window still needs its size
            kept = max(tokens, window + 2 * page_size)
            needed[name] = kept * int(str(settings["bytes_per_token"]))
    total = sum(needed.values())
    return {
        "model": _model(names, page_size),
        "tiers": {"device": {"kind": "cpu", "capacity": total + total // 50}},
        "policy": {"watermarks": _NO_WATERMARKS},
    }


def tight_config(
    load: MultiTurn,
    names: Sequence[str],
    page_size: int,
    *,
    device_share: float,
    host_share: float = 0.0,
    store: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """Settings with a share of the load's footprint in L1, another in L2 (0: none), and a store behind it."""
    footprint = footprint_slots(load, names, page_size)
    tiers: dict[str, object] = {
        "device": {"kind": "cpu", **pool_of(share_of(footprint, device_share, page_size), page_size)}
    }
    if host_share:
        host = pool_of(share_of(footprint, host_share, page_size), page_size)
        tiers["host"] = {"pinned": False, **host}
    if store is not None:
        tiers["stores"] = [dict(store)]
    policy: dict[str, object] = {"write": "write_through"}
    if not host_share:
        policy["watermarks"] = _NO_WATERMARKS  # demotion ahead of need would only drop
    return {"model": _model(names, page_size), "tiers": tiers, "policy": policy}


def _model(names: Sequence[str], page_size: int) -> dict[str, object]:
    return {
        "name": "bench",
        "page_size": page_size,
        "components": {name: dict(COMPONENTS[name]) for name in names},
    }


def _window_pages(name: str, page_size: int) -> int:
    return -(-int(str(COMPONENTS[name].get("window", 0))) // page_size) + 1


def _slot_bytes(name: str, page_size: int) -> int:
    settings = COMPONENTS[name]
    return int(str(settings.get("state_bytes", 0))) or int(str(settings["bytes_per_token"])) * page_size
