//! From L2 to L3: parents first, through the staging slots, and again where it failed.

use crate::actions::Action;
use crate::demote::{once_each, FREE_AT_ONCE_TRIES};
use crate::forest::Forest;
use crate::interface::{Cause, Tier};
use crate::keys::Key;
use crate::node::{NodeIdx, NONE};
use crate::tickets::{Kind, Part, Ticket};

impl Forest {
    /// Have the path to `node` written to L3, parents first.
    ///
    /// With `as_victim` L2 needs the node's room; then what L3 has refused since it was last used is not
    /// tried again.
    /// Returns the transfers under way that this waits for; none if nothing can be done now.
    pub fn request_store(&mut self, node: NodeIdx, as_victim: bool) -> Vec<u64> {
        if !self.config.has_store || (!as_victim && self.is_unwanted(node)) {
            return Vec::new();
        }
        let mut missing = Vec::new();
        for place in self.up(node) {
            if !self.is_stored(place) {
                missing.push(place);
            } else if !self.has_holes {
                break; // parents went first, so all above is there, too
            }
        }
        let was_refused = |place: &NodeIdx| self.node(*place).store_failures() > 0;
        if as_victim && (was_refused(&node) || missing.iter().any(was_refused)) {
            return Vec::new();
        }
        for place in &missing {
            let place = self.node_mut(*place);
            place.set_wants_store(true);
            place.hold(|busy| busy.store_failures = 0);
        }
        if let Some(top) = missing.last() {
            return self.pump_store(*top);
        }
        // The path itself is there; a state or a window of this node may not be.
        self.node_mut(node).set_wants_store(true);
        self.pump_store(node)
    }

    pub fn is_stored(&self, node: NodeIdx) -> bool {
        if !self.prefixes.is_empty() {
            return self.prefixes.iter().all(|i| self.held(node, *i).stored());
        }
        self.node(node).is_root()
            || (0..self.num_components).all(|i| {
                let held = self.held(node, i);
                held.stored() || held.fastest().is_none()
            })
    }

    /// Write what of this node L3 lacks, if its parent is there; wait for L2 where needed.
    pub fn pump_store(&mut self, node: NodeIdx) -> Vec<u64> {
        let mut node = node;
        let parent = self.node(node).parent;
        let mut tickets = Vec::new();
        if parent == NONE || !self.node(node).wants_store() || !self.config.has_store {
            return tickets;
        }
        if !self.node(parent).is_root() && !self.prefixes.is_empty() && !self.is_stored(parent) {
            let above = self.node(parent);
            tickets.extend(self.prefixes.iter().filter_map(|i| above.incoming(*i, Tier::Store)));
            return once_each(tickets);
        }
        let mut is_unfinished = false;
        for at in 0..self.bases_first.len() {
            let i = self.bases_first[at];
            if self.held(node, i).stored() {
                continue;
            }
            if !self.rules[i].depends_on.iter().all(|base| self.held(node, *base).stored()) {
                is_unfinished = true; // pumped again when what it depends on has arrived
                continue;
            }
            if let Some(running) = self.node(node).incoming(i, Tier::Store) {
                tickets.push(running);
            } else if self.held(node, i).in_host() {
                tickets.push(self.begin_store(i, node));
            } else if let Some(running) = self.node(node).incoming(i, Tier::Host) {
                tickets.push(running);
                is_unfinished = true;
            } else if self.held(node, i).on_device() && self.rules[i].is_prefix {
                // Only this node: its parents are in L3 already, so L2 need not keep them.
                self.free_at_once(i, self.num_slots(node, i));
                let ready = self.fitting(i, &[node], self.pools.num_free(i, Tier::Host));
                if let Some(first) = ready.first() {
                    tickets.push(self.begin_backup(i, &ready, false));
                    node = *first; // if only its leading pages found room: the rest comes after them
                } else {
                    tickets.extend(self.passing_host());
                }
                is_unfinished = true;
            }
        }
        if tickets.is_empty() && !is_unfinished {
            self.node_mut(node).set_wants_store(false);
            self.soil(node);
        }
        once_each(tickets)
    }

    /// A window or state that reached L2 when its path had been written to L3 already goes there, too.
    pub fn follow_to_store(&mut self, node: NodeIdx, component: usize) {
        let (rule, held) = (&self.rules[component], self.held(node, component));
        let was_refused = self.node(node).store_failures() > 0;
        if self.config.has_store
            && !(self.writes_back() || rule.is_prefix || was_refused)
            && held.in_host()
            && !held.stored()
            && rule.depends_on.iter().all(|base| self.held(node, *base).stored())
            && !self.is_unwanted(node)
        {
            self.node_mut(node).set_wants_store(true);
        }
    }

