//! Who used a node last, and what the caller thinks that is worth.
//!
//! A *turn* is a lease as the tree remembers it once it has ended: the nodes that no later lease used.
//! There are never more turns than nodes and open leases.

use std::collections::HashMap;

use crate::arena::Arena;
use crate::forest::Forest;
use crate::interface::MOST_WORTH;
use crate::node::NodeIdx;

/// No lease.
pub const NO_TURN: u64 = u64::MAX;
/// What a node of several sessions is worth more.
const SHARED_BONUS: u32 = 8;

/// One lease's nodes.
#[derive(Debug)]
pub struct Turn {
    pub worth: u32,
    pub is_open: bool,
    pub nodes: Vec<NodeIdx>,
}

/// All turns of a forest; empty unless `is_on`.
#[derive(Debug, Default)]
pub struct Turns {
    pub is_on: bool,
    pub by_lease: HashMap<u64, Turn>,
    /// One for each node, as far as they have been asked for.
    of_node: Arena<u64>,
}

impl Turns {
    pub fn new(is_on: bool) -> Self {
        Self { is_on, ..Self::default() }
    }

    pub fn open(&mut self, lease: u64) {
        if self.is_on {
            self.by_lease.insert(lease, Turn { worth: MOST_WORTH, is_open: true, nodes: Vec::new() });
        }
    }

    /// The lease has ended; its turn stays as long as it has nodes.
    pub fn close(&mut self, lease: u64) {
        if let Some(turn) = self.by_lease.get_mut(&lease) {
            turn.is_open = false;
            self.drop_if_over(lease);
        }
    }

    pub fn of(&self, node: NodeIdx) -> u64 {
        self.of_node.get(node as usize).copied().unwrap_or(NO_TURN)
    }

    /// `lease` used the node last.
    pub fn own(&mut self, node: NodeIdx, lease: u64) {
        if !self.is_on || lease == NO_TURN || self.of(node) == lease {
            return;
        }
        self.disown(node);
        while self.of_node.len() <= node as usize {
            self.of_node.push(NO_TURN);
        }
        self.of_node[node as usize] = lease;
        if let Some(turn) = self.by_lease.get_mut(&lease) {
            turn.nodes.push(node);
        }
    }

    /// The node leaves the tree, or changes hands.
    pub fn disown(&mut self, node: NodeIdx) {
        let lease = self.of(node);
        if lease == NO_TURN {
            return;
        }
        self.of_node[node as usize] = NO_TURN;
        if let Some(turn) = self.by_lease.get_mut(&lease) {
            if let Some(at) = turn.nodes.iter().position(|other| *other == node) {
                turn.nodes.swap_remove(at);
            }
            self.drop_if_over(lease);
        }
    }

    fn drop_if_over(&mut self, lease: u64) {
        if self.by_lease.get(&lease).is_some_and(|turn| turn.nodes.is_empty() && !turn.is_open) {
            self.by_lease.remove(&lease);
        }
    }

    pub fn worth(&self, node: NodeIdx, is_shared: bool) -> u32 {
        match self.by_lease.get(&self.of(node)) {
            Some(turn) if turn.worth > 0 => turn.worth + SHARED_BONUS * u32::from(is_shared),
            _ => 0,
        }
    }
}

impl Forest {
    /// Set what a turn is worth; where that fell, let its nodes' new rank be known.
    pub fn rate(&mut self, lease: u64, worth: u32) {
        let Some(turn) = self.turns.by_lease.get_mut(&lease) else { return };
        let fell = worth < turn.worth;
        turn.worth = worth;
        if !fell {
            return;
        }
        let mut nodes = turn.nodes.clone();
        nodes.sort_unstable_by_key(|node| self.node(*node).id);
        for node in nodes {
            self.offer(node);
        }
    }
}
