"""Serve two turns of a chat. Instead of attention, each page's KV is filled with a number of its own.

python examples/quickstart.py
"""

import numpy as np

from hicache import HiCache


def compute(cache: HiCache, slots: np.ndarray, first_page: int) -> None:
    """Stands for a model's forward pass: write the KV of the pages from ``first_page`` on."""
    for page in range(first_page, len(slots)):
        cache.device["full"][:, slots[page]] = page % 256


def serve(cache: HiCache, prompt: list[int], answer: list[int]) -> int:
    with cache.match(prompt, session="chat-17") as lease:
        reused = lease.load()
        lease.reserve(len(prompt) + len(answer) - reused)
        compute(cache, lease.slots("full"), reused // cache.page_size)
        # The last sampled token is never fed back to the model, so its KV is not written.
        lease.release(prompt + answer, written=len(prompt) + len(answer) - 1, stop="end_turn")
    return reused


with HiCache.from_yaml("cpu", overrides={"model.page_size": 64}) as cache:
    question, answer, follow_up = list(range(1000)), list(range(5000, 5200)), list(range(9000, 9100))
    print("turn 1 reused", serve(cache, question, answer), "tokens")
    print("turn 2 reused", serve(cache, question + answer + follow_up, [7]), "tokens of 1300")
    print("hit rate", round(cache.stats().tokens.hit_rate, 4), "audit", cache.audit())
