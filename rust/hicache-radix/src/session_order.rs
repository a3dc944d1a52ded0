//! What the payload of each session is worth: `hicache/policy/session_order.py`, which says why.
//!
//! Both give the same ratings for the same calls.

use std::collections::VecDeque;

use hashbrown::HashMap;

use crate::ages::Ages;
use crate::interface::{Rating, Regard, DEFAULT_PRIORITY, RECENCY_WORTH};
use crate::return_hazard::{
    left_class, open_class, worth_of, Class, ReturnHazard, MAX_STOPS, NUM_BINS, STEPS_PER_OCTAVE,
};
use crate::session_records::{Places, Session, Turn};
use crate::shadows::{Followed, Shadows, Watched};
use crate::tokens::Token;
use crate::tree::TreeCore;

/// Turns remembered; beyond that the oldest are forgotten.
const MAX_TURNS: usize = 100_000;
/// Instead of its age bin: a turn that has left the last one, of which the tree has something.
const OLD: usize = NUM_BINS;
/// Turns of one session that are remembered.
const MAX_BRANCHES: usize = 64;
const GAP_WEIGHT: f64 = 0.6;
const PRIORITY_OCTAVES: i64 = 5;
/// When another policy is followed, so many turns are rated anew at a time,
const SWEEP: usize = 64;
/// and so many are looked at, at most: of most the tree has nothing any more.
const SWEEP_LOOKS: usize = 16 * SWEEP;
/// Where recency orders, what was told to come back stands above the rest by this.
const TOLD_WORTH: i64 = 1024;
const UNRATED: u16 = u16::MAX;
/// It is counted in all.
const NO_BIN: u8 = u8::MAX;
const NO_LEASE: u64 = u64::MAX;

/// Keeps the worth of turns.
#[derive(Debug)]
pub struct SessionOrder {
    hazard: ReturnHazard,
    pub(crate) sessions: Places<Session>,
    pub(crate) session_named: HashMap<i64, usize>,
    pub(crate) turns: Places<Turn>,
    turn_of: HashMap<u64, usize>,
    ages: Ages,
    /// Who leaves a bin, while time passes.
    left: Vec<u32>,
    pub(crate) now_s: f64,
    ratings: Vec<Rating>,
    /// What the tree says to that.
    over: Vec<u64>,
    shadows: Option<Box<Shadows>>,
    followed: Followed,
    /// With shadows all turns in the order in which they are rated anew.
    round: VecDeque<(usize, u64)>,
    /// How many of these are to be.
    num_stale: usize,
}

impl Default for SessionOrder {
    fn default() -> Self {
        let hazard = ReturnHazard::default();
        Self {
            sessions: Places::default(),
            session_named: HashMap::default(),
            turns: Places::default(),
            turn_of: HashMap::default(),
            ages: Ages::new(hazard.ends_s),
            hazard,
            left: Vec::new(),
            now_s: 0.0,
            ratings: Vec::new(),
            over: Vec::new(),
            shadows: None,
            followed: Followed::default(),
            round: VecDeque::new(),
            num_stale: 0,
        }
    }
}

impl SessionOrder {
    /// Knows nobody. With shadows it follows the policy that does best.
    pub fn new(shadows: Option<Shadows>) -> Self {
        Self { shadows: shadows.map(Box::new), ..Self::default() }
    }

    // ---- turns ---------------------------------------------------------------------------------
    /// A turn begins, and comes back for the turn `reused`.
    pub fn begin(&mut self, name: i64, reused: Option<u64>, now_s: f64, priority: i64) {
        self.pass_time(now_s);
        let (now_s, at) = (self.now_s, self.session(name));
        let session = &mut self.sessions.items[at];
        let was_plain = session.is_plain();
        if session.num_turns > 0 && session.at_work == 0 {
            let gap_s = now_s - session.ended_s;
            let before = session.gap_s.unwrap_or(gap_s);
            session.gap_s = Some(GAP_WEIGHT * gap_s + (1.0 - GAP_WEIGHT) * before);
        }
        session.at_work += 1;
        session.priority = priority;
        session.is_over = false;
        session.returns_at_s = None;
        for number in (0..session.turns.len()).rev() {
            self.meet(self.sessions.items[at].turns[number], reused);
        }
        self.note_all(at, was_plain);
    }

