"""What a tree has to answer, found by brute force from a flat list of what is resident where.

The model knows no nodes, no votes, no locks and no order of eviction. It holds a set of
``(namespace, component, tier, prefix)`` and tries every boundary from the deepest down.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hicache.radix.interface import NodeView, TreeConfig
from hicache.testing.payloads import TOKEN_BYTES, node_stamps, walk_views
from hicache.types import ComponentSpec, Namespace, ReuseRule, Tier, TierTokens

ANY_TIER = (Tier.DEVICE, Tier.HOST, Tier.STORE)


@dataclass(frozen=True, slots=True)
class Expected:
    """What ``probe`` has to say.

    Args:
        boundary, source, by_component, fork: as in ``ProbeResult``.
        walked: the longest run of pages that the tree knows, up to the cap.
        fork: as in ``ProbeResult``; a model without a path component has equal tokens to go by.
    """

    boundary: int
    walked: int
    source: TierTokens
    by_component: Mapping[str, TierTokens]
    fork: int | None


class BruteForceModel:
    """The cache as a flat set.

    Fill it from a snapshot (``rebuild``), or by its own rules with ``publish`` and ``place``, which
    suits a cache without pressure: nothing ever leaves.
    """

    def __init__(self, config: TreeConfig) -> None:
        self._page_size = config.page_size
        self._page_bytes = TOKEN_BYTES * config.page_size
        self._specs = {spec.name: spec for spec in config.components}
        self._paths = [s.name for s in config.components if s.rule == ReuseRule.PATH]
        self.primary = self._paths[0] if self._paths else config.components[0].name
        self.component_names = tuple(self._specs)
        self.sequences: list[tuple[Namespace, bytes]] = []
        self.resident: set[tuple[Namespace, str, Tier, bytes]] = set()
        self._known: set[tuple[Namespace, bytes]] = set()

    # ---- fill --------------------------------------------------------------------------------
    def rebuild(self, views: Iterable[NodeView]) -> None:
        """Take over a core's snapshot."""
        self.resident.clear()
        self._known.clear()
        self.sequences.clear()
        for view, path in walk_views(views):
            self._note_sequence(view.namespace, path)
            for component, tier in view.slots:
                spec = self._specs[component]
                for stamp in node_stamps(view, path, spec, self._page_size):
                    self.resident.add((view.namespace, component, tier, stamp.tokens))

    def publish(self, namespace: Namespace, path: bytes) -> None:
        """A request left a mark at the end of ``path``: all that reuse there needs is on the device.

        Of a path that is no whole number of pages no state is left.
        """
        whole = path[: self._whole(path) * TOKEN_BYTES]
        self._note_sequence(namespace, whole)
        boundary = len(whole) // TOKEN_BYTES
        for name, spec in self._specs.items():
            if spec.is_checkpoint:
                if whole and len(whole) == len(path):
                    self.resident.add((namespace, name, Tier.DEVICE, whole))
                continue
            for end in self._needed(spec, boundary):
                self.resident.add((namespace, name, Tier.DEVICE, whole[: end * TOKEN_BYTES]))

    def place(
        self, namespace: Namespace, path: bytes, component: str, tier: Tier, pages: Iterable[int]
    ) -> None:
        """Let pages (a checkpoint: the states at their ends) be resident in a tier."""
        self._note_sequence(namespace, path[: self._whole(path) * TOKEN_BYTES])
        for page in pages:
            self.resident.add((namespace, component, tier, path[: (page + 1) * self._page_bytes]))

    def _note_sequence(self, namespace: Namespace, path: bytes) -> None:
        self.sequences.append((namespace, path))
        for end in range(len(path), 0, -self._page_bytes):
            if (namespace, path[:end]) in self._known:
                break
            self._known.add((namespace, path[:end]))

    # ---- ask ---------------------------------------------------------------------------------
    def expect(self, namespace: Namespace, path: bytes, *, cap: bool = True) -> Expected:
        """What a match of ``path`` has to find."""
        limit = self.limit(path, cap=cap)
        boundary = self.deepest(namespace, path, limit)
        by_component = {
            name: self._count(spec, namespace, path, boundary) for name, spec in self._specs.items()
        }
        walked = min(limit, self._walk(namespace, path))
        depth = 0 if self._paths else walked
        while self._paths and depth < limit:
            end = depth + self._page_size
            if any(self.tier_of(c, namespace, path, end) is None for c in self._paths):
                break
            depth = end
        return Expected(
            boundary=boundary,
            walked=walked,
            source=_source(by_component[self.primary], boundary),
            by_component=by_component,
            fork=depth if depth > boundary else None,
        )

    def limit(self, path: bytes, *, cap: bool) -> int:
        """The deepest boundary that a prompt of this length may have."""
        num_tokens = len(path) // TOKEN_BYTES
        return max(0, num_tokens - cap) // self._page_size * self._page_size

    def deepest(
        self,
        namespace: Namespace,
        path: bytes,
        limit: int,
        tiers: Sequence[Tier] = ANY_TIER,
    ) -> int:
        """The deepest legal boundary up to ``limit``, counting only payload in ``tiers``."""
        for boundary in range(limit, 0, -self._page_size):
            if self.is_legal(namespace, path, boundary, tiers):
                return boundary
        return 0

    def is_legal(
        self,
        namespace: Namespace,
        path: bytes,
        boundary: int,
        tiers: Sequence[Tier] = ANY_TIER,
    ) -> bool:
        """May ``[0, boundary)`` be reused? Every component must have what its rule needs."""
        return all(
            self.tier_of(name, namespace, path, end, tiers) is not None
            for name, spec in self._specs.items()
            for end in self._needed(spec, boundary)
        )

    def tier_of(
        self,
        component: str,
        namespace: Namespace,
        path: bytes,
        end: int,
        tiers: Sequence[Tier] = ANY_TIER,
    ) -> Tier | None:
        """The fastest of ``tiers`` that has the page, or the state, that ends at ``end``."""
        prefix = path[: end * TOKEN_BYTES]
        for tier in tiers:
            if (namespace, component, tier, prefix) in self.resident:
                return tier
        return None

    def needed(self, component: str, boundary: int) -> range:
        """Ends of the pages (of the state) of a component that reuse at ``boundary`` needs."""
        return self._needed(self._specs[component], boundary)

    def _needed(self, spec: ComponentSpec, boundary: int) -> range:
        if boundary == 0:
            return range(0)
        first = 0
        if spec.is_checkpoint:
            first = boundary - self._page_size
        elif spec.rule == ReuseRule.WINDOW:
            first = max(0, boundary - spec.window_tokens) // self._page_size * self._page_size
        return range(first + self._page_size, boundary + 1, self._page_size)

    def _count(self, spec: ComponentSpec, namespace: Namespace, path: bytes, boundary: int) -> TierTokens:
        tokens = dict.fromkeys(Tier, 0)
        each = boundary if spec.is_checkpoint else self._page_size
        for end in self._needed(spec, boundary):
            tier = self.tier_of(spec.name, namespace, path, end)
            if tier is not None:
                tokens[tier] += each
        return TierTokens(tokens[Tier.DEVICE], tokens[Tier.HOST], tokens[Tier.STORE])

    def _walk(self, namespace: Namespace, path: bytes) -> int:
        walked = 0
        while (
            walked + self._page_bytes <= len(path)
            and (namespace, path[: walked + self._page_bytes]) in self._known
        ):
            walked += self._page_bytes
        return walked // TOKEN_BYTES

    def _whole(self, path: bytes) -> int:
        return len(path) // self._page_bytes * self._page_size


def _source(primary: TierTokens, boundary: int) -> TierTokens:
    """Tokens before a window need no payload; they count with the fastest tier."""
    ahead = boundary - primary.total
    return TierTokens(primary.device + ahead, primary.host, primary.store)
