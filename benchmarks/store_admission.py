"""What it is worth that L3 declines what is over: a verified replay with a small disk, with and without.

    python benchmarks/store_admission.py [TRACE] [--requests N] [--store 5% 10% 20%] [--every 0 1 2] [--write NAME ...]

Everything is the same in both replays but ``policy.store_admission``; the configuration, and what ``every`` says,
are those of ``store_order.py``. A client closes its session right after its last answer, so what is written through
at once may be under way by then. ``--every 0``: it closes it after every request, and comes back all the same.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from store_order import JOURNAL_BYTES, PAGE_SIZE, TOKEN_BYTES, TRACE, configuration

from hicache.replay.reference import told_ends
from hicache.replay.result import ReplayResult
from hicache.replay.run import replay
from hicache.tiers.disk import DiskStore
from hicache.tiers.segment_files import slot_bytes
from hicache.workload import Trace, read_trace

WRITES = ("write_back", "write_through", "write_through_selective")
ADMISSIONS = ("all", "unless_over")


def run(
    trace: Trace, write: str, store_share: float, every: int, host_share: float, admission: str
) -> ReplayResult:
    """One replay on a temporary folder."""
    config = configuration(trace, host_share)
    policy = config.policy.model_copy(update={"write": write, "store_admission": admission})
    num_pages = int(store_share * trace.distinct_blocks)
    store = DiskStore("auto", num_pages * (slot_bytes(PAGE_SIZE * TOKEN_BYTES) + JOURNAL_BYTES))
    told = told_ends(trace, every) if every else range(trace.num_requests)
    result = replay(trace, config.model_copy(update={"policy": policy}), told_ends=told, store=store)
    if result.stamp_mismatches or result.audit_errors:
        raise SystemExit(f"not sound: {result.stamp_mismatches} wrong pages, {result.audit_errors[:3]}")
    return result


def pages_written(result: ReplayResult) -> int:
    assert result.stats is not None
    assert result.stats.store is not None
    return result.stats.store.pages_written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("trace", nargs="?", default=str(TRACE))
    parser.add_argument("--requests", type=int)
    parser.add_argument("--host", type=float, default=0.02, help="L2, as a share of the distinct blocks")
    parser.add_argument("--store", type=float, nargs="*", default=[0.05, 0.1, 0.2], help="L3, likewise")
    parser.add_argument("--every", type=int, nargs="*", default=[1, 2], help="which sessions' ends are told")
    parser.add_argument("--write", nargs="*", choices=WRITES, default=list(WRITES))
    arguments = parser.parse_args()
    trace = read_trace(arguments.trace, limit=arguments.requests)
    print(f"{Path(arguments.trace).name}: {trace.num_requests:,} requests, {trace.distinct_blocks:,} blocks")
    print(
        f"{'write':>23} {'L3':>5} {'told':>6}  {'hit rate, all':>13} {'unless_over':>11}  {'pages written':>13} {'':>9}"
    )
    for write in arguments.write:
        for share in arguments.store:
            for every in arguments.every:
                both = [run(trace, write, share, every, arguments.host, each) for each in ADMISSIONS]
                rates, pages = [each.token_hit_rate for each in both], [pages_written(each) for each in both]
                print(
                    f"{write:>23} {share:5.0%} {f'1 in {every}' if every else 'hasty':>6}  {rates[0]:13.4f} {rates[1]:11.4f}"
                    f"  {pages[0]:13,} {pages[1]:9,}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
