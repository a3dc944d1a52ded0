//! Path: every token from the root is needed (full attention).

use crate::forest::Forest;
use crate::interface::Tier;
use crate::node::{Held, NodeIdx};
use crate::rules::{Lock, Validator};

pub fn vote(state: &mut Validator, has: bool) -> bool {
    state.is_unbroken = state.is_unbroken && has;
    state.is_unbroken
}

/// Hold the path from its end up to where L1 begins.
///
/// What has a child in L1 never leaves L1, so the deepest node there protects all above it. Below,
/// every node is held, for payload may arrive there piece by piece:
///
/// ```text
/// root -- L1 -- L1 -- L2 -- L2 -- L3
///                ^     ^     ^     ^
/// ```
pub fn lock(forest: &mut Forest, component: usize, node: NodeIdx) -> Lock {
    let deepest = forest.up(node).find(|place| forest.held(*place, component).on_device());
    let edge = deepest.map_or(0, |place| forest.node(place).start());
    forest.lock_span(component, node, edge)
}

pub fn may_leave(held: Held, tier: Tier) -> bool {
    held.kids(Tier::Device) == 0 && (tier == Tier::Device || held.kids(Tier::Host) == 0)
}
