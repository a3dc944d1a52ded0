//! Who may leave a tier, and the queues that know who goes first.

use crate::arena::Arena;
use crate::forest::Forest;
use crate::interface::Tier;
use crate::node::{Lower, Node, NodeIdx, Upper, UNQUEUED};
use crate::ordering::{rank, worth_and_used, Candidates, Entry, Group, Places, Standing, PROTECTED_SHARE};

/// What a queue sees of the nodes.
struct Standings<'a> {
    nodes: &'a Arena<Node>,
    upper: &'a mut Arena<Upper>,
    lower: &'a mut Arena<Lower>,
    stride: usize,
    component: usize,
    tier: Tier,
}

/// What the queues of protected nodes see.
struct Shelters<'a> {
    nodes: &'a Arena<Node>,
    sheltered: &'a mut Arena<[u32; 2]>,
    stride: usize,
    component: usize,
    tier: Tier,
}

impl Places for Shelters<'_> {
    fn id(&self, node: NodeIdx) -> u64 {
        self.nodes[node as usize].id
    }

    fn set_place(&mut self, node: NodeIdx, place: u32) {
        self.sheltered[node as usize * self.stride + self.component][self.tier as usize] = place;
    }
}

impl Places for Standings<'_> {
    fn id(&self, node: NodeIdx) -> u64 {
        self.nodes[node as usize].id
    }

    fn set_place(&mut self, node: NodeIdx, place: u32) {
        let at = node as usize * self.stride + self.component;
        match self.tier {
            Tier::Device => self.upper[at].place = place,
            below => self.lower[at].places[below as usize - 1] = place,
        }
    }
}

impl Forest {
    /// May the component's payload of this node leave the tier now?
    pub fn may_leave(&self, node: NodeIdx, component: usize, tier: Tier) -> bool {
        let (place, held) = (self.node(node), self.held(node, component));
        if !held.has(tier) || place.is_root() {
            return false;
        }
        if tier == Tier::Store {
            return held.kids(Tier::Store) == 0
                && place.holders() == 0
                && !place.has_tickets()
                && !held.on_device()
                && !held.in_host();
        }
        if place.pins(tier) > 0 || (tier == Tier::Host && place.pins(Tier::Device) > 0) {
            return false;
        }
        if tier == Tier::Host && self.shielded.binary_search(&node).is_ok() {
            return false;
        }
        if tier == Tier::Device && place.pins(Tier::Host) > 0 && !held.in_host() {
            return false; // what depends on it may be the payload that is being read in L2
        }
        self.rules[component].may_leave(held, place.num_locks(component), tier)
    }

    /// Whether no vote can accept what the component has here: nothing hangs on it, and no boundary
    /// stands in this node for lack of a state or a window.
    pub fn is_dead_weight(&self, node: NodeIdx, component: usize) -> bool {
        let is_missing = |i: &usize| {
            self.held(node, *i).fastest().is_none() && self.node(node).incoming(*i, Tier::Device).is_none()
        };
        if !self.needed_beside[component].iter().any(is_missing) {
            return false;
        }
        let held = self.held(node, component);
        !self.rules[component].keeps_pages || Tier::ALL.into_iter().all(|tier| held.kids(tier) == 0)
    }

    /// Whether states and windows allow a boundary after the first `num_pages`, which end inside the node.
    pub fn may_end_at(&self, node: NodeIdx, num_pages: usize) -> bool {
        let end = self.node(node).start() + num_pages * self.page_size;
        self.rules.iter().enumerate().filter(|(_, rule)| !rule.is_prefix).all(|(i, rule)| {
            let first = rule.span(end);
            let mut needed = self.up(node).take_while(|place| self.node(*place).end() > first);
            rule.keeps_pages && (first >= end || needed.all(|place| self.held(place, i).fastest().is_some()))
        })
    }

    /// Queue whatever of the node may leave now.
    pub fn offer(&mut self, node: NodeIdx) {
        if self.node(node).is_root() {
            return;
        }
        for i in 0..self.num_components {
            for tier in Tier::ALL {
                if self.held(node, i).has(tier) {
                    self.offer_in(node, i, tier);
                }
            }
        }
    }

    pub fn rank(&mut self, node: NodeIdx, component: usize, tier: Tier) -> i64 {
        self.counters.priority_evaluations += 1;
        let held = self.held(node, component);
        let is_spare = self.num_spare_pages(node) > 0;
        let standing = Standing {
            is_spare,
            worth: self.turns.worth(node, self.node(node).is_shared()),
            grace: if self.node(node).is_shared() { self.turns.grace(node) } else { 0 },
            group: if self.is_dead_weight(node, component) {
                Group::Worthless
            } else {
                Group::of(held, tier, self.node(node).is_kept())
            },
        };
        rank(&self.config.eviction, self.node(node), held, standing)
    }

