"""Every error HiCache raises.

::

    HiCacheError
    ├── ConfigError            a setting is unknown, contradictory or does not fit
    ├── TraceError             a trace file breaks its format
    ├── CapacityError          a pool cannot give what was asked, now
    ├── TierError              a tier failed (never raised into an engine's step)
    │   ├── TierUnavailableError
    │   ├── TierTimeoutError
    │   └── CorruptPayloadError
    ├── RankGroupError         the ranks of one model cannot agree any more
    ├── ProtocolError          a caller broke a rule: double release, unknown ticket
    ├── InvariantError         audit() found the cache's own state broken
    ├── CoreUnavailableError   the tree core asked for cannot run here
    └── EngineUnavailableError the engine that an adapter attaches to is missing or too old

Bad token arrays raise the built-in ``ValueError``, with the position of the offender.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_LOGIN_IN_URL = re.compile(r"(\w://)[^\s'\"]*@")


def without_logins(text: str) -> str:
    """The text, with ``user:password@`` of every URL in it left out: it may go to a log."""
    return _LOGIN_IN_URL.sub(r"\1…@", text)


class HiCacheError(Exception):
    """Base of all errors of this package."""


class ConfigError(HiCacheError):
    """One or more settings are wrong. ``problems`` holds one line for each, path first.

    What was found is often quoted; a password in a URL never is, wherever it was written.
    """

    def __init__(self, problems: Sequence[str], *, source: str | None = None) -> None:
        self.problems = tuple(map(without_logins, problems))
        self.source = source
        head = f"{source}: " if source else ""
        super().__init__(head + "\n".join(self.problems))


class TraceError(HiCacheError):
    """A line of a trace cannot be read. ``line`` counts from 1; 0 is the file as a whole."""

    def __init__(self, message: str, *, path: str, line: int) -> None:
        self.path = path
        self.line = line
        self.reason = message
        super().__init__(f"{path}:{line}: {message}" if line else f"{path}: {message}")


class CapacityError(HiCacheError):
    """A pool cannot give the slots asked for; nothing was changed."""

    def __init__(self, message: str, *, required_slots: int, free_slots: int) -> None:
        self.required_slots = required_slots
        self.free_slots = free_slots
        super().__init__(message)


class TierError(HiCacheError):
    """A tier failed. Inside the cache this shortens the hit; it never reaches the engine."""


class TierUnavailableError(TierError):
    """The tier refuses service: closed, unreachable, full."""


class TierTimeoutError(TierError):
    """The tier did not answer within its bound."""


class CorruptPayloadError(TierError):
    """Bytes came back that are not the ones stored."""


class RankGroupError(HiCacheError):
    """A rank did not come in time, has left, or made another call; their caches agree on nothing any more.

    What to do: close the caches of all ranks and open them anew, as after the death of a rank.
    """


class ProtocolError(HiCacheError):
    """The caller broke a rule of the interface; nothing was changed."""


class InvariantError(HiCacheError):
    """``audit()`` found broken state. ``findings`` holds one sentence for each."""

    def __init__(self, findings: Sequence[str]) -> None:
        self.findings = tuple(findings)
        super().__init__("; ".join(self.findings))


class CoreUnavailableError(HiCacheError):
    """The requested tree core is not installed or cannot do what was asked."""


class EngineUnavailableError(HiCacheError):
    """The engine that an adapter attaches to is missing or too old; the message names the version wanted."""
