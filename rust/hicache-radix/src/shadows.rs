//! Which policy does best lately: `hicache/policy/shadows.py`, which says why.
//!
//! The same operations in the same order, so that both give the same numbers.

use crate::interface::{
    ComponentSpec, Eviction, Namespace, ReuseRule, Tier, TreeConfig, POPULAR_WORTH, RECENCY_WORTH,
    SHARED_WORTH,
};
use crate::session_order::SessionOrder;
use crate::tokens::Token;
use crate::tree::TreeCore;

/// A shadow holds so many blocks at most.
const SHADOW_BLOCKS: usize = 2048;
/// Of a block's tokens, how many are looked at, from its beginning.
const LOOKS: usize = 4;
/// Requests sampled between two judgements.
const BATCH: u64 = 8;
const DECAY: f64 = 0.9889710;
/// So much of all blocks looked up lately must another policy have gained to be followed instead.
const MARGIN: f64 = 0.01;
/// And so many standard deviations of what chance makes of that.
const SIGMAS: f64 = 2.0;
/// Or so many if that leads away from another policy than the first, which alone knows sessions.
const SIGMAS_BACK: f64 = 1.5;
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
const DEFAULT_PRIORITY: u32 = 50;

/// What `adaptive` orders by.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Followed {
    /// As `session` does; until another does better.
    #[default]
    Session,
    /// By recency alone, as `lru`.
    Recency,
    /// By recency, with some grace for what more than one session used.
    Shared,
    /// By recency, with much.
    Popular,
}

impl Followed {
    const ALL: [Self; 4] = [Self::Session, Self::Recency, Self::Shared, Self::Popular];

    /// The policy's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Session => "session",
            Self::Recency => "recency",
            Self::Shared => "shared",
            Self::Popular => "popular",
        }
    }

    /// Where the worths begin that tell the tree to go by it.
    pub fn least_worth(self) -> u32 {
        match self {
            Self::Session => 1,
            Self::Recency => RECENCY_WORTH,
            Self::Shared => SHARED_WORTH,
            Self::Popular => POPULAR_WORTH,
        }
    }
}

/// One policy on the sample.
#[derive(Debug)]
struct Shadow {
    tree: TreeCore,
    /// By recency all turns are worth the same, so nothing has to follow their ages.
    order: Option<Box<SessionOrder>>,
    worth: u32,
    /// What a request leaves competes at once with the rest, so all of it has room before.
    spare: usize,
    /// Blocks, of the batch that is being filled.
    hits: i64,
    /// On the one that is followed, since it was last not ahead.
    gain: f64,
    /// Of what it gained or lost on that one, batch by batch.
    squares: f64,
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
        let component = ComponentSpec::new("full", ReuseRule::Path, 0);
        let config = TreeConfig::on_device(1, vec![component], vec![2 * capacity]);
        let tree = TreeCore::new(TreeConfig { eviction: Eviction::Adaptive, ..config });
        let order = (policy == Followed::Session).then(Box::default);
        let worth = policy.least_worth();
        Some(Self { tree: tree.ok()?, order, worth, spare: capacity, hits: 0, gain: 0.0, squares: 0.0 })
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
        } else {
            tree.rate([(matched.lease, self.worth)]);
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
    batch_blocks: usize,
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
            batch_blocks: 0,
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
        self.batch_blocks += num_prompt;
        for shadow in &mut self.shadows {
            // A shadow has room for every request, so none is refused.
            shadow.hits += shadow.serve(&request).unwrap_or(0) as i64;
        }
        self.num_sampled += 1;
        if self.num_sampled % BATCH == 0 {
            self.count_batch();
            self.judge();
        }
        Followed::ALL[self.best]
    }

    fn count_batch(&mut self) {
        self.looked_up = self.looked_up * DECAY + self.batch_blocks as f64;
        self.batch_blocks = 0;
        let followed = self.shadows[self.best].hits;
        for shadow in &mut self.shadows {
            let gain = (shadow.hits - followed) as f64;
            shadow.gain = (shadow.gain + gain).max(0.0);
            shadow.squares = shadow.squares * DECAY + gain * gain;
            shadow.hits = 0;
        }
    }

    /// Follow the one that gained most if that is more than chance explains, and enough to matter.
    fn judge(&mut self) {
        let mut best = 0;
        for (i, shadow) in self.shadows.iter().enumerate() {
            if shadow.gain > self.shadows[best].gain {
                best = i;
            }
        }
        let Shadow { gain, squares, .. } = self.shadows[best];
        if gain <= MARGIN * self.looked_up {
            return;
        }
        let sigmas = if self.best == 0 { SIGMAS } else { SIGMAS_BACK };
        if gain * gain > sigmas * sigmas * squares {
            self.best = best;
            for shadow in &mut self.shadows {
                (shadow.gain, shadow.squares) = (0.0, 0.0);
            }
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
