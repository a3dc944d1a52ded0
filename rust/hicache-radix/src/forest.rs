//! The few moves that keep the state of all subtrees consistent.
//!
//! Everything above (look-up, publishing, demotion) changes the tree only through `attach`, `detach`,
//! `set_stored` (in `residency`), `split` and `merge_up` (in `merging`); so counters, queues and events
//! cannot drift. `topology` has the nodes and who hangs where.

use crate::actions::Action;
use crate::interface::Tier;
use crate::node::{NodeIdx, NONE};
use crate::slots::Slots;
use crate::tokens::Place;

pub use crate::forest_state::{Forest, RootInfo};

impl Forest {
    /// Cut a node after `num_pages`; returns the new prefix. The suffix keeps its identity.
    ///
    /// ```text
    /// parent -- node(abcd)    =>    parent -- prefix(ab) -- node(cd)
    /// ```
    ///
    /// Both halves have the recency, the uses and the pins of the whole; a window's lock reaches the
    /// prefix only if the window does; states, leases and the mark belong to the end, so they stay.
    pub fn split(&mut self, node: NodeIdx, num_pages: usize) -> NodeIdx {
        let cut = num_pages * self.page_size;
        let parent = self.node(node).parent;
        assert!(
            parent != NONE && 0 < cut && cut < self.node(node).len(),
            "node {} of {} tokens cannot be cut at {cut}",
            self.node(node).id,
            self.node(node).len()
        );
        let start = self.node(node).start;
        let middle = start + cut as u32;
        let prefix = self.new_node(parent, start);
        if let Some(mut links) = self.take_links(node) {
            let tail = links.split_off(num_pages);
            self.set_links(prefix, *links);
            self.set_links(node, tail);
        }
        let whole = self.node(node);
        let (run, created, uses, reach) = (whole.run, whole.created, whole.uses(), whole.reach);
        let (wants_store, failures) = (whole.wants_store(), whole.store_failures());
        let (priority, is_protected) = (whole.priority(), whole.is_protected());
        let (is_shared, is_kept) = (whole.is_shared(), whole.is_kept());
        let new = self.node_mut(prefix);
        (new.run, new.created, new.end, new.reach) = (run, created, middle, reach);
        new.set_uses(uses);
        new.set_priority(priority);
        new.set_protected(is_protected);
        new.set_shared(is_shared);
        new.set_kept(is_kept);
        new.set_wants_store(wants_store);
        new.hold(|busy| busy.store_failures = failures);
        let turn = self.turns.of(node);
        self.turns.own(prefix, self.nodes[prefix as usize].end(), turn);
        self.replace_child(parent, node, prefix);
        self.node_mut(node).start = middle;
        self.append_child(prefix, node);
        for i in 0..self.num_components {
            self.upper_mut(prefix, i).used = self.held(node, i).used();
            if !self.rules[i].keeps_pages {
                self.move_kid(node, i, parent, prefix);
                continue;
            }
            for tier in Tier::POOLED {
                if self.held(node, i).has(tier) {
                    let head = self.slots_mut(node, i, tier).take_front(num_pages);
                    *self.slots_mut(prefix, i, tier) = head;
                    *self.kids_mut(prefix, i, tier) = 1;
                }
            }
            if self.held(node, i).stored() {
                self.lower_mut(prefix, i).stored = true;
                *self.kids_mut(prefix, i, Tier::Store) = 1;
            }
        }
        for (component, edge) in self.node(node).locks().to_vec() {
            // A state's lock has its edge at the last token, which stays with the suffix.
            if edge < middle {
                self.node_mut(prefix).lock(component as usize, edge);
            }
        }
        if self.node(node).has_tickets() {
            for ticket in self.node(node).tickets().to_vec() {
                self.split_ticket(ticket, node, prefix, num_pages);
            }
        }
        self.num_nodes += 1;
        if !self.rules.iter().all(|rule| rule.keeps_pages) {
            self.offer(parent); // it may have lost the child that kept its own state from being forgotten
        }
        self.offer(prefix);
        self.offer(node);
        self.soil(node);
        self.doubt(node);
        prefix
    }

