"""A YAML file as plain data plus the line of every key. Plain YAML only: no tags, no duplicates."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path as FilePath

import yaml

from hicache.config.fields import Path, dotted, nearest
from hicache.errors import ConfigError

MAX_BYTES = 4 * 2**20
MAX_VALUES = 10_000
"""Far beyond any real file; stops an alias that names an alias that names an alias."""

_CORE = "tag:yaml.org,2002:"
_PLAIN_TAGS = frozenset(_CORE + name for name in ("str", "int", "float", "bool", "null", "map", "seq"))
_READ_AS_TEXT = frozenset(_CORE + name for name in ("timestamp", "value"))

_REMEDIES = {
    r"'\t'": "indent by spaces, not by tabs",
    "another document": "expected one: remove the line --- and what belongs to the other",
    "end of stream": "a quote or a bracket before it is not closed",
}
"""What helps, by what the YAML parser says."""
_QUOTED = re.compile(
    r"""(?P<shown>'(?:[^'\\]|\\[^xuU]|\\(?:x..|u.{4}|U.{8})|<[^']*>)'|"'")|'(?:[^'\\]|\\.)*'|"[^"]*\""""
)
"""What the YAML parser quotes, as ``repr`` writes it, one after the other: the quotes of two are no pair."""


@dataclass(slots=True)
class Document:
    """A file, read.

    Args:
        name: how messages call it.
        data: mappings, lists and scalars only.
        lines: the line of each key and list entry, from 1.
    """

    name: str
    data: dict[str, object]
    lines: dict[Path, int] = field(default_factory=dict)


def preset_names() -> tuple[str, ...]:
    """Names that stand for a file shipped with the package."""
    folder = files("hicache.config").joinpath("presets")
    return tuple(sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml")))


def read_document(source: str | FilePath) -> Document:
    """Read a file, or a preset by its name.

    A bare preset name always means the preset; ``./cpu`` and ``cpu.yaml`` mean a file.

    Raises:
        ConfigError: it cannot be read, or is not plain YAML with a mapping at its top.
    """
    name = str(source)
    if not name:
        presets = ", ".join(preset_names())
        raise ConfigError([f"the file's name is empty; expected a YAML file, or a preset: {presets}"])
    if name in preset_names():
        resource = files("hicache.config").joinpath("presets", f"{name}.yaml")
        return parse_document(resource.read_bytes(), f"{name}.yaml")
    try:
        with FilePath(name).open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError([f"{name}: no such file{_preset_hint(name)}"]) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError([f"{name}: cannot be read ({reason}); expected a YAML file"]) from None
    return parse_document(raw, name)


def parse_document(raw: bytes, name: str) -> Document:
    """Turn the bytes of a file into a document. Raises ``ConfigError`` with every duplicate and tag."""
    if len(raw) > MAX_BYTES:
        raise ConfigError([f"{name}: over {MAX_BYTES} bytes; expected a configuration"])
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            [f"{name}:{line}: byte {error.start} is not UTF-8; save the file as UTF-8"]
        ) from None
    reader = _Reader(name)
    try:
        loader = yaml.SafeLoader(text)
        try:
            root = loader.get_single_node()
            data = None if root is None else reader.read(loader, root, ())
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        # Only the place and the reason: the library's own text quotes the file, secrets included.
        mark = error.problem_mark or error.context_mark
        place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise ConfigError([f"{place}: not valid YAML: {_reason(error)}"]) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError([f"{name}:{line}: not valid YAML: {error.reason}"]) from None
    except RecursionError:
        raise ConfigError([f"{name}: nested too deeply to be a configuration"]) from None
    if reader.problems:
        raise ConfigError(reader.problems)
    if data is None:
        raise ConfigError([f"{name}: is empty; expected a mapping with at least model and tiers"])
    if not isinstance(data, dict):
        kind = "a list" if isinstance(data, list) else "a single value"
        raise ConfigError([f"{name}: holds {kind}; expected a mapping with at least model and tiers"])
    return Document(name, data, reader.lines)


