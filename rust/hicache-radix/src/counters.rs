//! What a tree counts while it serves.

use std::collections::BTreeMap;

use crate::interface::{Cause, ComponentSpec};
use crate::tickets::Kind;

/// Monotonic counts.
#[derive(Debug, Default, Clone)]
pub struct Counters {
    pub matches: u64,
    pub fork_tokens: u64,
    pub backups_refused: u64,
    pub states_refused: u64,
    pub claims_refused: u64,
    pub beliefs_forgotten: u64,
    pub stores_declined: u64,
    pub priority_evaluations: u64,
    pub removed: [[u64; Cause::NAMES.len()]; 2],
    /// Slots that left, by component; L3 too.
    pub left: Vec<[[u64; Cause::NAMES.len()]; 3]>,
    pub aborted: [u64; Kind::NAMES.len()],
    pub dropped: [u64; Kind::NAMES.len()],
}

impl Counters {
    pub fn new(num_components: usize) -> Self {
        Self { left: vec![Default::default(); num_components], ..Self::default() }
    }

    /// All that are not 0, as the interface names them.
    pub fn by_name(&self, components: &[ComponentSpec]) -> BTreeMap<String, u64> {
        let mut counts = BTreeMap::new();
        let mut note = |name: String, count: u64| {
            if count > 0 {
                counts.insert(name, count);
            }
        };
        note("matches".into(), self.matches);
        note("fork_tokens".into(), self.fork_tokens);
        note("backups_refused".into(), self.backups_refused);
        note("states_refused".into(), self.states_refused);
        note("claims_refused".into(), self.claims_refused);
        note("beliefs_forgotten".into(), self.beliefs_forgotten);
        note("stores_declined".into(), self.stores_declined);
        note("priority_evaluations".into(), self.priority_evaluations);
        for (tier, removed) in ["device", "host"].iter().zip(&self.removed) {
            for (cause, count) in Cause::NAMES.iter().zip(removed) {
                note(format!("removed_{tier}_{cause}"), *count);
            }
        }
        for (spec, by_tier) in components.iter().zip(&self.left) {
            for (tier, by_cause) in ["device", "host", "store"].iter().zip(by_tier) {
                for (cause, count) in Cause::NAMES.iter().zip(by_cause).filter(|(_, count)| **count > 0) {
                    note(format!("left_{tier}_{cause}_{}", spec.name), *count);
                }
            }
        }
        for (at, kind) in Kind::NAMES.iter().enumerate() {
            note(format!("aborted_{kind}"), self.aborted[at]);
            note(format!("dropped_{kind}"), self.dropped[at]);
        }
        counts
    }
}