    /// Which of equals goes first: the deepest, or of marks that have a pool of their own the shallowest.
    ///
    /// A spare mark insures what lies before it. Where its room can go to a path it stays longer than the tail
    /// behind it; where room for marks alone is short, the path stays, and the conversation's end is worth more.
    fn goes_from_the_tail(&self, component: usize, tier: Tier) -> bool {
        self.rules[component].is_prefix || tier == Tier::Store || self.pools.is_shared(component, tier)
    }

    pub fn offer_in(&mut self, node: NodeIdx, component: usize, tier: Tier) {
        if !self.may_leave(node, component, tier) {
            return;
        }
        let rank = self.rank(node, component, tier);
        let place = self.held(node, component).place(tier);
        match self.queues[component][tier as usize].rank_at(place) {
            Some(queued) if queued <= rank => {}
            Some(_) => self.with_queue(component, tier, |queue, places| queue.set_rank(place, rank, places)),
            None => {
                let entry = Entry::new(rank, node, self.node(node), self.goes_from_the_tail(component, tier));
                self.with_queue(component, tier, |queue, places| queue.push(entry, places));
            }
        }
        if self.node(node).is_protected() && self.limits_protection(component, tier) {
            self.shelter(node, component, tier);
        }
    }

    pub fn is_queued_in(&self, node: NodeIdx, component: usize, tier: Tier) -> bool {
        self.held(node, component).place(tier) != UNQUEUED
    }

    pub fn dequeue(&mut self, node: NodeIdx, component: usize, tier: Tier) {
        let place = self.held(node, component).place(tier);
        if place != UNQUEUED {
            self.with_queue(component, tier, |queue, places| queue.remove(place, places));
        }
    }

    /// Change a queue while it tells the nodes where they stand.
    fn with_queue(
        &mut self,
        component: usize,
        tier: Tier,
        change: impl FnOnce(&mut Candidates, &mut Standings),
    ) {
        let stride = self.num_components;
        let mut places = Standings {
            nodes: &self.nodes,
            upper: &mut self.upper,
            lower: &mut self.lower,
            stride,
            component,
            tier,
        };
        change(&mut self.queues[component][tier as usize], &mut places);
    }

    /// Units lacking for `wanted` free slots, with what running demotions will free.
    pub fn num_short(&self, component: usize, tier: Tier, wanted: usize) -> usize {
        let coming: usize = self
            .pools
            .sharers(component, tier)
            .iter()
            .map(|i| self.leaving[*i][tier as usize] * self.pools.cost(*i, tier))
            .sum();
        let there = self.pools.budget(component, tier).num_free + coming;
        (wanted * self.pools.cost(component, tier)).saturating_sub(there)
    }

    /// Take out what goes first of all that draws on the budget: the node, and whose payload; none if
    /// none may leave. Offer it again if it stays.
    pub fn pop_candidate(&mut self, component: usize, tier: Tier) -> Option<(NodeIdx, usize)> {
        let num_sharers = self.pools.sharers(component, tier).len();
        if self.config.eviction.protects_hits() {
            for at in 0..num_sharers {
                let sharer = self.pools.sharers(component, tier)[at];
                if self.limits_protection(sharer, tier) {
                    self.limit_protection(sharer, tier);
                }
            }
        }
        let mut best: Option<(Entry, usize)> = None;
        for at in 0..num_sharers {
            let i = self.pools.sharers(component, tier)[at];
            let Some(entry) = self.first_candidate(i, tier) else { continue };
            let id = |entry: &Entry| self.node(entry.node).id;
            if best.as_ref().is_none_or(|(other, _)| entry.key(id(&entry)) < other.key(id(other))) {
                best = Some((entry, i));
            }
        }
        let (entry, i) = best?;
        self.dequeue(entry.node, i, tier);
        if self.turns.is_on && !self.node(entry.node).is_shared() {
            if let Some((worth, used)) = worth_and_used(entry.rank) {
                self.turns.learn_age(tier, worth, self.tick - used);
            }
        }
        Some((entry.node, i))
    }

    /// The entry of the node that goes first; it stays in the queue.
    fn first_candidate(&mut self, component: usize, tier: Tier) -> Option<Entry> {
        while let Some(entry) = self.queues[component][tier as usize].first() {
            let node = entry.node;
            if !self.may_leave(node, component, tier) {
                self.dequeue(node, component, tier);
                continue;
            }
            let now = self.rank(node, component, tier);
            if now > entry.rank {
                self.with_queue(component, tier, |queue, places| queue.set_rank(0, now, places));
                continue;
            }
            return Some(entry);
        }
        None
    }

