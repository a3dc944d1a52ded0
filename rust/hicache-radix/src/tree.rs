//! The interface: one method per call of `hicache.radix.interface.TreeCore`, whose contracts hold here.
//!
//! It only routes, as `radix/pytree.py` does.

use std::collections::{BTreeMap, BTreeSet};
use std::mem::discriminant;

use crate::actions::Action;
use crate::check::check;
use crate::error::{Error, Result};
use crate::forest::Forest;
use crate::interface::{
    Answers, Choice, Cleared, Inserted, MatchResult, Namespace, NodeView, PlanStep, PoolCount, ProbeResult,
    Rating, Regard, Reserved, ResidencyEvent, Room, Settled, Started, StoreQuery, Tier, TreeConfig,
};
use crate::leases::LeaseState;
use crate::rules::Locks;
use crate::slots::{Run, Slots};
use crate::tokens::Token;
use crate::turns::NO_TURN;

/// The unified radix tree.
#[derive(Debug)]
pub struct TreeCore {
    forest: Forest,
}

impl TreeCore {
    /// An empty tree.
    pub fn new(config: TreeConfig) -> Result<Self> {
        check(&config)?;
        Ok(Self { forest: Forest::new(config) })
    }

    /// The settings.
    pub fn config(&self) -> &TreeConfig {
        &self.forest.config
    }

    // ---- look up -------------------------------------------------------------------------------
    /// Read-only match.
    pub fn probe<T: Token>(&self, tokens: &[T], namespace: &Namespace, cap: bool) -> Result<ProbeResult> {
        let (found, verdict) = self.forest.find(tokens, namespace, cap)?;
        Ok(self.forest.describe(&found, verdict).0)
    }

    /// The pages an L3 probe has to ask for.
    pub fn store_query<T: Token>(
        &mut self,
        tokens: &[T],
        namespace: &Namespace,
        cap: bool,
    ) -> Result<StoreQuery> {
        self.forest.store_query(tokens, namespace, cap)
    }

    /// Take over a probe's answer, one map a component.
    pub fn learn<T: Token>(&mut self, tokens: &[T], answers: &Answers, namespace: &Namespace) -> Result<()> {
        if answers.len() != self.forest.num_components {
            let (got, expected) = (answers.len(), self.forest.num_components);
            return Err(Error::Protocol(format!("answers for {got} components, expected {expected}")));
        }
        crate::lookup::check_tokens(tokens, 0)?;
        self.forest.tick += 1;
        self.forest.learn(&T::narrow(tokens), answers, namespace);
        self.tidy();
        Ok(())
    }

    /// Open a lease on the deepest boundary that every component accepts.
    ///
    /// *Caller guarantees*: `priority` is at most 100.
    pub fn open<T: Token>(
        &mut self,
        tokens: &[T],
        namespace: &Namespace,
        cap: bool,
        priority: u32,
        session: Option<i64>,
    ) -> Result<MatchResult> {
        let forest = &mut self.forest;
        let (walked, verdict) = forest.find(tokens, namespace, cap)?;
        forest.tick += 1;
        forest.counters.matches += 1;
        let (found, origins) = forest.describe(&walked, verdict);
        if let Some(fork) = found.fork {
            forest.counters.fork_tokens += (fork - found.boundary) as u64;
        }
        let mut met = NO_TURN;
        let node = match verdict.num_stops {
            0 => forest.root(namespace),
            num => {
                let (node, end) = walked.stops[num - 1];
                met = forest.turns.of(node);
                if end < forest.node(node).end() {
                    forest.split(node, (end - forest.node(node).start()) / forest.page_size)
                } else {
                    node
                }
            }
        };
        let met_end = forest.turns.end_of(met);
        let met_lease = forest.turns.lease_of(met);
        let id = forest.next_lease;
        forest.next_lease += 1;
        let turn = forest.turns.open(id, session, Regard::of_priority(i64::from(priority)));
        let mut lease = LeaseState {
            id,
            turn,
            node,
            prompt_len: tokens.len(),
            priority,
            origins,
            base: 0,
            is_settled: false,
            is_doubtful: false,
            reserved: 0,
            locks: Locks::new(),
            owned: vec![Slots::default(); forest.num_components],
            states: vec![None; forest.num_components],
            claims: Vec::new(),
            arriving: BTreeSet::new(),
            lost_load: false,
        };
        forest.node_mut(node).hold(|busy| busy.holders += 1);
        forest.doubt(node);
        lease.locks = forest.lock_all(node, true);
        forest.leases.insert(id, Box::new(lease));
        if !forest.node(node).is_root() {
            let num_missed = met_end.saturating_sub(forest.node(node).end());
            if met != NO_TURN && !forest.turns.goes_on(met, session, num_missed) {
                forest.share(node);
            }
            forest.touch(node, turn);
            forest.touch_spare_marks(node, turn);
            let place = forest.node_mut(node);
            place.set_uses(place.uses() + 1);
            forest.note_use(node, priority, tokens.len());
            if forest.config.eviction.protects_hits() {
                forest.protect(node, true);
            }
            forest.after_use(node);
        }
        Ok(MatchResult { lease: id, found, actions: self.finish(), met: met_lease, met_end })
    }

