//! The tokens of all nodes, in runs that several nodes of one chain share.
//!
//! A run holds the tokens of positions `[base, end)` of one path. The nodes on it are a chain, each
//! the child of the one before, that covers the run without a gap:
//!
//! ```text
//! run      [ a b c d e f g h ]        positions as counted from the root
//! nodes     [ n1 )[ n2    )[ n3 ]     a cut moves a boundary, a merge removes one: O(1)
//! ```
//!
//! A node dies only when it has no child, so a run is only ever cut at its end; and where a node
//! merges with a parent on another run, the shorter of the two is copied.
//!
//! Behind many nodes that do not merge a run does not grow on: the next one begins another. So what a
//! turn adds to a long chat moves little, and what has ceased to grow has no room to spare.

use std::borrow::Cow;

use crate::arena::Arena;

/// No run (a root's).
pub const NO_RUN: u32 = u32::MAX;

/// Where so many tokens are those of other nodes than the last, the next node begins a run.
const LONG_RUN: usize = 8192;
/// A run that grows gets this share of its length as room.
const SPARE_SHARE: usize = 32;

/// Positions from `base` on. Most runs are those of one node, and never grow.
#[derive(Debug, Default)]
struct Run {
    tokens: Kept,
    base: u32,
}

#[derive(Debug)]
enum Kept {
    Exactly(Box<[i32]>),
    WithRoom(Box<Room>),
}

/// `data[head..]` are the tokens; what lies before is room to grow to the front.
#[derive(Debug)]
struct Room {
    data: Vec<i32>,
    head: usize,
}

impl Default for Kept {
    fn default() -> Self {
        Self::Exactly(Box::default())
    }
}

impl Run {
    fn tokens(&self) -> &[i32] {
        match &self.tokens {
            Kept::Exactly(tokens) => tokens,
            Kept::WithRoom(room) => &room.data[room.head..],
        }
    }

    fn slice(&self, start: usize, end: usize) -> &[i32] {
        let base = self.base as usize;
        &self.tokens()[start - base..end - base]
    }

    fn end(&self) -> usize {
        self.base as usize + self.tokens().len()
    }

    fn room(&mut self) -> &mut Room {
        if let Kept::Exactly(tokens) = &mut self.tokens {
            let data = std::mem::take(tokens).into_vec();
            self.tokens = Kept::WithRoom(Box::new(Room { data, head: 0 }));
        }
        match &mut self.tokens {
            Kept::WithRoom(room) => room,
            Kept::Exactly(_) => unreachable!("it has room now"),
        }
    }

    /// Give up all room.
    fn fit(&mut self) {
        if let Kept::WithRoom(room) = &mut self.tokens {
            let mut data = std::mem::take(&mut room.data);
            data.drain(..room.head);
            self.tokens = Kept::Exactly(data.into_boxed_slice());
        }
    }

    fn append(&mut self, tokens: &[i32]) {
        let Room { data, head } = self.room();
        if data.capacity() - data.len() < tokens.len() {
            let spare = (data.len() - *head) / SPARE_SHARE;
            data.reserve_exact(tokens.len() + spare);
        }
        data.extend_from_slice(tokens);
    }

    fn prepend(&mut self, tokens: &[i32]) {
        let len = tokens.len();
        let Room { data, head } = self.room();
        if *head < len {
            let kept = data.len() - *head;
            let front = kept / 4 + len;
            let mut moved = Vec::with_capacity(front + kept);
            moved.resize(front, 0);
            moved.extend_from_slice(&data[*head..]);
            (*data, *head) = (moved, front);
        }
        *head -= len;
        data[*head..*head + len].copy_from_slice(tokens);
        self.base -= len as u32;
    }

    /// Drop what lies before position `start`.
    fn drop_front(&mut self, start: usize) {
        let dropped = start - self.base as usize;
        let room = self.room();
        room.head += dropped;
        let is_mostly_room = room.head > room.data.len() - room.head;
        self.base = start as u32;
        if is_mostly_room {
            self.fit();
        }
    }

    /// Drop what lies at position `end` and after.
    fn drop_back(&mut self, end: usize) {
        let kept = end - self.base as usize;
        if kept == 0 {
            self.tokens = Kept::default();
            return;
        }
        let Room { data, head } = self.room();
        data.truncate(*head + kept);
        if data.capacity() > 2 * data.len() + 64 {
            data.shrink_to(data.len() + data.len() / 4);
        }
    }
}

/// All runs, by number.
#[derive(Debug, Default)]
pub struct TokenStore {
    runs: Arena<Run>,
    unused: Vec<u32>,
}

/// Positions `[start, end)` of a run.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    pub run: u32,
    pub start: usize,
    pub end: usize,
}

impl TokenStore {
    /// The tokens of a place.
    pub fn slice(&self, place: Place) -> &[i32] {
        match self.runs.get(place.run as usize) {
            Some(run) => run.slice(place.start, place.end),
            None => &[],
        }
    }

    /// Store `tokens` behind those of the node at `above`; returns on which run.
    pub fn extend(&mut self, above: Place, tokens: &[i32]) -> u32 {
        match self.runs.get_mut(above.run as usize) {
            Some(run) if run.end() != above.end => {}
            Some(run) if above.start - run.base as usize >= LONG_RUN => run.fit(),
            Some(run) => {
                run.append(tokens);
                return above.run;
            }
            None => {}
        }
        self.add(above.end, tokens)
    }

    fn add(&mut self, start: usize, tokens: &[i32]) -> u32 {
        let run = Run { tokens: Kept::Exactly(tokens.into()), base: start as u32 };
        match self.unused.pop() {
            Some(number) => {
                self.runs[number as usize] = run;
                number
            }
            None => {
                self.runs.push(run);
                (self.runs.len() - 1) as u32
            }
        }
    }

