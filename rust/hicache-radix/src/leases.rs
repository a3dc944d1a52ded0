//! One request's hold on the tree, as the core keeps it.

use std::collections::BTreeSet;

use crate::error::{Error, Result};
use crate::forest::Forest;
use crate::interface::Tier;
use crate::node::NodeIdx;
use crate::rules::Locks;
use crate::slots::Slots;
use crate::turns::TurnIdx;

/// Stands in a slot array where a component keeps nothing for that page.
const NO_SLOT: i64 = -1;

/// A stop on a matched path, and where each component's payload lay when it was found.
#[derive(Debug, Clone)]
pub struct Origins {
    /// (start, end) of each stop.
    pub stops: Vec<(u32, u32)>,
    /// One per stop and component.
    pub tiers: Vec<Option<Tier>>,
}

/// One request, in regions.
///
/// ```text
/// 0                published          reserved
/// |---- tree ----|---- owned slots ----|
///                ^ node.end
/// ```
///
/// The published tokens are those of the path to `node`; they are not kept twice.
#[derive(Debug)]
pub struct LeaseState {
    pub id: u64,
    pub turn: TurnIdx,
    /// Where the published prefix ends; the root for nothing.
    pub node: NodeIdx,
    /// Tokens of the prompt.
    pub prompt_len: usize,
    /// The request's, for what it uses and publishes.
    pub priority: u32,
    pub origins: Origins,
    /// The reuse that was settled; what lies behind it this lease published itself.
    pub base: usize,
    pub is_settled: bool,
    /// Pages that L3 was believed to have proved missing since the match.
    pub is_doubtful: bool,
    /// Tokens the owned slots were asked for.
    pub reserved: usize,
    pub locks: Locks,
    /// Per component, slots of the pages from the published end on.
    pub owned: Vec<Slots>,
    /// Private state slot per component.
    pub states: Vec<Option<u32>>,
    /// Running copies from or to a private state: (component, ticket), oldest first.
    pub claims: Vec<(usize, u64)>,
    /// Loads it was settled on before they ended (`trust.rs`).
    pub arriving: BTreeSet<u64>,
    /// One of them failed.
    pub lost_load: bool,
}

/// Slots that a load filled for pages which another request had put in the tree meanwhile.
#[derive(Debug)]
pub struct Stray {
    pub component: usize,
    pub slots: Slots,
    /// The leases that were told these slots and may read them until they end.
    pub readers: BTreeSet<u64>,
}

impl LeaseState {
    pub fn has_claim(&self, component: usize) -> bool {
        self.claims.iter().any(|(i, _)| *i == component)
    }

    pub fn take_claim(&mut self, component: usize) -> Option<u64> {
        let at = self.claims.iter().position(|(i, _)| *i == component)?;
        Some(self.claims.remove(at).1)
    }

    pub fn claim_tickets(&self) -> Vec<u64> {
        self.claims.iter().map(|(_, ticket)| *ticket).collect()
    }
}

impl Forest {
    /// Device slots of the lease's whole prefix, one a page.
    pub fn lease_slots(&self, state: &LeaseState, component: usize) -> Result<Vec<i64>> {
        let rule = &self.rules[component];
        if !rule.keeps_pages {
            let name = &self.config.components[component].name;
            return Err(Error::Protocol(format!("{name} keeps states, not pages; ask lease_state")));
        }
        let first = rule.span(self.node(state.node).end());
        let published = self.node(state.node).end() / self.page_size;
        let arriving = self.arriving_slots(state, component);
        let mut slots = Vec::with_capacity(published + state.owned[component].len());
        for node in self.path(state.node) {
            let held = self.held(node, component);
            let there = match held.on_device() {
                true => Some(held.slots(Tier::Device)),
                false => arriving.get(&node).copied(),
            };
            match there.filter(|_| self.node(node).end() > first) {
                Some(there) => there.expand(&mut slots),
                None => slots.resize(slots.len() + self.num_slots(node, component), NO_SLOT),
            }
        }
        state.owned[component].expand(&mut slots);
        Ok(slots)
    }
}
