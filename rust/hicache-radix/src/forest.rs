//! The state of all subtrees and the few moves that keep it consistent.
//!
//! Everything above (look-up, publishing, demotion) changes the tree only through `attach`, `detach`,
//! `set_stored` (in `residency`), `split` and `merge_up` (in `merging`); so counters, queues and events
//! cannot drift. `topology` has the nodes and who hangs where.

use std::collections::BTreeMap;

use hashbrown::HashMap;

use crate::actions::Action;
use crate::arena::Arena;
use crate::children::ChildTable;
use crate::counters::Counters;
use crate::dead_weight::DeadWeight;
use crate::interface::{ComponentSpec, Namespace, ResidencyEvent, ReuseRule, Tier, TreeConfig};
use crate::keys::{ComponentKeys, Key};
use crate::leases::{LeaseState, Stray};
use crate::node::{Held, Lower, Node, NodeIdx, Upper, NONE, NOWHERE_BELOW};
use crate::ordering::Candidates;
use crate::rules::Rule;
use crate::slot_pool::Pools;
use crate::slots::Slots;
use crate::tickets::Ticket;
use crate::tokens::{Place, TokenStore};
use crate::turns::Turns;

/// What a root knows of its subtree.
#[derive(Debug, Clone)]
pub struct RootInfo {
    pub namespace: Namespace,
    pub seed: Key,
}

/// One subtree per namespace, the pools they draw on, leases, tickets and pending actions.
#[derive(Debug)]
pub struct Forest {
    pub config: TreeConfig,
    pub page_size: usize,
    pub num_components: usize,
    pub rules: Vec<Rule>,
    /// Components that are needed from the root on.
    pub prefixes: Vec<usize>,
    /// All components, those that depend on others last.
    pub bases_first: Vec<usize>,
    /// Per component, those that depend on it.
    pub dependents: Vec<Vec<usize>>,
    /// Per component, the others without whose payload at a node no boundary stands there.
    pub needed_beside: Vec<Vec<usize>>,
    /// Whether some component needs another beside it.
    pub has_dead_weight: bool,
    /// Whether there is an L2.
    pub has_host: bool,
    pub component_keys: Vec<ComponentKeys>,
    // Numbers never start again, so that a report from before a reset is known as such.
    pub next_node: u64,
    pub next_lease: u64,
    pub next_ticket: u64,
    pub first_live_ticket: u64,
    pub counters: Counters,
    /// Units of budgets that may not be used whole, by `purse` and tier.
    pub limits: BTreeMap<(usize, Tier), usize>,
    pub is_resizing: bool,

    pub nodes: Arena<Node>,
    /// `num_components` for each node.
    pub upper: Arena<Upper>,
    /// The same; empty until L2 or L3 first has something.
    pub lower: Arena<Lower>,
    /// The token chain's digests, one a page; as far as they have been asked for.
    pub links: Arena<Option<Box<Vec<Key>>>>,
    /// Where nodes stand among the protected; `num_components` for each, empty until one does.
    pub sheltered: Arena<[u32; 2]>,
    pub unused: Vec<NodeIdx>,
    pub tokens: TokenStore,
    pub children: ChildTable,
    pub roots: HashMap<Namespace, NodeIdx>,
    pub root_infos: HashMap<NodeIdx, RootInfo>,
    pub leases: HashMap<u64, Box<LeaseState>>,
    pub strays: Vec<Stray>,
    pub tickets: BTreeMap<u64, Ticket>,
    pub pools: Pools,
    pub queues: Vec<[Candidates; 3]>,
    /// Per component and tier, who may lose protection, by recency alone (`slru`).
    pub protected: Vec<[Candidates; 2]>,
    /// Who used what last (`session`).
    pub turns: Turns,
    /// Slots of protected nodes.
    pub num_protected: Vec<[usize; 2]>,
    /// How much of a conversation's end is spare (`tlru`).
    pub tail_len: usize,
    /// Slots that running demotions will free.
    pub leaving: Vec<[usize; 2]>,
    pub dead_weight: DeadWeight,
    pub num_stored_pages: usize,
    /// What L3 did not take since the last retry: by node number, when it failed first, and the node.
    pub failed_stores: HashMap<u64, (u64, NodeIdx)>,
    pub num_failed_stores: u64,
    /// L3 has lost a page while it still had what hangs below.
    pub has_holes: bool,
    pub num_nodes: usize,
    pub tick: i64,
    pub actions: Vec<Action>,
    pub events: Vec<ResidencyEvent>,
    dirty: Vec<NodeIdx>,
    /// What must not leave L2 while room is made for others, in order.
    pub shielded: Vec<NodeIdx>,
}

