//! Loads that a request counts on before they have ended, so that it can compute its first layers meanwhile.
//!
//! ```text
//! settle(arriving)             its loads end
//! lease.arriving = {T1, T2} --- commit --> as if the pages had been in L1 before
//!                           \\-- abort ---> lease.lost_load --- next settle ---> nothing is reused
//! ```
//!
//! A request that has lost a load still writes into the slots it reserved, so these stay its own until its next
//! call: only then does it know.

use std::collections::{BTreeSet, HashMap};

use crate::forest::Forest;
use crate::interface::Tier;
use crate::leases::{LeaseState, Stray};
use crate::node::NodeIdx;
use crate::slots::Slots;
use crate::tickets::{Part, Ticket};

impl Forest {
    /// Whether L1 has the payload or a load brings it. A state is claimed at once, so it has to be there.
    pub fn on_device_or_arriving(&self, node: NodeIdx, component: usize) -> bool {
        self.held(node, component).on_device()
            || (self.rules[component].keeps_pages
                && self.node(node).incoming(component, Tier::Device).is_some())
    }

    /// Have the lease count on the loads that bring these nodes' payload.
    pub fn trust(&mut self, lease: &mut LeaseState, component: usize, nodes: &[NodeIdx]) {
        for node in nodes {
            // A user's own rule may do without.
            let Some(number) = self.node(*node).incoming(component, Tier::Device) else { continue };
            if let Some(ticket) = self.tickets.get_mut(&number) {
                ticket.trusted_by.insert(lease.id);
                lease.arriving.insert(number);
            }
        }
    }

    /// By node, the slots that loads which the lease counts on are filling.
    pub fn arriving_slots(&self, lease: &LeaseState, component: usize) -> HashMap<NodeIdx, &Slots> {
        let tickets = lease.arriving.iter().filter_map(|number| self.tickets.get(number));
        tickets
            .filter(|ticket| ticket.component == component)
            .flat_map(|ticket| &ticket.parts)
            .filter_map(|part| Some((part.node, part.target.as_ref()?)))
            .collect()
    }

    fn trusting(&self, ticket: &Ticket) -> BTreeSet<u64> {
        let counts =
            |lease: &u64| self.leases.get(lease).is_some_and(|lease| lease.arriving.contains(&ticket.id));
        ticket.trusted_by.iter().copied().filter(counts).collect()
    }

    /// What arrived for a node that has other payload by now: whether somebody goes on reading it here.
    pub fn kept_by_readers(&mut self, ticket: &Ticket, part: &Part) -> bool {
        let readers = self.trusting(ticket);
        match &part.target {
            Some(slots) if !readers.is_empty() => {
                self.strays.push(Stray { component: ticket.component, slots: slots.clone(), readers });
                true
            }
            _ => false,
        }
    }

    /// The ticket has ended: its leases count on it no longer, or know that they counted in vain.
    pub fn end_trust(&mut self, ticket: &Ticket, arrived: bool) {
        for number in self.trusting(ticket) {
            let Some(lease) = self.leases.get_mut(&number) else { continue };
            lease.arriving.remove(&ticket.id);
            if !arrived {
                lease.lost_load = true;
                lease.arriving.clear();
            }
        }
    }

    /// The lease reads nothing any more.
    pub fn leave_strays(&mut self, lease: &mut LeaseState) {
        lease.arriving.clear();
        lease.lost_load = false;
        for mut stray in std::mem::take(&mut self.strays) {
            stray.readers.remove(&lease.id);
            if stray.readers.is_empty() {
                self.free(stray.component, Tier::Device, stray.slots);
            } else {
                self.strays.push(stray);
            }
        }
    }
}
