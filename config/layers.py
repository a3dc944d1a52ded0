"""Values from several places laid over each other, each remembering where it came from.

Later layers win. A mapping merges key by key; a list or a scalar replaces. ``null`` takes back what
lower layers said, so that the default holds again (or, for a component or a tier, that it is gone).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import PurePath

from hicache.config.document import Document, parse_value
from hicache.config.fields import Path, dotted
from hicache.config.units import describe
from hicache.config.walk import is_text
from hicache.errors import ConfigError

_Holder = dict[str, object] | list[object]

PREFIX = "HICACHE__"
SEPARATOR = "__"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from."""

    kind: str
    place: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.place}" if self.place else self.kind


DEFAULT = Origin("default")
ARGUMENT = Origin("argument")
MAPPING = Origin("mapping")


@dataclass(slots=True)
class Layers:
    """The merged tree so far, the origin of each node that a layer gave, and what could not be laid."""

    data: dict[str, object] = field(default_factory=dict)
    origins: dict[Path, Origin] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def lay_document(self, document: Document) -> None:
        """Lay a file, which is the lowest layer."""
        self.data = document.data
        self.origins = {
            path: Origin("file", f"{document.name}:{line}") for path, line in document.lines.items()
        }

    def lay_mapping(self, source: Mapping[str, object]) -> None:
        """Lay what a caller gave as sections; keys that are no text become problems."""
        tree = _plain(source)
        assert isinstance(tree, dict)
        for key, value in tree.items():
            if isinstance(key, str):
                self._lay((key,), value, MAPPING)
            else:
                self.problems.append(f"{key!r} (mapping): the key is not text; expected a name")

    def lay_environment(self, environ: Mapping[str, str]) -> None:
        """Lay every ``HICACHE__SECTION__KEY``; parents before children, whatever their order."""
        named = _texts(environ, "environ", "variables and their text, like os.environ")
        names = [name for name in named if name.startswith(PREFIX)]
        for name in sorted(names, key=lambda name: (name.count(SEPARATOR), name)):
            origin = Origin("environment", name)
            parts = name.removeprefix(PREFIX).split(SEPARATOR)
            if not all(parts):
                self.problems.append(
                    f"{name} (environment): expected names joined by '__', like HICACHE__TIERS__HOST__CAPACITY"
                )
                continue
            if not isinstance(environ[name], str):
                self.problems.append(
                    f"{name} (environment): {describe(environ[name])} is no text, which is all that a variable holds"
                )
                continue
            if not environ[name].strip():
                path = dotted(tuple(part.lower() for part in parts))
                self.problems.append(
                    f"{path} ({origin}): is empty; unset it, or write null to go back to the default"
                )
                continue
            self._lay_text(self._spelling(parts), environ[name], origin)

    def lay_arguments(self, overrides: Mapping[str, object]) -> None:
        """Lay values by dotted path; parents before children."""
        names = _texts(overrides, "overrides", 'paths and values, like {"tiers.host.capacity": "20GiB"}')
        for name in sorted(names, key=lambda name: name.count(".")):
            parts = name.split(".")
            if not all(parts):
                self.problems.append(f"{name!r} (argument): expected a path like tiers.host.capacity")
                continue
            self._lay(_path(parts), _plain(overrides[name]), ARGUMENT)

    def origin(self, path: Path) -> Origin:
        """Where the value at ``path`` came from; the nearest parent's place if it was not given."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.origins:
                return self.origins[path[:end]]
        return DEFAULT

    def _lay_text(self, path: Path, text: str, origin: Origin) -> None:
        try:
            value = parse_text(path, text, self.data)
        except ConfigError as error:
            self.problems.extend(f"{dotted(path)} ({origin}): {problem}" for problem in error.problems)
        else:
            self._lay(path, value, origin)

    def _spelling(self, parts: list[str]) -> Path:
        """The path that upper-case names stand for: as the tree spells a key, else in lower case."""
        here: object = self.data
        path: list[str | int] = []
        for part in parts:
            wanted = part.lower()
            known = list(here) if isinstance(here, dict) else []
            name = next((k for k in known if k.lower().replace("-", "_") == wanted), wanted)
            step = _path([name])[0]
            path.append(step)
            if isinstance(here, dict):
                here = here.get(name)
            elif isinstance(here, list) and isinstance(step, int) and step < len(here):
                here = here[step]
            else:
                here = None
        return tuple(path)

    def _lay(self, path: Path, value: object, origin: Origin) -> None:
        """Put ``value`` at ``path``, making the mappings and lists on the way."""
        here = self._holder(self.data, path, 0, origin)
        for depth, (step, following) in enumerate(pairwise(path), start=1):
            if here is None:
                return
            child = _child(here, step)
            if child is None:
                child = [] if isinstance(following, int) else {}
                _put(here, step, child)
                self.origins[path[:depth]] = origin
            here = self._holder(child, path, depth, origin)
        if here is not None:
            self._merge(here, path[-1], path, value, origin)

    def _holder(self, here: object, path: Path, depth: int, origin: Origin) -> _Holder | None:
        """``here`` as what can hold ``path[depth]``; None, and a problem noted, if it cannot."""
        if isinstance(here, dict):
            return here
        step, place = path[depth], dotted(path[:depth])
        if not isinstance(here, list):
            found = f"{place} is {describe(here)}, not a mapping"
        elif not isinstance(step, int) or step > len(here):
            found = f"{place} is a list of {len(here)}; expected a number up to {len(here)}, not {step}"
        else:
            here.extend([None] if step == len(here) else [])
            return here
        self.problems.append(f"{dotted(path)} ({origin}): {found}")
        return None

    def _merge(self, holder: _Holder, step: str | int, path: Path, value: object, origin: Origin) -> None:
        old = _child(holder, step)
        if isinstance(old, dict) and isinstance(value, dict):
            for key, child in value.items():
                self._merge(old, key, (*path, key), child, origin)
            return
        for known in [known for known in self.origins if known[: len(path)] == path]:
            del self.origins[known]
        if value is None and isinstance(holder, dict) and old is not None:
            del holder[str(step)]
        else:
            _put(holder, step, value)
            self._mark(path, value, origin)

    def _mark(self, path: Path, value: object, origin: Origin) -> None:
        self.origins[path] = origin
        children = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        )
        for key, child in children:
            self._mark((*path, key), child, origin)


def parse_text(path: Path, text: str, data: object = None) -> object:
    """A value written as text: YAML, but verbatim where the schema wants text.

    Args:
        data: the tree that ``path`` leads into, to know the kind of a list's entry.
    """
    if is_text(path, data):
        return None if text.strip() in ("null", "~") else text
    return parse_value(text)


def parse_argument(name: str, text: str) -> object:
    """The value of ``--set name=text``."""
    return parse_text(_path(name.split(".")), text)


def _child(holder: _Holder, step: str | int) -> object:
    if isinstance(holder, dict):
        return holder.get(str(step))
    assert isinstance(step, int)
    return holder[step]


def _put(holder: _Holder, step: str | int, value: object) -> None:
    if isinstance(holder, dict):
        holder[str(step)] = value
    else:
        assert isinstance(step, int)
        holder[step] = value


def _path(parts: list[str]) -> Path:
    return tuple(int(part) if part.isascii() and part.isdigit() else part for part in parts)


def _texts(given: Mapping[str, object], what: str, example: str) -> list[str]:
    """The names in a mapping that a caller gave. Raises ``ConfigError`` where it is none, or a name is not text."""
    found: object = given
    if not isinstance(found, Mapping):
        raise ConfigError([f"{what}: {describe(found)}; expected a mapping of {example}"])
    odd = [name for name in found if not isinstance(name, str)]
    if odd:
        raise ConfigError([f"{what}: {describe(name)} is no name; expected {example}" for name in odd])
    return list(found)


def _plain(value: object) -> object:
    """A private copy with plain containers; what is neither mapping nor list stays for the schema."""
    if isinstance(value, Mapping):
        return {key: _plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(child) for child in value]
    return str(value) if isinstance(value, PurePath) else value