impl Forest {
    pub fn new(config: TreeConfig) -> Self {
        let specs = &config.components;
        let is_path = |spec: &ComponentSpec| matches!(spec.rule, ReuseRule::Path);
        let paths: Vec<usize> = (0..specs.len()).filter(|i| is_path(&specs[*i])).collect();
        let rules: Vec<Rule> = specs
            .iter()
            .map(|spec| {
                let depends_on = if is_path(spec) { Vec::new() } else { paths.clone() };
                Rule::new(spec, config.page_size, depends_on)
            })
            .collect();
        let num_components = specs.len();
        let mut bases_first: Vec<usize> = (0..num_components).collect();
        bases_first.sort_by_key(|i| !rules[*i].depends_on.is_empty());
        let depends = |i: usize, base: usize| rules[i].depends_on.contains(&base);
        let dependents = (0..num_components)
            .map(|base| (0..num_components).filter(|i| depends(*i, base)).collect())
            .collect();
        let is_needed = |i: &usize| rules[*i].is_needed_at_end;
        let needed_beside: Vec<Vec<usize>> = (0..num_components)
            .map(|i| (0..num_components).filter(|j| *j != i && is_needed(j)).collect())
            .collect();
        let component_keys = specs.iter().map(ComponentKeys::new).collect();
        let mut forest = Self {
            page_size: config.page_size,
            num_components,
            rules,
            prefixes: paths,
            bases_first,
            dependents,
            has_host: config.host_slots.iter().any(|slots| *slots > 0),
            has_dead_weight: needed_beside.iter().any(|others| !others.is_empty()),
            needed_beside,
            component_keys,
            next_node: 0,
            next_lease: 0,
            next_ticket: 0,
            first_live_ticket: 0,
            counters: Counters::new(num_components),
            limits: BTreeMap::new(),
            is_resizing: false,
            nodes: Arena::default(),
            upper: Arena::default(),
            lower: Arena::default(),
            links: Arena::default(),
            sheltered: Arena::default(),
            unused: Vec::new(),
            tokens: TokenStore::default(),
            children: ChildTable::default(),
            roots: HashMap::new(),
            root_infos: HashMap::new(),
            leases: HashMap::new(),
            strays: Vec::new(),
            tickets: BTreeMap::new(),
            pools: Pools::default(),
            queues: Vec::new(),
            protected: Vec::new(),
            turns: Turns::default(),
            num_protected: Vec::new(),
            tail_len: 0,
            leaving: Vec::new(),
            dead_weight: DeadWeight::default(),
            num_stored_pages: 0,
            failed_stores: HashMap::new(),
            num_failed_stores: 0,
            has_holes: false,
            num_nodes: 0,
            tick: 0,
            actions: Vec::new(),
            events: Vec::new(),
            dirty: Vec::new(),
            shielded: Vec::new(),
            config,
        };
        forest.start_empty();
        forest
    }

