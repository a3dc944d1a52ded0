//! Checkpoint: the exact state at the boundary is needed (Mamba, linear attention).

use crate::forest::Forest;
use crate::node::{Node, NodeIdx};
use crate::rules::Lock;

pub fn vote(has: bool, node: &Node, end: usize) -> bool {
    end == node.end() && has
}

/// Hold the state: the node that has the last token.
pub fn lock(forest: &mut Forest, component: usize, node: NodeIdx) -> Lock {
    let edge = forest.node(node).end().saturating_sub(1);
    forest.lock_span(component, node, edge)
}