    pub fn move_kid(&mut self, node: NodeIdx, component: usize, old: NodeIdx, new: NodeIdx) {
        for tier in Tier::ALL {
            if self.held(node, component).has(tier) {
                *self.kids_mut(old, component, tier) -= 1;
                *self.kids_mut(new, component, tier) += 1;
            }
        }
    }

    fn split_ticket(&mut self, number: u64, node: NodeIdx, prefix: NodeIdx, num_pages: usize) {
        let Some(ticket) = self.tickets.get_mut(&number) else { return };
        let (component, kind) = (ticket.component, ticket.kind);
        if !self.rules[component].keeps_pages {
            return;
        }
        ticket.split(node, prefix, num_pages);
        let is_coming = self.node(node).incoming(component, kind.target()) == Some(number);
        self.node_mut(prefix).hold(|busy| {
            busy.add_ticket(number);
            if let Some(tier) = kind.pins() {
                busy.pins[tier] += 1;
            }
            if is_coming {
                busy.set_incoming(component, kind.target(), number);
            }
        });
    }

    /// Remember a node whose chain may be merged or pruned when the operation ends.
    pub fn soil(&mut self, node: NodeIdx) {
        let place = self.node_mut(node);
        if !place.is_dirty() {
            place.set_dirty(true);
            self.dirty.push(node);
        }
    }

    /// Prune empty leaves and merge chains around the nodes this operation touched.
    pub fn tidy(&mut self) {
        while let Some(mut node) = self.dirty.pop() {
            if !self.node(node).is_alive() {
                continue;
            }
            self.node_mut(node).set_dirty(false);
            while !self.node(node).is_root() && self.is_dead(node) {
                let parent = self.node(node).parent;
                self.remove_child(parent, node);
                let Place { run, start, end } = self.node(node).place();
                self.tokens.cut(run, start);
                self.turns.cut(node, start, end);
                self.bury(node);
                self.num_nodes -= 1;
                node = parent;
            }
            if self.node(node).is_root() {
                self.drop_empty_root(node);
                continue;
            }
            while self.merge_up(node) {}
            if let Some(child) = self.only_child(node) {
                self.merge_up(child);
            }
        }
    }

    pub fn is_empty(&self, node: NodeIdx) -> bool {
        (0..self.num_components).all(|i| self.held(node, i).fastest().is_none())
    }

    pub fn is_dead(&self, node: NodeIdx) -> bool {
        let place = self.node(node);
        place.is_leaf() && place.holders() == 0 && !place.has_tickets() && self.is_empty(node)
    }

    fn drop_empty_root(&mut self, node: NodeIdx) {
        let place = self.node(node);
        if !place.is_leaf() || place.holders() > 0 {
            return;
        }
        if let Some(info) = self.root_infos.remove(&node) {
            self.roots.remove(&info.namespace);
            self.bury(node);
        }
    }

    // ---- payload -------------------------------------------------------------------------------
    /// Payload left a tier: the parent may follow, and inherits the recency of its child.
    pub fn left(&mut self, node: NodeIdx, component: usize, _tier: Tier) {
        let parent = self.node(node).parent;
        if parent != NONE && !self.node(parent).is_root() {
            if self.rules[component].is_prefix {
                let (used, uses) = (self.held(node, component).used(), self.node(node).uses());
                if self.held(parent, component).used() <= used {
                    self.own(parent, self.turns.of(node));
                    if self.node(node).is_shared() {
                        self.share(parent);
                    }
                }
                let above = self.upper_mut(parent, component);
                above.used = above.used.max(used);
                let above = self.node_mut(parent);
                above.set_uses(above.uses().max(uses));
                let (priority, reach) = (self.node(node).priority(), self.reach(node));
                self.note_use(parent, priority, reach);
                if self.node(node).is_protected() {
                    self.protect(parent, true);
                }
            }
            self.offer(parent);
        }
        self.offer(node);
        self.soil(node);
    }

    /// Slots go back to their pool. What goes there one after the other is one action.
    pub fn free(&mut self, component: usize, tier: Tier, slots: Slots) {
        if !slots.is_empty() {
            self.pools.free(component, tier, &slots);
            match self.actions.last_mut() {
                Some(Action::Free { component: same, tier: there, slots: known })
                    if *same == component && *there == tier =>
                {
                    known.append(&slots);
                }
                _ => self.actions.push(Action::Free { component, tier, slots }),
            }
        }
    }
}
