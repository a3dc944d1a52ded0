//! Payload comes to a tier or leaves it, with all that has to know.

use crate::forest::Forest;
use crate::interface::{Cause, Regard, Tier};
use crate::node::{NodeIdx, NONE};
use crate::slots::Slots;

impl Forest {
    /// Payload is in the tier now. *Caller guarantees*: it was not, and the bytes are there.
    pub fn attach(&mut self, node: NodeIdx, component: usize, tier: Tier, slots: Slots, cause: Cause) {
        if self.node(node).is_protected() {
            self.num_protected[component][tier as usize] += slots.len();
        }
        *self.slots_mut(node, component, tier) = slots;
        self.count_kid(node, component, tier, true);
        self.emit(true, node, component, tier, cause);
        self.offer(node);
        self.soil(node);
    }

    /// Free the payload's slots in the tier.
    pub fn detach(&mut self, node: NodeIdx, component: usize, tier: Tier, cause: Cause) {
        let slots = self.take_slots(node, component, tier);
        if slots.is_empty() {
            return;
        }
        if self.node(node).is_protected() {
            self.num_protected[component][tier as usize] -= slots.len();
        }
        self.count_kid(node, component, tier, false);
        self.emit(false, node, component, tier, cause);
        self.counters.removed[tier as usize][cause as usize] += slots.len() as u64;
        self.counters.left[component][tier as usize][cause as usize] += slots.len() as u64;
        self.free(component, tier, slots);
        self.left(node, component, tier);
    }

    /// What is believed of L3.
    pub fn set_stored(&mut self, node: NodeIdx, component: usize, stored: bool, cause: Cause) {
        if self.held(node, component).stored() == stored {
            return;
        }
        self.lower_mut(node, component).stored = stored;
        self.count_kid(node, component, Tier::Store, stored);
        let slots = self.num_slots(node, component);
        if stored {
            self.num_stored_pages += slots;
        } else {
            self.num_stored_pages -= slots;
        }
        self.emit(stored, node, component, Tier::Store, cause);
        let regard = self.regard(node);
        if stored {
            self.offer(node);
            if regard != Regard::Plain {
                self.hint(node, component, regard);
            }
        } else {
            if regard > Regard::Plain {
                self.hint(node, component, Regard::Plain); // L3 may have it still, and nobody would take that back later
            }
            self.counters.left[component][Tier::Store as usize][cause as usize] += slots as u64;
            self.has_holes |= self.held(node, component).kids(Tier::Store) > 0;
            self.left(node, component, Tier::Store);
        }
        self.soil(node);
    }

    fn count_kid(&mut self, node: NodeIdx, component: usize, tier: Tier, arrived: bool) {
        let parent = self.node(node).parent;
        self.doubt(node);
        if parent != NONE {
            self.doubt(parent);
            let kids = self.kids_mut(parent, component, tier);
            *kids = if arrived { *kids + 1 } else { *kids - 1 };
        }
    }
}
