//! When a component's payload can be reused, what holds it, what may leave. One file per rule.

mod checkpoint;
mod path;
mod window;

use smallvec::SmallVec;

use crate::forest::Forest;
use crate::interface::{ComponentSpec, ReuseRule, SpanVote, Tier};
use crate::node::{Held, Node, NodeIdx};

/// A reuse rule for one component.
#[derive(Debug, Clone)]
pub struct Rule {
    pub kind: ReuseRule,
    page_size: usize,
    window_tokens: usize,
    /// Components without whose payload, in L1 or L2 on the same node, this one is worth nothing.
    pub depends_on: Vec<usize>,
    /// One slot a page; false: one state at the end of a node.
    pub keeps_pages: bool,
    /// Payload is needed from the root on, so it leaves a tier from the tail only.
    pub is_prefix: bool,
    /// No boundary stands at the end of a node, or inside it, without this payload there. A path needs no
    /// saying so; what a user's own rule needs is not known.
    pub is_needed_at_end: bool,
}

/// The receipt of a lock; the only way to undo it.
///
/// It holds the nodes with tokens from `edge` on, up to the end of one node: of a path up to where L1
/// begins, of a window all of it, of a state the node it belongs to. Each of them carries the edge, so
/// a split hands it to the prefix exactly if the span reaches in:
///
/// ```text
///   prefix | suffix            prefix | suffix
/// ....[====|======]            .......|.[=====]
///   locked | locked              free | locked
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Lock {
    pub component: usize,
    node: NodeIdx,
    edge: u32,
}

/// Those of one lease.
pub type Locks = SmallVec<[Lock; 2]>;

/// One component's vote, fed the nodes of a path from the root outwards.
pub struct Validator {
    is_unbroken: bool,
    run_start: Option<usize>,
    custom: Option<Box<dyn SpanVote>>,
}

impl Rule {
    pub fn new(spec: &ComponentSpec, page_size: usize, depends_on: Vec<usize>) -> Self {
        Self {
            kind: spec.rule.clone(),
            page_size,
            window_tokens: spec.window_tokens,
            depends_on,
            keeps_pages: !matches!(spec.rule, ReuseRule::Checkpoint),
            is_prefix: matches!(spec.rule, ReuseRule::Path),
            is_needed_at_end: matches!(spec.rule, ReuseRule::Window | ReuseRule::Checkpoint),
        }
    }

    /// A fresh vote.
    pub fn validator(&self) -> Validator {
        let custom = match &self.kind {
            ReuseRule::Custom(rule) => Some(rule.validator()),
            _ => None,
        };
        Validator { is_unbroken: true, run_start: None, custom }
    }

    /// May a request reuse `[0, end)`? Args: `has`: whether the payload counts as resident here.
    pub fn vote(&self, state: &mut Validator, has: bool, node: &Node, end: usize) -> bool {
        if let Some(custom) = &mut state.custom {
            return custom.accepts(node.start(), node.end(), has, end);
        }
        match self.kind {
            ReuseRule::Path => path::vote(state, has),
            ReuseRule::Checkpoint => checkpoint::vote(has, node, end),
            ReuseRule::Window | ReuseRule::Custom(_) => window::vote(self, state, has, node, end),
        }
    }

    /// First token (a page start) whose payload reuse at `end` needs; `end` for a state.
    pub fn span(&self, end: usize) -> usize {
        match &self.kind {
            ReuseRule::Path => 0,
            ReuseRule::Window => window::frontier(end, self.window_tokens, self.page_size),
            ReuseRule::Checkpoint => end,
            ReuseRule::Custom(rule) => rule.span(end),
        }
    }

    /// May the payload leave the tier, as far as this rule is concerned?
    pub fn may_leave(&self, held: Held, num_locks: u32, tier: Tier) -> bool {
        if tier == Tier::Host && held.on_device() {
            return true; // a duplicate
        }
        match self.kind {
            ReuseRule::Path => num_locks == 0 && path::may_leave(held, tier),
            ReuseRule::Window | ReuseRule::Checkpoint | ReuseRule::Custom(_) => num_locks == 0,
        }
    }
}

impl Forest {
    /// Hold what reuse at the node's end needs, wherever it lives.
    pub fn lock(&mut self, component: usize, node: NodeIdx) -> Lock {
        match self.rules[component].kind {
            ReuseRule::Path => path::lock(self, component, node),
            ReuseRule::Window | ReuseRule::Custom(_) => window::lock(self, component, node),
            ReuseRule::Checkpoint => checkpoint::lock(self, component, node),
        }
    }

    fn lock_span(&mut self, component: usize, node: NodeIdx, edge: usize) -> Lock {
        let lock = Lock { component, node, edge: edge as u32 };
        for place in self.locked_nodes(lock) {
            self.node_mut(place).lock(component, lock.edge);
        }
        lock
    }

    /// The nodes that a lock holds now.
    pub fn locked_nodes(&self, lock: Lock) -> SmallVec<[NodeIdx; 2]> {
        self.up(lock.node).take_while(|place| self.node(*place).end > lock.edge).collect()
    }

    /// Undo a lock. Returns the nodes whose standing may have changed.
    pub fn unlock(&mut self, lock: Lock) -> SmallVec<[NodeIdx; 2]> {
        let released = self.locked_nodes(lock);
        for node in &released {
            self.node_mut(*node).unlock(lock.component, lock.edge);
        }
        released
    }
}
