//! Doubt everything: each invariant recomputed from scratch by its definition.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use crate::forest::Forest;
use crate::interface::{NodeView, PoolCount, Tier};
use crate::node::NodeIdx;
use crate::slots::Run;
use crate::turns::{Turn, TurnIdx, NO_TURN};

impl Forest {
    /// All nodes but the roots, parents first.
    pub fn all_nodes(&self) -> Vec<NodeIdx> {
        let mut nodes = Vec::with_capacity(self.num_nodes);
        let mut pending = self.all_roots();
        while let Some(node) = pending.pop() {
            if !self.node(node).is_root() {
                nodes.push(node);
            }
            pending.extend(self.children(node).rev());
        }
        nodes
    }

    /// One sentence for each broken invariant (DESIGN section 10).
    pub fn audit(&self) -> Vec<String> {
        let nodes = self.all_nodes();
        let mut findings = Vec::new();
        self.audit_structure(&nodes, &mut findings);
        self.audit_slot_owners(&nodes, &mut findings);
        self.audit_closures(&nodes, &mut findings);
        self.audit_locks(&nodes, &mut findings);
        self.audit_transfers(&nodes, &mut findings);
        self.audit_trust(&mut findings);
        self.audit_queues(&nodes, &mut findings);
        self.audit_protection(&nodes, &mut findings);
        self.audit_turns(&nodes, &mut findings);
        self.audit_dead_weight(&nodes, &mut findings);
        findings
    }

    fn audit_dead_weight(&self, nodes: &[NodeIdx], findings: &mut Vec<String>) {
        let mut found = vec![[0; 3]; self.num_components];
        for (i, tier, slots) in nodes.iter().flat_map(|at| self.weights_of(*at)) {
            found[i][tier as usize] += slots;
        }
        for (i, found) in found.iter().enumerate() {
            for (tier, found) in Tier::ALL.into_iter().zip(found) {
                let counted = self.dead_weight.slots[i][tier as usize];
                if *found != counted {
                    let place = format!("{} in {}", self.name(i), tier.name());
                    findings.push(format!("{place}: {counted} dead slots counted, {found} there"));
                }
            }
        }
    }

    fn audit_turns(&self, nodes: &[NodeIdx], findings: &mut Vec<String>) {
        let owned = nodes.iter().filter(|at| self.turns.of(**at) != NO_TURN).count();
        let listed: usize = self.turns.iter().map(|(_, turn)| turn.nodes.len()).sum();
        let agree =
            |(number, turn): (TurnIdx, &Turn)| turn.nodes.iter().all(|at| self.turns.of(*at) == number);
        if owned != listed || !self.turns.iter().all(agree) {
            findings.push(format!("the turns list {listed} nodes, {owned} nodes name a turn, or others"));
        }
        for (number, turn) in self.turns.iter() {
            let lease = turn.lease;
            let is_at_work = self.leases.get(&lease).is_some_and(|open| open.turn == number);
            if turn.is_open != is_at_work || (!turn.is_open && turn.nodes.is_empty()) {
                findings.push(format!("turn {lease} is open or kept although its lease is not"));
            }
        }
    }

    fn audit_protection(&self, nodes: &[NodeIdx], findings: &mut Vec<String>) {
        let protected = || nodes.iter().filter(|at| self.node(**at).is_protected());
        for i in 0..self.num_components {
            for tier in Tier::POOLED {
                let found: usize = protected().map(|at| self.held(*at, i).slots(tier).len()).sum();
                let counted = self.num_protected[i][tier as usize];
                if found != counted {
                    let place = format!("{} in {}", self.name(i), tier.name());
                    findings.push(format!("{place}: {counted} protected slots counted, {found} there"));
                }
            }
        }
    }

    fn name(&self, component: usize) -> &str {
        &self.config.components[component].name
    }

