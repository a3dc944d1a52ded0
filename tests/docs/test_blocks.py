"""Every fenced block of README.md and docs/ is run, or validated, or says why it cannot be.

A page is one test: its blocks run in order, in one temporary folder, with what a reader would have: ``hicache.yaml``,
a cache that runs, a prompt, a trace. What a block needs beside its language stands in a comment before it, which no
reader sees::

    <!-- not run: needs a GPU -->       it is not; the list of these is fixed below
    <!-- under: tiers -->               the YAML stands under this key
    <!-- file: mypackage/rules.py -->   the Python is a module by this name for the rest of the page

====== ===================================================================================================
python runs; functions named test_* without arguments are called
yaml   is loaded over the preset cpu, with folders and sizes that are here
sh     each command of hicache runs, made small where it would take minutes; make has the target; pip knows the extra
text   output and figures: nothing to run
====== ===================================================================================================
"""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

import hicache
from hicache.cache import HiCache
from hicache.cli import main
from hicache.config import load_config

ROOT = Path(hicache.__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = ("python", "yaml", "sh", "text", "redis", "json")
NOT_RUN = {
    "README.md": 3,
    "docs/engines/sglang.md": 1,
    "docs/engines/transformers.md": 2,
    "docs/engines/vllm.md": 1,
    "docs/ranks.md": 1,
    "docs/stores/redis.md": 1,
    "docs/transfers.md": 1,
}
"""How many blocks of a page are not run: they need a GPU, an engine's server, or a model."""

_FENCE = re.compile(r"^( *)```(.*)$")
_COMMENT = re.compile(r"^\s*<!-- (not run|under|file): (.+) -->$")


@dataclass(frozen=True, slots=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    notes: dict[str, str]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    at = 0
    while at < len(lines):
        if fence := _FENCE.match(lines[at]):
            end = next(n for n in range(at + 1, len(lines)) if _FENCE.match(lines[n]))
            note = _COMMENT.match(lines[at - 1]) if at else None
            text = "\n".join(line.removeprefix(fence[1]) for line in lines[at + 1 : end]) + "\n"
            yield Block(page, at + 1, fence[2].strip(), text, {note[1]: note[2]} if note else {})
            at = end
        at += 1


BLOCKS = {page: list(blocks_of(page)) for page in PAGES}
WITH_BLOCKS = [page for page in PAGES if any(block.language != "text" for block in BLOCKS[page])]


# ---- what is there -------------------------------------------------------------------------------------
def test_every_block_names_its_language() -> None:
    blocks = [block for page in PAGES for block in BLOCKS[page]]
    assert len(blocks) > 50
    assert [str(block) for block in blocks if block.language not in LANGUAGES] == []


def test_blocks_that_are_not_run_say_why_and_are_these() -> None:
    """Run pytest with -s to see them."""
    skipped = [block for page in PAGES for block in BLOCKS[page] if "not run" in block.notes]
    for block in skipped:
        print(f"{block}: {block.notes['not run']}")
    found = {str(page.relative_to(ROOT)): sum(block.page == page for block in skipped) for page in PAGES}
    assert {page: count for page, count in found.items() if count} == NOT_RUN
    assert [str(block) for block in skipped if len(block.notes["not run"].split()) < 3] == []


def test_a_comment_before_a_block_is_one_that_means_something() -> None:
    """A note with a typing error would silently be none."""
    odd = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in PAGES
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        if line.lstrip().startswith("<!--") and not _COMMENT.match(line)
    ]
    assert odd == []


def test_a_file_that_a_page_names_is_there() -> None:
    """Paths of this repository that stand in backquotes; those that a user would have are not ours to find."""
    folders = ("tests/", "examples/", "benchmarks/", "config/presets", "traces/", "docs/", "rust/")
    missing = [
        f"{page.relative_to(ROOT)}: {path}"
        for page in PAGES
        for path in re.findall(r"`([\w./-]+/[\w./-]*)(?:::\w+)?`", page.read_text(encoding="utf-8"))
        if path.startswith(folders) and not (ROOT / path).exists()
    ]
    assert missing == []


# ---- what runs -----------------------------------------------------------------------------------------
SMALL: dict[tuple[str, ...], list[str]] = {
    ("replay",): ["--requests", "12", "--quiet"],
    ("replay", "--reference"): ["--requests", "200", "--quiet"],
    ("bench", "multi-turn"): ["--sessions", "2", "--turns", "3"],
    ("bench", "multi-turn", "--capacities"): ["--sessions", "6", "--turns", "3", "--capacities", "60%,100%"],
    ("bench", "late-turns"): [
        *(
            "--components",
            "full+swa",
            "--sessions",
            "6",
            "--turns",
            "40",
            "--first-turn",
            "34",
            "--stride",
            "4",
        ),
        *("--device", "40%", "--quiet"),
    ],
    ("bench", "agent"): ["--requests", "40", "--device", "90%", "--host", "50%"],
    ("top",): ["--once"],
}
"""What is added to commands that would take minutes, or never end."""


class Reader:
    """What a reader of a page has before them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: dict[str, Any] = {  # Any: whatever blocks define
            "__name__": "page",
            "prompt": list(range(1, 3001)),
            "answer": [7, 8, 9],
            "system_prompt": list(range(1, 301)),
            "num_layers": 1,
            "n": 3000,
        }
        self._closing = contextlib.ExitStack()
        (folder / "hicache.yaml").write_text(
            yaml.safe_dump(
                {
                    "model": {
                        "name": "a-model",
                        "page_size": 64,
                        "components": {"full": {"rule": "path", "bytes_per_token": 256}},
                    },
                    "tiers": {
                        "device": {"kind": "cpu", "capacity": "128MiB"},
                        "host": {"capacity": "64MiB", "pinned": False},
                        "stores": [{"kind": "disk", "path": str(folder / "pages"), "capacity": "64MiB"}],
                    },
                    "explain": {"enabled": True},
                }
            )
        )
        traces = ROOT / "traces"
        (folder / "traces").symlink_to(traces)
        (folder / "TRACE").symlink_to(traces / "mooncake_conversation.jsonl.zst")
        (folder / "lmcache_miniswe_text.jsonl.zst").symlink_to(traces / "cc_agentic_small.jsonl.zst")
        (folder / "lmcache.yaml").write_text("chunk_size: 256\nlocal_cpu: true\nmax_local_cpu_size: 0.01\n")
        (folder / "serve.sh").write_text(
            "python -m sglang.launch_server --model-path M --page-size 64 --hicache-size 1\n"
        )
        (folder / "extra.json").write_text('{"prefetch_threshold": 256}\n')
        (folder / "mine.yaml").write_text((folder / "hicache.yaml").read_text())

    def close(self) -> None:
        self._closing.close()

    @property
    def cache(self) -> HiCache:
        """A running cache, made when a block first asks for one."""
        if "cache" not in self.names:
            socket = Path("~/.hicache/admin.sock").expanduser()
            config = load_config("hicache.yaml", overrides={"admin.socket": str(socket)}, environ={})
            self.names["cache"] = self._closing.enter_context(HiCache(config))
        made = self.names["cache"]
        assert isinstance(made, HiCache)
        return made

    # ---- by language ---------------------------------------------------------------------------
    def python(self, block: Block) -> None:
        code = compile("\n" * block.line + block.text, str(block.page), "exec")
        if "file" in block.notes:
            path = self.folder / block.notes["file"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
            return
        if re.search(r"\bcache\b", block.text) and "as cache" not in block.text:
            _ = self.cache  # made for the block
        before = set(self.names)
        exec(code, self.names)
        for name in sorted(set(self.names) - before):
            function = self.names[name]
            if name.startswith("test_") and not function.__code__.co_argcount:
                function()

    def yaml(self, block: Block) -> None:
        text = block.text.replace("/var/lib/hicache", str(self.folder / "pages"))
        text = text.replace("/tmp/hicache-security", str(self.folder / "pages"))
        tree: Any = yaml.safe_load(  # Any: what a YAML may hold
            text.replace("kind: cuda", "kind: cpu").replace("pinned: true", "pinned: false")
        )
        for key in reversed(block.notes.get("under", "").split(".") if "under" in block.notes else []):
            tree = [{"kind": "memory", "capacity": "1MiB", **tree}] if key == "0" else {key: tree}
        load_config(shrunk(tree), overrides=self.overrides(tree), environ={})

    def overrides(self, tree: dict[str, Any]) -> dict[str, object]:  # Any: what a YAML may hold
        """What a part of a configuration lacks to be a whole one."""
        base = yaml.safe_load((self.folder / "mine.yaml").read_text())
        lacking: dict[str, object] = {}
        for section, keys in (("model", ("name", "page_size", "components")), ("tiers", ("device",))):
            for key in keys:
                if key not in (tree.get(section) or {}):
                    lacking[f"{section}.{key}"] = base[section][key]
        if "host" not in (tree.get("tiers") or {}):
            lacking["tiers.host"] = base["tiers"]["host"]
        return lacking

    def sh(self, block: Block) -> None:
        text = re.sub(r"\\\n", " ", block.text)
        for line in text.splitlines():
            words = shlex.split(line, comments=True)
            if words:
                self.command(block, words)

    def command(self, block: Block, words: list[str]) -> None:
        match words:
            case ["hicache", *arguments]:
                assert hicache_exits(self.made_small(arguments), self) == 0, f"{block}: {shlex.join(words)}"
            case ["make", target, *_]:
                subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)
            case ["pip", "install", *packages]:
                known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
                for extra in re.findall(r"hicache\[([\w,]+)\]", " ".join(packages)):
                    assert set(extra.split(",")) <= set(known["optional-dependencies"]), f"{block}: {extra}"
            case ["python", script, *rest]:
                command = [sys.executable, str(ROOT / script), *rest]
                subprocess.run(command, check=True, capture_output=True, timeout=100)
            case [assignment] if re.fullmatch(r"\w+=.*", assignment):
                pass
            case _:
                pytest.fail(f"{block}: nothing here knows how to run {words[0]}")

    def made_small(self, arguments: list[str]) -> list[str]:
        fitting = [key for key in SMALL if set(key) <= set(arguments) and arguments[0] == key[0]]
        extra = list(SMALL[max(fitting, key=len)]) if fitting else []
        if "top" in arguments or "ctl" in arguments:
            _ = self.cache  # made for the block
        return [*arguments, *extra]

    def run(self, block: Block) -> None:
        if "not run" in block.notes or block.language == "text":
            return
        {"python": self.python, "yaml": self.yaml, "sh": self.sh}[block.language](block)


def hicache_exits(arguments: list[str], reader: Reader) -> int:
    try:
        return main(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)


def shrunk(tree: Any) -> Any:  # Any: what a YAML may hold
    """The same with sizes that fit any machine: as many MiB as there were GiB or TiB."""
    if isinstance(tree, dict):
        return {key: shrunk(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [shrunk(value) for value in tree]
    if isinstance(tree, str) and re.fullmatch(r"\d+(\.\d+)?[GT]iB", tree):
        return f"{max(256, int(float(tree[:-3])))}MiB"
    return tree


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_shows_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_home: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HOME", str(short_home))
    monkeypatch.setenv("HICACHE_PAGE_KEY", "8f3c" * 16)
    reader = Reader(tmp_path)
    try:
        for block in BLOCKS[page]:
            try:
                reader.run(block)
            except Exception as error:
                error.add_note(f"in the block at {block}")
                raise
    finally:
        reader.close()


@pytest.fixture
def short_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home whose socket's path is not too long for the kernel."""
    return tmp_path_factory.mktemp("h")