    /// What a turn that begins makes of one of the session's earlier ones.
    fn meet(&mut self, at: usize, reused: Option<u64>) {
        let turn = &mut self.turns.items[at];
        if Some(turn.lease) == reused || turn.is_gone {
            let age_bin = self.ages.bin_of(turn.place);
            if turn.is_waiting && age_bin != usize::from(turn.uncounted_bin) && age_bin != OLD {
                self.hazard.come_back(turn.kind(), age_bin);
                turn.uncounted_bin = age_bin as u8;
            }
            self.sessions.items[turn.session()].num_met += u64::from(turn.is_left);
            turn.is_waiting = turn.is_left;
            if turn.is_gone {
                self.forget(at);
            } else {
                self.note(at);
            }
        } else if turn.is_waiting && !turn.is_left {
            self.leave(at);
        }
    }

    /// A turn ended, for a reason below `MAX_STOPS`.
    pub fn end(&mut self, name: i64, lease: u64, stop: usize, now_s: f64) {
        self.pass_time(now_s);
        let at = self.session(name);
        self.sessions.items[at].at_work = self.sessions.items[at].at_work.saturating_sub(1);
        if self.sessions.items[at].at_work == 0 {
            for number in 0..self.sessions.items[at].turns.len() {
                let before = self.sessions.items[at].turns[number];
                if !self.turns.items[before].is_waiting {
                    self.leave(before);
                }
            }
        }
        let session = &mut self.sessions.items[at];
        session.num_turns += 1;
        session.ended_s = self.now_s;
        let was_plain = session.is_plain();
        session.is_over |= session.is_one_shot;
        session.is_one_shot = false;
        self.hazard.end_turn();
        let kind = open_class(session.gap_s, session.num_turns, stop.min(MAX_STOPS - 1));
        self.hazard.refresh(kind);
        let turn = self.turns.put(Turn {
            lease,
            place: 0,
            session: at as u32, // there are never more than turns and requests at work
            kind: kind as u16,
            uncounted_bin: NO_BIN,
            rated: UNRATED,
            regard: Regard::Plain,
            is_plain: false,
            is_left: false,
            is_waiting: true,
            is_gone: false,
            is_over: false,
            is_watched: false,
        });
        self.turns.items[turn].place = self.ages.push(turn as u32, self.now_s);
        self.turn_of.insert(lease, turn);
        session.turns.push(turn);
        if session.turns.len() > MAX_BRANCHES {
            let first = session.turns[0];
            let lease = self.turns.items[first].lease;
            self.ratings.push(Rating { lease, worth: 0, regard: Regard::Over });
            self.forget(first);
        }
        self.note_all(at, was_plain);
        self.note(turn);
        self.enter(turn, 0);
        while self.turn_of.len() > MAX_TURNS {
            let Some(oldest) = self.ages.oldest() else { break };
            let oldest = oldest as usize;
            self.outlive(oldest, self.ages.bin_of(self.turns.items[oldest].place));
        }
        if self.shadows.is_some() {
            self.round.push_back((turn, lease));
            if self.round.len() > 2 * self.turn_of.len() + SWEEP && self.num_stale == 0 {
                let turns = &self.turns.items;
                self.round.retain(|(turn, lease)| turns[*turn].lease == *lease);
            }
        }
    }

    /// Whether `watch` makes something of the session.
    pub fn samples(&self, name: i64) -> bool {
        self.shadows.as_ref().is_some_and(|shadows| shadows.samples(name))
    }

