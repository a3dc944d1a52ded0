//! Who used a node last, and what the caller thinks that is worth.
//!
//! A *turn* is a lease as the tree remembers it once it has ended: the nodes that no later lease used.
//! There are never more turns than nodes and open leases.

use hashbrown::HashMap;
use smallvec::SmallVec;

use crate::actions::Action;
use crate::arena::Arena;
use crate::forest::Forest;
use crate::interface::{Rating, Regard, Tier, MOST_WORTH, POPULAR_WORTH, RECENCY_WORTH, SHARED_WORTH};
use crate::node::NodeIdx;

/// Where a turn is among all of them.
pub type TurnIdx = u32;
/// No turn.
pub const NO_TURN: TurnIdx = TurnIdx::MAX;
/// Of a turn that names none: below all that are inferred.
const NO_SESSION: i64 = i64::MIN;
/// What a node of several sessions is worth more.
pub const SHARED_BONUS: u32 = 8;
/// Ages: what is shared is kept so much longer, by the range of its turn's worth.
pub const SHARED_GRACE: i64 = 4;
pub const POPULAR_GRACE: i64 = 64;
/// A new age counts for a sixteenth in the smoothed one.
pub const AGE_SHIFT: u32 = 4;

/// One lease's nodes. One cache line: what is rated was not looked at for a while.
#[derive(Debug)]
#[repr(align(64))]
pub struct Turn {
    pub lease: u64,
    /// Or `NO_SESSION`.
    session: i64,
    /// Of what is shared, as a count of the tree's operations.
    pub grace: i64,
    pub nodes: SmallVec<[NodeIdx; 4]>,
    /// How far what is left of it goes, in tokens from the start.
    pub end: u32,
    pub worth: u16,
    pub is_open: bool,
    pub is_rated: bool,
    regard: Regard,
}

const _: () = assert!(size_of::<Turn>() == 64);

/// All turns of a forest; empty unless `is_on`. A turn stays at its place, so that a rank costs no look-up.
#[derive(Debug, Default)]
pub struct Turns {
    pub is_on: bool,
    places: Vec<Turn>,
    unused: Vec<TurnIdx>,
    by_lease: HashMap<u64, TurnIdx>,
    page_size: usize,
    /// Turns that were rated and are over since the caller was told.
    over: Vec<u64>,
    /// One for each node, as far as they have been asked for.
    of_node: Arena<TurnIdx>,
    /// By tier, how long ago what goes first and is not shared was used: smoothed, in 16ths of an operation.
    ages: [i64; 2],
}

impl Turns {
    pub fn new(is_on: bool, page_size: usize) -> Self {
        Self { is_on, page_size, ..Self::default() }
    }

    /// The turn of a lease that has begun, to be regarded so until it is rated; none while off.
    pub fn open(&mut self, lease: u64, session: Option<i64>, regard: Regard) -> TurnIdx {
        if !self.is_on {
            return NO_TURN;
        }
        let nodes = SmallVec::new();
        let (worth, grace) = (MOST_WORTH as u16, 0);
        let session = session.unwrap_or(NO_SESSION);
        let turn =
            Turn { lease, session, grace, nodes, end: 0, worth, is_open: true, is_rated: false, regard };
        let at = match self.unused.pop() {
            Some(at) => {
                self.places[at as usize] = turn;
                at
            }
            None => {
                self.places.push(turn);
                (self.places.len() - 1) as TurnIdx
            }
        };
        self.by_lease.insert(lease, at);
        at
    }

    /// The lease has ended; its turn stays as long as it has nodes.
    pub fn close(&mut self, turn: TurnIdx) {
        if turn != NO_TURN {
            self.places[turn as usize].is_open = false;
            self.drop_if_over(turn);
        }
    }

    /// All that there are.
    pub fn iter(&self) -> impl Iterator<Item = (TurnIdx, &Turn)> {
        self.by_lease.values().map(|at| (*at, &self.places[*at as usize]))
    }

    pub fn of(&self, node: NodeIdx) -> TurnIdx {
        self.of_node.get(node as usize).copied().unwrap_or(NO_TURN)
    }

    fn get(&self, turn: TurnIdx) -> Option<&Turn> {
        (turn != NO_TURN).then(|| &self.places[turn as usize])
    }

