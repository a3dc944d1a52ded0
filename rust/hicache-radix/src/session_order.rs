//! What the payload of each session is worth: `hicache/policy/session_order.py`, which says why.
//!
//! Both give the same ratings for the same calls.

use std::collections::VecDeque;

use hashbrown::HashMap;

use crate::interface::{RECENCY_WORTH, SHARED_WORTH};
use crate::return_hazard::{
    left_class, open_class, worth_of, Class, ReturnHazard, MAX_STOPS, NUM_BINS, STEPS_PER_OCTAVE,
};
use crate::shadows::{Followed, Shadows};
use crate::tokens::Token;
use crate::tree::TreeCore;

/// Turns remembered; beyond that the oldest are forgotten.
const MAX_TURNS: usize = 100_000;
/// Turns of one session that are remembered.
const MAX_BRANCHES: usize = 64;
const GAP_WEIGHT: f64 = 0.6;
const PRIORITY_OCTAVES: i64 = 5;
/// When another policy is followed, so many turns are rated anew at a time.
const SWEEP: usize = 64;
/// Where recency orders, what was told to come back stands above the rest by this.
const TOLD_WORTH: i64 = 1024;
/// What a request has that names none.
const DEFAULT_PRIORITY: i64 = 50;

/// Small, for time touches each some thirty times: two share a cache line.
#[derive(Debug)]
struct Turn {
    lease: u64,
    ended_s: f64,
    /// Its place.
    session: u32,
    rated: u32,
    kind: u16,
    age_bin: u8,
    /// Among those of its class that reached the bin.
    is_counted: bool,
    is_left: bool,
    is_waiting: bool,
    /// The tree has nothing of it any more.
    is_gone: bool,
    /// The client has abandoned it.
    is_over: bool,
}

const _: () = assert!(size_of::<Turn>() == 32);

impl Turn {
    fn session(&self) -> usize {
        self.session as usize
    }

    fn kind(&self) -> Class {
        usize::from(self.kind)
    }

    fn age_bin(&self) -> usize {
        usize::from(self.age_bin)
    }
}

#[derive(Debug)]
struct Session {
    name: i64,
    /// The places of its turns, oldest first; what is open or at work comes last.
    turns: Vec<usize>,
    at_work: u64,
    num_turns: u64,
    num_met: u64,
    ended_s: f64,
    gap_s: Option<f64>,
    priority: i64,
    is_over: bool,
    is_one_shot: bool,
    returns_at_s: Option<f64>,
}

impl Session {
    fn new(name: i64) -> Self {
        Self {
            name,
            turns: Vec::new(),
            at_work: 0,
            num_turns: 0,
            num_met: 0,
            ended_s: 0.0,
            gap_s: None,
            priority: DEFAULT_PRIORITY,
            is_over: false,
            is_one_shot: false,
            returns_at_s: None,
        }
    }
}

/// Things that stay at their places while they live.
#[derive(Debug)]
struct Places<T> {
    items: Vec<T>,
    unused: Vec<usize>,
}

impl<T> Places<T> {
    fn put(&mut self, item: T) -> usize {
        if let Some(place) = self.unused.pop() {
            self.items[place] = item;
            return place;
        }
        self.items.push(item);
        self.items.len() - 1
    }
}

impl<T> Default for Places<T> {
    fn default() -> Self {
        Self { items: Vec::new(), unused: Vec::new() }
    }
}

const UNRATED: u32 = u32::MAX;
const NO_LEASE: u64 = u64::MAX;

/// When a turn leaves its age bin.
#[derive(Debug, Clone, Copy)]
struct Timer {
    due_s: f64,
    turn: usize,
    /// The place may be another turn's by then.
    lease: u64,
}

/// Keeps the worth of turns.
#[derive(Debug)]
pub struct SessionOrder {
    hazard: ReturnHazard,
    sessions: Places<Session>,
    session_named: HashMap<i64, usize>,
    turns: Places<Turn>,
    turn_of: HashMap<u64, usize>,
    /// By age bin; all turns spend the same time there, so they come out in order.
    timers: [VecDeque<Timer>; NUM_BINS],
    /// When the first of them is due; no later.
    due_s: f64,
    now_s: f64,
    ratings: Vec<(u64, u32)>,
    shadows: Option<Box<Shadows>>,
    followed: Followed,
    /// With shadows all turns in the order in which they are rated anew.
    round: VecDeque<(usize, u64)>,
    /// How many of these are to be.
    num_stale: usize,
}

