"""The schema written out as Markdown: every key with its type, default and meaning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from hicache.config.fields import Section
from hicache.config.schema import HiCacheConfig
from hicache.config.units import (
    format_bytes,
    format_duration,
    parse_bytes,
    parse_duration,
    parse_fraction,
)
from hicache.config.walk import sections_under

NO_DEFAULT = "–"
_PARSED = {parse_bytes: "size", parse_duration: "duration", parse_fraction: "fraction"}
_PLAIN = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    dict: "mapping",
    list: "list",
}


def configuration_page() -> str:
    """One table for each section, in the schema's order; a heading is the section's path."""
    return "\n".join(_section(HiCacheConfig, "", {}))


def _section(section: type[Section], path: str, told: dict[type[Section], str]) -> Iterator[str]:
    """``told``: where sections stand on the page already (each store has a breaker)."""
    if section in told:
        yield from (f"## `{path}`", "", f"The same as `{told[section]}`.", "")
        return
    told[section] = path
    if path:
        yield from (f"## `{path}`{_which(section)}", "", " ".join((section.__doc__ or "").split()), "")
    below = {name: sections_under(field.annotation) for name, field in section.model_fields.items()}
    yield from ("| key | type | default | meaning |", "|---|---|---|---|")
    for name, field in section.model_fields.items():
        kind, default = (
            ("section", "required" if field.is_required() else NO_DEFAULT)
            if below[name]
            else (_kind(field), _default(field))
        )
        yield f"| `{name}` | {kind} | {default} | {(field.description or '').replace('|', '/')} |"
    yield ""
    for name, children in below.items():
        for suffix, child in children:
            yield from _section(child, f"{path}.{name}{suffix}".lstrip("."), told)


def _which(section: type[Section]) -> str:
    """Of several sections that may stand at one path: which."""
    kinds = get_args(section.model_fields["kind"].annotation) if "kind" in section.model_fields else ()
    return f", kind {kinds[0]}" if len(kinds) == 1 else ""


def _kind(field: FieldInfo) -> str:
    """What to write, in the words of ``config.units``."""
    choices, kinds, found = [], [], []
    pending: list[object] = [field.annotation, *field.metadata]
    while pending:
        part = pending.pop(0)
        if get_origin(part) is Literal:
            choices += [f"`{choice}`" for choice in get_args(part)]
        elif get_origin(part) in _PLAIN or part in _PLAIN:
            kinds.append(_PLAIN[get_origin(part) or part])  # type: ignore[index]  # one of its keys
        elif get_origin(part) is Annotated or get_args(part):
            pending += get_args(part)
        else:
            found += [_PARSED[func] for func in [getattr(part, "func", None)] if func in _PARSED]
    return " or ".join(dict.fromkeys(choices or found or kinds)) or "text"


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return "required"
    if default is None:
        return NO_DEFAULT
    match _kind(field):
        case "size":
            default = format_bytes(default)
        case "duration":
            default = format_duration(default)
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"
