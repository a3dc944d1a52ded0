"""The reference of the configuration is the schema's, all of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hicache
from hicache.cli import main
from hicache.config.reference import configuration_page
from hicache.config.walk import schema_keys

ROOT = Path(hicache.__file__).resolve().parents[1]
PAGE = configuration_page()


def rows() -> set[tuple[str, str]]:
    """(section, key) of every row; what is told to be the same as another section has that one's."""
    found: dict[str, set[str]] = {}
    here = ""
    for line in PAGE.splitlines():
        if heading := re.match(r"## `([^`]+)`", line):
            here = heading[1]
        elif same := re.match(r"The same as `([^`]+)`\.", line):
            found[here] = found[same[1]]
        elif key := re.match(r"\| `([^`]+)` \|", line):
            found.setdefault(here, set()).add(key[1])
    return {(section, key) for section, keys in found.items() for key in keys}


def test_every_key_of_the_schema_has_a_row_and_no_other_has() -> None:
    expected = {(key.rpartition(".")[0], key.rpartition(".")[2]) for key, _ in schema_keys()}
    assert rows() == expected


def test_every_row_is_whole() -> None:
    lines = [line for line in PAGE.splitlines() if line.startswith("| `")]
    assert len(lines) > 100
    assert [
        line for line in lines if len(line.split(" | ")) != 4 or not all(line.strip("| ").split(" | "))
    ] == []


@pytest.mark.parametrize(
    "row",
    [
        "| `page_size` | whole number | required | tokens a page, 1 to 65536 |",
        "| `write` | `write_through` or `write_through_selective` or `write_back` | `write_through_selective` |",
        "| `store_timeout` | duration | `5s` |",
        "| `backlog` | size | `64MiB` |",
        "| `low` | fraction | `0.02` |",
        "| `enabled` | true or false | `false` |",
    ],
)
def test_types_and_defaults_are_in_the_words_of_the_yaml(row: str) -> None:
    assert row in PAGE


def test_the_command_and_the_site_show_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        raise SystemExit(main(["config", "reference"]))
    assert stop.value.code == 0
    assert capsys.readouterr().out.strip() == PAGE.strip()
    mark = "[the tables are made by `hicache config reference`]"
    assert mark in (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    assert mark in (ROOT / "docs" / "_hooks.py").read_text(encoding="utf-8")
