//! What the payload of each session is worth: `hicache/policy/session_order.py`, which says why.
//!
//! Both give the same ratings for the same calls.

use std::collections::VecDeque;

use hashbrown::HashMap;

use crate::interface::MOST_WORTH;
use crate::return_hazard::{
    left_class, open_class, worth_of, Class, ReturnHazard, MAX_STOPS, NUM_BINS, STEPS_PER_OCTAVE,
};

/// Turns remembered; beyond that the oldest are forgotten.
const MAX_TURNS: usize = 100_000;
/// Turns of one session that are remembered.
const MAX_BRANCHES: usize = 64;
const GAP_WEIGHT: f64 = 0.6;
const PRIORITY_OCTAVES: i64 = 5;
/// What a request has that names none.
pub const DEFAULT_PRIORITY: i64 = 50;

#[derive(Debug)]
struct Turn {
    session: i64,
    kind: Class,
    ended_s: f64,
    age_bin: usize,
    rated: u32,
    /// Among those of its class that reached the bin.
    is_counted: bool,
    is_left: bool,
    is_waiting: bool,
    /// The tree has nothing of it any more.
    is_gone: bool,
    /// The client has abandoned it.
    is_over: bool,
}

#[derive(Debug)]
struct Session {
    /// Oldest first; what is open or at work comes last.
    turns: Vec<u64>,
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
    fn new() -> Self {
        Self {
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

const UNRATED: u32 = u32::MAX;

/// Keeps the worth of turns.
#[derive(Debug, Default)]
pub struct SessionOrder {
    hazard: ReturnHazard,
    sessions: HashMap<i64, Session>,
    turns: HashMap<u64, Turn>,
    /// By age bin, when each turn leaves it; all turns spend the same time there, so they come out in order.
    timers: [VecDeque<(f64, u64)>; NUM_BINS],
    /// When the first of them is due; no later.
    due_s: f64,
    now_s: f64,
    ratings: Vec<(u64, u32)>,
}

impl SessionOrder {
    /// Knows nobody.
    pub fn new() -> Self {
        Self { due_s: f64::INFINITY, ..Self::default() }
    }

    // ---- turns ---------------------------------------------------------------------------------
    /// A turn begins, and comes back for the turn `reused`.
    pub fn begin(&mut self, name: i64, reused: Option<u64>, now_s: f64, priority: i64) {
        self.pass_time(now_s);
        let session = self.sessions.entry(name).or_insert_with(Session::new);
        if session.num_turns > 0 && session.at_work == 0 {
            let gap_s = self.now_s - session.ended_s;
            let before = session.gap_s.unwrap_or(gap_s);
            session.gap_s = Some(GAP_WEIGHT * gap_s + (1.0 - GAP_WEIGHT) * before);
        }
        session.at_work += 1;
        session.priority = priority;
        session.is_over = false;
        session.returns_at_s = None;
        for at in (0..session.turns.len()).rev() {
            self.meet(name, at, reused);
        }
    }

    /// What a turn that begins makes of the one at that place.
    fn meet(&mut self, name: i64, at: usize, reused: Option<u64>) {
        let Some(session) = self.sessions.get_mut(&name) else { return };
        let lease = session.turns[at];
        let Some(turn) = self.turns.get_mut(&lease) else { return };
        if Some(lease) == reused || turn.is_gone {
            if turn.is_counted {
                self.hazard.come_back(turn.kind, turn.age_bin);
                turn.is_counted = false;
            }
            session.num_met += u64::from(turn.is_left);
            (turn.is_waiting, turn.is_over) = (turn.is_left, false);
            if turn.is_gone {
                self.forget(lease);
            }
        } else if turn.is_waiting && !turn.is_left {
            self.leave(lease);
        }
    }

    /// A turn ended, for a reason below `MAX_STOPS`.
    pub fn end(&mut self, name: i64, lease: u64, stop: usize, now_s: f64) {
        self.pass_time(now_s);
        let session = self.sessions.entry(name).or_insert_with(Session::new);
        session.at_work = session.at_work.saturating_sub(1);
        if session.at_work == 0 {
            for at in 0..session.turns.len() {
                let before = self.sessions[&name].turns[at];
                if !self.turns[&before].is_waiting {
                    self.leave(before);
                }
            }
        }
        let session = self.sessions.entry(name).or_insert_with(Session::new);
        session.num_turns += 1;
        session.ended_s = self.now_s;
        session.is_over |= session.is_one_shot;
        session.is_one_shot = false;
        session.turns.push(lease);
        self.hazard.end_turn();
        let kind = open_class(session.gap_s, session.num_turns, stop.min(MAX_STOPS - 1));
        self.hazard.refresh(kind);
        let turn = Turn {
            session: name,
            kind,
            ended_s: self.now_s,
            age_bin: 0,
            rated: UNRATED,
            is_counted: false,
            is_left: false,
            is_waiting: true,
            is_gone: false,
            is_over: false,
        };
        self.turns.insert(lease, turn);
        if session.turns.len() > MAX_BRANCHES {
            let first = session.turns[0];
            self.ratings.push((first, 0));
            self.forget(first);
        }
        self.enter(lease, 0);
        while self.turns.len() > MAX_TURNS {
            let oldest = self.timers.iter_mut().rev().find_map(VecDeque::pop_front);
            let Some((_, lease)) = oldest else { break };
            self.forget(lease);
        }
    }

    /// What has changed until now, to be told to the tree.
    pub fn take_ratings(&mut self, now_s: f64) -> Vec<(u64, u32)> {
        self.pass_time(now_s);
        std::mem::take(&mut self.ratings)
    }

    /// The tree has nothing of these any more.
    pub fn bury(&mut self, leases: impl IntoIterator<Item = u64>) {
        for lease in leases {
            let Some(turn) = self.turns.get_mut(&lease) else { continue };
            turn.is_gone = true;
            if turn.is_left || !turn.is_waiting {
                self.forget(lease);
            }
        }
    }

    /// Whose turn it was, if it is remembered.
    pub fn session_of(&self, lease: u64) -> Option<i64> {
        self.turns.get(&lease).map(|turn| turn.session)
    }

    // ---- hints ---------------------------------------------------------------------------------
    /// The session is over.
    pub fn close(&mut self, name: i64) {
        if let Some(session) = self.sessions.get_mut(&name) {
            session.is_over = true;
            self.rate_all(name);
        }
    }

    /// The turn that is at work, or the last one, is the session's only one.
    pub fn one_shot(&mut self, name: i64) {
        if let Some(session) = self.sessions.get_mut(&name) {
            session.is_one_shot = session.at_work > 0;
            session.is_over |= session.at_work == 0;
            self.rate_all(name);
        }
    }

    /// It is not over after all.
    pub fn reopen(&mut self, name: i64) {
        if let Some(session) = self.sessions.get_mut(&name) {
            (session.is_over, session.is_one_shot) = (false, false);
            self.abandon(name, false);
        }
    }

    /// The session will not go on from its last turn.
    pub fn abandon_branch(&mut self, name: i64) {
        self.abandon(name, true);
    }

    fn abandon(&mut self, name: i64, is_over: bool) {
        let Some(session) = self.sessions.get(&name) else { return };
        for lease in &session.turns {
            if let Some(turn) = self.turns.get_mut(lease) {
                turn.is_over = is_over;
            }
        }
        self.rate_all(name);
    }

    /// The client says when the session comes back.
    pub fn expects_return(&mut self, name: i64, in_s: f64, now_s: f64) {
        self.pass_time(now_s);
        if let Some(session) = self.sessions.get_mut(&name) {
            (session.is_over, session.is_one_shot) = (false, false);
            session.returns_at_s = Some(self.now_s + in_s);
            self.rate_all(name);
        }
    }

    /// Forget all sessions, but not what was learnt.
    pub fn clear(&mut self) {
        let hazard = std::mem::take(&mut self.hazard);
        *self = Self { hazard, now_s: self.now_s, ..Self::new() };
    }

    /// Sessions remembered.
    pub fn num_sessions(&self) -> usize {
        self.sessions.len()
    }

    // ---- time ----------------------------------------------------------------------------------
    fn pass_time(&mut self, now_s: f64) {
        self.now_s = self.now_s.max(now_s);
        if self.now_s < self.due_s {
            return;
        }
        for age_bin in 0..NUM_BINS {
            while self.timers[age_bin].front().is_some_and(|timer| timer.0 <= self.now_s) {
                let Some((_, lease)) = self.timers[age_bin].pop_front() else { break };
                if age_bin + 1 < NUM_BINS {
                    self.enter(lease, age_bin + 1);
                } else {
                    self.forget(lease); // its payload keeps the worth of the last bin
                }
            }
        }
        let heads = self.timers.iter().filter_map(|queue| queue.front());
        self.due_s = heads.map(|timer| timer.0).fold(f64::INFINITY, f64::min);
    }

    fn enter(&mut self, lease: u64, age_bin: usize) {
        let Some(turn) = self.turns.get_mut(&lease) else { return };
        turn.age_bin = age_bin;
        turn.is_counted = turn.is_waiting;
        let due_s = turn.ended_s + self.hazard.ends_s[age_bin];
        let queue = &mut self.timers[age_bin];
        queue.push_back((due_s, lease));
        if queue.len() > 2 * MAX_TURNS {
            queue.retain(|(_, lease)| self.turns.contains_key(lease));
        }
        let Some(turn) = self.turns.get_mut(&lease) else { return };
        self.due_s = self.due_s.min(due_s);
        if turn.is_waiting {
            self.hazard.reach(turn.kind, age_bin);
            self.rate(lease);
        }
    }

    fn leave(&mut self, lease: u64) {
        let Some(turn) = self.turns.get_mut(&lease) else { return };
        let Some(session) = self.sessions.get(&turn.session) else { return };
        (turn.is_left, turn.is_waiting, turn.is_counted) = (true, true, false);
        turn.kind = left_class(session.gap_s, session.num_met);
        self.hazard.refresh(turn.kind);
        self.rate(lease);
    }

    fn forget(&mut self, lease: u64) {
        let Some(turn) = self.turns.remove(&lease) else { return };
        let Some(session) = self.sessions.get_mut(&turn.session) else { return };
        session.turns.retain(|other| *other != lease);
        if session.turns.is_empty() && session.at_work == 0 {
            self.sessions.remove(&turn.session);
        }
    }

    // ---- worth ---------------------------------------------------------------------------------
    fn rate_all(&mut self, name: i64) {
        for at in 0..self.sessions[&name].turns.len() {
            let lease = self.sessions[&name].turns[at];
            if self.turns[&lease].is_waiting {
                self.rate(lease);
            }
        }
    }

    fn rate(&mut self, lease: u64) {
        let Some(turn) = self.turns.get(&lease) else { return };
        let worth = self.worth(turn);
        if worth != turn.rated && !turn.is_gone {
            self.ratings.push((lease, worth));
            if let Some(turn) = self.turns.get_mut(&lease) {
                turn.rated = worth;
            }
        }
    }

    fn worth(&self, turn: &Turn) -> u32 {
        let session = &self.sessions[&turn.session];
        if session.is_over || turn.is_over {
            return 0;
        }
        let mut worth = self.hazard.worth(turn.kind, turn.age_bin);
        if let Some(returns_at_s) = session.returns_at_s.filter(|_| !turn.is_left) {
            let until_s = returns_at_s - self.now_s;
            if until_s >= turn.ended_s - returns_at_s {
                worth = worth.max(worth_of(1.0 / until_s.max(1.0)));
            }
        }
        let moved = (session.priority - DEFAULT_PRIORITY) * STEPS_PER_OCTAVE;
        (worth + moved.div_euclid(PRIORITY_OCTAVES)).clamp(1, i64::from(MOST_WORTH)) as u32
    }
}
