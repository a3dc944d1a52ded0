//! Settings, as `radix/interface.py` has them, and with them the records that calls return; components are indices.

use std::sync::Arc;

pub use crate::records::*;

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

/// How what L3 has of a page is regarded; the lower go first. The numbers are those of `hicache.types.Regard`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(i8)]
pub enum Regard {
    /// Whoever used it said to be done with it.
    Over = -2,
    /// Of a session of low priority.
    Low,
    /// Nobody said anything of it.
    Plain,
    /// Of a session of high priority, or of one that is awaited.
    High,
    /// Of a prefix that is to be kept.
    Kept,
}

impl Regard {
    /// All, the least first.
    pub const ALL: [Self; 5] = [Self::Over, Self::Low, Self::Plain, Self::High, Self::Kept];

    /// How the pages of a request of this priority are regarded if nothing else is said.
    pub fn of_priority(priority: i64) -> Self {
        match priority - DEFAULT_PRIORITY {
            0 => Self::Plain,
            1.. => Self::High,
            _ => Self::Low,
        }
    }
}

/// What a request has that names none.
pub const DEFAULT_PRIORITY: i64 = 50;

/// What the caller says of a turn.
#[derive(Debug, Clone, Copy)]
pub struct Rating {
    /// Of which lease.
    pub lease: u64,
    /// What keeping it is worth; 0: it is over.
    pub worth: u32,
    /// How L3 is to regard it, unless it is over.
    pub regard: Regard,
}

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
    /// Units of the budget that components share in L1.
    pub device_units: usize,
    /// Units of a slot per component; 0: its pool is its own.
    pub device_costs: Vec<usize>,
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
            device_units: 0,
            device_costs: vec![0; components.len()],
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
