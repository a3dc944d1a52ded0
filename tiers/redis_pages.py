"""What is asked of a server for one page: the commands that write it and read it, whole or in parts."""

from __future__ import annotations

from hicache.errors import TierError
from hicache.tiers.framing import (
    CODEC_NONE,
    HEADER_BYTES,
    PageHeader,
    check_payload,
    decode_header,
    encode_header,
)
from hicache.tiers.redis_names import PageNames, cut, manifest_of
from hicache.tiers.redis_node import command, set_command
from hicache.tiers.redis_servers import Keyed
from hicache.tiers.redis_wire import Landing, Reply
from hicache.tiers.store import PageTarget, StoredPage


class PageLanding(Landing):
    """The value of a page that is not cut: checked as soon as it is there.

    ``header`` is the page's if all of it is right. Otherwise head and body are for a closer look.
    """

    def __init__(self, target: PageTarget) -> None:
        super().__init__(bytearray(HEADER_BYTES), target.payload.cast("B"))
        self.target = target
        self.header: PageHeader | None = None

    def landed(self) -> None:
        try:
            header = decode_header(self.head)
            header.check_identity(self.target.key)
            check_payload(header, self.body)
        except TierError:
            return
        if header.component == self.target.component and header.codec == CODEC_NONE:
            self.header = header


class RedisPages:
    """How the pages of one store are written and read.

    Args:
        names: what pages are called.
        ttl_ms: the server forgets a page this long after its last use; None: never.
        refresh_ttl: whether reading is a use.
        value_bytes: a payload that does not fit a value of this size is cut.
    """

    def __init__(self, names: PageNames, *, ttl_ms: int | None, refresh_ttl: bool, value_bytes: int) -> None:
        self._names = names
        self._ttl_ms = ttl_ms
        self._refresh_ttl = refresh_ttl
        self._value_bytes = value_bytes

    def fetch(self, name: bytes, landing: Landing) -> Keyed:
        """Read a value; with a TTL that reading refreshes, that too."""
        if self._ttl_ms is None or not self._refresh_ttl:
            return Keyed(name, command(b"GET", name, landing=landing))
        return Keyed(name, command(b"GETEX", name, b"PX", b"%d" % self._ttl_ms, landing=landing))

    def writes(self, page: StoredPage) -> list[Keyed]:
        """What stores a page: its parts, if it is cut, and then what makes it visible."""
        name, payload = self._names.page(page.key), page.payload.cast("B")
        raw = encode_header(page.key, page.component, payload, parent=page.parent, codec=page.codec)
        manifest = cut(payload.nbytes, self._value_bytes)
        if manifest is None:
            return [Keyed(name, set_command(name, raw, payload, self._ttl_ms))]
        header = decode_header(raw)
        parts = zip(self._names.parts(header, manifest), manifest.spans(payload.nbytes), strict=True)
        writes = [
            Keyed(part, set_command(part, b"", payload[begin:end], self._ttl_ms))
            for part, (begin, end) in parts
        ]
        end = memoryview(manifest.encode())
        return [*writes, Keyed(name, set_command(name, raw, end, self._ttl_ms))]

    def parts_of(self, head: Reply) -> list[bytes]:
        """Names of the parts of the page whose value begins so; none if that makes no sense."""
        if not isinstance(head, bytes | bytearray):
            return []
        try:
            header = decode_header(head)
        except TierError:
            return []
        manifest = manifest_of(memoryview(head), header)
        return [] if manifest is None else self._names.parts(header, manifest)
