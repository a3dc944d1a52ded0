"""One request from match to release.

::

    with cache.match(prompt, session="chat-17") as lease:
        lease.load()
        lease.reserve(len(prompt) - lease.reused)
        ...                                 # prefill from lease.reused on
        lease.checkpoint(len(prompt))
        ...                                 # decode; lease.reserve(1) a step
        lease.release(prompt + answer, written=n)

Leaving the block without ``release`` gives everything back and publishes nothing more.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from hicache.errors import CapacityError, ProtocolError
from hicache.radix.actions import Slots
from hicache.radix.interface import Inserted, MatchResult, PlanStep, Settled, Tokens
from hicache.radix.keys import as_tokens
from hicache.types import LeaseId, TicketId, TierTokens

if TYPE_CHECKING:
    from hicache.cache import HiCache


class Lease:
    """A request's hold on the cache. Made by ``HiCache.match`` only.

    *Thread*: one thread at a time; different leases may be used from different threads.
    """

    def __init__(
        self,
        cache: HiCache,
        prompt: Tokens,
        matched: MatchResult,
        session: str | None,
        fetch_began_s: float,
    ) -> None:
        self._cache = cache
        self._prompt = prompt
        self._matched = matched
        self._session = session
        self._fetch_tickets: tuple[TicketId, ...] = ()
        self._fetch_began_s = fetch_began_s
        self._load_tickets: tuple[TicketId, ...] = ()
        self._settled: Settled | None = None
        self._released = False

    # ---- what was found ----------------------------------------------------------------------
    @property
    def id(self) -> LeaseId:
        return self._matched.lease

    @property
    def reused(self) -> int:
        """Tokens that need not be computed: the match's answer, exact after ``load``."""
        if self._settled is not None:
            return self._settled.boundary
        return self._matched.found.boundary

    @property
    def source(self) -> TierTokens:
        """Where the reused tokens came from."""
        return self._matched.found.source if self._settled is None else self._settled.source

    @property
    def by_component(self) -> Mapping[str, TierTokens]:
        """The same per component; a window counts the pages it needs."""
        found = self._matched.found if self._settled is None else self._settled
        return found.by_component

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
        ``checkpoint``: the fork, and the last page end that the same prompt could reuse next time.
        Empty for models with path components only.
        """
        if not self._cache.is_hybrid:
            return ()
        page = self._cache.page_size
        last = (len(self._prompt) - 1) // page * page
        wanted = {last, self.checkpoint_hint or 0}
        return tuple(sorted(length for length in wanted if length > self.reused))

    def plan(self) -> tuple[PlanStep, ...]:
        """What ``load`` would move, per component and tier."""
        self._check_open()
        return self._cache._plan(self)

    # ---- restore -----------------------------------------------------------------------------
    def load(self) -> int:
        """Run the restore plan and wait for it, bounded; returns ``reused``.

        A failed, short, slow or missing transfer lowers ``reused``; nothing is raised for it.
        """
        self._check_open()
        if self._settled is None:
            self._cache._load(self)
        return self.reused

    async def aload(self) -> int:
        """``load`` for async code: never blocks the running loop."""
        self._check_open()
        if self._settled is None:
            await self._cache._aload(self)
        return self.reused

    def wait_layer(self, layer: int) -> None:
        """Return once the payload of ``layer`` is in device memory, for every component.

        Raises ``ValueError`` if no component has such a layer.
        """
        self._check_open()
        if not 0 <= layer < self._cache.num_layers:
            raise ValueError(f"layer {layer} is not within 0 to {self._cache.num_layers - 1}")
        self._cache._wait(self._load_tickets)

    # ---- compute and publish -----------------------------------------------------------------
    def reserve(self, num_tokens: int) -> None:
        """Get device slots for ``num_tokens`` more tokens, and the private states.

        Raises:
            CapacityError: even after demoting all that may go there is no room; the lease keeps
                what it had. ``required_slots`` and ``free_slots`` are those of the first component
                that is short.
        """
        self._check_open()
        self._cache._reserve(self, num_tokens)

    def slots(self, component: str) -> Slots:
        """Device slots of published and reserved pages from the prompt's start, int64, one a page.

        ``NO_SLOT`` (-1) where a window keeps nothing.
        """
        self._check_open()
        return self._cache._slots(self, component)

    def state(self, component: str) -> int:
        """The private state slot of a checkpoint component.

        With ``reused == 0`` its bytes are undefined: the engine starts from its initial state.
        Raises ``ProtocolError`` before ``load`` or ``reserve``.
        """
        self._check_open()
        slot = self._cache._state(self, component)
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
        """
        self._check_open()
        known = self._prompt if tokens is None else as_tokens(tokens)
        return self._cache._checkpoint(self, _first(known, length), mark=mark)

    def release(
        self, tokens: object = None, *, written: int | None = None, stop: str = ""
    ) -> Inserted:
        """End the request.

        Args:
            tokens: prompt and answer; None publishes nothing more.
            written: how many of them have payload written (the last sampled token has none);
                default all.
            stop: why the answer ended (``tool_call``, ``end_turn`` …), kept with the session.
        """
        self._check_open()
        known = None
        if tokens is not None:
            known = as_tokens(tokens)
            known = _first(known, len(known) if written is None else written)
        elif written is not None:
            known = _first(self._prompt, written)
        return self._cache._release(self, known, stop=stop)

    # ---- life --------------------------------------------------------------------------------
    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._released:
            self._cache._abandon(self)

    async def __aenter__(self) -> Lease:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.__exit__(exc_type, exc, traceback)

    def _check_open(self) -> None:
        if self._released:
            raise ProtocolError(f"lease {self.id} was released already")


def _first(tokens: Tokens, length: int) -> Tokens:
    if not 0 <= length <= len(tokens):
        raise ProtocolError(f"{length} tokens are said to be written, {len(tokens)} were given")
    return tokens[:length]


def shortage(short: Mapping[str, int], free: Mapping[str, int]) -> CapacityError:
    """The error for a reservation that cannot be met."""
    component, lacking = next(iter(short.items()))
    every = ", ".join(f"{count} of {name}" for name, count in short.items())
    return CapacityError(
        f"device slots are lacking: {every}; everything else is locked by open leases or in flight."
        " Release leases, reserve less at a time, or raise tiers.device.capacity",
        required_slots=lacking + free[component],
        free_slots=free[component],
    )
