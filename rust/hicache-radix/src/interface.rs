//! Settings and result records, as `radix/interface.py` has them; components are indices.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::actions::Action;
use crate::keys::Key;

/// Where payload lives, fastest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// L1.
    Device = 0,
    /// L2.
    Host = 1,
    /// L3.
    Store = 2,
}

impl Tier {
    /// All three.
    pub const ALL: [Tier; 3] = [Tier::Device, Tier::Host, Tier::Store];
    /// Those with a pool of slots.
    pub const POOLED: [Tier; 2] = [Tier::Device, Tier::Host];

    /// As audits name it.
    pub fn name(self) -> &'static str {
        ["DEVICE", "HOST", "STORE"][self as usize]
    }
}

/// What a component needs resident so that a prefix may be reused.
#[derive(Debug, Clone)]
pub enum ReuseRule {
    /// Every token from the root.
    Path,
    /// The last so many tokens.
    Window,
    /// The exact state at the end.
    Checkpoint,
    /// A span of pages that the caller's own rule names.
    Custom(Arc<dyn SpanRule>),
}

/// A rule that the caller brings along: it needs an unbroken span of pages before the boundary.
pub trait SpanRule: std::fmt::Debug + Send + Sync {
    /// As page keys name it.
    fn name(&self) -> &str;
    /// First token (a page start) whose payload reuse at `end` needs; at most `end`.
    fn span(&self, end: usize) -> usize;
    /// A fresh vote.
    fn validator(&self) -> Box<dyn SpanVote>;
}

/// The vote of a caller's rule, fed the nodes of a path from the root outwards.
pub trait SpanVote {
    /// May a request reuse `[0, end)`? The node has the tokens `[start, node_end)`.
    fn accepts(&mut self, start: usize, node_end: usize, is_resident: bool, end: usize) -> bool;
}

impl ReuseRule {
    /// As page keys name it.
    pub fn name(&self) -> &str {
        match self {
            ReuseRule::Path => "path",
            ReuseRule::Window => "window",
            ReuseRule::Checkpoint => "checkpoint",
            ReuseRule::Custom(rule) => rule.name(),
        }
    }
}

/// One kind of payload of a model.
#[derive(Debug, Clone)]
pub struct ComponentSpec {
    /// Unique within the model.
    pub name: String,
    /// When it can be reused.
    pub rule: ReuseRule,
    /// Tokens of a window; 0 for the other rules.
    pub window_tokens: usize,
    /// Enters the page keys.
    pub num_layers: i128,
    /// Enters the page keys.
    pub bytes_per_token: i128,
    /// Enters the page keys.
    pub state_bytes: i128,
}

impl ComponentSpec {
    /// One layer of a byte a token or a state: for trees that only count.
    pub fn new(name: &str, rule: ReuseRule, window_tokens: usize) -> Self {
        Self { name: name.to_owned(), rule, window_tokens, num_layers: 1, bytes_per_token: 1, state_bytes: 1 }
    }
}

/// What makes equal tokens not equal; UTF-8 with surrogates let through, absent unlike empty.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Namespace {
    /// Cache salt.
    pub salt: Option<Vec<u8>>,
    /// LoRA.
    pub lora: Option<Vec<u8>>,
    /// Extra key.
    pub extra: Option<Vec<u8>>,
}

/// When payload is copied down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WritePolicy {
    /// At once.
    WriteThrough,
    /// After the second use.
    WriteThroughSelective,
    /// On eviction.
    WriteBack,
}

/// What a policy knows of a node's payload of one component.
#[derive(Debug, Clone, Copy)]
pub struct Facts {
    /// When it was last used, as a count of the tree's operations.
    pub used: i64,
    /// When its node came, counted the same way.
    pub created: i64,
    /// How many requests used the node.
    pub uses: u32,
    /// The highest that a request which used it was given.
    pub priority: u32,
    /// It was hit, and the protected share of its tier has room for it (`slru` only).
    pub is_protected: bool,
    /// It is the tail of a conversation that may be computed again (`tlru` only).
    pub is_spare: bool,
    /// What the caller said that keeping what its last request used is worth (`session`, `adaptive` only).
    pub worth: u32,
}

/// A policy that the caller brings along.
pub trait Ordering: std::fmt::Debug + Send + Sync {
    /// The smaller the rank, the earlier the payload leaves its tier; within plus and minus
    /// [`MOST_RANK`], and a function of the facts alone.
    fn rank(&self, facts: Facts) -> i64;
    /// Whether two halves of a path that differ in `uses` only may rank differently.
    fn tells_uses_apart(&self) -> bool;
    /// The same for `created`.
    fn tells_ages_apart(&self) -> bool;
    /// The same for `priority`.
    fn tells_priorities_apart(&self) -> bool;
}

/// How great the rank of a caller's policy may be, either way.
pub const MOST_RANK: i64 = (1 << 61) - 1;

