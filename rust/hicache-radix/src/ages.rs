//! The turns that are remembered, as they grow older.
//!
//! All turns spend the same time in each age bin, so they enter every bin in the order in which they ended. One line
//! holds them in that order, and for each bin a cursor stands at the first turn that has not left it:
//!
//! ```text
//! oldest  . . t t . t t t . t t t t  youngest      (.: forgotten)
//!           ^bin 2    ^bin 1    ^bin 0
//! ```

use crate::return_hazard::NUM_BINS;

/// No turn.
const NOBODY: u32 = u32::MAX;
/// A line may have so many forgotten ones beside as many as are alive.
const SLACK: usize = 64;

/// Of a turn's worth in the line: its record has to be asked.
const ASK: u16 = 0;
/// Nobody wants to know its worth.
const HUSHED: u16 = u16::MAX;

/// All that most turns are asked as they grow older, so that their records, which are cold by then, need no look.
#[derive(Debug, Clone, Copy)]
struct Aged {
    ended_s: f64,
    turn: u32,
    /// The class that it counts for.
    class: u16,
    /// What it was last said to be worth, where its class and bin alone decide that.
    worth: u16,
}

const _: () = assert!(size_of::<Aged>() == 16);

/// An age bin.
#[derive(Debug, Clone, Copy)]
struct Bin {
    /// Where it ends.
    end_s: f64,
    /// When the first to leave it is too old for it; no later.
    due_s: f64,
    /// Where in the line the first stands that has not left it.
    cursor: usize,
}

/// Who is how old.
#[derive(Debug)]
pub struct Ages {
    bins: [Bin; NUM_BINS],
    line: Vec<Aged>,
    /// How many were cut off at the line's beginning.
    first: u64,
    /// How many are still there that are forgotten, before the oldest.
    num_gone: usize,
    num_alive: usize,
    /// When the first bin is due.
    soonest_s: f64,
}

impl Ages {
    pub fn new(ends_s: [f64; NUM_BINS]) -> Self {
        Self {
            bins: ends_s.map(|end_s| Bin { end_s, due_s: f64::INFINITY, cursor: 0 }),
            line: Vec::new(),
            first: 0,
            num_gone: 0,
            num_alive: 0,
            soonest_s: f64::INFINITY,
        }
    }

    /// A turn ended, no earlier than those before it; returns its place in the line.
    pub fn push(&mut self, turn: u32, ended_s: f64) -> u64 {
        let place = self.first + self.line.len() as u64;
        self.line.push(Aged { ended_s, turn, class: 0, worth: ASK });
        self.num_alive += 1;
        self.bins[0].hear_of(ended_s);
        self.soonest_s = earlier(self.soonest_s, self.bins[0].due_s);
        place
    }

    /// From now on the turn at a place only counts for a class, bin after bin.
    pub fn hush(&mut self, place: u64, class: u16) {
        self.note(place, class, Some(HUSHED));
    }

    /// What the turn at a place counts for, and is worth by its class and bin alone; none if more decides that.
    pub fn note(&mut self, place: u64, class: u16, worth: Option<u16>) {
        let aged = &mut self.line[(place - self.first) as usize];
        (aged.class, aged.worth) = (class, worth.unwrap_or(ASK));
    }

    /// Whether some turn may be too old for its bin.
    pub fn are_due(&self, now_s: f64) -> bool {
        self.soonest_s <= now_s
    }

    /// All bins will be asked who is too old for them, the youngest first.
    pub fn begin(&mut self) {
        self.soonest_s = f64::INFINITY;
    }

    /// Take out of the bin who is too old for it by now. `is_all` counts a turn of a class, with its worth if somebody
    /// wants to know it, and says whether there is no more to it.
    pub fn leave(
        &mut self,
        age_bin: usize,
        now_s: f64,
        left: &mut Vec<u32>,
        mut is_all: impl FnMut(u16, Option<u16>) -> bool,
    ) {
        let Bin { mut due_s, end_s, mut cursor } = self.bins[age_bin];
        if due_s <= now_s {
            let end = if age_bin == 0 { self.line.len() } else { self.bins[age_bin - 1].cursor };
            let mut came_s = f64::INFINITY;
            due_s = f64::INFINITY;
            for aged in &self.line[cursor..end] {
                // Who is forgotten may leave at any time, and need not be waited for.
                if aged.turn != NOBODY {
                    if aged.ended_s + end_s > now_s {
                        due_s = aged.ended_s + end_s;
                        break;
                    }
                    came_s = earlier(came_s, aged.ended_s);
                    let worth = if aged.worth == HUSHED { None } else { Some(aged.worth) };
                    if aged.worth == ASK || !is_all(aged.class, worth) {
                        left.push(aged.turn);
                    }
                }
                cursor += 1;
            }
            self.bins[age_bin] = Bin { due_s, end_s, cursor };
            if let Some(next) = self.bins.get_mut(age_bin + 1) {
                next.hear_of(came_s);
            }
        }
        self.soonest_s = earlier(self.soonest_s, due_s);
    }

    /// Which bin the turn at a place is in.
    pub fn bin_of(&self, place: u64) -> usize {
        let at = (place - self.first) as usize;
        self.bins.iter().take_while(|bin| at < bin.cursor).count()
    }

