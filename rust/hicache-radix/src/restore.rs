//! From a vote to payload in L1: plan, fetch, load, settle.

use smallvec::SmallVec;

use crate::actions::Action;
use crate::demote::once_each;
use crate::error::{Error, Result};
use crate::forest::Forest;
use crate::interface::{Choice, PlanStep, Tier, MAX_CHOICES};
use crate::leases::LeaseState;
use crate::lookup::anywhere;
use crate::node::NodeIdx;
use crate::rules::{Lock, Locks};
use crate::slots::Slots;
use crate::tickets::{Kind, Part};

impl Forest {
    // ---- the plan ------------------------------------------------------------------------------
    /// Nodes whose payload a boundary at the end of `last` needs in L1 and does not have, root first.
    fn missing(&self, last: NodeIdx, component: usize) -> Vec<NodeIdx> {
        let rule = &self.rules[component];
        let mut nodes = Vec::new();
        let first = rule.span(self.node(last).end());
        for node in self.up(last) {
            let is_there = self.held(node, component).on_device();
            if !rule.keeps_pages {
                if !is_there {
                    nodes.push(node);
                }
                return nodes;
            }
            if self.node(node).end() <= first || (is_there && rule.is_prefix) {
                break;
            }
            if !is_there {
                nodes.push(node);
            }
        }
        nodes.reverse();
        nodes
    }

    pub fn plan(&self, lease: &LeaseState) -> Vec<PlanStep> {
        match lease.is_settled {
            true => Vec::new(),
            false => self.steps(lease.node),
        }
    }

    /// What a boundary at the end of `place` needs moved.
    fn steps(&self, place: NodeIdx) -> Vec<PlanStep> {
        let mut steps: Vec<PlanStep> = Vec::new();
        let page = self.page_size;
        for (component, rule) in self.rules.iter().enumerate() {
            let first = rule.span(self.node(place).end()) / page;
            for node in self.missing(place, component) {
                let Some(source) = self.held(node, component).fastest() else { continue };
                let last_page = self.node(node).end() / page;
                let first_page =
                    if rule.keeps_pages { first.max(self.node(node).start() / page) } else { last_page - 1 };
                match steps.last_mut() {
                    Some(last)
                        if (last.component, last.source) == (component, source)
                            && last.last_page == first_page =>
                    {
                        last.last_page = last_page;
                    }
                    _ => steps.push(PlanStep { component, source, first_page, last_page }),
                }
            }
        }
        steps
    }

    // ---- less than was found -------------------------------------------------------------------
    pub fn choices(&self, lease: &LeaseState) -> Vec<Choice> {
        let mut found: Vec<Choice> = Vec::new();
        if lease.is_settled {
            return found;
        }
        let stops = self.stops(lease);
        for node in self.legal(&stops).into_iter().rev() {
            let steps = self.steps(node);
            let is_last = steps.is_empty();
            found.push(Choice { boundary: self.node(node).end(), steps });
            if is_last {
                return found;
            }
            if found.len() == MAX_CHOICES - 1 {
                break;
            }
        }
        let boundary = match self.vote(&stops, |node, i| self.held(node, i).on_device()).num_stops {
            0 => 0,
            num => stops[num - 1].1,
        };
        found.push(Choice { boundary, steps: Vec::new() });
        found
    }

    pub fn lower(&mut self, lease: &mut LeaseState, boundary: i64) -> Result<()> {
        if lease.is_settled {
            return Err(Error::Protocol(format!("lease {} has settled", lease.id)));
        }
        let legal = self.legal(&self.stops(lease));
        let node = match boundary {
            0 => Some(self.root_of(lease.node)),
            _ => legal.into_iter().find(|node| self.node(*node).end() as i64 == boundary),
        };
        let Some(node) = node else {
            return Err(Error::Protocol(format!("lease {} cannot settle for {boundary} tokens", lease.id)));
        };
        self.stand_at(lease, node);
        Ok(())
    }

    /// The ends on the lease's path, root first.
    fn stops(&self, lease: &LeaseState) -> SmallVec<[(NodeIdx, usize); 8]> {
        let mut stops: SmallVec<_> = self.up(lease.node).map(|node| (node, self.node(node).end())).collect();
        stops.reverse();
        stops
    }

    /// Which of them every component accepts.
    fn legal(&self, stops: &[(NodeIdx, usize)]) -> Vec<NodeIdx> {
        let mut legal = Vec::new();
        self.judge(
            stops,
            |node, i| anywhere(self.held(node, i)),
            |at, is_legal| {
                if is_legal {
                    legal.push(stops[at].0);
                }
            },
        );
        legal
    }

