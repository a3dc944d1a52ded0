"""What the client says to be over goes first in L3, too: from the hint to the store's own order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hicache.errors import ConfigError
from hicache.tiers.framing import HEADER_BYTES
from hicache.tiers.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.hicache.conftest import MakeRig, Rig, Tokens

    T = Callable[..., Tokens]

CHAT_PAGES = 4
PAGE_BYTES = HEADER_BYTES + 4 * 8


@pytest.fixture(params=["python", "rust"])
def rig(request: pytest.FixtureRequest, make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """L1 of two chats, L2 of one and a half, L3 of five."""
    monkeypatch.setenv("HICACHE_CORE", str(request.param))
    store = MemoryStore(5 * CHAT_PAGES * PAGE_BYTES)
    return make_rig(device=9, host=6, policy__eviction="session", store=store)


def chat(rig: Rig, t: T, number: int) -> None:
    """A chat of its own; all of it is in L3 when this returns."""
    rig.serve(t(100 * number + 16, 100 * number + 1), session=f"chat {number}")
    assert rig.cache.flush()


def chat_closed_while_it_runs(rig: Rig, t: T, number: int) -> None:
    """Its answer is published when its session is over already."""
    tokens = t(100 * number + 16, 100 * number + 1)
    with rig.cache.match(tokens, session=f"chat {number}") as lease:
        lease.reserve(16)
        rig.write(lease, tokens, 0, 16)
        rig.cache.sessions.close(f"chat {number}")
        lease.release(tokens)


def left(rig: Rig, t: T, *numbers: int) -> list[int]:
    """How many pages of each chat L3 has."""
    return [sum(rig.stored(t(100 * number + 16, 100 * number + 1))) for number in numbers]


def test_a_chat_that_was_closed_leaves_l3_first(rig: Rig, t: T) -> None:
    for number in range(5):
        chat(rig, t, number)
    rig.cache.sessions.close("chat 3")
    chat(rig, t, 5)
    assert left(rig, t, 0, 1, 2, 3, 4, 5) == [4, 4, 4, 0, 4, 4]


def test_its_suffix_leaves_before_its_prefix(rig: Rig, t: T) -> None:
    for number in range(5):
        chat(rig, t, number)
    rig.cache.sessions.close("chat 3")
    rig.serve(t(504, 501))
    assert rig.cache.flush()
    assert rig.stored(t(316, 301)) == [True, True, True, False]


def test_a_chat_that_was_reopened_leaves_as_the_others_do(rig: Rig, t: T) -> None:
    for number in range(5):
        chat(rig, t, number)
    rig.cache.sessions.close("chat 3")
    chat(rig, t, 4)  # the tree hears of it
    rig.cache.sessions.reopen("chat 3")
    chat(rig, t, 5)
    assert left(rig, t, 0, 1, 2, 3, 4, 5) == [0, 4, 4, 4, 4, 4]


def test_a_prompt_that_another_chat_shares_stays(rig: Rig, t: T) -> None:
    for number in (0, 1):
        rig.serve([*t(16), *t(100 * number + 116, 100 * number + 101)], session=f"chat {number}")
        assert rig.cache.flush()
    chat(rig, t, 3)
    rig.cache.sessions.close("chat 0")
    chat(rig, t, 4)
    chat(rig, t, 5)
    assert rig.stored([*t(16), *t(116, 101)]) == [True] * 4 + [False] * 4
    assert rig.stored([*t(16), *t(216, 201)]) == [True] * 8


def test_an_answer_that_is_written_after_its_session_was_closed_is_over_as_well(rig: Rig, t: T) -> None:
    for number in range(4):
        chat(rig, t, number)
    rig.cache.sessions.one_shot("chat 3")
    chat_closed_while_it_runs(rig, t, 4)
    assert rig.cache.flush()
    chat(rig, t, 5)
    chat(rig, t, 6)
    assert left(rig, t, 0, 1, 2, 3, 4, 5, 6) == [4, 4, 4, 0, 0, 4, 4]


# ---- what L3 is not to have at all ---------------------------------------------------------------
@pytest.mark.parametrize(("admission", "written"), [("all", 4), ("unless_over", 0)])
def test_a_chat_that_is_closed_before_its_answer_was_copied_down_is_declined(
    make_rig: MakeRig, t: T, admission: str, written: int
) -> None:
    rig = make_rig(
        device=9,
        host=6,
        policy__eviction="session",
        policy__store_admission=admission,
        store=MemoryStore(2**20),
    )
    chat_closed_while_it_runs(rig, t, 1)
    assert rig.cache.drain()
    assert left(rig, t, 1) == [written]


def test_an_admission_to_l3_that_does_not_exist_is_refused(make_rig: MakeRig) -> None:
    with pytest.raises(ConfigError, match=r"policy\.store_admission.*unless_over"):
        make_rig(policy__store_admission="ranked")
