"""``adaptive`` against every single policy on made-up loads, in the reference's model.

    python benchmarks/policy_loads.py [--only NAME ...] [--seeds 1 2] [--policies adaptive lru ...] [--kept FILE]

Prints the cells where ``adaptive`` is more than half a point under the best single policy, or at 10 % and more over 0.2
points under ``lru``, and sums for either half of ``loads.py`` and for ``final_loads.py``. With ``--kept`` what was measured is kept in a file, and
a second run measures only what is not there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from final_loads import FINAL
from loads import CHOOSING, LOADS, as_trace

from hicache.replay.reference import block_sequences, reference_replay

PERCENTS = (1, 2, 5, 10, 20, 50)
SINGLE = ("lru", "session", "slru", "lfu", "tlru", "fifo")
ALL = LOADS | FINAL
Rates = dict[str, float]


def measure(name: str, seed: int, policies: Sequence[str], rates: Rates) -> None:
    """Add the load's token hit rates that are lacking, by ``load-seed/percent/policy``."""
    cells = {
        f"{name}-{seed}/{percent}/{policy}": (percent, policy) for percent in PERCENTS for policy in policies
    }
    lacking = {key: cell for key, cell in cells.items() if key not in rates}
    if not lacking:
        return
    trace = as_trace(f"{name}-{seed}", ALL[name](seed))
    sequences = block_sequences(trace)
    for key, (percent, policy) in lacking.items():
        capacity = max(1, trace.distinct_blocks * percent // 100)
        result = reference_replay(trace, capacity, policy=policy, sequences=sequences)
        if result.audit_errors:
            raise SystemExit(f"{key}: the tree's audit found {result.audit_errors[0]}")
        rates[key] = result.token_hit_rate
    print(
        f"# {name}-{seed}: {len(trace)} requests, {trace.distinct_blocks} blocks, "
        f"infinite {trace.infinite_hit_rate:.4f}",
        flush=True,
    )


def report(rates: Mapping[str, float], policies: Sequence[str]) -> None:
    """Print the cells that miss the aim, and the sums."""
    sums = {half: [0, 0, 0, 0.0] for half in ("choosing", "reporting", "final")}
    single = [policy for policy in policies if policy != "adaptive"] or SINGLE
    for key in rates:
        load, percent, policy = key.split("/")
        if policy != "adaptive" or any(f"{load}/{percent}/{each}" not in rates for each in single):
            continue
        row = {each: rates[f"{load}/{percent}/{each}"] for each in single}
        best = max(single, key=row.__getitem__)
        name = load.rpartition("-")[0]
        half = "final" if name in FINAL else "choosing" if name in CHOOSING else "reporting"
        gap, under_lru = 100 * (row[best] - rates[key]), 100 * (row["lru"] - rates[key])
        misses = gap > 0.5, int(percent) >= 10 and under_lru > 0.2
        total = sums[half]
        total[0] += 1
        total[1] += misses[0]
        total[2] += misses[1]
        total[3] += max(0.0, gap)
        if any(misses):
            cells = " ".join(f"{each} {row[each]:.4f}" for each in single)
            print(
                f"{half[0]} {load:26}{percent:>3} % adaptive {rates[key]:.4f} {best:8}{gap:+6.2f}, "
                f"lru {under_lru:+6.2f}{'!' if misses[1] else ' '} | {cells}"
            )
    for half, (cells_seen, far, under, gaps) in sums.items():
        print(
            f"{half}: {cells_seen} cells, over 0.5 under the best {far}, "
            f"at 10 % and more over 0.2 under lru {under}, gaps {gaps:.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=ALL, default=list(ALL), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--policies", nargs="+", default=["adaptive", *SINGLE])
    parser.add_argument("--kept", type=Path)
    given = parser.parse_args()
    rates: Rates = json.loads(given.kept.read_text()) if given.kept and given.kept.exists() else {}
    for name in given.only:
        for seed in given.seeds:
            measure(name, seed, given.policies, rates)
            if given.kept:
                given.kept.write_text(json.dumps(rates))
    report(rates, given.policies)


if __name__ == "__main__":
    main()
