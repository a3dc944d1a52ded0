//! The free list of one component in one tier.

use crate::slots::{Run, Slots};

/// Hands out slot numbers `0 .. capacity`; the most recently freed go out first.
///
/// The list is a stack of runs. The run on top is handed out from its front, so the order is exactly
/// that of a stack of single slots onto which runs are pushed back to front.
#[derive(Debug, Clone)]
pub struct SlotPool {
    total: usize,
    capacity: usize,
    /// What the capacity becomes as slots come free.
    pub limit: usize,
    num_free: usize,
    stack: Vec<Run>,
    withheld: Vec<Slots>,
}

impl SlotPool {
    /// A pool with all slots free. *Caller guarantees*: `capacity` fits 32 bits.
    pub fn new(capacity: usize) -> Self {
        let len = capacity as u32;
        let stack = if capacity == 0 { Vec::new() } else { vec![Run { first: 0, len }] };
        Self { total: capacity, capacity, limit: capacity, num_free: capacity, stack, withheld: Vec::new() }
    }

    /// Slots that there are, in use or not.
    pub fn total(&self) -> usize {
        self.total
    }

    /// Slots in use.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    pub fn num_free(&self) -> usize {
        self.num_free
    }

    /// Take `count` slots. *Caller guarantees*: so many are free.
    pub fn allocate(&mut self, count: usize) -> Slots {
        debug_assert!(count <= self.num_free);
        let mut taken = Slots::default();
        let mut lacking = count.min(self.num_free);
        self.num_free -= lacking;
        while lacking > 0 {
            let Some(top) = self.stack.last_mut() else { break };
            let len = top.len as usize;
            if len > lacking {
                let part = lacking as u32; // less than top.len
                taken.push(Run { first: top.first, len: part });
                top.first += part;
                top.len -= part;
                break;
            }
            lacking -= len;
            taken.push(*top);
            self.stack.pop();
        }
        taken
    }

    /// Give slots back. *Caller guarantees*: they were handed out and nobody holds them.
    pub fn free(&mut self, slots: &Slots) {
        for run in slots.runs().iter().rev() {
            self.num_free += run.len as usize;
            match self.stack.last_mut() {
                Some(top) if run.first + run.len == top.first => {
                    top.first = run.first;
                    top.len += run.len;
                }
                _ => self.stack.push(*run),
            }
        }
    }

    /// Withhold free slots beyond the limit, or give withheld ones back. True once it is reached.
    pub fn approach_limit(&mut self) -> bool {
        while self.capacity < self.limit {
            let Some(mut chunk) = self.withheld.pop() else { break };
            let num_back = chunk.len().min(self.limit - self.capacity);
            let back = if num_back < chunk.len() {
                let back = chunk.take_front(num_back);
                self.withheld.push(chunk);
                back
            } else {
                chunk
            };
            self.capacity += num_back;
            self.free(&back);
        }
        let num_out = self.capacity.saturating_sub(self.limit).min(self.num_free);
        if num_out > 0 {
            let out = self.allocate(num_out);
            self.withheld.push(out);
            self.capacity -= num_out;
        }
        self.capacity == self.limit
    }

    /// Slots that are not in use because of the limit.
    pub fn withheld_runs(&self) -> Vec<Run> {
        self.withheld.iter().flat_map(|slots| slots.runs().iter().copied()).collect()
    }

    /// The free list, for audits.
    pub fn free_runs(&self) -> &[Run] {
        &self.stack
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_recently_freed_go_out_first_in_the_order_they_had() {
        let mut pool = SlotPool::new(8);
        let first = pool.allocate(3);
        let second = pool.allocate(2);
        pool.free(&second);
        pool.free(&first);
        let all: Vec<u32> = pool.allocate(8).iter().collect();
        assert_eq!(all, [0, 1, 2, 3, 4, 5, 6, 7]);
        let mut odd = Slots::one(5);
        odd.append(&Slots::one(1));
        pool.free(&odd);
        assert_eq!(pool.allocate(2).iter().collect::<Vec<_>>(), [5, 1]);
        assert_eq!(pool.num_free(), 0);
    }
}
