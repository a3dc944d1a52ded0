"""Findings of pydantic as lines for people: where, what was found, what would be right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from hicache.config.checks import Store, contradictions, machine_problems
from hicache.config.fields import PROBLEMS, Path, Problem, Section, nearest
from hicache.config.model import ModelConfig, RanksConfig
from hicache.config.policy import PolicyConfig
from hicache.config.schema import HiCacheConfig
from hicache.config.tiers import STORE_KINDS, DeviceConfig, HostConfig, StoreConfig
from hicache.config.units import describe
from hicache.config.walk import description_at, schema_keys, section_at
from hicache.errors import without_logins

_Checked = TypeVar("_Checked", bound=Section)

_REMEDIES = {
    "password": "a password never stands in a configuration; name where it is with password_env"
    " (a variable) or password_file (a file)",
    "redis capacity": "a Redis server bounds itself (maxmemory); remove it, or bound the age with ttl",
}
_EXPECTED = {
    "string_type": "text (quote it if it looks like a number)",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "bool_type": "true or false",
    "float_type": "a number",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "list_type": "a list",
}


SPLITS: dict[Path, str] = {
    ("tiers", "device", "split"): "shared, fixed,",
    ("tiers", "host", "split"): "shared,",
}
"""Where pools say what each component gets, and the words that may stand there."""


def validate(data: dict[str, object]) -> tuple[HiCacheConfig | None, list[Problem]]:
    """Check a merged tree against schema, contradictions and this machine; find all problems at once.

    Unknown keys are named, then left out so that the rest can still be checked; where a section is
    wrong in itself, what holds between the others is still checked.
    """
    misplaced = list(_logins(data, ()))
    try:
        config = HiCacheConfig.model_validate(data)
    except ValidationError as error:
        return None, _distinct(chain(misplaced, _all_problems(data, error)))
    problems = [*misplaced, *machine_problems(dict(enumerate(config.tiers.stores)))]
    return (None, problems) if problems else (config, [])


def _logins(data: object, path: Path) -> Iterator[Problem]:
    """URLs with a password where no address of a store stands (that refuses them itself): all else is shown."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            if key != "url":
                yield from _logins(value, (*path, key))
    elif isinstance(data, list):
        for number, value in enumerate(data):
            yield from _logins(value, (*path, number))
    elif isinstance(data, str) and data != without_logins(data):
        yield Problem(
            path, "a URL with a user name or password stands here, where anybody may read it; leave that out"
        )


def _all_problems(data: dict[str, object], error: ValidationError) -> Iterator[Problem]:
    unknown = [path for details in error.errors() if (path := _unknown(details)) is not None]
    if unknown:
        yield from (_unknown_key(path, data) for path in unknown)
        data = _without(data, unknown)
        try:
            config = HiCacheConfig.model_validate(data)
        except ValidationError as rest:
            error = rest
        else:
            yield from machine_problems(dict(enumerate(config.tiers.stores)))
            return
    suggested = {path for path in (_suggestion(path, data) for path in unknown) if path is not None}
    for details in error.errors():
        yield from (p for p in _problems(details, data) if p.path not in suggested)
    yield from (p for p in _between_sections(data) if p.path not in suggested)


def _problems(details: ErrorDetails, data: object) -> Iterator[Problem]:
    path = _path(details)
    if details["type"] == PROBLEMS:
        yield from (Problem((*path, *p.path), p.text) for p in details.get("ctx", {})["problems"])
    else:
        yield Problem(path, _sentence(details, path, data))


def _sentence(details: ErrorDetails, path: Path, data: object) -> str:
    kind, context = details["type"], details.get("ctx", {})
    # A secret may have been written where its name belongs, so such a value is never repeated.
    found = "a value" if "password" in str(path[-1:]) else describe(details["input"])
    match kind:
        case "missing":
            what = description_at(path, data)
            return f"missing; expected {what}" if what else "missing"
        case "value_error":
            return str(context["error"])
        case "greater_than_equal":
            return f"found {found}; expected at least {context['ge']}"
        case "less_than_equal":
            return f"found {found}; expected at most {context['le']}"
        case "union_tag_invalid" | "union_tag_not_found" if path in SPLITS:
            return f"found {found}; expected {SPLITS[path]} or a mapping with the share of each component"
        case "union_tag_invalid":
            near = nearest(str(context["tag"]), STORE_KINDS)
            hint = f"did you mean {near}? " if near else ""
            return f"found {context['tag']!r}; {hint}the kind of a store is one of {', '.join(STORE_KINDS)}"
        case "union_tag_not_found":
            return f"missing; the kind of a store is one of {', '.join(STORE_KINDS)}"
        case "invalid_key":
            return "the key is not text; quote it"
    if kind in _EXPECTED:
        what = description_at(path, data)
        return f"found {found}; expected {_EXPECTED[kind]}{f' ({what})' if what else ''}"
    return f"found {found}; {details['msg']}"


