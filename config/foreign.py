"""Other caches' settings as ours: what they say, what each of it comes to, and what has no counterpart.

Only what a cache is and where its payload goes can be taken over. The model's components and L1 stand in
no other cache's settings, so they come from a configuration of ours, the *base*.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hicache.config.fields import nearest
from hicache.config.load import load_config
from hicache.config.schema import HiCacheConfig
from hicache.config.units import describe, format_bytes, format_duration
from hicache.errors import ConfigError

PASSWORD_VARIABLE = "HICACHE_REDIS_PASSWORD"  # noqa: S105  a name, not a secret
Tree = dict[str, Any]  # Any: what a YAML may hold


@dataclass(slots=True)
class Translation:
    """A configuration of ours as it grows, and what is to be said about it.

    Args:
        source: what is read, for messages.
        tree: ours, as a YAML would hold it.
        notes: (their key, one sentence): what has no counterpart, or is not quite the same.
        problems: one line for each value that cannot be read.
    """

    source: str
    tree: Tree
    notes: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def put(self, path: str, value: object) -> None:
        """Set one key of ours, by its dotted path."""
        *parents, key = path.split(".")
        place = self.tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[key] = value

    def note(self, key: str, text: str) -> None:
        """Tell of what has no counterpart here, or is not quite the same."""
        self.notes.append((key, text))

    def refuse(self, key: str, value: object, expected: str) -> None:
        """Tell of a value that cannot be read; ``finish`` raises for it."""
        self.problems.append(f"{key} ({self.source}): found {describe(value)}; expected {expected}")

    # ---- values ------------------------------------------------------------------------------
    def number(self, key: str, value: object) -> float | None:
        """A number above 0; None, with a problem told, for anything else."""
        found = value
        if isinstance(value, str):
            try:
                found = float(value)
            except ValueError:
                found = None
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < 1e15:
            self.refuse(key, value, "a number above 0")
            return None
        return float(found)

    def size(self, key: str, value: object, unit_bytes: int) -> str | None:
        """So many units as a size of ours."""
        number = self.number(key, value)
        return None if number is None else format_bytes(max(1, round(number * unit_bytes)))

    def seconds(self, key: str, value: object) -> str | None:
        """A duration of ours; None, with a problem told, for anything but a number above 0."""
        number = self.number(key, value)
        return None if number is None else format_duration(number)

    def flag(self, key: str, value: object) -> bool:
        """True or false; false, with a problem told, for anything else."""
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        self.refuse(key, value, "true or false")
        return False

    def word(self, key: str, value: object, known: Mapping[str, str]) -> str | None:
        """What one of their words is called here; None, with a problem told, for another one."""
        if isinstance(value, str) and value.lower() in known:
            return known[value.lower()]
        near = nearest(value, list(known)) if isinstance(value, str) else None
        hint = f"; did you mean {near}?" if near else ""
        self.refuse(key, value, f"one of {', '.join(known)}{hint}")
        return None

    def page_size(self, key: str, value: object, largest: int) -> None:
        """Set ``model.page_size``; a problem is told of what is no whole number above 0."""
        number = self.number(key, value)
        if number is None:
            return
        if number != int(number):
            self.refuse(key, value, "a whole number")
        elif number > largest:
            self.note(key, f"{int(number)} tokens are more than a page may have here; {largest} taken")
            self.put("model.page_size", largest)
        else:
            self.put("model.page_size", int(number))

    def add_store(self, section: Mapping[str, object]) -> None:
        """Add one section to ``tiers.stores``."""
        self.tree["tiers"]["stores"].append(dict(section))

    # ---- the end -----------------------------------------------------------------------------
    def finish(self) -> HiCacheConfig:
        """Ours, checked by the loader. Raises ``ConfigError`` with all that is wrong."""
        if self.problems:
            raise ConfigError(self.problems)
        return load_config(self.tree, environ={})


def begin(source: str, base: HiCacheConfig) -> Translation:
    """What the base says of the model and L1; L2, L3 and policies are the other cache's business."""
    explicit = base.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    tree: Tree = {key: explicit[key] for key in ("model", "ranks") if key in explicit}
    tree["tiers"] = {"device": explicit["tiers"]["device"], "host": {}, "stores": []}
    host = explicit["tiers"].get("host", {})
    if "pinned" in host:
        tree["tiers"]["host"]["pinned"] = host["pinned"]
    return Translation(source, tree)


_REMOTE = re.compile(r"([a-z+-]+)://(?:([^@/]*)@)?([^/?#]*)(/[^?#]*)?(?:[?#].*)?", re.ASCII | re.IGNORECASE)
_REDIS = {
    "redis": "redis",
    "rediss": "rediss",
    "valkey": "redis",
    "valkeys": "rediss",
    "resp": "redis",
    "redis-sentinel": "redis+sentinel",
    "rediss-sentinel": "rediss+sentinel",
    "redis-cluster": "redis+cluster",
    "rediss-cluster": "rediss+cluster",
}


def add_redis(translation: Translation, key: str, url: str) -> bool:
    """A store at a Redis address, the password left out. False if it is the address of something else."""
    parts = _REMOTE.fullmatch(url)
    scheme = _REDIS.get(parts[1].lower()) if parts else None
    if parts is None or scheme is None:
        return False
    credentials, hosts, path = parts[2] or "", parts[3], parts[4] or ""
    if "," in hosts and "+" not in scheme:
        scheme += "+cluster"
        path = ""
    if scheme.endswith("sentinel") and path in ("", "/"):
        path = "/mymaster"
        translation.note(key, "the master's name is not in the address; mymaster was taken, set yours")
    section: Tree = {"kind": "redis", "url": f"{scheme}://{hosts}{'' if path == '/' else path}"}
    user, _, password = credentials.partition(":")
    if user:
        section["username"] = user
    if password or user:
        section["password_env"] = PASSWORD_VARIABLE
        translation.note(key, f"the password is not copied; set the variable {PASSWORD_VARIABLE} to it")
    translation.add_store(section)
    return True
