//! Which policy does best lately: `hicache/policy/shadows.py`, which says why.
//!
//! The same operations in the same order, so that both give the same numbers.

use crate::interface::{ComponentSpec, Eviction, Namespace, ReuseRule, Tier, TreeConfig};
use crate::session_order::SessionOrder;
use crate::tokens::Token;
use crate::tree::TreeCore;

/// A shadow holds so many blocks at most.
const SHADOW_BLOCKS: usize = 2048;
/// Of a block's tokens, how many are looked at, from its beginning.
const LOOKS: usize = 4;
const DECAY: f64 = 0.9986146661;
/// So much of all blocks looked up must another policy have hit more to be followed instead.
const MARGIN: f64 = 0.005;
/// And so many standard deviations of what it is ahead by.
const SIGMAS: f64 = 3.0;
/// Or so many if that leads away from another policy than the first, which alone knows sessions.
const SIGMAS_BACK: f64 = 1.5;
/// Of policies; a pair's place is the sum of its numbers, less one.
const PAIRS: [(usize, usize); 3] = [(0, 1), (0, 2), (1, 2)];
/// Requests sampled before anything is judged.
const FEWEST: u64 = 50;
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
const DEFAULT_PRIORITY: u32 = 50;

/// What `adaptive` orders by.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Followed {
    /// As `session` does; until another does better.
    #[default]
    Session,
    /// As `lru` does.
    Recency,
    /// By recency, too, but what more than one session used goes after the rest.
    Shared,
}

impl Followed {
    const ALL: [Self; 3] = [Self::Session, Self::Recency, Self::Shared];

    fn eviction(self) -> Eviction {
        match self {
            Self::Recency => Eviction::Lru,
            Self::Session | Self::Shared => Eviction::Adaptive,
        }
    }

    /// The policy's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Session => "session",
            Self::Recency => "lru",
            Self::Shared => "shared",
        }
    }
}

/// One policy on the sample.
#[derive(Debug)]
struct Shadow {
    tree: TreeCore,
    order: Option<Box<SessionOrder>>,
    /// With sessions what a request leaves competes at once with the rest, so all of it has room before.
    spare: usize,
    /// Of the last request.
    hit: f64,
    /// Of all, the latest most.
    hits: f64,
}

/// A request of the sample.
struct Request<'a> {
    name: i64,
    blocks: &'a [i32],
    num_prompt: usize,
    stop: usize,
    now_s: f64,
}

impl Shadow {
    /// None where the tree refuses its settings, which it does not.
    fn new(policy: Followed, capacity: usize) -> Option<Self> {
        let spare = if policy == Followed::Recency { 0 } else { capacity };
        let component = ComponentSpec::new("full", ReuseRule::Path, 0);
        let config = TreeConfig::on_device(1, vec![component], vec![capacity + spare]);
        let tree = TreeCore::new(TreeConfig { eviction: policy.eviction(), ..config });
        // Turns that nobody rates are all worth the most: recency orders them, and what is shared comes after.
        let order = (policy == Followed::Session).then(|| Box::new(SessionOrder::default()));
        Some(Self { tree: tree.ok()?, order, spare, hit: 0.0, hits: 0.0 })
    }

    /// Serve one request whole; returns how many blocks of its prompt were hit.
    fn serve(&mut self, request: &Request) -> crate::error::Result<usize> {
        let Request { name, blocks, num_prompt, stop, now_s } = *request;
        let Self { tree, order, .. } = self;
        if let Some(order) = order {
            order.tell(tree, now_s);
        }
        let prompt = &blocks[..num_prompt];
        let matched = tree.open(prompt, &Namespace::default(), false, DEFAULT_PRIORITY, Some(name))?;
        let hit = matched.found.boundary;
        if let Some(order) = order {
            let reused = matched.met.filter(|_| 2 * hit >= matched.met_end);
            order.begin(name, reused, now_s, i64::from(DEFAULT_PRIORITY));
        }
        let lease = matched.lease as i64;
        tree.reserve(lease, (blocks.len() - hit) as i64)?;
        tree.release(lease, Some(blocks), 0)?;
        if let Some(order) = order {
            order.end(name, matched.lease, stop, now_s);
            order.tell(tree, now_s);
        }
        tree.make_room(0, Tier::Device, self.spare as i64)?;
        Ok(hit)
    }
}