    /// Only what the window needs is restored, not the whole node it begins in.
    fn cut_at_window_edge(&mut self, lease: &LeaseState, component: usize) {
        let rule = &self.rules[component];
        let edge = rule.span(self.node(lease.node).end());
        if !rule.keeps_pages || rule.is_prefix {
            return;
        }
        if let Some(first) = self.missing(lease.node, component).first() {
            let node = self.node(*first);
            if node.start() < edge && edge < node.end() {
                self.split(*first, (edge - self.node(*first).start()) / self.page_size);
            }
        }
    }

    // ---- room ----------------------------------------------------------------------------------
    /// Free slots for a lease, if need be beside the windows that leases hold; what to wait for.
    ///
    /// A lock takes whole nodes, so it may hold pages before its window, too. Cutting them off makes two nodes
    /// of one, so it is done only where nothing else may go.
    pub fn make_room_for(
        &mut self,
        lease: &LeaseState,
        component: usize,
        tier: Tier,
        wanted: usize,
    ) -> Vec<u64> {
        let waits = self.make_room(component, tier, wanted);
        if self.num_short(component, tier, wanted) > 0 && self.cut_at_locks(lease, component, tier) {
            return self.make_room(component, tier, wanted);
        }
        waits
    }

    /// Have no window's lock hold pages that it does not need, where the tier can free them; whether one did.
    ///
    /// `lease` is the one that is worked on, outside of the table.
    fn cut_at_locks(&mut self, lease: &LeaseState, component: usize, tier: Tier) -> bool {
        let sharers = self.pools.sharers(component, tier);
        let is_window =
            |i: usize| sharers.contains(&i) && self.rules[i].keeps_pages && !self.rules[i].is_prefix;
        let mut leases: Vec<&LeaseState> = self.leases.values().map(Box::as_ref).chain([lease]).collect();
        leases.sort_unstable_by_key(|lease| lease.id);
        let locks =
            leases.into_iter().flat_map(|lease| &lease.locks).filter(|lock| is_window(lock.component));
        let places: Vec<(NodeIdx, usize)> = locks
            .flat_map(|lock| self.locked_nodes(*lock).into_iter().map(|place| (place, lock.component)))
            .collect();
        let mut has_cut = false;
        for (place, i) in places {
            let node = self.node(place);
            let edges =
                node.locks().iter().filter(|(of, _)| *of as usize == i).map(|(_, edge)| *edge as usize);
            let (start, edge) = (node.start(), edges.min().unwrap_or(0));
            if start < edge && self.held(place, i).fastest() == Some(tier) && !node.has_tickets() {
                self.split(place, (edge - start) / self.page_size);
                has_cut = true;
            }
        }
        has_cut
    }

    // ---- L3 -> L2 ------------------------------------------------------------------------------
    pub fn fetch(&mut self, lease: &mut LeaseState) -> Vec<u64> {
        let mut waits = Vec::new();
        if lease.is_settled {
            return waits;
        }
        if lease.is_doubtful {
            self.vote_again(lease);
        }
        for at in 0..self.bases_first.len() {
            let i = self.bases_first[at];
            self.cut_at_window_edge(lease, i);
            let mut wanted = Vec::new();
            for node in self.missing(lease.node, i) {
                if let Some(running) = self.node(node).incoming(i, Tier::Host) {
                    waits.push(running);
                } else if !self.held(node, i).in_host() && self.held(node, i).stored() {
                    wanted.push(node);
                }
            }
            waits.extend(self.begin_fetch(lease, i, &wanted));
        }
        once_each(waits)
    }

    /// Pages turned out to be missing: go for the deepest boundary that is still to be had.
    fn vote_again(&mut self, lease: &mut LeaseState) {
        let node = self.deepest(lease, |forest, node, i| anywhere(forest.held(node, i)));
        if node != lease.node {
            self.stand_at(lease, node);
        }
        lease.is_doubtful = false;
    }

    /// The deepest end on the lease's path that all accept; the root if none.
    fn deepest(&mut self, lease: &LeaseState, has: impl Fn(&Self, NodeIdx, usize) -> bool) -> NodeIdx {
        let stops = self.stops(lease);
        match self.vote(&stops, |node, i| has(self, node, i)).num_stops {
            0 => self.root_of(lease.node),
            num => stops[num - 1].0,
        }
    }