    fn audit_structure(&self, nodes: &[NodeIdx], findings: &mut Vec<String>) {
        let page = self.page_size;
        if self.num_nodes != nodes.len() {
            findings.push(format!("{} nodes counted, {} reachable", self.num_nodes, nodes.len()));
        }
        let (mut stored, mut siblings) = (0, 0);
        for at in nodes {
            let node = self.node(*at);
            let (id, parent) = (node.id, self.node(node.parent));
            if node.len() == 0 || node.len() % page != 0 {
                findings.push(format!("node {id} has {} tokens, not whole pages of {page}", node.len()));
            }
            if node.start != parent.end {
                let (start, end) = (node.start, parent.end);
                findings.push(format!("node {id} starts at {start}, its parent ends at {end}"));
            }
            let tokens = self.tokens_of(*at);
            let first = &tokens[..page.min(tokens.len())];
            if self.has_fork(node.parent) {
                siblings += 1;
                if self.children.find(self.nodes(), &self.tokens, node.parent, first) != Some(*at) {
                    findings.push(format!("node {id} is not found under its first page"));
                }
            }
            if self.is_dead(*at) {
                findings.push(format!("node {id} is an empty leaf"));
            }
            for i in 0..self.num_components {
                let held = self.held(*at, i);
                let expected = self.num_slots(*at, i);
                for tier in Tier::POOLED {
                    let len = held.slots(tier).len();
                    if held.has(tier) && len != expected {
                        findings.push(format!(
                            "node {id} has {len} {} slots in {}, not {expected}",
                            self.name(i),
                            tier.name()
                        ));
                    }
                }
                for tier in Tier::ALL {
                    let kids = self.children(*at).filter(|child| self.held(*child, i).has(tier)).count();
                    let counted = held.kids(tier) as usize;
                    if kids != counted {
                        findings.push(format!(
                            "node {id} counts {counted} children with {} in {}, has {kids}",
                            self.name(i),
                            tier.name()
                        ));
                    }
                }
                if held.stored() {
                    stored += expected;
                }
            }
        }
        if siblings != self.children.len() {
            findings.push(format!("{} children with siblings known, {siblings} found", self.children.len()));
        }
        if stored != self.num_stored_pages {
            findings.push(format!("{} stored pages counted, {stored} found", self.num_stored_pages));
        }
    }