/// What a lease's payload is worth until it is rated, and at most.
pub const MOST_WORTH: u32 = 65535;
/// Of turns rated so or higher, all that has the same worth leaves by recency alone.
pub const RECENCY_WORTH: u32 = 0x8000;
/// Of turns rated so or higher, what is shared leaves later.
pub const SHARED_WORTH: u32 = 0xA000;
/// Of turns rated so or higher, much later.
pub const POPULAR_WORTH: u32 = 0xC000;

/// Which order payload leaves in.
#[derive(Debug, Clone)]
pub enum Eviction {
    /// Least recently used first.
    Lru,
    /// Fewest uses first.
    Lfu,
    /// Oldest first.
    Fifo,
    /// Most recently used first.
    Mru,
    /// Youngest first.
    Filo,
    /// What no request came back for first.
    Slru,
    /// Lowest priority first.
    Priority,
    /// The ends of conversations first.
    Tlru,
    /// Least worth first, as the caller rates it.
    Session,
    /// The same; what is rated may also leave by recency, with what is shared last or without.
    Adaptive,
    /// The caller's own.
    Custom(Arc<dyn Ordering>),
}

impl Eviction {
    /// Whether two halves of a path that differ in `uses` only may rank differently.
    pub fn tells_uses_apart(&self) -> bool {
        match self {
            Eviction::Lfu => true,
            Eviction::Custom(ordering) => ordering.tells_uses_apart(),
            _ => false,
        }
    }

    /// The same for `priority`.
    pub fn tells_priorities_apart(&self) -> bool {
        match self {
            Eviction::Priority => true,
            Eviction::Custom(ordering) => ordering.tells_priorities_apart(),
            _ => false,
        }
    }

    /// Whether the tree keeps who is protected.
    pub fn protects_hits(&self) -> bool {
        matches!(self, Eviction::Slru)
    }

    /// Whether the tree keeps who used what last.
    pub fn follows_turns(&self) -> bool {
        matches!(self, Eviction::Session | Eviction::Adaptive)
    }

    /// Whether the tree keeps what is spare.
    pub fn spares_tails(&self) -> bool {
        matches!(self, Eviction::Tlru)
    }

    /// The same for `created`.
    pub fn tells_ages_apart(&self) -> bool {
        match self {
            Eviction::Fifo | Eviction::Filo => true,
            Eviction::Custom(ordering) => ordering.tells_ages_apart(),
            _ => false,
        }
    }
}

/// Tokens a page, at most.
pub const MAX_PAGE_SIZE: usize = 65_536;

/// All a tree needs to know.
#[derive(Debug, Clone)]
pub struct TreeConfig {
    /// Tokens a page, 1 to [`MAX_PAGE_SIZE`].
    pub page_size: usize,
    /// The model.
    pub components: Vec<ComponentSpec>,
    /// L1 capacity per component.
    pub device_slots: Vec<usize>,
    /// L2 capacity per component; 0: none.
    pub host_slots: Vec<usize>,
    /// Units of the budget that components share in L2.
    pub host_units: usize,
    /// Units of a slot per component; 0: its pool is its own.
    pub host_costs: Vec<usize>,
    /// Whether an L3 exists.
    pub has_store: bool,
    /// How many L3 pages the tree remembers.
    pub max_stored_pages: usize,
    /// When payload is copied down.
    pub write: WritePolicy,
    /// Nothing is copied down because it was used.
    pub pauses_writes: bool,
    /// A full L2 declines what would be the first to leave it.
    pub admits_by_rank: bool,
    /// L3 declines what is over.
    pub declines_over: bool,
    /// Which order payload leaves in.
    pub eviction: Eviction,
    /// Whether whole leaves leave, and not only their tails.
    pub by_leaf: bool,
    /// What `tlru` gives up of each conversation's end before anything else.
    pub tail_tokens: usize,
    /// Tokens between spare marks, whole pages; 0: there are none.
    pub mark_spacing: usize,
    /// Seeds the page keys.
    pub identity: Vec<u8>,
    /// Keep residency events.
    pub emit_events: bool,
}

impl TreeConfig {
    /// A tree of `lru` with an L1 alone, and nothing that may be left out.
    pub fn on_device(page_size: usize, components: Vec<ComponentSpec>, device_slots: Vec<usize>) -> Self {
        Self {
            page_size,
            host_slots: vec![0; components.len()],
            host_units: 0,
            host_costs: vec![0; components.len()],
            components,
            device_slots,
            has_store: false,
            max_stored_pages: 1,
            write: WritePolicy::WriteThrough,
            pauses_writes: false,
            admits_by_rank: false,
            declines_over: false,
            eviction: Eviction::Lru,
            by_leaf: false,
            tail_tokens: 0,
            mark_spacing: 0,
            identity: Vec::new(),
            emit_events: false,
        }
    }
}

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
