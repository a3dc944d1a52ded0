//! Walk, vote, and what an L3 probe asks: all that reads the tree.

use std::collections::{BTreeMap, BTreeSet};

use smallvec::SmallVec;

use crate::error::{Error, Result};
use crate::forest::Forest;
use crate::interface::{Answers, Cause, Namespace, PageKeys, ProbeResult, StoreQuery, Tier, TierTokens};
use crate::keys::{chain_links, namespace_seed, Key};
use crate::leases::Origins;
use crate::node::{Held, NodeIdx};
use crate::tokens::{equal_prefix, Token};

/// The longest path of equal pages.
#[derive(Debug, Default)]
pub struct Walk {
    /// Every candidate of the vote as (node, end), shallowest first.
    pub stops: SmallVec<[(NodeIdx, usize); 8]>,
    /// Tokens matched of the last stop's node, if the match ends inside of it.
    pub inside: usize,
    pub length: usize,
}

impl Walk {
    /// The nodes matched whole.
    pub fn path(&self) -> &[(NodeIdx, usize)] {
        let whole = self.stops.len() - usize::from(self.inside > 0);
        &self.stops[..whole]
    }

    /// The node that the match ends inside of, if it does.
    pub fn last(&self) -> Option<NodeIdx> {
        self.stops.last().filter(|_| self.inside > 0).map(|(node, _)| *node)
    }
}

/// The deepest stop that all accept, and the deepest that the prefix components accept; counted from
/// one, 0 for none.
#[derive(Debug, Clone, Copy, Default)]
pub struct Vote {
    pub num_stops: usize,
    pub num_prefix_stops: usize,
}

/// Residency in any tier counts.
pub fn anywhere(held: Held) -> bool {
    held.fastest().is_some()
}

/// Longest length that may be reused: whole pages, with one token left to compute if `cap`.
pub fn match_limit(num_tokens: usize, page_size: usize, cap: bool) -> usize {
    let usable = num_tokens.saturating_sub(usize::from(cap));
    usable / page_size * page_size
}

impl Forest {
    /// The child of `node` that has the page at `position`, and how many tokens are equal from there.
    pub fn step<T: Token>(
        &self,
        node: NodeIdx,
        tokens: &[T],
        position: usize,
        limit: usize,
    ) -> Option<(NodeIdx, usize)> {
        let place = self.node(node);
        let page = self.page_size;
        if place.is_leaf() {
            return None;
        }
        let child = match self.only_child(node) {
            Some(child) => child,
            None => {
                let first = T::narrow(&tokens[position..position + page]);
                self.children.find(self.nodes(), &self.tokens, node, &first)?
            }
        };
        let known = self.tokens_of(child);
        let length = known.len().min(limit - position);
        let equal = equal_prefix(&known[..length], &tokens[position..position + length]) / page * page;
        (equal > 0).then_some((child, equal))
    }

    /// Follow `tokens[..limit]` down from a namespace's root. Reads only.
    pub fn walk<T: Token>(&self, namespace: &Namespace, tokens: &[T], limit: usize) -> Walk {
        let mut found = Walk::default();
        let Some(root) = self.roots.get(namespace) else { return found };
        let mut node = *root;
        while found.length < limit {
            let Some((child, equal)) = self.step(node, tokens, found.length, limit) else { break };
            found.length += equal;
            found.stops.push((child, found.length));
            if equal < self.node(child).len() {
                found.inside = equal;
                break;
            }
            node = child;
        }
        found
    }

    /// Let every component judge every stop.
    ///
    /// The result is the greatest common legal endpoint, not the least of each component's own.
    pub fn vote(&self, stops: &[(NodeIdx, usize)], has: impl Fn(NodeIdx, usize) -> bool) -> Vote {
        let mut best = Vote::default();
        self.judge(stops, has, |position, is_legal| {
            best.num_prefix_stops = position + 1;
            if is_legal {
                best.num_stops = position + 1;
            }
        });
        best
    }

