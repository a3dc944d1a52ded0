//! A node: a run of pages on one edge of the tree, and what is stored there.
//!
//! Residency is uniform: within a node every component is, per tier, present for all of its pages or
//! for none. Whatever changes only part of a node cuts it first.
//!
//! Nodes live in an arena and name each other by place (`u32`); the place of a dead node is used
//! again, its `id` never.

use crate::interface::Tier;
use crate::keys::Key;
use crate::slots::Slots;
use crate::tokens::{Place, NO_RUN};

/// A node's place in the arena.
pub type NodeIdx = u32;
/// No node.
pub const NONE: NodeIdx = u32::MAX;
/// Not in a queue of candidates. Greater than every rank.
pub const UNQUEUED: i64 = i64::MAX;

/// State only; the forest keeps it consistent.
#[derive(Debug)]
pub struct Node {
    pub id: u64,
    pub parent: NodeIdx,
    /// The root of the subtree, for its namespace and seed.
    pub root: NodeIdx,
    /// Children in the order in which their first pages came: a list through `next` and `previous`.
    pub first_child: NodeIdx,
    pub last_child: NodeIdx,
    pub next: NodeIdx,
    pub previous: NodeIdx,
    pub num_children: u32,
    /// Where the tokens are: positions `[start, end)` of this run.
    pub run: u32,
    pub start: u32,
    pub end: u32,
    /// Open leases whose published prefix ends here.
    pub holders: u32,
    pub uses: u32,
    pub store_failures: u32,
    /// Running copies that read this node's payload, per pooled tier.
    pub pins: [u32; 2],
    pub created: i64,
    /// The token chain's digests, one a page, computed when first needed.
    pub links: Option<Box<Vec<Key>>>,
    /// Copies that touch this node, and those that bring payload.
    pub flight: Option<Box<Flight>>,
    pub mark: bool,
    /// To be written to L3 as soon as the parent is there.
    pub wants_store: bool,
    /// Among those to look at when the operation ends.
    pub is_dirty: bool,
    pub is_alive: bool,
}

/// Copies under way at a node.
#[derive(Debug, Default, Clone)]
pub struct Flight {
    pub tickets: Vec<u64>,
    /// (component, tier, ticket)
    pub incoming: Vec<(u32, Tier, u64)>,
}

/// What one component has at a node.
#[derive(Debug, Default)]
pub struct Held {
    /// Per pooled tier, one slot a page (a checkpoint: one); empty if absent.
    pub slots: [Slots; 2],
    /// How many children have the component, per tier.
    pub kids: [u32; 3],
    pub used: i64,
    /// Open leases that need the payload of this node in particular.
    pub locks: u32,
    /// The first needed token of each lock on a span.
    pub edges: Option<Box<Vec<u32>>>,
    /// The rank of the valid entry in each tier's queue.
    pub queued: [i64; 3],
    /// Whether L3 is believed to have all of it.
    pub stored: bool,
}

impl Held {
    pub fn new(used: i64) -> Self {
        Self { used, queued: [UNQUEUED; 3], ..Self::default() }
    }

    pub fn on_device(&self) -> bool {
        !self.slots[0].is_empty()
    }

    pub fn in_host(&self) -> bool {
        !self.slots[1].is_empty()
    }

    pub fn has(&self, tier: Tier) -> bool {
        match tier {
            Tier::Store => self.stored,
            pooled => !self.slots[pooled as usize].is_empty(),
        }
    }

    /// The fastest tier that has the component here.
    pub fn fastest(&self) -> Option<Tier> {
        Tier::ALL.into_iter().find(|tier| self.has(*tier))
    }

    pub fn edges(&self) -> &[u32] {
        self.edges.as_deref().map_or(&[], Vec::as_slice)
    }

    pub fn drop_edge(&mut self, edge: usize) {
        if let Some(edges) = &mut self.edges {
            if let Some(at) = edges.iter().position(|other| *other as usize == edge) {
                edges.swap_remove(at);
            }
            if edges.is_empty() {
                self.edges = None;
            }
        }
    }

    pub fn clear_queued(&mut self) {
        self.queued = [UNQUEUED; 3];
    }
}

impl Node {
    pub fn new(id: u64, parent: NodeIdx, root: NodeIdx, start: u32) -> Self {
        Self {
            id,
            parent,
            root,
            first_child: NONE,
            last_child: NONE,
            next: NONE,
            previous: NONE,
            num_children: 0,
            run: NO_RUN,
            start,
            end: start,
            holders: 0,
            uses: 0,
            store_failures: 0,
            pins: [0; 2],
            created: 0,
            links: None,
            flight: None,
            mark: false,
            wants_store: false,
            is_dirty: false,
            is_alive: true,
        }
    }

    pub fn is_root(&self) -> bool {
        self.parent == NONE
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

    // ---- copies under way ----------------------------------------------------------------------
    pub fn tickets(&self) -> &[u64] {
        self.flight.as_deref().map_or(&[], |flight| &flight.tickets)
    }

    pub fn has_tickets(&self) -> bool {
        !self.tickets().is_empty()
    }

    pub fn add_ticket(&mut self, ticket: u64) {
        let tickets = &mut self.flight.get_or_insert_default().tickets;
        if !tickets.contains(&ticket) {
            tickets.push(ticket);
        }
    }

    pub fn drop_ticket(&mut self, ticket: u64) {
        if let Some(flight) = &mut self.flight {
            flight.tickets.retain(|other| *other != ticket);
        }
        self.drop_empty_flight();
    }

    pub fn incoming(&self, component: usize, tier: Tier) -> Option<u64> {
        let flight = self.flight.as_deref()?;
        let found = flight.incoming.iter().find(|(i, t, _)| (*i as usize, *t) == (component, tier));
        found.map(|(_, _, ticket)| *ticket)
    }

    pub fn set_incoming(&mut self, component: usize, tier: Tier, ticket: u64) {
        let incoming = &mut self.flight.get_or_insert_default().incoming;
        incoming.retain(|(i, t, _)| (*i as usize, *t) != (component, tier));
        incoming.push((component as u32, tier, ticket));
    }

    pub fn drop_incoming(&mut self, component: usize, tier: Tier, ticket: u64) {
        if let Some(flight) = &mut self.flight {
            flight.incoming.retain(|entry| *entry != (component as u32, tier, ticket));
        }
        self.drop_empty_flight();
    }

    fn drop_empty_flight(&mut self) {
        if self.flight.as_ref().is_some_and(|f| f.tickets.is_empty() && f.incoming.is_empty()) {
            self.flight = None;
        }
    }
}
