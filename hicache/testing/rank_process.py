"""One rank as a process: ``python -m hicache.testing.rank_process ADDRESS RANK SIZE SEED STEPS CORE``.

Makes the random calls of ``rank_loads`` and prints one line for each: a digest of the answer, the tree and the
collectives so far, which is the same on all ranks. ``dies=N`` after these ends it before its N-th call.
"""

from __future__ import annotations

import hashlib
import os
import sys

from hicache.errors import RankGroupError
from hicache.ranks.gloo import GlooGroup
from hicache.testing.rank_loads import random_calls, random_settings
from hicache.testing.ranks import Rank

EXIT_BROKEN_UP = 7
TIMEOUT_S = 20.0


def main(arguments: list[str]) -> int:
    address, number, size, seed, steps, core, *more = arguments
    dies_at = int(more[0].removeprefix("dies=")) if more else None
    group = GlooGroup.connect(address, rank=int(number), size=int(size), timeout_s=TIMEOUT_S)
    rank = Rank(group, random_settings(int(seed)), seed=int(seed), core=core)
    try:
        for step, call in enumerate(random_calls(int(seed), int(steps))):
            if step == dies_at:
                os._exit(9)  # as by kill -9: nothing is closed
            rank.break_something()
            seen = (call(rank), rank.state(), rank.group.calls, rank.cache.audit())
            _say(hashlib.sha256(repr(seen).encode()).hexdigest()[:16])
    except RankGroupError as error:
        _say(f"broken up: {error}")
        return EXIT_BROKEN_UP
    finally:
        rank.close()
    stats = rank.cache.agreement_stats()
    _say(f"mismatches {rank.checker.mismatches}")
    sys.stderr.write(f"{stats}\n")
    return 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