    // ---- restore -------------------------------------------------------------------------------
    /// What is missing in L1 for the lease's boundary.
    pub fn plan(&self, lease: i64) -> Result<Vec<PlanStep>> {
        Ok(self.forest.plan(self.lease(lease)?))
    }

    /// Boundaries that the lease could settle for, deepest first; the last one needs nothing moved.
    pub fn choices(&self, lease: i64) -> Result<Vec<Choice>> {
        Ok(self.forest.choices(self.lease(lease)?))
    }

    /// Have the lease go for a shallower boundary.
    pub fn lower(&mut self, lease: i64, boundary: i64) -> Result<()> {
        self.with_lease(lease, |forest, lease| forest.lower(lease, boundary))??;
        self.forest.tidy();
        Ok(())
    }

    /// Begin L3 to L2 for the plan's store steps.
    pub fn fetch(&mut self, lease: i64) -> Result<Started> {
        let tickets = self.with_lease(lease, Forest::fetch)?;
        Ok(Started { tickets, actions: self.finish() })
    }

    /// Begin L2 to L1 for what the plan has in L2.
    pub fn load(&mut self, lease: i64) -> Result<Started> {
        let tickets = self.with_lease(lease, Forest::load)?;
        Ok(Started { tickets, actions: self.finish() })
    }

    /// Lower the boundary to the deepest one that L1 holds now, or with `arriving` that running loads bring.
    pub fn settle(&mut self, lease: i64, arriving: bool) -> Result<Settled> {
        let (boundary, by_component, source, tickets) = self.with_lease(lease, |forest, lease| {
            forest.settle(lease, arriving);
            let (by_component, source) = forest.sources(&lease.origins, lease.base);
            (lease.base, by_component, source, lease.claim_tickets())
        })?;
        Ok(Settled { boundary, source, by_component, tickets, actions: self.finish() })
    }

    // ---- compute and publish -------------------------------------------------------------------
    /// Give the lease device slots and its private states.
    pub fn reserve(&mut self, lease: i64, num_tokens: i64) -> Result<Reserved> {
        let reserved = self.with_lease(lease, |forest, lease| forest.reserve(lease, num_tokens))??;
        Ok(Reserved { actions: self.finish(), ..reserved })
    }

    /// Publish the request's tokens, floored to a page.
    ///
    /// The first `verified_len` are known to be those of its match and earlier inserts.
    pub fn insert<T: Token>(
        &mut self,
        lease: i64,
        tokens: &[T],
        mark: bool,
        verified_len: i64,
    ) -> Result<Inserted> {
        let done = self.with_lease(lease, |forest, lease| {
            forest.check(lease, tokens, verified_len)?;
            forest.tick += 1;
            Ok(forest.insert(lease, tokens, mark, false))
        })??;
        Ok(Inserted { actions: self.finish(), ..done })
    }