    fn get_mut(&mut self, turn: TurnIdx) -> Option<&mut Turn> {
        (turn != NO_TURN).then(|| &mut self.places[turn as usize])
    }

    /// Whose it was.
    pub fn lease_of(&self, turn: TurnIdx) -> Option<u64> {
        self.get(turn).map(|turn| turn.lease)
    }

    /// The turn used the node, which ends there, last.
    pub fn own(&mut self, node: NodeIdx, end: usize, turn: TurnIdx) {
        if turn == NO_TURN || self.of(node) == turn {
            return;
        }
        self.disown(node);
        while self.of_node.len() <= node as usize {
            self.of_node.push(NO_TURN);
        }
        self.of_node[node as usize] = turn;
        let turn = &mut self.places[turn as usize];
        turn.nodes.push(node);
        turn.end = turn.end.max(end as u32); // positions are 32 bits wide
    }

    /// The node, with these ends, will leave the tree: its turn goes no further than to its start.
    pub fn cut(&mut self, node: NodeIdx, start: usize, end: usize) {
        if let Some(turn) = self.get_mut(self.of(node)).filter(|turn| turn.end as usize == end) {
            turn.end = start as u32;
        }
    }

    /// How far what is left of a turn goes.
    pub fn end_of(&self, turn: TurnIdx) -> usize {
        self.get(turn).map_or(0, |turn| turn.end as usize)
    }

    /// The node leaves the tree, or changes hands.
    pub fn disown(&mut self, node: NodeIdx) {
        let at = self.of(node);
        let Some(turn) = self.get_mut(at) else { return };
        if let Some(place) = turn.nodes.iter().position(|other| *other == node) {
            turn.nodes.swap_remove(place);
        }
        self.of_node[node as usize] = NO_TURN;
        self.drop_if_over(at);
    }

    fn drop_if_over(&mut self, at: TurnIdx) {
        let turn = &self.places[at as usize];
        if turn.nodes.is_empty() && !turn.is_open {
            if turn.is_rated {
                self.over.push(turn.lease); // whoever rates turns keeps them, and wants to know
            }
            self.by_lease.remove(&turn.lease);
            self.unused.push(at);
        }
    }

    /// The turns that were rated and are over since the last call, by number.
    pub fn take_over(&mut self, over: &mut Vec<u64>) {
        over.clear();
        std::mem::swap(over, &mut self.over);
        over.sort_unstable_by_key(|lease| *lease as i64); // the caller's numbers, which may be any
    }

    /// A request of `session` that met the turn, but for `num_missed` tokens, belongs to its session.
    ///
    /// A request that names no session goes on with what it contains all of but the last page.
    pub fn goes_on(&self, turn: TurnIdx, session: Option<i64>, num_missed: usize) -> bool {
        match session {
            None => num_missed <= self.page_size,
            Some(named) => self.get(turn).is_some_and(|turn| turn.session == named),
        }
    }

    /// How the turn's pages are to be regarded; plain where there is none.
    fn regard(&self, turn: TurnIdx) -> Regard {
        self.get(turn).map_or(Regard::Plain, |turn| turn.regard)
    }

    pub fn worth(&self, node: NodeIdx, is_shared: bool) -> u32 {
        match self.get(self.of(node)).map_or(0, |turn| u32::from(turn.worth)) {
            0 => 0,
            worth if worth < RECENCY_WORTH => worth + SHARED_BONUS * u32::from(is_shared),
            worth => worth,
        }
    }

    /// By how much later the node counts as used if it is shared.
    pub fn grace(&self, node: NodeIdx) -> i64 {
        self.get(self.of(node)).map_or(0, |turn| turn.grace)
    }

    /// What goes first in the tier, and is not shared, was not used for so long.
    ///
    /// Also where recency does not order, so that what is shared has its grace from the first on when it does.
    pub fn learn_age(&mut self, tier: Tier, worth: i64, age: i64) {
        if worth > 0 {
            if let Some(known) = self.ages.get_mut(tier as usize) {
                *known += age - (*known >> AGE_SHIFT);
            }
        }
    }

