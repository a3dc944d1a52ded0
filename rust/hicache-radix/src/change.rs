//! Changes to a tree that goes on serving: payload thrown away on purpose, other limits, other policies.
//!
//! What open leases hold and what transfers touch is left alone, so each of these may come at any moment.

use crate::actions::Action;
use crate::demote::once_each;
use crate::error::{Error, Result};
use crate::forest::Forest;
use crate::interface::{Cause, Cleared, Namespace, Regard, Tier};
use crate::node::NodeIdx;
use crate::tokens::Token;
use crate::turns::Turns;

impl Forest {
    // ---- clearing ------------------------------------------------------------------------------
    /// Throw away what the scope has in all tiers, children first.
    pub fn clear<T: Token>(
        &mut self,
        namespace: Option<&Namespace>,
        tokens: Option<&[T]>,
        alone: bool,
    ) -> Result<Cleared> {
        let tops = self.tops(namespace, tokens)?;
        let mut scope = Vec::new();
        let mut pending = tops.clone();
        while let Some(node) = pending.pop() {
            scope.push(node);
            pending.extend(self.children(node));
        }
        scope.reverse();
        if let (true, Some(top)) = (alone, tops.first()) {
            let above = self.only_way_to(*top);
            scope.extend(above);
        }
        let mut cleared = Cleared::default();
        for node in scope {
            self.clear_node(node, &mut cleared);
            cleared.kept += self.num_held(node);
            let mut tickets = self.node(node).tickets().to_vec();
            tickets.sort_unstable();
            cleared.tickets.extend(tickets);
        }
        cleared.tickets = once_each(cleared.tickets);
        Ok(cleared)
    }

    fn tops<T: Token>(
        &mut self,
        namespace: Option<&Namespace>,
        tokens: Option<&[T]>,
    ) -> Result<Vec<NodeIdx>> {
        let Some(tokens) = tokens else {
            let roots = match namespace {
                None => self.all_roots(),
                Some(namespace) => self.roots.get(namespace).copied().into_iter().collect(),
            };
            return Ok(roots.into_iter().flat_map(|root| self.children(root)).collect());
        };
        crate::lookup::check_tokens(tokens, 0)?;
        let page = self.page_size;
        let length = tokens.len() / page * page;
        if length == 0 {
            let found = tokens.len();
            return Err(Error::Protocol(format!("a prefix of {found} tokens is less than a page of {page}")));
        }
        let default = Namespace::default();
        let found = self.walk(namespace.unwrap_or(&default), tokens, length);
        let Some((node, _)) = found.stops.last().filter(|_| found.length == length) else {
            return Ok(Vec::new());
        };
        let start = self.node(*node).start();
        if start < length - page {
            self.split(*node, (length - page - start) / page);
        }
        Ok(vec![*node])
    }

    /// The nodes above that lead nowhere else, deepest first.
    fn only_way_to(&self, top: NodeIdx) -> Vec<NodeIdx> {
        self.up(top).skip(1).take_while(|place| self.only_child(*place).is_some()).collect()
    }

    fn clear_node(&mut self, node: NodeIdx, cleared: &mut Cleared) {
        let is_idle = self.node(node).holders() == 0 && self.node(node).locks().is_empty();
        for at in (0..self.bases_first.len()).rev() {
            let i = self.bases_first[at];
            let num_slots = self.num_slots(node, i);
            for tier in Tier::POOLED {
                if self.may_leave(node, i, tier) && !self.is_base_of_pinned(node, i, tier) {
                    self.drop_payload(node, i, tier, Cause::Clear);
                    *cleared.removed.entry((i, tier as usize)).or_default() += num_slots;
                }
            }
            let held = self.held(node, i);
            let is_near = held.on_device() || held.in_host();
            let is_awaited =
                self.children(node).any(|child| self.node(child).incoming(i, Tier::Store).is_some());
            let is_busy = self.node(node).has_tickets() || held.kids(Tier::Store) > 0 || is_awaited;
            let is_free = held.stored() && !is_busy;
            if is_free && (is_idle || is_near) {
                let keys = self.keys(node, i);
                self.actions.push(Action::Forget { component: i, keys });
                self.set_stored(node, i, false, Cause::Clear);
                *cleared.removed.entry((i, Tier::Store as usize)).or_default() += num_slots;
            }
        }
    }

