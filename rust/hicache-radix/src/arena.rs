//! A list that grows without moving, and without the slack that doubling leaves.

use std::ops::{Index, IndexMut};

const CHUNK_BITS: usize = 10;
const CHUNK: usize = 1 << CHUNK_BITS;

/// Items by number, in chunks of fixed size.
#[derive(Debug)]
pub struct Arena<T> {
    chunks: Vec<Vec<T>>,
}

impl<T> Default for Arena<T> {
    fn default() -> Self {
        Self { chunks: Vec::new() }
    }
}

impl<T> Arena<T> {
    pub fn len(&self) -> usize {
        match self.chunks.split_last() {
            Some((last, full)) => full.len() * CHUNK + last.len(),
            None => 0,
        }
    }

    pub fn get(&self, at: usize) -> Option<&T> {
        self.chunks.get(at >> CHUNK_BITS)?.get(at & (CHUNK - 1))
    }

    pub fn get_mut(&mut self, at: usize) -> Option<&mut T> {
        self.chunks.get_mut(at >> CHUNK_BITS)?.get_mut(at & (CHUNK - 1))
    }

    pub fn push(&mut self, item: T) {
        match self.chunks.last_mut() {
            Some(last) if last.len() < CHUNK => last.push(item),
            // The first chunk grows as a list does, so that a small tree stays small.
            None => self.chunks.push(vec![item]),
            Some(_) => {
                let mut chunk = Vec::with_capacity(CHUNK);
                chunk.push(item);
                self.chunks.push(chunk);
            }
        }
    }

    /// Take the last item out.
    ///
    /// A chunk that this empties goes with the next one, so that a length that goes up and down by one
    /// asks for no memory.
    pub fn pop(&mut self) -> Option<T> {
        if self.chunks.last()?.is_empty() {
            self.chunks.pop();
        }
        self.chunks.last_mut()?.pop()
    }
}

impl<T> Index<usize> for Arena<T> {
    type Output = T;

    fn index(&self, at: usize) -> &T {
        &self.chunks[at >> CHUNK_BITS][at & (CHUNK - 1)]
    }
}

impl<T> IndexMut<usize> for Arena<T> {
    fn index_mut(&mut self, at: usize) -> &mut T {
        &mut self.chunks[at >> CHUNK_BITS][at & (CHUNK - 1)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_stay_where_they_were_put() {
        let mut arena = Arena::default();
        for number in 0..3 * CHUNK + 7 {
            assert_eq!(arena.len(), number);
            arena.push(number);
        }
        assert!((0..arena.len()).all(|at| arena[at] == at));
        assert_eq!(arena.get(arena.len()), None);
        for number in (0..3 * CHUNK + 7).rev() {
            assert_eq!(arena.pop(), Some(number));
            assert_eq!(arena.len(), number);
        }
        assert_eq!(arena.pop(), None);
        arena.push(1);
        assert_eq!((arena.len(), arena[0]), (1, 1));
    }
}
