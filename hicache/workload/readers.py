"""Trace files to traces: which format a file has, and what becomes of its bad lines."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from hicache.errors import TraceError
from hicache.workload.formats import BadLineError, BlocksFormat, CallsFormat, Format, MessagesFormat
from hicache.workload.lines import read_lines
from hicache.workload.records import SkippedLine, Trace

_FORMATS: tuple[type[Format], ...] = (BlocksFormat, MessagesFormat, CallsFormat)
_LENGTHS_ONLY = b"timestamp,contexttokens,generatedtokens"


def read_trace(path: str | os.PathLike[str], *, skip_bad: bool = False, limit: int | None = None) -> Trace:
    """Read a request trace; format (see ``formats``) and compression (zstd, gzip, none) are told by the content.

    Args:
        skip_bad: leave out bad lines and list them in ``Trace.skipped``. Of a file that is truncated or damaged
            inside its compression, what stands before counts, and the rest is one skipped line.
        limit: stop after this many requests, in the order of the file.

    Raises:
        TraceError: a line is bad and ``skip_bad`` is off; the format is not known or has no prompts; no request
            is left. ``line`` is 0 if the file cannot be opened at all.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}, expected at least 1")
    return _Reading(Path(path), skip_bad).run(limit)


@dataclass(slots=True)
class _Reading:
    """One reading of one file."""

    path: Path
    skip_bad: bool
    skipped: list[SkippedLine] = field(default_factory=list)
    format: Format | None = None
    line: int = 0

    def run(self, limit: int | None) -> Trace:
        try:
            for line, raw in read_lines(self.path):
                self.line = line
                self._take(raw)
                if self.format and limit is not None and self.format.num_requests >= limit:
                    break
        except TraceError as error:
            if error.line == 0 or not self.skip_bad:
                raise
            self._skip(error.line, error.reason)
        if self.format is None or not self.format.num_requests:
            self._fail("the file holds no request" + self._first_reason())
        return Trace(str(self.path), self.format.name, self.format.requests(limit), tuple(self.skipped))

    def _take(self, raw: bytes) -> None:
        if self.line == 1 and raw.lower().replace(b" ", b"").startswith(_LENGTHS_ONLY):
            self._fail(
                "this trace has arrival times and lengths only; a replay needs prompts or their block hashes,"
                " as in the hash traces and chat texts that traces/README.md describes"
            )
        try:
            record = _parse(raw)
            format_ = self.format or _format_of(record)()
            format_.add(record)
            self.format = format_  # settled by the first good line
        except BadLineError as error:
            self._skip(self.line, str(error))

    def _skip(self, line: int, reason: str) -> None:
        if not self.skip_bad:
            raise TraceError(reason, path=str(self.path), line=line)
        self.skipped.append(SkippedLine(line, reason))

    def _first_reason(self) -> str:
        return f"; line {self.skipped[0].line}: {self.skipped[0].reason}" if self.skipped else ""

    def _fail(self, reason: str) -> NoReturn:
        """Raise, whether or not bad lines may be skipped: nothing is left to replay."""
        raise TraceError(reason, path=str(self.path), line=self.line or 1)


def _parse(raw: bytes) -> Mapping[str, object]:
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise BadLineError(
            f"not UTF-8: byte {error.start} of the line is 0x{raw[error.start]:02x}"
        ) from error
    try:
        record = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise BadLineError(f"not JSON: {error.msg} at column {error.colno}") from error
    except ValueError as error:  # an integer of thousands of digits
        raise BadLineError(f"not JSON that can be read: {error}") from error
    except RecursionError as error:
        raise BadLineError("not JSON that can be read: nested too deeply") from error
    if not isinstance(record, dict):
        raise BadLineError(f"expected a JSON object, found {type(record).__name__}")
    return record


def _refuse_constant(name: str) -> NoReturn:
    raise BadLineError(f"not JSON: {name} is no number")


def _format_of(record: Mapping[str, object]) -> type[Format]:
    """The format with most of its fields in the record."""
    best = max(_FORMATS, key=lambda candidate: len(candidate.fields & record.keys()))
    if not best.fields & record.keys():
        known = "; ".join(", ".join(sorted(candidate.fields)) for candidate in _FORMATS)
        raise BadLineError(
            f"not a known trace: has {_listed(record)}, expected the fields of one of: {known}"
        )
    return best


def _listed(record: Mapping[str, object]) -> str:
    names = [repr(name[:40]) for name in list(record)[:8]]
    return ", ".join(names) + (", ..." if len(record) > 8 else "") if names else "no field"
