//! What each of a few orders would hold of the sampled requests: `hicache/policy/shadow_tree.py`, which says why.
//!
//! The same decisions in the same order, so that both give the same numbers.

use hashbrown::HashMap;

use crate::node::UNQUEUED;
use crate::ordering::{Candidates, Entry, Places};
use crate::turns::{AGE_SHIFT, SHARED_BONUS};

/// How many orders there are.
pub const ORDERS: usize = 4;
/// One value for each order.
pub type ByOrder<T> = [T; ORDERS];
/// Of a rank: below them is when a run was used, above what its turn is worth.
const USED_BITS: u32 = 40;
/// A request that nobody rates.
pub const NO_LEASE: u64 = u64::MAX;

type RunIdx = u32;
type TurnIdx = u32;
const ROOT: RunIdx = 0;

/// A request that has ended, while runs are left that no later one used: a chain up from `last`.
#[derive(Debug)]
struct Turn {
    session: i64,
    lease: u64,
    worth: u32,
    num_runs: u32,
    last: RunIdx,
    /// So much later does what is shared count as used.
    graces: ByOrder<i64>,
}

/// What an order has of a run.
#[derive(Debug, Clone, Copy)]
struct Hold {
    /// How many of its blocks.
    held: u32,
    /// Of how many of its children some.
    num_kids: u32,
    /// Where it stands in the queue.
    place: u32,
    is_shared: bool,
}

const NOTHING: Hold = Hold { held: 0, num_kids: 0, place: UNQUEUED, is_shared: false };

#[derive(Debug)]
struct Run {
    number: u64,
    blocks: Vec<i32>,
    /// The root's is itself.
    parent: RunIdx,
    turn: TurnIdx,
    used: i64,
    holds: ByOrder<Hold>,
}

impl Run {
    fn len(&self) -> u32 {
        self.blocks.len() as u32 // no more than the capacity
    }
}

/// What the queue of one order asks of the runs.
struct Queued<'a> {
    runs: &'a mut [Run],
    order: usize,
}

impl Places for Queued<'_> {
    fn id(&self, run: RunIdx) -> u64 {
        self.runs[run as usize].number
    }

    fn set_place(&mut self, run: RunIdx, place: u32) {
        self.runs[run as usize].holds[self.order].place = place;
    }
}

/// The tree.
#[derive(Debug)]
pub struct ShadowTree {
    graces: ByOrder<Option<i64>>,
    capacity: usize,
    /// Requests served.
    now: i64,
    /// Of what goes first and is not shared; smoothed, in 16ths of a request.
    ages: ByOrder<i64>,
    num_held: ByOrder<usize>,
    num_made: u64,
    runs: Vec<Run>,
    unused_runs: Vec<RunIdx>,
    /// By their first block, with which all before it is mixed.
    run_of: HashMap<i32, RunIdx>,
    turns: Vec<Turn>,
    unused_turns: Vec<TurnIdx>,
    turn_of: HashMap<u64, TurnIdx>,
    queues: ByOrder<Candidates>,
    /// Of the request that is being served.
    path: Vec<RunIdx>,
}

impl ShadowTree {
    /// An order for each grace: by the worth of turns if none, else by recency with so many ages of grace.
    pub fn new(graces: ByOrder<Option<i64>>, capacity: usize) -> Self {
        let mut tree = Self {
            graces,
            capacity,
            now: 0,
            ages: [0; ORDERS],
            num_held: [0; ORDERS],
            num_made: 0,
            runs: Vec::new(),
            unused_runs: Vec::new(),
            run_of: HashMap::default(),
            turns: Vec::new(),
            unused_turns: Vec::new(),
            turn_of: HashMap::default(),
            queues: std::array::from_fn(|_| Candidates::default()),
            path: Vec::new(),
        };
        let nobody = tree.begin_turn(0, NO_LEASE, 0);
        tree.make(Vec::new(), ROOT, nobody);
        tree
    }

