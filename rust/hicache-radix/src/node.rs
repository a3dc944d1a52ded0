//! A node: a run of pages on one edge of the tree, and what is stored there.
//!
//! Residency is uniform: within a node every component is, per tier, present for all of its pages or
//! for none. Whatever changes only part of a node cuts it first.
//!
//! Nodes live in an arena and name each other by place (`u32`); the place of a dead node is used
//! again, its `id` never. A tree has millions of them, so what few nodes have is boxed (`Busy`) and what
//! only L2 and L3 need lies apart (`Lower`, the digests): a node is one cache line, and lies in one.

use smallvec::SmallVec;

use crate::interface::Tier;
use crate::slots::Slots;
use crate::tokens::{Place, NO_RUN};

/// A node's place in the arena.
pub type NodeIdx = u32;
/// No node.
pub const NONE: NodeIdx = u32::MAX;
/// Not in a queue of candidates.
pub const UNQUEUED: u32 = u32::MAX;

/// State only; the forest keeps it consistent.
#[derive(Debug)]
#[repr(align(64))]
pub struct Node {
    pub id: u64,
    pub created: i64,
    busy: Option<Box<Busy>>,
    pub parent: NodeIdx,
    /// Children in the order in which their first pages came: a ring through `next` and `previous`.
    pub last_child: NodeIdx,
    pub next: NodeIdx,
    pub previous: NodeIdx,
    /// Where the tokens are: positions `[start, end)` of this run.
    pub run: u32,
    pub start: u32,
    pub end: u32,
    /// The longest sequence of a request that went through it, in tokens.
    pub reach: u32,
    facts: u32,
}

/// To be kept as a boundary.
const MARK: u32 = 1 << 31;
/// To be written to L3 as soon as the parent is there.
const WANTS_STORE: u32 = 1 << 30;
/// Among those to look at when the operation ends.
const IS_DIRTY: u32 = 1 << 29;
const IS_ALIVE: u32 = 1 << 28;
/// Hit, and not pushed out of the protected share since (`slru`).
const IS_PROTECTED: u32 = 1 << 27;
/// Leases of more than one session used it (`session`).
const IS_SHARED: u32 = 1 << 26;
/// On the way to a prefix that is to be kept.
const IS_KEPT: u32 = 1 << 25;
/// The highest priority of the requests that used it stands here, in seven bits.
const PRIORITY_BITS: u32 = 18;
const PRIORITY: u32 = 0x7f << PRIORITY_BITS;
/// The rest of the facts counts uses, up to here.
const MOST_USES: u32 = (1 << PRIORITY_BITS) - 1;

/// What leases and copies hold at a node while they run.
#[derive(Debug, Default)]
pub struct Busy {
    /// Open leases whose published prefix ends here.
    pub holders: u32,
    /// Running copies that read this node's payload, per pooled tier.
    pub pins: [u32; 2],
    pub store_failures: u32,
    /// One for each lock of an open lease: the component, and the first token that the lock needs.
    pub locks: SmallVec<[(u32, u32); 2]>,
    pub tickets: Vec<u64>,
    /// (component, tier, ticket)
    pub incoming: Vec<(u32, Tier, u64)>,
}

impl Busy {
    fn is_idle(&self) -> bool {
        self.holders == 0
            && self.pins == [0; 2]
            && self.store_failures == 0
            && self.locks.is_empty()
            && self.tickets.is_empty()
            && self.incoming.is_empty()
    }
}

/// What one component has at a node in L1. Half a cache line, and within one.
#[derive(Debug, Default)]
#[repr(align(32))]
pub struct Upper {
    /// One slot a page (a checkpoint: one); empty if absent.
    pub slots: Slots,
    pub used: i64,
    /// How many children have the component there.
    pub kids: u32,
    /// Where the node stands in the tier's queue.
    pub place: u32,
}

/// What one component has at a node in L2, and whether L3 is believed to have all of it.
#[derive(Debug)]
pub struct Lower {
    pub slots: Slots,
    /// In L2, in L3.
    pub kids: [u32; 2],
    pub places: [u32; 2],
    pub stored: bool,
}

/// Of a node that neither L2 nor L3 ever had anything of.
pub static NOWHERE_BELOW: Lower = Lower::new();

impl Upper {
    pub fn new(used: i64) -> Self {
        Self { used, place: UNQUEUED, ..Self::default() }
    }
}

