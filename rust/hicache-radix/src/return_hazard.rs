//! When turns are come back for, and what waiting for that is worth: `hicache/policy/return_hazard.py`.
//!
//! The same operations in the same order, so that both give the same numbers.

/// Age bins of a turn.
pub const NUM_BINS: usize = 32;
const LAST_EDGE_S: f64 = 7200.0;
const EDGE_RATIO: f64 = 1.3445524545933207;
const PSEUDO_TURNS: f64 = 20.0;
const FIRST_BUILD: u64 = 10;
const REBUILD_SHARE: u64 = 64;
/// Of the scale of worths.
pub const STEPS_PER_OCTAVE: i64 = 8;
const LEAST_OCTAVES: i64 = -30;

/// Stop reasons that are told apart.
pub const MAX_STOPS: usize = 16;
const NUM_GAPS: usize = 9;
const NUM_TURNS: usize = 4;
const NUM_MET: usize = 3;
const FIRST_LEFT: Class = MAX_STOPS * NUM_GAPS * NUM_TURNS;
const NUM_CLASSES: usize = FIRST_LEFT + NUM_GAPS * NUM_MET;
const GAP_RATIO: f64 = 2.4622888266898326;
const TURN_EDGES: [u64; NUM_TURNS - 1] = [2, 3, 5];
/// Where an eighth of an octave is rounded up, of a number from 0.5 to 1.
const ROUNDING: [f64; 8] = [
    0.5221368912137069,
    0.5693943173783458,
    0.620928906036742,
    0.6771277734684463,
    0.7384130729697497,
    0.8052451659746271,
    0.8781260801866497,
    0.9576032806985737,
];

/// What turns have in common that are expected to be come back for alike.
pub type Class = usize;

/// The class of a session's last turn. *Caller guarantees*: `stop` is below `MAX_STOPS`.
pub fn open_class(gap_s: Option<f64>, turns: u64, stop: usize) -> Class {
    let turns = TURN_EDGES.iter().filter(|edge| **edge <= turns).count();
    (stop * NUM_GAPS + gap(gap_s)) * NUM_TURNS + turns
}

/// The class of turns left, in a session that came back for `met` of those so far.
pub fn left_class(gap_s: Option<f64>, met: u64) -> Class {
    FIRST_LEFT + (met as usize).min(NUM_MET - 1) * NUM_GAPS + gap(gap_s)
}

fn gap(gap_s: Option<f64>) -> usize {
    let Some(gap_s) = gap_s else { return 0 };
    let (mut bucket, mut edge) = (1, 2.0 * GAP_RATIO);
    while bucket < NUM_GAPS - 1 && edge <= gap_s {
        (bucket, edge) = (bucket + 1, edge * GAP_RATIO);
    }
    bucket
}

/// Returns per second on a scale of eight steps an octave; at least 1.
pub fn worth_of(index: f64) -> i64 {
    let bits = index.max((LEAST_OCTAVES as f64).exp2()).to_bits();
    let exponent = (bits >> 52) as i64 - 1022;
    let mantissa = f64::from_bits(bits & ((1 << 52) - 1) | 1022 << 52); // from 0.5 to 1
    let eighths = ROUNDING.iter().filter(|edge| **edge <= mantissa).count() as i64;
    ((exponent - 1 - LEAST_OCTAVES) * STEPS_PER_OCTAVE + eighths).max(1)
}

#[derive(Debug, Clone, Default)]
struct Curve {
    reached: [u64; NUM_BINS],
    returned: [u64; NUM_BINS],
    /// 0: not worked out yet, so as the pooled one.
    worths: [u16; NUM_BINS],
    /// How many turns more than `FIRST_BUILD` have ended when they are worked out again.
    due: u64,
}

/// Counts by class and age bin; `worth` is a table look-up.
#[derive(Debug)]
pub struct ReturnHazard {
    /// Where each age bin ends.
    pub ends_s: [f64; NUM_BINS],
    widths_s: [f64; NUM_BINS],
    curves: Vec<Option<Box<Curve>>>,
    /// Of open turns, of turns left.
    pools: [Curve; 2],
    turns: u64,
}

impl Default for ReturnHazard {
    fn default() -> Self {
        let mut ends_s = [0.0; NUM_BINS];
        let mut widths_s = [0.0; NUM_BINS];
        let (mut begin, mut end) = (0.0, 1.0);
        for age_bin in 0..NUM_BINS {
            if age_bin + 1 == NUM_BINS {
                end = 2.0 * LAST_EDGE_S;
            }
            ends_s[age_bin] = end;
            widths_s[age_bin] = end - begin;
            (begin, end) = (end, end * EDGE_RATIO);
        }
        let pools = Default::default();
        Self { ends_s, widths_s, curves: vec![None; NUM_CLASSES], pools, turns: 0 }
    }
}

impl ReturnHazard {
    /// A turn has ended: what is learnt ages by one.
    pub fn end_turn(&mut self) {
        self.turns += 1;
    }

