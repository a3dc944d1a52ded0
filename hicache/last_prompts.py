"""What sessions sent last: where their payload is found when it is to be cleared."""

from __future__ import annotations

from collections import OrderedDict

from hicache.radix.interface import Tokens
from hicache.types import MAX_SESSIONS, Namespace

MAX_SESSION_TOKENS = 16 << 20
"""Tokens of prompts that are kept to find sessions by; the longest unused are forgotten first."""
_Prompt = tuple[Namespace, Tokens]


class LastPrompts:
    """The last two prompts of each session, as long as there is room: where its payload is found.

    Args:
        max_tokens, max_sessions: both bound it, since a session costs something besides its tokens.

    *Thread*: the cache's lock.
    """

    def __init__(self, max_tokens: int = MAX_SESSION_TOKENS, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_tokens = max_tokens
        self._max_sessions = max_sessions
        self._num_tokens = 0
        self._prompts: OrderedDict[str, tuple[_Prompt, ...]] = OrderedDict()

    def __len__(self) -> int:
        """Sessions whose prompts are known."""
        return len(self._prompts)

    def note(self, session: str, namespace: Namespace, prompt: Tokens) -> None:
        """*Caller guarantees*: nobody writes to ``prompt`` any more."""
        before = self.of(session)
        self._prompts[session] = ((namespace, prompt), *before[:1])
        self._prompts.move_to_end(session)
        self._num_tokens += len(prompt) - _num_tokens(before[1:])
        while self._num_tokens > self._max_tokens or len(self._prompts) > self._max_sessions:
            self._num_tokens -= _num_tokens(self._prompts.popitem(last=False)[1])

    def of(self, session: str) -> tuple[_Prompt, ...]:
        """Latest first; empty if it is not known."""
        return self._prompts.get(session, ())

    def forget(self, session: str | None = None) -> None:
        """One session, or all."""
        if session is None:
            self._prompts.clear()
            self._num_tokens = 0
            return
        self._num_tokens -= _num_tokens(self._prompts.pop(session, ()))


def _num_tokens(prompts: tuple[_Prompt, ...]) -> int:
    return sum(len(tokens) for _, tokens in prompts)