impl Lower {
    pub const fn new() -> Self {
        Self { slots: Slots::NONE, kids: [0; 2], places: [UNQUEUED; 2], stored: false }
    }
}

/// All that one component has at a node.
#[derive(Debug, Clone, Copy)]
pub struct Held<'a> {
    pub upper: &'a Upper,
    pub lower: &'a Lower,
}

impl<'a> Held<'a> {
    pub fn on_device(self) -> bool {
        !self.upper.slots.is_empty()
    }

    pub fn in_host(self) -> bool {
        !self.lower.slots.is_empty()
    }

    pub fn stored(self) -> bool {
        self.lower.stored
    }

    pub fn has(self, tier: Tier) -> bool {
        match tier {
            Tier::Device => self.on_device(),
            Tier::Host => self.in_host(),
            Tier::Store => self.lower.stored,
        }
    }

    /// The fastest tier that has the component here.
    pub fn fastest(self) -> Option<Tier> {
        Tier::ALL.into_iter().find(|tier| self.has(*tier))
    }

    /// The slots in a tier; L3 has none.
    pub fn slots(self, tier: Tier) -> &'a Slots {
        match tier {
            Tier::Device => &self.upper.slots,
            Tier::Host => &self.lower.slots,
            Tier::Store => &NOWHERE_BELOW.slots,
        }
    }

    /// How many children have the component in the tier.
    pub fn kids(self, tier: Tier) -> u32 {
        match tier {
            Tier::Device => self.upper.kids,
            below => self.lower.kids[below as usize - 1],
        }
    }

    pub fn used(self) -> i64 {
        self.upper.used
    }

    /// Where the node stands in the tier's queue of candidates.
    pub fn place(self, tier: Tier) -> u32 {
        match tier {
            Tier::Device => self.upper.place,
            below => self.lower.places[below as usize - 1],
        }
    }
}

impl Node {
    pub fn new(id: u64, parent: NodeIdx, start: u32) -> Self {
        Self {
            id,
            created: 0,
            busy: None,
            parent,
            last_child: NONE,
            next: NONE,
            previous: NONE,
            run: NO_RUN,
            start,
            end: start,
            reach: 0,
            facts: IS_ALIVE,
        }
    }

    pub fn is_root(&self) -> bool {
        self.parent == NONE
    }

    pub fn is_leaf(&self) -> bool {
        self.last_child == NONE
    }

    pub fn len(&self) -> usize {
        (self.end - self.start) as usize
    }

    pub fn start(&self) -> usize {
        self.start as usize
    }

    pub fn end(&self) -> usize {
        self.end as usize
    }

    pub fn place(&self) -> Place {
        Place { run: self.run, start: self.start(), end: self.end() }
    }

    // ---- facts ---------------------------------------------------------------------------------
    pub fn uses(&self) -> u32 {
        self.facts & MOST_USES
    }

    pub fn set_uses(&mut self, uses: u32) {
        self.facts = self.facts & !MOST_USES | uses.min(MOST_USES);
    }

    pub fn priority(&self) -> u32 {
        (self.facts & PRIORITY) >> PRIORITY_BITS
    }

    /// *Caller guarantees*: it is at most 127.
    pub fn set_priority(&mut self, priority: u32) {
        self.facts = self.facts & !PRIORITY | priority << PRIORITY_BITS;
    }

    pub fn is_protected(&self) -> bool {
        self.facts & IS_PROTECTED != 0
    }

    pub fn set_protected(&mut self, is_protected: bool) {
        self.set(IS_PROTECTED, is_protected);
    }

    pub fn is_shared(&self) -> bool {
        self.facts & IS_SHARED != 0
    }

    pub fn set_shared(&mut self, is_shared: bool) {
        self.set(IS_SHARED, is_shared);
    }

    pub fn is_kept(&self) -> bool {
        self.facts & IS_KEPT != 0
    }

    pub fn set_kept(&mut self, is_kept: bool) {
        self.set(IS_KEPT, is_kept);
    }

    pub fn mark(&self) -> bool {
        self.facts & MARK != 0
    }

    pub fn set_mark(&mut self) {
        self.facts |= MARK;
    }

    pub fn wants_store(&self) -> bool {
        self.facts & WANTS_STORE != 0
    }

    pub fn set_wants_store(&mut self, wants: bool) {
        self.set(WANTS_STORE, wants);
    }