    /// A waiting turn of the class has reached the bin.
    pub fn reach(&mut self, kind: Class, age_bin: usize) {
        self.curve(kind).reached[age_bin] += 1;
        self.pools[pool(kind)].reached[age_bin] += 1;
    }

    /// The same if there is such a bin, and the class's own curve has the worth there, if one is given; returns whether
    /// so.
    pub fn reach_if(&mut self, kind: Class, age_bin: usize, worth: Option<u16>) -> bool {
        let Some(curve) = self.curves[kind].as_mut().filter(|_| age_bin < NUM_BINS) else { return false };
        let is_reached = worth.is_none_or(|worth| curve.worths[age_bin] == worth);
        if is_reached {
            curve.reached[age_bin] += 1;
            self.pools[pool(kind)].reached[age_bin] += 1;
        }
        is_reached
    }

    /// A session came back for a turn of the class while it was in the bin.
    pub fn come_back(&mut self, kind: Class, age_bin: usize) {
        self.curve(kind).returned[age_bin] += 1;
        self.pools[pool(kind)].returned[age_bin] += 1;
    }

    /// The index as of the last `refresh` of the class. Beyond the last bin it is as there.
    pub fn worth(&self, kind: Class, age_bin: usize) -> i64 {
        let (pool, age_bin) = (&self.pools[pool(kind)], age_bin.min(NUM_BINS - 1));
        worth_in(self.curves[kind].as_deref().unwrap_or(pool), pool, age_bin)
    }

    /// Work out the class's worths anew if enough was learnt since.
    pub fn refresh(&mut self, kind: Class) {
        let (turns, at) = (self.turns, pool(kind));
        if turns >= self.pools[at].due + FIRST_BUILD {
            let worths = self.worths(&self.hazards(None, at));
            let curve = &mut self.pools[at];
            (curve.worths, curve.due) = (worths, next_due(turns));
        }
        if turns >= self.curve(kind).due + FIRST_BUILD {
            let worths = self.worths(&self.hazards(self.curves[kind].as_deref(), at));
            let curve = self.curve(kind);
            (curve.worths, curve.due) = (worths, next_due(turns));
        }
    }

    fn curve(&mut self, kind: Class) -> &mut Curve {
        self.curves[kind].get_or_insert_default()
    }

    /// A class leans on its pool, the pool of turns left on that of open ones.
    fn hazards(&self, curve: Option<&Curve>, pool: usize) -> [f64; NUM_BINS] {
        let [open, left] = &self.pools;
        let most = open.reached[0].max(1) as f64;
        std::array::from_fn(|age_bin| {
            let reached = open.reached[age_bin] as f64;
            let pseudo = PSEUDO_TURNS * reached / most;
            let mut hazard = open.returned[age_bin] as f64 / reached.max(1.0);
            if pool == 1 {
                hazard = mixed(left, age_bin, pseudo, hazard);
            }
            if let Some(curve) = curve {
                hazard = mixed(curve, age_bin, pseudo, hazard);
            }
            hazard.min(0.999)
        })
    }

    /// The index of an age is the steepest way from there in the plane of (time waited, returns).
    ///
    /// That is the first edge of the upper hull of what lies ahead, which is built from the far end.
    fn worths(&self, hazards: &[f64; NUM_BINS]) -> [u16; NUM_BINS] {
        let mut waiting = [1.0; NUM_BINS + 1];
        for (age_bin, hazard) in hazards.iter().enumerate() {
            waiting[age_bin + 1] = waiting[age_bin] * (1.0 - hazard);
        }
        let mut ahead_s = [0.0; NUM_BINS + 1];
        let mut hull = [NUM_BINS; NUM_BINS + 1];
        let mut top = 0;
        let mut worths = [0; NUM_BINS];
        for age_bin in (0..NUM_BINS).rev() {
            let both = (waiting[age_bin] + waiting[age_bin + 1]) / 2.0;
            ahead_s[age_bin] = ahead_s[age_bin + 1] + both * self.widths_s[age_bin];
            let slope = |to: usize| (waiting[age_bin] - waiting[to]) / (ahead_s[age_bin] - ahead_s[to]);
            let mut best = slope(hull[top]);
            while top > 0 {
                let next = slope(hull[top - 1]);
                if next < best {
                    break;
                }
                (top, best) = (top - 1, next);
            }
            worths[age_bin] = worth_of(best) as u16;
            top += 1;
            hull[top] = age_bin;
        }
        worths
    }
}

fn pool(kind: Class) -> usize {
    usize::from(kind >= FIRST_LEFT)
}

fn worth_in(curve: &Curve, pool: &Curve, age_bin: usize) -> i64 {
    let own = curve.worths[age_bin];
    i64::from(if own > 0 { own } else { pool.worths[age_bin].max(1) })
}

fn next_due(turns: u64) -> u64 {
    turns + 1 + turns / REBUILD_SHARE - FIRST_BUILD
}

fn mixed(curve: &Curve, age_bin: usize, pseudo: f64, hazard: f64) -> f64 {
    let (returned, reached) = (curve.returned[age_bin] as f64, curve.reached[age_bin] as f64);
    (returned + pseudo * hazard) / (reached + pseudo).max(1e-9)
}
