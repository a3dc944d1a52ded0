//! Path: every token from the root is needed (full attention).

use smallvec::SmallVec;

use crate::forest::Forest;
use crate::interface::Tier;
use crate::node::{Held, NodeIdx};
use crate::rules::{Lock, Validator};

pub fn vote(state: &mut Validator, has: bool) -> bool {
    state.is_unbroken = state.is_unbroken && has;
    state.is_unbroken
}

/// Hold the path without walking it.
///
/// A lease stands at the path's end, and what has a resident child never leaves a tier, so it is
/// enough to lock the deepest node of each tier on the way:
///
/// ```text
/// root -- L1 -- L1 -- L2 -- L2 -- L3
///                ^           ^
/// ```
pub fn lock(forest: &mut Forest, component: usize, node: NodeIdx) -> Lock {
    let mut nodes = SmallVec::new();
    let mut found_host = false;
    for place in forest.up(node) {
        let held = forest.held(place, component);
        if held.on_device() {
            nodes.push(place);
            break;
        }
        if held.in_host() && !found_host {
            nodes.push(place);
            found_host = true;
        }
    }
    forest.lock_nodes(component, nodes)
}

pub fn may_leave(held: &Held, tier: Tier) -> bool {
    held.kids[0] == 0 && (tier == Tier::Device || held.kids[1] == 0) && held.locks == 0
}
