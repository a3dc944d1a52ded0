"""The schema seen as a tree of keys: what may stand where, without any values."""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Union, get_args, get_origin

from hicache.config.fields import Path, Section
from hicache.config.schema import HiCacheConfig


def section_at(path: Path, data: object = None) -> type[Section] | None:
    """The section whose keys are looked up at ``path``; None where none is.

    Args:
        data: the tree that ``path`` leads into; its ``kind`` picks among the stores.
    """
    return next(iter(_sections(_annotation(path, data))), None)


def is_text(path: Path, data: object = None) -> bool:
    """Whether the schema wants plain text at ``path`` (so that 007 stays 007)."""
    annotation = _annotation(path, data)
    kinds = [option for option in _options(annotation) if option is not type(None)]
    return kinds == [str]


def description_at(path: Path, data: object = None) -> str | None:
    """What the schema says about the key at ``path``."""
    parent = section_at(path[:-1], data)
    if parent is None or path[-1] not in parent.model_fields:
        return None
    return parent.model_fields[str(path[-1])].description


def schema_keys() -> tuple[tuple[str, str], ...]:
    """(dotted key, description) of every key, in order; ``*`` stands for a name, ``[]`` for an entry."""
    return tuple(dict.fromkeys(_keys(HiCacheConfig, "")))


def _keys(section: type[Section], prefix: str) -> Iterator[tuple[str, str]]:
    for name, field in section.model_fields.items():
        key = f"{prefix}{name}"
        yield key, field.description or ""
        for suffix, child in sections_under(field.annotation):
            yield from _keys(child, f"{key}{suffix}.")


def sections_under(annotation: object) -> list[tuple[str, type[Section]]]:
    """The sections that may stand at a key, with what is between: ``.*`` for a name, ``[]`` for an entry."""
    found: list[tuple[str, type[Section]]] = []
    for option in _options(annotation):
        arguments = get_args(option)
        if get_origin(option) is dict:
            found += ((".*", child) for child in _sections(arguments[1]))
        elif get_origin(option) is list:
            found += (("[]", child) for child in _sections(arguments[0]))
        elif isinstance(option, type) and issubclass(option, Section):
            found.append(("", option))
    return found


def _annotation(path: Path, data: object) -> object:
    """The annotation of the value at ``path``; None where the schema has no such place."""
    annotation: object = HiCacheConfig
    here = data
    for step in path:
        here = _step(here, step)
        annotation = _child(annotation, step, here)
    return annotation


def _child(annotation: object, step: str | int, value: object) -> object:
    for option in _options(annotation):
        arguments = get_args(option)
        if get_origin(option) is dict:
            return arguments[1]
        if get_origin(option) is list and isinstance(step, int):
            return _entry(arguments[0], value)
        if isinstance(option, type) and issubclass(option, Section) and step in option.model_fields:
            return option.model_fields[str(step)].annotation
    return None


def _entry(annotation: object, value: object) -> object:
    """The one kind of a list's entry that ``value`` names, else all of them."""
    kind = _step(value, "kind")
    for option in _sections(annotation):
        field = option.model_fields.get("kind")
        if field is not None and kind in get_args(field.annotation):
            return option
    return annotation


def _sections(annotation: object) -> list[type[Section]]:
    return [o for o in _options(annotation) if isinstance(o, type) and issubclass(o, Section)]


def _options(annotation: object) -> list[object]:
    """The alternatives of an annotation, without ``Annotated`` and ``| None`` around them."""
    if get_origin(annotation) is Annotated:
        return _options(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [leaf for option in get_args(annotation) for leaf in _options(option)]
    return [annotation]


def _step(value: object, step: str | int) -> object:
    if isinstance(value, dict):
        return value.get(step)
    if isinstance(value, list) and isinstance(step, int) and step < len(value):
        return value[step]
    return None