    /// End the lease: publish `tokens` as a mark if given.
    pub fn release<T: Token>(
        &mut self,
        lease: i64,
        tokens: Option<&[T]>,
        verified_len: i64,
    ) -> Result<Inserted> {
        let done = self.with_lease(lease, |forest, lease| {
            let Some(tokens) = tokens else {
                let published = forest.node(lease.node).end();
                return Ok(Inserted { published, ..Inserted::default() });
            };
            forest.check(lease, tokens, verified_len)?;
            forest.tick += 1;
            Ok(forest.insert(lease, tokens, true, true))
        })??;
        if let Some(mut state) = self.forest.leases.remove(&(lease as u64)) {
            self.forest.end(&mut state);
        }
        Ok(Inserted { actions: self.finish(), ..done })
    }

    /// Device slots of the lease's whole prefix, one a page.
    pub fn lease_slots(&self, lease: i64, component: usize) -> Result<Vec<i64>> {
        self.forest.lease_slots(self.lease(lease)?, component)
    }

    /// The private state slot of a checkpoint component.
    pub fn lease_state(&self, lease: i64, component: usize) -> Result<Option<u32>> {
        Ok(self.lease(lease)?.states[component])
    }

    /// Say what keeping it is worth, for all that each lease was the last to use; `over` has then the leases
    /// rated so far of which nothing is left since the last call.
    ///
    /// *Caller guarantees*: a worth is at most `MOST_WORTH`.
    pub fn rate(&mut self, ratings: impl IntoIterator<Item = Rating>, over: &mut Vec<u64>) {
        for rating in ratings {
            self.forest.rate(rating);
        }
        self.forest.turns.take_over(over);
    }

    // ---- keeping -------------------------------------------------------------------------------
    /// Prefer to keep what the tree has of a prefix; returns how many tokens that is.
    pub fn keep<T: Token>(&mut self, tokens: &[T], namespace: &Namespace) -> Result<usize> {
        crate::lookup::check_tokens(tokens, 0)?;
        let kept = self.forest.keep(tokens, namespace);
        self.tidy();
        Ok(kept)
    }

    /// Prefer it no longer.
    pub fn unkeep<T: Token>(&mut self, tokens: &[T], namespace: &Namespace) -> Result<()> {
        crate::lookup::check_tokens(tokens, 0)?;
        self.forest.unkeep(tokens, namespace);
        self.tidy();
        Ok(())
    }

    // ---- pressure ------------------------------------------------------------------------------
    /// Demote or drop until so many slots are free, or as far as can be.
    pub fn make_room(&mut self, component: usize, tier: Tier, free_slots: i64) -> Result<Room> {
        self.check_pool(tier)?;
        let wanted = usize::try_from(free_slots).unwrap_or(0);
        let tickets = self.forest.make_room(component, tier, wanted);
        let free_slots = self.forest.pools.num_free(component, tier);
        Ok(Room { free_slots, tickets, actions: self.finish() })
    }

    /// Begin what is needed for all payload to be in L3.
    pub fn persist(&mut self) -> Started {
        let tickets = self.forest.persist();
        Started { tickets, actions: self.finish() }
    }

    /// Try again what L3 did not take, as far as L2 still has it.
    pub fn retry_stores(&mut self) -> Started {
        let tickets = self.forest.retry_stores();
        Started { tickets, actions: self.finish() }
    }

    // ---- change while serving ------------------------------------------------------------------
    /// Throw payload away in every tier, as far as nobody holds it.
    pub fn clear<T: Token>(
        &mut self,
        namespace: Option<&Namespace>,
        tokens: Option<&[T]>,
        alone: bool,
    ) -> Result<Cleared> {
        let cleared = self.forest.clear(namespace, tokens, alone)?;
        Ok(Cleared { actions: self.finish(), ..cleared })
    }

    /// Believe of no page that L3 has it.
    pub fn forget_store(&mut self) {
        self.forest.forget_store();
        self.tidy();
    }

