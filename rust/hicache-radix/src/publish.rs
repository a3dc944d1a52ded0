//! From computed payload to nodes: reserve, insert, release.

use std::collections::BTreeSet;

use crate::actions::Action;
use crate::demote::once_each;
use crate::error::{Error, Result};
use crate::forest::Forest;
use crate::interface::{Cause, Inserted, Reserved, Tier};
use crate::leases::LeaseState;
use crate::lookup::check_tokens;
use crate::node::NodeIdx;
use crate::slots::Slots;
use crate::tickets::{Kind, Part};
use crate::tokens::{equal_prefix, Token};
use crate::turns::TurnIdx;

/// Positions are 32 bits wide, and so are slots.
const MAX_TOKENS: i64 = i32::MAX as i64;

impl Forest {
    // ---- reserve -------------------------------------------------------------------------------
    pub fn reserve(&mut self, lease: &mut LeaseState, num_tokens: i64) -> Result<Reserved> {
        if !(0..=MAX_TOKENS).contains(&num_tokens) {
            return Err(Error::Protocol(format!("cannot reserve {num_tokens} tokens")));
        }
        let num_tokens = num_tokens as usize;
        self.settle(lease, false);
        let never = self.never_fits(lease);
        if !never.is_empty() {
            return Ok(Reserved { short: never, ..Reserved::default() });
        }
        let page = self.page_size;
        let published = self.node(lease.node).end();
        let reserved = lease.reserved.max(published) + num_tokens;
        let pages = reserved.div_ceil(page) - published / page;
        let wanted: Vec<usize> = (0..self.num_components)
            .map(|i| match self.rules[i].keeps_pages {
                true => pages.saturating_sub(lease.owned[i].len()),
                false => usize::from(lease.states[i].is_none()),
            })
            .collect();
        let needs = self.pools.needs(&wanted, Tier::Device);
        let mut waits = Vec::new();
        // Nothing leaves for what is refused all the same.
        let num_asked = if self.is_too_much(lease, &wanted) { 0 } else { self.bases_first.len() };
        for at in 0..num_asked {
            let i = self.bases_first[at];
            if needs[i] > self.pools.num_free(i, Tier::Device) {
                waits.extend(self.make_room_for(lease, i, Tier::Device, needs[i]));
            }
        }
        let needs = self.pools.needs(&wanted, Tier::Device);
        let short: Vec<(usize, usize)> = (0..self.num_components)
            .filter(|i| needs[*i] > self.pools.num_free(*i, Tier::Device))
            .map(|i| (i, needs[i] - self.pools.num_free(i, Tier::Device)))
            .collect();
        if !short.is_empty() {
            return Ok(Reserved { short, tickets: once_each(waits), actions: Vec::new() });
        }
        for (i, count) in wanted.into_iter().enumerate().filter(|(_, count)| *count > 0) {
            let taken = self.pools.allocate(i, Tier::Device, count);
            if self.rules[i].keeps_pages {
                lease.owned[i].append(&taken);
            } else {
                lease.states[i] = taken.first();
            }
        }
        lease.reserved = reserved;
        Ok(Reserved::default())
    }

    // ---- insert --------------------------------------------------------------------------------
    /// Refuse `tokens` unless they extend what the lease holds.
    pub fn check<T: Token>(&mut self, lease: &mut LeaseState, tokens: &[T], verified_len: i64) -> Result<()> {
        self.settle(lease, false);
        let published = self.node(lease.node).end();
        let id = lease.id;
        if !lease.arriving.is_empty() {
            return Err(Error::Protocol(format!(
                "lease {id} still loads ({} transfers); it may publish when they end",
                lease.arriving.len()
            )));
        }
        if tokens.len() < published {
            return Err(Error::Protocol(format!(
                "lease {id} published {published} tokens already, got only {}",
                tokens.len()
            )));
        }
        let verified = usize::try_from(verified_len).unwrap_or(usize::MAX);
        if verified > tokens.len() {
            return Err(Error::Protocol(format!(
                "{verified_len} tokens are said to be verified, got {}",
                tokens.len()
            )));
        }
        self.check_published(lease, tokens, verified)?;
        check_tokens(tokens, published)?;
        let whole = tokens.len() / self.page_size - published / self.page_size;
        for (i, spec) in self.config.components.iter().enumerate() {
            let owned = lease.owned[i].len();
            if self.rules[i].keeps_pages && whole > owned {
                return Err(Error::Protocol(format!(
                    "lease {id} reserved {owned} pages of {} beyond {published}, needs {whole}",
                    spec.name
                )));
            }
        }
        Ok(())
    }

