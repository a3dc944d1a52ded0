"""The distance from a cache without limits, token by token, by cause."""

from __future__ import annotations

from collections import Counter

from hicache.explain import UNSEEN, Explanation, LossCause
from hicache.types import ComponentSpec, ReuseRule
from hicache.workload.ceiling import InfiniteCache
from hicache.workload.tokens import Tokens


class LossAccount:
    """Adds up what requests lost against a cache without limits that serves the same requests.

    Args:
        specs, page_size: of the model that is replayed.

    The two sums are equal by construction: what a request lost is cut to the tokens that the other cache
    gives it, and every one of these has one cause.
    """

    def __init__(self, specs: tuple[ComponentSpec, ...], page_size: int) -> None:
        self.lost_tokens: Counter[str] = Counter()
        self.infinite_hit_tokens = 0
        self._has_paths = any(spec.rule == ReuseRule.PATH for spec in specs)
        self._infinite = InfiniteCache(page_size, keep_one=True, store_answers=True, last_token_written=False)

    def add(self, prompt: Tokens, answer: Tokens, explanation: Explanation, *, ledger_is_whole: bool) -> None:
        """Count one request, in the order of service.

        Args:
            prompt, answer: int32 [num_tokens].
            ledger_is_whole: whether the ledger remembers every departure so far.
        """
        reachable = self._infinite.serve(prompt, answer)
        self.infinite_hit_tokens += reachable
        if explanation.reused > reachable:
            self.lost_tokens[LossCause.FROM_BEFORE.value] += reachable - explanation.reused
        for lost in explanation.lost:
            num_tokens = min(lost.end, reachable) - lost.begin
            if num_tokens > 0:
                self.lost_tokens[self._cause(lost.cause, ledger_is_whole).value] += num_tokens

    def _cause(self, cause: LossCause, ledger_is_whole: bool) -> LossCause:
        """What a cache without limits has and the ledger never saw was not kept, or the ledger is too small."""
        if cause not in UNSEEN:
            return cause
        if not ledger_is_whole:
            return LossCause.FORGOTTEN
        return LossCause.NOT_KEPT if self._has_paths else LossCause.NO_CHECKPOINT
