//! What happens when a transfer ends: commit, abort, and who goes on next.

use crate::forest::Forest;
use crate::interface::{Cause, Tier};
use crate::node::{NodeIdx, NONE};
use crate::slots::Slots;
use crate::tickets::{Kind, Part, Ticket};

fn arrival(kind: Kind) -> Cause {
    match kind {
        Kind::Backup => Cause::Backup,
        Kind::Load => Cause::Load,
        Kind::Fetch => Cause::Fetch,
        Kind::Store => Cause::Store,
        Kind::Claim | Kind::Leave => Cause::Insert,
    }
}

impl Forest {
    /// The whole transfer arrived.
    pub fn commit(&mut self, number: u64) {
        let total = self.tickets.get(&number).map_or(0, Ticket::num_slots);
        self.end_ticket(number, total, false);
    }

    /// Only the first `done_slots` arrived.
    pub fn abort(&mut self, number: u64, done_slots: usize, missing: bool) {
        let Some(ticket) = self.tickets.get(&number) else { return };
        self.counters.aborted[ticket.kind as usize] += 1;
        self.cut_ticket_at(number, done_slots);
        self.end_ticket(number, done_slots, missing);
    }

    /// Make the arrived slots end where a node ends.
    fn cut_ticket_at(&mut self, number: u64, done_slots: usize) {
        let Some(ticket) = self.tickets.get(&number) else { return };
        let mut before = 0;
        for part in &ticket.parts {
            if before < done_slots && done_slots < before + part.num_slots {
                let node = part.node;
                self.split(node, done_slots - before);
                return;
            }
            before += part.num_slots;
        }
    }

    fn end_ticket(&mut self, number: u64, done_slots: usize, missing: bool) {
        let Some(ticket) = self.tickets.remove(&number) else { return };
        let mut num_arrived = 0;
        let mut before = 0;
        for part in &ticket.parts {
            before += part.num_slots;
            num_arrived += usize::from(before <= done_slots);
            self.close_part(&ticket, part);
        }
        let (arrived, failed) = ticket.parts.split_at(num_arrived);
        self.end_claim(&ticket, failed.is_empty());
        for part in arrived {
            self.arrive(&ticket, part);
        }
        for part in failed {
            if let Some(target) = &part.target {
                self.free(ticket.component, ticket.kind.target(), target.clone());
            }
            self.offer(part.node);
        }
        if let Some(first) = failed.first() {
            self.fail(&ticket, first.node, missing);
        }
        self.end_trust(&ticket, failed.is_empty());
        for part in &ticket.parts {
            self.go_on(&ticket, part.node);
        }
    }

    fn end_claim(&mut self, ticket: &Ticket, arrived: bool) {
        let Some((lease, slot)) = ticket.lease else { return };
        if ticket.is_orphan {
            self.free(ticket.component, Tier::Device, Slots::one(slot));
            return;
        }
        let Some(mut state) = self.leases.remove(&lease) else { return };
        state.take_claim(ticket.component);
        if ticket.kind == Kind::Claim && !arrived {
            self.come_to_nothing(&mut state);
        }
        self.leases.insert(lease, state);
    }

    fn arrive(&mut self, ticket: &Ticket, part: &Part) {
        let (node, i) = (part.node, ticket.component);
        let target_tier = ticket.kind.target();
        if ticket.kind == Kind::Store {
            self.node_mut(node).hold(|busy| busy.store_failures = 0);
            self.set_stored(node, i, true, Cause::Store);
        } else if let Some(target) = &part.target {
            if !self.held(node, i).has(target_tier) && self.has_base(ticket, node) {
                self.attach(node, i, target_tier, target.clone(), arrival(ticket.kind));
                if ticket.kind == Kind::Leave {
                    let tick = self.tick;
                    self.upper_mut(node, i).used = tick;
                }
            } else {
                self.counters.dropped[ticket.kind as usize] += part.num_slots as u64;
                if !self.held(node, i).has(target_tier) {
                    self.end_trust(ticket, false);
                }
                if !self.kept_by_readers(ticket, part) {
                    self.free(i, target_tier, target.clone());
                }
            }
        }
        if ticket.leaves && self.may_leave(node, i, ticket.kind.source()) {
            self.leave(node, i, ticket.kind.source());
        }
        self.offer(node);
    }

    /// What arrives must hang on something: a path on its parent, a dependent on its path.
    fn has_base(&self, ticket: &Ticket, node: NodeIdx) -> bool {
        let i = ticket.component;
        let is_near = |at: NodeIdx, of: usize| self.held(at, of).on_device() || self.held(at, of).in_host();
        if !self.rules[i].depends_on.iter().all(|base| is_near(node, *base)) {
            return false;
        }
        let parent = self.node(node).parent;
        if !self.rules[i].is_prefix || parent == NONE || self.node(parent).is_root() {
            return parent != NONE;
        }
        if ticket.kind.target() == Tier::Device {
            return self.held(parent, i).on_device();
        }
        is_near(parent, i)
    }

    /// The first part that did not arrive.
    fn fail(&mut self, ticket: &Ticket, node: NodeIdx, missing: bool) {
        let i = ticket.component;
        if ticket.kind == Kind::Store {
            let place = self.node_mut(node);
            place.hold(|busy| busy.store_failures = busy.store_failures.saturating_add(1));
            place.set_wants_store(false);
            self.note_failed_store(node);
        } else if ticket.kind == Kind::Fetch && missing {
            let mut node = node;
            if self.rules[i].keeps_pages && self.node(node).len() > self.page_size {
                node = self.split(node, 1);
            }
            if self.node(node).incoming(i, Tier::Store).is_none() {
                self.set_stored(node, i, false, Cause::Missing);
            }
            for lease in self.leases.values_mut() {
                lease.is_doubtful = !lease.is_settled;
            }
        }
    }

    /// Stores that waited for this copy may begin; a state that was left here is copied down.
    fn go_on(&mut self, ticket: &Ticket, node: NodeIdx) {
        if !self.node(node).is_root() && ticket.kind == Kind::Leave {
            self.after_use(node);
        }
        let goes_on = matches!(ticket.kind, Kind::Backup | Kind::Store | Kind::Fetch);
        if self.node(node).is_root() || !goes_on {
            return;
        }
        if ticket.kind == Kind::Backup {
            self.follow_to_store(node, ticket.component);
        }
        self.pump_store(node);
        if ticket.kind != Kind::Store || !self.held(node, ticket.component).stored() {
            return;
        }
        for child in self.children(node) {
            // A cut meanwhile put a new node in the child's place among the children.
            let mut child = child;
            while self.node(child).parent != node {
                child = self.node(child).parent;
            }
            self.pump_store(child);
        }
    }
}