    /// Serve one request whole; returns how many blocks of its prompt each order had.
    ///
    /// *Caller guarantees*: there are no more blocks than the capacity.
    pub fn serve(
        &mut self,
        session: i64,
        lease: u64,
        worth: u32,
        blocks: &[i32],
        num_prompt: usize,
    ) -> ByOrder<usize> {
        if blocks.is_empty() {
            return [0; ORDERS];
        }
        self.now += 1;
        let mut path = std::mem::take(&mut self.path);
        path.clear();
        let found = self.find(blocks, &mut path);
        let hits = std::array::from_fn(|order| {
            let held: u32 = path.iter().map(|run| self.runs[*run as usize].holds[order].held).sum();
            num_prompt.min(held as usize)
        });
        let turn = self.begin_turn(session, lease, worth);
        for run in &path {
            self.take_over(*run, turn);
        }
        if found < blocks.len() {
            self.add(&mut path, &blocks[found..], turn);
        }
        if let Some(last) = path.last() {
            self.turns[turn as usize].last = *last;
        }
        self.turn_of.insert(lease, turn);
        for order in 0..ORDERS {
            self.fill(order, &path);
        }
        for (upper, lower) in path.iter().zip(&path[1..]) {
            self.merge(*upper, *lower);
        }
        for order in 0..ORDERS {
            self.trim(order);
        }
        self.path = path;
        hits
    }

    /// Set what a turn is worth; returns whether the tree has something of it.
    pub fn rate(&mut self, lease: u64, worth: u32) -> bool {
        let Some(at) = self.turn_of.get(&lease).copied() else { return false };
        let turn = &mut self.turns[at as usize];
        let fell = worth < turn.worth;
        turn.worth = worth;
        let (last, graces) = (turn.last, self.graces);
        for order in (0..ORDERS).filter(|order| fell && graces[*order].is_none()) {
            let mut run = last;
            while self.runs[run as usize].turn == at && self.runs[run as usize].holds[order].held == 0 {
                run = self.runs[run as usize].parent;
            }
            if self.runs[run as usize].turn == at {
                self.offer(order, run);
            }
        }
        true
    }

    // ---- a request's path ----------------------------------------------------------------------
    /// The runs that the request has in common with the tree, whole; returns how many blocks they have.
    fn find(&mut self, blocks: &[i32], path: &mut Vec<RunIdx>) -> usize {
        let (mut run, mut found) = (ROOT, 0);
        while let Some(child) = blocks.get(found).and_then(|block| self.run_of.get(block)).copied() {
            let known = &self.runs[child as usize];
            if known.parent != run {
                break;
            }
            let same = num_equal(&known.blocks, &blocks[found..]);
            // Where an order holds no more, what comes back to it is no part of what sessions share there.
            let held = known.holds.iter().map(|hold| hold.held as usize);
            let same = held.filter(|held| (1..same).contains(held)).min().unwrap_or(same);
            run = if same == known.blocks.len() { child } else { self.split(child, same) };
            path.push(run);
            found += same;
        }
        found
    }

    /// Cut a run in two; returns the upper part. *Caller guarantees*: a request takes that over next.
    fn split(&mut self, run: RunIdx, at: usize) -> RunIdx {
        let lower = &mut self.runs[run as usize];
        let rest = lower.blocks.split_off(at);
        let above = std::mem::replace(&mut lower.blocks, rest);
        let (first, parent, turn) = (above[0], lower.parent, lower.turn);
        self.run_of.insert(lower.blocks[0], run);
        let upper = self.make(above, parent, turn);
        self.run_of.insert(first, upper);
        for order in 0..ORDERS {
            let lower = &mut self.runs[run as usize].holds[order];
            let Hold { held, is_shared, .. } = *lower;
            lower.held = held.saturating_sub(at as u32);
            lower.is_shared &= lower.held > 0;
            let num_kids = u32::from(lower.held > 0);
            self.runs[upper as usize].holds[order] =
                Hold { held: held.min(at as u32), num_kids, place: UNQUEUED, is_shared };
        }
        self.runs[run as usize].parent = upper;
        upper
    }

