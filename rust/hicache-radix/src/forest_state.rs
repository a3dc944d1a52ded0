//! What a forest knows: all its state. `forest` moves it.

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
use crate::node::{Held, Lower, Node, NodeIdx, Upper, NOWHERE_BELOW};
use crate::ordering::Candidates;
use crate::rules::Rule;
use crate::slot_pool::Pools;
use crate::slots::Slots;
use crate::tickets::Ticket;
use crate::tokens::TokenStore;
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
    pub dirty: Vec<NodeIdx>,
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
}
