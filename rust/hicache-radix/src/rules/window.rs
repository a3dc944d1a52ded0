//! Window: only the last w tokens are needed (sliding-window attention).

use crate::forest::Forest;
use crate::node::{Node, NodeIdx};
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

/// Hold the trailing window at the node's end.
pub fn lock(forest: &mut Forest, component: usize, node: NodeIdx) -> Lock {
    let edge = forest.rules[component].span(forest.node(node).end());
    forest.lock_span(component, node, edge)
}
