"""Why a request was not reused in full.

::

    0 ........ reused ........ boundary ......... fork ............. known .......... prompt's last page
      given      | a transfer     | a state or      | path payload     | never seen
      to the     | failed, was    | a window is     | left its last    | before: the prompt
      request    | late, no room  | missing         | tier             | diverges here

The left edge of each range is what the tree says; what is in a range, the ledger of departures says. Every token
between ``reused`` and the last page that could have been reused is in exactly one range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum

from hicache.events import Cause
from hicache.ledger import Departure, Ledger
from hicache.radix.interface import ProbeResult, Tokens
from hicache.radix.keys import ComponentKeys, chain_links, namespace_seed
from hicache.radix.rules.window import window_frontier
from hicache.transfer.jobs import Failure
from hicache.types import ComponentSpec, Namespace, PageKey, ReuseRule


class LossCause(StrEnum):
    """Why a range of tokens has to be computed."""

    NEW = "new"
    """Nobody sent these tokens before: the prompt diverges where the range begins."""
    OTHER_NAMESPACE = "other_namespace"
    """They are known, but in a namespace that differs in a part."""
    EVICTED = "evicted"
    """Payload was there and left the last tier that had it."""
    NO_CHECKPOINT = "no_checkpoint"
    """Path payload is there; a component left no state or window where one would be needed."""
    FORGOTTEN = "forgotten"
    """They were there; the ledger no longer says how they left."""
    STORE_TIMEOUT = "store_timeout"
    """L3 did not give them within the prefetch's time limit."""
    STORE_FAILED = "store_failed"
    """L3 failed: it could not be asked, or could not read them."""
    STORE_MISSING = "store_missing"
    """They were believed in L3 and were not there (stores evict and expire by themselves), or not whole."""
    QUEUE_FULL = "queue_full"
    """Too much was being fetched already."""
    RECOMPUTE_SOONER = "recompute_sooner"
    """Computing them was expected to be sooner than fetching them."""
    COPY_FAILED = "copy_failed"
    """A copy between L1 and L2 failed, or was too slow."""
    NO_ROOM = "no_room"
    """L1 or L2 had no room: everything was locked or in flight."""
    ABANDONED = "abandoned"
    """The request ended before it loaded anything."""
    NOT_KEPT = "not_kept"
    """A request computed them before, but they were never kept: the pool refused slots. Only a replay can tell."""
    FROM_BEFORE = "from_before"
    """The opposite of a loss, counted below 0: a store kept them from before the replay. Only a replay can tell."""


