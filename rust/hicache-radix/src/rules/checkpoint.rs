//! Checkpoint: the exact state at the boundary is needed (Mamba, linear attention).

use smallvec::SmallVec;

use crate::forest::Forest;
use crate::node::{Node, NodeIdx};
use crate::rules::Lock;

pub fn vote(has: bool, node: &Node, end: usize) -> bool {
    end == node.end() && has
}

pub fn lock(forest: &mut Forest, component: usize, node: NodeIdx) -> Lock {
    let mut nodes = SmallVec::new();
    if !forest.node(node).is_root() {
        forest.held_mut(node, component).locks += 1;
        nodes.push(node);
    }
    Lock::Nodes { component, nodes }
}
