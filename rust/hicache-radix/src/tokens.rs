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

use std::borrow::Cow;

use crate::arena::Arena;

/// No run (a root's).
pub const NO_RUN: u32 = u32::MAX;

#[derive(Debug, Default)]
struct Run {
    /// `data[head..]` are the tokens; what lies before is room to grow to the front.
    data: Vec<i32>,
    head: u32,
    base: u32,
}

impl Run {
    fn len(&self) -> usize {
        self.data.len() - self.head as usize
    }

    fn end(&self) -> usize {
        self.base as usize + self.len()
    }

    fn index(&self, position: usize) -> usize {
        self.head as usize + position - self.base as usize
    }

    fn append(&mut self, tokens: &[i32]) {
        if self.data.capacity() - self.data.len() < tokens.len() {
            let spare = self.len() / 16;
            self.data.reserve_exact(tokens.len() + spare);
        }
        self.data.extend_from_slice(tokens);
    }

    fn prepend(&mut self, tokens: &[i32]) {
        let len = tokens.len();
        if (self.head as usize) < len {
            let room = self.len() / 4 + len;
            let mut data = Vec::with_capacity(room + self.len());
            data.resize(room, 0);
            data.extend_from_slice(&self.data[self.head as usize..]);
            self.head = room as u32;
            self.data = data;
        }
        self.head -= len as u32;
        self.base -= len as u32;
        let head = self.head as usize;
        self.data[head..head + len].copy_from_slice(tokens);
    }

    /// Drop what lies before position `start`.
    fn drop_front(&mut self, start: usize) {
        self.head = self.index(start) as u32;
        self.base = start as u32;
        if self.head as usize > self.len() {
            self.data.drain(..self.head as usize);
            self.data.shrink_to_fit();
            self.head = 0;
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
            Some(run) => &run.data[run.index(place.start)..run.index(place.end)],
            None => &[],
        }
    }

    /// Store `tokens` from position `start` on, behind `run` if that ends just there.
    pub fn extend(&mut self, run: u32, start: usize, tokens: &[i32]) -> u32 {
        match self.runs.get_mut(run as usize) {
            Some(place) if place.end() == start => {
                place.append(tokens);
                run
            }
            _ => self.add(start, tokens),
        }
    }

    fn add(&mut self, start: usize, tokens: &[i32]) -> u32 {
        let run = Run { data: tokens.to_vec(), head: 0, base: start as u32 };
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
            let (begin, end) = (source.index(lower.start), source.index(lower.end));
            self.runs[upper.run as usize].append(&source.data[begin..end]);
            source.drop_front(lower.end);
            self.put_back(lower.run, source);
            upper.run
        } else {
            let source = std::mem::take(&mut self.runs[upper.run as usize]);
            let (begin, end) = (source.index(upper.start), source.index(upper.end));
            self.runs[lower.run as usize].prepend(&source.data[begin..end]);
            self.runs[upper.run as usize] = source;
            self.cut(upper.run, upper.start);
            lower.run
        }
    }

    fn put_back(&mut self, number: u32, run: Run) {
        if run.len() == 0 {
            self.unused.push(number);
        } else {
            self.runs[number as usize] = run;
        }
    }

    /// Drop what lies at `end` and after.
    pub fn cut(&mut self, number: u32, end: usize) {
        let mut run = std::mem::take(&mut self.runs[number as usize]);
        let keep = run.index(end);
        run.data.truncate(keep);
        if run.data.capacity() > 2 * run.data.len() + 64 {
            run.data.shrink_to(run.data.len() + run.data.len() / 4);
        }
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
                let upper = store.extend(NO_RUN, 0, &tokens[..upper_len]);
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