    /// With `adaptive`: show a request that has ended to the shadows.
    pub fn watch<T: Token>(&mut self, name: i64, tokens: &[T], prompt_len: usize, seed: u64) {
        if !self.samples(name) {
            return;
        }
        let at = self.session_named.get(&name).and_then(|at| self.sessions.items[*at].turns.last()).copied();
        let last = at.map(|at| &self.turns.items[at]);
        let turn = last.map(|turn| (turn.lease, self.learnt(turn, self.ages.bin_of(turn.place))));
        let Some(shadows) = self.shadows.as_mut() else { return };
        let followed = shadows.watch(&Watched { name, turn, tokens, prompt_len, seed });
        if let Some(turn) = at.map(|at| &mut self.turns.items[at]) {
            turn.is_watched = true;
            if turn.is_gone {
                self.ages.note(turn.place, turn.kind, None);
            }
        }
        if followed != self.followed {
            self.followed = followed;
            self.num_stale = self.round.len();
        }
    }

    /// The policy by which turns are rated now.
    pub fn followed(&self) -> Followed {
        self.followed
    }

    /// With `adaptive` the blocks that each order would have hit of the sampled prompts so far.
    pub fn shadow_hits(&self) -> Vec<u64> {
        self.shadows.as_ref().map_or_else(Vec::new, |shadows| shadows.hits().to_vec())
    }

    /// Tell the tree what has changed until now, and learn from it what is gone.
    pub fn tell(&mut self, tree: &mut TreeCore, now_s: f64) {
        self.pass_time(now_s);
        self.sweep();
        let mut over = std::mem::take(&mut self.over);
        tree.rate(self.ratings.drain(..), &mut over);
        self.bury(over.drain(..));
        self.over = over;
    }

    /// What has changed until now, to be told to the tree.
    pub fn take_ratings(&mut self, now_s: f64) -> Vec<Rating> {
        self.pass_time(now_s);
        self.sweep();
        std::mem::take(&mut self.ratings)
    }

    /// Rate some of the turns by the policy that is followed now: no call has to rate them all.
    ///
    /// Until a turn's turn comes, what it used leaves before all that is rated by recency.
    fn sweep(&mut self) {
        let mut num_left = SWEEP;
        for _ in 0..self.num_stale.min(SWEEP_LOOKS) {
            self.num_stale -= 1;
            let Some((turn, lease)) = self.round.pop_front() else { break };
            let known = &self.turns.items[turn];
            if known.lease != lease || known.is_gone {
                continue;
            }
            self.round.push_back((turn, lease));
            if known.is_waiting {
                self.rate(turn);
            }
            num_left -= 1;
            if num_left == 0 {
                break;
            }
        }
    }

    /// The tree has nothing of these any more.
    pub fn bury(&mut self, leases: impl IntoIterator<Item = u64>) {
        for lease in leases {
            let Some(at) = self.turn_of.get(&lease).copied() else { continue };
            let turn = &mut self.turns.items[at];
            (turn.is_gone, turn.is_plain) = (true, false);
            if turn.is_left || !turn.is_waiting || self.ages.bin_of(turn.place) == OLD {
                self.forget(at);
            } else if !turn.is_watched {
                self.ages.hush(turn.place, turn.kind);
            }
        }
    }

    /// Whose turn it was, if it is remembered.
    pub fn session_of(&self, lease: u64) -> Option<i64> {
        let turn = &self.turns.items[*self.turn_of.get(&lease)?];
        Some(self.sessions.items[turn.session()].name)
    }

    /// Where the session is, which may be new.
    fn session(&mut self, name: i64) -> usize {
        *self.session_named.entry(name).or_insert_with(|| self.sessions.put(Session::new(name)))
    }

    /// Forget all sessions, but not what was learnt.
    pub fn clear(&mut self) {
        let hazard = std::mem::take(&mut self.hazard);
        let shadows = self.shadows.take();
        *self = Self { hazard, shadows, now_s: self.now_s, followed: self.followed, ..Self::default() };
    }

