//! Which calls are too brief to let other threads run meanwhile.

use crate::forest::Forest;
use crate::interface::Tier;

/// Comparing so many tokens takes 1 to 4 us.
const FEW_TOKENS: usize = 8192;
/// Hashing so many pages, or having as many nodes leave, takes some tens of us.
const FEW_PAGES: usize = 64;

impl Forest {
    /// Whether a call on so many tokens, of which the tree need not look at the known ones, takes microseconds
    /// at most.
    pub fn is_brief(&self, num_tokens: usize, num_known: i64) -> bool {
        let config = &self.config;
        let num_walked = num_tokens.saturating_sub(usize::try_from(num_known).unwrap_or(0));
        // What is copied down makes other nodes leave, and is hashed from the prompt's start where that is due.
        let has_below =
            config.has_store || config.emit_events || config.host_slots.iter().any(|slots| *slots > 0);
        num_walked <= FEW_TOKENS && (!has_below || num_tokens <= FEW_PAGES * config.page_size)
    }

    /// Whether nothing has to leave L1 for so many tokens more.
    pub fn has_room_for(&self, num_tokens: i64) -> bool {
        let num_pages = usize::try_from(num_tokens).map_or(0, |tokens| tokens / self.page_size + 1);
        (0..self.num_components).all(|i| {
            let wanted = if self.rules[i].keeps_pages { num_pages } else { 1 };
            self.pools.num_free(i, Tier::Device) >= wanted
        })
    }
}
