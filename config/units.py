"""Sizes, durations and fractions as people write them, and back.

Every ``parse_*`` raises ``ValueError`` with one sentence: what was found, what would be right. Every
``format_*`` writes text that parses to exactly the same number.

====================  ==========================  =======================================
what                  accepted                    refused
====================  ==========================  =======================================
size, in bytes        40GiB, 200GB, 24KiB, 4096   40G (which?), 8Gb (bits), 1.5, -1, 30m
duration, in seconds  30m, 1d, 2s, 500ms          30 (of what?), 20GiB, 5 parsecs, -2s
fraction              5%, 0.05                    5, 150%, -0.1, 20GiB
====================  ==========================  =======================================
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from difflib import get_close_matches

SIZE_UNITS = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "PB": 10**15,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "PiB": 2**50,
}
DURATION_UNITS = {
    "ms": Decimal("0.001"),
    "s": Decimal(1),
    "m": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
}
MAX_BYTES = 2**63 - 1
MIN_DURATION_S = Decimal("0.000001")
MAX_DURATION_S = 36_500 * 86_400
"""A hundred years: what every wait of the standard library still takes."""

SIZE_EXAMPLE = "a size like 40GiB, 200GB or 4096"
DURATION_EXAMPLE = "a duration like 30m, 1d, 2s or 500ms"
FRACTION_EXAMPLE = "a fraction like 5% or 0.05"

_QUANTITY = re.compile(r"([+-]?)(\d+(?:\.\d+)?)\s*([A-Za-z%]*)", re.ASCII)
_SIZE_NAMES = {1024: ("KiB", "MiB", "GiB", "TiB", "PiB"), 1000: ("KB", "MB", "GB", "TB", "PB")}
_CREDENTIALS = re.compile(r"(?<=://)[^\s/]*@")


def parse_bytes(value: object) -> int:
    """Bytes of a size such as ``40GiB``, ``200GB`` or a whole number; at least 1."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"found {describe(value)}; expected {SIZE_EXAMPLE}")
    if isinstance(value, int):
        amount, unit = Decimal(value), "B"
    else:
        amount, unit = _split(value, SIZE_EXAMPLE)
        if unit not in SIZE_UNITS and unit:
            raise ValueError(_wrong_unit(value, unit, SIZE_UNITS, SIZE_EXAMPLE))
    number = amount * SIZE_UNITS[unit or "B"]
    if number < 0:
        raise ValueError(f"found {describe(value)}; a size cannot be negative")
    if number != int(number):
        raise ValueError(f"found {describe(value)}; that is not a whole number of bytes")
    if not 1 <= number <= MAX_BYTES:
        raise ValueError(f"found {describe(value)}; expected 1 to {MAX_BYTES} bytes")
    return int(number)


def format_bytes(num_bytes: int) -> str:
    """The shortest exact way to write a size: ``40GiB``, ``200GB``, else ``<n>B``."""
    choices = [f"{num_bytes}B"]
    for base, names in _SIZE_NAMES.items():
        for power, name in enumerate(names, start=1):
            if num_bytes and num_bytes % base**power == 0:
                choices.append(f"{num_bytes // base**power}{name}")
    return min(choices, key=lambda text: (len(text.rstrip("BKMGTPi")), len(text)))


def approximate_bytes(num_bytes: int) -> str:
    """A size for reading only, to four digits: ``19.53GiB``."""
    for power, name in reversed(tuple(enumerate(_SIZE_NAMES[1024], start=1))):
        if num_bytes >= 1024**power:
            return f"{num_bytes / 1024**power:.4g}{name}"
    return f"{num_bytes}B"


