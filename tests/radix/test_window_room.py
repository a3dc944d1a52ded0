"""A request that fits computed afresh is never refused because it reuses: what a window's lock may hold."""

from __future__ import annotations

import pytest

from hicache.testing.harness import BuildHarness, Harness
from hicache.testing.trees import count_to
from hicache.types import Tier

DEVICE = Tier.DEVICE

PAGE = 4
WINDOW_PAGES = 8


def num_refused(cache: Harness, prompt: list[int], *, step: int = PAGE) -> int:
    """Serve as an engine that prefills ``step`` tokens at a time. How many tokens found no slots."""
    lease = cache.match(prompt)
    cache.restore(lease)
    done = lease.boundary
    while done < len(prompt):
        count = min(step, len(prompt) - done)
        if not cache.reserve_waiting(lease, count):
            break
        done += count
        cache.compute(lease, done)
        cache.insert(lease, mark=False)
    cache.release(lease, done)
    cache.complete_all()
    return len(prompt) - done


def pool(model: str, num_pages: int) -> dict[str, int]:
    return {name: num_pages if name in ("swa", "wide") else 64 for name in model.split("+")}


@pytest.mark.parametrize("step", [PAGE, 2 * PAGE, 3 * PAGE])
@pytest.mark.parametrize("num_pages", range(WINDOW_PAGES + 1, 2 * WINDOW_PAGES + 1))
@pytest.mark.parametrize("model", ["swa", "full+swa", "full+swa+mamba"])
def test_a_request_that_fits_computed_afresh_is_not_refused_because_it_reuses(
    build: BuildHarness, model: str, num_pages: int, step: int
) -> None:
    """A lock took the whole node in which the window begins, up to w - 1 pages too many, for as long as it stood."""
    options = {"page_size": PAGE, "window": WINDOW_PAGES * PAGE, "device": pool(model, num_pages)}
    first = count_to(2 * WINDOW_PAGES * PAGE)
    prompts = [first, [*first, 900, 901, 902, 903, 904], [*first, *count_to(700, start=700 - 50)]]

    cache = build(model, **options)
    assert num_refused(cache, prompts[0], step=PAGE) == 0
    for prompt in prompts:
        for _ in range(2):
            afresh = build(model, is_checked=False, **options)
            assert num_refused(cache, prompt, step=step) <= num_refused(afresh, prompt, step=step)


def test_two_windows_give_up_what_neither_needs(build: BuildHarness) -> None:
    device = {"full": 64, "swa": 5, "wide": 9}
    cache = build("full+swa+wide", page_size=PAGE, window=4 * PAGE, wide=8 * PAGE, device=device)
    prompt = count_to(16 * PAGE)
    assert num_refused(cache, prompt) == 0
    assert num_refused(cache, [*prompt, *count_to(800, start=740)]) == 0


def whole_windows(cache: Harness, num_pages: int) -> list[int]:
    """Serve so many pages as one step, and give the starts of the nodes."""
    cache.serve(count_to(num_pages * PAGE), marks=[])
    return starts(cache)


def starts(cache: Harness) -> list[int]:
    return sorted(view.start // PAGE for view in cache.core.snapshot() if view.tokens)


def test_no_node_is_cut_while_something_else_may_go(build: BuildHarness) -> None:
    """A cut makes two nodes of one, and their ages keep them apart afterwards."""
    cache = build("full+swa", page_size=PAGE, window=8 * PAGE, device={"full": 64, "swa": 17})
    assert whole_windows(cache, 16) == [0, 8]
    cache.serve([7] * PAGE * 4, marks=[])
    lease = cache.match([*count_to(16 * PAGE), 900])
    assert lease.boundary == 16 * PAGE
    assert cache.reserve_waiting(lease, 5 * PAGE)
    cache.compute(lease, 16 * PAGE + 1)
    cache.release(lease, 16 * PAGE)
    assert starts(cache) == [0, 0, 8], "4 pages of the other prompt, if need be, and no part of this one"


def test_what_another_lease_holds_before_its_window_goes_too(build: BuildHarness) -> None:
    cache = build("full+swa", page_size=PAGE, window=8 * PAGE, device={"full": 64, "swa": 16})
    whole_windows(cache, 16)
    idle = cache.match([*count_to(16 * PAGE), *count_to(700, start=650)])
    cache.settle(idle)
    for page in range(4):
        assert cache.reserve_waiting(idle, PAGE)
        cache.compute(idle, (17 + page) * PAGE)
        cache.insert(idle, mark=False)
    assert cache.core.pool_count("swa", DEVICE).free == 4, "12 pages held, of which the window needs 8"

    other = cache.match([7] * PAGE * 8)
    assert cache.reserve_waiting(other, 8 * PAGE)
    cache.release(other)
    cache.release(idle, 20 * PAGE)
    assert cache.core.audit() == []


def test_a_page_that_is_being_copied_is_not_cut_off(build: BuildHarness) -> None:
    """The copy reads it, so the cut would free nothing; it is made when the copy has ended."""
    write = "write_through_selective"
    device = {"full": 64, "swa": 9}
    cache = build("full+swa", page_size=PAGE, window=8 * PAGE, device=device, host=64, write=write)
    prompt = [*count_to(16 * PAGE), *count_to(800, start=701)]
    assert num_refused(cache, prompt[: 16 * PAGE]) == 0
    lease = cache.match(prompt)
    cache.settle(lease)
    assert cache.executor.pending, "the second use begins a copy"
    assert not cache.reserve(lease, PAGE).short
    cache.compute(lease, 17 * PAGE)
    cache.insert(lease, mark=False)
    before = starts(cache)
    reserved = cache.reserve(lease, PAGE)
    assert reserved.short
    assert reserved.tickets
    assert starts(cache) == before
    cache.complete_all()
    assert not cache.reserve(lease, PAGE).short


def test_a_load_finds_room_beside_what_its_own_lock_holds_too_much(build: BuildHarness) -> None:
    """The window's first pages lie in L1, in a node that begins before it, the rest in L2."""
    cache = build("full+swa", page_size=PAGE, window=8 * PAGE, device={"full": 64, "swa": 16}, host=64)
    prompt = count_to(20 * PAGE)
    cache.serve(prompt[: 16 * PAGE], marks=[])
    cache.serve(prompt, marks=[])
    cache.release(cache.match([*prompt[: 16 * PAGE], 900]))  # so the last 4 pages are the oldest
    cache.resize("swa", DEVICE, 9)
    cache.complete_all()
    again = cache.match([*prompt, 900])
    assert again.found.by_component["swa"].host == 4 * PAGE
    assert cache.restore(again).boundary == 20 * PAGE
