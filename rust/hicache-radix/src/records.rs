//! What the calls of a tree return, as `radix/records.py` has it; components are indices.

use std::collections::BTreeMap;

use crate::actions::Action;
use crate::interface::{Namespace, Tier};
use crate::keys::Key;

/// Tokens by the tier they came from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TierTokens(pub [usize; 3]);

impl TierTokens {
    /// All of them.
    pub fn total(&self) -> usize {
        self.0.iter().sum()
    }
}

/// What a match would find.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbeResult {
    /// Deepest length that every component accepts.
    pub boundary: usize,
    /// Length of the longest path of equal pages.
    pub walked: usize,
    /// Where the tokens come from, by the primary component.
    pub source: TierTokens,
    /// The same per component.
    pub by_component: Vec<TierTokens>,
    /// Where a prefill should pause.
    pub fork: Option<usize>,
}

/// Pages of one component and their keys, one key an index.
#[derive(Debug, Clone, Default)]
pub struct PageKeys {
    /// Counted from the prompt's start, ascending.
    pub indices: Vec<i64>,
    /// In the same order.
    pub keys: Vec<Key>,
}

/// Page keys to ask L3 for, per component that has any.
pub type StoreQuery = Vec<(usize, PageKeys)>;

/// An L3 probe's answer: per component, page index to presence.
pub type Answers = Vec<BTreeMap<usize, bool>>;

/// An opened lease.
#[derive(Debug, Clone)]
pub struct MatchResult {
    /// Its number.
    pub lease: u64,
    /// The vote.
    pub found: ProbeResult,
    /// To run.
    pub actions: Vec<Action>,
    /// The lease that had used last what was matched (policy `session`).
    pub met: Option<u64>,
    /// How far that goes on, in tokens from the prompt's start.
    pub met_end: usize,
}

/// Slots of one component missing in L1, and where they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanStep {
    /// Whose.
    pub component: usize,
    /// Where they are.
    pub source: Tier,
    /// First page.
    pub first_page: usize,
    /// One past the last page.
    pub last_page: usize,
}

/// How many boundaries of one lease are compared at most.
pub const MAX_CHOICES: usize = 16;

/// A boundary that a lease may settle for, and what would have to be moved for it.
#[derive(Debug, Clone)]
pub struct Choice {
    /// How many tokens.
    pub boundary: usize,
    /// What to move.
    pub steps: Vec<PlanStep>,
}

/// Work that was begun.
#[derive(Debug, Clone, Default)]
pub struct Started {
    /// To wait for.
    pub tickets: Vec<u64>,
    /// To run.
    pub actions: Vec<Action>,
}

/// The reuse that L1 really holds.
#[derive(Debug, Clone)]
pub struct Settled {
    /// Reused tokens.
    pub boundary: usize,
    /// From where, at the match.
    pub source: TierTokens,
    /// The same per component.
    pub by_component: Vec<TierTokens>,
    /// Claims to wait for.
    pub tickets: Vec<u64>,
    /// To run.
    pub actions: Vec<Action>,
}

/// Outcome of a reservation.
#[derive(Debug, Clone, Default)]
pub struct Reserved {
    /// Slots lacking, per component that lacks any.
    pub short: Vec<(usize, usize)>,
    /// To wait for.
    pub tickets: Vec<u64>,
    /// To run.
    pub actions: Vec<Action>,
}

/// What publishing did.
#[derive(Debug, Clone, Default)]
pub struct Inserted {
    /// Tokens of this lease now in the tree.
    pub published: usize,
    /// Tokens the tree already held on the device.
    pub duplicate_tokens: usize,
    /// Tokens that got this lease's payload.
    pub adopted_tokens: usize,
    /// Tokens of new nodes.
    pub new_tokens: usize,
    /// Checkpoint components that left a state.
    pub states: Vec<usize>,
    /// Claims to wait for.
    pub tickets: Vec<u64>,
    /// To run.
    pub actions: Vec<Action>,
}

/// Outcome of making room.
#[derive(Debug, Clone)]
pub struct Room {
    /// Free now.
    pub free_slots: usize,
    /// To wait for.
    pub tickets: Vec<u64>,
    /// To run.
    pub actions: Vec<Action>,
}

/// What was thrown away on purpose.
#[derive(Debug, Clone, Default)]
pub struct Cleared {
    /// Slots that went, by component and tier.
    pub removed: BTreeMap<(usize, usize), usize>,
    /// Slots in the scope that are held.
    pub kept: usize,
    /// Transfers that touch some.
    pub tickets: Vec<u64>,
    /// To run.
    pub actions: Vec<Action>,
}

/// Slots of one component in one tier by owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolCount {
    /// All.
    pub capacity: usize,
    /// In the free list.
    pub free: usize,
    /// May go.
    pub evictable: usize,
    /// Locked.
    pub protected: usize,
    /// A request's own.
    pub lease_owned: usize,
    /// Source or target of a copy.
    pub in_flight: usize,
    /// Where components share a budget: what is not free and not this one's, in its slots.
    pub others: usize,
}

/// One node as tests and reports see it.
#[derive(Debug, Clone)]
pub struct NodeView {
    /// Its number.
    pub node: u64,
    /// The parent's; none below a root.
    pub parent: Option<u64>,
    /// Which subtree.
    pub namespace: Namespace,
    /// First position.
    pub start: usize,
    /// The tokens.
    pub tokens: Vec<i32>,
    /// Slots by component and tier; L3 without.
    pub slots: Vec<(usize, Tier, Vec<i64>)>,
    /// Leases that need it, per component.
    pub locks: Vec<usize>,
    /// Recency.
    pub last_use: i64,
    /// Number of uses.
    pub num_uses: u32,
    /// A boundary kept on purpose.
    pub mark: bool,
    /// The highest of the requests that used it.
    pub priority: u32,
    /// The longest sequence that went through it.
    pub reach: u32,
    /// Hit, and not pushed out of the protected share since.
    pub is_protected: bool,
    /// Leases of more than one session used it.
    pub is_shared: bool,
    /// On the way to a prefix that is to be kept.
    pub is_kept: bool,
    /// The last lease that used it; -1 for none.
    pub turn: i64,
}

/// Why payload arrived in a tier or left it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Cause {
    Insert,
    Backup,
    Load,
    Store,
    Fetch,
    Probe,
    Demote,
    Evict,
    Window,
    Missing,
    Cascade,
    Reset,
    Clear,
}

impl Cause {
    /// As events and counters name it.
    pub const NAMES: [&'static str; 13] = [
        "insert", "backup", "load", "store", "fetch", "probe", "demote", "evict", "window", "missing",
        "cascade", "reset", "clear",
    ];

    /// As events and counters name it.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }
}

/// Pages of one component that arrived in a tier or left it.
#[derive(Debug, Clone)]
pub struct ResidencyEvent {
    /// Arrived, or left.
    pub stored: bool,
    /// Where.
    pub tier: Tier,
    /// Whose.
    pub component: usize,
    /// Which pages, parents first.
    pub keys: Vec<Key>,
    /// Why.
    pub cause: Cause,
    /// What arrived; nothing of what left.
    pub arrived: Option<Arrived>,
}

/// What an event tells of pages that arrived to those who do not know the tree.
#[derive(Debug, Clone)]
pub struct Arrived {
    /// The page before the first; none for a prompt's first page.
    pub parent: Option<Key>,
    /// The pages' tokens; a state's are those of the page it follows.
    pub tokens: Vec<i32>,
    /// The tokens' namespace.
    pub namespace: Namespace,
}
