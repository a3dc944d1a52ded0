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

from hicache.errors import CapacityError, ProtocolError
from hicache.explain import Explanation, LossCause, Lost, fetch_failure
from hicache.radix.actions import Slots
from hicache.radix.interface import Inserted, MatchResult, PlanStep, Settled, Tokens, TreeCore
from hicache.radix.keys import as_tokens
from hicache.runtime import Runtime
from hicache.tracing import NO_SPAN, Span
from hicache.types import LeaseId, Namespace, SessionId, TicketId, Tier, TierTokens

_FETCH_ROUNDS = 8
"""How often a fetch begins anew because pages proved missing, before what has arrived is loaded."""
_LOAD_TRIES = 8
"""How often copies up may fail before the load goes on with what it has."""
_NOTHING = Inserted(0, 0, 0, 0, ())
_LOAD_ROUNDS = 10_000
"""A load is bounded by time; this many rounds mean that its clock stands still."""


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
        unfound: tuple[Lost, ...] | None = None,
        span: Span = NO_SPAN,
    ) -> None:
        self._runtime = runtime
        self._prompt = prompt
        self._matched = matched
        self._session = session
        self._number = number
        self._namespace = namespace
        self._priority = priority
        self._unfound = unfound
        self._span = span  # of the match
        self._found = matched.found.boundary
        self._shortened: tuple[LossCause, str] | None = None
        self._fetch_began_s = runtime.clock.now_s()
        self._fetch_tickets: tuple[TicketId, ...] = ()
        self._fetch_rounds = 0
        self._aim = matched.found.boundary  # less, if the rest is computed sooner than loaded
        self._computes: tuple[int, float] | None = None  # from which token on, since when
        self._missing_pages: int | None = None
        self._load_tickets: tuple[TicketId, ...] = ()
        self._landing: tuple[TicketId, ...] = ()
        self._has_lost_load = False
        self._settled: Settled | None = None
        self._released = False
        if matched.found.boundary:
            self._lower_if_sooner()
            self._begin_fetch()

    # ---- what was found ----------------------------------------------------------------------
    @property
    def id(self) -> LeaseId:
        return self._matched.lease

    @property
    def reused(self) -> int:
        """Tokens that need not be computed: the match's answer, exact after ``load``.

        Fewer than were found where the rest is computed sooner than loaded.
        """
        return self._aim if self._settled is None else self._settled.boundary

    @property
    def source(self) -> TierTokens:
        """Where the reused tokens came from."""
        return self._matched.found.source if self._settled is None else self._settled.source

    @property
    def by_component(self) -> Mapping[str, TierTokens]:
        """The same per component; a window counts the pages it needs."""
        return self._matched.found.by_component if self._settled is None else self._settled.by_component

    @property
    def checkpoint_hint(self) -> int | None:
        """Where this prefill should pause and call ``checkpoint`` because path payload reaches
        deeper than a state or window allows: the next request that diverges there is then reused.
        """
        fork = self._matched.found.fork
        return fork if fork is not None and fork > self.reused else None

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """All lengths, ascending, where a prefill of a hybrid model should pause and call
        ``checkpoint``: the fork, the last page end that the same prompt could reuse next time, and
        along a long prompt spare ones, so that losing its tail does not lose all of it. Empty for models with path components only.
        """
        if not self._runtime.is_hybrid:
            return ()
        page = self._runtime.page_size
        last = (len(self._prompt) - 1) // page * page
        spacing = self._runtime.mark_spacing
        spare = range(spacing, last, spacing) if spacing else ()
        wanted = {last, self.checkpoint_hint or 0, *spare}
        return tuple(sorted(length for length in wanted if length > self.reused))

    def plan(self) -> tuple[PlanStep, ...]:
        """What ``load`` would move, per component and tier."""
        with self._booked() as core:
            return core.plan(self.id)

    def explain(self) -> Explanation:
        """Why no more is reused; final once ``load`` has returned. Also after the lease has ended.

        Raises ``ProtocolError`` unless the cache keeps what it needs for that (``explain.enabled``).
        """
        if self._unfound is None:
            raise ProtocolError("nothing is kept to explain misses with; set explain.enabled: true")
        explainer = self._runtime.explainer
        assert explainer is not None
        reused, lost = self.reused, self._unfound
        if self._released and self._settled is None:
            reused, self._shortened = 0, (LossCause.ABANDONED, "")
        if reused < self._found:
            cause, detail = self._shortened or (LossCause.NO_ROOM, "")
            lost = (Lost(reused, self._found, cause, detail=detail), *lost)
        prompt_len = len(self._prompt)
        return Explanation(prompt_len, self._found, reused, lost, explainer.limit(prompt_len))

    def _blame(self, cause: LossCause, detail: str = "") -> None:
        """What may cost this lease tokens; the first trouble is the root of those that follow."""
        if self._shortened is None:
            self._shortened = cause, detail

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
        self._check_open()
        runtime = self._runtime
        if self._settled is not None:
            self.plan()  # raises after a reset, which made the lease void
            if not by_layer:
                self._landed()
                self._has_lost_load = False  # this call's answer says it
            return self.reused
        with runtime.tracing.span("hicache.load", beside=self._span, found_tokens=self._found) as span:
            self._restore(by_layer=by_layer)
            span.note(reused_tokens=self.reused)
        return self.reused

    def _restore(self, *, by_layer: bool) -> None:
        runtime = self._runtime
        if not runtime.ranks.is_alone and self.plan():
            runtime.step("load")  # the time of the match may be long ago
        goes_on = True
        while goes_on:
            while awaited := self._fetch_awaited():
                self._end_fetch(in_time=runtime.have_ended(awaited, self._fetch_left_s()))
            for left_s in self._load_rounds():
                waits = self._begin_load(by_layer=by_layer)
                if not waits or not runtime.wait(waits, left_s):
                    break
            if by_layer and any(step.source == Tier.STORE for step in self.plan()):
                runtime.wait(self._load_tickets)  # L2 gets room for the rest only when these have ended
            goes_on = self._fetch_on()
        self._claimed(runtime.wait(self._settle(arriving=by_layer)))

    async def aload(self) -> int:
        """``load`` for async code: never blocks the running loop. Not in a group of ranks."""
        self._check_open()
        runtime = self._runtime
        runtime.check_alone("aload", "load")
        if self._settled is not None:
            self.plan()  # raises after a reset, which made the lease void
            if self._landing:
                self._note_landing(in_time=await runtime.wait_async(self._landing))
            self._has_lost_load = False  # this call's answer says it
            return self.reused
        with runtime.tracing.span("hicache.load", beside=self._span, found_tokens=self._found) as span:
            await self._arestore()
            span.note(reused_tokens=self.reused)
        return self.reused

    async def _arestore(self) -> None:
        runtime = self._runtime
        goes_on = True
        while goes_on:
            while awaited := self._fetch_awaited():
                self._end_fetch(in_time=await runtime.transfers.await_(awaited, self._fetch_left_s()))
            for left_s in self._load_rounds():
                waits = self._begin_load()
                if not waits or not await runtime.wait_async(waits, left_s):
                    break
            goes_on = self._fetch_on()
        self._claimed(await runtime.wait_async(self._settle()))

    def _load_rounds(self) -> Iterator[float]:
        """The seconds left for each round of copying up: what finds no room waits for what makes it."""
        runtime = self._runtime
        deadline_s = runtime.clock.now_s() + runtime.wait_limit_s
        failures = runtime.load_failures()
        for _ in range(_LOAD_ROUNDS):
            left_s = deadline_s - runtime.clock.now_s()
            if left_s <= 0 or runtime.load_failures() - failures >= _LOAD_TRIES:
                return
            yield left_s

    def _fetch_left_s(self) -> float:
        """Seconds of the prefetch's time limit that are left."""
        elapsed_s = self._runtime.clock.now_s() - self._fetch_began_s
        num_tokens = self._matched.found.source.store
        return max(0.0, self._runtime.prefetch.limit_s(num_tokens) - elapsed_s)

    def _lower_if_sooner(self) -> None:
        """Leave what is computed sooner than loaded."""
        with self._booked():
            lowered = self._runtime.lower(self.id, len(self._prompt))
        if lowered is not None:
            self._blame(LossCause.RECOMPUTE_SOONER)
            self._aim = lowered

    def _note_prefill(self, length: int) -> None:
        """The engine has computed the request's first ``length`` tokens; beyond the prompt it was no prefill."""
        if self._computes is not None and length <= len(self._prompt):
            begin, began_s = self._computes
            with self._runtime.lock:
                seconds = self._runtime.clock.now_s() - began_s
                self._runtime.recompute.saw_prefill(length - begin, seconds)

    def _begin_fetch(self) -> None:
        with self._booked() as core:
            started = core.fetch(self.id)
            self._runtime.run_fetch(started)
            self._fetch_tickets = started.tickets
            self._runtime.join_fetch(started.tickets)

    def _fetch_awaited(self) -> tuple[TicketId, ...]:
        """What to wait for before the fetch is looked at again; nothing once it is over."""
        ahead = self._runtime.ahead_of_fetch(self._fetch_tickets)
        if not ahead:  # waiting for room in the queue is bounded by the time limit alone
            self._fetch_rounds += 1
        if self._fetch_rounds > _FETCH_ROUNDS:
            return ()
        return self._fetch_tickets + ahead

    def _fetch_on(self) -> bool:
        """Begin to fetch what L2 had no room for before the load.

        False if that is all, time is up, or the last fetch and load brought nothing.
        """
        if not any(of.store for of in self._matched.found.by_component.values()):
            return False
        missing = sum(step.last_page - step.first_page for step in self.plan())
        brought = self._missing_pages is None or missing < self._missing_pages
        self._missing_pages = missing
        if not missing or not brought or self._fetch_left_s() <= 0:
            return False
        self._fetch_rounds = 0
        self._begin_fetch()
        return bool(self._fetch_tickets)

    def _end_fetch(self, *, in_time: bool) -> None:
        """Stop waiting for the fetch; begin another one where pages proved missing."""
        runtime = self._runtime
        with runtime.lock:
            runtime.pump()
            tickets, self._fetch_tickets = self._fetch_tickets, ()
            for ticket in tickets:
                failure = runtime.failure_of(ticket)
                if failure is not None:
                    self._blame(fetch_failure(failure), failure)
            if not in_time:
                self._blame(LossCause.STORE_TIMEOUT, f"prefetch mode {runtime.prefetch.mode}")
            runtime.leave_fetch(tickets)
            if in_time:
                self._begin_fetch()

    def _begin_load(self, *, by_layer: bool = False) -> tuple[TicketId, ...]:
        """Begin what can be begun; what to wait for before the next round."""
        runtime = self._runtime
        with self._booked() as core:
            started = core.load(self.id)
            if by_layer:
                runtime.run_by_layer(started.actions)
            else:
                runtime.run(started.actions)
            self._load_tickets += started.tickets
            landing = frozenset(runtime.loading(started.tickets)) if by_layer else frozenset()
            return tuple(ticket for ticket in started.tickets if ticket not in landing)

    def _settle(self, *, arriving: bool = False) -> tuple[TicketId, ...]:
        with self._booked() as core:
            settled = core.settle(self.id, arriving=arriving)
            self._runtime.run(settled.actions)
            if arriving and settled.boundary:
                # Pages may come with other requests' loads, too. Those that began before ours end before it.
                self._landing = self._runtime.loading(self._runtime.copies())
            if settled.boundary < self.reused:
                self._runtime.faults["shortened"] += 1
                failures = [self._runtime.failure_of(ticket) for ticket in self._load_tickets]
                if any(failures):
                    self._blame(LossCause.COPY_FAILED)
                self._blame(LossCause.NO_ROOM)
            self._settled = settled
            return settled.tickets

    def _claimed(self, in_time: bool) -> None:
        """The claims have ended, or were too slow: a state that is not there may not be reused."""
        if in_time:
            self._settle()  # one that failed has lowered the boundary
            self._computes = self.reused, self._runtime.clock.now_s()
        else:
            self._begin_anew("a state's copy was too slow")

    def _begin_anew(self, why: str) -> None:
        """Reuse nothing, and leave to the copies under way what they write."""
        with self._booked() as core:
            self._blame(LossCause.COPY_FAILED, why)
            self._runtime.transfers.compute.ended()
            # The old hold ends and leaves its slot to the copy; a new one begins with nothing.
            self._runtime.faults["shortened"] += 1
            self._runtime.run(core.release(self.id).actions)
            core.rate([self.id], [0])  # the new hold takes over what it publishes of it
            self._matched = core.match(
                self._prompt[:0], self._namespace, session=self._number, priority=self._priority
            )
            self._runtime.run(self._matched.actions)
            self._aim, self._settled, self._landing = 0, None, ()
            self._settle()
        self._computes = self.reused, self._runtime.clock.now_s()

    # ---- layer by layer ----------------------------------------------------------------------
    def wait_layer(self, layer: int, component: str | None = None) -> bool:
        """Return once the payload of ``layer`` is in device memory: of one component, or of all.

        Layers count from 0 in each component; one that has fewer has to be there whole. On CUDA, what the
        current stream does from now on waits; the caller does not.

        Returns:
            False, once, if the load fell short: nothing is reused then, what was reserved is gone, and the
            request is computed anew from ``reused``, which is 0. After ``load`` always True.

        Raises ``ValueError`` if no component has such a layer, or there is no such component.
        """
        self._check_open()
        runtime = self._runtime
        num_layers = runtime.num_layers(component)
        if not 0 <= layer < num_layers:
            raise ValueError(f"layer {layer} is not within 0 to {num_layers - 1}")
        if self._landing:
            wait_layer = runtime.transfers.wait_layer
            self._note_landing(in_time=wait_layer(self._landing, layer, runtime.wait_limit_s, component))
        has_lost_load, self._has_lost_load = self._has_lost_load, False
        return not has_lost_load

    def _note_landing(self, *, in_time: bool) -> None:
        """See what has become of a load by layer."""
        runtime, promised = self._runtime, self.reused
        with self._booked():
            landing, self._landing = self._landing, runtime.loading(self._landing)
            if not in_time:
                runtime.faults["wait_limit"] += 1
                self._begin_anew("a page's copy was too slow")
            elif self._landing != landing:
                runtime.transfers.compute.ended()  # if the load fell short, what was reserved goes
                self._settle()
            if self.reused < promised:
                self._landing, self._has_lost_load = (), True

    def _landed(self) -> bool:
        """Wait, bounded, for the whole load; False if it fell short and ``wait_layer`` has not said so yet."""
        if self._landing:
            self._note_landing(in_time=self._runtime.wait(self._landing))
        return not self._has_lost_load

    # ---- compute and publish -----------------------------------------------------------------
    def reserve(self, num_tokens: int) -> None:
        """Get device slots for ``num_tokens`` more tokens, and the private states.

        Raises:
            CapacityError: even after demoting all that may go there is no room; the lease keeps
                what it had. ``required_slots`` and ``free_slots`` are those of the first component
                that is short.
        """
        self._check_open()
        wanted = _whole_number(num_tokens)
        runtime = self._runtime
        if self._settled is None:
            self._claimed(runtime.wait(self._settle()))
        deadline_s: float | None = None
        while True:
            with self._booked() as core:
                reserved = core.reserve(self.id, wanted)
                runtime.run(reserved.actions)
                if not reserved.short:
                    runtime.transfers.compute.begin()
                    return
                error = _shortage(core, reserved.short)
                some = (reserved.tickets or runtime.copies())[:1]
            if deadline_s is None:
                deadline_s = runtime.deadline_s("reserve")
            left_s = deadline_s - runtime.clock.now_s()
            if not some or left_s <= 0 or not runtime.have_ended(some, left_s):
                with runtime.lock:
                    runtime.faults["reserve_refused"] += 1
                raise error

    def slots(self, component: str) -> Slots:
        """Device slots of published and reserved pages from the prompt's start, int64, one a page.

        ``NO_SLOT`` (-1) where a window keeps nothing.
        """
        with self._booked() as core:
            return core.lease_slots(self.id, component)

    def state(self, component: str) -> int:
        """The private state slot of a checkpoint component.

        With ``reused == 0`` its bytes are undefined: the engine starts from its initial state.
        Raises ``ProtocolError`` before ``load`` or ``reserve``.
        """
        with self._booked() as core:
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
        self._check_open()
        known = self._prompt if tokens is None else self._checked(tokens)
        written = _first(known, length)
        if not self._landed():
            return _NOTHING
        self._runtime.transfers.compute.wrote()
        if self._runtime.recompute.learns:
            self._runtime.step("checkpoint")  # for the time that this prefill took
        self._note_prefill(len(written))
        if mark and not len(written) % self._runtime.page_size:
            self._have_room_for_states()
        with self._booked() as core:
            inserted = core.insert(self.id, written, mark=mark, verified_len=self._verified_len(written))
            self._runtime.kept.note(core, written, self._namespace)
            self._runtime.run(inserted.actions)
        if inserted.tickets and not self._runtime.wait(inserted.tickets):
            # The request goes on writing its state, so what is copied now is worth nothing.
            self._runtime.doom(inserted.tickets)
        self._computes = len(written), self._runtime.clock.now_s()  # what we took ourselves does not count
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
                with self._booked() as core:
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
        self._check_open()
        if not isinstance(stop, str):
            raise ValueError(f"why an answer ended is text, got {stop!r}")
        known = None
        if tokens is not None:
            known = self._checked(tokens)
            known = _first(known, len(known) if written is None else written)
        elif written is not None:
            known = _first(self._prompt, written)
        self._runtime.step("release")
        if known is not None and not self._landed():
            known = None  # what was computed on a load that failed is worth nothing
        self._runtime.transfers.compute.ended()
        if known is not None:
            self._note_prefill(len(known))
        with self._booked() as core:
            verified_len = 0 if known is None else self._verified_len(known)
            inserted = core.release(self.id, known, verified_len=verified_len)
            self._runtime.run(inserted.actions)  # before what ends meanwhile: actions run in the tree's order
            self._ended(stop)
            if known is not None:
                self._runtime.kept.note(core, known, self._namespace)
                self._runtime.sessions.watch(self._number, known, len(self._prompt), self._namespace, stop)
            self._runtime.demote_ahead()
        return inserted

    # ---- life --------------------------------------------------------------------------------
    def abandon(self) -> None:
        """Give everything back and publish nothing more. Idempotent; never raises.

        After ``HiCache.reset`` or ``close`` there is nothing left to give back.
        """
        if self._released:
            return
        self._released = True
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
        self._released = True
        self._end_fetch(in_time=False)
        settled = self._settled
        runtime = self._runtime
        runtime.requests.add(
            len(self._prompt),
            TierTokens() if settled is None else settled.source,
            {} if settled is None else settled.by_component,
        )
        if self._unfound is not None:
            runtime.note_lost(self.explain())
        runtime.sessions.end(self._session, stop=stop, lease=self.id, number=self._number)
        runtime.rate()

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

    @contextlib.contextmanager
    def _booked(self) -> Iterator[TreeCore]:
        """The tree under the lock, with all finished transfers booked."""
        self._check_open()
        with self._runtime.lock:
            self._runtime.check_open()
            self._runtime.pump()
            yield self._runtime.core

    def _check_open(self) -> None:
        if self._released:
            raise ProtocolError(f"lease {self.id} was released already")
        self._runtime.check_open()

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


def _shortage(core: TreeCore, short: Mapping[str, int]) -> CapacityError:
    """The error for a reservation that cannot be met."""
    component, lacking = next(iter(short.items()))
    capacity, free = core.free_slots(component, Tier.DEVICE)
    every = ", ".join(f"{count} of {name}" for name, count in short.items())
    if lacking + free > capacity:
        why = f"{component} has {capacity} in all. Raise tiers.device.capacity or the component's split"
    else:
        why = (
            "everything else is locked by open leases or in flight. Release leases, reserve less at a time,"
            " or raise tiers.device.capacity"
        )
    return CapacityError(
        f"device slots are lacking: {every}; {why}", required_slots=lacking + free, free_slots=free
    )
