"""Ranks as processes, over gloo: the same random load on all, each with its own faults, hash seed and clock."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import pytest

from hicache.testing.rank_process import EXIT_BROKEN_UP
from hicache.testing.redis_server import free_port

PATIENCE_S = 240.0


@dataclass(frozen=True)
class Ended:
    """What a rank printed, and how it ended."""

    code: int
    lines: list[str]
    errors: str


def run_ranks(size: int, seed: int, steps: int, core: str, dies: dict[int, int] | None = None) -> list[Ended]:
    """Start so many ranks, and wait for all. ``dies``: rank to the step before which it is gone."""
    address = f"127.0.0.1:{free_port()}"
    started = []
    for rank in range(size):
        arguments = [address, str(rank), str(size), str(seed), str(steps), core]
        if rank in (dies or {}):
            arguments.append(f"dies={(dies or {})[rank]}")
        command = [sys.executable, "-m", "hicache.testing.rank_process", *arguments]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        return [
            Ended(process.wait(), out.splitlines(), err)
            for process in started
            for out, err in [process.communicate(timeout=PATIENCE_S)]
        ]
    finally:
        for process in started:
            process.kill()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("size", "seed", "core"), [(2, 3, "rust"), (2, 4, "python"), (4, 11, "rust")])
def test_processes_give_equal_answers_and_make_equal_collectives(size: int, seed: int, core: str) -> None:
    ranks = run_ranks(size, seed, 40, core)
    assert [rank.code for rank in ranks] == [0] * size, [rank.errors[-2000:] for rank in ranks]
    assert len(ranks[0].lines) == 41
    assert all(rank.lines == ranks[0].lines for rank in ranks)
    assert ranks[0].lines[-1] == "mismatches 0"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_death_of_a_rank_is_an_error_of_the_others_and_no_hang() -> None:
    """kill -9 of one of three: the others say so in their next agreement, and end."""
    ranks = run_ranks(3, 3, 40, "rust", dies={1: 20})
    assert [rank.code for rank in ranks] == [EXIT_BROKEN_UP, 9, EXIT_BROKEN_UP], [
        rank.errors[-2000:] for rank in ranks
    ]
    for survivor in (ranks[0], ranks[2]):
        assert survivor.lines[-1].startswith("broken up: ")
        assert survivor.lines[:20] == ranks[1].lines
