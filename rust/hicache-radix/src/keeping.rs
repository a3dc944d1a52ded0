//! Prefixes that are to be kept: what is on the way to one goes last of what may go.

use crate::forest::Forest;
use crate::interface::Namespace;
use crate::tokens::Token;

impl Forest {
    /// Prefer to keep what there is of a prefix, floored to a page; returns how many tokens that is.
    pub fn keep<T: Token>(&mut self, tokens: &[T], namespace: &Namespace) -> usize {
        let found = self.walk(namespace, tokens, tokens.len() / self.page_size * self.page_size);
        for (node, end) in found.stops {
            // A prefix that ends inside a node: only what is before its end is to be kept.
            let is_cut = end < self.node(node).end() && !self.node(node).is_kept();
            let start = self.node(node).start();
            let place = if is_cut { self.split(node, (end - start) / self.page_size) } else { node };
            self.set_kept(place, true);
            self.soil(place);
        }
        found.length
    }

    /// Prefer it no longer: nothing on the way to its end is kept.
    pub fn unkeep<T: Token>(&mut self, tokens: &[T], namespace: &Namespace) {
        let found = self.walk(namespace, tokens, tokens.len() / self.page_size * self.page_size);
        for (node, _) in found.stops {
            self.set_kept(node, false);
            self.offer(node);
            self.soil(node);
        }
    }
}