    fn begin_turn(&mut self, session: i64, lease: u64, worth: u32) -> TurnIdx {
        let graces =
            std::array::from_fn(|order| (self.graces[order].unwrap_or(0) * self.ages[order]) >> AGE_SHIFT);
        let turn = Turn { session, lease, worth, num_runs: 0, last: ROOT, graces };
        if let Some(at) = self.unused_turns.pop() {
            self.turns[at as usize] = turn;
            return at;
        }
        self.turns.push(turn);
        (self.turns.len() - 1) as TurnIdx
    }

    fn take_over(&mut self, run: RunIdx, turn: TurnIdx) {
        let place = &mut self.runs[run as usize];
        let before = std::mem::replace(&mut place.turn, turn);
        place.used = self.now;
        if self.turns[before as usize].session != self.turns[turn as usize].session {
            for hold in &mut place.holds {
                hold.is_shared = hold.held > 0;
            }
        }
        self.turns[turn as usize].num_runs += 1;
        self.lose_run(before);
    }

    fn lose_run(&mut self, at: TurnIdx) {
        let turn = &mut self.turns[at as usize];
        turn.num_runs -= 1;
        if turn.num_runs == 0 {
            if self.turn_of.get(&turn.lease) == Some(&at) {
                self.turn_of.remove(&turn.lease);
            }
            self.unused_turns.push(at);
        }
    }

    /// Go on where the tree does not: in the last run if that ends there and only this session used it.
    fn add(&mut self, path: &mut Vec<RunIdx>, blocks: &[i32], turn: TurnIdx) {
        let last = path.last().copied().unwrap_or(ROOT);
        let run = &mut self.runs[last as usize];
        if last != ROOT && run.holds.iter().all(|hold| hold.num_kids == 0 && !hold.is_shared) {
            return run.blocks.extend_from_slice(blocks);
        }
        let run = self.make(blocks.to_vec(), last, turn);
        self.run_of.insert(blocks[0], run);
        path.push(run);
    }

    /// Make one of two runs that nothing but a cut has parted. *Caller guarantees*: all orders hold them.
    fn merge(&mut self, upper: RunIdx, lower: RunIdx) {
        let (above, below) = (&self.runs[upper as usize], &self.runs[lower as usize]);
        let mut both = above.holds.iter().zip(&below.holds);
        if !both.all(|(above, below)| above.num_kids == 1 && above.is_shared == below.is_shared) {
            return;
        }
        let (parent, turn) = (above.parent, above.turn);
        self.run_of.remove(&below.blocks[0]);
        self.run_of.insert(above.blocks[0], lower);
        for order in 0..ORDERS {
            self.dequeue(order, upper);
        }
        let mut blocks = std::mem::take(&mut self.runs[upper as usize].blocks);
        let run = &mut self.runs[lower as usize];
        blocks.append(&mut run.blocks);
        run.blocks = blocks;
        run.parent = parent;
        let len = run.len();
        for hold in &mut run.holds {
            hold.held = len;
        }
        self.lose_run(turn);
        self.unused_runs.push(upper);
    }

    fn make(&mut self, blocks: Vec<i32>, parent: RunIdx, turn: TurnIdx) -> RunIdx {
        let holds = [NOTHING; ORDERS];
        let run = Run { number: self.num_made, blocks, parent, turn, used: self.now, holds };
        self.num_made += 1;
        self.turns[turn as usize].num_runs += 1;
        if let Some(at) = self.unused_runs.pop() {
            self.runs[at as usize] = run;
            return at;
        }
        self.runs.push(run);
        (self.runs.len() - 1) as RunIdx
    }

    // ---- what an order holds -------------------------------------------------------------------
    /// Have an order hold all of the path.
    fn fill(&mut self, order: usize, path: &[RunIdx]) {
        for at in path {
            let run = &mut self.runs[*at as usize];
            let (parent, len) = (run.parent, run.len());
            let held = std::mem::replace(&mut run.holds[order].held, len);
            self.num_held[order] += (len - held) as usize;
            if held == 0 {
                self.runs[parent as usize].holds[order].num_kids += 1;
            }
        }
        if let Some(last) = path.last() {
            self.offer(order, *last);
        }
    }

