//! What goes first: one key per policy, and the queue of candidates they order.

use crate::arena::Arena;
use crate::interface::{Eviction, Facts, Tier, MOST_RANK};
use crate::node::{Held, Node, NodeIdx, UNQUEUED};

/// Uses beyond this many are not told apart.
const MOST_USES: u32 = (1 << 17) - 1;
const RECENCY_BITS: u32 = 44;
/// Of the larger tier's slots, L1's or L2's, how many `slru` protects at most.
pub const PROTECTED_SHARE: (usize, usize) = (4, 5);
/// How far the groups lie apart; every policy's key lies within half of it.
const GROUP: i64 = 1 << 62;

/// Dead weight first; in L2 a copy of what L1 holds before anything that lives only there, tails first; what
/// is to be kept last.
#[derive(Debug, Clone, Copy)]
pub enum Group {
    Worthless = -2,
    Duplicate = -1,
    Sole = 0,
    Kept = 1,
}

impl Group {
    pub fn of(held: Held, tier: Tier, is_kept: bool) -> Self {
        if tier != Tier::Host || !held.on_device() {
            if is_kept {
                Group::Kept
            } else {
                Group::Sole
            }
        } else if held.kids(Tier::Host) > 0 {
            Group::Duplicate
        } else {
            Group::Worthless
        }
    }
}

/// What the tree knows of a node that does not stand at it.
#[derive(Debug, Clone, Copy)]
pub struct Standing {
    pub group: Group,
    /// `tlru` only.
    pub is_spare: bool,
    /// `session` and `adaptive` only.
    pub worth: u32,
    /// By how much later it counts as used, for being shared; `adaptive` only.
    pub grace: i64,
}

/// The smaller the rank, the earlier the payload leaves its tier.
pub fn rank(eviction: &Eviction, node: &Node, held: Held, standing: Standing) -> i64 {
    let Standing { group, is_spare, worth, grace } = standing;
    let key = match eviction {
        Eviction::Lru => held.used(),
        Eviction::Mru => -held.used(),
        Eviction::Fifo => node.created,
        Eviction::Filo => -node.created,
        Eviction::Lfu => (i64::from(node.uses().min(MOST_USES)) << RECENCY_BITS) + held.used(),
        Eviction::Slru => (i64::from(node.is_protected()) << RECENCY_BITS) + held.used(),
        Eviction::Priority => (i64::from(node.priority()) << RECENCY_BITS) + held.used(),
        Eviction::Tlru => held.used() - (i64::from(is_spare) << RECENCY_BITS),
        Eviction::Session | Eviction::Adaptive => (i64::from(worth) << RECENCY_BITS) + held.used() + grace,
        Eviction::Custom(ordering) => {
            let facts = Facts {
                used: held.used(),
                created: node.created,
                uses: node.uses(),
                priority: node.priority(),
                is_protected: node.is_protected(),
                is_spare,
                worth,
            };
            ordering.rank(facts).clamp(-MOST_RANK, MOST_RANK)
        }
    };
    GROUP * group as i64 + (GROUP / 2 + key)
}

/// Of a rank with `session` or `adaptive`: the worth and when it was used; none if another group decided.
pub fn worth_and_used(rank: i64) -> Option<(i64, i64)> {
    let key = rank - GROUP / 2;
    (0..GROUP / 2).contains(&key).then_some((key >> RECENCY_BITS, key & ((1 << RECENCY_BITS) - 1)))
}

/// A node in a queue.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    pub rank: i64,
    /// Of equals the lower first: that is the deeper node, or where marks have a pool of their own the shallower.
    pub height: u32,
    pub node: NodeIdx,
}

impl Entry {
    pub fn new(rank: i64, at: NodeIdx, node: &Node, from_the_tail: bool) -> Self {
        let height = if from_the_tail { u32::MAX - node.end } else { node.end };
        Self { rank, height, node: at }
    }

    /// What entries of any queue are ordered by; `id` is the node's.
    pub fn key(&self, id: u64) -> (i64, u32, u64) {
        (self.rank, self.height, id)
    }
}

/// A heap of the nodes whose payload of one component may leave one tier.
///
/// Each node is in it once at most, and knows its place. A rank that grew is noticed when its entry
/// surfaces, so a touch costs nothing; a rank that shrank is told at once. Entries are ordered as
/// Python's ((group, key, -end, id), node). Four children a parent: half the depth, and one cache
/// line holds them all.
#[derive(Debug, Default)]
pub struct Candidates {
    heap: Arena<Entry>,
}

