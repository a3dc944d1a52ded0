"""Redis addresses: one server, Sentinel or Cluster, with or without TLS, never with a password.

::

    redis://host[:port][/database]
    redis+sentinel://host[:port],host[:port].../master[/database]
    redis+cluster://host[:port],host[:port]...
    rediss..., the same over TLS
    valkey..., valkeys..., other names of the same
"""

from __future__ import annotations

import re
from dataclasses import dataclass

SCHEMES = ("redis", "rediss", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
DEFAULT_PORT = 6379
DEFAULT_SENTINEL_PORT = 26379

_URL = re.compile(r"([a-z+]+)://([^/?#]*)((?:/[^?#]*)?)(\?[^#]*)?(#.*)?", re.ASCII | re.IGNORECASE)
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(\d{1,5}))?", re.ASCII)
_MASTER = re.compile(r"[A-Za-z0-9._-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """The parts of a Redis address.

    Args:
        mode: ``single``, ``sentinel`` or ``cluster``.
        endpoints: (host, port) of the server, the sentinels, or some nodes of the cluster.
        master: name of the master that the sentinels watch.
    """

    mode: str
    tls: bool
    endpoints: tuple[tuple[str, int], ...]
    master: str | None = None
    database: int = 0


def parse_redis_url(text: str) -> RedisUrl:
    """Take an address apart. Raises ``ValueError`` with a sentence that never repeats credentials."""
    parts = _URL.fullmatch(text)
    scheme = re.sub(r"^valkey", "redis", parts[1].lower()) if parts else ""
    if "@" in text:
        raise ValueError(
            "found a user name or password in the url; write the user as username, and name where"
            " the password is: password_env (a variable) or password_file (a file)"
        )
    if parts is None or scheme not in SCHEMES:
        raise ValueError(f"expected {', '.join(f'{s}://' for s in SCHEMES)} and a host and port")
    if parts[4] or parts[5]:
        raise ValueError("found options after '?' or '#' in the url; write them as keys of the store")
    mode = scheme.partition("+")[2] or "single"
    path = [part for part in parts[3].split("/") if part]
    master = path.pop(0) if mode == "sentinel" and path else None
    if mode == "sentinel" and (master is None or _MASTER.fullmatch(master) is None):
        raise ValueError("expected the master's name after the sentinels, like .../mymaster")
    if mode == "cluster" and path:
        raise ValueError(f"found the path /{path[0]}, but a cluster has one database only; remove it")
    if len(path) > 1 or (path and not path[0].isascii()) or (path and not path[0].isdigit()):
        raise ValueError(f"found the path /{'/'.join(path)}; expected the number of a database, like /0")
    endpoints = tuple(_endpoint(part, mode) for part in parts[2].split(","))
    if mode == "single" and len(endpoints) > 1:
        raise ValueError(f"found {len(endpoints)} hosts; several need redis+sentinel:// or redis+cluster://")
    return RedisUrl(mode, scheme.startswith("rediss"), endpoints, master, int(path[0]) if path else 0)


def _endpoint(text: str, mode: str) -> tuple[str, int]:
    parts = _HOST.fullmatch(text)
    if parts is None:
        raise ValueError(f"found the host {text!r}; expected host or host:port")
    port = int(parts[2]) if parts[2] else DEFAULT_SENTINEL_PORT if mode == "sentinel" else DEFAULT_PORT
    if not 1 <= port <= 65535:
        raise ValueError(f"found the port {port}; expected 1 to 65535")
    return parts[1].strip("[]"), port