    /// Tell of each stop that the prefix components accept, and whether all others do, too.
    pub fn judge(
        &self,
        stops: &[(NodeIdx, usize)],
        has: impl Fn(NodeIdx, usize) -> bool,
        mut tell: impl FnMut(usize, bool),
    ) {
        let mut states: SmallVec<[_; 2]> = self.rules.iter().map(|rule| rule.validator()).collect();
        for (position, (at, end)) in stops.iter().enumerate() {
            let node = self.node(*at);
            let (mut all, mut prefixes) = (true, true);
            // No short cut: a stateful validator has to see every node.
            for (i, rule) in self.rules.iter().enumerate() {
                let accepts = rule.vote(&mut states[i], has(*at, i), node, *end);
                all &= accepts;
                prefixes &= accepts || !rule.is_prefix;
            }
            if !prefixes {
                return;
            }
            tell(position, all);
        }
    }

    /// Walk and vote for a request. Tokens that the tree does not know are checked here.
    pub fn find<T: Token>(&self, tokens: &[T], namespace: &Namespace, cap: bool) -> Result<(Walk, Vote)> {
        let limit = match_limit(tokens.len(), self.page_size, cap);
        let found = self.walk(namespace, tokens, limit);
        check_tokens(tokens, found.length)?;
        let verdict = self.vote(&found.stops, |node, i| anywhere(self.held(node, i)));
        Ok((found, verdict))
    }

    pub fn origins(&self, stops: &[(NodeIdx, usize)]) -> Origins {
        let mut origins = Origins {
            stops: Vec::with_capacity(stops.len()),
            tiers: Vec::with_capacity(stops.len() * self.num_components),
        };
        for (node, end) in stops {
            origins.stops.push((self.node(*node).start, *end as u32));
            origins.tiers.extend((0..self.num_components).map(|i| self.held(*node, i).fastest()));
        }
        origins
    }

    /// A vote as the caller sees it, and where the payload of its stops lies.
    pub fn describe(&self, found: &Walk, verdict: Vote) -> (ProbeResult, Origins) {
        let end_of = |num: usize| if num > 0 { found.stops[num - 1].1 } else { 0 };
        let boundary = end_of(verdict.num_stops);
        let deepest = end_of(verdict.num_prefix_stops);
        let origins = self.origins(&found.stops[..verdict.num_stops]);
        let (by_component, source) = self.sources(&origins, boundary);
        let fork = (deepest > boundary).then_some(deepest);
        (ProbeResult { boundary, walked: found.length, source, by_component, fork }, origins)
    }

    /// Where the tokens of `[0, boundary)` come from: per component, and for the request.
    pub fn sources(&self, origins: &Origins, boundary: usize) -> (Vec<TierTokens>, TierTokens) {
        let by_component: Vec<TierTokens> =
            (0..self.num_components).map(|i| self.component_sources(i, origins, boundary)).collect();
        let primary = self.prefixes.first().copied().unwrap_or(0);
        let mut source = by_component[primary];
        // Tokens before a window need no payload at all; they count with the fastest tier.
        source.0[0] += boundary - source.total();
        (by_component, source)
    }

    fn component_sources(&self, component: usize, origins: &Origins, boundary: usize) -> TierTokens {
        let rule = &self.rules[component];
        let mut tokens = TierTokens::default();
        let first = if rule.keeps_pages { rule.span(boundary) } else { 0 };
        for (at, (start, stop)) in origins.stops.iter().enumerate().rev() {
            let (start, stop) = (*start as usize, *stop as usize);
            let tier = origins.tiers[at * self.num_components + component];
            if !rule.keeps_pages {
                if let (true, Some(tier)) = (stop == boundary, tier) {
                    tokens.0[tier as usize] = boundary;
                }
                continue;
            }
            if stop <= first {
                break;
            }
            let (begin, end) = (start.max(first), stop.min(boundary));
            if let (true, Some(tier)) = (end > begin, tier) {
                tokens.0[tier as usize] += end - begin;
            }
        }
        tokens
    }

