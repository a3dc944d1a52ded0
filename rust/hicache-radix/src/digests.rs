//! Page keys of nodes, and the residency events that name them.

use crate::forest::Forest;
use crate::interface::{Cause, ResidencyEvent, Tier};
use crate::keys::{chain_links, Key};
use crate::node::NodeIdx;

impl Forest {
    /// Compute the token chain's digests of this node's pages, and those before that lack them.
    pub fn ensure_links(&mut self, node: NodeIdx) {
        let missing: Vec<NodeIdx> = self.up(node).take_while(|at| self.node(*at).links.is_none()).collect();
        for place in missing.into_iter().rev() {
            let parent = self.node(place).parent;
            let last = match &self.node(parent).links {
                Some(links) => links.last().copied(),
                None => None,
            };
            let last = last.unwrap_or_else(|| self.root_info(place).seed);
            let mut links = Vec::with_capacity(self.node(place).len() / self.page_size);
            chain_links(last, self.tokens_of(place), self.page_size, &mut links);
            self.node_mut(place).links = Some(Box::new(links));
        }
    }

    /// The token chain's digests of this node's pages.
    pub fn links(&mut self, node: NodeIdx) -> &[Key] {
        self.ensure_links(node);
        self.node(node).links.as_deref().map_or(&[], Vec::as_slice)
    }

    /// Page keys of the component at this node, one a slot.
    pub fn keys(&mut self, node: NodeIdx, component: usize) -> Vec<Key> {
        self.ensure_links(node);
        let links = self.node(node).links.as_deref().map_or(&[][..], Vec::as_slice);
        let first = if self.rules[component].keeps_pages { 0 } else { links.len().saturating_sub(1) };
        self.component_keys[component].keys(&links[first..])
    }

    pub fn key_of(&self, component: usize, link: &Key) -> Key {
        self.component_keys[component].key(link)
    }

    pub fn emit(&mut self, stored: bool, node: NodeIdx, component: usize, tier: Tier, cause: Cause) {
        if self.config.emit_events {
            let keys = self.keys(node, component);
            self.events.push(ResidencyEvent { stored, tier, component, keys, cause });
        }
    }

    /// Tell of payload that goes with the whole forest.
    pub fn note_removed(&mut self, node: NodeIdx, component: usize, tier: Tier, cause: Cause) {
        self.emit(false, node, component, tier, cause);
    }
}
