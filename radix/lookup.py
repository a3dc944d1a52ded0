"""Walk, vote, and what an L3 probe asks: all that reads the tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hicache.events import Cause
from hicache.radix.forest import Forest
from hicache.radix.interface import ProbeResult, StoreQuery, Tokens
from hicache.radix.keys import chain_links, namespace_seed
from hicache.radix.leases import Origin
from hicache.radix.node import DEVICE, HOST, STORE, Node
from hicache.radix.page_keys import PageKeys
from hicache.types import Namespace, Tier, TierTokens


@dataclass(frozen=True, slots=True)
class Walk:
    """The longest path of equal pages.

    Args:
        path: nodes matched whole, from below the root.
        last: the node the match ends inside of, if it does.
        inside: tokens matched of ``last``.
    """

    path: list[Node]
    last: Node | None
    inside: int

    @property
    def length(self) -> int:
        whole = self.path[-1].end if self.path else 0
        return whole + self.inside

    def stops(self) -> list[tuple[Node, int]]:
        """Every candidate of the vote as (node, end), shallowest first."""
        stops = [(node, node.end) for node in self.path]
        if self.last is not None:
            stops.append((self.last, self.last.start + self.inside))
        return stops


def match_limit(num_tokens: int, page_size: int, *, cap: bool) -> int:
    """Longest length that may be reused: whole pages, with one token left to compute if ``cap``."""
    usable = num_tokens - 1 if cap else num_tokens
    return max(0, usable // page_size * page_size)


def walk(forest: Forest, start: Node | None, tokens: Tokens, begin: int, limit: int) -> Walk:
    """Follow ``tokens[begin:limit]`` down from ``start``. Reads only."""
    path: list[Node] = []
    node, position = start, begin
    page = forest.page_size
    while node is not None and position < limit:
        child = node.children.get(tokens[position : position + page].tobytes())
        if child is None:
            break
        length = min(len(child.tokens), limit - position)
        equal = _equal_prefix(child.tokens[:length], tokens[position : position + length])
        equal = equal // page * page
        if equal < len(child.tokens):
            return Walk(path, child, equal)
        path.append(child)
        node, position = child, position + equal
    return Walk(path, None, 0)


def _equal_prefix(left: Tokens, right: Tokens) -> int:
    differs = left != right
    first = int(np.argmax(differs))
    return first if differs[first] else len(left)


@dataclass(frozen=True, slots=True)
class Vote:
    """The deepest stop that all accept, and the deepest that the prefix components accept.

    A model without prefix components has nothing but the tree's tokens to go by for the latter.
    """

    index: int
    prefix_index: int


def vote(forest: Forest, stops: Sequence[tuple[Node, int]], has: Callable[[Node, int], bool]) -> Vote:
    """Let every component judge every stop; ``-1`` where none is accepted.

    The result is the greatest common legal endpoint, not the least of each component's own greatest.
    """
    best = prefix_best = -1
    for position, is_legal in judge(forest, stops, has):
        prefix_best = position
        if is_legal:
            best = position
    return Vote(best, prefix_best)


def judge(
    forest: Forest, stops: Sequence[tuple[Node, int]], has: Callable[[Node, int], bool]
) -> Iterator[tuple[int, bool]]:
    """Each stop that the prefix components accept, and whether all others do, too."""
    # A default argument binds the component now; a bare closure would see the loop's last.
    validators = [
        rule.validator(lambda node, i=i: has(node, i))  # type: ignore[misc]
        for i, rule in enumerate(forest.rules)
    ]
    for position, (node, end) in enumerate(stops):
        # No short cut: a stateful validator has to see every node.
        verdicts = [validator(node, end) for validator in validators]
        if not all(verdicts[i] for i in forest.prefixes):
            return
        yield position, all(verdicts)


def anywhere(node: Node, component: int) -> bool:
    """Residency in any tier counts."""
    return node.fastest(component) is not None


def on_device(node: Node, component: int) -> bool:
    """Residency in L1 alone counts."""
    return node.slots[component][DEVICE] is not None


def find(forest: Forest, tokens: Tokens, namespace: Namespace, *, cap: bool) -> tuple[Walk, Vote]:
    """Walk and vote for a request."""
    limit = match_limit(len(tokens), forest.page_size, cap=cap)
    found = walk(forest, forest.roots.get(namespace), tokens, 0, limit)
    return found, vote(forest, found.stops(), anywhere)


def origins(forest: Forest, stops: Sequence[tuple[Node, int]]) -> list[Origin]:
    """Of each stretch of the walk, the fastest tier that has each component."""
    components = range(forest.num_components)
    return [Origin(node.start, end, tuple(node.fastest(i) for i in components)) for node, end in stops]


def describe(forest: Forest, found: Walk, verdict: Vote) -> ProbeResult:
    """A vote as the caller sees it."""
    stops = found.stops()
    boundary = stops[verdict.index][1] if verdict.index >= 0 else 0
    deepest = stops[verdict.prefix_index][1] if verdict.prefix_index >= 0 else 0
    by_component, source = sources(forest, origins(forest, stops[: verdict.index + 1]), boundary)
    return ProbeResult(
        boundary=boundary,
        walked=found.length,
        source=source,
        by_component=by_component,
        fork=deepest if deepest > boundary else None,
    )


def sources(
    forest: Forest, path: Sequence[Origin], boundary: int
) -> tuple[dict[str, TierTokens], TierTokens]:
    """Where the tokens of ``[0, boundary)`` come from: per component, and for the request."""
    by_component = {
        spec.name: _component_sources(forest, i, path, boundary) for i, spec in enumerate(forest.specs)
    }
    primary = forest.prefixes[0] if forest.prefixes else 0
    source = by_component[forest.specs[primary].name]
    # Tokens before a window need no payload at all; they count with the fastest tier.
    ahead = boundary - source.total
    return by_component, TierTokens(source.device + ahead, source.host, source.store)


def _component_sources(forest: Forest, component: int, path: Sequence[Origin], boundary: int) -> TierTokens:
    rule = forest.rules[component]
    tokens: dict[Tier | None, int] = {}
    first = rule.span(boundary) if rule.keeps_pages else 0
    for origin in reversed(path):
        begin, end = max(origin.start, first), min(origin.end, boundary)
        tier = origin.tiers[component]
        if not rule.keeps_pages:
            if origin.end == boundary:
                tokens[tier] = boundary
            continue
        if origin.end <= first:
            break
        if end > begin:
            tokens[tier] = tokens.get(tier, 0) + end - begin
    return TierTokens(tokens.get(DEVICE, 0), tokens.get(HOST, 0), tokens.get(STORE, 0))


# ---- the L3 probe ----------------------------------------------------------------------------
def store_query(forest: Forest, tokens: Tokens, namespace: Namespace, *, cap: bool) -> StoreQuery:
    """Which pages to ask L3 for: those that could move the boundary and are not in L1 or L2.

    The same limit as the match, so a probe can never promise a boundary that a match cannot take.
    """
    limit = match_limit(len(tokens), forest.page_size, cap=cap)
    if not forest.config.has_store or not limit:
        return StoreQuery({})
    found = walk(forest, forest.roots.get(namespace), tokens, 0, limit)
    links = _links_along(forest, found, tokens, namespace, limit)
    page = forest.page_size
    keys: dict[str, PageKeys] = {}
    for i, spec in enumerate(forest.specs):
        covered = _covered_pages(forest, i, found)
        wanted = [index for index in range(limit // page) if index not in covered]
        if wanted:
            keys[spec.name] = PageKeys.of(wanted, [forest.key_of(i, links[index]) for index in wanted])
    return StoreQuery(keys)


def _covered_pages(forest: Forest, component: int, found: Walk) -> set[int]:
    """Page indices whose payload L1 or L2 has."""
    page = forest.page_size
    covered: set[int] = set()
    for node, end in found.stops():
        held = node.slots[component]
        if held[DEVICE] is None and held[HOST] is None:
            continue
        if forest.rules[component].keeps_pages:
            covered.update(range(node.start // page, end // page))
        elif end == node.end:
            covered.add(end // page - 1)
    return covered


def _links_along(
    forest: Forest, found: Walk, tokens: Tokens, namespace: Namespace, limit: int
) -> list[bytes]:
    """The token chain of ``tokens[:limit]``, as far as possible from the tree's own memory."""
    links: list[bytes] = []
    for node, end in found.stops():
        links += forest.links(node)[: (end - node.start) // forest.page_size]
    last = links[-1] if links else namespace_seed(forest.config.identity, namespace)
    rest = tokens[len(links) * forest.page_size : limit]
    return links + chain_links(last, rest, forest.page_size)


def learn(
    forest: Forest,
    tokens: Tokens,
    found: Mapping[str, Mapping[int, bool]],
    namespace: Namespace,
) -> None:
    """Take over what a probe found: stubs for pages only L3 has, beliefs dropped where wrong."""
    if not forest.config.has_store:
        return  # it was detached while it was asked
    answers = [dict(found.get(spec.name, {})) for spec in forest.specs]
    page = forest.page_size
    reach = len(tokens) // page
    for i in forest.prefixes:
        reach = min(reach, _first_missing(answers[i], reach))
    asked = max((index + 1 for answer in answers for index in answer), default=0)
    there = max((index + 1 for a in answers for index, yes in a.items() if yes), default=0)
    if min(reach, there):
        _extend(forest, forest.root(namespace), tokens, min(reach, there) * page)
    limit = min(len(tokens) // page, asked) * page
    root = forest.roots.get(namespace)
    if root is None:
        return
    for index in _edges(forest, walk(forest, root, tokens, 0, limit), answers):
        _cut_at(forest, root, tokens, index * page)
    for node in walk(forest, root, tokens, 0, limit).path:
        for i, answer in enumerate(answers):
            pages = forest.rules[i].keeps_pages
            verdict = answer.get((node.start if pages else node.end - 1) // page)
            beyond = node.start >= reach * page and i in forest.prefixes and verdict
            if verdict is None or beyond or (i, STORE) in node.incoming:
                continue
            forest.set_stored(node, i, verdict, Cause.PROBE if verdict else Cause.MISSING)
        forest.soil(node)


def _first_missing(answer: Mapping[int, bool], default: int) -> int:
    """First page index that L3 does not have. Pages of a path after it are out of reach."""
    return min((index for index, there in answer.items() if not there), default=default)


def _extend(forest: Forest, root: Node, tokens: Tokens, limit: int) -> None:
    """Make the topology reach ``limit``; new nodes carry nothing yet."""
    found = walk(forest, root, tokens, 0, limit)
    if found.length >= limit:
        return
    node = found.path[-1] if found.path else root
    if found.last is not None:
        node = forest.split(found.last, found.inside // forest.page_size)
    forest.add_child(node, tokens[found.length : limit])


def _edges(forest: Forest, known: Walk, answers: Sequence[Mapping[int, bool]]) -> list[int]:
    """Page indices inside nodes at which an answer changes, so that nodes stay uniform."""
    page = forest.page_size
    cuts: set[int] = set()
    for node, end in known.stops():
        first, last = node.start // page, end // page
        for i, answer in enumerate(answers):
            if not forest.rules[i].keeps_pages:
                # A state belongs to a node's end; it is worth a cut only where one was found.
                cuts.update(index + 1 for index in range(first, last) if answer.get(index))
                continue
            belief = node.stored[i]
            cuts.update(
                index
                for index in range(first + 1, last)
                if answer.get(index, belief) != answer.get(index - 1, belief)
            )
        # What lies behind the last page that was asked for keeps the belief it has.
        if end < node.end and any(
            answer.get(last - 1, belief) != belief
            for answer, belief in zip(answers, node.stored, strict=True)
        ):
            cuts.add(last)
    return sorted(cuts)


def _cut_at(forest: Forest, root: Node, tokens: Tokens, position: int) -> None:
    """Make a node end at ``position`` on the path of ``tokens``."""
    found = walk(forest, root, tokens, 0, position)
    if found.last is not None and found.inside and found.length == position:
        forest.split(found.last, found.inside // forest.page_size)
