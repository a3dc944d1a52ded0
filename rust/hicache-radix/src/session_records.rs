//! What `SessionOrder` keeps of each turn and each session.

use crate::interface::{Regard, DEFAULT_PRIORITY};
use crate::return_hazard::Class;

/// Small: two share a cache line.
#[derive(Debug)]
pub struct Turn {
    pub lease: u64,
    /// Where it stands in the line of all.
    pub place: u64,
    /// Its place.
    pub session: u32,
    pub rated: u16,
    /// As it was rated.
    pub regard: Regard,
    pub kind: u16,
    /// In this age bin it is not among those of its class that reached the bin.
    pub uncounted_bin: u8,
    /// What it is worth hangs on its class and age alone; so it stands in the line of all.
    pub is_plain: bool,
    pub is_left: bool,
    pub is_waiting: bool,
    /// The tree has nothing of it any more.
    pub is_gone: bool,
    /// The client has abandoned it.
    pub is_over: bool,
    /// Shadows may have something of it.
    pub is_watched: bool,
}

const _: () = assert!(size_of::<Turn>() == 32);

impl Turn {
    pub fn session(&self) -> usize {
        self.session as usize
    }

    pub fn kind(&self) -> Class {
        usize::from(self.kind)
    }
}

#[derive(Debug)]
pub struct Session {
    pub name: i64,
    /// The places of its turns, oldest first; what is open or at work comes last.
    pub turns: Vec<usize>,
    pub at_work: u64,
    pub num_turns: u64,
    pub num_met: u64,
    pub ended_s: f64,
    pub gap_s: Option<f64>,
    pub priority: i64,
    pub is_over: bool,
    pub is_one_shot: bool,
    pub returns_at_s: Option<f64>,
}

impl Session {
    pub fn new(name: i64) -> Self {
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

    /// Nothing was said of it that moves the worth of its turns.
    pub fn is_plain(&self) -> bool {
        !self.is_over && self.returns_at_s.is_none() && self.priority == DEFAULT_PRIORITY
    }
}

/// Things that stay at their places while they live.
#[derive(Debug)]
pub struct Places<T> {
    pub items: Vec<T>,
    pub unused: Vec<usize>,
}

impl<T> Places<T> {
    pub fn put(&mut self, item: T) -> usize {
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