    // ---- the L3 probe --------------------------------------------------------------------------
    /// Which pages to ask L3 for: those that could move the boundary and are not in L1 or L2.
    ///
    /// The same limit as the match, so a probe can never promise a boundary that a match cannot take.
    pub fn store_query<T: Token>(
        &mut self,
        tokens: &[T],
        namespace: &Namespace,
        cap: bool,
    ) -> Result<StoreQuery> {
        let limit = match_limit(tokens.len(), self.page_size, cap);
        if !self.config.has_store || limit == 0 {
            check_tokens(tokens, 0)?;
            return Ok(Vec::new());
        }
        let found = self.walk(namespace, tokens, limit);
        check_tokens(tokens, found.length)?;
        let links = self.links_along(&found, tokens, namespace, limit);
        let mut query = Vec::new();
        for i in 0..self.num_components {
            let covered = self.covered_pages(i, &found, links.len());
            let mut wanted = PageKeys::default();
            for (index, link) in links.iter().enumerate().filter(|(index, _)| !covered[*index]) {
                wanted.indices.push(index as i64);
                wanted.keys.push(self.key_of(i, link));
            }
            if !wanted.indices.is_empty() {
                query.push((i, wanted));
            }
        }
        Ok(query)
    }

    /// Which pages' payload L1 or L2 has.
    fn covered_pages(&self, component: usize, found: &Walk, num_pages: usize) -> Vec<bool> {
        let page = self.page_size;
        let mut covered = vec![false; num_pages];
        for (at, end) in &found.stops {
            let held = self.held(*at, component);
            if !held.on_device() && !held.in_host() {
                continue;
            }
            if self.rules[component].keeps_pages {
                covered[self.node(*at).start() / page..end / page].fill(true);
            } else if *end == self.node(*at).end() {
                covered[end / page - 1] = true;
            }
        }
        covered
    }

    /// The token chain of `tokens[..limit]`, as far as possible from the tree's own memory.
    fn links_along<T: Token>(
        &mut self,
        found: &Walk,
        tokens: &[T],
        namespace: &Namespace,
        limit: usize,
    ) -> Vec<Key> {
        let page = self.page_size;
        let mut links = Vec::with_capacity(limit / page);
        for (node, end) in &found.stops {
            let count = (end - self.node(*node).start()) / page;
            links.extend_from_slice(&self.links(*node)[..count]);
        }
        let last = match links.last() {
            Some(link) => *link,
            None => namespace_seed(&self.config.identity, namespace),
        };
        chain_links(last, &T::narrow(&tokens[links.len() * page..limit]), page, &mut links);
        links
    }

    /// Take over what a probe found: stubs for pages only L3 has, beliefs dropped where wrong.
    pub fn learn(&mut self, tokens: &[i32], answers: &Answers, namespace: &Namespace) {
        if !self.config.has_store {
            return; // it was detached while it was asked
        }
        let page = self.page_size;
        let mut reach = tokens.len() / page;
        for i in self.prefixes.clone() {
            reach = reach.min(first_missing(&answers[i], reach));
        }
        let mut asked = 0;
        let mut there = 0;
        for (index, is_there) in answers.iter().flatten() {
            asked = asked.max(index + 1);
            if *is_there {
                there = there.max(index + 1);
            }
        }
        if reach.min(there) > 0 {
            self.root(namespace);
            self.extend(namespace, tokens, reach.min(there) * page);
        }
        let limit = (tokens.len() / page).min(asked) * page;
        if !self.roots.contains_key(namespace) {
            return;
        }
        for index in self.edges(&self.walk(namespace, tokens, limit), answers) {
            self.cut_at(namespace, tokens, index * page);
        }
        let found = self.walk(namespace, tokens, limit);
        for (node, _) in found.path() {
            for (i, answer) in answers.iter().enumerate() {
                let (start, end) = (self.node(*node).start(), self.node(*node).end());
                let page_of = if self.rules[i].keeps_pages { start } else { end - 1 } / page;
                let Some(verdict) = answer.get(&page_of).copied() else { continue };
                let is_beyond = verdict && start >= reach * page && self.rules[i].is_prefix;
                if is_beyond || self.node(*node).incoming(i, Tier::Store).is_some() {
                    continue;
                }
                let cause = if verdict { Cause::Probe } else { Cause::Missing };
                self.set_stored(*node, i, verdict, cause);
            }
            self.soil(*node);
        }
    }

