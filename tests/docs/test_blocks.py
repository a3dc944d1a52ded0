"""Every fenced block of README.md and docs/ is run, or validated: here, or where ``WHERE`` says.

A page is one test: its blocks run in order, in one temporary folder, with what a reader would have: ``hicache.yaml``,
a cache that runs, a prompt, a trace. ``hicache.testing.doc_blocks`` says what may stand in a comment before a block.

====== ===================================================================================================
python runs; functions named test_* without arguments are called
yaml   is loaded over the preset cpu, with folders and sizes that are here
sh     each command of hicache runs, made small where it would take minutes; make has the target; pip knows the extra
redis  goes to a server, which is then used by a store with what it has granted
text   output and figures: nothing to run
====== ===================================================================================================
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hicache.cache import HiCache
from hicache.cli import main
from hicache.config import load_config
from hicache.testing.doc_blocks import NOTE, ROOT, Block, blocks_of, pages, shrunk
from hicache.testing.redis_caches import PAGE_TOKENS, CheckedCache, prompt, small_config
from hicache.testing.redis_server import RedisServer

PAGES = pages()
LANGUAGES = ("python", "yaml", "sh", "text", "redis", "json")
WHERE = {
    "redis": "tests/docs/test_blocks.py",
    "two ranks": "tests/docs/test_blocks.py",
    "a GPU": "tests/docs/test_blocks.py",
    "transformers": "tests/engines/test_docs_transformers.py",
    "vllm": "tests/engines/test_vllm_server.py",
    "sglang": "tests/engines/test_sglang_docs.py",
}
"""Which test runs the blocks that need more than a reader's machine has. What needs a GPU runs as it does without one."""
_LOOKED_FOR = 'blocks_that_need("{}")'

BLOCKS = {page: list(blocks_of(page)) for page in PAGES}


def page_parameters() -> list[Any]:
    """Pages with something to run."""
    chosen = [page for page in PAGES if any(block.language != "text" for block in BLOCKS[page])]
    return [
        pytest.param(
            page,
            id=str(page.relative_to(ROOT)),
            marks=[pytest.mark.redis] if any(block.language == "redis" for block in BLOCKS[page]) else [],
        )
        for page in chosen
    ]


# ---- what is there -------------------------------------------------------------------------------------
def test_every_block_names_its_language() -> None:
    blocks = [block for page in PAGES for block in BLOCKS[page]]
    assert len(blocks) > 50
    assert [str(block) for block in blocks if block.language not in LANGUAGES] == []


def test_a_block_that_needs_more_is_run_by_the_test_that_is_named() -> None:
    needed = {block.needs for page in PAGES for block in BLOCKS[page]} - {None}
    assert needed == set(WHERE)
    elsewhere = {what: path for what, path in WHERE.items() if ROOT / path != Path(__file__)}
    asked = {what: _LOOKED_FOR.format(what) in (ROOT / path).read_text() for what, path in elsewhere.items()}
    assert all(asked.values()), asked


def test_a_comment_before_a_block_is_one_that_means_something() -> None:
    """A note with a typing error would silently be none."""
    odd = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in PAGES
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        if line.lstrip().startswith("<!--") and not NOTE.match(line)
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


