"""Prefixes that are to be kept: what is on the way to one goes last of what may go."""

from __future__ import annotations

from hicache.radix.forest import Forest
from hicache.radix.interface import Tokens
from hicache.radix.lookup import walk
from hicache.types import Namespace


def keep(forest: Forest, tokens: Tokens, namespace: Namespace) -> int:
    """Prefer to keep what there is of a prefix, floored to a page; returns how many tokens that is."""
    found = walk(forest, forest.roots.get(namespace), tokens, 0, _whole_pages(forest, tokens))
    for node, end in found.stops():
        # A prefix that ends inside a node: only what is before its end is to be kept.
        is_cut = end < node.end and not node.is_kept
        place = forest.split(node, (end - node.start) // forest.page_size) if is_cut else node
        forest.set_kept(place, True)
        forest.soil(place)
    return found.length


def unkeep(forest: Forest, tokens: Tokens, namespace: Namespace) -> None:
    """Prefer it no longer: nothing on the way to its end is kept."""
    found = walk(forest, forest.roots.get(namespace), tokens, 0, _whole_pages(forest, tokens))
    for node, _ in found.stops():
        forest.set_kept(node, False)
        forest.offer(node)
        forest.soil(node)


def _whole_pages(forest: Forest, tokens: Tokens) -> int:
    return len(tokens) // forest.page_size * forest.page_size
