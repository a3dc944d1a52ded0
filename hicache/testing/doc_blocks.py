"""The fenced blocks of README.md and docs/, for tests that run them.

What a block needs beside its language stands in a comment before it, which no reader sees::

    <!-- with: vllm -->                 it needs more than a reader's machine has; whose test runs it says tests/docs
    <!-- under: tiers -->               the YAML stands under this key
    <!-- file: mypackage/rules.py -->   the Python is a module by this name for the rest of the page
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^( *)```(.*)$")
NOTE = re.compile(r"^\s*<!-- (with|under|file): (.+) -->$")


@dataclass(frozen=True, slots=True)
class Block:
    """One block.

    Args:
        page, line: where it begins.
        language: after the fence.
        notes: what the comment before it says.
    """

    page: Path
    line: int
    language: str
    text: str
    notes: dict[str, str]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def needs(self) -> str | None:
        return self.notes.get("with")

    def commands(self) -> Iterator[list[str]]:
        """The words of each command of a shell block; a quoted word may go over several lines."""
        text = re.sub(r"\\\n", " ", self.text)
        line = ""
        for part in text.splitlines():
            line += part + "\n"
            try:
                words = shlex.split(line, comments=True)
            except ValueError:  # a quote is still open
                continue
            line = ""
            if words:
                yield words


def pages() -> list[Path]:
    """README.md and every page of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(page: Path) -> Iterator[Block]:
    """The blocks of a page, from its beginning."""
    lines = page.read_text(encoding="utf-8").splitlines()
    at = 0
    while at < len(lines):
        if fence := _FENCE.match(lines[at]):
            end = next(n for n in range(at + 1, len(lines)) if _FENCE.match(lines[n]))
            note = NOTE.match(lines[at - 1]) if at else None
            text = "\n".join(line.removeprefix(fence[1]) for line in lines[at + 1 : end]) + "\n"
            yield Block(page, at + 1, fence[2].strip(), text, {note[1]: note[2]} if note else {})
            at = end
        at += 1


def blocks_that_need(what: str) -> list[Block]:
    """Of all pages, in order."""
    return [block for page in pages() for block in blocks_of(page) if block.needs == what]


def shrunk(tree: Any) -> Any:  # Any: what a YAML may hold
    """The same with sizes that fit any machine: as many MiB as there were GiB or TiB."""
    if isinstance(tree, dict):
        return {key: shrunk(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [shrunk(value) for value in tree]
    if isinstance(tree, str) and re.fullmatch(r"\d+(\.\d+)?[GT]iB", tree):
        return f"{max(256, int(float(tree[:-3])))}MiB"
    return tree
