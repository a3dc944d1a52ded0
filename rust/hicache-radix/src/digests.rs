//! Page keys of nodes, and the residency events that name them.

use crate::forest::Forest;
use crate::interface::{Arrived, Cause, ResidencyEvent, Tier};
use crate::keys::{chain_links, Key};
use crate::node::NodeIdx;

impl Forest {
    /// Compute the token chain's digests of this node's pages, and those before that lack them.
    pub fn ensure_links(&mut self, node: NodeIdx) {
        let missing: Vec<NodeIdx> = self.up(node).take_while(|at| self.known_links(*at).is_none()).collect();
        for place in missing.into_iter().rev() {
            let parent = self.node(place).parent;
            let last = self.known_links(parent).and_then(|links| links.last().copied());
            let last = last.unwrap_or_else(|| self.root_info(place).seed);
            let mut links = Vec::with_capacity(self.node(place).len() / self.page_size);
            chain_links(last, self.tokens_of(place), self.page_size, &mut links);
            self.set_links(place, links);
        }
    }

    /// The token chain's digests of this node's pages.
    pub fn links(&mut self, node: NodeIdx) -> &[Key] {
        self.ensure_links(node);
        self.known_links(node).unwrap_or_default()
    }

    fn known_links(&self, node: NodeIdx) -> Option<&[Key]> {
        self.links.get(node as usize)?.as_deref().map(Vec::as_slice)
    }

    /// Take the digests out, if they are known.
    pub fn take_links(&mut self, node: NodeIdx) -> Option<Box<Vec<Key>>> {
        self.links.get_mut(node as usize)?.take()
    }

    pub fn set_links(&mut self, node: NodeIdx, links: Vec<Key>) {
        while self.links.len() <= node as usize {
            self.links.push(None);
        }
        self.links[node as usize] = Some(Box::new(links));
    }

    /// Page keys of the component at this node, one a slot.
    pub fn keys(&mut self, node: NodeIdx, component: usize) -> Vec<Key> {
        self.ensure_links(node);
        let links = self.known_links(node).unwrap_or_default();
        let first = if self.rules[component].keeps_pages { 0 } else { links.len().saturating_sub(1) };
        self.component_keys[component].keys(&links[first..])
    }

    pub fn key_of(&self, component: usize, link: &Key) -> Key {
        self.component_keys[component].key(link)
    }

    pub fn emit(&mut self, stored: bool, node: NodeIdx, component: usize, tier: Tier, cause: Cause) {
        if self.config.emit_events {
            let keys = self.keys(node, component);
            let arrived = if stored { Some(self.arrived(node, component)) } else { None };
            self.events.push(ResidencyEvent { stored, tier, component, keys, cause, arrived });
        }
    }

    fn arrived(&mut self, node: NodeIdx, component: usize) -> Arrived {
        self.ensure_links(node);
        let links = self.known_links(node).unwrap_or_default();
        let first = if self.rules[component].keeps_pages { 0 } else { links.len().saturating_sub(1) };
        let before = match first.checked_sub(1) {
            Some(last) => links.get(last).copied(),
            // A root has no links.
            None => self.known_links(self.node(node).parent).and_then(|links| links.last().copied()),
        };
        Arrived {
            parent: before.map(|link| self.key_of(component, &link)),
            tokens: self.tokens_of(node)[first * self.page_size..].to_vec(),
            namespace: self.root_info(node).namespace.clone(),
        }
    }

    /// Tell of all payload: it goes with the whole forest.
    pub fn note_all_removed(&mut self) {
        for root in self.all_roots() {
            let mut pending: Vec<_> = self.children(root).collect();
            while let Some(node) = pending.pop() {
                for i in 0..self.num_components {
                    for tier in Tier::ALL {
                        if self.held(node, i).has(tier) {
                            self.emit(false, node, i, tier, Cause::Reset);
                        }
                    }
                }
                pending.extend(self.children(node));
            }
        }
    }
}