    /// Whether a path in L2, which a transfer keeps there, hangs on this payload of L1.
    fn is_base_of_pinned(&self, node: NodeIdx, component: usize, tier: Tier) -> bool {
        let held = self.held(node, component);
        let is_path = self.rules[component].is_prefix;
        tier == Tier::Device && is_path && !held.in_host() && held.kids(Tier::Host) > 0
    }

    fn num_held(&self, node: NodeIdx) -> usize {
        let tiers = |i: usize| Tier::ALL.iter().filter(|tier| self.held(node, i).has(**tier)).count();
        (0..self.num_components).map(|i| tiers(i) * self.num_slots(node, i)).sum()
    }

    /// Believe nothing of L3 any more.
    pub fn forget_store(&mut self) {
        for node in self.all_nodes().into_iter().rev() {
            for at in (0..self.bases_first.len()).rev() {
                self.set_stored(node, self.bases_first[at], false, Cause::Missing);
            }
        }
    }

    // ---- limits --------------------------------------------------------------------------------
    /// Use no more than so many slots, from when they are free.
    pub fn resize(&mut self, component: usize, tier: Tier, num_slots: i64) -> Result<Vec<u64>> {
        let total = self.pools.total(component, tier);
        let Some(limit) = usize::try_from(num_slots).ok().filter(|limit| (1..=total).contains(limit)) else {
            let name = &self.config.components[component].name;
            let place = format!("{name} in {}", tier.name());
            let message = format!("{place}: {num_slots} slots asked, 1 to {total} can be had");
            return Err(Error::Protocol(message));
        };
        let cost = self.pools.cost(component, tier);
        let budget = self.pools.budget_mut(component, tier);
        budget.limit = limit * cost;
        let excess = budget.capacity.saturating_sub(budget.limit).div_ceil(cost);
        self.limits.insert((self.pools.purse(component, tier), tier), limit * cost);
        self.is_resizing = true;
        Ok(if excess > 0 { self.make_room(component, tier, excess) } else { Vec::new() })
    }

    /// Take free slots out of pools that have too many, or give them back.
    pub fn approach_limits(&mut self) {
        if self.is_resizing {
            let mut is_reached = true;
            for (component, tier) in self.limits.keys() {
                is_reached &= self.pools.budget_mut(*component, *tier).approach_limit();
            }
            self.is_resizing = !is_reached;
        }
    }

    // ---- policies ------------------------------------------------------------------------------
    /// What leaves first may be other nodes: all of them queue anew.
    ///
    /// Under another policy turns begin with the leases that are open, since whoever rates turns knows no others then.
    /// So all is plain but what is kept, and L3 hears of it.
    pub fn reorder(&mut self, is_another: bool) {
        self.set_tail_len();
        let follows = self.config.eviction.follows_turns();
        let nodes = self.all_nodes();
        if follows != self.turns.is_on || (follows && is_another) {
            let before: Vec<Regard> = nodes.iter().map(|node| self.regard(*node)).collect();
            self.turns = Turns::new(follows, self.page_size);
            for lease in self.leases.values_mut() {
                lease.turn = self.turns.open(lease.id, None, Regard::Plain);
            }
            for (node, before) in nodes.iter().zip(before) {
                self.hint_if_changed(*node, before);
            }
        }
        for node in &nodes {
            if !self.config.eviction.protects_hits() {
                self.protect(*node, false);
            }
            for i in 0..self.num_components {
                for tier in Tier::ALL {
                    self.dequeue(*node, i, tier);
                }
                for tier in Tier::POOLED {
                    self.unshelter(*node, i, tier);
                }
            }
        }
        for node in nodes {
            self.offer(node);
        }
    }
}