def test_the_readme_says_what_each_extra_is_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    rows = [
        line
        for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    told = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert set(project["optional-dependencies"]) - told == {"dev"}


def test_the_example_of_transformers_says_what_to_install_where_that_is_missing() -> None:
    code = (
        "import runpy, sys; sys.modules['transformers'] = None; "
        "runpy.run_path('examples/transformers_chat.py', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 1
    assert "transformers" in done.stderr
    assert done.stderr.endswith("pip install 'hicache[engines]'\n")
    assert "Traceback" not in done.stderr


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


NO_DEVICE = 3
"""What scripts/gpu_check.py ends with where there is none."""
_BEFORE_RANKS = """
import sys
from pathlib import Path
import torch.distributed as dist
from hicache.config import load_config

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{Path.cwd()}/meeting", rank=rank, world_size=2)
pages = f"{Path.cwd()}/pages-{rank}"
config = load_config(
    "mine.yaml", overrides={"ranks.tp_size": 2, "ranks.tp_rank": rank, "tiers.stores.0.path": pages}, environ={}
)
"""
_AFTER_RANKS = """
tokens = list(range(1, 201))
with cache:
    for expected in (0, 192):
        with cache.match(tokens) as lease:
            assert lease.load() == expected
            lease.reserve(200 - lease.reused)
            lease.release(tokens, written=200)
    assert cache.agreement_stats().num_ranks == 2
"""


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
        for words in block.commands():
            self.command(block, words)

    def redis(self, block: Block) -> None:
        """Say it to a server as its administrator; the user that it makes can do all that a store does."""
        server = self._closing.enter_context(RedisServer(self.folder / "redis"))
        with server.client as client:
            for line in block.text.replace(">...", ">a-password").splitlines():
                client.execute_command(*line.split())
        store = {"kind": "redis", "url": server.url, "username": "hicache", "password_env": "CACHE_PASSWORD"}
        for expected in (0, 10 * PAGE_TOKENS):
            cache = CheckedCache(small_config([store]))
            try:
                assert cache.serve(prompt(1)).source.store == expected
                assert cache.cache.flush()
            finally:
                cache.close()

    def on_ranks(self, block: Block) -> None:
        """In two processes that torch's launcher could have started, each with a configuration of its own."""
        code = self.folder / "rank.py"
        code.write_text(_BEFORE_RANKS + block.text + _AFTER_RANKS)
        command = [sys.executable, str(code)]
        running = [
            subprocess.Popen([*command, str(rank)], cwd=self.folder, stderr=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        try:
            errors = [process.communicate(timeout=250)[1] for process in running]
        finally:
            for process in running:
                process.kill()
        assert [process.returncode for process in running] == [0, 0], errors

    def command(self, block: Block, words: list[str]) -> None:
        match words:
            case ["hicache", *arguments]:
                assert hicache_exits(self.made_small(arguments), self) == 0, f"{block}: {words}"
            case ["make", target, *_]:
                subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)
            case ["pip", "install", *packages]:
                known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
                for extra in re.findall(r"hicache\[([\w,]+)\]", " ".join(packages)):
                    assert set(extra.split(",")) <= set(known["optional-dependencies"]), f"{block}: {extra}"
            case ["python", script, *rest]:
                command = [sys.executable, str(ROOT / script), *rest]
                done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=250)
                is_without = block.needs == "a GPU" and not torch.cuda.is_available()
                assert done.returncode == (NO_DEVICE if is_without else 0), done.stderr
            case [assignment] if re.fullmatch(r"\w+=.*", assignment):
                pass
            case _:
                pytest.fail(f"{block}: nothing here knows how to run {words[0]}")

    def made_small(self, arguments: list[str]) -> list[str]:
        fitting = [key for key in SMALL if set(key) <= set(arguments) and arguments[0] == key[0]]
        extra = list(SMALL[max(fitting, key=len)]) if fitting else []
        if "top" in arguments or "ctl" in arguments:
            _ = self.cache  # made for the block
        return [*without(arguments, extra), *extra]

    def run(self, block: Block) -> None:
        if block.language == "text" or (
            block.needs is not None and ROOT / WHERE[block.needs] != Path(__file__)
        ):
            return
        if block.needs == "two ranks":
            self.on_ranks(block)
            return
        {"python": self.python, "yaml": self.yaml, "sh": self.sh, "redis": self.redis}[block.language](block)


def without(arguments: list[str], extra: list[str]) -> list[str]:
    """The arguments less those options, and their values, that ``extra`` gives, too."""
    left: list[str] = []
    words = iter(arguments)
    for word in words:
        if word not in extra or not word.startswith("--"):
            left.append(word)
        elif not [*extra, "--"][extra.index(word) + 1].startswith("--"):
            next(words)
    return left


def hicache_exits(arguments: list[str], reader: Reader) -> int:
    try:
        return main(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", page_parameters())
def test_what_a_page_shows_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, socket_folder: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HOME", str(socket_folder))  # ~/.hicache/admin.sock
    monkeypatch.setenv("HICACHE_PAGE_KEY", "8f3c" * 16)
    monkeypatch.setenv("CACHE_PASSWORD", "a-password")
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