    /// Use at most so many slots of a pool.
    pub fn resize(&mut self, component: usize, tier: Tier, num_slots: i64) -> Result<Room> {
        self.check_pool(tier)?;
        let tickets = self.forest.resize(component, tier, num_slots)?;
        let actions = self.finish();
        let free_slots = self.forest.pools.num_free(component, tier);
        Ok(Room { free_slots, tickets, actions })
    }

    /// Slots that a pool does not use because it was resized.
    pub fn withheld_slots(&self, component: usize, tier: Tier) -> Result<Vec<i64>> {
        self.check_pool(tier)?;
        let (runs, _) = self.forest.pools.idle_runs(component, tier);
        Ok(runs.iter().flat_map(|run| (run.first..run.first + run.len).rev()).map(i64::from).collect())
    }

    /// Slots of an L1 with one budget that are free, and whose memory has to go back to the system now.
    pub fn surplus_slots(&mut self) -> Vec<(usize, Vec<i64>)> {
        let surplus = self.forest.pools.take_surplus().into_iter();
        let slots = |runs: Vec<Run>| {
            runs.iter().flat_map(|run| (run.first..run.first + run.len).rev()).map(i64::from).collect()
        };
        surplus.map(|(component, runs)| (component, slots(runs))).collect()
    }

    /// Go on under other settings.
    ///
    /// *Caller guarantees*: what slots, components and keys rely on is as before; `reorders` says whether
    /// what leaves first may be another.
    pub fn reconfigure(&mut self, config: TreeConfig, reorders: bool) -> Result<()> {
        check(&config)?;
        let is_another = discriminant(&self.forest.config.eviction) != discriminant(&config.eviction);
        self.forest.config = config;
        if reorders {
            self.forest.reorder(is_another);
        }
        Ok(())
    }

    // ---- tickets -------------------------------------------------------------------------------
    /// The whole transfer arrived and was verified.
    pub fn commit(&mut self, ticket: i64) -> Result<Vec<Action>> {
        let Some(number) = self.ticket(ticket)? else { return Ok(Vec::new()) };
        self.forest.commit(number);
        Ok(self.finish())
    }

    /// Only the first `done_slots` arrived; the rest is as it was before.
    pub fn abort(&mut self, ticket: i64, done_slots: i64, missing: bool) -> Result<Vec<Action>> {
        let Some(number) = self.ticket(ticket)? else { return Ok(Vec::new()) };
        let total = self.forest.tickets[&number].num_slots();
        let Some(done) = usize::try_from(done_slots).ok().filter(|done| *done <= total) else {
            let message = format!("ticket {ticket} has {total} slots, {done_slots} cannot be done");
            return Err(Error::Protocol(message));
        };
        self.forest.abort(number, done, missing);
        Ok(self.finish())
    }

    /// Tickets not reported back yet, oldest first.
    pub fn in_flight(&self) -> Vec<u64> {
        self.forest.tickets.keys().copied().collect()
    }

    // ---- inspect -------------------------------------------------------------------------------
    /// Every broken invariant, one sentence each.
    pub fn audit(&self) -> Vec<String> {
        self.forest.audit()
    }

    /// Capacity of a pool and how much of it is free.
    pub fn free_slots(&self, component: usize, tier: Tier) -> Result<(usize, usize)> {
        self.check_pool(tier)?;
        let pools = &self.forest.pools;
        Ok((pools.capacity(component, tier), pools.num_free(component, tier)))
    }

    /// Slots of a pool that this component has.
    pub fn held_slots(&self, component: usize, tier: Tier) -> Result<usize> {
        self.check_pool(tier)?;
        Ok(self.forest.pools.num_held(component, tier))
    }

    /// Slots by owner, counted from scratch.
    pub fn pool_count(&self, component: usize, tier: Tier) -> Result<PoolCount> {
        self.check_pool(tier)?;
        Ok(self.forest.pool_count(component, tier))
    }

