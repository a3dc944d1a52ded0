"""When to try again: each failure doubles the pause, a success ends it."""

from __future__ import annotations

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0


class Backoff:
    """The pause before the next try.

    Args:
        first_s, max_s: the shortest and the longest pause, in seconds.

    ``due_s`` is when to try, by the caller's clock; None while there is nothing to try again.
    """

    def __init__(self, first_s: float = FIRST_PAUSE_S, max_s: float = MAX_PAUSE_S) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._pause_s = first_s
        self.due_s: float | None = None

    def failed(self, now_s: float) -> None:
        """Something failed. Further failures before the next try do not put it off."""
        if self.due_s is None:
            self.due_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, self._max_s)

    def succeeded(self) -> None:
        """Something went well: the next pause is a short one again."""
        self._pause_s = self._first_s

    def take(self, now_s: float) -> bool:
        """Is it time to try? Says so once; what fails then asks for the next pause."""
        if self.due_s is None or now_s < self.due_s:
            return False
        self.due_s = None
        return True
