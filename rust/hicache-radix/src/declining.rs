//! What L3 declines: payload that nobody is expected to come back for.
//!
//! With `declines_over` a node is declined when it is over (`Forest::regard`) and nothing below it waits for L3 or is on
//! its way there: prefixes are persisted no later than their suffixes, so what others need below it takes it along. A
//! node that waits for its turn to be written stops waiting when it is over; what is being written already is
//! written. Nothing is remembered of it: the next request that uses the node makes it worth writing again, and the
//! write policy asks for that as ever.

use crate::forest::Forest;
use crate::interface::Regard;
use crate::node::{NodeIdx, NONE};

impl Forest {
    /// Whether L3 is not to have the node for its own sake, nor for what hangs on it.
    pub fn is_unwanted(&self, node: NodeIdx) -> bool {
        self.config.declines_over
            && self.regard(node) == Regard::Over
            && !self.children(node).any(|child| self.node(child).wants_store())
    }

    /// The node may be over now: if it only waits for L3, it waits no longer, nor does what waited for its sake.
    pub fn unqueue(&mut self, node: NodeIdx) {
        let mut place = node;
        while place != NONE && self.node(place).wants_store() && self.is_unwanted(place) {
            self.node_mut(place).set_wants_store(false);
            self.soil(place);
            place = self.node(place).parent;
        }
    }
}