    /// Slots whose payload no vote can accept again and no lease stands on.
    pub fn dead_slots(&self, component: usize, tier: Tier) -> usize {
        self.forest.dead_weight.slots[component][tier as usize]
    }

    /// Monotonic counts, without those that are 0.
    pub fn counters(&self) -> BTreeMap<String, u64> {
        self.forest.counters.by_name(&self.forest.config.components)
    }

    /// All nodes but the roots, parents before children.
    pub fn snapshot(&self) -> Vec<NodeView> {
        self.forest.snapshot()
    }

    /// The events since the last call.
    pub fn drain_events(&mut self) -> Vec<ResidencyEvent> {
        std::mem::take(&mut self.forest.events)
    }

    /// Become as new.
    pub fn reset(&mut self) {
        let forest = &mut self.forest;
        if forest.config.emit_events {
            forest.note_all_removed();
        }
        forest.take_hints_back();
        let (events, hints) = (std::mem::take(&mut forest.events), std::mem::take(&mut forest.actions));
        forest.start_empty();
        (forest.events, forest.actions) = (events, hints);
    }

    // ---- helpers -------------------------------------------------------------------------------
    /// Refuse a lease that is unknown, already ended, or from before a reset.
    pub fn check_lease(&self, lease: i64) -> Result<()> {
        self.lease(lease).map(|_| ())
    }

    fn lease(&self, lease: i64) -> Result<&LeaseState> {
        let state = u64::try_from(lease).ok().and_then(|number| self.forest.leases.get(&number));
        state.map(Box::as_ref).ok_or_else(|| self.no_lease(lease))
    }

    fn no_lease(&self, lease: i64) -> Error {
        let is_old = u64::try_from(lease).is_ok_and(|number| number < self.forest.next_lease);
        let why = if is_old { "has ended or is from before a reset" } else { "is unknown" };
        Error::Protocol(format!("lease {lease} {why}"))
    }

    /// Work on a lease outside of its table, and put it back.
    fn with_lease<R>(
        &mut self,
        lease: i64,
        work: impl FnOnce(&mut Forest, &mut LeaseState) -> R,
    ) -> Result<R> {
        let taken = u64::try_from(lease).ok().and_then(|number| self.forest.leases.remove(&number));
        let Some(mut state) = taken else { return Err(self.no_lease(lease)) };
        let result = work(&mut self.forest, &mut state);
        self.forest.leases.insert(state.id, state);
        Ok(result)
    }

    /// None for a late report on a ticket from before a reset.
    fn ticket(&self, ticket: i64) -> Result<Option<u64>> {
        let forest = &self.forest;
        let number = u64::try_from(ticket).ok();
        if let Some(number) = number.filter(|number| forest.tickets.contains_key(number)) {
            return Ok(Some(number));
        }
        if number.is_some_and(|number| number < forest.first_live_ticket) {
            return Ok(None);
        }
        let is_known = number.is_some_and(|number| number < forest.next_ticket);
        let why = if is_known { "was reported back already" } else { "is unknown" };
        Err(Error::Protocol(format!("ticket {ticket} {why}")))
    }

    /// Whether a call takes microseconds at most.
    pub fn is_brief(&self, num_tokens: usize, num_known: i64) -> bool {
        self.forest.is_brief(num_tokens, num_known)
    }

    /// Whether nothing has to leave L1 for so many tokens more.
    pub fn has_room_for(&self, num_tokens: i64) -> bool {
        self.forest.has_room_for(num_tokens)
    }

    fn check_pool(&self, tier: Tier) -> Result<()> {
        match tier {
            Tier::Store => Err(Error::Protocol("L3 has no pool of slots".into())),
            _ => Ok(()),
        }
    }

    fn finish(&mut self) -> Vec<Action> {
        self.tidy();
        std::mem::take(&mut self.forest.actions)
    }

    /// The end of a call that returns no actions: hints that wait go with the next one.
    fn tidy(&mut self) {
        self.forest.forget_beliefs();
        self.forest.tidy();
        self.forest.settle_dead_weight();
        self.forest.approach_limits();
    }
}
