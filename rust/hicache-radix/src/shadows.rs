//! Which policy does best lately: `hicache/policy/shadows.py`, which says why.
//!
//! The same operations in the same order, so that both give the same numbers.

use smallvec::SmallVec;

use crate::interface::{POPULAR_WORTH, RECENCY_WORTH, SHARED_WORTH};
use crate::shadow_tree::{ByOrder, ShadowTree, NO_LEASE, ORDERS};
use crate::tokens::Token;
use crate::turns::{POPULAR_GRACE, SHARED_GRACE};

/// A shadow holds so many blocks at most.
const SHADOW_BLOCKS: usize = 2048;
/// Of a block's tokens, how many are looked at, from its beginning.
const LOOKS: usize = 4;
/// A batch is requests in a row of so many sessions,
const BATCH_SESSIONS: usize = 3;
/// or so many requests.
const BATCH: usize = 8;
const DECAY: f64 = 0.9986146661010289;
/// So much of all blocks looked up lately must another policy have gained to be followed instead.
const MARGIN: f64 = 0.01;
/// And so many standard deviations of what chance makes of that.
const SIGMAS: f64 = 2.0;
/// Or so many if that leads away from another policy than the first, which alone knows sessions.
const SIGMAS_BACK: f64 = 1.5;
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
/// By order: none by the worth of turns, else by recency with so much grace for what is shared.
const GRACES: ByOrder<Option<i64>> = [None, Some(0), Some(SHARED_GRACE), Some(POPULAR_GRACE)];

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
    const ALL: ByOrder<Self> = [Self::Session, Self::Recency, Self::Shared, Self::Popular];

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

/// How one order does.
#[derive(Debug, Clone, Copy, Default)]
struct Score {
    /// Blocks, since the beginning.
    total: u64,
    /// Blocks, of the batch that is being filled.
    hits: i64,
    /// On the one that is followed, since it was last not ahead.
    gain: f64,
    /// Of what it gained or lost on that one, batch by batch.
    squares: f64,
}

/// A request of the sample that has ended.
pub struct Watched<'a, T> {
    /// The session.
    pub name: i64,
    /// What `rate` calls it, and what it is worth by sessions now; none if nobody rates it.
    pub turn: Option<(u64, u32)>,
    /// Prompt and answer.
    pub tokens: &'a [T],
    /// Of these, how many are the prompt.
    pub prompt_len: usize,
    /// Stands for the namespace.
    pub seed: u64,
}

/// All shadows of one cache, and which policy is to be followed.
#[derive(Debug)]
pub struct Shadows {
    block_tokens: usize,
    capacity: usize,
    hash_limit: u64,
    tree: ShadowTree,
    scores: ByOrder<Score>,
    batch_len: usize,
    batch_sessions: SmallVec<[i64; BATCH_SESSIONS]>,
    looked_up: f64,
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
            tree: ShadowTree::new(GRACES, capacity),
            scores: [Score::default(); ORDERS],
            batch_len: 0,
            batch_sessions: SmallVec::new(),
            looked_up: 0.0,
            best: 0,
            blocks: Vec::new(),
        }
    }

    /// Whether the session is of the sample.
    pub fn samples(&self, name: i64) -> bool {
        mixed(name) < self.hash_limit
    }

    /// A turn is worth so much by sessions from now on; returns whether they have something of it.
    pub fn rate(&mut self, lease: u64, worth: u32) -> bool {
        self.tree.rate(lease, worth)
    }

    /// Have a request of the sample served by all; returns the policy that does best.
    pub fn watch<T: Token>(&mut self, request: &Watched<T>) -> Followed {
        let Watched { name, turn, tokens, prompt_len, seed } = *request;
        let most = self.capacity * self.block_tokens;
        fingerprints(&tokens[..tokens.len().min(most)], self.block_tokens, seed, &mut self.blocks);
        let num_prompt = self.blocks.len().min(prompt_len / self.block_tokens);
        let (lease, worth) = turn.unwrap_or((NO_LEASE, 1));
        let hits = self.tree.serve(name, lease, worth, &self.blocks, num_prompt);
        self.looked_up = self.looked_up * DECAY + num_prompt as f64;
        for (score, hits) in self.scores.iter_mut().zip(hits) {
            score.hits += hits as i64;
            score.total += hits as u64;
            score.squares *= DECAY;
        }
        self.batch_len += 1;
        if !self.batch_sessions.contains(&name) {
            self.batch_sessions.push(name);
        }
        if self.batch_len == BATCH || self.batch_sessions.len() == BATCH_SESSIONS {
            self.count_batch();
            self.judge();
        }
        Followed::ALL[self.best]
    }

    /// Blocks of prompts that each order has hit so far.
    pub fn hits(&self) -> ByOrder<u64> {
        self.scores.map(|score| score.total)
    }

    fn count_batch(&mut self) {
        self.batch_len = 0;
        self.batch_sessions.clear();
        let followed = self.scores[self.best].hits;
        for score in &mut self.scores {
            let gain = (score.hits - followed) as f64;
            score.gain = (score.gain + gain).max(0.0);
            score.squares += gain * gain;
            score.hits = 0;
        }
    }

    /// Follow the one that gained most if that is more than chance explains, and enough to matter.
    fn judge(&mut self) {
        let mut best = 0;
        for (i, score) in self.scores.iter().enumerate() {
            if score.gain > self.scores[best].gain {
                best = i;
            }
        }
        let Score { gain, squares, .. } = self.scores[best];
        if gain <= MARGIN * self.looked_up {
            return;
        }
        let sigmas = if self.best == 0 { SIGMAS } else { SIGMAS_BACK };
        if gain * gain > sigmas * sigmas * squares {
            self.best = best;
            for score in &mut self.scores {
                (score.gain, score.squares) = (0.0, 0.0);
            }
        }
    }
}

/// One number for each whole block, equal where a block's looked-at tokens and all before it are equal.
fn fingerprints<T: Token>(tokens: &[T], block_tokens: usize, seed: u64, prints: &mut Vec<i32>) {
    let mut chain = seed;
    prints.clear();
    prints.extend(tokens.chunks_exact(block_tokens).map(|block| {
        let mixed = block.first_chunk::<LOOKS>().map_or_else(|| mix(block), |looks| mix(looks));
        chain = (chain ^ mixed).wrapping_mul(GOLDEN);
        chain ^= chain >> 29;
        (chain >> 33) as i32
    }));
}

fn mix<T: Token>(tokens: &[T]) -> u64 {
    tokens.iter().fold(0_u64, |mixed, token| {
        let token: i64 = (*token).into();
        mixed.rotate_left(16) ^ token as u64
    })
}

/// 32 bits that look as if drawn by chance (the end of splitmix64).
fn mixed(name: i64) -> u64 {
    let mut mixed = (name as u64).wrapping_add(1).wrapping_mul(GOLDEN);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    (mixed ^ mixed >> 31) >> 32
}