def parse_value(text: str) -> object:
    """One value written in an environment variable or after ``--set``: YAML, by the same rules.

    Raises:
        ConfigError: with one problem, whose place is left for the caller to name.
    """
    reader = _Reader("")
    try:
        loader = yaml.SafeLoader(text)
        try:
            root = loader.get_single_node()
            value = None if root is None else reader.read(loader, root, ())
        finally:
            loader.dispose()
    except (yaml.YAMLError, RecursionError) as error:
        reason = _reason(error) if isinstance(error, yaml.MarkedYAMLError) else "it cannot be read"
        raise ConfigError([f"not valid YAML: {reason}; quote text with special characters"]) from None
    if reader.problems:
        raise ConfigError([problem.lstrip(":0123456789 ") for problem in reader.problems])
    return value


class _Reader:
    """Builds data from YAML's nodes and collects what it refuses."""

    def __init__(self, name: str) -> None:
        self.problems: list[str] = []
        self.lines: dict[Path, int] = {}
        self._name = name
        self._num_values = 0
        self._open: set[int] = set()

    def read(self, loader: yaml.SafeLoader, node: yaml.Node, path: Path) -> object:
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            if self._num_values == MAX_VALUES + 1:
                self._refuse(node, path, f"more than {MAX_VALUES} values; expected a configuration")
            return None
        if id(node) in self._open:
            self._refuse(node, path, "an alias that contains itself")
            return None
        if node.tag not in _PLAIN_TAGS and not (
            isinstance(node, yaml.ScalarNode) and node.tag in _READ_AS_TEXT
        ):
            self._refuse(
                node,
                path,
                f"the tag {_short_tag(node.tag)} is not allowed; write plain YAML, and quote text that begins with !",
            )
            return None
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return {
                    key: self.read(loader, value, (*path, key)) for key, value in self._entries(node, path)
                }
            if isinstance(node, yaml.SequenceNode):
                for i, value in enumerate(node.value):
                    self.lines[(*path, i)] = value.start_mark.line + 1
                return [self.read(loader, value, (*path, i)) for i, value in enumerate(node.value)]
            return self._scalar(loader, node, path)
        finally:
            self._open.discard(id(node))

    def _entries(self, node: yaml.MappingNode, path: Path) -> Iterator[tuple[str, yaml.Node]]:
        seen: dict[str, int] = {}
        for key_node, value in node.value:
            if key_node.tag == _CORE + "merge":
                self._refuse(key_node, path, "merge keys (<<) are not supported; write the keys out")
                continue
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _CORE + "str":
                shown = key_node.value if isinstance(key_node, yaml.ScalarNode) else "a collection"
                self._refuse(key_node, path, f"the key {shown} is not text; quote it")
                continue
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if key in seen:
                self._refuse(key_node, (*path, key), f"given twice, first in line {seen[key]}; keep one")
                continue
            seen[key] = line
            self.lines[(*path, key)] = line
            yield key, value

    def _scalar(self, loader: yaml.SafeLoader, node: yaml.Node, path: Path) -> object:
        if node.tag in _READ_AS_TEXT:
            return node.value
        if node.tag in (_CORE + "int", _CORE + "float") and ":" in node.value:
            self._refuse(
                node, path, f"{node.value} is a number to base 60 in YAML; quote it, or write a unit"
            )
            return None
        try:
            return loader.construct_object(node)
        except (ValueError, OverflowError, ArithmeticError):
            self._refuse(node, path, "a number that cannot be read; quote it if it is text")
            return None

    def _refuse(self, node: yaml.Node, path: Path, text: str) -> None:
        line = node.start_mark.line + 1
        place = f"{self._name}:{line}"
        self.problems.append(f"{dotted(path)} ({place}): {text}" if path else f"{place}: {text}")


def _reason(error: yaml.MarkedYAMLError) -> str:
    """Why it is no YAML, without the words of the file: a password may begin as an alias does (``*``)."""
    reason = _QUOTED.sub(_hidden, error.problem or error.context or "it cannot be read")
    return next((f"{reason}; {remedy}" for words, remedy in _REMEDIES.items() if words in reason), reason)


def _hidden(quoted: re.Match[str]) -> str:
    """A word of the file is not shown. A single character, or one of the parser's own names (``<block end>``), is."""
    return quoted[0] if quoted["shown"] else "'…'"


def _short_tag(tag: str) -> str:
    """YAML's own tags by their names; another one may be a password that begins with ``!``."""
    return "!!" + tag.removeprefix(_CORE) if tag.startswith(_CORE) else "!…"


def _preset_hint(name: str) -> str:
    presets = preset_names()
    near = nearest(name, presets)
    hint = f" (did you mean {near}?)" if near else ""
    return f", and no preset of that name; the presets are {', '.join(presets)}{hint}"