    /// Slots of one pool by owner; every slot has to turn up exactly once.
    fn owners(&self, nodes: &[NodeIdx], component: usize, tier: Tier) -> [(&'static str, Vec<Run>); 5] {
        let mut tree: Vec<Run> = Vec::new();
        for node in nodes {
            tree.extend_from_slice(self.held(*node, component).slots(tier).runs());
        }
        let mut in_flight: Vec<Run> = Vec::new();
        for ticket in self.tickets.values().filter(|ticket| ticket.component == component) {
            if ticket.kind.target() == tier {
                for target in ticket.parts.iter().filter_map(|part| part.target.as_ref()) {
                    in_flight.extend_from_slice(target.runs());
                }
            }
            if let (true, Tier::Device, Some((_, slot))) = (ticket.is_orphan, tier, ticket.lease) {
                in_flight.push(Run { first: slot, len: 1 });
            }
        }
        let mut leases: Vec<Run> = Vec::new();
        if tier == Tier::Device {
            for lease in self.leases.values() {
                leases.extend_from_slice(lease.owned[component].runs());
                leases.extend(lease.states[component].map(|slot| Run { first: slot, len: 1 }));
            }
            for stray in self.strays.iter().filter(|stray| stray.component == component) {
                leases.extend_from_slice(stray.slots.runs());
            }
        }
        let (withheld, free) = self.pools.idle_runs(component, tier);
        [("free", free), ("withheld", withheld), ("tree", tree), ("lease", leases), ("in flight", in_flight)]
    }

    fn audit_slot_owners(&self, nodes: &[NodeIdx], findings: &mut Vec<String>) {
        let mut held: BTreeMap<(usize, Tier), usize> = BTreeMap::new();
        for i in 0..self.num_components {
            for tier in Tier::POOLED {
                let capacity = self.pools.total(i, tier);
                let owners = self.owners(nodes, i, tier);
                let num_held: usize =
                    owners[2..].iter().flat_map(|(_, runs)| runs).map(|run| run.len as usize).sum();
                *held.entry((self.pools.purse(i, tier), tier)).or_default() +=
                    num_held * self.pools.cost(i, tier);
                let place = format!("{} in {}", self.name(i), tier.name());
                let runs = || owners.iter().flat_map(|(_, runs)| runs);
                if runs().any(|run| run.first as usize + run.len as usize > capacity) {
                    let last = capacity as i64 - 1;
                    findings.push(format!("{place}: a slot outside 0 to {last} has an owner"));
                    continue;
                }
                let mut times = vec![0u32; capacity];
                for run in runs() {
                    for slot in run.first..run.first + run.len {
                        times[slot as usize] += 1;
                    }
                }
                let Some(slot) = times.iter().position(|count| *count != 1) else { continue };
                let has = |run: &Run| (run.first..run.first + run.len).contains(&(slot as u32));
                let held_by: Vec<&str> =
                    owners.iter().filter(|(_, runs)| runs.iter().any(has)).map(|(owner, _)| *owner).collect();
                let held_by = if held_by.is_empty() { "none".to_owned() } else { held_by.join(", ") };
                findings.push(format!("{place}: slot {slot} has {} owners ({held_by})", times[slot]));
            }
        }
        for ((i, tier), units) in held {
            let budget = self.pools.budget(i, tier);
            if budget.num_free + units != budget.capacity {
                let names: Vec<&str> = self.pools.sharers(i, tier).iter().map(|j| self.name(*j)).collect();
                findings.push(format!(
                    "{} in {}: {} units free and {units} held, of {}",
                    names.join(", "),
                    tier.name(),
                    budget.num_free,
                    budget.capacity
                ));
            }
        }
    }

    fn audit_closures(&self, nodes: &[NodeIdx], findings: &mut Vec<String>) {
        for at in nodes {
            let node = self.node(*at);
            let id = node.id;
            for (i, rule) in self.rules.iter().enumerate() {
                let name = self.name(i);
                let (held, above) = (self.held(*at, i), self.held(node.parent, i));
                let is_near = held.on_device() || held.in_host();
                if rule.is_prefix && !self.node(node.parent).is_root() {
                    if held.on_device() && !above.on_device() {
                        findings.push(format!("node {id} has {name} in DEVICE under a parent without"));
                    }
                    if is_near && !above.on_device() && !above.in_host() {
                        findings
                            .push(format!("node {id} has {name} in L1 or L2 under a parent with neither"));
                    }
                }
                for base in &rule.depends_on {
                    let base_held = self.held(*at, *base);
                    if is_near && !base_held.on_device() && !base_held.in_host() {
                        findings.push(format!("node {id} has {name} without {}", self.name(*base)));
                    }
                }
            }
        }
    }

    fn audit_locks(&self, nodes: &[NodeIdx], findings: &mut Vec<String>) {
        let mut holders: HashMap<NodeIdx, u32> = HashMap::new();
        let mut locks: HashMap<(NodeIdx, usize), u32> = HashMap::new();
        for lease in self.leases.values() {
            *holders.entry(lease.node).or_default() += 1;
            for lock in &lease.locks {
                for node in self.locked_nodes(*lock) {
                    *locks.entry((node, lock.component)).or_default() += 1;
                }
            }
        }
        for at in nodes {
            let node = self.node(*at);
            let standing = holders.get(at).copied().unwrap_or(0);
            if standing != node.holders() {
                findings.push(format!(
                    "node {} counts {} leases, {standing} stand there",
                    node.id,
                    node.holders()
                ));
            }
            for i in 0..self.num_components {
                let (counted, held) = (node.num_locks(i), locks.get(&(*at, i)).copied().unwrap_or(0));
                if counted != held {
                    findings.push(format!(
                        "node {} has {counted} {} locks, {held} are held",
                        node.id,
                        self.name(i)
                    ));
                }
            }
        }
    }

    fn audit_trust(&self, findings: &mut Vec<String>) {
        for lease in self.leases.values() {
            let ended: Vec<u64> =
                lease.arriving.iter().copied().filter(|ticket| !self.tickets.contains_key(ticket)).collect();
            if !ended.is_empty() {
                findings.push(format!("lease {} counts on tickets {ended:?}, which have ended", lease.id));
            }
        }
    }

    fn audit_transfers(&self, nodes: &[NodeIdx], findings: &mut Vec<String>) {
        let alive: HashSet<NodeIdx> = nodes.iter().copied().collect();
        let mut pins: HashMap<(NodeIdx, usize), u32> = HashMap::new();
        let mut touching: HashMap<NodeIdx, BTreeSet<u64>> = HashMap::new();
        let mut leaving: BTreeMap<(usize, Tier), usize> = BTreeMap::new();
        for ticket in self.tickets.values() {
            for part in &ticket.parts {
                let id = self.node(part.node).id;
                if !alive.contains(&part.node) {
                    findings.push(format!("ticket {} touches node {id}, which is gone", ticket.id));
                }
                touching.entry(part.node).or_default().insert(ticket.id);
                if let Some(tier) = ticket.kind.pins() {
                    *pins.entry((part.node, tier)).or_default() += 1;
                    if self.held(part.node, ticket.component).slots(ticket.kind.source()).is_empty() {
                        findings
                            .push(format!("ticket {} reads node {id}, which has nothing there", ticket.id));
                    }
                }
                if ticket.leaves {
                    *leaving.entry((ticket.component, ticket.kind.source())).or_default() += part.num_slots;
                }
            }
        }
        for at in nodes {
            let node = self.node(*at);
            let known: BTreeSet<u64> = node.tickets().iter().copied().collect();
            let real = touching.get(at).cloned().unwrap_or_default();
            if known != real {
                let (known, real): (Vec<u64>, Vec<u64>) =
                    (known.into_iter().collect(), real.into_iter().collect());
                findings.push(format!("node {} knows tickets {known:?}, not {real:?}", node.id));
            }
            for tier in Tier::POOLED {
                let counted = node.pins(tier);
                let real = pins.get(&(*at, tier as usize)).copied().unwrap_or(0);
                if counted != real {
                    findings.push(format!(
                        "node {} has {counted} pins in {}, not {real}",
                        node.id,
                        tier.name()
                    ));
                }
            }
        }
        for i in 0..self.num_components {
            for tier in Tier::POOLED {
                let counted = self.leaving[i][tier as usize];
                let real = leaving.get(&(i, tier)).copied().unwrap_or(0);
                if counted != real {
                    findings.push(format!(
                        "{counted} {} slots counted as leaving {}, not {real}",
                        self.name(i),
                        tier.name()
                    ));
                }
            }
        }
    }

    /// Whatever may leave a tier is queued to be found.
    fn audit_queues(&self, nodes: &[NodeIdx], findings: &mut Vec<String>) {
        for node in nodes {
            for i in 0..self.num_components {
                for tier in Tier::ALL {
                    let is_queued = self.is_queued_in(*node, i, tier);
                    if self.may_leave(*node, i, tier) && !is_queued {
                        findings.push(format!(
                            "node {} may leave {} with its {}, but is not queued",
                            self.node(*node).id,
                            tier.name(),
                            self.name(i)
                        ));
                    }
                }
            }
        }
    }

    // ---- views ---------------------------------------------------------------------------------
    /// Leases that need a node's path payload: those that stand at or below it.
    fn path_locks(&self) -> HashMap<NodeIdx, usize> {
        let mut held = HashMap::new();
        for lease in self.leases.values() {
            for node in self.up(lease.node) {
                *held.entry(node).or_default() += 1;
            }
        }
        held
    }

    /// Slots by owner, counted from scratch.
    pub fn pool_count(&self, component: usize, tier: Tier) -> PoolCount {
        let nodes = self.all_nodes();
        let total = |runs: &[Run]| runs.iter().map(|run| run.len as usize).sum();
        let [(_, free), _, _, (_, leases), (_, in_flight)] = self.owners(&nodes, component, tier);
        let path_locks = self.path_locks();
        let mut count = PoolCount {
            capacity: self.pools.capacity(component, tier),
            free: total(&free),
            evictable: 0,
            protected: 0,
            lease_owned: total(&leases),
            in_flight: total(&in_flight),
            others: 0,
        };
        for at in nodes {
            let held = self.held(at, component);
            let len = held.slots(tier).len();
            let is_locked = match self.rules[component].is_prefix {
                true => path_locks.contains_key(&at),
                false => self.node(at).num_locks(component) > 0,
            };
            if self.node(at).pins(tier) > 0 {
                count.in_flight += len;
            } else if is_locked {
                count.protected += len;
            } else {
                count.evictable += len;
            }
        }
        if self.pools.is_shared(component, tier) {
            count.free = self.pools.num_free(component, tier);
            let own = count.evictable + count.protected + count.lease_owned + count.in_flight;
            count.others = count.capacity - count.free - own;
        }
        count
    }

    pub fn snapshot(&self) -> Vec<NodeView> {
        let nodes = self.all_nodes();
        let path_locks = self.path_locks();
        let primary = self.prefixes.first().copied().unwrap_or(0);
        let mut last_use: HashMap<NodeIdx, i64> =
            nodes.iter().map(|node| (*node, self.held(*node, primary).used())).collect();
        if !self.prefixes.is_empty() {
            for node in nodes.iter().rev() {
                let used = last_use[node];
                if let Some(above) = last_use.get_mut(&self.node(*node).parent) {
                    *above = (*above).max(used);
                }
            }
        }
        nodes.iter().map(|node| self.view(*node, &path_locks, last_use[node])).collect()
    }

    fn view(&self, at: NodeIdx, path_locks: &HashMap<NodeIdx, usize>, last_use: i64) -> NodeView {
        let node = self.node(at);
        let parent = self.node(node.parent);
        let mut slots = Vec::new();
        for i in 0..self.num_components {
            let held = self.held(at, i);
            for tier in Tier::ALL.into_iter().filter(|tier| held.has(*tier)) {
                let mut numbers = Vec::new();
                held.slots(tier).expand(&mut numbers);
                slots.push((i, tier, numbers));
            }
        }
        NodeView {
            node: node.id,
            parent: (!parent.is_root()).then_some(parent.id),
            namespace: self.root_info(at).namespace.clone(),
            start: node.start(),
            tokens: self.tokens_of(at).to_vec(),
            slots,
            locks: (0..self.num_components)
                .map(|i| match self.rules[i].is_prefix {
                    true => path_locks.get(&at).copied().unwrap_or(0),
                    false => node.num_locks(i) as usize,
                })
                .collect(),
            last_use,
            num_uses: node.uses(),
            priority: node.priority(),
            reach: node.reach,
            is_protected: node.is_protected(),
            is_shared: node.is_shared(),
            is_kept: node.is_kept(),
            turn: self.turns.lease_of(self.turns.of(at)).map_or(-1, |lease| lease as i64),
            mark: node.mark(),
        }
    }
}