/// What a queue has to ask of the nodes and to tell them.
pub trait Places {
    /// The node's number, which settles a tie of ranks and depths.
    fn id(&self, node: NodeIdx) -> u64;
    /// The node stands there now.
    fn set_place(&mut self, node: NodeIdx, place: u32);
}

const ARITY: usize = 4;

impl Candidates {
    /// The one that goes first.
    pub fn first(&self) -> Option<Entry> {
        self.heap.get(0).copied()
    }

    /// The rank that the node at a place was given.
    pub fn rank_at(&self, place: u32) -> Option<i64> {
        self.heap.get(place as usize).map(|entry| entry.rank)
    }

    /// Enter a node. *Caller guarantees*: it is not there.
    pub fn push(&mut self, entry: Entry, places: &mut impl Places) {
        self.heap.push(entry);
        self.rise(self.heap.len() - 1, entry, places);
    }

    /// Give the node at a place another rank.
    pub fn set_rank(&mut self, place: u32, rank: i64, places: &mut impl Places) {
        let at = place as usize;
        let entry = Entry { rank, ..self.heap[at] };
        let grew = rank > self.heap[at].rank;
        if grew {
            self.sink(at, entry, places);
        } else {
            self.rise(at, entry, places);
        }
    }

    /// Take out the node at a place.
    pub fn remove(&mut self, place: u32, places: &mut impl Places) {
        let at = place as usize;
        places.set_place(self.heap[at].node, UNQUEUED);
        let Some(last) = self.heap.pop() else { return };
        if at == self.heap.len() {
            return;
        }
        if at > 0 && goes_before(last, self.heap[(at - 1) / ARITY], places) {
            self.rise(at, last, places);
        } else {
            self.sink(at, last, places);
        }
    }

    fn put(&mut self, at: usize, entry: Entry, places: &mut impl Places) {
        self.heap[at] = entry;
        places.set_place(entry.node, at as u32);
    }

    fn rise(&mut self, mut at: usize, entry: Entry, places: &mut impl Places) {
        while at > 0 {
            let above = (at - 1) / ARITY;
            if !goes_before(entry, self.heap[above], places) {
                break;
            }
            self.put(at, self.heap[above], places);
            at = above;
        }
        self.put(at, entry, places);
    }

    fn sink(&mut self, mut at: usize, entry: Entry, places: &mut impl Places) {
        loop {
            let first = ARITY * at + 1;
            let end = (first + ARITY).min(self.heap.len());
            let Some(mut best) = (first < end).then_some(first) else { break };
            for other in first + 1..end {
                if goes_before(self.heap[other], self.heap[best], places) {
                    best = other;
                }
            }
            if !goes_before(self.heap[best], entry, places) {
                break;
            }
            self.put(at, self.heap[best], places);
            at = best;
        }
        self.put(at, entry, places);
    }
}

fn goes_before(one: Entry, other: Entry, places: &impl Places) -> bool {
    if (one.rank, one.height) != (other.rank, other.height) {
        return (one.rank, one.height) < (other.rank, other.height);
    }
    places.id(one.node) < places.id(other.node)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Known(Vec<u32>);

    impl Places for Known {
        fn id(&self, node: NodeIdx) -> u64 {
            u64::from(node)
        }

        fn set_place(&mut self, node: NodeIdx, place: u32) {
            self.0[node as usize] = place;
        }
    }

    #[test]
    fn entries_come_out_in_order_whatever_changed_meanwhile() {
        const NUM: u32 = 3000;
        let mut known = Known(vec![UNQUEUED; NUM as usize]);
        let mut queue = Candidates::default();
        let mut ranks: Vec<i64> = (0..NUM).map(|node| i64::from(node * 7919 % 1000)).collect();
        for node in 0..NUM {
            queue.push(Entry { rank: ranks[node as usize], height: 0, node }, &mut known);
        }
        for node in (0..NUM).step_by(3) {
            ranks[node as usize] = i64::from(node * 31 % 2000) - 500;
            queue.set_rank(known.0[node as usize], ranks[node as usize], &mut known);
        }
        for node in (0..NUM).step_by(5) {
            queue.remove(known.0[node as usize], &mut known);
            assert_eq!(known.0[node as usize], UNQUEUED);
        }
        let mut expected: Vec<(i64, u32)> =
            (0..NUM).filter(|node| node % 5 != 0).map(|node| (ranks[node as usize], node)).collect();
        expected.sort_unstable();
        let mut found = Vec::new();
        while let Some(entry) = queue.first() {
            assert_eq!(queue.rank_at(known.0[entry.node as usize]), Some(entry.rank));
            queue.remove(0, &mut known);
            found.push((entry.rank, entry.node));
        }
        assert_eq!(found, expected);
    }
}