impl Default for SessionOrder {
    fn default() -> Self {
        Self {
            hazard: ReturnHazard::default(),
            sessions: Places::default(),
            session_named: HashMap::default(),
            turns: Places::default(),
            turn_of: HashMap::default(),
            timers: Default::default(),
            due_s: f64::INFINITY,
            now_s: 0.0,
            ratings: Vec::new(),
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
    }

    /// What a turn that begins makes of one of the session's earlier ones.
    fn meet(&mut self, at: usize, reused: Option<u64>) {
        let turn = &mut self.turns.items[at];
        if Some(turn.lease) == reused || turn.is_gone {
            if turn.is_counted {
                self.hazard.come_back(turn.kind(), turn.age_bin());
                turn.is_counted = false;
            }
            self.sessions.items[turn.session()].num_met += u64::from(turn.is_left);
            (turn.is_waiting, turn.is_over) = (turn.is_left, false);
            if turn.is_gone {
                self.forget(at);
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
        session.is_over |= session.is_one_shot;
        session.is_one_shot = false;
        self.hazard.end_turn();
        let kind = open_class(session.gap_s, session.num_turns, stop.min(MAX_STOPS - 1));
        self.hazard.refresh(kind);
        let turn = self.turns.put(Turn {
            lease,
            session: at as u32, // there are never more than turns and requests at work
            kind: kind as u16,
            ended_s: self.now_s,
            age_bin: 0,
            rated: UNRATED,
            is_counted: false,
            is_left: false,
            is_waiting: true,
            is_gone: false,
            is_over: false,
        });
        self.turn_of.insert(lease, turn);
        session.turns.push(turn);
        if session.turns.len() > MAX_BRANCHES {
            let first = session.turns[0];
            self.ratings.push((self.turns.items[first].lease, 0));
            self.forget(first);
        }
        self.enter(turn, 0);
        while self.turn_of.len() > MAX_TURNS {
            let Some(oldest) = self.timers.iter_mut().rev().find_map(VecDeque::pop_front) else { break };
            if self.is_alive(oldest) {
                self.forget(oldest.turn);
            }
        }
        if self.shadows.is_some() {
            self.round.push_back((turn, lease));
            if self.round.len() > 2 * self.turn_of.len() + SWEEP && self.num_stale == 0 {
                let turns = &self.turns.items;
                self.round.retain(|(turn, lease)| turns[*turn].lease == *lease);
            }
        }
    }

    /// With `adaptive`: show a request that has ended to the shadows.
    pub fn watch<T: Token>(
        &mut self,
        name: i64,
        tokens: &[T],
        prompt_len: usize,
        seed: u64,
        stop: usize,
        now_s: f64,
    ) {
        let Some(shadows) = self.shadows.as_mut().filter(|shadows| shadows.samples(name)) else { return };
        let followed = shadows.watch(name, tokens, prompt_len, seed, stop, now_s);
        if followed != self.followed {
            self.followed = followed;
            self.num_stale = self.round.len();
        }
    }

    /// The policy by which turns are rated now.
    pub fn followed(&self) -> Followed {
        self.followed
    }

    /// Tell the tree what has changed until now, and learn from it what is gone.
    pub fn tell(&mut self, tree: &mut TreeCore, now_s: f64) {
        let ratings = self.take_ratings(now_s);
        self.bury(tree.rate(ratings));
    }

    /// What has changed until now, to be told to the tree.
    pub fn take_ratings(&mut self, now_s: f64) -> Vec<(u64, u32)> {
        self.pass_time(now_s);
        self.sweep();
        std::mem::take(&mut self.ratings)
    }

    /// Rate some of the turns by the policy that is followed now: no call has to rate them all.
    fn sweep(&mut self) {
        for _ in 0..self.num_stale.min(SWEEP) {
            self.num_stale -= 1;
            let Some((turn, lease)) = self.round.pop_front() else { break };
            if self.turns.items[turn].lease == lease {
                self.round.push_back((turn, lease));
                if self.turns.items[turn].is_waiting {
                    self.rate(turn);
                }
            }
        }
    }

    /// The tree has nothing of these any more.
    pub fn bury(&mut self, leases: impl IntoIterator<Item = u64>) {
        for lease in leases {
            let Some(at) = self.turn_of.get(&lease).copied() else { continue };
            let turn = &mut self.turns.items[at];
            turn.is_gone = true;
            if turn.is_left || !turn.is_waiting {
                self.forget(at);
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

    // ---- hints ---------------------------------------------------------------------------------
    /// The session is over.
    pub fn close(&mut self, name: i64) {
        self.hint(name, |session| session.is_over = true);
    }

    /// The turn that is at work, or the last one, is the session's only one.
    pub fn one_shot(&mut self, name: i64) {
        self.hint(name, |session| {
            session.is_one_shot = session.at_work > 0;
            session.is_over |= session.at_work == 0;
        });
    }

    /// It is not over after all.
    pub fn reopen(&mut self, name: i64) {
        self.abandon(name, false);
        self.hint(name, |session| (session.is_over, session.is_one_shot) = (false, false));
    }

    /// The session will not go on from its last turn.
    pub fn abandon_branch(&mut self, name: i64) {
        self.abandon(name, true);
        self.hint(name, |_| ());
    }

    fn abandon(&mut self, name: i64, is_over: bool) {
        let Some(at) = self.session_named.get(&name) else { return };
        for turn in &self.sessions.items[*at].turns {
            self.turns.items[*turn].is_over = is_over;
        }
    }

    /// The client says when the session comes back.
    pub fn expects_return(&mut self, name: i64, in_s: f64, now_s: f64) {
        self.pass_time(now_s);
        let returns_at_s = Some(self.now_s + in_s);
        self.hint(name, |session| {
            (session.is_over, session.is_one_shot) = (false, false);
            session.returns_at_s = returns_at_s;
        });
    }

    /// Change a session that is known, and what its turns are worth.
    fn hint(&mut self, name: i64, change: impl FnOnce(&mut Session)) {
        let Some(at) = self.session_named.get(&name).copied() else { return };
        change(&mut self.sessions.items[at]);
        for number in 0..self.sessions.items[at].turns.len() {
            let turn = self.sessions.items[at].turns[number];
            if self.turns.items[turn].is_waiting {
                self.rate(turn);
            }
        }
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
    fn pass_time(&mut self, now_s: f64) {
        self.now_s = self.now_s.max(now_s);
        if self.now_s < self.due_s {
            return;
        }
        for age_bin in 0..NUM_BINS {
            while self.timers[age_bin].front().is_some_and(|timer| timer.due_s <= self.now_s) {
                let Some(timer) = self.timers[age_bin].pop_front() else { break };
                if !self.is_alive(timer) {
                    continue;
                }
                if age_bin + 1 < NUM_BINS {
                    self.enter(timer.turn, age_bin + 1);
                } else {
                    self.forget(timer.turn); // its payload keeps the worth of the last bin
                }
            }
        }
        let heads = self.timers.iter().filter_map(|queue| queue.front());
        self.due_s = heads.map(|timer| timer.due_s).fold(f64::INFINITY, f64::min);
    }

    fn is_alive(&self, timer: Timer) -> bool {
        self.turns.items[timer.turn].lease == timer.lease
    }

    fn enter(&mut self, at: usize, age_bin: usize) {
        let turn = &mut self.turns.items[at];
        turn.age_bin = age_bin as u8;
        turn.is_counted = turn.is_waiting;
        let due_s = turn.ended_s + self.hazard.ends_s[age_bin];
        self.due_s = self.due_s.min(due_s);
        if turn.is_waiting {
            self.hazard.reach(turn.kind(), age_bin);
        }
        let timer = Timer { due_s, turn: at, lease: turn.lease };
        let queue = &mut self.timers[age_bin];
        queue.push_back(timer);
        if queue.len() > 2 * MAX_TURNS {
            queue.retain(|timer| self.turns.items[timer.turn].lease == timer.lease);
        }
        let turn = &self.turns.items[at];
        if turn.is_waiting && !turn.is_gone {
            self.rate(at);
        }
    }

    fn leave(&mut self, at: usize) {
        let turn = &mut self.turns.items[at];
        let session = &self.sessions.items[turn.session()];
        (turn.is_left, turn.is_waiting, turn.is_counted) = (true, true, false);
        turn.kind = left_class(session.gap_s, session.num_met) as u16;
        self.hazard.refresh(turn.kind());
        self.rate(at);
    }

    fn forget(&mut self, at: usize) {
        let turn = &mut self.turns.items[at];
        self.turn_of.remove(&turn.lease);
        turn.lease = NO_LEASE;
        self.turns.unused.push(at);
        let session = &mut self.sessions.items[turn.session()];
        session.turns.retain(|other| *other != at);
        if session.turns.is_empty() && session.at_work == 0 {
            self.session_named.remove(&session.name);
            self.sessions.unused.push(turn.session());
        }
    }

    // ---- worth ---------------------------------------------------------------------------------
    fn rate(&mut self, at: usize) {
        let turn = &self.turns.items[at];
        let worth = self.worth(turn);
        if worth != turn.rated && !turn.is_gone {
            self.ratings.push((turn.lease, worth));
            self.turns.items[at].rated = worth;
        }
    }

    fn worth(&self, turn: &Turn) -> u32 {
        let session = &self.sessions.items[turn.session()];
        if session.is_over || turn.is_over {
            return 0;
        }
        let told = session.returns_at_s.filter(|_| !turn.is_left).map_or(0, |returns_at_s| {
            let until_s = returns_at_s - self.now_s;
            if until_s >= turn.ended_s - returns_at_s {
                worth_of(1.0 / until_s.max(1.0))
            } else {
                0
            }
        });
        let moved = ((session.priority - DEFAULT_PRIORITY) * STEPS_PER_OCTAVE).div_euclid(PRIORITY_OCTAVES);
        let least = match self.followed {
            Followed::Session => {
                let worth = told.max(self.hazard.worth(turn.kind(), turn.age_bin())) + moved;
                return worth.clamp(1, i64::from(RECENCY_WORTH) - 1) as u32;
            }
            Followed::Recency => RECENCY_WORTH,
            Followed::Shared => SHARED_WORTH,
        };
        (i64::from(least) + TOLD_WORTH + moved + TOLD_WORTH * i64::from(told > 0)) as u32
    }
}