    /// Compare with the path, but for the first `verified` tokens; the first difference is named.
    fn check_published<T: Token>(&self, lease: &LeaseState, tokens: &[T], verified: usize) -> Result<()> {
        let mut first_difference = None;
        for at in self.up(lease.node).take_while(|at| self.node(*at).end() > verified) {
            let start = self.node(at).start();
            let begin = start.max(verified);
            let known = &self.tokens_of(at)[begin - start..];
            let equal = equal_prefix(known, &tokens[begin..begin + known.len()]);
            if equal < known.len() {
                first_difference = Some((begin + equal, known[equal]));
            }
        }
        match first_difference {
            None => Ok(()),
            Some((position, known)) => Err(Error::Protocol(format!(
                "lease {} holds token {known} at position {position}, got {}",
                lease.id,
                tokens[position].into()
            ))),
        }
    }

    /// Publish. *Caller guarantees*: `check` passed.
    pub fn insert<T: Token>(
        &mut self,
        lease: &mut LeaseState,
        tokens: &[T],
        mark: bool,
        is_final: bool,
    ) -> Inserted {
        let page = self.page_size;
        let begin = self.node(lease.node).end();
        let end = tokens.len() / page * page;
        let mut done = Inserted { published: end, ..Inserted::default() };
        let mut node = self.overlap(lease, tokens, end, &mut done);
        done.new_tokens = end - self.node(node).end();
        if done.new_tokens > 0 {
            node = self.grow(lease, node, tokens, end);
        }
        if end > begin {
            self.stand_at(lease, node);
            self.touch(node, lease.turn);
            self.note_use(node, lease.priority, end);
        }
        if mark && !self.node(node).is_root() {
            if tokens.len() == end {
                self.leave_states(lease, node, is_final, &mut done);
            }
            if end > begin || !done.states.is_empty() {
                self.node_mut(node).set_mark();
            }
        }
        if end > begin {
            self.drop_unneeded_windows(lease, node);
        }
        if mark {
            self.after_use(node);
        }
        done
    }

    /// Follow what the tree already has of the tokens, settling who owns each slot.
    ///
    /// ```text
    /// lease owns     [ s0 s1 | s2 s3 | s4 s5 ]
    /// tree           [ d0 d1 | ----- ]              on the device | known, no device payload
    /// outcome          freed | adopted | new leaf
    /// ```
    fn overlap<T: Token>(
        &mut self,
        lease: &mut LeaseState,
        tokens: &[T],
        end: usize,
        done: &mut Inserted,
    ) -> NodeIdx {
        let mut node = lease.node;
        while self.node(node).end() < end {
            let Some((mut child, equal)) = self.step(node, tokens, self.node(node).end(), end) else { break };
            if equal < self.node(child).len() {
                child = self.split(child, equal / self.page_size);
            }
            let child = self.cut_at_frontier(child, end);
            let has = |i: &usize| self.held(child, *i).on_device();
            let is_there = match self.prefixes.is_empty() {
                true => (0..self.num_components).all(|i| has(&i)),
                false => self.prefixes.iter().all(has),
            };
            if is_there {
                done.duplicate_tokens += self.node(child).len();
            } else {
                done.adopted_tokens += self.node(child).len();
            }
            self.hand_over_all(lease, child, end);
            node = child;
        }
        node
    }

