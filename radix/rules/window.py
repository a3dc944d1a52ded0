"""Window: only the last *w* tokens are needed (sliding-window attention)."""

from __future__ import annotations

from hicache.radix.rules.base import SpanRule


def window_frontier(key_len: int, window_tokens: int, page_size: int) -> int:
    """First token (a page start) whose window payload a prefix of ``key_len`` tokens still needs.

    With ``b`` the whole pages of the key: ``floor((b - max(w, page)) / page) * page``, at least 0.
    What lies before may be gone; what lies after, at least ``min(w, b)`` tokens, may not.
    """
    whole = key_len // page_size * page_size
    reach = max(window_tokens, page_size)
    return max(0, (whole - reach) // page_size * page_size)


class WindowRule(SpanRule):
    """Unbroken payload from the window's frontier on; it locks that much."""

    def span(self, end: int) -> int:
        return window_frontier(end, self.spec.window_tokens, self.page_size)
