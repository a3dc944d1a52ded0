"""What sessions sent last: where their payload is found when it is to be cleared."""

from __future__ import annotations

from collections import OrderedDict, deque

from hicache.radix.interface import Tokens
from hicache.types import Namespace

MAX_SESSION_TOKENS = 16 << 20
"""Tokens of prompts that are kept to find sessions by; the longest unused are forgotten first."""


class LastPrompts:
    """The last two prompts of each session, as long as there is room: where its payload is found.

    *Thread*: the cache's lock.
    """

    def __init__(self, max_tokens: int = MAX_SESSION_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._prompts: OrderedDict[str, deque[tuple[Namespace, Tokens]]] = OrderedDict()

    def note(self, session: str, namespace: Namespace, prompt: Tokens) -> None:
        """*Caller guarantees*: nobody writes to ``prompt`` any more."""
        prompts = self._prompts.setdefault(session, deque())
        prompts.appendleft((namespace, prompt))
        self._num_tokens += len(prompt)
        if len(prompts) > 2:
            self._num_tokens -= len(prompts.pop()[1])
        self._prompts.move_to_end(session)
        while self._num_tokens > self._max_tokens:
            _, oldest = self._prompts.popitem(last=False)
            self._num_tokens -= sum(len(tokens) for _, tokens in oldest)

    def of(self, session: str) -> tuple[tuple[Namespace, Tokens], ...]:
        """Latest first; empty if it is not known."""
        return tuple(self._prompts.get(session, ()))

    def forget(self, session: str | None = None) -> None:
        """One session, or all."""
        if session is None:
            self._prompts.clear()
            self._num_tokens = 0
            return
        self._num_tokens -= sum(len(tokens) for _, tokens in self._prompts.pop(session, ()))
