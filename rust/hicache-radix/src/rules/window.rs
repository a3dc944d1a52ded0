//! Window: only the last w tokens are needed (sliding-window attention).

use smallvec::SmallVec;

use crate::forest::Forest;
use crate::node::{Held, Node, NodeIdx};
use crate::rules::{Lock, Rule, Validator};

/// First token (a page start) whose window payload a prefix of `key_len` tokens still needs.
pub fn frontier(key_len: usize, window_tokens: usize, page_size: usize) -> usize {
    let whole = key_len / page_size * page_size;
    let reach = window_tokens.max(page_size);
    whole.saturating_sub(reach) / page_size * page_size
}

pub fn vote(rule: &Rule, state: &mut Validator, has: bool, node: &Node, end: usize) -> bool {
    if !has {
        state.run_start = None;
        return false;
    }
    let run_start = *state.run_start.get_or_insert(node.start());
    run_start <= rule.span(end)
}

/// Lock the nodes that the window touches, each with the window's edge.
///
/// A split hands the edge to the prefix only if the window reaches into it:
///
/// ```text
///   prefix | suffix            prefix | suffix
/// ....[====|======]            .......|.[=====]
///   locked | locked              free | locked
/// ```
pub fn lock(forest: &mut Forest, component: usize, node: NodeIdx) -> Lock {
    let edge = forest.rules[component].span(forest.node(node).end());
    for place in reach(forest, node, edge) {
        let held = forest.held_mut(place, component);
        held.edges.get_or_insert_default().push(edge as u32);
        held.locks += 1;
    }
    Lock::Window { component, node, edge }
}

/// The nodes from `node` up whose end lies behind the edge.
pub fn reach(forest: &Forest, node: NodeIdx, edge: usize) -> SmallVec<[NodeIdx; 2]> {
    forest.up(node).take_while(|place| forest.node(*place).end() > edge).collect()
}

pub fn release(held: &mut Held, edge: usize) {
    if let Some(edges) = &mut held.edges {
        if let Some(at) = edges.iter().position(|other| *other as usize == edge) {
            edges.swap_remove(at);
        }
        if edges.is_empty() {
            held.edges = None;
        }
    }
    held.locks -= 1;
}
