"""What a tree keeps in memory for each node and each cached token.

    python benchmarks/tree_memory.py [--core rust]

*wide*: leaves of two pages (64 tokens at page 1), a hundred under each shared prefix. *chats*: sessions that take
turns, 500 tokens each, so that a chat's slots lie in as many runs as it has turns. Bytes are what the allocator
has handed out (``mallinfo2``), before and after; the prompts themselves are not kept. ``beyond tokens`` leaves
out four bytes for each token that is in the tree: its id.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
from collections.abc import Iterator

import numpy as np

from hicache.radix.actions import Copy
from hicache.radix.core import make_core
from hicache.radix.interface import TreeConfig, TreeCore
from hicache.types import ComponentSpec, ReuseRule

SETS = {
    "full": (ComponentSpec("full", bytes_per_token=8),),
    "all": (
        ComponentSpec("full", bytes_per_token=8),
        ComponentSpec("swa", ReuseRule.WINDOW, window_tokens=1024, bytes_per_token=8),
        ComponentSpec("mamba", ReuseRule.CHECKPOINT, state_bytes=64),
    ),
}
FIELDS = (
    "arena",
    "ordblks",
    "smblks",
    "hblks",
    "hblkhd",
    "usmblks",
    "fsmblks",
    "uordblks",
    "fordblks",
    "keep",
)


class Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


def num_bytes() -> int:
    """Bytes that the allocator has handed out."""
    gc.collect()
    function = ctypes.CDLL(None).mallinfo2
    function.restype = Mallinfo2
    info = function()
    return int(info.uordblks + info.hblkhd)


def wide(page: int, num_leaves: int) -> Iterator[np.ndarray]:
    generator = np.random.default_rng(0)
    prefix_len, leaf_len = (256, 64) if page == 1 else (4 * page, 2 * page)
    for leaf in range(num_leaves):
        if leaf % 100 == 0:
            prefix = generator.integers(0, 128_000, prefix_len, dtype=np.int32)
        yield np.concatenate([prefix, generator.integers(0, 128_000, leaf_len, dtype=np.int32)])


def chats(page: int, num_sessions: int, num_turns: int) -> Iterator[np.ndarray]:
    generator = np.random.default_rng(0)
    histories = [generator.integers(0, 128_000, num_turns * 512, dtype=np.int32) for _ in range(num_sessions)]
    turn_len = -(-500 // page) * page
    for turn in range(1, num_turns + 1):
        for history in histories:
            yield history[: turn * turn_len]


def put(core: TreeCore, tokens: np.ndarray) -> None:
    matched = core.match(tokens, cap=False)
    reserved = core.reserve(matched.lease, len(tokens) - matched.found.boundary)
    assert not reserved.short
    released = core.release(matched.lease, tokens)
    for action in (*matched.actions, *reserved.actions, *released.actions):
        if isinstance(action, Copy):  # of a state into the request's own slot: it ends at once
            core.commit(action.ticket)
    assert not core.in_flight()


def measure(kind: str, components: str, page: int, shape: str, prompts: Iterator[np.ndarray]) -> None:
    specs = SETS[components]
    slots = {spec.name: 40_000_000 // page for spec in specs}
    before = num_bytes()
    core = make_core(TreeConfig(page, specs, slots), kind)
    for tokens in prompts:
        put(core, tokens)
    del tokens
    prompts.close()  # type: ignore[attr-defined]  # a generator, which keeps the histories
    used = num_bytes() - before
    views = core.snapshot()
    num_nodes, num_tokens = len(views), sum(len(view.tokens) for view in views)
    beyond = used - 4 * num_tokens
    sys.stdout.write(
        f"{kind} {components:5} page {page:3} {shape:6} {num_nodes:8} nodes {num_tokens:9} tokens: "
        f"{beyond / num_nodes:8.1f} bytes a node beyond tokens; a token {used / num_tokens:6.2f} bytes, "
        f"{beyond / num_tokens:5.2f} beyond tokens\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--core", default="rust", choices=["rust", "python"])
    parser.add_argument("--leaves", type=int, default=100_000)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=100)
    args = parser.parse_args()
    for components in SETS:
        for page in (1, 64):
            leaves = args.leaves if page == 1 else args.leaves // 4
            measure(args.core, components, page, "wide", wide(page, leaves))
            measure(args.core, components, page, "chats", chats(page, args.sessions, args.turns))


if __name__ == "__main__":
    main()
