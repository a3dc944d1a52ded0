"""Which server holds which key: one server, the master that sentinels name, or a cluster's slots.

::

    single     [0 ........................ 16383] -> the server
    sentinel   [0 ........................ 16383] -> whom the sentinels call master, asked anew when it is lost
    cluster    [0 .. 5460] [.. 10922] [.. 16383]  -> a master each, asked anew when one is lost or says MOVED

A batch goes to all its servers at once. What one of them redirects, or loses while its place is taken
by another server, is tried once more; what is lost then stays lost.
"""

from __future__ import annotations

import asyncio
import bisect
import logging
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError, MovedError, ReadOnlyError

from hicache.errors import TierError, TierUnavailableError
from hicache.tiers.redis_access import RedisAccess
from hicache.tiers.redis_node import Address, RedisNode, command, describe
from hicache.tiers.redis_wire import Command, Reply

logger = logging.getLogger(__name__)

NUM_SLOTS = 16384
LOCATE_INTERVAL_S = 0.5
"""While servers are lost, the others are asked for the layout at most this often."""


@dataclass(frozen=True, slots=True)
class Keyed:
    """A command and the key that says where it goes."""

    name: bytes
    command: Command


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranges of slots, ascending: the last slot of each, and who serves it (None: nobody)."""

    last_slots: tuple[int, ...]
    addresses: tuple[Address | None, ...]

    def address(self, name: bytes) -> Address | None:
        if len(self.addresses) == 1:
            return self.addresses[0]
        return self.addresses[bisect.bisect_left(self.last_slots, key_slot(name))]

    def masters(self) -> list[Address]:
        """Each server once."""
        return list(dict.fromkeys(address for address in self.addresses if address is not None))


class RedisServers:
    """All servers of one address.

    *Thread*: one event loop.
    """

    def __init__(self, access: RedisAccess) -> None:
        self._access = access
        self._url = access.url
        self._nodes: dict[Address, RedisNode] = {}
        self._sentinels: dict[Address, RedisNode] = {}
        self._layout: Layout | None = None
        self._located_s = float("-inf")
        self._locating = asyncio.Lock()

    # ---- life ------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Find the servers. Raises ``TierUnavailableError`` if nobody can say where they are."""
        self._layout = await self._locate()

    async def close(self) -> None:
        """Drop all connections."""
        for node in (*self._nodes.values(), *self._sentinels.values()):
            await node.close()
        self._nodes.clear()
        self._sentinels.clear()
        await asyncio.sleep(0)  # sockets are closed in the loop's next turn

    def masters(self) -> list[RedisNode]:
        """The servers that hold keys."""
        assert self._layout is not None
        return [self._node(address) for address in self._layout.masters()]

    # ---- commands --------------------------------------------------------------------------------------------

    async def run(self, keyed: Sequence[Keyed]) -> list[Reply]:
        """Send each command to its server; one reply each, in order. Raises nothing of its own.

        Commands for one server are executed in order; two servers know nothing of each other.
        """
        layout = self._layout
        assert layout is not None
        addresses = [layout.address(each.name) for each in keyed]
        replies = await self._run_at([each.command for each in keyed], addresses)
        again = [n for n, reply in enumerate(replies) if _may_be_elsewhere(reply)]
        if again and self._url.mode != "single":
            lost = {addresses[n] for n in again if isinstance(replies[n], TierError)}
            await self._relocate(layout, lost)
            await self._run_again(keyed, addresses, replies, again)
        return replies

    async def _run_again(
        self,
        keyed: Sequence[Keyed],
        addresses: Sequence[Address | None],
        replies: list[Reply],
        again: Sequence[int],
    ) -> None:
        """Try those once more that have another address now; put the replies in place."""
        assert self._layout is not None
        elsewhere: dict[int, Address] = {}
        for n in again:
            reply = replies[n]
            if isinstance(reply, AskError) and not isinstance(reply, MovedError):
                # The slot is on its way: this one key is there already, the others are not.
                node = self._node((reply.host, reply.port))
                _, replies[n] = await node.run([_ASKING, keyed[n].command])
                continue
            moved = (reply.host, reply.port) if isinstance(reply, MovedError) else None
            address = moved or self._layout.address(keyed[n].name)
            if address is not None and address != addresses[n]:
                elsewhere[n] = address
        answers = await self._run_at([keyed[n].command for n in elsewhere], list(elsewhere.values()))
        for n, answer in zip(elsewhere, answers, strict=True):
            replies[n] = answer

    async def _run_at(self, commands: Sequence[Command], addresses: Sequence[Address | None]) -> list[Reply]:
        """Run each command where it belongs, all servers at once."""
        places: dict[Address, list[int]] = defaultdict(list)
        for n, address in enumerate(addresses):
            if address is not None:
                places[address].append(n)
        nobody = TierUnavailableError("redis: no server of the cluster serves this key's slot")
        replies: list[Reply] = [nobody] * len(commands)

        async def run_one(address: Address, positions: list[int]) -> None:
            answers = await self._node(address).run([commands[n] for n in positions])
            for n, answer in zip(positions, answers, strict=True):
                replies[n] = answer

        calls = (run_one(address, positions) for address, positions in places.items())
        # With exceptions returned, it ends only when all have ended: nothing touches buffers after that.
        for ended in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(ended, BaseException):
                raise ended
        return replies

    def _node(self, address: Address) -> RedisNode:
        node = self._nodes.get(address)
        if node is None:
            node = self._nodes[address] = self._access.make_node(address)
        return node

    # ---- where they are --------------------------------------------------------------------------------------

    async def _relocate(self, seen: Layout, lost: Collection[Address | None]) -> None:
        """Ask for the layout anew, unless somebody just did; those that are lost last of all.

        Keeps the old layout if nobody answers.
        """
        async with self._locating:
            now_s = self._access.clock.now_s()
            if self._layout is not seen or now_s - self._located_s < LOCATE_INTERVAL_S:
                return
            self._located_s = now_s
            try:
                found = await self._locate(lost)
            except TierUnavailableError as error:
                logger.debug("the layout could not be asked for: %s", error)
                return
            self._layout = found
            for address in set(self._nodes) - set(found.masters()):
                await self._nodes.pop(address).close()

    async def _locate(self, lost: Collection[Address | None] = ()) -> Layout:
        match self._url.mode:
            case "cluster":
                return await self._ask_cluster(lost)
            case "sentinel":
                return await self._ask_sentinels()
        return Layout((NUM_SLOTS - 1,), self._url.endpoints)

    async def _ask_sentinels(self) -> Layout:
        master = (self._url.master or "").encode()
        question = command(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", master)
        refusals = []
        for endpoint in self._url.endpoints:
            sentinel = self._sentinels.setdefault(endpoint, self._access.make_sentinel(endpoint))
            (reply,) = await sentinel.run([question])
            if isinstance(reply, list) and len(reply) == 2:
                host, port = reply
                return Layout((NUM_SLOTS - 1,), ((host.decode(), int(port)),))
            refusals.append(_refusal(sentinel, reply, f"knows no master {self._url.master}"))
        raise TierUnavailableError("; ".join(refusals))

    async def _ask_cluster(self, lost: Collection[Address | None]) -> Layout:
        known = self._layout.masters() if self._layout is not None else []
        endpoints = dict.fromkeys((*known, *self._url.endpoints))
        refusals = []
        for endpoint in sorted(endpoints, key=lambda each: each in lost):
            node = self._node(endpoint)
            (reply,) = await node.run([command(b"CLUSTER", b"SLOTS")])
            if isinstance(reply, list) and reply:
                return _read_slots(reply, endpoint)
            refusals.append(_refusal(node, reply, "serves no slots"))
        raise TierUnavailableError("; ".join(refusals))


_ASKING = command(b"ASKING")


def _may_be_elsewhere(reply: Reply) -> bool:
    return isinstance(reply, TierError | AskError | ReadOnlyError | ClusterDownError)


def _refusal(node: RedisNode, reply: object, otherwise: str) -> str:
    return describe(reply) if isinstance(reply, Exception) else f"redis {node} {otherwise}"


def _read_slots(reply: list[list[object]], asked: Address) -> Layout:
    """``CLUSTER SLOTS``: first slot, last slot, master (host, port, …), replicas."""
    last_slots: list[int] = []
    addresses: list[Address | None] = []

    def add(last_slot: int, address: Address | None) -> None:
        last_slots.append(last_slot)
        addresses.append(address)

    for first, last, master, *_ in sorted(reply, key=lambda row: row[0]):  # type: ignore[arg-type, return-value]  # numbers
        assert isinstance(first, int)
        assert isinstance(last, int)
        assert isinstance(master, list)
        host, port = master[0], int(master[1])
        name = host.decode() if isinstance(host, bytes) else ""
        begun = last_slots[-1] + 1 if last_slots else 0
        if first > begun:
            add(first - 1, None)  # nobody serves these
        # A node that does not know its own name leaves it out: it is where we asked.
        add(last, (asked[0] if name in {"", "?"} else name, port))
    if last_slots[-1] < NUM_SLOTS - 1:
        add(NUM_SLOTS - 1, None)
    return Layout(tuple(last_slots), tuple(addresses))