    /// Have an order hold no more than it may.
    fn trim(&mut self, order: usize) {
        while self.num_held[order] > self.capacity {
            let excess = self.num_held[order] - self.capacity;
            let Some(at) = self.first(order) else { break };
            let run = &mut self.runs[at as usize];
            let hold = &mut run.holds[order];
            if !hold.is_shared {
                self.ages[order] += self.now - run.used - (self.ages[order] >> AGE_SHIFT);
            }
            let lost = hold.held.min(excess as u32);
            hold.held -= lost;
            self.num_held[order] -= lost as usize;
            let (is_none, parent) = (hold.held == 0, run.parent);
            if is_none {
                hold.is_shared = false;
                self.runs[parent as usize].holds[order].num_kids -= 1;
                self.offer(order, parent);
            }
            let run = &mut self.runs[at as usize];
            let most = run.holds.iter().map(|hold| hold.held).max().unwrap_or(0);
            if most == 0 {
                self.drop_run(at);
            } else {
                run.blocks.truncate(most as usize);
            }
        }
    }

    /// No order holds anything of it any more.
    fn drop_run(&mut self, at: RunIdx) {
        for order in 0..ORDERS {
            self.dequeue(order, at);
        }
        let run = &mut self.runs[at as usize];
        let (first, turn, parent) = (run.blocks[0], run.turn, run.parent);
        run.blocks = Vec::new();
        if self.run_of.get(&first) == Some(&at) {
            self.run_of.remove(&first);
        }
        if self.turns[turn as usize].last == at {
            self.turns[turn as usize].last = parent;
        }
        self.lose_run(turn);
        self.unused_runs.push(at);
    }

    /// What the order holds of lower rank goes first.
    fn rank(&self, order: usize, run: &Run) -> i64 {
        let turn = &self.turns[run.turn as usize];
        let is_shared = run.holds[order].is_shared;
        match self.graces[order] {
            None => {
                let worth = turn.worth + SHARED_BONUS * u32::from(is_shared);
                (i64::from(worth) << USED_BITS) + run.used
            }
            Some(_) => run.used + turn.graces[order] * i64::from(is_shared),
        }
    }

    fn may_go(&self, order: usize, at: RunIdx) -> bool {
        let hold = self.runs[at as usize].holds[order];
        at != ROOT && hold.held > 0 && hold.num_kids == 0
    }

    /// Queue a run if its tail may go, or went up; what went down is noticed when it comes out.
    fn offer(&mut self, order: usize, at: RunIdx) {
        if !self.may_go(order, at) {
            return;
        }
        let run = &self.runs[at as usize];
        let (rank, place) = (self.rank(order, run), run.holds[order].place);
        let queue = &mut self.queues[order];
        let mut runs = Queued { runs: &mut self.runs, order };
        match queue.rank_at(place) {
            None => queue.push(Entry { rank, height: 0, node: at }, &mut runs),
            Some(queued) if rank < queued => queue.set_rank(place, rank, &mut runs),
            Some(_) => {}
        }
    }

    fn dequeue(&mut self, order: usize, at: RunIdx) {
        let place = self.runs[at as usize].holds[order].place;
        if place != UNQUEUED {
            self.queues[order].remove(place, &mut Queued { runs: &mut self.runs, order });
        }
    }

    /// The run whose tail goes first; it stays in the queue.
    fn first(&mut self, order: usize) -> Option<RunIdx> {
        while let Some(Entry { rank, node: at, .. }) = self.queues[order].first() {
            if !self.may_go(order, at) {
                self.dequeue(order, at);
                continue;
            }
            let now = self.rank(order, &self.runs[at as usize]);
            if now <= rank {
                return Some(at);
            }
            self.queues[order].set_rank(0, now, &mut Queued { runs: &mut self.runs, order });
        }
        None
    }
}

/// How many blocks are equal from the beginning. Each is mixed with those before it, so one look may do.
fn num_equal(one: &[i32], other: &[i32]) -> usize {
    let shorter = one.len().min(other.len());
    if shorter > 0 && one[shorter - 1] == other[shorter - 1] {
        return shorter;
    }
    one.iter().zip(other).take_while(|(one, other)| one == other).count()
}
