//! Slot numbers as runs of consecutive ones: cheap to cut, join and hand on.

use smallvec::SmallVec;

/// Slots `first, first + 1, .. first + len - 1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// The first slot.
    pub first: u32,
    /// How many; never 0.
    pub len: u32,
}

/// An ordered list of slots. Empty stands for "nothing there".
#[derive(Debug, Clone, Default)]
pub struct Slots {
    runs: SmallVec<[Run; 2]>,
}

impl Slots {
    /// A single slot.
    pub fn one(slot: u32) -> Self {
        let mut slots = Self::default();
        slots.push(Run { first: slot, len: 1 });
        slots
    }

    /// How many slots.
    pub fn len(&self) -> usize {
        self.runs.iter().map(|run| run.len as usize).sum()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// The runs in order.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// The first slot, if any.
    pub fn first(&self) -> Option<u32> {
        self.runs.first().map(|run| run.first)
    }

    /// The slots one by one.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.runs.iter().flat_map(|run| run.first..run.first + run.len)
    }

    /// Write the slots to the end of `out`.
    pub fn expand(&self, out: &mut Vec<i64>) {
        for run in &self.runs {
            let first = i64::from(run.first);
            out.extend(first..first + i64::from(run.len));
        }
    }

    /// Add a run at the end.
    pub fn push(&mut self, run: Run) {
        match self.runs.last_mut() {
            Some(last) if last.first + last.len == run.first => last.len += run.len,
            _ => self.runs.push(run),
        }
    }

    /// Add the slots of another list at the end.
    pub fn append(&mut self, other: &Slots) {
        for run in &other.runs {
            self.push(*run);
        }
    }

    /// Two lists as one, at the cost of the one with fewer runs.
    pub fn join(mut head: Slots, mut tail: Slots) -> Slots {
        if head.runs.len() >= tail.runs.len() {
            head.append(&tail);
            return head;
        }
        if let (Some(last), Some(first)) = (head.runs.last().copied(), tail.runs.first_mut()) {
            if last.first + last.len == first.first {
                *first = Run { first: last.first, len: last.len + first.len };
                head.runs.pop();
            }
        }
        tail.runs.insert_many(0, head.runs);
        tail
    }

    /// Keep the first `count` slots and return the rest.
    pub fn split_off(&mut self, count: usize) -> Slots {
        let mut tail = Slots::default();
        let mut left = count;
        for at in 0..self.runs.len() {
            let run = self.runs[at];
            let len = run.len as usize;
            if left >= len {
                left -= len;
                continue;
            }
            tail.runs.reserve(self.runs.len() - at);
            let cut = left as u32; // less than run.len
            tail.runs.push(Run { first: run.first + cut, len: run.len - cut });
            tail.runs.extend_from_slice(&self.runs[at + 1..]);
            self.runs.truncate(at);
            if cut > 0 {
                self.runs.push(Run { first: run.first, len: cut });
            }
            break;
        }
        self.shrink();
        tail
    }

    /// Take the first `count` slots out.
    pub fn take_front(&mut self, count: usize) -> Slots {
        let rest = self.split_off(count);
        std::mem::replace(self, rest)
    }

    fn shrink(&mut self) {
        if self.runs.spilled() && self.runs.capacity() > 2 * self.runs.len() + 8 {
            self.runs.shrink_to_fit();
        }
    }
}

impl FromIterator<Run> for Slots {
    fn from_iter<T: IntoIterator<Item = Run>>(runs: T) -> Self {
        let mut slots = Slots::default();
        for run in runs {
            slots.push(run);
        }
        slots
    }
}