    // ---- protection ----------------------------------------------------------------------------
    /// Whether hits protect, and the tier is the larger of L1 and L2; L2 of two that are as large.
    fn limits_protection(&self, component: usize, tier: Tier) -> bool {
        let capacity = |tier| self.pools.capacity(component, tier);
        let larger = if capacity(Tier::Host) >= capacity(Tier::Device) { Tier::Host } else { Tier::Device };
        self.config.eviction.protects_hits() && tier == larger
    }

    fn shelter_of(&self, node: NodeIdx, component: usize, tier: Tier) -> u32 {
        let at = node as usize * self.num_components + component;
        self.sheltered.get(at).map_or(UNQUEUED, |places| places[tier as usize])
    }

    /// Have the node among those that may lose protection.
    fn shelter(&mut self, node: NodeIdx, component: usize, tier: Tier) {
        if self.shelter_of(node, component, tier) != UNQUEUED {
            return;
        }
        while self.sheltered.len() < self.upper.len() {
            self.sheltered.push([UNQUEUED; 2]);
        }
        let entry = Entry::new(self.held(node, component).used(), node, self.node(node), true);
        self.with_shelter(component, tier, |queue, places| queue.push(entry, places));
    }

    pub fn unshelter(&mut self, node: NodeIdx, component: usize, tier: Tier) {
        let place = self.shelter_of(node, component, tier);
        if place != UNQUEUED {
            self.with_shelter(component, tier, |queue, places| queue.remove(place, places));
        }
    }

    fn with_shelter(
        &mut self,
        component: usize,
        tier: Tier,
        change: impl FnOnce(&mut Candidates, &mut Shelters),
    ) {
        let stride = self.num_components;
        let mut places =
            Shelters { nodes: &self.nodes, sheltered: &mut self.sheltered, stride, component, tier };
        change(&mut self.protected[component][tier as usize], &mut places);
    }

    /// Take protection from the least recently used, until no more is protected than may be.
    fn limit_protection(&mut self, component: usize, tier: Tier) {
        let (share, whole) = PROTECTED_SHARE;
        let pool = tier as usize;
        let most = self.pools.budget(component, tier).capacity * share / whole;
        while self.num_protected_units(component, tier) > most {
            let Some(entry) = self.protected[component][pool].first() else { break };
            let node = entry.node;
            if !self.node(node).is_protected() || !self.may_leave(node, component, tier) {
                self.unshelter(node, component, tier);
                continue;
            }
            let now = self.held(node, component).used();
            if now > entry.rank {
                self.with_shelter(component, tier, |queue, places| queue.set_rank(0, now, places));
                continue;
            }
            self.unshelter(node, component, tier);
            self.protect(node, false);
            self.offer(node);
        }
    }

    /// What protected nodes take of the budget.
    fn num_protected_units(&self, component: usize, tier: Tier) -> usize {
        let units = |i: &usize| self.num_protected[*i][tier as usize] * self.pools.cost(*i, tier);
        self.pools.sharers(component, tier).iter().map(units).sum()
    }

    /// Have the node among the protected, or no longer.
    pub fn protect(&mut self, node: NodeIdx, is_protected: bool) {
        if self.node(node).is_protected() == is_protected {
            return;
        }
        self.node_mut(node).set_protected(is_protected);
        for i in 0..self.num_components {
            for tier in Tier::POOLED {
                let held = self.held(node, i).slots(tier).len();
                let count = &mut self.num_protected[i][tier as usize];
                *count = if is_protected { *count + held } else { *count - held };
            }
        }
    }

    // ---- tails ---------------------------------------------------------------------------------
    /// How many of the node's last pages lie wholly in the tail that `tlru` gives up first.
    pub fn num_spare_pages(&self, node: NodeIdx) -> usize {
        if self.tail_len == 0 {
            return 0;
        }
        let place = self.node(node);
        let begin = self.reach(node).saturating_sub(self.tail_len).max(place.start());
        place.end().saturating_sub(begin) / self.page_size
    }

    /// The longest sequence of a request that went through the node, in tokens.
    pub fn reach(&self, node: NodeIdx) -> usize {
        self.node(node).reach as usize
    }

    /// A request of that priority, `length` tokens long so far, used the path to the node.
    ///
    /// Like recency, its parents learn it when their last child leaves.
    pub fn note_use(&mut self, node: NodeIdx, priority: u32, length: usize) {
        let place = self.node_mut(node);
        place.set_priority(place.priority().max(priority));
        place.reach = place.reach.max(length as u32);
    }
}
