"""Prefixes that a client wants kept for a time, like a system prompt: a preference that lapses, never a pin.

The tree knows which of its pages belong to one and lets them go last in every tier, under every policy; of clocks
and of what is not there yet it knows nothing. So this remembers what is to be kept until when, and tells the tree
again when such a prefix has come (back).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hicache.clock import Clock
from hicache.errors import CapacityError
from hicache.radix.interface import Tokens, TreeCore
from hicache.types import Namespace

MAX_KEPT = 1024
"""Prefixes that are kept at the same time, at most."""
MAX_KEPT_TOKENS = 4_000_000
"""Tokens of all of them together, at most: 16 MB here."""
_Key = tuple[Namespace, bytes]


@dataclass(frozen=True, slots=True)
class _Kept:
    tokens: Tokens
    namespace: Namespace
    until_s: float


class KeptPrefixes:
    """What is to be kept, and until when.

    *Thread*: the caller holds the cache's lock.
    """

    def __init__(self, clock: Clock, page_size: int) -> None:
        self._clock = clock
        self._page_size = page_size
        # By namespace and first page; few share one, and a request looks at those of its own alone.
        self._by_start: dict[_Key, dict[bytes, _Kept]] = {}
        self._num_tokens = 0
        self._num = 0
        self._hints: Counter[tuple[str, bool]] = Counter()
        self._due_s = float("inf")  # when the next one lapses; no later

    def __len__(self) -> int:
        return self._num

    @property
    def num_tokens(self) -> int:
        """Of all that is kept; what two prefixes share counts for each."""
        return self._num_tokens

    def hints(self) -> dict[tuple[str, bool], int]:
        """How often ``keep`` and ``unkeep`` were called, and whether for a prefix that there was."""
        return dict(self._hints)

    def keep(self, core: TreeCore, tokens: Tokens, namespace: Namespace, for_s: float) -> int:
        """Prefer to keep a prefix, floored to a page, from now on; returns how many tokens the tree has of it.

        Raises:
            CapacityError: too many are kept already; nothing has changed.
        """
        self.lapse(core)
        whole = self._whole(tokens, "keep")
        key, name = self._key(whole, namespace), whole.tobytes()
        known = self._by_start.get(key, {}).get(name)
        if known is None:
            self._check_room(len(whole))
            self._num += 1
            self._num_tokens += len(whole)
        until_s = self._clock.now_s() + for_s
        self._by_start.setdefault(key, {})[name] = _Kept(whole.copy(), namespace, until_s)
        self._due_s = min(self._due_s, until_s)
        self._hints["keep", True] += 1
        return core.keep(whole, namespace)

    def _check_room(self, num_tokens: int) -> None:
        if self._num >= MAX_KEPT:
            raise CapacityError(
                f"{self._num} prefixes are kept, the most there may be; unkeep one, or wait until one lapses",
                required_slots=1,
                free_slots=0,
            )
        free = MAX_KEPT_TOKENS - self._num_tokens
        if num_tokens > free:
            raise CapacityError(
                f"a prefix of {num_tokens} tokens asked to be kept, {free} of {MAX_KEPT_TOKENS} are left;"
                " unkeep one, or keep a shorter one",
                required_slots=num_tokens,
                free_slots=free,
            )

    def unkeep(self, core: TreeCore, tokens: Tokens, namespace: Namespace) -> bool:
        """Take ``keep`` back. False if just this prefix is not kept (any more)."""
        self.lapse(core)
        whole = self._whole(tokens, "unkeep")
        key = self._key(whole, namespace)
        kept = self._by_start.get(key, {}).pop(whole.tobytes(), None)
        self._hints["unkeep", kept is not None] += 1
        if kept is not None:
            self._let_go(core, key, [kept])
        return kept is not None

    def _let_go(self, core: TreeCore, key: _Key, over: list[_Kept]) -> None:
        """These are kept no longer, but what others share with them is."""
        for kept in over:
            self._num -= 1
            self._num_tokens -= len(kept.tokens)
            core.unkeep(kept.tokens, kept.namespace)
        for kept in self._by_start[key].values():
            core.keep(kept.tokens, kept.namespace)
        if not self._by_start[key]:
            del self._by_start[key]

    def lapse(self, core: TreeCore) -> None:
        """Keep no longer what was to be kept until now."""
        now_s = self._clock.now_s()
        if now_s < self._due_s:
            return
        for key, those in list(self._by_start.items()):
            over = [name for name, kept in those.items() if kept.until_s <= now_s]
            if over:
                self._let_go(core, key, [those.pop(name) for name in over])
        self._due_s = min(
            (kept.until_s for those in self._by_start.values() for kept in those.values()),
            default=float("inf"),
        )

    def note(self, core: TreeCore, tokens: Tokens, namespace: Namespace) -> None:
        """A request has published these: what of them is to be kept may have come just now."""
        for kept in self._known(tokens, namespace):
            end = len(kept.tokens)
            last = slice(end - self._page_size, end)
            if np.array_equal(
                tokens[last], kept.tokens[last]
            ):  # else it is not that prefix, or not yet whole
                core.keep(kept.tokens, namespace)

    def ends(self, tokens: Tokens, namespace: Namespace) -> tuple[int, ...]:
        """Lengths of the kept prefixes that these tokens begin with: a hybrid model needs a mark at each."""
        return tuple(
            len(kept.tokens)
            for kept in self._known(tokens, namespace)
            if np.array_equal(tokens[: len(kept.tokens)], kept.tokens)
        )

    def _known(self, tokens: Tokens, namespace: Namespace) -> Iterable[_Kept]:
        """Those whose first page is that of the tokens."""
        if not self._num or len(tokens) < self._page_size:
            return ()
        return self._by_start.get(self._key(tokens, namespace), {}).values()

    def _whole(self, tokens: Tokens, call: str) -> Tokens:
        length = len(tokens) // self._page_size * self._page_size
        if not length:
            raise ValueError(
                f"{call}: a prefix of {len(tokens)} tokens; expected at least a page of {self._page_size}"
            )
        return tokens[:length]

    def _key(self, tokens: Tokens, namespace: Namespace) -> _Key:
        return namespace, tokens[: self._page_size].astype("int32").tobytes()
