//! What an L1 cannot take even when it is empty: found out before anything leaves for it.

use crate::forest::Forest;
use crate::interface::Tier;
use crate::leases::LeaseState;
use crate::rules::Rule;

impl Forest {
    /// What the whole pools lack for the prompt with its mark, less what is free; empty if it fits.
    ///
    /// Without its mark it could not be reused, so it is not to displace what can. Path payload alone can be
    /// reused as far as it goes.
    pub fn never_fits(&self, lease: &LeaseState) -> Vec<(usize, usize)> {
        if self.rules.iter().all(|rule| rule.is_prefix) {
            return Vec::new();
        }
        let page = self.page_size;
        let end = lease.prompt_len.div_ceil(page) * page;
        // In one budget the state that it leaves is not to displace the prompt's own pages.
        let num_states = |i: usize| 1 + usize::from(self.pools.is_shared(i, Tier::Device));
        let needed = |(i, rule): (usize, &Rule)| match rule.keeps_pages {
            true => (end - rule.span(end)) / page,
            false => num_states(i),
        };
        let wanted: Vec<usize> = self.rules.iter().enumerate().map(needed).collect();
        let needs = self.pools.needs(&wanted, Tier::Device).into_iter().enumerate();
        needs
            .filter(|(i, needed)| *needed > self.pools.capacity(*i, Tier::Device))
            .map(|(i, needed)| (i, needed - self.pools.num_free(i, Tier::Device)))
            .collect()
    }

    /// Whether an L1 of one budget lacks room for `wanted` slots beside what the lease holds itself.
    ///
    /// Of what it locks only path payload is counted; windows may share their nodes with what can still leave.
    /// Whoever asks a component's own pool for more than there is gets all that it can give up.
    pub fn is_too_much(&self, lease: &LeaseState, wanted: &[usize]) -> bool {
        if !(0..wanted.len()).any(|i| self.pools.is_shared(i, Tier::Device)) {
            return false;
        }
        let published = self.node(lease.node).end() / self.page_size;
        let held = |i: usize| match &self.rules[i] {
            rule if !rule.keeps_pages => usize::from(lease.states[i].is_some()),
            rule => lease.owned[i].len() + if rule.is_prefix { published } else { 0 },
        };
        let together: Vec<usize> = wanted.iter().enumerate().map(|(i, more)| more + held(i)).collect();
        let mut needs = self.pools.needs(&together, Tier::Device).into_iter().enumerate();
        needs.any(|(i, needed)| needed > self.pools.capacity(i, Tier::Device))
    }
}
