//! What goes first: one key per policy, and the queue of candidates they order.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::interface::{Eviction, Tier};
use crate::node::{Held, Node, NodeIdx};

/// Uses beyond this many are not told apart.
const MOST_USES: u32 = (1 << 17) - 1;
const RECENCY_BITS: u32 = 44;
/// How far the groups lie apart; every policy's key lies within half of it.
const GROUP: i64 = 1 << 62;

/// In L2 a copy of what L1 holds goes before anything that lives only there, tails first.
#[derive(Debug, Clone, Copy)]
pub enum Group {
    DuplicateTail = -1,
    Duplicate = 0,
    Sole = 1,
}

impl Group {
    pub fn of(held: &Held, tier: Tier) -> Self {
        if tier != Tier::Host || !held.on_device() {
            Group::Sole
        } else if held.kids[Tier::Host as usize] > 0 {
            Group::Duplicate
        } else {
            Group::DuplicateTail
        }
    }
}

/// The smaller the rank, the earlier the payload leaves its tier.
pub fn rank(eviction: Eviction, node: &Node, held: &Held, group: Group) -> i64 {
    let key = match eviction {
        Eviction::Lru => held.used,
        Eviction::Mru => -held.used,
        Eviction::Fifo => node.created,
        Eviction::Filo => -node.created,
        Eviction::Lfu => (i64::from(node.uses.min(MOST_USES)) << RECENCY_BITS) + held.used,
    };
    GROUP * group as i64 + key
}

/// An entry of the queue. Ordered as Python's ((group, key, -end, id), node).
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
