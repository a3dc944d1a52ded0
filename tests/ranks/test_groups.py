"""The groups themselves: what is agreed, and what becomes of those whose others do not come."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch.distributed as dist

from hicache.errors import ConfigError, RankGroupError
from hicache.ranks.gloo import GlooGroup
from hicache.ranks.group import RankGroup, SingleGroup
from hicache.ranks.in_process import InProcessGroup, threads
from hicache.testing.redis_server import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future
    from pathlib import Path

    from hicache.ranks.group import Numbers

PATIENCE_S = 60.0
LONG_S = 60.0


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


def gloo(pool: ThreadPoolExecutor, size: int, timeout_s: float) -> list[RankGroup]:
    address = f"127.0.0.1:{free_port()}"
    places = [
        pool.submit(GlooGroup.connect, address, rank=rank, size=size, timeout_s=timeout_s)
        for rank in range(size)
    ]
    return [place.result(PATIENCE_S) for place in places]


def in_process(_: ThreadPoolExecutor, size: int, timeout_s: float) -> list[RankGroup]:
    return list(threads(size, timeout_s=timeout_s))


@pytest.fixture(params=[in_process, gloo], ids=["threads", "gloo"])
def make(
    request: pytest.FixtureRequest, pool: ThreadPoolExecutor
) -> Iterator[Callable[[int, float], list[RankGroup]]]:
    """``make(3, timeout_s)``: the places of a group of either kind."""
    made: list[RankGroup] = []

    def places(size: int, timeout_s: float = LONG_S) -> list[RankGroup]:
        made.extend(request.param(pool, size, timeout_s))
        return made

    yield places
    for group in made:
        group.close()


def ask(pool: ThreadPoolExecutor, group: RankGroup, *numbers: int) -> Future[Numbers]:
    return pool.submit(group.lowest, np.array(numbers, dtype=np.int64))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_get_the_lowest_number_by_number(
    make: Callable[..., list[RankGroup]], pool: ThreadPoolExecutor, size: int
) -> None:
    groups = make(size)
    assert [(group.rank, group.size) for group in groups] == [(rank, size) for rank in range(size)]
    for begin in (5, -(2**62)):  # two calls: a group is used again and again
        answers = [ask(pool, group, begin + group.rank, -group.rank, 7) for group in groups]
        for answer in answers:
            assert answer.result(PATIENCE_S).tolist() == [begin, 1 - size, 7]


def test_a_rank_that_does_not_come_is_an_error_in_time(
    make: Callable[..., list[RankGroup]], pool: ThreadPoolExecutor
) -> None:
    groups = make(2, 0.2)
    with pytest.raises(RankGroupError):
        ask(pool, groups[0], 1).result(PATIENCE_S)
    groups[0].close()
    with pytest.raises(RankGroupError):  # and an error of the late one, which must not go on alone
        ask(pool, groups[1], 1).result(PATIENCE_S)


def test_a_rank_that_leaves_is_an_error_at_once(
    make: Callable[..., list[RankGroup]], pool: ThreadPoolExecutor
) -> None:
    groups = make(2, LONG_S)
    waiting = ask(pool, groups[0], 1)
    groups[1].close()
    with pytest.raises(RankGroupError):
        waiting.result(PATIENCE_S / 2)  # long before the limit
    with pytest.raises(RankGroupError):
        groups[1].lowest(np.zeros(1, dtype=np.int64))
    groups[1].close()


def test_one_rank_alone_agrees_with_itself() -> None:
    group = SingleGroup()
    numbers = np.array([3, -1], dtype=np.int64)
    assert (group.rank, group.size) == (0, 1)
    assert group.lowest(numbers) is numbers
    group.close()


def test_threads_that_give_different_numbers_of_values_are_told_which(pool: ThreadPoolExecutor) -> None:
    groups = threads(2)
    first, second = ask(pool, groups[0], 1), ask(pool, groups[1], 1, 2)
    for answer in (first, second):
        with pytest.raises(RankGroupError, match=r"different numbers of values: \{.*0: 1.*\}"):
            answer.result(PATIENCE_S)


def test_threads_that_miss_a_rank_name_it() -> None:
    groups = threads(3, timeout_s=0.05)
    with pytest.raises(RankGroupError, match=r"ranks \[1, 2\] did not come within 0.05 s"):
        groups[0].lowest(np.zeros(1, dtype=np.int64))


@pytest.mark.parametrize(("size", "timeout_s"), [(0, 1.0), (2, 0.0)])
def test_a_group_without_ranks_or_time_is_refused(size: int, timeout_s: float) -> None:
    with pytest.raises(ValueError, match="a group has ranks and a time limit"):
        threads(size, timeout_s=timeout_s)


def test_a_rank_that_finds_nobody_says_where_it_looked() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(
        RankGroupError, match=rf"rank 1 of 2 found no group at {address} within 1 s: .*ranks.address"
    ):
        GlooGroup.connect(address, rank=1, size=2, timeout_s=1)


def test_the_engine_s_default_group_is_refused_and_one_made_for_us_is_taken(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match="default process group cannot be shared; make another one"):
            GlooGroup.over(dist.group.WORLD)
        own = GlooGroup.over(dist.new_group(backend="gloo"))
        assert (own.rank, own.size) == (0, 1)
        assert own.lowest(np.array([4], dtype=np.int64)).tolist() == [4]
        own.close()
        assert dist.is_initialized(), "the engine's groups are the engine's"
    finally:
        dist.destroy_process_group()


def test_a_place_used_by_two_threads_is_an_error(pool: ThreadPoolExecutor) -> None:
    group = threads(2)[0]
    assert isinstance(group, InProcessGroup)
    answers = [ask(pool, group, 1), ask(pool, group, 2)]
    for answer in answers:
        with pytest.raises(RankGroupError, match="called from two threads at once"):
            answer.result(PATIENCE_S)
