//! Finds a child by its parent and its first page, whatever the number of children.
//!
//! Only children with siblings stand here: where the path does not fork, the child is known without it.

use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashTable};

use crate::arena::Arena;
use crate::node::{Node, NodeIdx};
use crate::tokens::{Place, TokenStore};

#[derive(Debug, Clone, Copy)]
struct Entry {
    hash: u32,
    node: NodeIdx,
}

/// One table for all forks of the forest. Seeded at random, so that no client can make its pages collide.
#[derive(Debug, Default)]
pub struct ChildTable {
    entries: HashTable<Entry>,
    hasher: DefaultHashBuilder,
}

fn spread(hash: u32) -> u64 {
    u64::from(hash) << 32 | u64::from(hash)
}

impl ChildTable {
    fn hash(&self, parent: NodeIdx, page: &[i32]) -> u32 {
        self.hasher.hash_one((parent, page)) as u32
    }

    /// The child of `parent` whose first page is `page`.
    pub fn find(
        &self,
        nodes: &Arena<Node>,
        tokens: &TokenStore,
        parent: NodeIdx,
        page: &[i32],
    ) -> Option<NodeIdx> {
        let hash = self.hash(parent, page);
        let is_same = |entry: &Entry| {
            let node = &nodes[entry.node as usize];
            entry.hash == hash && node.parent == parent && first_page(node, tokens, page.len()) == page
        };
        self.entries.find(spread(hash), is_same).map(|entry| entry.node)
    }

    /// How many children there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Enter a child. *Caller guarantees*: there is none with this first page.
    pub fn insert(&mut self, parent: NodeIdx, page: &[i32], node: NodeIdx) {
        let hash = self.hash(parent, page);
        let entry = Entry { hash, node };
        self.entries.insert_unique(spread(hash), entry, |other| spread(other.hash));
    }

    /// Put `new` in the place of `old`, which has the same parent and first page.
    pub fn replace(&mut self, parent: NodeIdx, page: &[i32], old: NodeIdx, new: NodeIdx) {
        let hash = self.hash(parent, page);
        if let Some(entry) = self.entries.find_mut(spread(hash), |entry| entry.node == old) {
            entry.node = new;
        }
    }

    /// Take a child out.
    pub fn remove(&mut self, parent: NodeIdx, page: &[i32], node: NodeIdx) {
        let hash = self.hash(parent, page);
        if let Ok(entry) = self.entries.find_entry(spread(hash), |entry| entry.node == node) {
            entry.remove();
        }
    }
}

fn first_page<'a>(node: &Node, tokens: &'a TokenStore, page_size: usize) -> &'a [i32] {
    let start = node.start();
    tokens.slice(Place { run: node.run, start, end: node.end().min(start + page_size) })
}
