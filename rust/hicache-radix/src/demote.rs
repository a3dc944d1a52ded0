//! Pressure: who leaves a tier, and what has to be copied down before.
//!
//! ```text
//! L1 victim   in L2?  -- yes --> free at once
//!                 no      (`admits_by_rank`: and would it go first of a full L2? free at once or drop)
//!             may it enter L2 (used twice, under the selective policy), or are descendants there?
//!                 yes, and there is room  --> copy to L2, free at commit
//!                 no
//!             free at once if L3 has it, else drop
//!
//! L2 victim   in L3?  -- yes --> free at once
//!                 no
//!             also in L1, with nothing below it in L2?  -- yes --> free at once
//!                 no
//!             wanted in L3 (write_back, or queued)?  -- yes --> store (parents first), free at commit
//!                 no
//!             drop, with everything that depends on it
//! ```
//!
//! Where components share the budget of L2, what goes first is the lesser of their queues' heads, whoever
//! asked for the room.

use crate::forest::Forest;
use crate::interface::{Cause, Tier, WritePolicy};
use crate::node::{NodeIdx, NONE};

/// How many candidates are looked at for one that may leave L2 without a transfer.
pub const FREE_AT_ONCE_TRIES: usize = 64;

/// What became of a victim.
#[derive(Debug)]
enum Outcome {
    /// It is gone, or leaves when a copy that was begun ends.
    Leaves,
    /// It has to wait for these transfers; with none, there is no way.
    Blocked(Vec<u64>),
}

impl Forest {
    // ---- making room ---------------------------------------------------------------------------
    /// Free slots until `wanted` are free or nothing more may leave.
    ///
    /// Returns the transfers that will free more when they end; none means that all is done that can
    /// be done.
    pub fn make_room(&mut self, component: usize, tier: Tier, wanted: usize) -> Vec<u64> {
        let wanted = wanted.min(self.pools.capacity(component, tier));
        let mut kept = Vec::new();
        let mut waiting = Vec::new();
        loop {
            let short = self.num_short(component, tier, wanted);
            if short == 0 {
                break;
            }
            let Some((victim, i)) = self.pop_candidate(component, tier) else { break };
            let victim = self.trim(victim, i, tier, short.div_ceil(self.pools.cost(i, tier)));
            let outcome = match tier {
                Tier::Device => self.leave_device(victim, i),
                _ => self.leave_host(victim, i),
            };
            if let Outcome::Blocked(tickets) = outcome {
                kept.push(victim);
                if !tickets.is_empty() {
                    waiting = tickets;
                    break;
                }
            }
        }
        for node in kept {
            self.offer(node);
        }
        if self.pools.num_free(component, tier) >= wanted {
            return Vec::new();
        }
        let mut tickets = self.holding(component, tier);
        tickets.extend(waiting);
        once_each(tickets)
    }

    /// Transfers that keep payload in the tier until they end; those that free slots here first.
    pub fn holding(&self, component: usize, tier: Tier) -> Vec<u64> {
        let sharers = self.pools.sharers(component, tier);
        let mut freeing = Vec::new();
        let mut pinning = Vec::new();
        for ticket in self.tickets.values() {
            if ticket.kind.pins().is_none() {
                continue;
            }
            let frees = ticket.leaves && sharers.contains(&ticket.component) && ticket.kind.source() == tier;
            (if frees { &mut freeing } else { &mut pinning }).push(ticket.id);
        }
        freeing.extend(pinning);
        freeing
    }

    /// Cut so that only the tail pages that are needed go, and no more at once than L2 can take.
    pub fn trim(&mut self, node: NodeIdx, component: usize, tier: Tier, short: usize) -> NodeIdx {
        if !self.rules[component].is_prefix {
            return node;
        }
        let pages = self.node(node).len() / self.page_size;
        let mut wanted = if self.config.by_leaf { pages } else { pages.min(short) };
        match self.num_spare_pages(node) {
            0 => {}
            spare => wanted = wanted.min(spare), // what stands before the tail has a rank of its own
        }
        let held = self.held(node, component);
        if tier == Tier::Device && self.config.has_store && !held.in_host() && !held.stored() {
            let capacity = self.pools.capacity(component, Tier::Host);
            wanted = wanted.min(capacity.saturating_sub(self.staging_slots(component)).max(1));
        }
        if wanted < pages
            && (self.may_end_at(node, pages - wanted) || !self.will_be_lost(node, component, tier))
        {
            self.split(node, pages - wanted);
        }
        node
    }

    /// Whether no other tier has this payload when it has left this one.
    fn will_be_lost(&self, node: NodeIdx, component: usize, tier: Tier) -> bool {
        let held = self.held(node, component);
        if held.stored() {
            return false;
        }
        match tier {
            Tier::Device if held.in_host() => false,
            Tier::Device => {
                self.pools.capacity(component, Tier::Host) == 0 || !self.belongs_in_host(node, component)
            }
            _ if held.on_device() => false,
            _ => !(self.config.has_store && self.goes_to_store(node, component)),
        }
    }

