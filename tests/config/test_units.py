"""Sizes, durations and fractions: what is understood, what is refused, and what is written back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.config.units import (
    MAX_BYTES,
    approximate_bytes,
    describe,
    format_bytes,
    format_duration,
    parse_bytes,
    parse_duration,
    parse_fraction,
)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("40GiB", 40 * 2**30),
        ("200GB", 200 * 10**9),
        ("24KiB", 24 * 1024),
        ("24 KiB", 24 * 1024),
        ("1.5MiB", 3 * 2**19),
        ("3kB", 3000),
        ("7B", 7),
        ("4096", 4096),
        (4096, 4096),
        ("2TiB", 2**41),
    ],
    ids=str,
)
def test_a_size_is_read_in_bytes(text: object, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    ("value", "remark"),
    [
        ("40G", "write one of them"),
        ("40Gb", "did you mean GB"),
        ("40gib", "did you mean GiB"),
        ("30M", "may mean MiB"),
        ("30m", "which is a duration"),
        ("30s", "which is a duration"),
        ("5%", "which is a fraction"),
        ("5 parsecs", "'parsecs' is unknown"),
        ("-1GiB", "cannot be negative"),
        (-1, "cannot be negative"),
        (0, "expected 1 to"),
        ("1.0001KiB", "not a whole number of bytes"),
        (1.5, "expected a size"),
        (True, "found true"),
        ("", "expected a size"),
        ("GiB", "expected a size"),
        ("1e3", "expected a size"),
        ("9999999PiB", "expected 1 to"),
        ("1" * 5000, "expected a size"),
        (None, "found nothing"),
        ([1], "found a list"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_size_is_refused_with_the_reason(value: object, remark: str) -> None:
    with pytest.raises(ValueError, match=remark):
        parse_bytes(value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30m", 1800), ("1d", 86400), ("2s", 2), ("500ms", 0.5), ("0.1s", 0.1), ("1.5h", 5400), ("0s", 0)],
    ids=str,
)
def test_a_duration_is_read_in_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("value", "remark"),
    [
        ("20GiB", "which is a size"),
        ("5 parsecs", "'parsecs' is unknown"),
        ("5%", "which is a fraction"),
        ("-2s", "cannot be negative"),
        (30, "a number without a unit"),
        ("30", "a number without a unit"),
        (0.5, "a number without a unit"),
        ("5M", "did you mean m"),
        ("99999999d", "0.001ms to 36500d"),
        ("0.0000001s", "0.001ms to 36500d"),
        (False, "found false"),
        ("soon", "expected a duration"),
    ],
    ids=str,
)
def test_what_is_no_duration_is_refused_with_the_reason(value: object, remark: str) -> None:
    with pytest.raises(ValueError, match=remark):
        parse_duration(value)


@pytest.mark.parametrize(
    ("value", "fraction"), [("5%", 0.05), (0.05, 0.05), ("0.05", 0.05), (0, 0), (1, 1), ("100%", 1)], ids=str
)
def test_a_fraction_is_read_as_a_share_of_one(value: object, fraction: float) -> None:
    assert parse_fraction(value) == fraction


@pytest.mark.parametrize(
    ("value", "remark"),
    [
        (5, "write 5%"),
        ("150%", "between 0 and 1"),
        (-0.1, "between 0 and 1"),
        (float("nan"), "between 0 and 1"),
        ("20GiB", "which is a size"),
        (True, "found true"),
        ("half", "expected a fraction"),
    ],
    ids=str,
)
def test_what_is_no_fraction_is_refused_with_the_reason(value: object, remark: str) -> None:
    with pytest.raises(ValueError, match=remark):
        parse_fraction(value)


@given(st.integers(1, MAX_BYTES))
def test_a_size_written_back_is_the_same_size(num_bytes: int) -> None:
    assert parse_bytes(format_bytes(num_bytes)) == num_bytes


@given(st.just(0.0) | st.floats(1e-6, 10**9))
def test_a_duration_written_back_is_the_same_duration(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == seconds


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(40 * 2**30, "40GiB"), (200 * 10**9, "200GB"), (1000, "1KB"), (1023, "1023B"), (24576, "24KiB")],
    ids=str,
)
def test_a_size_is_written_as_people_do(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1800.0, "30m"),
        (86400.0, "1d"),
        (2.0, "2s"),
        (0.1, "100ms"),
        (90.0, "90s"),
        (0.0, "0s"),
        (1.25, "1250ms"),
    ],
    ids=str,
)
def test_a_duration_is_written_as_people_do(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_a_size_for_reading_has_four_digits() -> None:
    assert [approximate_bytes(n) for n in (1, 1536, 20 * 2**30 - 1)] == ["1B", "1.5KiB", "20GiB"]


def test_a_description_hides_the_credentials_of_a_url() -> None:
    assert describe("redis://user:hunter2@host") == "'redis://***@host'"
