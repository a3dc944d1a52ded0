"""The field types of all sections, and the base class that lets a section check itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from hicache.config.units import (
    describe,
    format_bytes,
    format_duration,
    parse_bytes,
    parse_duration,
    parse_fraction,
)

MAX_PORT = 65535
_PORT = re.compile(r"[1-9][0-9]{0,4}")

Path = tuple[str | int, ...]
"""Where a key stands: ``("tiers", "stores", 0, "path")``."""

NAME_PATTERN = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}", re.ASCII)
PROBLEMS = "hicache_problems"
"""Type of the pydantic error that carries a section's own findings."""


class Problem(NamedTuple):
    """One thing that is wrong: the key, relative to the section that says so, and one sentence."""

    path: Path
    text: str


class Section(BaseModel):
    """A mapping of the YAML. Strict, frozen, no unknown keys; a key set to null is as if not given."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)

    def problems(self) -> Iterator[Problem]:
        """Contradictions between this section's keys; called once all of them are well formed."""
        return iter(())

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: object) -> object:
        if not isinstance(data, Mapping):
            return data
        return {k: v for k, v in data.items() if v is not None or k not in cls.model_fields}

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        found = tuple(self.problems())
        if found:
            text = "; ".join(f"{dotted(problem.path)}: {problem.text}" for problem in found)
            raise PydanticCustomError(PROBLEMS, "{text}", {"text": text, "problems": found})
        return self


def dotted(path: Path) -> str:
    """``tiers.stores.0.path``."""
    return ".".join(str(part) for part in path)


def is_port(text: str) -> bool:
    """Whether this is the number of a port that others can be told of: 1 to 65535, without zeros before it."""
    return _PORT.fullmatch(text) is not None and int(text) <= MAX_PORT


def nearest(name: str, known: Sequence[str], *, likeness: float = 0.5) -> str | None:
    """The known name most like ``name``, if any is like it at all (1 means equal)."""
    folded = {candidate.lower(): candidate for candidate in known}
    close = get_close_matches(name.lower(), list(folded), n=1, cutoff=likeness)
    return folded[close[0]] if close else None


def one_of(kind: str, known: Sequence[str]) -> Callable[[object], str]:
    """A parser that takes one of ``known`` and otherwise names the nearest and all of them."""

    def parse(value: object) -> str:
        if isinstance(value, str) and value in known:
            return value
        near = nearest(value, known) if isinstance(value, str) else None
        hint = f"did you mean {near}? " if near else ""
        raise ValueError(f"found {describe(value)}; {hint}{kind} is one of {', '.join(known)}")

    return parse


def _text(value: str) -> str:
    if not value.strip():
        raise ValueError("found an empty text; expected at least one character")
    if not value.isprintable():
        raise ValueError("found a line break or another control character; expected plain text")
    return value


def _name(value: str) -> str:
    if NAME_PATTERN.fullmatch(value) is None or "__" in value:
        raise ValueError(
            f"found {describe(value)}; expected a letter, then letters, digits, '-' or single '_',"
            " at most 64 in all"
        )
    return value


def _positive(seconds: float) -> float:
    if seconds == 0:
        raise ValueError("found no time at all; expected more than 0s")
    return seconds


Bytes = Annotated[
    int, BeforeValidator(parse_bytes), PlainSerializer(format_bytes, return_type=str, when_used="json")
]
"""A size, kept as bytes."""

SecondsOrZero = Annotated[
    float,
    BeforeValidator(parse_duration),
    PlainSerializer(format_duration, return_type=str, when_used="json"),
]
"""A duration, kept as seconds."""

Seconds = Annotated[SecondsOrZero, AfterValidator(_positive)]
"""A duration that bounds something, so more than 0."""

Fraction = Annotated[float, BeforeValidator(parse_fraction)]
Text = Annotated[str, AfterValidator(_text)]
Name = Annotated[str, AfterValidator(_name)]
"""A name that is safe in paths, keys and environment variables."""
