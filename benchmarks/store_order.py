"""What it is worth that L3 hears which sessions are over: a verified replay with a small disk, with and without.

    python benchmarks/store_order.py [TRACE] [--requests N] [--store 5% 10% 20%] [--every 1 2]

Everything is the same in both replays, but that the store of one makes nothing of the hints. L1 and L2 are
small, so that L3 decides. ``every``: the client closes the last turn of every session, or of every second one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from hicache.config import HiCacheConfig, load_config
from hicache.replay.footprint import pool_of
from hicache.replay.reference import told_ends
from hicache.replay.result import ReplayResult
from hicache.replay.run import replay
from hicache.tiers.disk import DiskStore
from hicache.tiers.segment_files import slot_bytes
from hicache.types import PageKey, Regard
from hicache.workload import Trace, read_trace

TRACE = Path(__file__).resolve().parents[1] / "traces" / "cc_agentic_small.jsonl.zst"
PAGE_SIZE, TOKEN_BYTES = 512, 16
JOURNAL_BYTES = 512


class DeafDiskStore(DiskStore):
    """Makes nothing of hints."""

    async def hint(self, keys: Sequence[PageKey], regard: Regard) -> None:
        pass


def configuration(trace: Trace, host_share: float) -> HiCacheConfig:
    """L1 holds the longest request, L2 a share of the trace's distinct blocks; the store is given."""
    longest = max(request.prompt_length + request.output_length for request in trace)
    pages = {"device": longest // PAGE_SIZE + 64, "host": max(64, int(host_share * trace.distinct_blocks))}
    tiers: dict[str, object] = {
        "device": {"kind": "cpu", **pool_of({"full": pages["device"]}, PAGE_SIZE)},
        "host": {"pinned": False, **pool_of({"full": pages["host"]}, PAGE_SIZE)},
    }
    component = {"rule": "path", "layers": 2, "bytes_per_token": TOKEN_BYTES}
    model = {"name": "store-order", "page_size": PAGE_SIZE, "components": {"full": component}}
    policy = {"write": "write_through", "eviction": "session", "prefetch": {"mode": "wait_complete"}}
    return load_config({"model": model, "tiers": tiers, "policy": policy}, environ={})


def run(trace: Trace, store_share: float, every: int, host_share: float, *, hears: bool) -> ReplayResult:
    """One replay on a temporary folder."""
    store = (DiskStore if hears else DeafDiskStore)("auto", quota_bytes(trace, store_share))
    return sound(
        replay(trace, configuration(trace, host_share), told_ends=told_ends(trace, every), store=store)
    )


def quota_bytes(trace: Trace, store_share: float) -> int:
    """Of a disk that holds this share of the distinct blocks."""
    num_pages = int(store_share * trace.distinct_blocks)
    return num_pages * (slot_bytes(PAGE_SIZE * TOKEN_BYTES) + JOURNAL_BYTES)


def sound(result: ReplayResult) -> ReplayResult:
    """The same result; ends the program if a byte or a count in it is wrong."""
    if result.stamp_mismatches or result.audit_errors:
        raise SystemExit(f"not sound: {result.stamp_mismatches} wrong pages, {result.audit_errors[:3]}")
    return result


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Of what a replay with a small disk is told."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("trace", nargs="?", default=str(TRACE))
    parser.add_argument("--requests", type=int)
    parser.add_argument("--host", type=float, default=0.02, help="L2, as a share of the distinct blocks")
    parser.add_argument("--store", type=float, nargs="*", default=[0.05, 0.1, 0.2], help="L3, likewise")
    parser.add_argument("--every", type=int, nargs="*", default=[1, 2], help="which sessions' ends are told")
    return parser


def read_named(arguments: argparse.Namespace) -> Trace:
    """The trace that was named; prints what it is."""
    trace = read_trace(arguments.trace, limit=arguments.requests)
    print(f"{Path(arguments.trace).name}: {trace.num_requests:,} requests, {trace.distinct_blocks:,} blocks")
    return trace


def main() -> None:
    arguments = make_parser(__doc__).parse_args()
    trace = read_named(arguments)
    print(f"{'L3':>5} {'told':>6}  {'hit rate without':>16} {'with':>7}  {'from L3 without':>15} {'with':>7}")
    for share in arguments.store:
        for every in arguments.every:
            deaf, hears = (run(trace, share, every, arguments.host, hears=each) for each in (False, True))
            from_l3 = [each.store_tokens / each.prompt_tokens for each in (deaf, hears)]
            print(
                f"{share:5.0%} {f'1 in {every}':>6}  {deaf.token_hit_rate:16.4f} {hears.token_hit_rate:7.4f}"
                f"  {from_l3[0]:15.4f} {from_l3[1]:7.4f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
