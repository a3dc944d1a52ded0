//! Copies from L1 to L2, and the room for them.
//!
//! L3 takes parents first, and what it takes goes through L2. So a page whose path is not all in L2 or
//! L3 may not take the last slots of L2: they are the *staging* slots, through which that path will go.
//! Without them an L2 full of suffixes could only be emptied by losing some.

use crate::actions::Action;
use crate::forest::Forest;
use crate::interface::{Tier, WritePolicy};
use crate::node::NodeIdx;
use crate::slots::Slots;
use crate::tickets::{Kind, Part};

const SELECTIVE_USES: u32 = 2;
/// One slot in so many of L2 is for staging, but at least one of two.
const STAGING_SHARE: usize = 64;

impl Forest {
    /// A request published or used the path to `node`: copy down what the policy asks for.
    pub fn after_use(&mut self, node: NodeIdx) {
        let may_write =
            self.has_host && !self.writes_back() && !self.config.pauses_writes && self.is_used_enough(node);
        if self.node(node).is_root() || !may_write {
            return;
        }
        self.backup_path(node);
        if self.config.has_store {
            self.request_store(node, false);
        }
    }

    /// Copy to L2 what of the path is nowhere but in L1, parents first.
    ///
    /// A child is not backed up before its parent is in L2 or L3: where L2 has no room, the rest of the
    /// path stays in L1 only.
    pub fn backup_path(&mut self, node: NodeIdx) {
        for at in 0..self.bases_first.len() {
            let i = self.bases_first[at];
            let mut missing = self.missing_in_host(node, i);
            if !self.rules[i].depends_on.is_empty() {
                missing.retain(|place| self.will_be_in_host(*place, i));
            }
            let ready = self.with_room(i, &missing);
            if !ready.is_empty() {
                self.begin_backup(i, &ready, false);
            }
        }
    }

    /// Nodes of the path that have the component in L1 alone, root first.
    pub fn missing_in_host(&self, node: NodeIdx, component: usize) -> Vec<NodeIdx> {
        let mut missing = Vec::new();
        let rule = &self.rules[component];
        let first = rule.span(self.node(node).end());
        for place in self.up(node) {
            if rule.keeps_pages && self.node(place).end() <= first {
                break;
            }
            let held = self.held(place, component);
            let is_lower = held.in_host() || held.stored();
            if rule.is_prefix && is_lower {
                break;
            }
            let is_coming = || self.node(place).incoming(component, Tier::Host).is_some();
            if held.on_device() && !is_lower && !is_coming() {
                missing.push(place);
            }
            if !rule.keeps_pages {
                break;
            }
        }
        missing.reverse();
        missing
    }

    pub fn will_be_in_host(&self, node: NodeIdx, component: usize) -> bool {
        self.rules[component].depends_on.iter().all(|base| {
            self.held(node, *base).in_host() || self.node(node).incoming(*base, Tier::Host).is_some()
        })
    }

    /// The leading nodes that L2 has room for; of a path also the leading pages of the next.
    pub fn with_room(&mut self, component: usize, nodes: &[NodeIdx]) -> Vec<NodeIdx> {
        let wanted: usize = nodes.iter().map(|node| self.num_slots(*node, component)).sum();
        let (Some(first), Some(last)) = (nodes.first(), nodes.last()) else { return Vec::new() };
        let kept = self.staging(*first, component);
        if self.pools.num_free(component, Tier::Host) < wanted + kept {
            self.host_room_beside(*last, component, wanted + kept);
        }
        let free = self.pools.num_free(component, Tier::Host);
        self.fitting(component, nodes, free.saturating_sub(kept))
    }

    /// The leading nodes that `free` slots hold; of a path also the leading pages of the next.
    pub fn fitting(&mut self, component: usize, nodes: &[NodeIdx], free: usize) -> Vec<NodeIdx> {
        let mut free = free;
        let mut ready = Vec::new();
        for node in nodes {
            let need = self.num_slots(*node, component);
            if need > free {
                self.counters.backups_refused += 1;
                if free > 0 && self.rules[component].is_prefix {
                    ready.push(self.split(*node, free));
                }
                break;
            }
            free -= need;
            ready.push(*node);
        }
        ready
    }

    pub fn begin_backup(&mut self, component: usize, nodes: &[NodeIdx], leaves: bool) -> u64 {
        let mut parts = Vec::with_capacity(nodes.len());
        let mut source_slots = Slots::default();
        let mut target_slots = Slots::default();
        for node in nodes {
            let held = self.held(*node, component).slots(Tier::Device);
            source_slots.append(held);
            let num_slots = held.len();
            let target = self.pools.allocate(component, Tier::Host, num_slots);
            target_slots.append(&target);
            parts.push(Part { node: *node, target: Some(target), num_slots });
        }
        let ticket = self.open_ticket(Kind::Backup, component, parts, leaves);
        self.actions.push(Action::Copy {
            ticket,
            component,
            source: Tier::Device,
            source_slots,
            target: Tier::Host,
            target_slots,
        });
        ticket
    }

    pub fn is_used_enough(&self, node: NodeIdx) -> bool {
        self.config.write != WritePolicy::WriteThroughSelective || self.node(node).uses() >= SELECTIVE_USES
    }

    // ---- room in L2 ----------------------------------------------------------------------------
    /// Slots of L2 to leave free when this node goes there: those its path needs on its way to L3.
    pub fn staging(&self, node: NodeIdx, component: usize) -> usize {
        let staging = self.staging_slots(component);
        if staging == 0 {
            return 0;
        }
        for place in self.up(node).skip(usize::from(self.rules[component].is_prefix)) {
            if self.is_stored(place) {
                break;
            }
            let has_far = |i: &usize| {
                let held = self.held(place, *i);
                !held.in_host() && !held.stored() && self.node(place).incoming(*i, Tier::Host).is_none()
            };
            if self.prefixes.iter().any(has_far) {
                return staging;
            }
        }
        0
    }

    pub fn staging_slots(&self, component: usize) -> usize {
        if !self.config.has_store {
            return 0;
        }
        let mut units = 0;
        for i in self.pools.sharers(component, Tier::Host) {
            let capacity = self.pools.capacity(*i, Tier::Host);
            if self.rules[*i].is_prefix && capacity > 1 {
                units += (capacity / STAGING_SHARE).max(1) * self.pools.cost(*i, Tier::Host);
            }
        }
        units.div_ceil(self.pools.cost(component, Tier::Host))
    }

    /// Make room for what the node has, but not from the node: it may hang on what it has there.
    pub fn host_room(&mut self, node: NodeIdx, component: usize, wanted: usize) -> Vec<u64> {
        if self.pools.num_free(component, Tier::Host) >= wanted {
            return Vec::new();
        }
        self.room_beside(vec![node], component, wanted)
    }

    /// Make room, but not from the path to `node` itself.
    ///
    /// A prefix in L2 is worth more than its suffix, unless L3 has it.
    pub fn host_room_beside(&mut self, node: NodeIdx, component: usize, wanted: usize) {
        let shielded = self.up(node).filter(|place| !self.held(*place, component).stored()).collect();
        self.room_beside(shielded, component, wanted);
    }

    fn room_beside(&mut self, shielded: Vec<NodeIdx>, component: usize, wanted: usize) -> Vec<u64> {
        let mut all = [shielded.as_slice(), &self.shielded].concat();
        all.sort_unstable();
        all.dedup();
        let outer = std::mem::replace(&mut self.shielded, all);
        let waiting = self.make_room(component, Tier::Host, wanted);
        self.shielded = outer;
        for place in shielded {
            self.offer(place);
        }
        waiting
    }
}
