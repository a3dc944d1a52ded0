//! Nodes, their children, and the ways up and down.

use crate::forest::{Forest, RootInfo};
use crate::interface::{Namespace, Tier};
use crate::keys::namespace_seed;
use crate::node::{Lower, Node, NodeIdx, Upper, NONE};
use crate::tokens::Place;

impl Forest {
    /// This node and its ancestors, without the root.
    pub fn up(&self, node: NodeIdx) -> impl Iterator<Item = NodeIdx> + '_ {
        let mut at = node;
        std::iter::from_fn(move || {
            let place = at;
            at = self.node(place).parent;
            (at != NONE).then_some(place)
        })
    }

    /// From below the root to this node.
    pub fn path(&self, node: NodeIdx) -> Vec<NodeIdx> {
        let mut path: Vec<NodeIdx> = self.up(node).collect();
        path.reverse();
        path
    }

    /// The children in their order.
    pub fn children(&self, node: NodeIdx) -> impl DoubleEndedIterator<Item = NodeIdx> {
        let mut children = Vec::new();
        let last = self.node(node).last_child;
        if last != NONE {
            let mut at = self.node(last).next;
            children.push(at);
            while at != last {
                at = self.node(at).next;
                children.push(at);
            }
        }
        children.into_iter()
    }

    /// The child, if there is just one.
    pub fn only_child(&self, node: NodeIdx) -> Option<NodeIdx> {
        let last = self.node(node).last_child;
        (last != NONE && self.node(last).next == last).then_some(last)
    }

    /// Whether the path forks at this node's end.
    pub fn has_fork(&self, node: NodeIdx) -> bool {
        !self.node(node).is_leaf() && self.only_child(node).is_none()
    }

    pub fn tokens_of(&self, node: NodeIdx) -> &[i32] {
        self.tokens.slice(self.node(node).place())
    }

    /// The namespace's root, made when first asked for.
    pub fn root(&mut self, namespace: &Namespace) -> NodeIdx {
        if let Some(root) = self.roots.get(namespace) {
            return *root;
        }
        let seed = namespace_seed(&self.config.identity, namespace);
        let root = self.new_node(NONE, 0);
        self.roots.insert(namespace.clone(), root);
        self.root_infos.insert(root, RootInfo { namespace: namespace.clone(), seed });
        root
    }

    /// The root of the subtree that the node is in.
    pub fn root_of(&self, node: NodeIdx) -> NodeIdx {
        let mut at = node;
        while !self.node(at).is_root() {
            at = self.node(at).parent;
        }
        at
    }

    pub fn root_info(&self, node: NodeIdx) -> &RootInfo {
        &self.root_infos[&self.root_of(node)]
    }

    /// All roots, oldest first.
    pub fn all_roots(&self) -> Vec<NodeIdx> {
        let mut roots: Vec<NodeIdx> = self.roots.values().copied().collect();
        roots.sort_unstable_by_key(|root| self.node(*root).id);
        roots
    }

    pub fn new_node(&mut self, parent: NodeIdx, start: u32) -> NodeIdx {
        let node = Node::new(self.next_node, parent, start);
        self.next_node += 1;
        if let Some(at) = self.unused.pop() {
            self.nodes[at as usize] = node;
            return at;
        }
        self.nodes.push(node);
        let has_lower = self.lower.len() > 0;
        for _ in 0..self.num_components {
            self.upper.push(Upper::new(0));
            if has_lower {
                self.lower.push(Lower::new());
            }
        }
        (self.nodes.len() - 1) as NodeIdx
    }

    pub fn bury(&mut self, at: NodeIdx) {
        for i in 0..self.num_components {
            for tier in Tier::ALL {
                self.dequeue(at, i, tier);
            }
            for tier in Tier::POOLED {
                self.unshelter(at, i, tier);
            }
            *self.upper_mut(at, i) = Upper::new(0);
            if self.lower.len() > 0 {
                *self.lower_mut(at, i) = Lower::new();
            }
        }
        self.turns.disown(at);
        self.take_links(at);
        self.dead_weight.forget(at);
        self.node_mut(at).die();
        self.unused.push(at);
    }

    /// Hang a new node, without payload, under `parent`. The tokens are copied.
    pub fn add_child(&mut self, parent: NodeIdx, tokens: &[i32]) -> NodeIdx {
        let start = self.node(parent).end;
        let above = self.node(parent).place();
        let child = self.new_node(parent, start);
        let run = self.tokens.extend(above, tokens);
        let tick = self.tick;
        let node = self.node_mut(child);
        node.created = tick;
        node.run = run;
        node.end = start + tokens.len() as u32;
        node.reach = node.end;
        for i in 0..self.num_components {
            self.upper_mut(child, i).used = tick;
        }
        self.append_child(parent, child);
        self.num_nodes += 1;
        child
    }

    pub fn append_child(&mut self, parent: NodeIdx, child: NodeIdx) {
        self.node_mut(child).parent = parent;
        match self.node(parent).last_child {
            NONE => self.link(child, child),
            last => {
                let first = self.node(last).next;
                if first == last {
                    self.enter(last);
                }
                self.enter(child);
                self.link(last, child);
                self.link(child, first);
            }
        }
        self.node_mut(parent).last_child = child;
    }

    /// Have the table know a child that has siblings.
    fn enter(&mut self, child: NodeIdx) {
        let parent = self.node(child).parent;
        let page = self.tokens.slice(self.first_page(child));
        self.children.insert(parent, page, child);
    }

    fn leave_table(&mut self, child: NodeIdx) {
        let parent = self.node(child).parent;
        let page = self.tokens.slice(self.first_page(child));
        self.children.remove(parent, page, child);
    }

    fn first_page(&self, node: NodeIdx) -> Place {
        let place = self.node(node).place();
        Place { end: place.start + self.page_size, ..place }
    }

    /// `next` comes right after `previous` among the children.
    fn link(&mut self, previous: NodeIdx, next: NodeIdx) {
        self.node_mut(previous).next = next;
        self.node_mut(next).previous = previous;
    }

    /// `new` stands where `old` stood among the children of `parent`.
    pub fn replace_child(&mut self, parent: NodeIdx, old: NodeIdx, new: NodeIdx) {
        self.node_mut(new).parent = parent;
        let (previous, next) = (self.node(old).previous, self.node(old).next);
        if next == old {
            self.link(new, new);
        } else {
            self.link(previous, new);
            self.link(new, next);
            let page = self.tokens.slice(self.first_page(new));
            self.children.replace(parent, page, old, new);
        }
        if self.node(parent).last_child == old {
            self.node_mut(parent).last_child = new;
        }
    }

    pub fn remove_child(&mut self, parent: NodeIdx, child: NodeIdx) {
        let (previous, next) = (self.node(child).previous, self.node(child).next);
        self.link(previous, next);
        if self.node(parent).last_child == child {
            self.node_mut(parent).last_child = if next == child { NONE } else { previous };
        }
        if next != child {
            self.leave_table(child);
        }
        if next != child && next == previous {
            self.leave_table(next);
        }
    }
}
