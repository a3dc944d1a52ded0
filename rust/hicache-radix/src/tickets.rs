//! Copies under way, and which nodes they touch.

use std::collections::BTreeSet;

use crate::forest::Forest;
use crate::interface::Tier;
use crate::node::NodeIdx;
use crate::slots::Slots;

/// What a transfer is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// L1 to L2.
    Backup,
    /// L2 to L1.
    Load,
    /// L3 to L2.
    Fetch,
    /// L2 to L3.
    Store,
    /// Within L1, a shared state into a request's private slot.
    Claim,
    /// Within L1, a request's private state into a slot of the tree's.
    Leave,
}

impl Kind {
    pub const NAMES: [&'static str; 6] = ["backup", "load", "fetch", "store", "claim", "leave"];

    pub fn source(self) -> Tier {
        match self {
            Kind::Backup | Kind::Claim | Kind::Leave => Tier::Device,
            Kind::Load | Kind::Store => Tier::Host,
            Kind::Fetch => Tier::Store,
        }
    }

    pub fn target(self) -> Tier {
        match self {
            Kind::Backup | Kind::Fetch => Tier::Host,
            Kind::Load | Kind::Claim | Kind::Leave => Tier::Device,
            Kind::Store => Tier::Store,
        }
    }

    /// The pool whose payload of a node it reads. A fetch reads L3, a leave the lease's own slot.
    pub fn pins(self) -> Option<usize> {
        match self {
            Kind::Backup | Kind::Load | Kind::Store | Kind::Claim => Some(self.source() as usize),
            Kind::Fetch | Kind::Leave => None,
        }
    }
}

/// A run of one node's slots. There is no target for a store or a claim.
#[derive(Debug, Clone)]
pub struct Part {
    pub node: NodeIdx,
    pub target: Option<Slots>,
    pub num_slots: usize,
}

/// One transfer of one component.
#[derive(Debug)]
pub struct Ticket {
    pub id: u64,
    pub kind: Kind,
    pub component: usize,
    pub parts: Vec<Part>,
    /// The source is given up on success (a demotion).
    pub leaves: bool,
    /// The request whose private state is source or target, and its slot.
    pub lease: Option<(u64, u32)>,
    /// That request ended meanwhile; its slot is freed when the copy ends.
    pub is_orphan: bool,
    /// Requests that compute already while this load runs.
    pub trusted_by: BTreeSet<u64>,
}

impl Ticket {
    pub fn num_slots(&self) -> usize {
        self.parts.iter().map(|part| part.num_slots).sum()
    }

    /// The node of a part was cut: cut the part at the same place.
    pub fn split(&mut self, suffix: NodeIdx, prefix: NodeIdx, prefix_slots: usize) {
        let mut at = 0;
        while at < self.parts.len() {
            let part = &mut self.parts[at];
            if part.node == suffix {
                let head = part.target.as_mut().map(|target| target.take_front(prefix_slots));
                part.num_slots -= prefix_slots;
                self.parts.insert(at, Part { node: prefix, target: head, num_slots: prefix_slots });
                at += 1;
            }
            at += 1;
        }
    }
}

impl Forest {
    /// Begin a transfer: pin its sources and note what it brings.
    pub fn open_ticket(&mut self, kind: Kind, component: usize, parts: Vec<Part>, leaves: bool) -> u64 {
        let id = self.next_ticket;
        self.next_ticket += 1;
        for part in &parts {
            self.node_mut(part.node).hold(|busy| {
                busy.add_ticket(id);
                if let Some(tier) = kind.pins() {
                    busy.pins[tier] += 1;
                }
                if kind != Kind::Claim {
                    busy.set_incoming(component, kind.target(), id);
                }
            });
            self.doubt(part.node);
            if leaves {
                self.leaving[component][kind.source() as usize] += part.num_slots;
            }
        }
        let trusted_by = BTreeSet::new();
        let ticket = Ticket { id, kind, component, parts, leaves, lease: None, is_orphan: false, trusted_by };
        self.tickets.insert(id, ticket);
        id
    }

    /// A part is over: unpin, and let the node be considered again.
    pub fn close_part(&mut self, ticket: &Ticket, part: &Part) {
        self.node_mut(part.node).hold(|busy| {
            busy.drop_ticket(ticket.id);
            if let Some(tier) = ticket.kind.pins() {
                busy.pins[tier] -= 1;
            }
            busy.drop_incoming(ticket.component, ticket.kind.target(), ticket.id);
        });
        if ticket.leaves {
            self.leaving[ticket.component][ticket.kind.source() as usize] -= part.num_slots;
        }
        self.soil(part.node);
        self.doubt(part.node);
    }
}