def parse_duration(value: object) -> float:
    """Seconds of a duration such as ``30m`` or ``500ms``; a number needs its unit."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError(f"found {value}, a number without a unit; expected {DURATION_EXAMPLE}")
    if not isinstance(value, str):
        raise ValueError(f"found {describe(value)}; expected {DURATION_EXAMPLE}")
    amount, unit = _split(value, DURATION_EXAMPLE)
    if not unit:
        raise ValueError(f"found {value}, a number without a unit; expected {DURATION_EXAMPLE}")
    if unit not in DURATION_UNITS:
        raise ValueError(_wrong_unit(value, unit, DURATION_UNITS, DURATION_EXAMPLE))
    seconds = amount * DURATION_UNITS[unit]
    if seconds < 0:
        raise ValueError(f"found {describe(value)}; a duration cannot be negative")
    if seconds > MAX_DURATION_S or 0 < seconds < MIN_DURATION_S:
        raise ValueError(f"found {describe(value)}; expected 0s, or 0.001ms to 36500d")
    return float(seconds)


def format_duration(seconds: float) -> str:
    """The largest unit that gives a whole number: ``1d``, ``30m``, ``100ms``, else seconds."""
    exact = Decimal(repr(seconds))
    for unit in ("d", "h", "m", "s", "ms"):
        count = exact / DURATION_UNITS[unit]
        if count >= 1 and count == int(count):
            return f"{int(count)}{unit}"
    return f"{exact:f}s" if exact else "0s"


def parse_fraction(value: object) -> float:
    """A share between 0 and 1, written ``5%`` or ``0.05``."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"found {describe(value)}; expected {FRACTION_EXAMPLE}")
    if isinstance(value, str):
        amount, unit = _split(value, FRACTION_EXAMPLE)
        if unit not in ("", "%"):
            raise ValueError(_wrong_unit(value, unit, ("%",), FRACTION_EXAMPLE))
        number = float(amount / 100 if unit == "%" else amount)
    else:
        number = float(value) if abs(value) < 1e30 else math.inf
    if not 0 <= number <= 1:
        hint = f" (write {value}% for {value} in a hundred)" if 1 < number <= 100 else ""
        raise ValueError(f"found {describe(value)}; a fraction lies between 0 and 1{hint}")
    return number


def describe(value: object) -> str:
    """What was found, for a message: short, on one line, never with a URL's credentials."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "true" if value else "false"
        case str():
            text = _CREDENTIALS.sub("***@", value)
            return repr(text if len(text) <= 60 else text[:57] + "...")
        case int() | float():
            exact = Decimal(value) if isinstance(value, int) else value  # an int may be too large for a float
            return f"the number {value!r}" if abs(value) < 1e30 else f"the number {exact:.3g}"
        case dict():
            return "a mapping"
        case list() | tuple():
            return "a list"
        case _:
            return f"a {type(value).__name__}"


def _split(text: str, example: str) -> tuple[Decimal, str]:
    parts = _QUANTITY.fullmatch(text.strip())
    if parts is None or len(text) > 60:
        raise ValueError(f"found {describe(text)}; expected {example}")
    sign, number, unit = parts.groups()
    return Decimal(sign + number), unit


def _wrong_unit(text: str, unit: str, units: object, example: str) -> str:
    """Say which kind of quantity was written instead, or which unit comes nearest."""
    known = list(units) if isinstance(units, dict | tuple) else []
    found = describe(text)
    if units is not SIZE_UNITS and unit in SIZE_UNITS:
        return f"found {found}, which is a size; expected {example}"
    if units is not DURATION_UNITS and unit in DURATION_UNITS:
        return f"found {found}, which is a duration; expected {example}"
    if "%" not in known and unit == "%":
        return f"found {found}, which is a fraction; expected {example}"
    if units is SIZE_UNITS and unit.upper() in ("K", "M", "G", "T", "P"):
        letter = unit.upper()
        return f"found {found}, which may mean {letter}iB (1024) or {letter}B (1000); write one of them"
    folded = {name.lower(): name for name in reversed(known)}
    near = folded.get(unit.lower()) or next(iter(get_close_matches(unit, known, 1)), None)
    hint = f" (did you mean {near}?)" if near else ""
    return f"found {found}, whose unit {unit!r} is unknown{hint}; expected {example}"
