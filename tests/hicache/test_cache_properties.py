"""Random loads on tiny tiers with a store that fails at random: every reused byte is the right one."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from hicache.errors import CapacityError
from hicache.testing.scripted_store import FLIPPED, MISS, SHORT, Outcome, Raise
from hicache.types import DEFAULT_NAMESPACE, Namespace

if TYPE_CHECKING:
    from tests.hicache.conftest import Rig, Tokens

MODELS = (
    "full",
    "full+swa",
    "full+mamba",
    "full+swa+mamba",
    "full+draft+swa+wide",
    "swa",
    "swa+wide",
    "mamba",
)
WRITES = ("write_through", "write_through_selective", "write_back")
NAMESPACES = (DEFAULT_NAMESPACE, Namespace(salt=""), Namespace(lora="a"))
FAULTS: tuple[Outcome, ...] = (MISS, SHORT, FLIPPED, Raise(OSError("gone")), Raise(ValueError("a bug")))
EXAMPLES = 25 if os.environ.get("HICACHE_TEST_PROFILE") == "quick" else 200


@dataclass(frozen=True)
class Prompt:
    """The first ``length`` tokens of one of four long sequences: two fork at 12, two more at 30."""

    sequence: int
    length: int

    def tokens(self) -> Tokens:
        whole = np.arange(1, 91, dtype=np.int32)
        if self.sequence & 1:
            whole[12:] += 1000
        if self.sequence & 2:
            whole[30:] += 2000
        return whole[: self.length]


prompts = st.builds(Prompt, st.integers(0, 3), st.integers(0, 90))


@dataclass(frozen=True)
class Serve:
    """A request from begin to end."""

    prompt: Prompt
    answer: int
    session: int | None
    namespace: Namespace


@dataclass(frozen=True)
class GiveUp:
    """A request that leaves after so many steps."""

    prompt: Prompt
    steps: int
    namespace: Namespace


@dataclass(frozen=True)
class Script:
    """From now on the store does this in every n-th call; None: it is well again."""

    operation: Literal["exists", "get", "put"]
    outcome: Outcome | None
    every: int


Simple = Literal["drain", "flush", "reset", "restart", "squeeze", "close session"]
serves = st.builds(
    Serve, prompts, st.integers(0, 12), st.none() | st.integers(0, 3), st.just(DEFAULT_NAMESPACE)
)
operations = st.one_of(
    serves,
    serves,
    st.builds(Serve, prompts, st.integers(0, 12), st.none(), st.sampled_from(NAMESPACES)),
    st.builds(GiveUp, prompts, st.integers(0, 4), st.sampled_from(NAMESPACES)),
    st.builds(
        Script,
        st.sampled_from(("exists", "get", "put")),
        st.none() | st.sampled_from(FAULTS),
        st.integers(1, 4),
    ),
    st.sampled_from(("drain", "flush", "reset", "restart", "restart", "squeeze", "close session")),
)


@dataclass
class Run:
    """What has been done to one cache, and what may therefore be found in it."""

    rig: Rig
    published: dict[Namespace, list[Tokens]] = field(default_factory=dict)
    prompt_tokens: int = 0
    reused: int = 0

    def do(self, operation: Serve | GiveUp | Script | Simple) -> None:
        match operation:
            case Serve():
                self.serve(operation)
            case GiveUp():
                self.give_up(operation)
            case Script(name, None, _):
                self.rig.store.unscript()
            case Script(name, outcome, every):
                assert outcome is not None
                for call in range(1, 400, every):
                    self.rig.store.script(name, outcome, call=call)
            case "drain":
                assert self.rig.cache.drain()
            case "flush":
                self.rig.cache.flush()
            case "reset":
                self.rig.cache.reset()
            case "restart":
                self.rig.cache.drain()
                self.rig.cache.reset()
            case "squeeze":
                self.squeeze()
            case "close session":
                self.rig.cache.sessions.close("session 1")
        self.rig.check()

    def serve(self, request: Serve) -> None:
        prompt = request.prompt.tokens()
        answer = np.arange(7000, 7000 + request.answer, dtype=np.int32)
        session = None if request.session is None else f"session {request.session}"
        served = self.rig.serve(prompt, answer, session=session, namespace=request.namespace)
        known = self.longest_known(prompt, request.namespace)
        assert served.source.total <= min(known, max(0, len(prompt) - 1)) // self.rig.page * self.rig.page
        self.prompt_tokens += len(prompt)
        self.reused += served.source.total
        self.published.setdefault(request.namespace, []).append(np.concatenate([prompt, answer]))
        for tier in ("device", "host", "store"):
            if getattr(served.source, tier):
                event(f"served from {tier}")

    def give_up(self, request: GiveUp) -> None:
        rig, prompt = self.rig, request.prompt.tokens()
        with rig.cache.match(prompt, namespace=request.namespace) as lease:
            self.prompt_tokens += len(prompt)
            if request.steps == 0:
                return
            reused = lease.load()
            assert reused <= self.longest_known(prompt, request.namespace)
            assert rig.engine._check(lease, rig.stamps(prompt, request.namespace), reused)[1] == 0
            self.reused += reused
            if request.steps == 1:
                return
            try:
                lease.reserve(len(prompt) - reused)
            except CapacityError:
                return
            if request.steps == 2 or not len(prompt):
                return
            rig.engine._write(lease, rig.stamps(prompt, request.namespace), reused, len(prompt))
            lease.checkpoint(len(prompt), mark=request.steps == 4)
            self.published.setdefault(request.namespace, []).append(prompt)

    def squeeze(self) -> None:
        """A request for the whole of L1 comes and goes."""
        if any(not spec.is_checkpoint for spec in self.rig.specs):
            self.rig.squeeze()
            self.prompt_tokens += 1

    def longest_known(self, prompt: Tokens, namespace: Namespace) -> int:
        """How much of the prompt was ever published under its namespace."""
        best = 0
        for known in self.published.get(namespace, []):
            length = min(len(known), len(prompt))
            differs = known[:length] != prompt[:length]
            best = max(best, int(differs.argmax()) if differs.any() else length)
        return best


@settings(max_examples=EXAMPLES)
@given(
    model=st.sampled_from(MODELS),
    page_size=st.sampled_from((1, 4)),
    write=st.sampled_from(WRITES),
    device=st.integers(18, 60),
    host=st.integers(18, 60),
    mode=st.sampled_from(("wait_complete", "best_effort")),
    granularity=st.sampled_from(("page", "leaf")),
    todo=st.lists(operations, min_size=6, max_size=24),
)
@pytest.mark.timeout(600)
def test_random_loads_on_failing_tiers_reuse_right_bytes_only(
    rig_type: type[Rig],
    model: str,
    page_size: int,
    write: str,
    device: int,
    host: int,
    mode: str,
    granularity: str,
    todo: list[Serve | GiveUp | Script | Simple],
) -> None:
    """Invariants 1 to 9 of DESIGN 10, after every step."""
    with rig_type(
        model,
        page_size=page_size,
        device=device,
        host=host,
        store="scripted",
        policy__write=write,
        policy__granularity=granularity,
        policy__prefetch={"mode": mode, "min_tokens": 0},
    ) as rig:
        run = Run(rig)
        for operation in todo:
            run.do(operation)
        rig.store.unscript()
        rig.check_idle()
        rig.check_beliefs()
        counts = rig.cache.stats().tokens
        assert (counts.prompt, counts.hit) == (run.prompt_tokens, run.reused)
        for namespace, sequences in run.published.items():
            for tokens in sequences:
                if "full" in model:
                    stored = rig.stored(tokens, "full", namespace)
                    assert stored == sorted(stored, reverse=True), "L3 has a page without its predecessors"


@settings(max_examples=EXAMPLES)
@given(
    model=st.sampled_from(MODELS),
    write=st.sampled_from(("write_through", "write_back")),
    todo=st.lists(serves, min_size=1, max_size=10),
)
@pytest.mark.timeout(600)
def test_what_one_cache_flushed_another_finds(
    rig_type: type[Rig], model: str, write: str, todo: list[Serve]
) -> None:
    """O-39, O-42: after a flush L3 alone gives what L1 gave: the same boundary for every prompt."""
    with rig_type(model, device=400, host=400, store="scripted", policy__write=write) as rig:
        run = Run(rig)
        for operation in todo:
            run.do(operation)
        assert rig.cache.flush()
        rig.check_idle()
        prompts_served = [(request.prompt.tokens(), request.namespace) for request in todo]
        found = [rig.cache.probe(tokens, namespace=space).boundary for tokens, space in prompts_served]
        rig.cache.reset()
        for (tokens, space), boundary in zip(prompts_served, found, strict=True):
            with rig.cache.match(tokens, namespace=space) as lease:
                assert lease.load() == boundary
                assert rig.engine._check(lease, rig.stamps(tokens, space), boundary)[1] == 0
        rig.check_idle()
