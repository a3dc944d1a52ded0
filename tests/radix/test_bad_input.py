"""What is refused raises an exception that names it, and leaves the tree as it was."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from hicache.errors import ProtocolError
from hicache.radix.core import make_core
from hicache.radix.interface import Tokens, TreeCore
from hicache.radix.keys import as_tokens, token_buffer
from hicache.testing.trees import tree_config
from hicache.types import LeaseId, TicketId, Tier

PROMPT = np.arange(1, 17, dtype=np.int32)
Make = Callable[[], object]
Call = Callable[[TreeCore, LeaseId, Tokens], object]

REMEDY = "; pass what hicache.radix.keys.as_tokens makes of them"
REFUSED: dict[str, tuple[Make, str]] = {
    "floats": (lambda: PROMPT.astype(np.float32), f"tokens have dtype <f4{REMEDY}"),
    "booleans": (lambda: PROMPT > 3, rf"tokens have dtype \|b1{REMEDY}"),
    "uint16": (lambda: PROMPT.astype(np.uint16), f"tokens have dtype <u2{REMEDY}"),
    "uint32": (lambda: PROMPT.astype(np.uint32), f"tokens have dtype <u4{REMEDY}"),
    "big-endian": (lambda: PROMPT.astype(">i4"), f"tokens have dtype >i4{REMEDY}"),
    "objects": (lambda: np.array([1, None], dtype=object), rf"tokens have dtype \|O{REMEDY}"),
    "bytes": (PROMPT.tobytes, rf"tokens have dtype \|u1{REMEDY}"),
    "two dimensions": (lambda: PROMPT.reshape(4, 4), rf"shape \(4, 4\), expected one dimension{REMEDY}"),
    "no dimension": (lambda: np.array(5, dtype=np.int32), rf"shape \(\), expected one dimension{REMEDY}"),
    "every second": (lambda: PROMPT[::2], f"not contiguous, they lie 8 bytes apart{REMEDY}"),
    "backwards": (lambda: PROMPT[::-1], f"not contiguous, they lie -4 bytes apart{REMEDY}"),
    "a column": (lambda: PROMPT.astype(np.int64).reshape(4, 4)[:, 1], f"lie 32 bytes apart{REMEDY}"),
    "read-only": (lambda: _read_only(PROMPT), f"tokens are read-only{REMEDY}"),
    "read-only int64": (lambda: _read_only(PROMPT.astype(np.int64)), f"tokens are read-only{REMEDY}"),
    "unaligned": (
        lambda: np.frombuffer(bytearray(b"\0" + PROMPT.tobytes()), dtype=np.int32, offset=1),
        f"tokens are not aligned to 4 bytes{REMEDY}",
    ),
    "text": (lambda: "abc", f"tokens are a str{REMEDY}"),
    "a list": (PROMPT.tolist, f"tokens are a list{REMEDY}"),
    "nothing": (object, f"tokens are a object{REMEDY}"),
    "negative int32": (lambda: np.array([1, 2, 3, -4], dtype=np.int32), "token -4 at position 3 is negative"),
    "negative int64": (lambda: np.array([1, -2], dtype=np.int64), "token -2 at position 1 is negative"),
    "too great": (
        lambda: np.array([1, 2**31], dtype=np.int64),
        "token 2147483648 at position 1 is over 2147483647",
    ),
    "equal but for the upper half": (
        lambda: PROMPT.astype(np.int64) + (np.arange(16) == 1) * 2**32,
        "token 4294967298 at position 1 is over 2147483647",
    ),
}

ACCEPTED: dict[str, Make] = {
    "int32": PROMPT.copy,
    "int64": lambda: PROMPT.astype(np.int64),
    "a piece of an array": lambda: np.concatenate([PROMPT, PROMPT])[16:],
    "array.array": lambda: array("i", PROMPT.tolist()),
    "array.array of int64": lambda: array("q", PROMPT.tolist()),
    "a view of writeable bytes": lambda: np.frombuffer(bytearray(PROMPT.tobytes()), dtype=np.int32),
}

# What `as_tokens` makes fit for a core; HiCache takes all of it.
MENDED: dict[str, Make] = {
    "a list": PROMPT.tolist,
    "a tuple": lambda: tuple(PROMPT.tolist()),
    "uint16": lambda: PROMPT.astype(np.uint16),
    "big-endian": lambda: PROMPT.astype(">i4"),
    "every second of twice as many": lambda: np.repeat(PROMPT, 2)[::2],
    "backwards in memory": lambda: PROMPT[::-1].copy()[::-1],
    "read-only": lambda: _read_only(PROMPT),
    "unaligned": lambda: np.frombuffer(b"\0" + PROMPT.tobytes(), dtype=np.int32, offset=1),
}

SLOT_FIELDS = ("slots", "source_slots", "target_slots")

CALLS: dict[str, Call] = {
    "probe": lambda core, _, tokens: core.probe(tokens),
    "match": lambda core, _, tokens: core.match(tokens),
    "store_query": lambda core, _, tokens: core.store_query(tokens),
    "learn": lambda core, _, tokens: core.learn(tokens, {"full": {0: True}}),
    "insert": lambda core, lease, tokens: core.insert(lease, tokens),
    "release": lambda core, lease, tokens: core.release(lease, tokens),
}

UNKNOWN_LEASE: dict[str, Callable[[TreeCore, LeaseId], object]] = {
    "plan": lambda core, lease: core.plan(lease),
    "fetch": lambda core, lease: core.fetch(lease),
    "load": lambda core, lease: core.load(lease),
    "settle": lambda core, lease: core.settle(lease),
    "reserve": lambda core, lease: core.reserve(lease, 1),
    "insert": lambda core, lease: core.insert(lease, PROMPT),
    "release": lambda core, lease: core.release(lease),
    "lease_slots": lambda core, lease: core.lease_slots(lease, "full"),
    "lease_state": lambda core, lease: core.lease_state(lease, "mamba"),
}


def _read_only(tokens: NDArray[np.integer]) -> NDArray[np.integer]:
    view = tokens.copy()
    view.flags.writeable = False
    return view


@pytest.fixture
def core(core_kind: str) -> TreeCore:
    """A tree with 8 tokens in L1 and a copy of them under way to L2."""
    config = tree_config("full+mamba", page_size=2, device={"full": 16, "mamba": 4}, host=16, has_store=True)
    core = make_core(config, core_kind)
    lease = core.match(PROMPT[:8]).lease
    assert not core.reserve(lease, 8).short
    core.release(lease, PROMPT[:8])
    return core


@pytest.fixture
def lease(core: TreeCore) -> LeaseId:
    lease = core.match(PROMPT[4:]).lease
    assert not core.reserve(lease, 12).short
    return lease


def refuses(core: TreeCore, error: type[Exception], message: str, call: Callable[[], object]) -> None:
    """The call raises that, and nothing that can be seen of the core changes."""

    def seen() -> tuple[object, ...]:
        pools = [
            core.pool_count(name, tier) for name in ("full", "mamba") for tier in (Tier.DEVICE, Tier.HOST)
        ]
        return core.audit(), core.snapshot(), core.in_flight(), pools

    before = seen()
    assert before[0] == []
    with pytest.raises(error, match=message):
        call()
    assert seen() == before


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_tokens_that_are_none_are_refused(
    core: TreeCore, lease: LeaseId, make: Make, message: str, call: Call
) -> None:
    bad = make()
    refuses(core, ValueError, message, lambda: call(core, lease, bad))  # type: ignore[arg-type]  # on purpose
    core.release(lease)


@pytest.mark.parametrize("make", ACCEPTED.values(), ids=ACCEPTED)
def test_a_buffer_of_tokens_is_read_where_it_lies(core: TreeCore, make: Make) -> None:
    _serves(core, make())


@pytest.mark.parametrize("make", MENDED.values(), ids=MENDED)
def test_tokens_in_another_form_are_mended_for_a_core(core: TreeCore, make: Make) -> None:
    _serves(core, as_tokens(make()))


def test_tokens_that_a_core_takes_are_not_copied() -> None:
    assert as_tokens(PROMPT) is PROMPT
    assert token_buffer(PROMPT) is PROMPT


def _serves(core: TreeCore, given: object) -> None:
    lease = core.match(given).lease  # type: ignore[arg-type]  # what a caller may hand over
    core.reserve(lease, 16)
    inserted = core.release(lease, given)  # type: ignore[arg-type]  # the same
    assert inserted.published == 16
    assert core.probe(PROMPT, cap=False).walked == 16
    assert core.audit() == []


@pytest.mark.parametrize("call", UNKNOWN_LEASE.values(), ids=UNKNOWN_LEASE)
def test_a_released_lease_is_refused(
    core: TreeCore, lease: LeaseId, call: Callable[[TreeCore, LeaseId], object]
) -> None:
    core.release(lease)
    refuses(core, ProtocolError, f"lease {lease} ", lambda: call(core, lease))


@pytest.mark.parametrize("call", UNKNOWN_LEASE.values(), ids=UNKNOWN_LEASE)
def test_a_lease_from_before_a_reset_is_refused(
    core: TreeCore, lease: LeaseId, call: Callable[[TreeCore, LeaseId], object]
) -> None:
    core.reset()
    refuses(core, ProtocolError, f"lease {lease} ", lambda: call(core, lease))


@pytest.mark.parametrize("number", [-1, 10**6, 2**70])
def test_a_number_that_was_never_given_out_is_refused(core: TreeCore, number: int) -> None:
    refuses(core, ProtocolError, f"{number}", lambda: core.settle(LeaseId(number)))
    refuses(core, ProtocolError, f"{number}", lambda: core.commit(TicketId(number)))
    refuses(core, ProtocolError, f"{number}", lambda: core.abort(TicketId(number)))


def test_a_ticket_committed_twice_is_refused(core: TreeCore) -> None:
    ticket = core.in_flight()[0]
    core.commit(ticket)
    refuses(core, ProtocolError, f"{ticket}", lambda: core.commit(ticket))
    refuses(core, ProtocolError, f"{ticket}", lambda: core.abort(ticket))


@pytest.mark.parametrize("done", [-1, 5, 2**70])
def test_more_slots_than_a_ticket_has_cannot_be_done(core: TreeCore, done: int) -> None:
    ticket = core.in_flight()[0]
    refuses(core, ProtocolError, rf"{done} (slots )?cannot be done", lambda: core.abort(ticket, done))


@pytest.mark.parametrize("num_tokens", [-1, 2**31, 2**70])
def test_a_count_that_no_request_has_cannot_be_reserved(
    core: TreeCore, lease: LeaseId, num_tokens: int
) -> None:
    refuses(
        core, ProtocolError, f"cannot reserve {num_tokens} tokens", lambda: core.reserve(lease, num_tokens)
    )
    core.release(lease)


@pytest.mark.parametrize("verified_len", [-1, 5, 2**70])
def test_more_tokens_than_given_cannot_be_verified(core: TreeCore, lease: LeaseId, verified_len: int) -> None:
    message = f"{verified_len} tokens are said to be verified, got 4"
    tokens = PROMPT[4:8]
    refuses(core, ProtocolError, message, lambda: core.insert(lease, tokens, verified_len=verified_len))
    core.release(lease)


def test_pages_that_were_not_reserved_are_refused(core: TreeCore, lease: LeaseId) -> None:
    longer = np.concatenate([PROMPT[4:], PROMPT])
    refuses(core, ProtocolError, "reserved 6 pages of full", lambda: core.insert(lease, longer))
    core.release(lease)


def test_other_tokens_than_those_published_are_refused(core: TreeCore, lease: LeaseId) -> None:
    core.insert(lease, PROMPT[4:12])
    changed = PROMPT[4:14].copy()
    changed[3] = 99
    refuses(core, ProtocolError, "holds token 8 at position 3, got 99", lambda: core.insert(lease, changed))
    refuses(core, ProtocolError, "published 8 tokens already", lambda: core.insert(lease, PROMPT[4:8]))
    core.release(lease)


def test_an_unknown_component_or_tier_is_refused(core: TreeCore, lease: LeaseId) -> None:
    refuses(core, ProtocolError, "'swa'", lambda: core.lease_slots(lease, "swa"))
    refuses(core, ProtocolError, "'swa'", lambda: core.make_room("swa", Tier.DEVICE, 1))
    core.release(lease)


def test_a_slot_list_is_the_callers_to_write_to(core: TreeCore) -> None:
    """No call takes a slot number, so the lists that are handed out are the one way to a wrong one."""
    handed_out = []
    lease = core.match(PROMPT).lease
    assert not core.reserve(lease, 16).short
    inserted = core.insert(lease, PROMPT)
    before = core.lease_slots(lease, "full")
    handed_out += [core.lease_slots(lease, "full")]
    opened = [*inserted.actions, *core.make_room("full", Tier.DEVICE, 16).actions]
    for action in opened:
        handed_out += [getattr(action, field) for field in SLOT_FIELDS if hasattr(action, field)]
    assert len(handed_out) > 2
    for slots in handed_out:
        slots[:] = 10**6
    assert core.lease_slots(lease, "full").tolist() == before.tolist()
    assert core.audit() == []
    for ticket in core.in_flight():
        core.commit(ticket)
    ended = core.release(lease)
    assert core.audit() == []
    assert all(0 <= slot < 16 for action in ended.actions for slot in getattr(action, "slots", []))