    fn begin_fetch(&mut self, lease: &LeaseState, component: usize, nodes: &[NodeIdx]) -> Vec<u64> {
        let (parts, mut waits) = self.targets(lease, component, Tier::Host, nodes);
        if parts.is_empty() {
            return waits;
        }
        let slots = targets_of(&parts);
        let places: Vec<NodeIdx> = parts.iter().map(|part| part.node).collect();
        let ticket = self.open_ticket(Kind::Fetch, component, parts, false);
        let mut keys = Vec::new();
        for node in places {
            keys.extend(self.keys(node, component));
        }
        self.actions.push(Action::Fetch { ticket, component, keys, slots });
        waits.insert(0, ticket);
        waits
    }

    /// Slots for as many leading pages as the tier has room for.
    fn targets(
        &mut self,
        lease: &LeaseState,
        component: usize,
        tier: Tier,
        nodes: &[NodeIdx],
    ) -> (Vec<Part>, Vec<u64>) {
        let wanted: usize = nodes.iter().map(|node| self.num_slots(*node, component)).sum();
        let mut waits = Vec::new();
        if self.pools.num_free(component, tier) < wanted {
            waits = self.make_room_for(lease, component, tier, wanted);
        }
        let mut parts = Vec::new();
        for node in nodes {
            let whole = self.num_slots(*node, component);
            let num_slots = whole.min(self.pools.num_free(component, tier));
            if num_slots == 0 {
                break;
            }
            let place = if num_slots == whole { *node } else { self.split(*node, num_slots) };
            let target = Some(self.pools.allocate(component, tier, num_slots));
            parts.push(Part { node: place, target, num_slots });
            if num_slots < whole {
                break;
            }
        }
        (parts, waits)
    }

    // ---- L2 -> L1 ------------------------------------------------------------------------------
    pub fn load(&mut self, lease: &mut LeaseState) -> Vec<u64> {
        let mut waits = Vec::new();
        if lease.is_settled {
            return waits;
        }
        self.stand_at(lease, lease.node); // what an earlier call brought up is locked, too
        for at in 0..self.bases_first.len() {
            let i = self.bases_first[at];
            if !self.node(lease.node).is_root() && !self.rules[i].keeps_pages && lease.states[i].is_none() {
                waits.extend(self.take_state(lease, i));
            }
            self.cut_at_window_edge(lease, i);
            let mut wanted = Vec::new();
            for node in self.missing(lease.node, i) {
                if let Some(running) = self.node(node).incoming(i, Tier::Device) {
                    waits.push(running);
                } else if self.held(node, i).in_host() {
                    wanted.push(node);
                } else if self.rules[i].is_prefix {
                    break;
                }
            }
            waits.extend(self.begin_load(lease, i, &wanted));
        }
        once_each(waits)
    }

    fn begin_load(&mut self, lease: &LeaseState, component: usize, nodes: &[NodeIdx]) -> Vec<u64> {
        let (parts, mut waits) = self.targets(lease, component, Tier::Device, nodes);
        if parts.is_empty() {
            return waits;
        }
        let mut source_slots = Slots::default();
        for part in &parts {
            source_slots.append(self.held(part.node, component).slots(Tier::Host));
        }
        let target_slots = targets_of(&parts);
        let ticket = self.open_ticket(Kind::Load, component, parts, false);
        self.actions.push(Action::Copy {
            ticket,
            component,
            source: Tier::Host,
            source_slots,
            target: Tier::Device,
            target_slots,
        });
        waits.insert(0, ticket);
        waits
    }

    /// Give the lease a private state slot if one can be had; what to wait for if not.
    fn take_state(&mut self, lease: &mut LeaseState, component: usize) -> Vec<u64> {
        let mut waits = Vec::new();
        if self.pools.num_free(component, Tier::Device) == 0 {
            waits = self.make_room(component, Tier::Device, 1);
        }
        if self.pools.num_free(component, Tier::Device) > 0 {
            lease.states[component] = self.pools.allocate(component, Tier::Device, 1).first();
            return Vec::new();
        }
        waits
    }

    // ---- what really is there ------------------------------------------------------------------
    /// Lower the boundary to what L1 holds, or what loads bring there, lock that, and claim the states.
    pub fn settle(&mut self, lease: &mut LeaseState, arriving: bool) {
        if lease.lost_load {
            self.come_to_nothing(lease);
        }
        if lease.is_settled {
            return;
        }
        let node = self.deepest(lease, |forest, node, i| match arriving {
            true => forest.on_device_or_arriving(node, i),
            false => forest.held(node, i).on_device(),
        });
        self.stand_at(lease, node);
        let is_claimed = self.claim(lease);
        lease.is_settled = true;
        if is_claimed {
            self.stand_at(lease, node); // a claimed state needs no lock any more
            for i in (0..self.num_components).filter(|_| arriving) {
                if self.rules[i].keeps_pages {
                    let nodes = self.missing(lease.node, i);
                    self.trust(lease, i, &nodes);
                }
            }
        } else {
            self.lower_to_nothing(lease);
        }
        lease.base = self.node(lease.node).end();
    }