    /// Bring two neighbouring places onto one run, and name it.
    pub fn join(&mut self, upper: Place, lower: Place) -> u32 {
        if upper.run == lower.run {
            return upper.run;
        }
        if lower.end - lower.start <= upper.end - upper.start {
            let mut source = std::mem::take(&mut self.runs[lower.run as usize]);
            self.runs[upper.run as usize].append(source.slice(lower.start, lower.end));
            source.drop_front(lower.end);
            self.put_back(lower.run, source);
            upper.run
        } else {
            let mut source = std::mem::take(&mut self.runs[upper.run as usize]);
            self.runs[lower.run as usize].prepend(source.slice(upper.start, upper.end));
            source.drop_back(upper.start);
            self.put_back(upper.run, source);
            lower.run
        }
    }

    fn put_back(&mut self, number: u32, run: Run) {
        if run.tokens().is_empty() {
            self.unused.push(number);
        } else {
            self.runs[number as usize] = run;
        }
    }

    /// Drop what lies at `end` and after.
    pub fn cut(&mut self, number: u32, end: usize) {
        let mut run = std::mem::take(&mut self.runs[number as usize]);
        run.drop_back(end);
        self.put_back(number, run);
    }
}

/// A token id as it lies in a caller's buffer, read where it lies.
pub trait Token: Copy + Into<i64> {
    /// Whether two pieces of equal length are the same tokens.
    fn are_equal(known: &[i32], given: &[Self]) -> bool;

    /// As the tree keeps them. *Caller guarantees*: `check_tokens` passed.
    fn narrow(given: &[Self]) -> Cow<'_, [i32]>;
}

impl Token for i32 {
    fn are_equal(known: &[i32], given: &[Self]) -> bool {
        known == given
    }

    fn narrow(given: &[Self]) -> Cow<'_, [i32]> {
        Cow::Borrowed(given)
    }
}

impl Token for i64 {
    fn are_equal(known: &[i32], given: &[Self]) -> bool {
        // Without a way out of the loop, and widened as what is never negative, this compiles to vectors.
        let differing = |bits, (known, given): (&i32, &i64)| bits | (i64::from(*known as u32) ^ *given);
        known.iter().zip(given).fold(0, differing) == 0
    }

    fn narrow(given: &[Self]) -> Cow<'_, [i32]> {
        given.iter().map(|token| *token as i32).collect()
    }
}

/// How many leading tokens are equal.
pub fn equal_prefix<T: Token>(known: &[i32], given: &[T]) -> usize {
    const CHUNK: usize = 1024;
    let len = known.len().min(given.len());
    let mut begin = 0;
    while begin < len {
        let end = (begin + CHUNK).min(len);
        let (left, right) = (&known[begin..end], &given[begin..end]);
        if !T::are_equal(left, right) {
            let same = |(known, given): (&i32, &T)| i64::from(*known) == (*given).into();
            return begin + left.iter().zip(right).take_while(|pair| same(*pair)).count();
        }
        begin = end;
    }
    len
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joining_keeps_the_tokens_whichever_side_is_copied() {
        for upper_len in [1usize, 5, 40] {
            for lower_len in [1usize, 5, 40] {
                let tokens: Vec<i32> = (0..(upper_len + lower_len + 3) as i32).collect();
                let mut store = TokenStore::default();
                let upper = store.add(0, &tokens[..upper_len]);
                let lower = store.add(upper_len, &tokens[upper_len..]);
                let middle = upper_len + lower_len;
                let run = store.join(
                    Place { run: upper, start: 0, end: upper_len },
                    Place { run: lower, start: upper_len, end: middle },
                );
                assert_eq!(store.slice(Place { run, start: 0, end: middle }), &tokens[..middle]);
                let rest = Place { run: lower, start: middle, end: middle + 3 };
                assert_eq!(store.slice(rest), &tokens[middle..]);
            }
        }
    }

    #[test]
    fn behind_many_nodes_the_next_one_begins_a_run_and_the_last_has_no_room() {
        let tokens: Vec<i32> = (0..4 * LONG_RUN as i32).collect();
        let mut store = TokenStore::default();
        let mut above = Place { run: NO_RUN, start: 0, end: 0 };
        let mut runs = Vec::new();
        for piece in tokens.chunks(500) {
            let run = store.extend(above, piece);
            above = Place { run, start: above.end, end: above.end + piece.len() };
            assert_eq!(store.slice(above), piece);
            runs.push(run);
        }
        runs.dedup();
        assert_eq!(runs.len(), 4);
        for run in &runs[..3] {
            assert!(matches!(store.runs[*run as usize].tokens, Kept::Exactly(_)));
        }
        // One node's own tokens are never apart.
        let alone = store.extend(Place { run: NO_RUN, start: 0, end: 0 }, &tokens);
        let whole = Place { run: alone, start: 0, end: tokens.len() };
        assert_eq!(store.extend(whole, &tokens[..500]), alone);
    }

    #[test]
    fn a_run_is_as_small_as_a_list_and_a_base() {
        assert_eq!(size_of::<Run>(), 24);
    }

    #[test]
    fn a_difference_is_found_wherever_it_is() {
        let left: Vec<i32> = (0..5000).collect();
        for at in [0usize, 1, 1023, 1024, 4999] {
            let mut right = left.clone();
            right[at] = -1;
            assert_eq!(equal_prefix(&left, &right), at);
            let mut wide: Vec<i64> = left.iter().map(|token| i64::from(*token)).collect();
            assert_eq!(equal_prefix(&left, &wide), 5000);
            wide[at] += 1 << 32;
            assert_eq!(equal_prefix(&left, &wide), at);
        }
        assert_eq!(equal_prefix(&left, &left), 5000);
    }
}
