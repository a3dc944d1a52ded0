"""What it is worth that L3 declines what is over: a verified replay with a small disk, with and without.

    python benchmarks/store_admission.py [TRACE] [--requests N] [--store 5% 10% 20%] [--every 0 1 2] [--write NAME ...]

Everything is the same in both replays but ``policy.store_admission``; the configuration, and what ``every`` says,
are those of ``store_order.py``. A client closes its session right after its last answer, so what is written through
at once may be under way by then. ``--every 0``: it closes it after every request, and comes back all the same.
"""

from __future__ import annotations

from store_order import configuration, make_parser, quota_bytes, read_named, sound

from hicache.replay.reference import told_ends
from hicache.replay.result import ReplayResult
from hicache.replay.run import replay
from hicache.tiers.disk import DiskStore
from hicache.workload import Trace

WRITES = ("write_back", "write_through", "write_through_selective")
ADMISSIONS = ("all", "unless_over")


def run(
    trace: Trace, write: str, store_share: float, every: int, host_share: float, admission: str
) -> ReplayResult:
    """One replay on a temporary folder."""
    config = configuration(trace, host_share)
    policy = config.policy.model_copy(update={"write": write, "store_admission": admission})
    store = DiskStore("auto", quota_bytes(trace, store_share))
    told = told_ends(trace, every) if every else range(trace.num_requests)
    return sound(replay(trace, config.model_copy(update={"policy": policy}), told_ends=told, store=store))


def pages_written(result: ReplayResult) -> int:
    assert result.stats is not None
    assert result.stats.store is not None
    return result.stats.store.pages_written


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--write", nargs="*", choices=WRITES, default=list(WRITES))
    arguments = parser.parse_args()
    trace = read_named(arguments)
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