    /// Sessions remembered.
    pub fn num_sessions(&self) -> usize {
        self.session_named.len()
    }

    // ---- time ----------------------------------------------------------------------------------
    pub(crate) fn pass_time(&mut self, now_s: f64) {
        if now_s > self.now_s {
            self.now_s = now_s;
        }
        if !self.ages.are_due(self.now_s) {
            return;
        }
        let mut left = std::mem::take(&mut self.left);
        let is_settled = self.num_stale == 0; // else a turn may have to be rated by another order
        self.ages.begin();
        for age_bin in 0..NUM_BINS {
            let hazard = &mut self.hazard;
            self.ages.leave(age_bin, self.now_s, &mut left, |class, rated| {
                (is_settled || rated.is_none()) && hazard.reach_if(usize::from(class), age_bin + 1, rated)
            });
            for turn in &left {
                self.enter(*turn as usize, age_bin + 1);
            }
            left.clear();
        }
        self.left = left;
    }

    fn enter(&mut self, at: usize, age_bin: usize) {
        let turn = &self.turns.items[at];
        if age_bin == OLD && turn.is_gone {
            self.forget(at);
        } else if turn.is_waiting {
            if age_bin != OLD {
                self.hazard.reach(turn.kind(), age_bin);
            }
            self.say(at, age_bin);
        }
    }

    /// It counts for the class of turns left from its next bin on.
    fn leave(&mut self, at: usize) {
        let turn = &mut self.turns.items[at];
        let session = &self.sessions.items[turn.session()];
        (turn.is_left, turn.is_waiting) = (true, true);
        turn.uncounted_bin = self.ages.bin_of(turn.place) as u8;
        turn.kind = left_class(session.gap_s, session.num_met) as u16;
        self.hazard.refresh(turn.kind());
        self.rate(at);
    }

    /// Forget a turn of which the tree has something, as there are too many: no hint, and no order but that of
    /// sessions, speaks in that any more, since nobody will rate it again.
    fn outlive(&mut self, at: usize, age_bin: usize) {
        let turn = &self.turns.items[at];
        if turn.is_waiting && !turn.is_gone {
            let worth = self.learnt(turn, age_bin).min(u32::from(turn.rated));
            if worth < u32::from(turn.rated) || turn.regard > Regard::Plain {
                let regard = turn.regard.min(Regard::Plain);
                self.ratings.push(Rating { lease: turn.lease, worth, regard });
            }
        }
        self.forget(at);
    }

    fn forget(&mut self, at: usize) {
        let turn = &mut self.turns.items[at];
        self.turn_of.remove(&turn.lease);
        turn.lease = NO_LEASE;
        self.turns.unused.push(at);
        if self.ages.forget(turn.place) {
            let turns = &mut self.turns.items;
            self.ages.compact(|turn, place| turns[turn as usize].place = place);
        }
        let turn = &self.turns.items[at];
        let session = &mut self.sessions.items[turn.session()];
        session.turns.retain(|other| *other != at);
        if session.turns.is_empty() && session.at_work == 0 {
            self.session_named.remove(&session.name);
            self.sessions.unused.push(turn.session());
        }
    }

    // ---- worth ---------------------------------------------------------------------------------
    pub(crate) fn rate(&mut self, at: usize) {
        self.note(at);
        self.say(at, self.ages.bin_of(self.turns.items[at].place));
    }