UNSEEN = frozenset({LossCause.NEW, LossCause.OTHER_NAMESPACE})
"""Causes of what was no loss: a cache without limits would not have had these tokens either."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Tokens [begin, end) of a prompt that have to be computed, and why.

    Args:
        component: whose payload is missing, where one is to blame.
        departure: how that left its last tier.
        detail: what else is known, in words.
    """

    begin: int
    end: int
    cause: LossCause
    component: str | None = None
    departure: Departure | None = None
    detail: str = ""

    @property
    def num_tokens(self) -> int:
        return self.end - self.begin

    def __str__(self) -> str:
        where = f"tokens {self.begin:,} to {self.end:,} ({self.num_tokens:,})"
        what = self.cause.replace("_", " ")
        if self.component is not None:
            what = f"{self.component}: {what}"
        if self.departure is not None:
            left = self.departure
            what += f", left {left.tier.name.lower()} at {left.at_s:.3f} s ({left.cause})"
        return f"{where}: {what}" + (f"; {self.detail}" if self.detail else "")


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a request got and why it did not get the rest.

    Args:
        prompt_len: tokens.
        found: what the match promised.
        reused: what was left of it after the load.
        lost: contiguous ranges from ``reused`` to ``limit``.
        limit: the most that could be reused: whole pages, one token left to compute.
    """

    prompt_len: int
    found: int
    reused: int
    lost: tuple[Lost, ...]
    limit: int

    @property
    def diverged_at(self) -> int | None:
        """Where the first page begins that nobody sent before; None if all were."""
        return next((lost.begin for lost in self.lost if lost.cause in UNSEEN), None)

    @property
    def lost_tokens(self) -> dict[LossCause, int]:
        """Tokens by cause, without those that nobody sent before."""
        return tokens_by_cause(self.lost)

    def __str__(self) -> str:
        lines = [f"{self.reused:,} of {self.prompt_len:,} prompt tokens reused ({self.found:,} found)"]
        lines += [f"  {lost}" for lost in self.lost]
        if self.limit < self.prompt_len:
            rest = self.prompt_len - max(self.limit, self.reused)
            lines.append(f"  the last {rest:,}: not a whole page, or the token that is always computed")
        return "\n".join(lines)


def tokens_by_cause(lost: Sequence[Lost]) -> dict[LossCause, int]:
    """Tokens that were lost, by cause; what was never here under this namespace (``UNSEEN``) is not lost."""
    counts: dict[LossCause, int] = {}
    for each in lost:
        if each.cause not in UNSEEN:
            counts[each.cause] = counts.get(each.cause, 0) + each.num_tokens
    return counts


_HERE = Lost(0, 0, LossCause.NEW)
"""Stands for a page that is in some tier."""

_FAILURES: dict[str, LossCause] = {
    Failure.MISS: LossCause.STORE_MISSING,
    Failure.CORRUPT: LossCause.STORE_MISSING,
    Failure.STAMP: LossCause.STORE_MISSING,
    Failure.TIMEOUT: LossCause.STORE_TIMEOUT,
    Failure.QUEUE_FULL: LossCause.QUEUE_FULL,
}


def fetch_failure(failure: str) -> LossCause:
    """What a failed fetch means to the request that waited for it."""
    return _FAILURES.get(failure, LossCause.STORE_FAILED)


class Explainer:
    """Asks a ledger about prompts.

    Args:
        ledger: what left, and what is there.
        specs: the model's components.
        page_size: tokens a page.
        identity: what page keys are made of.

    *Thread*: as the ledger.
    """

    def __init__(
        self, ledger: Ledger, specs: Sequence[ComponentSpec], *, page_size: int, identity: bytes
    ) -> None:
        self.ledger = ledger
        self._page = page_size
        self._identity = identity
        paths = [spec for spec in specs if spec.rule == ReuseRule.PATH]
        self._bases = tuple(paths or specs[:1])
        self._has_paths = bool(paths)
        self._others = tuple(spec for spec in specs if spec not in paths)
        self._keys = {spec.name: ComponentKeys(spec) for spec in specs}

    def limit(self, prompt_len: int) -> int:
        """The most that a prompt of this length could reuse, in tokens."""
        return max(0, (prompt_len - 1) // self._page * self._page)

    def unfound(
        self, prompt: Tokens, namespace: Namespace, found: ProbeResult, *, store_answered: bool
    ) -> tuple[Lost, ...]:
        """Why a match found no more than it did: ranges from its boundary to the limit.

        *Caller guarantees*: the ledger is as it was when the match was made.
        """
        limit = self.limit(len(prompt))
        if found.boundary >= limit:
            return ()
        links = _Links(namespace_seed(self._identity, namespace), prompt[:limit], self._page)
        fork = min(found.fork or found.boundary, limit)
        lost = []
        if fork > found.boundary:
            lost.append(self._unmarked(found.boundary, fork, links.first(fork // self._page)))
        lost += self._gone(fork, limit, links)
        if lost and lost[-1].cause is LossCause.NEW:
            last = lost.pop()
            if not store_answered:
                lost.append(Lost(last.begin, last.end, LossCause.STORE_FAILED, detail="L3 did not say"))
            else:
                lost += self._elsewhere(last, prompt, namespace, limit)
        return tuple(lost)

    # ---- a state or a window is missing -------------------------------------------------------
    def _unmarked(self, begin: int, end: int, links: Sequence[bytes]) -> Lost:
        """Path payload goes to ``end``; whose state or window is missing there?"""
        others = self._others or self._bases
        spec = next((spec for spec in others if not self._accepts_any(spec, begin, end, links)), None)
        if spec is None:
            spec = next((spec for spec in others if not self._accepts(spec, end, links)), others[0])
        first = begin // self._page
        if spec.rule == ReuseRule.WINDOW:
            first = window_frontier(end, spec.window_tokens, self._page) // self._page
        keys = self._component_keys(spec, links[first : end // self._page])
        for key in reversed(keys):
            departure = self.ledger.departure(key)
            if departure is not None and departure.cause is not Cause.WINDOW:
                return Lost(begin, end, LossCause.EVICTED, spec.name, departure)
        what = "window" if spec.rule == ReuseRule.WINDOW else "state"
        detail = f"no {what} between {begin:,} and {end:,}"
        return Lost(begin, end, LossCause.NO_CHECKPOINT, spec.name, detail=detail)

    def _accepts_any(self, spec: ComponentSpec, begin: int, end: int, links: Sequence[bytes]) -> bool:
        return any(self._accepts(spec, at, links) for at in range(end, begin, -self._page))

    def _accepts(self, spec: ComponentSpec, end: int, links: Sequence[bytes]) -> bool:
        last = end // self._page
        first = last - 1
        if spec.rule == ReuseRule.WINDOW:
            first = window_frontier(end, spec.window_tokens, self._page) // self._page
        return all(self.ledger.is_resident(key) for key in self._component_keys(spec, links[first:last]))

    # ---- path payload is missing --------------------------------------------------------------
    def _gone(self, begin: int, end: int, links: _Links) -> list[Lost]:
        """What happened to each page from ``begin`` on, like ones together."""
        pages = self._page_losses(begin // self._page, end // self._page, links)
        known = max((place for place, page in enumerate(pages) if page is not None), default=-1)
        lost: list[Lost] = []
        for place, page in enumerate(pages):
            at = begin + place * self._page
            if page is None:
                why = self._unknown(pages[place : known + 1], at)
            elif page is _HERE:  # but behind something that is not
                why = lost[-1] if lost else Lost(at, at, LossCause.FORGOTTEN)
            else:
                why = page
            _append(lost, why, at, at + self._page)
        rest = begin + len(pages) * self._page
        if rest < end:
            _append(lost, Lost(rest, end, LossCause.NEW), rest, end)
        return lost

    def _page_losses(self, first: int, last: int, links: _Links) -> list[Lost | None]:
        """One for each page, up to the last that may be known.

        No path page was ever anywhere without those before it. So while every departure is remembered, nothing
        is known behind the first page that is not.
        """
        pages: list[Lost | None] = []
        stops_early = self._has_paths and not self.ledger.num_forgotten
        for index in range(first, last):
            pages.append(self._page_loss(index, links.at(index)))
            if stops_early and pages[-1] is None:
                break
        return pages

    def _unknown(self, rest: Sequence[Lost | None], at: int) -> Lost:
        """A page that the ledger does not know; ``rest`` from it to the last one known."""
        if not rest:
            return Lost(at, at, LossCause.NEW)
        if self._has_paths:
            return Lost(at, at, LossCause.FORGOTTEN)
        following = next(page for page in rest if page is not None)  # the state that would have covered it
        return Lost(at, at, LossCause.NO_CHECKPOINT) if following is _HERE else following

    def _page_loss(self, index: int, link: bytes) -> Lost | None:
        """How the page was evicted, ``_HERE`` if some tier has it, None if it is not known."""
        is_known = False
        for spec in self._bases:
            key = self._keys[spec.name].key(link)
            departure = self.ledger.departure(key)
            if departure is not None:
                return Lost(index, index, LossCause.EVICTED, spec.name, departure)
            is_known = is_known or self.ledger.is_resident(key)
        return _HERE if is_known else None

    # ---- another namespace --------------------------------------------------------------------
    def _elsewhere(self, lost: Lost, prompt: Tokens, namespace: Namespace, limit: int) -> list[Lost]:
        """Split what is new by whether another namespace knows it."""
        first_page = prompt[: self._page].astype("<i4").tobytes()
        best, other = lost.begin, None
        for candidate in self.ledger.namespaces(first_page):
            if candidate == namespace:
                continue
            links = chain_links(namespace_seed(self._identity, candidate), prompt[:limit], self._page)
            key = self._keys[self._bases[0].name].key
            known = sum(1 for _ in _while_known(self.ledger, [key(link) for link in links])) * self._page
            if known > best:
                best, other = known, candidate
        if other is None:
            return [lost]
        names = [field.name for field in fields(Namespace)]
        parts = [name for name in names if getattr(namespace, name) != getattr(other, name)]
        # Names only: a salt is another tenant's secret.
        detail = f"known in a namespace with another {' and another '.join(parts)}"
        known_there = Lost(lost.begin, best, LossCause.OTHER_NAMESPACE, detail=detail)
        return [known_there] if best == lost.end else [known_there, Lost(best, lost.end, LossCause.NEW)]

    def _component_keys(self, spec: ComponentSpec, links: Sequence[bytes]) -> tuple[PageKey, ...]:
        return self._keys[spec.name].keys(links)


class _Links:
    """The token chain of a prompt, worked out as far as it is asked for."""

    def __init__(self, seed: bytes, tokens: Tokens, page_size: int) -> None:
        self._seed = seed
        self._tokens = tokens
        self._page = page_size
        self._links: list[bytes] = []

    def first(self, num_pages: int) -> list[bytes]:
        known = len(self._links)
        if known < num_pages:
            last = self._links[-1] if known else self._seed
            part = self._tokens[known * self._page : num_pages * self._page]
            self._links += chain_links(last, part, self._page)
        return self._links[:num_pages]

    def at(self, index: int) -> bytes:
        if index >= len(self._links):
            self.first(index + 1)
        return self._links[index]


def _while_known(ledger: Ledger, keys: Sequence[PageKey]) -> Sequence[PageKey]:
    for place, key in enumerate(keys):
        if not ledger.knows(key):
            return keys[:place]
    return keys


def _append(lost: list[Lost], page: Lost, begin: int, end: int) -> None:
    """Add a range, as part of the one before if that is like it."""
    before = lost[-1] if lost else None
    alike = before is not None and (before.cause, before.component, before.departure, before.detail) == (
        page.cause,
        page.component,
        page.departure,
        page.detail,
    )
    if before is not None and alike:
        lost[-1] = Lost(before.begin, end, page.cause, page.component, page.departure, page.detail)
    else:
        lost.append(Lost(begin, end, page.cause, page.component, page.departure, page.detail))
