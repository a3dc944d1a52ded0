"""How a cache joins its group: who is in it, whether all mean the same, how much all have."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

from hicache.config import HiCacheConfig
from hicache.errors import ConfigError, RankGroupError
from hicache.ranks.agreement import Agreement
from hicache.ranks.group import RankGroup, SingleGroup

P = ParamSpec("P")


class _HasRanks(Protocol):
    _ranks: Agreement


Opened = TypeVar("Opened", bound=_HasRanks)


def open_group(config: HiCacheConfig, given: RankGroup | None) -> RankGroup:
    """The ranks to agree with: those given, those that the configuration names, or this one alone.

    Raises:
        ConfigError: the given group is not the one that the configuration describes.
        RankGroupError: the others did not come.
    """
    ranks = config.ranks
    if given is not None:
        problems = [
            f"ranks: {what} {of_config} by tp, pp and cp, but the group given says {of_group}; make them agree"
            for what, of_config, of_group in (
                ("the number of ranks is", ranks.count, given.size),
                ("this rank is number", ranks.number, given.rank),
            )
            if of_config != of_group
        ]
        if problems:
            raise ConfigError(problems)
        return given
    if ranks.backend == "none":
        return SingleGroup()
    from hicache.ranks.gloo import GlooGroup

    assert ranks.address is not None, "the schema asks for it"
    return GlooGroup.connect(ranks.address, rank=ranks.number, size=ranks.count, timeout_s=ranks.timeout)


class Room(NamedTuple):
    """What trees can hold: slots of L1 and L2 by component, pages of L3 that are remembered, units of what is shared."""

    device: Mapping[str, int]
    host: Mapping[str, int]
    max_stored_pages: int
    host_units: int = 0
    device_units: int = 0


def agreed_room(ranks: Agreement, config: HiCacheConfig, room: Room, *, has_store: bool) -> Room:
    """What all ranks have: the least of each, since equal trees need equal pools.

    Raises:
        RankGroupError: the ranks' settings differ in what trees and decisions depend on.
    """
    if ranks.is_alone:
        return room
    meant = config.model_dump(mode="json", include={"model", "policy", "sessions"})
    sizes = config.ranks.model_dump(include={"tp_size", "pp_size", "cp_size"})
    digest = zlib.crc32(
        repr(
            (
                meant,
                sizes,
                list(room.device),
                list(room.host),
                room.host_units > 0,
                room.device_units > 0,
                has_store,
            )
        ).encode()
    )
    low, high = ranks.lowest("settings", [digest, -digest])
    if low != -high:
        raise RankGroupError(
            f"rank {ranks.group.rank}: the ranks were given different settings; model, policy, sessions, the sizes"
            " under ranks, and whether there is L2 and L3, must be the same for all"
        )
    numbers = [
        *room.device.values(),
        *room.host.values(),
        room.max_stored_pages,
        room.host_units,
        room.device_units,
    ]
    least = iter(ranks.lowest("capacities", numbers))
    return Room(
        {name: next(least) for name in room.device},
        {name: next(least) for name in room.host},
        next(least),
        next(least),
        next(least),
    )


def closes_its_group(
    init: Callable[Concatenate[Opened, P], None],
) -> Callable[Concatenate[Opened, P], None]:
    """Have a cache that cannot be opened leave its group, so that the others hear of it at once."""

    @functools.wraps(init)
    def opened(cache: Opened, *args: P.args, **keywords: P.kwargs) -> None:
        try:
            init(cache, *args, **keywords)
        except BaseException:
            ranks: Agreement | None = getattr(cache, "_ranks", None)
            if ranks is not None:
                ranks.close()
            raise

    return opened  # type: ignore[return-value]  # mypy takes the first argument's name for part of the type
