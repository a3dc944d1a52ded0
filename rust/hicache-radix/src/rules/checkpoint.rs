//! Checkpoint: the exact state at the boundary is needed (Mamba, linear attention).

use smallvec::SmallVec;

use crate::forest::Forest;
use crate::node::{Node, NodeIdx};
use crate::rules::Lock;

pub fn vote(has: bool, node: &Node, end: usize) -> bool {
    end == node.end() && has
}

pub fn lock(forest: &mut Forest, component: usize, node: NodeIdx) -> Lock {
    let is_root = forest.node(node).is_root();
    let nodes = if is_root { SmallVec::new() } else { SmallVec::from_slice(&[node]) };
    forest.lock_nodes(component, nodes)
}
