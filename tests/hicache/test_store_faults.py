"""What a store does wrong shortens a hit, is counted, and never reaches the engine (DESIGN 6, Failure)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from hicache.errors import TierTimeoutError, TierUnavailableError
from hicache.testing.scripted_store import FLIPPED, MISS, SHORT, Outcome, Raise
from hicache.types import TierTokens

if TYPE_CHECKING:
    from tests.hicache.conftest import MakeRig, Rig, Tokens

T = Callable[..., "Tokens"]
EVERY = "full+swa+mamba"
FAULTS: dict[str, Outcome] = {
    "miss": MISS,
    "short": SHORT,
    "flipped": FLIPPED,
    "OSError": Raise(OSError(5, "input/output error")),
    "unavailable": Raise(TierUnavailableError("closed")),
    "timeout": Raise(TierTimeoutError("too slow")),
    "ValueError": Raise(ValueError("a bug of the store")),
}
EACH_FAULT = pytest.mark.parametrize("fault", FAULTS)


def in_l3_only(make_rig: MakeRig, model: str, tokens: Tokens) -> Rig:
    rig = make_rig(model, host=64, store="scripted")
    rig.serve(tokens)
    assert rig.cache.flush()
    rig.cache.reset()
    return rig


# ---- reading -------------------------------------------------------------------------------------------------------
@EACH_FAULT
def test_a_get_that_fails_shortens_the_hit(make_rig: MakeRig, t: T, model: str, fault: str) -> None:
    """All reads fail; then the store is well again and everything is served."""
    rig = in_l3_only(make_rig, model, t(40))
    rig.store.script("get", FAULTS[fault])
    served = rig.serve(t(41))
    assert served.source.total == 0
    assert served.shortened_tokens == 40
    assert sum(count for name, count in rig.cache.stats().faults.items() if name.startswith("fetch_")) > 0
    rig.check_idle()
    rig.store.unscript()
    rig.cache.reset()
    assert rig.serve(t(41)).source.total == 40
    rig.check_idle()
    rig.check_beliefs()


@EACH_FAULT
@pytest.mark.parametrize("page", [0, 3, 9])
def test_a_page_that_cannot_be_read_ends_the_hit_before_it(
    make_rig: MakeRig, t: T, fault: str, page: int
) -> None:
    """O-36: what came before it in the batch is there where the store says so; never what came after."""
    rig = in_l3_only(make_rig, "full", t(40))
    rig.store.script("get", FAULTS[fault], key=rig.keys(t(40))[page])
    served = rig.serve(t(41))
    # A call that raises says nothing of the pages before it.
    assert served.source.store == (0 if isinstance(FAULTS[fault], Raise) else 4 * page)
    rig.check_idle()


@EACH_FAULT
@pytest.mark.parametrize("component", ["full", "swa", "mamba"])
def test_a_component_that_cannot_be_read_moves_the_boundary_for_all(
    make_rig: MakeRig, t: T, fault: str, component: str
) -> None:
    """Class 2: the last page (or state) of one component fails; the boundary falls back to the mark before."""
    rig = in_l3_only(make_rig, EVERY, t(40))
    rig.store.script("get", FAULTS[fault], key=rig.keys(t(40), component)[-1])
    served = rig.serve(t(41))
    # Marks are at 36 and 40; a window call that raises takes the window of 36 along.
    assert served.source.total in (0, 36)
    if not isinstance(FAULTS[fault], Raise):
        assert served.source.total == 36
    rig.check_idle()


def test_a_miss_is_asked_for_once(make_rig: MakeRig, t: T) -> None:
    """What proved missing is not believed any more: no second read, in this request or the next."""
    rig = in_l3_only(make_rig, "full", t(40))
    key = rig.keys(t(40))[6]
    rig.store.script("get", MISS, key=key)
    rig.serve(t(41))
    assert rig.store.keys_of("get").count(key) == 1
    assert rig.cache.stats().faults == {"fetch_miss": 1, "shortened": 1}
    rig.squeeze()
    rig.serve(t(41))
    assert rig.store.keys_of("get").count(key) == 1


def test_a_read_that_fails_for_another_reason_is_tried_again(make_rig: MakeRig, t: T) -> None:
    """An error says nothing of the page: the belief stays."""
    rig = in_l3_only(make_rig, "full", t(40))
    rig.store.script("get", Raise(OSError("busy")), times=1)
    assert rig.serve(t(41)).source == TierTokens(0, 0, 40)  # the fetch begins once more by itself
    assert rig.cache.stats().faults == {"fetch_raised": 1}
    rig.check_idle()


def test_a_get_that_never_answers_ends_as_a_miss(make_rig: MakeRig, t: T, model: str) -> None:
    """O-51: bounded by the limits, whatever the store does."""
    rig = in_l3_only(make_rig, model, t(40))
    rig.store.block("get")
    with rig.impatient():
        assert rig.serve(t(41)).source.total == 0
    rig.store.unscript()  # a read that began again just now has all the time that there is
    rig.check_idle()
    rig.cache.reset()
    assert rig.serve(t(41)).source.total == 40
    rig.check_idle()


# ---- asking --------------------------------------------------------------------------------------------------------
@EACH_FAULT
def test_an_exists_that_fails_is_a_miss(make_rig: MakeRig, t: T, model: str, fault: str) -> None:
    rig = in_l3_only(make_rig, model, t(40))
    rig.store.script("exists", FAULTS[fault])
    assert rig.serve(t(41)).source.total == 0
    raised = isinstance(FAULTS[fault], Raise)
    assert rig.cache.stats().faults == ({"probe_failed": 1} if raised else {})
    rig.check_idle()
    rig.store.unscript()
    rig.cache.reset()
    assert rig.serve(t(41)).source.total == 40
    rig.check_beliefs()


def test_an_exists_that_never_answers_is_a_miss(make_rig: MakeRig, t: T, model: str) -> None:
    """O-51."""
    rig = in_l3_only(make_rig, model, t(40))
    rig.store.block("exists")
    with rig.impatient():
        assert rig.serve(t(41)).source.total == 0
    assert rig.cache.stats().faults["probe_failed"] == 1
    rig.check_idle()


def test_what_the_tree_has_is_served_without_the_store(make_rig: MakeRig, t: T) -> None:
    """A dead L3 costs nothing of L1 and L2."""
    rig = make_rig(EVERY, host=64, store="scripted")
    rig.serve(t(40))
    rig.squeeze()
    for operation in ("exists", "get", "put"):
        rig.store.script(operation, Raise(OSError("gone")))
    assert rig.serve(t(45)).source == TierTokens(0, 40, 0)
    assert rig.serve(t(46)).source == TierTokens(44, 0, 0)
    rig.check_idle()


@pytest.mark.parametrize("answers", [0, 1, 100], ids=["none", "one", "too many"])
def test_a_store_that_answers_the_wrong_number_is_a_miss(make_rig: MakeRig, t: T, answers: int) -> None:
    rig = in_l3_only(make_rig, "full", t(40))

    async def lie(_: object) -> list[bool]:
        return [True] * answers

    rig.store.exists = lie  # type: ignore[assignment]  # a store that breaks its contract
    assert rig.serve(t(41)).source.total == 0
    assert rig.cache.stats().faults == {"probe_failed": 1}
    rig.check_idle()


# ---- writing -------------------------------------------------------------------------------------------------------
@EACH_FAULT
@pytest.mark.parametrize("write", ["write_through", "write_back"])
def test_a_put_that_fails_is_counted_and_not_believed(
    make_rig: MakeRig, t: T, model: str, fault: str, write: str
) -> None:
    rig = make_rig(model, host=64, store="scripted", policy__write=write)
    rig.store.script("put", FAULTS[fault])
    rig.serve(t(40))
    assert not rig.cache.flush()
    rig.check_idle()
    rig.check_beliefs()
    assert rig.cache.probe(t(41)).boundary == 40
    assert sum(count for name, count in rig.cache.stats().faults.items() if name.startswith("store_")) > 0
    rig.store.unscript()
    assert rig.cache.flush()
    rig.check_beliefs()
    rig.cache.reset()
    assert rig.serve(t(41)).source.total == 40


def test_a_put_that_never_ends_holds_nobody_up(make_rig: MakeRig, t: T, model: str) -> None:
    rig = make_rig(model, host=64, store="scripted")
    rig.cache._runtime.transfers._store_io._calls.timeout_s = 0.05  # type: ignore[union-attr]  # there is a store
    rig.store.block("put")
    for number in range(1, 5):
        rig.serve(t(1000 * number + 20, 1000 * number + 1))
        assert rig.serve(t(1000 * number + 21, 1000 * number + 1)).source.total == 20
    while not rig.cache.drain():
        pass
    rig.check_idle()
    rig.check_beliefs()


def test_one_exception_does_not_end_the_writer(make_rig: MakeRig, t: T) -> None:
    """O-40: ten writes, the third raises, the seventh is refused: eight are stored, all are acknowledged."""
    rig = make_rig(host=64, store="scripted")
    rig.store.script("put", Raise(OSError("once")), call=3)
    rig.store.script("put", MISS, call=7)
    prompts = [t(10 * number + 4, 10 * number + 1) for number in range(1, 11)]
    for prompt in prompts:
        rig.serve(prompt)
        rig.check_idle()
    assert [rig.stored(prompt) for prompt in prompts].count([True]) == 8
    assert rig.cache.stats().faults == {"store_raised": 1, "store_refused": 1}
    rig.check_beliefs()
    # The two are written when they are used again.
    for prompt in prompts:
        rig.serve([*prompt, 5])
    rig.check_idle()
    assert [rig.stored(prompt) for prompt in prompts].count([True]) == 10


def test_nothing_is_stored_behind_a_page_that_failed(make_rig: MakeRig, t: T) -> None:
    """O-39: page 5 is refused for good; L3 gets what comes before it."""
    rig = make_rig(host=64, store="scripted")
    rig.store.script("put", MISS, key=rig.keys(t(40))[5])
    for length in (41, 42, 60):
        rig.serve(t(length))
        rig.check_idle()
    assert rig.stored(t(40)) == [True] * 5 + [False] * 5
    rig.check_beliefs()


# ---- full queues, no room --------------------------------------------------------------------------------------------
def test_a_full_store_queue_drops_work_and_counts_it(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(host=64, store="scripted", policy__queues={"store": "200B", "prefetch": "1MiB"})
    gate = rig.store.block("put")
    rig.serve(t(20))
    while not gate.reached.is_set():
        rig.cache.poll()
    rig.serve(t(120, 101))
    while rig.cache.stats().faults.get("store_queue_full", 0) == 0:
        rig.cache.poll()
    gate.release()
    rig.check_idle()
    assert (rig.stored(t(20)), rig.stored(t(120, 101))) == ([True] * 5, [False] * 5)
    rig.check_beliefs()
    rig.serve(t(121, 101))  # used again: tried again
    rig.check_idle()
    assert rig.stored(t(120, 101)) == [True] * 5


def test_requests_that_miss_move_nothing(make_rig: MakeRig, t: T) -> None:
    """O-35: L2 is full of useful pages; 100 requests that L3 does not know evict and allocate nothing."""
    rig = make_rig(device=32, host=16, store="scripted", policy__write="write_through_selective")
    for _ in range(2):
        rig.serve(t(65))
    rig.squeeze()
    assert rig.free("full", "host") == 0
    before = rig.cache.stats()
    for number in range(1, 101):
        with rig.cache.match(t(1000 * number + 30, 1000 * number + 1)) as lease:
            assert lease.load() == 0
    after = rig.cache.stats()
    assert after.pools["full", "host"] == before.pools["full", "host"]
    assert after.transfers.moved == before.transfers.moved
    assert rig.store.keys_of("get") == []
    rig.check_idle()


def test_a_hit_allocates_exactly_its_pages(make_rig: MakeRig, t: T) -> None:
    """O-35: for a hit of k pages exactly k are taken."""
    rig = make_rig(host=64, store="scripted")
    rig.seed_store(t(40), pages=range(7))
    gate = rig.store.block("get")
    lease = rig.cache.match(t(81))
    assert gate.reached.wait(20)
    assert rig.free("full", "host") == 64 - 7
    gate.release()
    assert lease.load() == 28
    lease.abandon()
    rig.check_idle()


def test_an_l2_too_small_for_the_hit_gives_its_first_pages(make_rig: MakeRig, t: T) -> None:
    """O-35: not all or nothing; the leading pages that there is room for are loaded."""
    rig = make_rig(device=64, host=6, store="scripted")
    rig.seed_store(t(40))
    served = rig.serve(t(41))
    assert served.source.store >= 24
    rig.check_idle()