    /// Have `wanted` slots of L2 free, if giving up what need not go to L3 first is enough.
    ///
    /// If nothing is free then, what can go to L3 without help is sent there.
    pub fn free_at_once(&mut self, component: usize, wanted: usize) {
        let mut passed = Vec::new();
        while self.pools.num_free(component, Tier::Host) < wanted && passed.len() < FREE_AT_ONCE_TRIES {
            let Some((node, i)) = self.pop_candidate(component, Tier::Host) else { break };
            passed.push((node, i));
            let stored = self.held(node, i).stored();
            if stored && !self.unsaved(node, i).is_empty() {
                continue;
            }
            let travels = self.config.has_store && self.goes_to_store(node, i);
            let place = self.node(node);
            if stored || place.store_failures() > 0 || !(travels || place.wants_store()) {
                let units = wanted * self.pools.cost(component, Tier::Host);
                let short = units - self.pools.budget(component, Tier::Host).num_free;
                let node = self.trim(node, i, Tier::Host, short.div_ceil(self.pools.cost(i, Tier::Host)));
                if stored {
                    self.drop_payload(node, i, Tier::Host, Cause::Demote);
                } else {
                    self.lose(node, i);
                }
            }
        }
        for (node, _) in &passed {
            self.offer(*node);
        }
        if self.pools.num_free(component, Tier::Host) == 0 {
            if let Some((ready, i)) = passed.into_iter().find(|(node, i)| self.can_be_stored(*node, *i)) {
                self.node_mut(ready).set_wants_store(true);
                self.begin_store(i, ready);
            }
        }
    }

    pub fn can_be_stored(&self, node: NodeIdx, component: usize) -> bool {
        let (place, held) = (self.node(node), self.held(node, component));
        place.parent != NONE
            && (self.node(place.parent).is_root() || self.is_stored(place.parent))
            && held.in_host()
            && !held.stored()
            && place.incoming(component, Tier::Store).is_none()
            && self.rules[component].depends_on.iter().all(|base| self.held(node, *base).stored())
    }

    /// Transfers that hold payload in L2 until they end.
    ///
    /// Not the fetch of a window or state: its end is reported after that of its path's.
    pub fn passing_host(&self) -> Vec<u64> {
        let passes = |ticket: &&Ticket| {
            let is_late = ticket.kind == Kind::Fetch && !self.rules[ticket.component].depends_on.is_empty();
            (ticket.kind.source() == Tier::Host || ticket.kind.target() == Tier::Host) && !is_late
        };
        self.tickets.values().filter(passes).map(|ticket| ticket.id).collect()
    }

    pub fn begin_store(&mut self, component: usize, node: NodeIdx) -> u64 {
        let slots = self.held(node, component).slots(Tier::Host).clone();
        let part = Part { node, target: None, num_slots: slots.len() };
        let ticket = self.open_ticket(Kind::Store, component, vec![part], false);
        let keys = self.keys(node, component);
        let parents = self.parents(component, node, &keys);
        self.actions.push(Action::Store { ticket, component, keys, parents, slots });
        ticket
    }

    /// A path page hangs on the page before it; a window page or state on its own path page.
    pub fn parents(&mut self, component: usize, node: NodeIdx, keys: &[Key]) -> Vec<Option<Key>> {
        if self.rules[component].is_prefix {
            let parent = self.node(node).parent;
            let link = if self.node(parent).is_root() { None } else { self.links(parent).last().copied() };
            let above = link.map(|link| self.key_of(component, &link));
            let before = keys[..keys.len().saturating_sub(1)].iter().copied().map(Some);
            return std::iter::once(above).chain(before).collect();
        }
        match self.prefixes.first().copied() {
            None => vec![None; keys.len()],
            Some(primary) => {
                let path = self.keys(node, primary);
                path[path.len() - keys.len()..].iter().copied().map(Some).collect()
            }
        }
    }

    /// Begin writing everything that L3 lacks, parents first.
    pub fn persist(&mut self) -> Vec<u64> {
        let mut tickets = Vec::new();
        if !self.config.has_store {
            return tickets;
        }
        let mut pending: Vec<NodeIdx> =
            self.all_roots().into_iter().flat_map(|root| self.children(root)).collect();
        while let Some(node) = pending.pop() {
            let lacks = |i: usize| {
                let held = self.held(node, i);
                !held.stored() && held.fastest().is_some()
            };
            if (0..self.num_components).any(lacks) {
                self.node_mut(node).set_wants_store(true);
                tickets.extend(self.persist_node(node));
            }
            pending.extend(self.children(node));
        }
        once_each(tickets)
    }

    /// Ask L3 again for what it did not take and L2 still has, oldest failure first.
    pub fn retry_stores(&mut self) -> Vec<u64> {
        let mut failed: Vec<_> = std::mem::take(&mut self.failed_stores).into_iter().collect();
        failed.sort_unstable_by_key(|(_, (order, _))| *order);
        let mut tickets = Vec::new();
        for (id, (_, node)) in failed {
            let place = self.node(node);
            let is_there = place.is_alive() && place.id == id; // its place may be another node's by now
            let lacks = |i: usize| self.held(node, i).in_host() && !self.held(node, i).stored();
            if is_there && (0..self.num_components).any(lacks) {
                tickets.extend(self.request_store(node, false));
            }
        }
        once_each(tickets)
    }

    pub fn persist_node(&mut self, node: NodeIdx) -> Vec<u64> {
        for at in 0..self.bases_first.len() {
            let i = self.bases_first[at];
            let held = self.held(node, i);
            let is_alone = held.on_device() && !held.in_host() && !held.stored();
            if !is_alone || self.rules[i].is_prefix || self.node(node).incoming(i, Tier::Host).is_some() {
                continue;
            }
            if !self.is_base_near(node, i) {
                continue;
            }
            let ready = self.with_room(i, &[node]);
            if !ready.is_empty() {
                self.begin_backup(i, &ready, false);
            }
        }
        self.pump_store(node)
    }
}