    /// When the turn at a place ended.
    pub fn ended_s(&self, place: u64) -> f64 {
        self.line[(place - self.first) as usize].ended_s
    }

    /// The oldest turn.
    pub fn oldest(&self) -> Option<u32> {
        self.line.get(self.num_gone).map(|aged| aged.turn)
    }

    /// The turn at a place is remembered no more. Returns whether places have to be told anew (`compact`).
    pub fn forget(&mut self, place: u64) -> bool {
        self.line[(place - self.first) as usize].turn = NOBODY;
        self.num_alive -= 1;
        while self.line.get(self.num_gone).is_some_and(|aged| aged.turn == NOBODY) {
            self.num_gone += 1;
        }
        if 2 * self.num_gone > self.line.len() {
            self.line.drain(..self.num_gone);
            self.first += self.num_gone as u64;
            for bin in &mut self.bins {
                bin.cursor = bin.cursor.saturating_sub(self.num_gone);
            }
            self.num_gone = 0;
        }
        self.line.len() - self.num_gone > 2 * self.num_alive + SLACK
    }

    /// Close the gaps; tells each turn its new place.
    pub fn compact(&mut self, mut tell: impl FnMut(u32, u64)) {
        let mut passed = [0; NUM_BINS];
        for (at, _) in self.line.iter().enumerate().filter(|(_, aged)| aged.turn != NOBODY) {
            for (passed, bin) in passed.iter_mut().zip(&self.bins) {
                *passed += usize::from(at < bin.cursor);
            }
        }
        self.line.retain(|aged| aged.turn != NOBODY);
        self.num_gone = 0;
        for (place, aged) in (self.first..).zip(&self.line) {
            tell(aged.turn, place);
        }
        for (bin, passed) in self.bins.iter_mut().zip(passed) {
            bin.cursor = passed;
        }
    }
}

impl Bin {
    /// Somebody is in it who ended then.
    fn hear_of(&mut self, ended_s: f64) {
        self.due_s = earlier(self.due_s, ended_s + self.end_s);
    }
}

/// The earlier of two times, which are numbers both: `f64::min` takes thrice as long for those that are none.
fn earlier(one_s: f64, other_s: f64) -> f64 {
    if other_s < one_s {
        other_s
    } else {
        one_s
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::return_hazard::ReturnHazard;

    /// What leaves which bin when time passes, by asking each turn.
    #[test]
    fn turns_leave_each_bin_in_time_whoever_is_forgotten_meanwhile() {
        let ends_s = ReturnHazard::default().ends_s;
        let mut ages = Ages::new(ends_s);
        let mut hushed = BTreeSet::new();
        let mut places: Vec<Option<(u64, f64, usize)>> = Vec::new(); // place, end, bin
        let (mut now_s, mut drawn) = (0.0, 1_u64);
        for round in 0..3000_u32 {
            drawn = drawn.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            now_s += [0.0, 0.1, 0.7, 3.0, 40.0][(drawn >> 40) as usize % 5];
            let mut expected = Vec::new();
            for (age_bin, end_s) in ends_s.iter().enumerate() {
                for (turn, of) in places.iter_mut().enumerate() {
                    let Some((_, ended_s, at)) = of else { continue };
                    if *at == age_bin && *ended_s + end_s <= now_s {
                        expected.push((age_bin, turn as u32));
                        *at += 1;
                    }
                }
            }
            let (mut left, mut at_once) = (Vec::new(), Vec::new());
            if ages.are_due(now_s) {
                ages.begin();
                for age_bin in 0..NUM_BINS {
                    let mut counted = Vec::new();
                    at_once.clear();
                    ages.leave(age_bin, now_s, &mut at_once, |class, worth| {
                        let is_all = worth.is_none() && age_bin + 1 < NUM_BINS;
                        if is_all {
                            counted.push(class);
                        }
                        is_all // one that is worth something else by now is taken out
                    });
                    left.extend(at_once.iter().map(|turn| (age_bin, *turn)));
                    left.extend(counted.iter().map(|class| (age_bin, u32::from(*class))));
                    for turn in at_once.iter().filter(|_| age_bin + 1 == NUM_BINS) {
                        let (place, ..) = places[*turn as usize].take().expect("alive");
                        ages.forget(place);
                    }
                }
            }
            left.sort_unstable();
            expected.sort_unstable();
            assert_eq!(left, expected, "round {round}");
            for (place, _, age_bin) in places.iter().flatten() {
                assert_eq!(ages.bin_of(*place), *age_bin, "round {round}");
            }
            let place = ages.push(round, now_s);
            places.push(Some((place, now_s, 0)));
            match drawn >> 58 & 3 {
                0 => {
                    ages.hush(place, round as u16); // its own number, to see who counts
                    hushed.insert(round);
                }
                1 => ages.note(place, round as u16, Some(1)),
                _ => {}
            }
            if drawn >> 60 < 9 {
                let whom = (drawn >> 33) as usize % places.len();
                if let Some((place, ..)) = places[whom].take() {
                    if ages.forget(place) {
                        ages.compact(|turn, at| {
                            if let Some((place, ..)) = &mut places[turn as usize] {
                                *place = at;
                            }
                        });
                    }
                }
            }
        }
        assert_eq!(ages.num_alive, places.iter().flatten().count());
        assert!(hushed.len() > 500);
    }
}