    /// Copy each shared state into the request's own slot; false if a slot is lacking.
    fn claim(&mut self, lease: &mut LeaseState) -> bool {
        if self.node(lease.node).is_root() {
            self.drop_states(lease);
            return true;
        }
        let states: Vec<usize> = (0..self.num_components).filter(|i| !self.rules[*i].keeps_pages).collect();
        for i in &states {
            if lease.states[*i].is_none() {
                self.take_state(lease, *i);
            }
            if lease.states[*i].is_none() {
                self.counters.claims_refused += 1;
                return false;
            }
        }
        for i in states {
            let Some(private) = lease.states[i] else { continue };
            let source_slots = self.held(lease.node, i).slots(Tier::Device).clone();
            let part = Part { node: lease.node, target: None, num_slots: 1 };
            let ticket = self.open_ticket(Kind::Claim, i, vec![part], false);
            self.begin_claim(lease, i, ticket, private);
            self.actions.push(Action::Copy {
                ticket,
                component: i,
                source: Tier::Device,
                source_slots,
                target: Tier::Device,
                target_slots: Slots::one(private),
            });
        }
        true
    }

    /// Tie a copy from or to the lease's private state to the lease.
    pub fn begin_claim(&mut self, lease: &mut LeaseState, component: usize, ticket: u64, private: u32) {
        if let Some(begun) = self.tickets.get_mut(&ticket) {
            begun.lease = Some((lease.id, private));
        }
        lease.take_claim(component);
        lease.claims.push((component, ticket));
    }

    fn lower_to_nothing(&mut self, lease: &mut LeaseState) {
        let root = self.root_of(lease.node);
        self.stand_at(lease, root);
        self.drop_states(lease);
    }

    /// A state or a page did not arrive, so nothing may be reused.
    pub fn come_to_nothing(&mut self, lease: &mut LeaseState) {
        self.leave_strays(lease);
        if self.node(lease.node).end() != lease.base {
            return;
        }
        for i in 0..self.num_components {
            // they were meant for pages behind the boundary
            let owned = std::mem::take(&mut lease.owned[i]);
            self.free(i, Tier::Device, owned);
        }
        lease.reserved = 0;
        self.lower_to_nothing(lease);
        lease.base = 0;
    }

    /// Give the private slots back; one that a copy still uses is freed when the copy ends.
    pub fn drop_states(&mut self, lease: &mut LeaseState) {
        for i in 0..self.num_components {
            let Some(slot) = lease.states[i].take() else { continue };
            let running = lease.take_claim(i);
            match running.and_then(|ticket| self.tickets.get_mut(&ticket)) {
                Some(ticket) => ticket.is_orphan = true,
                None => self.free(i, Tier::Device, Slots::one(slot)),
            }
        }
    }

    /// Move the lease's locks to `node`: the new ones first, so that nothing slips between.
    pub fn stand_at(&mut self, lease: &mut LeaseState, node: NodeIdx) {
        let old_node = lease.node;
        self.node_mut(node).hold(|busy| busy.holders += 1);
        lease.node = node;
        let locks = self.lock_all(node, !lease.is_settled);
        let old_locks = std::mem::replace(&mut lease.locks, locks);
        self.node_mut(old_node).hold(|busy| busy.holders -= 1);
        self.unlock_all(&old_locks);
        self.offer(old_node);
        self.soil(old_node);
        self.doubt(old_node);
        self.doubt(node);
    }

    /// Locks of every component at a node; of checkpoints only with `states`.
    pub fn lock_all(&mut self, node: NodeIdx, states: bool) -> Locks {
        let mut locks = Locks::new();
        for i in 0..self.num_components {
            if states || self.rules[i].keeps_pages {
                locks.push(self.lock(i, node));
            }
        }
        locks
    }

    pub fn unlock_all(&mut self, locks: &[Lock]) {
        for lock in locks {
            for node in self.unlock(*lock) {
                self.offer(node);
                self.soil(node);
            }
        }
    }
}

fn targets_of(parts: &[Part]) -> Slots {
    let mut slots = Slots::default();
    for target in parts.iter().filter_map(|part| part.target.as_ref()) {
        slots.append(target);
    }
    slots
}