/// All shadows of one cache, and which policy is to be followed.
#[derive(Debug)]
pub struct Shadows {
    block_tokens: usize,
    capacity: usize,
    hash_limit: u64,
    shadows: Vec<Shadow>,
    /// Of the differences of two policies, request by request.
    squares: [f64; PAIRS.len()],
    looked_up: f64,
    num_sampled: u64,
    best: usize,
    blocks: Vec<i32>,
}

impl Shadows {
    /// For a cache whose L1 and L2 hold so many tokens together; a block has so many.
    pub fn new(capacity_tokens: usize, block_tokens: usize) -> Self {
        let block_tokens = block_tokens.max(1);
        let num_blocks = (capacity_tokens / block_tokens).max(1);
        let capacity = num_blocks.min(SHADOW_BLOCKS);
        Self {
            block_tokens,
            capacity,
            hash_limit: ((capacity as u64) << 32) / num_blocks as u64,
            shadows: Followed::ALL.iter().filter_map(|policy| Shadow::new(*policy, capacity)).collect(),
            squares: [0.0; PAIRS.len()],
            looked_up: 0.0,
            num_sampled: 0,
            best: 0,
            blocks: Vec::new(),
        }
    }

    /// Whether the session is of the sample.
    pub fn samples(&self, name: i64) -> bool {
        mixed(name) < self.hash_limit
    }

    /// Have a request of the sample served by all; returns the policy that does best.
    pub fn watch<T: Token>(
        &mut self,
        name: i64,
        tokens: &[T],
        prompt_len: usize,
        seed: u64,
        stop: usize,
        now_s: f64,
    ) -> Followed {
        let most = self.capacity * self.block_tokens;
        fingerprints(&tokens[..tokens.len().min(most)], self.block_tokens, seed, &mut self.blocks);
        let num_prompt = self.blocks.len().min(prompt_len / self.block_tokens);
        let request = Request { name, blocks: &self.blocks, num_prompt, stop, now_s };
        self.looked_up = self.looked_up * DECAY + num_prompt as f64;
        for shadow in &mut self.shadows {
            // A shadow has room for every request, so none is refused.
            shadow.hit = shadow.serve(&request).unwrap_or(0) as f64;
            shadow.hits = shadow.hits * DECAY + shadow.hit;
        }
        for (squares, (i, j)) in self.squares.iter_mut().zip(PAIRS) {
            let difference = self.shadows[i].hit - self.shadows[j].hit;
            *squares = *squares * DECAY + difference * difference;
        }
        self.num_sampled += 1;
        self.judge();
        Followed::ALL[self.best]
    }

    /// Follow the one that does best if it leads by more than chance explains, and by enough to matter.
    fn judge(&mut self) {
        let mut best = 0;
        for (i, shadow) in self.shadows.iter().enumerate() {
            if shadow.hits > self.shadows[best].hits {
                best = i;
            }
        }
        let lead = self.shadows[best].hits - self.shadows[self.best].hits;
        if self.num_sampled < FEWEST || lead <= MARGIN * self.looked_up {
            return;
        }
        let sigmas = if self.best == 0 { SIGMAS } else { SIGMAS_BACK };
        if lead * lead > sigmas * sigmas * self.squares[best + self.best - 1] {
            self.best = best;
        }
    }
}

/// One number for each whole block, equal where a block's looked-at tokens and all before it are equal.
fn fingerprints<T: Token>(tokens: &[T], block_tokens: usize, seed: u64, prints: &mut Vec<i32>) {
    let mut chain = seed;
    prints.clear();
    prints.extend(tokens.chunks_exact(block_tokens).map(|block| {
        let mixed = block.iter().take(LOOKS).fold(0_u64, |mixed, token| {
            let token: i64 = (*token).into();
            mixed.wrapping_mul(GOLDEN).wrapping_add(token as u64)
        });
        chain = (chain ^ mixed).wrapping_mul(GOLDEN);
        chain ^= chain >> 29;
        (chain >> 33) as i32
    }));
}

/// 32 bits that look as if drawn by chance (the end of splitmix64).
fn mixed(name: i64) -> u64 {
    let mut mixed = (name as u64).wrapping_add(1).wrapping_mul(GOLDEN);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    (mixed ^ mixed >> 31) >> 32
}
