//! Slot numbers as runs of consecutive ones: cheap to cut, join and hand on.

/// Slots `first, first + 1, .. first + len - 1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// The first slot.
    pub first: u32,
    /// How many; never 0.
    pub len: u32,
}

/// An ordered list of slots. Empty stands for "nothing there".
///
/// Most are a single run; those with more pay for a vector.
#[derive(Debug, Clone, Default)]
pub struct Slots(Repr);

#[derive(Debug, Clone, Default)]
enum Repr {
    #[default]
    None,
    One(Run),
    Many(Box<Vec<Run>>),
}

impl Slots {
    /// Nothing there.
    pub const NONE: Slots = Slots(Repr::None);

    /// A single slot.
    pub fn one(slot: u32) -> Self {
        Self(Repr::One(Run { first: slot, len: 1 }))
    }

    /// How many slots.
    pub fn len(&self) -> usize {
        self.runs().iter().map(|run| run.len as usize).sum()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        matches!(self.0, Repr::None)
    }

    /// The runs in order.
    pub fn runs(&self) -> &[Run] {
        match &self.0 {
            Repr::None => &[],
            Repr::One(run) => std::slice::from_ref(run),
            Repr::Many(runs) => runs,
        }
    }

    /// The first slot, if any.
    pub fn first(&self) -> Option<u32> {
        self.runs().first().map(|run| run.first)
    }

    /// The slots one by one.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.runs().iter().flat_map(|run| run.first..run.first + run.len)
    }

    /// Write the slots to the end of `out`.
    pub fn expand(&self, out: &mut Vec<i64>) {
        for run in self.runs() {
            let first = i64::from(run.first);
            out.extend(first..first + i64::from(run.len));
        }
    }

    /// Add a run at the end.
    pub fn push(&mut self, run: Run) {
        match &mut self.0 {
            Repr::None => self.0 = Repr::One(run),
            Repr::One(last) if last.first + last.len == run.first => last.len += run.len,
            Repr::One(last) => self.0 = Repr::Many(Box::new(vec![*last, run])),
            Repr::Many(runs) => match runs.last_mut() {
                Some(last) if last.first + last.len == run.first => last.len += run.len,
                _ => runs.push(run),
            },
        }
    }

    /// Add the slots of another list at the end.
    pub fn append(&mut self, other: &Slots) {
        for run in other.runs() {
            self.push(*run);
        }
    }

    /// Two lists as one, at the cost of the one with fewer runs.
    pub fn join(mut head: Slots, tail: Slots) -> Slots {
        match tail.0 {
            Repr::Many(mut runs) if head.runs().len() < runs.len() => {
                let first = runs.remove(0);
                head.push(first);
                runs.splice(0..0, head.runs().iter().copied());
                Slots(Repr::Many(runs))
            }
            _ => {
                head.append(&tail);
                head
            }
        }
    }

    /// Keep the first `count` slots and return the rest.
    pub fn split_off(&mut self, count: usize) -> Slots {
        let mut left = count;
        for (at, run) in self.runs().iter().copied().enumerate() {
            let len = run.len as usize;
            if left >= len {
                left -= len;
                continue;
            }
            let cut = left as u32; // less than run.len
            let rest = Run { first: run.first + cut, len: run.len - cut };
            let head = (cut > 0).then_some(Run { first: run.first, len: cut });
            let whole = match std::mem::take(&mut self.0) {
                Repr::Many(runs) => *runs,
                _ => vec![run],
            };
            return self.set_halves(whole, at, head, rest);
        }
        Slots::default()
    }

    /// `whole[..at]` and `head` stay here; `rest` and `whole[at + 1..]` are returned.
    fn set_halves(&mut self, mut whole: Vec<Run>, at: usize, head: Option<Run>, rest: Run) -> Slots {
        if at <= whole.len() / 2 {
            let kept: Vec<Run> = whole[..at].iter().copied().chain(head).collect();
            whole[at] = rest;
            whole.drain(..at);
            *self = Slots::from_runs(kept);
            return Slots::from_runs(whole);
        }
        let tail: Vec<Run> = std::iter::once(rest).chain(whole[at + 1..].iter().copied()).collect();
        whole.truncate(at);
        whole.extend(head);
        *self = Slots::from_runs(whole);
        Slots::from_runs(tail)
    }

    /// *Caller guarantees*: no two runs could be one.
    fn from_runs(mut runs: Vec<Run>) -> Slots {
        match runs.as_slice() {
            [] => Slots(Repr::None),
            [run] => Slots(Repr::One(*run)),
            _ => {
                if runs.capacity() > 2 * runs.len() + 8 {
                    runs.shrink_to_fit();
                }
                Slots(Repr::Many(Box::new(runs)))
            }
        }
    }

    /// Take the first `count` slots out.
    pub fn take_front(&mut self, count: usize) -> Slots {
        let rest = self.split_off(count);
        std::mem::replace(self, rest)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn slots(numbers: &[u32]) -> Slots {
        numbers.iter().map(|number| Run { first: *number, len: 1 }).collect()
    }

    fn numbers(slots: &Slots) -> Vec<u32> {
        slots.iter().collect()
    }

    #[test]
    fn cutting_and_joining_keep_the_order_wherever_the_cut_is() {
        let all = [3, 4, 5, 9, 1, 2, 7, 8, 20, 30, 31];
        for cut in 0..=all.len() {
            let mut head = slots(&all);
            let tail = head.split_off(cut);
            assert_eq!(numbers(&head), all[..cut]);
            assert_eq!(numbers(&tail), all[cut..]);
            assert_eq!(head.is_empty(), cut == 0);
            let joined = Slots::join(head, tail);
            assert_eq!(numbers(&joined), all);
            assert_eq!(joined.runs().len(), slots(&all).runs().len());
        }
    }
}
