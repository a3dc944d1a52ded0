//! What a tree asks the cache to do. Records only; components are indices into the model's list.

use crate::interface::{Regard, Tier};
use crate::keys::Key;
use crate::slots::Slots;

/// One action. Slots and keys stand in order from the root outwards.
#[derive(Debug, Clone)]
pub enum Action {
    /// Slots that went back to their pool's free list.
    Free {
        /// Whose slots.
        component: usize,
        /// In which pool.
        tier: Tier,
        /// Which.
        slots: Slots,
    },
    /// Copy slot by slot between L1 and L2, or within L1.
    Copy {
        /// To report back.
        ticket: u64,
        /// Whose payload.
        component: usize,
        /// From which tier.
        source: Tier,
        /// From which slots.
        source_slots: Slots,
        /// To which tier.
        target: Tier,
        /// To which slots.
        target_slots: Slots,
    },
    /// Write host slots to L3.
    Store {
        /// To report back.
        ticket: u64,
        /// Whose payload.
        component: usize,
        /// The pages' names.
        keys: Vec<Key>,
        /// The page that must be there for the key in the same place to be of use.
        parents: Vec<Option<Key>>,
        /// Host slots.
        slots: Slots,
    },
    /// Read L3 pages into host slots.
    Fetch {
        /// To report back.
        ticket: u64,
        /// Whose payload.
        component: usize,
        /// The pages' names.
        keys: Vec<Key>,
        /// Host slots.
        slots: Slots,
    },
    /// Delete pages from L3.
    Forget {
        /// Whose payload.
        component: usize,
        /// The pages' names.
        keys: Vec<Key>,
    },
    /// Tell L3 how these pages are regarded from now on.
    Hint {
        /// Whose payload.
        component: usize,
        /// The pages' names.
        keys: Vec<Key>,
        /// How.
        regard: Regard,
    },
}
