"""Digests of the token chain, page keys, and the events that name them."""

from __future__ import annotations

from hicache.events import Cause, ResidencyChange, ResidencyEvent
from hicache.radix.forest_state import ForestState
from hicache.radix.keys import chain_links
from hicache.radix.node import Node
from hicache.types import PageKey, Tier


class Digests(ForestState):
    """A forest that knows what L3 calls its pages."""

    def links(self, node: Node) -> list[bytes]:
        """The token chain's digests of this node's pages."""
        if node.links is None:
            missing = []
            for place in node.up():
                if place.links is not None:
                    break
                missing.append(place)
            for place in reversed(missing):
                parent = place.parent
                assert parent is not None
                last = parent.seed if parent.is_root else self.links(parent)[-1]
                place.links = chain_links(last, place.tokens, self.page_size)
        assert node.links is not None
        return node.links

    def keys(self, node: Node, component: int) -> tuple[PageKey, ...]:
        """Page keys of the component at this node, one a slot."""
        links = self.links(node)
        if not self.rules[component].keeps_pages:
            links = links[-1:]
        return self._component_keys[component].keys(links)

    def key_of(self, component: int, link: bytes) -> PageKey:
        """The component's page key at a link of the chain."""
        return self._component_keys[component].key(link)

    def _emit(self, change: ResidencyChange, node: Node, component: int, tier: Tier, cause: Cause) -> None:
        if not self.config.emit_events:
            return
        name, keys = self.specs[component].name, self.keys(node, component)
        if change is ResidencyChange.REMOVED:
            self.events.append(ResidencyEvent(change, tier, name, keys, cause))
            return
        links = self.links(node)
        first = 0 if self.rules[component].keeps_pages else len(links) - 1
        parent = node.parent
        assert parent is not None
        before = links[first - 1] if first else None if parent.is_root else self.links(parent)[-1]
        self.events.append(
            ResidencyEvent(
                change,
                tier,
                name,
                keys,
                cause,
                parent=None if before is None else self.key_of(component, before),
                tokens=node.tokens[first * self.page_size :].astype("<i4").tobytes(),
                namespace=node.namespace,
            )
        )

    def note_removed(self, node: Node, component: int, tier: Tier, cause: Cause) -> None:
        """Tell of payload that goes with the whole forest."""
        self._emit(ResidencyChange.REMOVED, node, component, tier, cause)