    /// A node that a window's edge runs through, and that lacks its payload, is cut there.
    fn cut_at_frontier(&mut self, child: NodeIdx, end: usize) -> NodeIdx {
        let mut child = child;
        for i in 0..self.num_components {
            let rule = &self.rules[i];
            let edge = rule.span(end);
            let node = self.node(child);
            let is_inside = rule.keeps_pages && node.start() < edge && edge < node.end();
            if is_inside && !self.held(child, i).on_device() {
                child = self.split(child, (edge - node.start()) / self.page_size);
            }
        }
        child
    }

    fn hand_over_all(&mut self, lease: &mut LeaseState, node: NodeIdx, end: usize) {
        for i in 0..self.num_components {
            if self.rules[i].keeps_pages {
                self.hand_over(lease, node, i, end);
            }
        }
    }

    /// The lease's slots of this node's pages: to the tree if it lacks them, else freed.
    fn hand_over(&mut self, lease: &mut LeaseState, node: NodeIdx, component: usize, end: usize) {
        let slots = lease.owned[component].take_front(self.num_slots(node, component));
        let is_wanted = self.node(node).start() >= self.rules[component].span(end);
        if is_wanted && !self.held(node, component).on_device() {
            self.attach(node, component, Tier::Device, slots, Cause::Insert);
        } else {
            self.free(component, Tier::Device, slots);
        }
    }

    /// New nodes for the rest, cut where a window begins: before it a tombstone.
    fn grow<T: Token>(&mut self, lease: &mut LeaseState, node: NodeIdx, tokens: &[T], end: usize) -> NodeIdx {
        let mut node = node;
        let begin = self.node(node).end();
        let paged = self.rules.iter().filter(|rule| rule.keeps_pages);
        let cuts: BTreeSet<usize> =
            paged.map(|rule| rule.span(end)).filter(|edge| begin < *edge && *edge < end).collect();
        for cut in cuts.into_iter().chain([end]) {
            node = self.add_child(node, &T::narrow(&tokens[self.node(node).end()..cut]));
            self.node_mut(node).set_uses(1);
            self.note_use(node, lease.priority, end);
            self.turns.own(node, self.nodes[node as usize].end(), lease.turn);
            self.hand_over_all(lease, node, end);
        }
        node
    }

    /// Attach the states at the end: at release the private slots, before it copies of them.
    fn leave_states(&mut self, lease: &mut LeaseState, node: NodeIdx, is_final: bool, done: &mut Inserted) {
        for i in 0..self.num_components {
            let Some(private) = lease.states[i] else { continue };
            if self.rules[i].keeps_pages || lease.has_claim(i) {
                continue;
            }
            if self.held(node, i).on_device() || self.node(node).incoming(i, Tier::Device).is_some() {
                continue;
            }
            let source_slots = Slots::one(private);
            if is_final {
                lease.states[i] = None;
                self.attach(node, i, Tier::Device, source_slots, Cause::Insert);
                let tick = self.tick;
                self.upper_mut(node, i).used = tick;
                done.states.push(i);
                continue;
            }
            if self.pools.num_free(i, Tier::Device) == 0 {
                self.make_room(i, Tier::Device, 1);
            }
            if self.pools.num_free(i, Tier::Device) == 0 {
                self.counters.states_refused += 1;
                continue;
            }
            let target_slots = self.pools.allocate(i, Tier::Device, 1);
            let part = Part { node, target: Some(target_slots.clone()), num_slots: 1 };
            let ticket = self.open_ticket(Kind::Leave, i, vec![part], false);
            self.begin_claim(lease, i, ticket, private);
            self.actions.push(Action::Copy {
                ticket,
                component: i,
                source: Tier::Device,
                source_slots,
                target: Tier::Device,
                target_slots,
            });
            done.tickets.push(ticket);
            done.states.push(i);
        }
    }