    fn say(&mut self, at: usize, age_bin: usize) {
        let turn = &self.turns.items[at];
        let learnt = self.learnt(turn, age_bin);
        let is_learnt = turn.is_plain && self.followed == Followed::Session;
        let (worth, regard) = if is_learnt { (learnt, Regard::Plain) } else { self.rating(turn, age_bin) };
        let turn = &mut self.turns.items[at];
        if (worth != u32::from(turn.rated) || regard != turn.regard) && !turn.is_gone {
            self.ratings.push(Rating { lease: turn.lease, worth, regard });
            (turn.rated, turn.regard) = (worth as u16, regard);
        }
        if let (true, Some(shadows)) = (turn.is_watched, &mut self.shadows) {
            turn.is_watched = shadows.rate(turn.lease, learnt);
        }
        if turn.is_plain || turn.is_gone && turn.is_watched {
            self.ages.note(turn.place, turn.kind, Some(learnt as u16));
        } else if turn.is_gone {
            self.ages.hush(turn.place, turn.kind);
        }
    }

    /// Have the line know what it has to know of a turn that has changed, or whose session has.
    fn note(&mut self, at: usize) {
        let turn = &mut self.turns.items[at];
        if turn.is_gone {
            return; // the line knows that
        }
        let session = &self.sessions.items[turn.session()];
        turn.is_plain = turn.is_waiting && !turn.is_over && session.is_plain();
        // The line has what it was last said to be worth by sessions, to the tree or to the shadows.
        let is_told = turn.is_plain && turn.regard == Regard::Plain;
        let is_known = is_told && !turn.is_watched && self.followed == Followed::Session;
        let worth = Some(turn.rated).filter(|worth| is_known && *worth != UNRATED);
        self.ages.note(turn.place, turn.kind, worth);
    }

    /// The same for all turns of a session, if it has begun or ceased to be a plain one.
    fn note_all(&mut self, at: usize, was_plain: bool) {
        if self.sessions.items[at].is_plain() != was_plain {
            for number in 0..self.sessions.items[at].turns.len() {
                self.note(self.sessions.items[at].turns[number]);
            }
        }
    }

    fn learnt(&self, turn: &Turn, age_bin: usize) -> u32 {
        learnt(&self.hazard, turn.kind(), age_bin)
    }

    /// What it is worth, and how L3 is to regard it: by what was said alone.
    fn rating(&self, turn: &Turn, age_bin: usize) -> (u32, Regard) {
        let session = &self.sessions.items[turn.session()];
        if session.is_over || turn.is_over {
            return (0, Regard::Over);
        }
        let is_old = age_bin == OLD;
        let told = session.returns_at_s.filter(|_| !turn.is_left && !is_old).map_or(0, |returns_at_s| {
            let until_s = returns_at_s - self.now_s;
            if until_s >= self.ages.ended_s(turn.place) - returns_at_s {
                worth_of(1.0 / until_s.max(1.0))
            } else {
                0
            }
        });
        let mut moved =
            ((session.priority - DEFAULT_PRIORITY) * STEPS_PER_OCTAVE).div_euclid(PRIORITY_OCTAVES);
        if is_old {
            moved = moved.min(0); // what raised it has spoken long enough; what lowered it still holds
        }
        let regard = match moved {
            _ if told > 0 => Regard::High,
            1.. if !turn.is_left => Regard::High,
            0.. => Regard::Plain,
            _ => Regard::Low,
        };
        (worth_by(self.followed, || self.hazard.worth(turn.kind(), age_bin), told, moved), regard)
    }
}

/// Of a turn of which nobody said anything, by sessions.
fn learnt(hazard: &ReturnHazard, kind: Class, age_bin: usize) -> u32 {
    clamped(hazard.worth(kind, age_bin))
}

fn clamped(worth: i64) -> u32 {
    worth.clamp(1, i64::from(RECENCY_WORTH) - 1) as u32
}

/// By what was learnt or told, moved by priority.
fn worth_by(followed: Followed, learnt: impl FnOnce() -> i64, told: i64, moved: i64) -> u32 {
    if followed == Followed::Session {
        return clamped(told.max(learnt()) + moved);
    }
    (i64::from(followed.least_worth()) + TOLD_WORTH + moved + TOLD_WORTH * i64::from(told > 0)) as u32
}