    pub fn is_dirty(&self) -> bool {
        self.facts & IS_DIRTY != 0
    }

    pub fn set_dirty(&mut self, is_dirty: bool) {
        self.set(IS_DIRTY, is_dirty);
    }

    pub fn is_alive(&self) -> bool {
        self.facts & IS_ALIVE != 0
    }

    fn set(&mut self, fact: u32, is_so: bool) {
        self.facts = self.facts & !fact | if is_so { fact } else { 0 };
    }

    /// It has left the tree; its place may be used again.
    pub fn die(&mut self) {
        self.facts = 0;
        self.busy = None;
    }

    // ---- leases and copies ---------------------------------------------------------------------
    pub fn holders(&self) -> u32 {
        self.busy.as_deref().map_or(0, |busy| busy.holders)
    }

    pub fn pins(&self, tier: Tier) -> u32 {
        self.busy.as_deref().map_or(0, |busy| busy.pins[tier as usize])
    }

    pub fn store_failures(&self) -> u32 {
        self.busy.as_deref().map_or(0, |busy| busy.store_failures)
    }

    /// All locks here as (component, first needed token).
    pub fn locks(&self) -> &[(u32, u32)] {
        self.busy.as_deref().map_or(&[], |busy| &busy.locks)
    }

    /// How many locks there are on one component.
    pub fn num_locks(&self, component: usize) -> u32 {
        self.locks().iter().filter(|(i, _)| *i as usize == component).count() as u32
    }

    /// Change what leases and copies hold here.
    pub fn hold(&mut self, change: impl FnOnce(&mut Busy)) {
        let busy = self.busy.get_or_insert_default();
        change(busy);
        if busy.is_idle() {
            self.busy = None;
        }
    }

    pub fn lock(&mut self, component: usize, edge: u32) {
        self.hold(|busy| busy.locks.push((component as u32, edge)));
    }

    pub fn unlock(&mut self, component: usize, edge: u32) {
        self.hold(|busy| {
            if let Some(at) = busy.locks.iter().position(|lock| *lock == (component as u32, edge)) {
                busy.locks.swap_remove(at);
            }
        });
    }

    pub fn tickets(&self) -> &[u64] {
        self.busy.as_deref().map_or(&[], |busy| &busy.tickets)
    }

    pub fn has_tickets(&self) -> bool {
        !self.tickets().is_empty()
    }

    pub fn incoming(&self, component: usize, tier: Tier) -> Option<u64> {
        let busy = self.busy.as_deref()?;
        let found = busy.incoming.iter().find(|(i, t, _)| (*i as usize, *t) == (component, tier));
        found.map(|(_, _, ticket)| *ticket)
    }
}

impl Busy {
    pub fn add_ticket(&mut self, ticket: u64) {
        if !self.tickets.contains(&ticket) {
            self.tickets.push(ticket);
        }
    }

    pub fn drop_ticket(&mut self, ticket: u64) {
        self.tickets.retain(|other| *other != ticket);
    }

    pub fn set_incoming(&mut self, component: usize, tier: Tier, ticket: u64) {
        self.incoming.retain(|(i, t, _)| (*i as usize, *t) != (component, tier));
        self.incoming.push((component as u32, tier, ticket));
    }

    pub fn drop_incoming(&mut self, component: usize, tier: Tier, ticket: u64) {
        self.incoming.retain(|entry| *entry != (component as u32, tier, ticket));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_one_cache_line() {
        assert_eq!((size_of::<Node>(), align_of::<Node>()), (64, 64));
        assert_eq!((size_of::<Upper>(), align_of::<Upper>()), (32, 32));
    }

    #[test]
    fn facts_and_uses_do_not_touch_each_other() {
        let mut node = Node::new(1, NONE, 0);
        node.set_uses(u32::MAX);
        node.set_mark();
        node.set_priority(127);
        node.set_priority(100);
        node.set_protected(true);
        node.set_shared(true);
        node.set_wants_store(true);
        node.set_wants_store(false);
        assert_eq!((node.uses(), node.mark(), node.wants_store()), (MOST_USES, true, false));
        assert_eq!((node.priority(), node.is_protected()), (100, true));
        node.set_uses(3);
        node.set_protected(false);
        assert_eq!((node.uses(), node.priority(), node.is_protected()), (3, 100, false));
        assert!(node.is_shared());
        assert!(node.is_alive() && !node.is_dirty());
    }
}
