"""One request from match to release.

::

    with cache.match(prompt, session="chat-17") as lease:
        lease.load()
        lease.reserve(len(prompt) - lease.reused)
        ...                                 # prefill from lease.reused on
        lease.checkpoint(len(prompt))
        ...                                 # decode; lease.reserve(1) a step
        lease.release(prompt + answer, written=n)

With ``load_by_layer`` and ``wait_layer`` the first layers compute while later ones arrive.
Leaving the block without ``release`` gives everything back and publishes nothing more.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Self

import numpy as np

from hicache.errors import ProtocolError
from hicache.explain import Explanation, LossCause, Lost
from hicache.hold import Hold
from hicache.radix.actions import Slots
from hicache.radix.interface import (
    Inserted,
    MatchResult,
    PlanStep,
    ProbeResult,
    Settled,
    Tokens,
)
from hicache.radix.keys import as_tokens
from hicache.reserve import check_size, reserve
from hicache.restore import Restore, acomplete, complete
from hicache.runtime import Runtime
from hicache.tracing import NO_SPAN, Span
from hicache.types import LeaseId, Namespace, SessionId, Tier, TierTokens

_NOTHING = Inserted(0, 0, 0, 0, ())


class Lease:
    """A request's hold on the cache. Made by ``HiCache.match`` only.

    *Thread*: one thread at a time; different leases may be used from different threads.
    """

    def __init__(
        self,
        runtime: Runtime,
        prompt: Tokens,
        matched: MatchResult,
        *,
        session: str | None,
        number: SessionId | None,
        namespace: Namespace,
        priority: int,
        kept_ends: tuple[int, ...] = (),
        unfound: tuple[Lost, ...] | None = None,
        span: Span = NO_SPAN,
    ) -> None:
        self._hold = Hold(runtime, prompt, matched, number=number, namespace=namespace, priority=priority)
        self._runtime = runtime
        self._prompt = prompt
        self._session = session
        self._kept_ends = kept_ends
        self._unfound = unfound
        self._span = span  # of the match
        self._restore = Restore(self._hold)

    # ---- what was found ----------------------------------------------------------------------
    @property
    def id(self) -> LeaseId:
        return self._hold.id

    @property
    def reused(self) -> int:
        """Tokens that need not be computed: the match's answer, exact after ``load``.

        Fewer than were found where the rest is computed sooner than loaded.
        """
        return self._restore.reused

    @property
    def source(self) -> TierTokens:
        """Where the reused tokens came from."""
        return self._known.source

    @property
    def by_component(self) -> Mapping[str, TierTokens]:
        """The same per component; a window counts the pages it needs."""
        return self._known.by_component

    @property
    def _known(self) -> ProbeResult | Settled:
        return self._restore.settled or self._hold.matched.found

    @property
    def checkpoint_hint(self) -> int | None:
        """Where this prefill should pause and call ``checkpoint`` because path payload reaches
        deeper than a state or window allows: the next request that diverges there is then reused.
        """
        fork = self._hold.matched.found.fork
        return fork if fork is not None and fork > self.reused else None

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """All lengths, ascending, where a prefill of a hybrid model should pause and call
        ``checkpoint``: the fork, the last page end that the same prompt could reuse next time, where prefixes
        end that are kept (``HiCache.keep``), and along a long prompt spare ones, so that losing its tail does not
        lose all of it. Empty for models with path components only.
        """
        if not self._runtime.is_hybrid:
            return ()
        page = self._runtime.page_size
        last = (len(self._prompt) - 1) // page * page
        spacing = self._runtime.mark_spacing
        spare = range(spacing, last, spacing) if spacing else ()
        wanted = {last, self.checkpoint_hint or 0, *self._kept_ends, *spare}
        return tuple(sorted(length for length in wanted if self.reused < length <= last))

    def plan(self) -> tuple[PlanStep, ...]:
        """What ``load`` would move, per component and tier."""
        return self._restore.plan()

    def explain(self) -> Explanation:
        """Why no more is reused; final once ``load`` has returned. Also after the lease has ended.

        Raises ``ProtocolError`` unless the cache keeps what it needs for that (``explain.enabled``).
        """
        if self._unfound is None:
            raise ProtocolError("nothing is kept to explain misses with; set explain.enabled: true")
        explainer = self._runtime.explainer
        assert explainer is not None
        restore, lost = self._restore, self._unfound
        reused, found = restore.reused, restore.found
        cause, detail = restore.loss or (LossCause.NO_ROOM, "")
        if self._hold.is_released and restore.settled is None:
            reused, cause, detail = 0, LossCause.ABANDONED, ""
        if reused < found:
            lost = (Lost(reused, found, cause, detail=detail), *lost)
        prompt_len = len(self._prompt)
        return Explanation(prompt_len, found, reused, lost, explainer.limit(prompt_len))

    # ---- restore -----------------------------------------------------------------------------
    def load(self) -> int:
        """Run the restore plan and wait for it, bounded; returns ``reused``.

        A failed, short, slow or missing transfer lowers ``reused``; nothing is raised for it.
        """
        return self._load(by_layer=False)

    def load_by_layer(self) -> int:
        """Run the restore plan up to the last step, from L2 to L1, which goes on layer by layer; returns ``reused``.

        What comes from L3 is waited for, and so are states; only then is it known what can be reused. The engine
        calls ``wait_layer`` before each layer's compute. Publishing waits for the whole. In a group of ranks
        all of it is waited for, since the ranks agree on what a load brought.
        """
        return self._load(by_layer=self._runtime.ranks.is_alone)

    def _load(self, *, by_layer: bool) -> int:
        with self._loading():
            complete(self._runtime, self._restore.load(by_layer=by_layer))
        return self.reused

    async def aload(self) -> int:
        """``load`` for async code: never blocks the running loop. Not in a group of ranks."""
        self._hold.check_open()
        self._runtime.check_alone("aload", "load")
        with self._loading():
            await acomplete(self._runtime, self._restore.load(by_layer=False))
        return self.reused

    @contextlib.contextmanager
    def _loading(self) -> Iterator[None]:
        """A span around the load; none around another one, once it is known what is reused."""
        self._hold.check_open()
        if self._restore.settled is not None:
            yield
            return
        found = self._restore.found
        with self._runtime.tracing.span("hicache.load", beside=self._span, found_tokens=found) as span:
            yield
            span.note(reused_tokens=self.reused)

    # ---- layer by layer ----------------------------------------------------------------------
    def wait_layer(self, layer: int, component: str | None = None) -> bool:
        """Return once the payload of ``layer`` is in device memory: of one component, or of all.

        Layers count from 0 in each component; one that has fewer has to be there whole. On CUDA, what the
        current stream does from now on waits; the caller does not.

        Returns:
            False, once, if the load fell short: nothing is reused then, what was reserved is gone, and the
            request is computed anew from ``reused``, which is 0. After ``load`` always True.

        Raises:
            ValueError: no component has such a layer, or there is no such component.
            ProtocolError: what was found has not been loaded.
        """
        self._hold.check_open()
        return self._restore.wait_layer(layer, component)

    # ---- compute and publish -----------------------------------------------------------------
    def reserve(self, num_tokens: int) -> None:
        """Get device slots for ``num_tokens`` more tokens, and the private states.

        Without a ``load`` before it only what is in device memory by then is reused, and ``reused`` says so.

        Raises:
            CapacityError: even after demoting all that may go there is no room, or L1 as a whole is too
                small, and nothing is demoted for it; the lease keeps what it had. ``required_slots``
                and ``free_slots`` are those of the first component that is short.
            ValueError: not a whole number, or a negative one.
        """
        self._hold.check_open()
        wanted = _whole_number(num_tokens)
        check_size(self._hold, wanted)
        if self._restore.settled is None:
            complete(self._runtime, self._restore.settle())
        reserve(self._hold, wanted)

    def slots(self, component: str) -> Slots:
        """Device slots of published and reserved pages from the prompt's start, int64, one a page.

        ``NO_SLOT`` (-1) where a window keeps nothing. Raises ``ProtocolError`` for a checkpoint component: see ``state``.
        """
        if self._runtime.keeps_states(component):
            raise ProtocolError(
                f"{component} keeps states, not pages; call state({component!r}) for its slot"
            )
        with self._hold.booked() as core:
            return core.lease_slots(self.id, component)

    def state(self, component: str) -> int:
        """The private state slot of a checkpoint component.

        With ``reused == 0`` its bytes are undefined: the engine starts from its initial state.
        Raises ``ProtocolError`` before ``load`` or ``reserve``, and for a component with pages: see ``slots``.
        """
        if not self._runtime.keeps_states(component):
            raise ProtocolError(
                f"{component} keeps pages, not a state; call slots({component!r}) for its slots"
            )
        with self._hold.booked() as core:
            slot = core.lease_state(self.id, component)
        if slot is None:
            raise ProtocolError(f"lease {self.id} has no {component} state yet; call reserve first")
        return slot

    def checkpoint(self, length: int, tokens: object = None, *, mark: bool = True) -> Inserted:
        """Publish the first ``length`` tokens while the request goes on.

        Args:
            length: tokens whose payload is written; states must be those after exactly ``length``.
            tokens: the request's tokens, at least ``length``; may be left out within the prompt.
            mark: keep the end as a boundary (its window, and its state if it is a page's end).
                Without it only what the request itself still needs is kept (chunks of a prefill).

        Nothing is published on a load by layer that fell short; ``wait_layer`` says so.
        """
        self._hold.check_open()
        if not isinstance(mark, bool | np.bool_):
            raise ValueError(f"mark: expected True or False, got {mark!r:.80}")
        known = self._prompt if tokens is None else self._checked(tokens)
        written = _first(known, length)
        if not self._restore.has_landed():
            return _NOTHING
        self._runtime.transfers.compute.wrote()
        if self._runtime.recompute.learns:
            self._runtime.step("checkpoint")  # for the time that this prefill took
        self._hold.computed(len(written))
        if mark and not len(written) % self._runtime.page_size:
            self._have_room_for_states()
        with self._hold.booked() as core:
            inserted = core.insert(
                self.id, written, mark=bool(mark), verified_len=self._verified_len(written)
            )
            self._runtime.kept.note(core, written, self._hold.namespace)
            self._runtime.run(inserted.actions)
        if inserted.tickets and not self._runtime.wait(inserted.tickets):
            # The request goes on writing its state, so what is copied now is worth nothing.
            self._runtime.doom(inserted.tickets)
        self._hold.computes_from(len(written))  # what we took ourselves does not count
        return inserted

    def _have_room_for_states(self) -> None:
        """Wait, bounded, for the slots that this mark's states need: one given up costs the next turn everything.

        Only for copies down, which are short; where L2 has no room either, the state is refused.
        """
        runtime = self._runtime
        for spec in runtime.specs:
            if not spec.is_checkpoint:
                continue
            deadline_s: float | None = None
            while True:
                with self._hold.booked() as core:
                    if core.free_slots(spec.name, Tier.DEVICE)[1]:
                        break
                    room = core.make_room(spec.name, Tier.DEVICE, 1)
                    runtime.run(room.actions)
                    copies = [ticket for ticket in runtime.copies() if ticket in room.tickets][:1]
                if deadline_s is None:
                    deadline_s = runtime.deadline_s("checkpoint")
                left_s = deadline_s - runtime.clock.now_s()
                if not copies or left_s <= 0 or not runtime.wait(copies, left_s):
                    break

    def release(self, tokens: object = None, *, written: int | None = None, stop: str = "") -> Inserted:
        """End the request.

        Args:
            tokens: prompt and answer; None publishes nothing more.
            written: how many of them have payload written (the last sampled token has none);
                default all.
            stop: why the answer ended (``tool_call``, ``end_turn`` …), kept with the session.
        """
        self._hold.check_open()
        if not isinstance(stop, str):
            raise ValueError(f"why an answer ended is text, got {stop!r}")
        known = None
        if tokens is not None:
            known = self._checked(tokens)
            known = _first(known, len(known) if written is None else written)
        elif written is not None:
            known = _first(self._prompt, written)
        self._runtime.step("release")
        if known is not None and not self._restore.has_landed():
            known = None  # what was computed on a load that failed is worth nothing
        self._runtime.transfers.compute.ended()
        if known is not None:
            self._hold.computed(len(known))
        with self._hold.booked() as core:
            verified_len = 0 if known is None else self._verified_len(known)
            inserted = core.release(self.id, known, verified_len=verified_len)
            self._runtime.run(inserted.actions)  # before what ends meanwhile: actions run in the tree's order
            self._ended(stop)
            if known is not None:
                self._runtime.kept.note(core, known, self._hold.namespace)
                self._runtime.sessions.watch(
                    self._hold.number, known, len(self._prompt), self._hold.namespace
                )
            self._runtime.demote_ahead()
        return inserted

    # ---- life --------------------------------------------------------------------------------
    def abandon(self) -> None:
        """Give everything back and publish nothing more. Idempotent; never raises.

        After ``HiCache.reset`` or ``close`` there is nothing left to give back.
        """
        if self._hold.is_released:
            return
        self._hold.is_released = True
        runtime = self._runtime
        with runtime.lock:
            if runtime.closed:
                return
            runtime.transfers.compute.ended()
            runtime.pump()
            try:
                inserted = runtime.core.release(self.id)
            except ProtocolError:
                runtime.faults["lease_from_before_reset"] += 1
                return
            runtime.run(inserted.actions)
            self._ended("")

    def _ended(self, stop: str) -> None:
        self._hold.is_released = True
        self._restore.end()
        settled = self._restore.settled
        runtime = self._runtime
        runtime.requests.add(
            len(self._prompt),
            TierTokens() if settled is None else settled.source,
            {} if settled is None else settled.by_component,
        )
        if self._unfound is not None:
            runtime.note_lost(self.explain())
        runtime.sessions.end(
            self._session, stop=stop, lease=self.id, number=self._hold.number, core=runtime.core
        )
        runtime.kept.lapse(runtime.core)

    def _checked(self, tokens: object) -> Tokens:
        """The request's tokens. Raises ``ProtocolError`` if they are not this prompt, or its beginning."""
        given = as_tokens(tokens)
        shared = min(len(given), len(self._prompt))
        differs = given[:shared] != self._prompt[:shared]
        if differs.any():
            position = int(differs.argmax())
            raise ProtocolError(
                f"lease {self.id} was opened for token {int(self._prompt[position])} at position "
                f"{position}, got {int(given[position])}"
            )
        return given

    def _verified_len(self, tokens: Tokens) -> int:
        """How many of ``tokens`` are the prompt's, which was matched and cannot change."""
        return min(len(tokens), len(self._prompt))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.abandon()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.abandon()


def _first(tokens: Tokens, length: int) -> Tokens:
    try:
        length = operator.index(length)
    except TypeError:
        raise ValueError(f"a length is a whole number of tokens, got {length!r}") from None
    if not 0 <= length <= len(tokens):
        raise ProtocolError(f"{length} tokens are said to be written, {len(tokens)} were given")
    return tokens[:length]


def _whole_number(num_tokens: int) -> int:
    """A count as an int; numpy's integers are fine, a fraction is not."""
    try:
        wanted = operator.index(num_tokens)
    except TypeError:
        wanted = -1
    if wanted < 0:
        raise ValueError(f"cannot reserve {num_tokens!r} tokens; expected a whole number, 0 or more")
    return wanted
