//! What goes first: one key per policy, and the queue of candidates they order.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::interface::Eviction;
use crate::node::{Held, Node, NodeIdx};

/// Uses beyond this many are not told apart.
const MOST_USES: u32 = (1 << 17) - 1;
const RECENCY_BITS: u32 = 44;
/// Sets what goes before all else apart; every policy's key lies within half of it.
const FIRST: i64 = 1 << 62;

/// The smaller the rank, the earlier the payload leaves its tier.
///
/// Args: `is_sole`: not a duplicate of what a faster tier holds.
pub fn rank(eviction: Eviction, node: &Node, held: &Held, is_sole: bool) -> i64 {
    let key = match eviction {
        Eviction::Lru => held.used,
        Eviction::Mru => -held.used,
        Eviction::Fifo => node.created,
        Eviction::Filo => -node.created,
        Eviction::Lfu => (i64::from(node.uses.min(MOST_USES)) << RECENCY_BITS) + held.used,
    };
    if is_sole {
        key
    } else {
        key - FIRST
    }
}

/// An entry of the queue. Ordered as Python's (sole, key, -end, id), node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    pub rank: i64,
    /// Deeper nodes first.
    pub height: u32,
    pub id: u64,
    pub node: NodeIdx,
}

impl Entry {
    pub fn new(rank: i64, at: NodeIdx, node: &Node) -> Self {
        Self { rank, height: u32::MAX - node.end, id: node.id, node: at }
    }
}

/// A heap of the nodes whose payload of one component may leave one tier.
///
/// Each node has at most one valid entry, whose rank the node keeps. A rank that grew is noticed when
/// its entry surfaces, so a touch costs nothing; a rank that shrank is pushed again at once.
#[derive(Debug, Default)]
pub struct Candidates {
    heap: BinaryHeap<Reverse<Entry>>,
}

impl Candidates {
    pub fn push(&mut self, entry: Entry) {
        self.heap.push(Reverse(entry));
    }

    pub fn pop(&mut self) -> Option<Entry> {
        self.heap.pop().map(|Reverse(entry)| entry)
    }

    pub fn len(&self) -> usize {
        self.heap.len()
    }

    /// Drop entries that are not valid any more; the order of the others stays.
    pub fn retain(&mut self, is_valid: impl Fn(&Entry) -> bool) {
        self.heap.retain(|Reverse(entry)| is_valid(entry));
    }
}