    /// The state of a new forest; numbering and counters go on.
    pub fn start_empty(&mut self) {
        let config = &self.config;
        self.nodes = Arena::default();
        self.upper = Arena::default();
        self.lower = Arena::default();
        self.links = Arena::default();
        self.sheltered = Arena::default();
        self.unused = Vec::new();
        self.tokens = TokenStore::default();
        self.children = ChildTable::default();
        self.roots = HashMap::new();
        self.root_infos = HashMap::new();
        self.leases = HashMap::new();
        self.strays = Vec::new();
        self.tickets = BTreeMap::new();
        self.pools = Pools::new(config);
        self.queues = (0..self.num_components).map(|_| Default::default()).collect();
        self.protected = (0..self.num_components).map(|_| Default::default()).collect();
        for ((component, tier), limit) in &self.limits {
            self.pools.budget_mut(*component, *tier).limit = *limit;
        }
        self.is_resizing = !self.limits.is_empty();
        self.turns = Turns::new(config.eviction.follows_turns(), config.page_size);
        self.num_protected = vec![[0; 2]; self.num_components];
        self.set_tail_len();
        self.leaving = vec![[0; 2]; self.num_components];
        self.dead_weight = DeadWeight::new(self.num_components);
        self.num_stored_pages = 0;
        self.failed_stores = HashMap::new();
        self.num_failed_stores = 0;
        self.has_holes = false;
        self.num_nodes = 0;
        self.tick = 0;
        self.actions = Vec::new();
        self.events = Vec::new();
        self.dirty = Vec::new();
        self.shielded = Vec::new();
        self.first_live_ticket = self.next_ticket;
        self.approach_limits();
    }

    pub fn set_tail_len(&mut self) {
        // Without a state or a window at its new end, what a cut tail leaves could not be reused.
        let may_spare = self.config.eviction.spares_tails() && self.rules.iter().all(|rule| rule.is_prefix);
        self.tail_len = if may_spare { self.config.tail_tokens } else { 0 };
    }

    // ---- nodes ---------------------------------------------------------------------------------
    pub fn node(&self, at: NodeIdx) -> &Node {
        &self.nodes[at as usize]
    }

    pub fn node_mut(&mut self, at: NodeIdx) -> &mut Node {
        &mut self.nodes[at as usize]
    }

    pub fn held(&self, at: NodeIdx, component: usize) -> Held<'_> {
        let place = at as usize * self.num_components + component;
        Held { upper: &self.upper[place], lower: self.lower.get(place).unwrap_or(&NOWHERE_BELOW) }
    }

    pub fn upper_mut(&mut self, at: NodeIdx, component: usize) -> &mut Upper {
        &mut self.upper[at as usize * self.num_components + component]
    }

    pub fn lower_mut(&mut self, at: NodeIdx, component: usize) -> &mut Lower {
        while self.lower.len() < self.upper.len() {
            self.lower.push(Lower::new());
        }
        &mut self.lower[at as usize * self.num_components + component]
    }

    pub fn slots_mut(&mut self, at: NodeIdx, component: usize, tier: Tier) -> &mut Slots {
        match tier {
            Tier::Device => &mut self.upper_mut(at, component).slots,
            _ => &mut self.lower_mut(at, component).slots,
        }
    }

    /// Take the slots out, if there are any.
    pub fn take_slots(&mut self, at: NodeIdx, component: usize, tier: Tier) -> Slots {
        if self.held(at, component).slots(tier).is_empty() {
            return Slots::NONE;
        }
        std::mem::take(self.slots_mut(at, component, tier))
    }

    pub fn kids_mut(&mut self, at: NodeIdx, component: usize, tier: Tier) -> &mut u32 {
        match tier {
            Tier::Device => &mut self.upper_mut(at, component).kids,
            below => &mut self.lower_mut(at, component).kids[below as usize - 1],
        }
    }

    /// The arena, for look-ups.
    pub fn nodes(&self) -> &Arena<Node> {
        &self.nodes
    }

    /// Slots the component has at this node when it is there.
    pub fn num_slots(&self, node: NodeIdx, component: usize) -> usize {
        if self.rules[component].keeps_pages {
            self.node(node).len() / self.page_size
        } else {
            1
        }
    }

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

    /// Slots go back to their pool.
    pub fn free(&mut self, component: usize, tier: Tier, slots: Slots) {
        if !slots.is_empty() {
            self.pools.free(component, tier, &slots);
            self.actions.push(Action::Free { component, tier, slots });
        }
    }
}
