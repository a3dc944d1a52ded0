"""Chains that only a split keeps apart become one node again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hicache.radix.node import DEVICE, HOST, Node

if TYPE_CHECKING:
    from hicache.radix.forest import Forest


def merge_up(forest: Forest, node: Node) -> bool:
    """Join a node with its parent if only a split keeps them apart; the node survives."""
    parent = node.parent
    if parent is None or not _can_merge(forest, parent, node):
        return False
    grand = parent.parent
    if grand is None:
        return False
    for i in range(forest.num_components):
        if not forest.rules[i].keeps_pages:
            forest.move_kid(node, i, parent, grand)
            continue
        for tier in (DEVICE, HOST):
            head, tail = parent.slots[i][tier], node.slots[i][tier]
            if head is not None and tail is not None:
                node.slots[i][tier] = np.concatenate([head, tail])
        node.used[i] = max(node.used[i], parent.used[i])
    forest.own(parent, node.turn)  # L3 has one opinion of what is one node
    if parent.links is not None and node.links is not None:
        node.links = parent.links + node.links
    else:
        node.links = None
    node.tokens = np.concatenate([parent.tokens, node.tokens])
    node.start = parent.start
    node.created = min(node.created, parent.created)
    node.priority = max(node.priority, parent.priority)
    node.reach = max(node.reach, parent.reach)
    if forest.failed_stores.pop(parent.id, None) is not None:
        forest.failed_stores[node.id] = node
    node.store_failures = max(node.store_failures, parent.store_failures)
    node.parent = grand
    grand.children[forest.edge_key(node.tokens)] = node
    parent.parent = None
    parent.queued.clear()
    parent.sheltered.clear()
    forest.turns.disown(parent)
    forest.num_nodes -= 1
    forest.offer(node)
    return True


def _can_merge(forest: Forest, parent: Node, node: Node) -> bool:
    """Nothing holds the parent's end, and both halves are alike in payload and value."""
    if (
        parent.is_root
        or len(parent.children) != 1
        or parent.holders
        or parent.tickets
        or node.tickets
        or parent.wants_store != node.wants_store
        or (forest.ordering.tells_uses_apart and parent.uses != node.uses)
        or (forest.ordering.tells_ages_apart and parent.created != node.created)
        or (forest.ordering.tells_priorities_apart and parent.priority != node.priority)
        or (forest.ordering.protects_hits and parent.is_protected != node.is_protected)
        or (forest.ordering.spares_tails and parent.reach != node.reach)
        or parent.is_shared != node.is_shared
    ):
        return False
    for i, rule in enumerate(forest.rules):
        # A lock that reaches into the parent is the parent's too; one that does not stays right.
        if parent.locks[i]:
            return False
        held, alike = parent.slots[i], node.slots[i]
        if not rule.keeps_pages:
            if held[DEVICE] is not None or held[HOST] is not None or parent.stored[i]:
                return False
            continue
        if parent.stored[i] != node.stored[i]:
            return False
        if parent.mark and not rule.is_prefix and parent.fastest(i) is not None:
            return False
        if any((held[t] is None) != (alike[t] is None) for t in (DEVICE, HOST)):
            return False
        # A path's recency is that of its most recently used descendant, so a parent that is
        # not newer than its only child says nothing of its own.
        newer = parent.used[i] - node.used[i]
        if newer > 0 or (newer and not rule.is_prefix and parent.fastest(i) is not None):
            return False
    return True
