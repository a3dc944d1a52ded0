"""At which token a prompt parts from all that was sent before it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hicache.workload import Request
from hicache.workload.tokens import Tokens


@dataclass(frozen=True, slots=True)
class Divergence:
    """A prompt's first token that is not that of the earlier request most like it.

    Args:
        token: index of the token; the prompt's length if the earlier request begins with all of it.
        request: the earlier request, from 1; with several, the first.
    """

    token: int
    request: int

    def __str__(self) -> str:
        return f"most like request {self.request}: equal up to token {self.token:,}"


def divergence(requests: Iterable[Request]) -> Divergence | None:
    """Hold the last request's prompt against all before it; None if there is none before it.

    Every earlier request counts with its prompt and its answer. Costs O(tokens of all).
    """
    earlier = list(requests)
    if len(earlier) < 2:
        return None
    prompt = earlier.pop().prompt_tokens()
    best = Divergence(-1, 0)
    for number, request in enumerate(earlier, 1):
        equal = _equal_len(prompt, np.concatenate([request.prompt_tokens(), request.answer_tokens()]))
        if equal > best.token:
            best = Divergence(equal, number)
    return best


def _equal_len(left: Tokens, right: Tokens) -> int:
    shared = min(len(left), len(right))
    differs = left[:shared] != right[:shared]
    return int(differs.argmax()) if differs.any() else shared