    /// Make the topology reach `limit`; new nodes carry nothing yet.
    fn extend(&mut self, namespace: &Namespace, tokens: &[i32], limit: usize) {
        let found = self.walk(namespace, tokens, limit);
        if found.length >= limit {
            return;
        }
        let node = match found.last() {
            Some(last) => self.split(last, found.inside / self.page_size),
            None => match found.stops.last() {
                Some((node, _)) => *node,
                None => self.root(namespace),
            },
        };
        self.add_child(node, &tokens[found.length..limit]);
    }

    /// Page indices inside nodes at which an answer changes, so that nodes stay uniform.
    fn edges(&self, known: &Walk, answers: &Answers) -> BTreeSet<usize> {
        let page = self.page_size;
        let mut cuts = BTreeSet::new();
        for (node, end) in &known.stops {
            let (first, last) = (self.node(*node).start() / page, end / page);
            for (i, answer) in answers.iter().enumerate() {
                if !self.rules[i].keeps_pages {
                    // A state belongs to a node's end; it is worth a cut only where one was found.
                    let found = answer.range(first..last).filter(|(_, is_there)| **is_there);
                    cuts.extend(found.map(|(index, _)| index + 1));
                    continue;
                }
                let belief = self.held(*node, i).stored();
                let at = |index: usize| answer.get(&index).copied().unwrap_or(belief);
                cuts.extend((first + 1..last).filter(|index| at(*index) != at(index - 1)));
            }
            // What lies behind the last page that was asked for keeps the belief it has.
            let differs = |(i, answer): (usize, &BTreeMap<usize, bool>)| {
                let belief = self.held(*node, i).stored();
                answer.get(&(last - 1)).is_some_and(|is_there| *is_there != belief)
            };
            if *end < self.node(*node).end() && answers.iter().enumerate().any(differs) {
                cuts.insert(last);
            }
        }
        cuts
    }

    /// Make a node end at `position` on the path of `tokens`.
    fn cut_at(&mut self, namespace: &Namespace, tokens: &[i32], position: usize) {
        let found = self.walk(namespace, tokens, position);
        if let (Some(last), true) = (found.last(), found.length == position) {
            self.split(last, found.inside / self.page_size);
        }
    }
}

/// First page index that L3 does not have. Pages of a path after it are out of reach.
fn first_missing(answer: &BTreeMap<usize, bool>, default: usize) -> usize {
    answer.iter().find(|(_, is_there)| !**is_there).map_or(default, |(index, _)| *index)
}

/// Refuse an id that is negative or over 31 bits. Args: `known`: so many leading tokens equal the tree's.
pub fn check_tokens<T: Token>(tokens: &[T], known: usize) -> Result<()> {
    let rest = &tokens[known..];
    let is_wrong = |token: i64| !(0..=i64::from(i32::MAX)).contains(&token);
    if !rest.iter().fold(false, |any, token| any | is_wrong((*token).into())) {
        return Ok(());
    }
    let offset = rest.iter().position(|token| is_wrong((*token).into())).unwrap_or(0);
    let (position, token) = (known + offset, rest[offset].into());
    let problem = if token < 0 { "is negative".to_owned() } else { format!("is over {}", i32::MAX) };
    Err(Error::Value(format!("token {token} at position {position} {problem}")))
}