def _unknown(details: ErrorDetails) -> Path | None:
    return _path(details) if details["type"] == "extra_forbidden" else None


def _unknown_key(path: Path, data: object) -> Problem:
    name, parent = str(path[-1]), section_at(path[:-1], data)
    known = list(parent.model_fields) if parent else []
    kind = describe_kind(path[:-1], data)
    remedy = _REMEDIES.get(f"{kind} {name}") or _REMEDIES.get(name)
    if remedy is not None:
        return Problem(path, f"not allowed: {remedy}")
    elsewhere = [key for key, _ in schema_keys() if key.rpartition(".")[2] == name]
    near = nearest(name, known, likeness=0.75 if elsewhere else 0.5)
    if near is not None:
        hint = f"did you mean {near}?"
    else:
        hint = f"it belongs at {elsewhere[0]}" if elsewhere else "nothing is called like that"
    return Problem(path, f"unknown key; {hint} (known here: {', '.join(known)})")


def _suggestion(path: Path, data: object) -> Path | None:
    """The key that an unknown one was probably meant to be: that one is not also called missing."""
    parent = section_at(path[:-1], data)
    near = nearest(str(path[-1]), list(parent.model_fields)) if parent else None
    return None if near is None else (*path[:-1], near)


def describe_kind(path: Path, data: object) -> str:
    """The ``kind`` written in the mapping at ``path``, if any."""
    here = _get(data, path)
    kind = here.get("kind") if isinstance(here, dict) else None
    return kind if isinstance(kind, str) else ""


def _between_sections(data: dict[str, object]) -> Iterator[Problem]:
    """Contradictions among those sections that are right in themselves, and this machine's refusals."""
    stores: dict[int, Store] = {}
    listed = _get(data, ("tiers", "stores"))
    for i, entry in enumerate(listed if isinstance(listed, list) else []):
        try:
            stores[i] = TypeAdapter[Store](StoreConfig).validate_python(entry)
        except ValidationError:
            continue
    yield from contradictions(
        model=_section(ModelConfig, _get(data, ("model",))),
        ranks=_section(RanksConfig, _get(data, ("ranks",)) or {}),
        device=_section(DeviceConfig, _get(data, ("tiers", "device"))),
        host=_section(HostConfig, _get(data, ("tiers", "host"))),
        stores=stores,
        policy=_section(PolicyConfig, _get(data, ("policy",)) or {}),
    )
    yield from machine_problems(stores)


def _section(section: type[_Checked], data: object) -> _Checked | None:
    try:
        return section.model_validate(data)
    except ValidationError:
        return None


def _path(details: ErrorDetails) -> Path:
    """Pydantic's place without what it adds: the kind of a store, the key marker, union members."""
    path = tuple(step for step in details["loc"] if step != "[key]")
    if path[:3] in SPLITS:
        return path[:3] + path[4:]
    if details["type"] in ("union_tag_invalid", "union_tag_not_found"):
        return (*path, "kind")
    if path[:2] == ("tiers", "stores") and len(path) > 3 and path[3] in STORE_KINDS:
        path = (*path[:3], *path[4:])
    return path


def _get(data: object, path: Path) -> object:
    for step in path:
        if isinstance(data, Mapping):
            data = data.get(step)
        elif isinstance(data, list) and isinstance(step, int) and step < len(data):
            data = data[step]
        else:
            return None
    return data


def _without(data: object, paths: list[Path]) -> dict[str, object]:
    """A copy of ``data`` without the keys at ``paths``."""

    def copy(value: object, here: Path) -> object:
        if isinstance(value, dict):
            return {k: copy(v, (*here, k)) for k, v in value.items() if (*here, k) not in paths}
        if isinstance(value, list):
            return [copy(v, (*here, i)) for i, v in enumerate(value)]
        return value

    copied = copy(data, ())
    assert isinstance(copied, dict)
    return copied


def _distinct(problems: Iterator[Problem]) -> list[Problem]:
    return list(dict.fromkeys(problems))