    /// Window payload that this lease published and that no mark needs is dropped at once.
    fn drop_unneeded_windows(&mut self, lease: &LeaseState, last: NodeIdx) {
        for i in 0..self.num_components {
            let rule = &self.rules[i];
            if !rule.keeps_pages || rule.is_prefix {
                continue;
            }
            let mut needed_from = rule.span(self.node(last).end());
            let own: Vec<NodeIdx> =
                self.up(last).take_while(|at| self.node(*at).end() > lease.base).collect();
            for at in own {
                let node = self.node(at);
                if at != last && (node.mark() || self.has_fork(at)) {
                    needed_from = needed_from.min(self.rules[i].span(node.end()));
                }
                if node.end() <= needed_from {
                    self.drop_window(at, i);
                }
            }
        }
    }

    fn drop_window(&mut self, node: NodeIdx, component: usize) {
        let place = self.node(node);
        let is_pinned = place.pins(Tier::Device) > 0 || place.pins(Tier::Host) > 0;
        if is_pinned || place.num_locks(component) > 0 {
            return;
        }
        self.detach(node, component, Tier::Device, Cause::Window);
        self.detach(node, component, Tier::Host, Cause::Window);
    }

    // ---- release -------------------------------------------------------------------------------
    /// Free what the lease still owns and drop its locks. It must not be in the table any more.
    pub fn end(&mut self, lease: &mut LeaseState) {
        for i in 0..self.num_components {
            let owned = std::mem::take(&mut lease.owned[i]);
            self.free(i, Tier::Device, owned);
        }
        self.drop_states(lease);
        self.leave_strays(lease);
        self.node_mut(lease.node).hold(|busy| busy.holders -= 1);
        let locks = std::mem::take(&mut lease.locks);
        self.unlock_all(&locks);
        // As old as the end, so that depth settles which goes first.
        self.touch_spare_marks(lease.node, lease.turn);
        self.turns.close(lease.turn);
        self.offer(lease.node);
        self.soil(lease.node);
        self.doubt(lease.node);
    }

    /// Refresh the recency of what a request that ends at `node` uses, per component.
    ///
    /// A path needs only its end, since the parent inherits it when the last child leaves; and where the
    /// end is below L1, what stands between, since nothing will leave L1 there. A window refreshes its
    /// own nodes, a checkpoint the one state that is there.
    pub fn touch(&mut self, node: NodeIdx, turn: TurnIdx) {
        for i in 0..self.num_components {
            self.touch_component(node, i, turn);
        }
        self.offer(node);
    }

    /// Have a mark at `node` and the spare ones on the way to it equally fresh: these insure what lies behind them.
    pub fn touch_spare_marks(&mut self, node: NodeIdx, turn: TurnIdx) {
        let spacing = self.config.mark_spacing;
        if spacing == 0 {
            return;
        }
        let mut at = node;
        while !self.node(at).is_root() {
            let place = self.node(at);
            let is_its = at == node || place.end() % spacing == 0;
            let (is_touched, parent) = (place.mark() && is_its, place.parent);
            for i in (0..self.num_components).filter(|_| is_touched) {
                if !self.rules[i].is_prefix {
                    self.touch_component(at, i, turn);
                }
            }
            at = parent;
        }
    }

    fn touch_component(&mut self, node: NodeIdx, component: usize, turn: TurnIdx) {
        let rule = &self.rules[component];
        let (is_prefix, keeps_pages) = (rule.is_prefix, rule.keeps_pages);
        let first = rule.span(self.node(node).end());
        let tick = self.tick;
        let mut at = node;
        while !self.node(at).is_root() {
            self.upper_mut(at, component).used = tick;
            self.own(at, turn);
            let is_last = match is_prefix {
                true => self.held(at, component).on_device(),
                false => !keeps_pages || self.node(at).start() <= first,
            };
            if is_last {
                break;
            }
            at = self.node(at).parent;
        }
    }
}
