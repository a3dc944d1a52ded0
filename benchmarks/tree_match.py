"""Match of a long prompt against ``memcmp`` of the same tokens, as int32 and as int64, with caches warm and swept.

    python benchmarks/tree_match.py [--tokens 131072 --tokens 1048576]

Each pass takes every measurement once, so all see the same machine. *Warm*: the same call was just made. *Swept*:
6 MB of other data were read just before, so that nothing is left in a cache of the core itself; ``nothing`` is
what timing an empty call costs then. Thread CPU time, median and best.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from collections.abc import Callable

import numpy as np

from hicache.radix.core import make_core
from hicache.radix.interface import TreeConfig, TreeCore
from hicache.types import ComponentSpec, LeaseId

SWEPT_BYTES = 6 << 20


def filled(tokens: np.ndarray) -> TreeCore:
    """A tree that holds the prompt."""
    spec = ComponentSpec("full", bytes_per_token=8)
    core = make_core(TreeConfig(1, (spec,), {"full": len(tokens)}), "rust")
    lease = core.match(tokens, cap=False).lease
    core.reserve(lease, len(tokens))
    core.release(lease, tokens)
    return core


def calls_on(tokens: np.ndarray) -> dict[str, Callable[[TreeCore], LeaseId | None]]:
    """What is timed; a match gives the lease to be released afterwards."""
    libc = ctypes.CDLL(None)
    libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    calls: dict[str, Callable[[TreeCore], LeaseId | None]] = {"nothing": lambda core: None}
    for array in (tokens, tokens.astype(np.int64)):
        other = array.copy()
        pair = (array.ctypes.data, other.ctypes.data, array.nbytes)

        def compare(core: TreeCore, other: np.ndarray = other, pair: tuple[int, int, int] = pair) -> None:
            libc.memcmp(*pair)

        def match(core: TreeCore, array: np.ndarray = array) -> LeaseId:
            return core.match(array, cap=False).lease

        calls[f"memcmp {array.dtype}"] = compare
        calls[f"match {array.dtype}"] = match
    return calls


def measure(num_tokens: int, *, is_swept: bool, passes: int) -> dict[str, list[float]]:
    tokens = np.random.default_rng(0).integers(0, 128_000, num_tokens).astype(np.int32)
    core, calls, swept = filled(tokens), calls_on(tokens), np.ones(SWEPT_BYTES // 8)
    took_us: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(passes):
        for name, call in calls.items():
            if is_swept:
                swept.sum()
            elif (lease := call(core)) is not None:
                core.release(lease)
            begun = time.thread_time_ns()
            lease = call(core)
            took_us[name].append((time.thread_time_ns() - begun) / 1000)
            if lease is not None:
                core.release(lease)
    return took_us


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, action="append")
    parser.add_argument("--passes", type=int, default=60)
    args = parser.parse_args()
    for num_tokens in args.tokens or [1 << 17, 1 << 20]:
        for is_swept in (False, True):
            sys.stdout.write(f"{num_tokens} tokens, caches {'swept' if is_swept else 'warm'} (us)\n")
            for name, took_us in measure(num_tokens, is_swept=is_swept, passes=args.passes).items():
                sys.stdout.write(f"  {name:14} median {np.median(took_us):8.1f}  best {min(took_us):8.1f}\n")


if __name__ == "__main__":
    main()
