//! Chains that only a split keeps apart become one node again.

use crate::forest::Forest;
use crate::interface::Tier;
use crate::node::{NodeIdx, NONE};
use crate::slots::Slots;

impl Forest {
    /// Join a node with its parent if only a split keeps them apart; the node survives.
    pub fn merge_up(&mut self, node: NodeIdx) -> bool {
        let parent = self.node(node).parent;
        if parent == NONE || !self.can_merge(parent, node) {
            return false;
        }
        let grand = self.node(parent).parent;
        for i in 0..self.num_components {
            if !self.rules[i].keeps_pages {
                self.move_kid(node, i, parent, grand);
                continue;
            }
            for tier in Tier::POOLED {
                if self.held(node, i).has(tier) {
                    let (head, tail) = (self.take_slots(parent, i, tier), self.take_slots(node, i, tier));
                    *self.slots_mut(node, i, tier) = Slots::join(head, tail);
                }
            }
            let above = self.held(parent, i).used();
            let merged = self.upper_mut(node, i);
            merged.used = merged.used.max(above);
        }
        self.own(parent, self.turns.of(node)); // L3 has one opinion of what is one node
        if let (Some(mut links), Some(tail)) = (self.take_links(parent), self.take_links(node)) {
            links.extend_from_slice(&tail);
            self.set_links(node, *links);
        }
        let run = self.tokens.join(self.node(parent).place(), self.node(node).place());
        let above = self.node(parent);
        let (parent_id, start, created) = (above.id, above.start, above.created);
        let (failures, priority) = (above.store_failures(), above.priority());
        let reach = self.reach(parent);
        self.note_use(node, priority, reach);
        let merged = self.node_mut(node);
        merged.run = run;
        merged.start = start;
        merged.created = merged.created.min(created);
        merged.hold(|busy| busy.store_failures = busy.store_failures.max(failures));
        if self.failed_stores.remove(&parent_id).is_some() {
            self.note_failed_store(node);
        }
        self.replace_child(grand, parent, node);
        self.bury(parent);
        self.doubt(node);
        self.num_nodes -= 1;
        self.offer(node);
        true
    }

    /// L3 did not take what is here.
    pub fn note_failed_store(&mut self, node: NodeIdx) {
        let id = self.node(node).id;
        self.failed_stores.entry(id).or_insert((self.num_failed_stores, node));
        self.num_failed_stores += 1;
    }

    /// Nothing holds the parent's end, and both halves are alike in payload and value.
    fn can_merge(&self, parent: NodeIdx, node: NodeIdx) -> bool {
        let (above, below) = (self.node(parent), self.node(node));
        if above.is_root()
            || self.only_child(parent).is_none()
            || above.holders() > 0
            || above.has_tickets()
            || below.has_tickets()
            || above.wants_store() != below.wants_store()
            // A lock that reaches into the parent is the parent's too; one that does not stays right.
            || !above.locks().is_empty()
        {
            return false;
        }
        let eviction = &self.config.eviction;
        if (eviction.tells_uses_apart() && above.uses() != below.uses())
            || (eviction.tells_ages_apart() && above.created != below.created)
            || (eviction.tells_priorities_apart() && above.priority() != below.priority())
            || above.is_shared() != below.is_shared()
            || above.is_kept() != below.is_kept()
            || (eviction.protects_hits() && above.is_protected() != below.is_protected())
            || (eviction.spares_tails() && self.reach(parent) != self.reach(node))
        {
            return false;
        }
        (0..self.num_components).all(|i| {
            let rule = &self.rules[i];
            let (held, alike) = (self.held(parent, i), self.held(node, i));
            if !rule.keeps_pages {
                return held.fastest().is_none();
            }
            if held.stored() != alike.stored()
                || held.on_device() != alike.on_device()
                || held.in_host() != alike.in_host()
            {
                return false;
            }
            if above.mark() && !rule.is_prefix && held.fastest().is_some() {
                return false;
            }
            // A path's recency is that of its most recently used descendant, so a parent that is not
            // newer than its only child says nothing of its own.
            let newer = held.used() - alike.used();
            newer <= 0 && (newer == 0 || rule.is_prefix || held.fastest().is_none())
        })
    }
}