    fn grace_of(&self, worth: u32) -> i64 {
        let ages: i64 = match worth {
            worth if worth >= POPULAR_WORTH => POPULAR_GRACE,
            worth if worth >= SHARED_WORTH => SHARED_GRACE,
            _ => 0,
        };
        (ages * self.ages[0].max(self.ages[1])) >> AGE_SHIFT
    }
}

impl Forest {
    /// What somebody wants kept, else what the last to use the node is told to be, if nobody else used it.
    pub fn regard(&self, node: NodeIdx) -> Regard {
        self.regarded(node, self.turns.regard(self.turns.of(node)))
    }

    /// With its last turn regarded so. What is shared is plain: it stays for what hangs below it.
    fn regarded(&self, node: NodeIdx, turn: Regard) -> Regard {
        let place = self.node(node);
        match (place.is_kept(), place.is_shared()) {
            (true, _) => Regard::Kept,
            (_, true) => Regard::Plain,
            _ => turn,
        }
    }

    /// The turn used the node last. L3 hears of it if the node is regarded otherwise for it.
    pub fn own(&mut self, node: NodeIdx, turn: TurnIdx) {
        if turn == NO_TURN || self.turns.of(node) == turn {
            return;
        }
        let before = self.regard(node);
        self.turns.own(node, self.nodes[node as usize].end(), turn);
        self.hint_if_changed(node, before);
    }

    /// Leases of more than one session used the node.
    pub fn share(&mut self, node: NodeIdx) {
        let before = self.regard(node);
        self.node_mut(node).set_shared(true);
        self.hint_if_changed(node, before);
    }

    /// The node goes last of what may go, or is not to be kept any more.
    pub fn set_kept(&mut self, node: NodeIdx, is_kept: bool) {
        let before = self.regard(node);
        self.node_mut(node).set_kept(is_kept);
        self.hint_if_changed(node, before);
    }

    /// Set what a turn is worth; where that fell, let its nodes' new rank be known.
    pub fn rate(&mut self, rating: Rating) {
        let Rating { lease, worth, regard } = rating;
        let grace = self.turns.grace_of(worth);
        let Some(at) = self.turns.by_lease.get(&lease) else {
            if self.turns.is_on {
                self.turns.over.push(lease);
            }
            return;
        };
        let turn = &mut self.turns.places[*at as usize];
        let before = turn.regard;
        let fell = worth < u32::from(turn.worth) || grace < turn.grace;
        turn.worth = worth as u16;
        turn.regard = if worth == 0 { Regard::Over } else { regard };
        turn.grace = grace;
        turn.is_rated = true;
        let is_news = turn.regard != before;
        if !fell && !is_news {
            return;
        }
        if let ([node], false) = (&turn.nodes[..], is_news) {
            let node = *node;
            return self.offer(node);
        }
        let mut nodes = turn.nodes.clone();
        nodes.sort_unstable_by_key(|node| self.node(*node).id);
        for node in nodes.iter().filter(|_| fell) {
            self.offer(*node);
        }
        for node in nodes.into_iter().filter(|_| is_news) {
            self.hint_if_changed(node, self.regarded(node, before));
        }
    }

    /// Where the node is over now, what waits for L3 may not have to.
    pub fn hint_if_changed(&mut self, node: NodeIdx, before: Regard) {
        let regard = self.regard(node);
        if regard == before {
            return;
        }
        self.unqueue(node);
        for i in 0..self.num_components {
            if self.held(node, i).stored() {
                self.hint(node, i, regard);
            }
        }
    }

    /// Have L3 told how to regard what it has of the node.
    pub fn hint(&mut self, node: NodeIdx, component: usize, regard: Regard) {
        let keys = self.keys(node, component);
        self.actions.push(Action::Hint { component, keys, regard });
    }

    /// All that L3 has is to be regarded no higher than plain, since nobody would take that back later.
    pub fn take_hints_back(&mut self) {
        self.actions.retain(|action| matches!(action, Action::Hint { .. }));
        for node in self.all_nodes() {
            if self.regard(node) > Regard::Plain {
                for i in 0..self.num_components {
                    if self.held(node, i).stored() {
                        self.hint(node, i, Regard::Plain);
                    }
                }
            }
        }
    }
}
