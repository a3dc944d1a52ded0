"""What one request has of the tree, and the time its engine takes to compute."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hicache.errors import ProtocolError
from hicache.radix.interface import MatchResult, Tokens, TreeCore
from hicache.runtime import Runtime
from hicache.types import LeaseId, Namespace, SessionId


class Hold:
    """One request's hold on the tree, from match to release.

    Args:
        number: of its session.

    *Thread*: one at a time.
    """

    def __init__(
        self,
        runtime: Runtime,
        prompt: Tokens,
        matched: MatchResult,
        *,
        number: SessionId | None,
        namespace: Namespace,
        priority: int,
    ) -> None:
        self.runtime = runtime
        self.prompt = prompt
        self.matched = matched
        self.number = number
        self.namespace = namespace
        self.is_released = False
        self._priority = priority
        self._computes: tuple[int, float] | None = None  # from which token on, since when

    @property
    def id(self) -> LeaseId:
        return self.matched.lease

    def check_open(self) -> None:
        """Raises ``ProtocolError`` once the request has ended or the cache is closed."""
        if self.is_released:
            raise ProtocolError(f"lease {self.id} was released already")
        self.runtime.check_open()

    @contextlib.contextmanager
    def booked(self) -> Iterator[TreeCore]:
        """The tree under the lock, with all finished transfers booked."""
        self.check_open()
        with self.runtime.lock:
            self.runtime.check_open()
            self.runtime.pump()
            yield self.runtime.core

    def begin_anew(self, core: TreeCore) -> None:
        """Hold nothing of what was matched (lock held); copies under way keep the slots that they write."""
        runtime = self.runtime
        runtime.transfers.compute.ended()
        runtime.run(core.release(self.id).actions)
        # The new hold takes over what it publishes of it.
        runtime.sessions.bury(core.rate([self.id], [0]))
        self.matched = core.match(
            self.prompt[:0], self.namespace, session=self.number, priority=self._priority
        )
        runtime.run(self.matched.actions)

    # ---- the engine's time -------------------------------------------------------------------
    def computes_from(self, length: int) -> None:
        """The engine computes from here on, beginning now."""
        self._computes = length, self.runtime.clock.now_s()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """What is waited for in the block is no time of the engine's.

        On a device that waits for itself nothing is waited for here: what it waited counts as the engine's.
        """
        began_s = self.runtime.clock.now_s()
        yield
        if self._computes is not None:
            begin, since_s = self._computes
            self._computes = begin, since_s + self.runtime.clock.now_s() - began_s

    def computed(self, length: int) -> None:
        """The engine has computed the request's first ``length`` tokens; beyond the prompt it was no prefill."""
        if self._computes is not None and length <= len(self.prompt):
            begin, began_s = self._computes
            with self.runtime.lock:
                seconds = self.runtime.clock.now_s() - began_s
                self.runtime.recompute.saw_prefill(length - begin, seconds)
