//! When a component's payload can be reused, what holds it, what may leave. One file per rule.

mod checkpoint;
mod path;
mod window;

use smallvec::SmallVec;

use crate::forest::Forest;
use crate::interface::{ComponentSpec, ReuseRule, Tier};
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
}

/// The receipt of a lock; the only way to undo it.
#[derive(Debug, Clone)]
pub enum Lock {
    /// On single nodes.
    Nodes { component: usize, nodes: SmallVec<[NodeIdx; 2]> },
    /// On the nodes that hold tokens from `edge` on, up to the end of one node.
    ///
    /// Each of them carries the edge, so a split hands it to the prefix exactly if the span reaches in:
    ///
    /// ```text
    ///   prefix | suffix            prefix | suffix
    /// ....[====|======]            .......|.[=====]
    ///   locked | locked              free | locked
    /// ```
    Span { component: usize, node: NodeIdx, edge: usize },
}

/// One component's vote, fed the nodes of a path from the root outwards.
#[derive(Debug, Clone, Copy)]
pub struct Validator {
    is_unbroken: bool,
    run_start: Option<usize>,
}

impl Rule {
    pub fn new(spec: &ComponentSpec, page_size: usize, depends_on: Vec<usize>) -> Self {
        Self {
            kind: spec.rule,
            page_size,
            window_tokens: spec.window_tokens,
            depends_on,
            keeps_pages: spec.rule != ReuseRule::Checkpoint,
            is_prefix: spec.rule == ReuseRule::Path,
        }
    }

    /// A fresh vote.
    pub fn validator(&self) -> Validator {
        Validator { is_unbroken: true, run_start: None }
    }

    /// May a request reuse `[0, end)`? Args: `has`: whether the payload counts as resident here.
    pub fn vote(&self, state: &mut Validator, has: bool, node: &Node, end: usize) -> bool {
        match self.kind {
            ReuseRule::Path => path::vote(state, has),
            ReuseRule::Window => window::vote(self, state, has, node, end),
            ReuseRule::Checkpoint => checkpoint::vote(has, node, end),
        }
    }

    /// First token (a page start) whose payload reuse at `end` needs; `end` for a state.
    pub fn span(&self, end: usize) -> usize {
        match self.kind {
            ReuseRule::Path => 0,
            ReuseRule::Window => window::frontier(end, self.window_tokens, self.page_size),
            ReuseRule::Checkpoint => end,
        }
    }

    /// May the payload leave the tier, as far as this rule is concerned?
    pub fn may_leave(&self, held: &Held, tier: Tier) -> bool {
        if tier == Tier::Host && held.on_device() {
            return true; // a duplicate
        }
        match self.kind {
            ReuseRule::Path => path::may_leave(held, tier),
            ReuseRule::Window | ReuseRule::Checkpoint => held.locks == 0,
        }
    }
}

impl Forest {
    /// Hold what reuse at the node's end needs, wherever it lives.
    pub fn lock(&mut self, component: usize, node: NodeIdx) -> Lock {
        match self.rules[component].kind {
            ReuseRule::Path => path::lock(self, component, node),
            ReuseRule::Window => window::lock(self, component, node),
            ReuseRule::Checkpoint => checkpoint::lock(self, component, node),
        }
    }

    fn lock_span(&mut self, component: usize, node: NodeIdx, edge: usize) -> Lock {
        for place in span_nodes(self, node, edge) {
            let held = self.held_mut(place, component);
            held.edges.get_or_insert_default().push(edge as u32);
            held.locks += 1;
        }
        Lock::Span { component, node, edge }
    }

    /// The nodes that a lock holds now.
    pub fn locked_nodes(&self, lock: &Lock) -> SmallVec<[NodeIdx; 2]> {
        match lock {
            Lock::Nodes { nodes, .. } => nodes.clone(),
            Lock::Span { node, edge, .. } => span_nodes(self, *node, *edge),
        }
    }

    /// Undo a lock. Returns the nodes whose standing may have changed.
    pub fn unlock(&mut self, lock: &Lock) -> SmallVec<[NodeIdx; 2]> {
        let released = self.locked_nodes(lock);
        for node in &released {
            match lock {
                Lock::Nodes { component, .. } => self.held_mut(*node, *component).locks -= 1,
                Lock::Span { component, edge, .. } => {
                    let held = self.held_mut(*node, *component);
                    held.locks -= 1;
                    held.drop_edge(*edge);
                }
            }
        }
        released
    }
}

/// The nodes from `node` up whose end lies behind the edge.
fn span_nodes(forest: &Forest, node: NodeIdx, edge: usize) -> SmallVec<[NodeIdx; 2]> {
    forest.up(node).take_while(|place| forest.node(*place).end() > edge).collect()
}