    /// Take a victim out of L1, now or when its copy is done.
    ///
    /// What L3 has and L2 lacks goes to L2 all the same: it is the most recently used payload that
    /// leaves L1, and L2 is where it is looked for next. Only if L2 has no room does it go at once.
    fn leave_device(&mut self, node: NodeIdx, component: usize) -> Outcome {
        let held = self.held(node, component);
        if held.in_host() {
            self.drop_payload(node, component, Tier::Device, Cause::Demote);
            return Outcome::Leaves;
        }
        let stored = held.stored();
        let has_lower_kids = self.rules[component].is_prefix && held.kids(Tier::Host) > 0;
        if has_lower_kids || (self.belongs_in_host(node, component) && !self.is_declined(node, component)) {
            match self.demote(node, component) {
                Outcome::Leaves => return Outcome::Leaves,
                Outcome::Blocked(tickets) => {
                    if has_lower_kids || (!tickets.is_empty() && !stored) {
                        return Outcome::Blocked(tickets);
                    }
                }
            }
        }
        let cause = if stored { Cause::Demote } else { Cause::Evict };
        self.drop_payload(node, component, Tier::Device, cause);
        Outcome::Leaves
    }

    /// Whether there is an L2, this payload is worth a place in it, and the write policy lets it in at all.
    pub fn belongs_in_host(&self, node: NodeIdx, component: usize) -> bool {
        self.has_host && self.is_used_enough(node) && !self.is_dead_weight(node, component)
    }

    /// Whether a full L2 would lose for it what goes after it. What L3 lacks has to go through L2.
    fn is_declined(&mut self, node: NodeIdx, component: usize) -> bool {
        if !self.config.admits_by_rank
            || (self.config.has_store && !self.held(node, component).stored())
            || self.pools.num_free(component, Tier::Host) >= self.num_slots(node, component)
        {
            return false;
        }
        let Some((first, i)) = self.pop_candidate(component, Tier::Host) else { return false };
        // As it would stand in L2 alone; as in L3 it is no duplicate there.
        let is_first = self.rank(node, component, Tier::Store) < self.rank(first, i, Tier::Host);
        self.offer_in(first, i, Tier::Host);
        is_first
    }

    /// Copy down and leave at commit.
    fn demote(&mut self, node: NodeIdx, component: usize) -> Outcome {
        if !self.is_base_near(node, component) {
            return Outcome::Blocked(Vec::new());
        }
        let wanted = self.num_slots(node, component) + self.staging(node, component);
        let waiting = self.host_room(node, component, wanted);
        if self.pools.num_free(component, Tier::Host) < wanted {
            return Outcome::Blocked(waiting);
        }
        self.begin_backup(component, &[node], true);
        for at in 0..self.dependents[component].len() {
            let dependent = self.dependents[component][at];
            let held = self.held(node, dependent);
            if !held.on_device() || held.in_host() || held.stored() {
                continue;
            }
            let need = self.num_slots(node, dependent) + self.staging(node, dependent);
            self.host_room(node, dependent, need);
            if self.pools.num_free(dependent, Tier::Host) >= need {
                self.begin_backup(dependent, &[node], true);
            }
        }
        Outcome::Leaves
    }

    /// A dependent may enter L2 only while what it depends on is in L1 or L2.
    pub fn is_base_near(&self, node: NodeIdx, component: usize) -> bool {
        let near = |base: &usize| self.held(node, *base).in_host() || self.held(node, *base).on_device();
        self.rules[component].depends_on.iter().all(near)
    }

    /// Take a victim out of L2, now or when L3 has it.
    fn leave_host(&mut self, node: NodeIdx, component: usize) -> Outcome {
        if self.held(node, component).stored() {
            let unsaved = self.unsaved(node, component);
            if !unsaved.is_empty() {
                let begin = |dependent| self.begin_store(dependent, node);
                return Outcome::Blocked(unsaved.into_iter().map(begin).collect());
            }
            self.drop_payload(node, component, Tier::Host, Cause::Demote);
            return Outcome::Leaves;
        }
        let is_duplicate = self.held(node, component).on_device();
        if let Some(above) = self.store_above(node, component) {
            return Outcome::Blocked(if is_duplicate { Vec::new() } else { vec![above] });
        }
        if self.config.has_store && self.goes_to_store(node, component) {
            let tickets = self.request_store(node, true);
            if let Some(begun) = self.node(node).incoming(component, Tier::Store) {
                self.mark_leaving(begun);
                return Outcome::Leaves;
            }
            if !tickets.is_empty() {
                return Outcome::Blocked(tickets);
            }
        }
        self.lose(node, component);
        Outcome::Leaves
    }

    /// L2 gives up what L3 does not have.
    pub fn lose(&mut self, node: NodeIdx, component: usize) {
        if self.config.has_store && !self.held(node, component).on_device() && self.is_unwanted(node) {
            self.counters.stores_declined += self.num_slots(node, component) as u64;
        }
        self.drop_payload(node, component, Tier::Host, Cause::Evict);
    }

