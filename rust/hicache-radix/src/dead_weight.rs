//! How much of each tier no vote can accept again, kept up to date and never walked for.

use std::collections::HashMap;

use crate::forest::Forest;
use crate::interface::Tier;
use crate::node::NodeIdx;

/// (component, tier, slots) of one node.
pub type Weights = Vec<(usize, Tier, usize)>;

/// Slots of dead weight, per component and tier.
///
/// Whatever may change a node's answer doubts it; when the operation ends, those nodes are asked again, so
/// the cost is that of the change and not of the tree. What lies above dead ends counts once they are gone.
#[derive(Debug, Default)]
pub struct DeadWeight {
    counted: HashMap<NodeIdx, Weights>,
    doubtful: Vec<NodeIdx>,
    pub slots: Vec<[usize; 3]>,
}

impl DeadWeight {
    pub fn new(num_components: usize) -> Self {
        Self { slots: vec![[0; 3]; num_components], ..Self::default() }
    }

    /// The node has left the tree; its place may be used again.
    pub fn forget(&mut self, node: NodeIdx) {
        for (i, tier, slots) in self.counted.remove(&node).unwrap_or_default() {
            self.slots[i][tier as usize] -= slots;
        }
    }

    fn count(&mut self, node: NodeIdx, weights: Weights) {
        for (i, tier, slots) in &weights {
            self.slots[*i][*tier as usize] += slots;
        }
        if !weights.is_empty() {
            self.counted.insert(node, weights);
        }
    }
}

impl Forest {
    /// The node's payload, children, leases or transfers changed.
    pub fn doubt(&mut self, node: NodeIdx) {
        // A model whose components need nothing beside them has no dead weight.
        if self.has_dead_weight {
            self.dead_weight.doubtful.push(node);
        }
    }

    /// Ask those nodes again.
    pub fn settle_dead_weight(&mut self) {
        while let Some(node) = self.dead_weight.doubtful.pop() {
            self.dead_weight.forget(node);
            let weights = self.weights_of(node);
            self.dead_weight.count(node, weights);
        }
    }

    /// What is dead weight here: nothing while a lease stands on it.
    pub fn weights_of(&self, node: NodeIdx) -> Weights {
        let place = self.node(node);
        let mut weights = Weights::new();
        if !place.is_alive() || place.is_root() || place.holders() > 0 {
            return weights;
        }
        for i in (0..self.num_components).filter(|i| self.is_dead_weight(node, *i)) {
            let tiers = Tier::ALL.into_iter().filter(|tier| self.held(node, i).has(*tier));
            weights.extend(tiers.map(|tier| (i, tier, self.num_slots(node, i))));
        }
        weights
    }
}
