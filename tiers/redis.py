"""A store in Redis or Valkey: one server, Sentinel or Cluster, shared by as many caches as like.

::

    RedisStore      batches, checks, counters
    RedisPages      commands for one page
    RedisServers    which server holds a key; redirects
    RedisNode       connections of one server; pipelines
    RedisWire       bytes of one connection

The server decides about room: ``maxmemory`` with any eviction policy, a TTL, or both. So a page may be
gone at any time, which is a miss, and a write that it refuses for want of memory is a refusal.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TypeVar

from redis.exceptions import OutOfMemoryError, RedisError

from hicache.clock import Clock, MonotonicClock
from hicache.config.redis_url import parse_redis_url
from hicache.errors import CorruptPayloadError, TierError, TierTimeoutError, TierUnavailableError
from hicache.tiers.arguments import check_keys, check_pages, check_targets
from hicache.tiers.breaker import BreakerSettings
from hicache.tiers.counters import StoreCounters
from hicache.tiers.framing import (
    CODEC_NONE,
    HEADER_BYTES,
    PageHeader,
    UnsupportedFormatError,
    check_payload,
    decode_header,
)
from hicache.tiers.redis_access import RedisAccess, check_access
from hicache.tiers.redis_names import HEAD_BYTES, Manifest, PageNames, manifest_of
from hicache.tiers.redis_node import (
    command,
    describe,
)
from hicache.tiers.redis_pages import PageLanding, RedisPages
from hicache.tiers.redis_servers import Keyed, RedisServers
from hicache.tiers.redis_wire import Landing, Reply
from hicache.tiers.store import PageTarget, Store, StoredPage, StoreStats
from hicache.types import PageKey

logger = logging.getLogger(__name__)
T = TypeVar("T")

DEFAULT_VALUE_BYTES = 8 << 20
"""A server answers nobody else while it copies a value, so larger payloads are cut."""
SCAN_COUNT = b"1000"
_PRESENT = b"PRESENT"
"""In place of a reply: what was to be written is there already."""
NODE_BREAKER = BreakerSettings(failures=2)
"""A node that hangs holds up every batch, so two failures in a row are enough."""
MAX_HIDDEN = 4096
"""So many pages of a newer format are remembered, the latest ones."""


class RedisStore(Store):
    """Framed pages as values.

    Args:
        url: ``hicache.config.redis_url`` has the forms.
        prefix: what every key starts with.
        namespace: sets apart stores that share a prefix; pages of two namespaces never meet.
        ttl_s: the server forgets a page this long after its last use; None: never.
        refresh_ttl: whether reading is a use; otherwise only writing is.
        value_bytes: a payload that does not fit a value of this size is cut into several.
        username: ACL user; None: the default user.
        password: gives the password, or raises ``ConfigError``; None: there is none. Asked for every new
            connection, so that a password that was changed needs no restart.
        login_at_sentinels: whether sentinels want the same user and password.
        ca_file, cert_file, key_file: paths of PEM files, with a TLS url only.
        check_hostname: whether the server's certificate must name the host of the url.
        timeout_s: limit of one pipeline at one server; a call takes at most twice that.
        max_connections: to one server; further calls wait for a free one.
        node_breaker: when a node of a cluster is left alone while the others serve; None: never.
        clock, randomness: of those breakers.

    *Thread*: one event loop. ``num_pages`` and ``used_bytes`` in ``stats`` are those of the last
    ``survey``: only the server knows what is there.

    In a cluster a batch is written to its servers at once, so a child may be seen a moment before its
    parent, and a server that fails leaves children without parents. Those are removed where possible.
    """

    kind = "redis"

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "hicache",
        namespace: str = "",
        ttl_s: float | None = None,
        refresh_ttl: bool = True,
        value_bytes: int = DEFAULT_VALUE_BYTES,
        username: str | None = None,
        password: Callable[[], str] | None = None,
        login_at_sentinels: bool = False,
        ca_file: str | None = None,
        cert_file: str | None = None,
        key_file: str | None = None,
        check_hostname: bool = True,
        timeout_s: float = 2.0,
        max_connections: int = 8,
        node_breaker: BreakerSettings | None = NODE_BREAKER,
        clock: Clock | None = None,
        randomness: random.Random | None = None,
    ) -> None:
        if ttl_s is not None and ttl_s < 0.001:
            raise ValueError(f"ttl_s is {ttl_s:g}, at least 0.001 expected")
        if value_bytes < 1:
            raise ValueError(f"value_bytes is {value_bytes}, 1 or more expected")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s is {timeout_s:g}, more than 0 expected")
        if max_connections < 1:
            raise ValueError(f"max_connections is {max_connections}, 1 or more expected")
        self._access = RedisAccess(
            url=parse_redis_url(url),
            username=username,
            password=password,
            login_at_sentinels=login_at_sentinels,
            ca_file=ca_file,
            cert_file=cert_file,
            key_file=key_file,
            check_hostname=check_hostname,
            timeout_s=timeout_s,
            max_connections=max_connections,
            node_breaker=node_breaker,
            clock=clock or MonotonicClock(),
            randomness=randomness or random.Random(),
        )
        self._names = PageNames(prefix, namespace)
        self._pages = RedisPages(
            self._names,
            ttl_ms=None if ttl_s is None else round(ttl_s * 1000),
            refresh_ttl=refresh_ttl,
            value_bytes=value_bytes,
        )
        self._counters = StoreCounters(self.kind)
        self._num_pages = self._used_bytes = 0
        self._hidden: OrderedDict[PageKey, None] = OrderedDict()
        self._servers: RedisServers | None = None
        self._calls: set[asyncio.Future[None]] = set()
        self._was_full = False

    # ---- life ------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Find the servers and log in. In a cluster it is enough that one of them can be used.

        Raises:
            ConfigError: a server refuses this user, password or right, its certificate is not trusted, or
                a file is missing: waiting will not help.
            TierUnavailableError, TierTimeoutError: nobody is there now.
        """
        if self._servers is not None:
            return
        servers = RedisServers(self._access)
        try:
            await servers.open()
            await check_access(servers.masters(), command(b"EXISTS", self._names.page(PageKey(bytes(32)))))
        except BaseException:
            await servers.close()
            raise
        self._servers = servers

    async def close(self) -> None:
        servers, self._servers = self._servers, None
        try:
            while self._calls:
                await asyncio.wait(set(self._calls))
        finally:  # whoever gives up waiting leaves no connection open
            if servers is not None:
                await servers.close()

    def stats(self) -> StoreStats:
        stats = self._counters.totals()
        stats.num_pages, stats.used_bytes = self._num_pages, self._used_bytes
        return stats

    async def survey(self) -> StoreStats:
        """Count what is there now, with ``SCAN``; ``stats`` gives it from then on."""
        num_pages = used_bytes = 0
        with self._serving() as servers:
            async for names in self._scan(servers):
                sizes = await servers.run([Keyed(name, command(b"STRLEN", name)) for name in names])
                num_pages += sum(map(self._names.is_page, names))
                used_bytes += sum(_expect(size, int) for size in sizes)
        self._num_pages, self._used_bytes = num_pages, used_bytes
        return self.stats()

    # ---- batches ---------------------------------------------------------------------------------------------

    async def exists(self, keys: Sequence[PageKey]) -> list[bool]:
        with self._serving() as servers:
            check_keys(keys)
            names = [self._names.page(key) for key in keys]
            replies = await servers.run([Keyed(name, command(b"EXISTS", name)) for name in names])
            self._note_failures(replies)
        return [reply == 1 and key not in self._hidden for key, reply in zip(keys, replies, strict=True)]

    async def get(self, targets: Sequence[PageTarget]) -> list[bool]:
        with self._serving() as servers:
            check_targets(targets)
            landings = [PageLanding(target) for target in targets]
            replies = await servers.run(
                [self._pages.fetch(self._names.page(each.target.key), each) for each in landings]
            )
            self._note_failures(replies)
            answers = [False] * len(targets)
            cut_up: list[tuple[int, PageHeader, Manifest]] = []
            spoilt: list[bytes] = []
            for n, (target, reply) in enumerate(zip(targets, replies, strict=True)):
                try:
                    found = self._read(target, reply)
                except CorruptPayloadError as error:
                    self._note_corrupt(target.key, error)
                    spoilt.append(self._names.page(target.key))
                    continue
                if isinstance(found, bool):
                    answers[n] = found
                else:
                    cut_up.append((n, *found))
            if cut_up:
                spoilt += await self._get_parts(servers, targets, answers, cut_up)
            if spoilt:
                await servers.run([Keyed(name, command(b"UNLINK", name)) for name in spoilt])
        num_read = sum(answers)
        num_bytes = sum(each.payload.nbytes for each, hit in zip(targets, answers, strict=True) if hit)
        self._counters.add(pages_read=num_read, bytes_read=num_bytes, pages_missed=len(targets) - num_read)
        return answers

    async def put(self, pages: Sequence[StoredPage]) -> list[bool]:
        with self._serving() as servers:
            check_pages(pages)
            distinct = {page.key: page for page in pages}
            writes = {key: self._pages.writes(page) for key, page in distinct.items()}
            replies = await servers.run([write for of_page in writes.values() for write in of_page])
            self._note_failures([reply for reply in replies if not isinstance(reply, OutOfMemoryError)])
            replies = await self._excuse_present(servers, writes, replies)
            answered = iter(replies)
            answers: dict[PageKey, bool] = {}
            undone: list[bytes] = []
            for key, of_page in writes.items():
                written = [next(answered) for _ in of_page]
                parent = distinct[key].parent
                has_parent = parent is None or answers.get(parent) is not False
                answers[key] = has_parent and all(reply in (b"OK", _PRESENT) for reply in written)
                if not answers[key]:
                    undone += [w.name for w, reply in zip(of_page, written, strict=True) if reply == b"OK"]
                    self._note_refused(written)
            if undone:
                await servers.run([Keyed(name, command(b"UNLINK", name)) for name in undone])
        stored = [distinct[key] for key, is_there in answers.items() if is_there]
        for page in stored:
            self._hidden.pop(page.key, None)
        self._counters.add(
            pages_written=len(stored), bytes_written=sum(page.payload.nbytes for page in stored)
        )
        return [answers[page.key] for page in pages]

    async def delete(self, keys: Sequence[PageKey]) -> int:
        with self._serving() as servers:
            check_keys(keys)
            names = [self._names.page(key) for key in dict.fromkeys(keys)]
            last = b"%d" % (HEAD_BYTES - 1)
            heads = await servers.run([Keyed(name, command(b"GETRANGE", name, b"0", last)) for name in names])
            parts = [part for head in heads for part in self._pages.parts_of(head)]
            replies = await servers.run([Keyed(name, command(b"UNLINK", name)) for name in (*names, *parts)])
            return sum(_expect(reply, int) for reply in replies[: len(names)])

    async def clear(self) -> int:
        num_pages = 0
        with self._serving() as servers:
            async for names in self._scan(servers):
                replies = await servers.run([Keyed(name, command(b"UNLINK", name)) for name in names])
                removed = [_expect(reply, int) for reply in replies]
                num_pages += sum(
                    count for name, count in zip(names, removed, strict=True) if self._names.is_page(name)
                )
        self._num_pages = self._used_bytes = 0
        self._hidden.clear()
        return num_pages

    # ---- one page --------------------------------------------------------------------------------------------

    def _read(self, target: PageTarget, reply: Reply) -> bool | tuple[PageHeader, Manifest]:
        """Whether a target holds its page's payload now, or how that was cut.

        Raises ``CorruptPayloadError``.
        """
        match reply:
            case PageLanding() if reply.header is not None:
                target.hand_over(reply.header, target.payload)
                return True
            case PageLanding():
                value = memoryview(bytes(reply.head) + bytes(reply.body))
            case bytes() | bytearray():
                value = memoryview(reply)
            case _:
                return False
        try:
            header = decode_header(value)
            header.check_identity(target.key)
            manifest = manifest_of(value, header)
            if manifest is None:
                check_payload(header, value[HEADER_BYTES:])
            is_right = target.check(header)
        except UnsupportedFormatError as error:
            self._hide(target.key)
            self._counters.error("unsupported", error)
            return False
        if is_right and manifest is not None:
            return header, manifest
        if is_right:
            assert header.codec != CODEC_NONE  # else it would have landed, and been found right
            target.hand_over(header, value[HEADER_BYTES:])
            return True
        self._counters.error("mismatch", f"page {target.key.hex()} is not the {target.component} asked for")
        return False

    async def _get_parts(
        self,
        servers: RedisServers,
        targets: Sequence[PageTarget],
        answers: list[bool],
        cut_up: Sequence[tuple[int, PageHeader, Manifest]],
    ) -> list[bytes]:
        """Fill targets from parts and say so in ``answers``; the names of what is of no use any more."""
        names = [self._names.parts(header, manifest) for _, header, manifest in cut_up]
        wholes = [
            targets[n].payload.cast("B")
            if header.codec == CODEC_NONE
            else memoryview(bytearray(header.payload_bytes))
            for n, header, _ in cut_up
        ]
        fetches = [
            self._pages.fetch(name, Landing(bytearray(), whole[begin:end]))
            for (_, header, manifest), whole, of_page in zip(cut_up, wholes, names, strict=True)
            for name, (begin, end) in zip(of_page, manifest.spans(header.payload_bytes), strict=True)
        ]
        replies = await servers.run(fetches)
        self._note_failures(replies)
        answered = iter(replies)
        spoilt: list[bytes] = []
        for (n, header, _), whole, of_page in zip(cut_up, wholes, names, strict=True):
            parts = [next(answered) for _ in of_page]
            if any(isinstance(part, TierError | RedisError) for part in parts):
                continue
            if any(part is None for part in parts):
                spoilt += (self._names.page(header.key), *of_page)  # the server dropped a part: a miss
                continue
            try:
                if not all(isinstance(part, Landing) for part in parts):
                    raise CorruptPayloadError("a part differs in length from what the manifest says")
                check_payload(header, whole)
            except CorruptPayloadError as error:
                self._note_corrupt(header.key, error)
                spoilt += (self._names.page(header.key), *of_page)
                continue
            answers[n] = True
            targets[n].hand_over(header, whole)
        return spoilt

    async def _excuse_present(
        self, servers: RedisServers, writes: dict[PageKey, list[Keyed]], replies: list[Reply]
    ) -> list[Reply]:
        """Turn refusals for want of memory into successes where the page is there already."""
        answered = iter(replies)
        of_pages = {key: [next(answered) for _ in of_page] for key, of_page in writes.items()}
        full = [key for key, each in of_pages.items() if any(isinstance(r, OutOfMemoryError) for r in each)]
        if not full:
            return replies
        names = [self._names.page(key) for key in full]
        found = await servers.run([Keyed(name, command(b"EXISTS", name)) for name in names])
        for key, is_there in zip(full, found, strict=True):
            if is_there == 1:
                of_pages[key] = [_PRESENT] * len(of_pages[key])
        return [reply for each in of_pages.values() for reply in each]

    # ---- helpers ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _serving(self) -> Iterator[RedisServers]:
        """The servers, kept open until the call is over."""
        if self._servers is None:
            raise TierUnavailableError("redis store: not open; await open() first")
        call = asyncio.get_running_loop().create_future()
        self._calls.add(call)
        try:
            yield self._servers
        finally:
            self._calls.discard(call)
            call.set_result(None)

    async def _scan(self, servers: RedisServers) -> AsyncIterator[list[bytes]]:
        """All names of this store, some at a time; a name may come twice."""
        for node in servers.masters():
            cursor = b"0"
            while True:
                question = command(b"SCAN", cursor, b"MATCH", self._names.pattern, b"COUNT", SCAN_COUNT)
                (reply,) = await node.run([question])
                cursor, names = _expect(reply, list)
                if names:
                    yield names
                if cursor == b"0":
                    break

    def _note_failures(self, replies: Sequence[Reply]) -> None:
        """Count what was not answered well; raise if nothing was.

        Raises:
            TierError: the first failure, if not one reply is of any use.
        """
        failures = [reply for reply in replies if isinstance(reply, TierError | RedisError)]
        if not failures:
            return
        kinds = {_kind_of(failure): failure for failure in reversed(failures)}
        for kind, failure in kinds.items():
            self._counters.error(kind, describe(failure))
        first = failures[0]
        if len(failures) == len(replies):
            raise first if isinstance(first, TierError) else TierUnavailableError(f"redis: {describe(first)}")

    def _note_corrupt(self, key: PageKey, error: CorruptPayloadError) -> None:
        self._counters.add(pages_corrupt=1)
        logger.debug("redis store: page %s was removed: %s", key.hex(), error)

    def _note_refused(self, written: Sequence[Reply]) -> None:
        self._counters.add(pages_refused=1)
        full = next((reply for reply in written if isinstance(reply, OutOfMemoryError)), None)
        if full is not None and not self._was_full:
            self._was_full = True
            logger.warning("redis store: a page was refused (said once): %s", describe(full))

    def _hide(self, key: PageKey) -> None:
        self._hidden[key] = None
        while len(self._hidden) > MAX_HIDDEN:
            self._hidden.popitem(last=False)


def _expect(reply: Reply, kind: type[T]) -> T:
    """A reply that must be of a kind. Raises ``TierError`` with what it is instead."""
    if isinstance(reply, kind):
        return reply
    if isinstance(reply, TierError):
        raise reply
    raise TierUnavailableError(f"redis: {describe(reply) if isinstance(reply, Exception) else reply!r:.80}")


def _kind_of(failure: TierError | RedisError) -> str:
    match failure:
        case TierTimeoutError():
            return "timeout"
        case TierError():
            return "unavailable"
    return "refused_by_server"