    /// Must this victim be in L3 before L2 may lose it?
    ///
    /// A duplicate loses nothing, but what hangs below it in L2 could not be stored without it.
    pub fn goes_to_store(&self, node: NodeIdx, component: usize) -> bool {
        if self.is_dead_weight(node, component) {
            return false;
        }
        let held = self.held(node, component);
        if held.on_device() {
            return held.kids(Tier::Host) > 0 && self.rules[component].is_prefix;
        }
        self.is_wanted_below(node)
    }

    fn is_wanted_below(&self, node: NodeIdx) -> bool {
        self.node(node).wants_store() || (self.writes_back() && !self.is_unwanted(node))
    }

    /// What would leave L2 together with this payload, has to be in L3 before, and can be written now.
    pub fn unsaved(&self, node: NodeIdx, component: usize) -> Vec<usize> {
        let was_refused = self.node(node).store_failures() > 0;
        if !self.config.has_store || was_refused || self.held(node, component).on_device() {
            return Vec::new();
        }
        let is_unsaved = |dependent: &usize| {
            let (held, rule) = (self.held(node, *dependent), &self.rules[*dependent]);
            held.in_host()
                && !held.stored()
                && self.node(node).incoming(*dependent, Tier::Store).is_none()
                && rule.depends_on.iter().all(|base| self.held(node, *base).stored())
                && !self.is_dead_weight(node, *dependent)
                && self.is_wanted_below(node)
        };
        self.dependents[component].iter().copied().filter(is_unsaved).collect()
    }

    pub fn writes_back(&self) -> bool {
        self.config.write == WritePolicy::WriteBack
    }

    pub fn mark_leaving(&mut self, ticket: u64) {
        if let Some(ticket) = self.tickets.get_mut(&ticket) {
            if !ticket.leaves {
                ticket.leaves = true;
                self.leaving[ticket.component][Tier::Host as usize] += ticket.num_slots();
            }
        }
    }

    /// The parent's way to L3, if this waits for it; until it is there itself it must not leave L2.
    pub fn store_above(&self, node: NodeIdx, component: usize) -> Option<u64> {
        let place = self.node(node);
        if !place.wants_store() || self.held(node, component).stored() || place.parent == NONE {
            return None;
        }
        self.node(place.parent).incoming(component, Tier::Store)
    }

    /// A demotion's copy arrived: give up the upper copy, unless something that would go along is not safe.
    pub fn leave(&mut self, node: NodeIdx, component: usize, tier: Tier) {
        let unsaved = if tier == Tier::Host { self.unsaved(node, component) } else { Vec::new() };
        if unsaved.is_empty() {
            self.drop_payload(node, component, tier, Cause::Demote);
        }
        for dependent in unsaved {
            self.begin_store(dependent, node);
        }
    }

    /// Payload leaves the tier, and takes along what is worth nothing without it.
    pub fn drop_payload(&mut self, node: NodeIdx, component: usize, tier: Tier, cause: Cause) {
        self.detach(node, component, tier, cause);
        for at in 0..self.dependents[component].len() {
            let dependent = self.dependents[component][at];
            let base = self.held(node, component);
            let is_gone = !base.on_device() && !base.in_host();
            for place in Tier::POOLED {
                let is_taken = is_gone || (place == tier && tier == Tier::Device);
                if !self.held(node, dependent).has(place) || self.node(node).pins(place) > 0 || !is_taken {
                    continue;
                }
                if place == Tier::Device
                    && !is_gone
                    && !self.held(node, dependent).in_host()
                    && self.demote_dependent(node, dependent)
                {
                    continue;
                }
                let held = self.held(node, dependent);
                let has_lower = place == Tier::Device && held.in_host();
                let is_kept = !is_gone && (has_lower || held.stored());
                let cause = if is_kept { Cause::Demote } else { Cause::Cascade };
                self.detach(node, dependent, place, cause);
            }
        }
        if self.held(node, component).fastest().is_none() {
            for at in 0..self.dependents[component].len() {
                let dependent = self.dependents[component][at];
                if self.node(node).incoming(dependent, Tier::Store).is_none() {
                    self.set_stored(node, dependent, false, Cause::Cascade);
                }
            }
        }
    }

    pub fn demote_dependent(&mut self, node: NodeIdx, component: usize) -> bool {
        if self.held(node, component).stored() || !self.belongs_in_host(node, component) {
            return false;
        }
        matches!(self.demote(node, component), Outcome::Leaves)
    }

    /// Keep what the tree remembers of L3 within its limit.
    pub fn forget_beliefs(&mut self) {
        while self.num_stored_pages > self.config.max_stored_pages {
            let found = (0..self.num_components).find_map(|i| self.pop_candidate(i, Tier::Store));
            let Some((node, _)) = found else { return };
            self.counters.beliefs_forgotten += 1;
            for i in 0..self.num_components {
                self.set_stored(node, i, false, Cause::Evict);
            }
        }
    }
}

/// Each ticket at its first place.
pub fn once_each(tickets: Vec<u64>) -> Vec<u64> {
    let mut seen = Vec::with_capacity(tickets.len());
    for ticket in tickets {
        if !seen.contains(&ticket) {
            seen.push(ticket);
        }
    }
    seen
}
