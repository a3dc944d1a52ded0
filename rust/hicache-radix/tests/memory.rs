//! What a tree keeps beyond the tokens, by an allocator that counts: bytes asked for, exact and the same each time.

use std::alloc::System;

use hicache_radix::interface::{ComponentSpec, Namespace, ReuseRule, TreeConfig};
use hicache_radix::TreeCore;
use stats_alloc::{Region, StatsAlloc, INSTRUMENTED_SYSTEM};

#[global_allocator]
static COUNTING: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const ID_BYTES: f64 = 4.0;
const NUM_SLOTS: usize = 40_000_000;

fn tree(has_all: bool, page_size: usize) -> TreeCore {
    let mut components = vec![ComponentSpec::new("full", ReuseRule::Path, 0)];
    if has_all {
        components.push(ComponentSpec::new("swa", ReuseRule::Window, 1024));
        components.push(ComponentSpec::new("mamba", ReuseRule::Checkpoint, 0));
    }
    let slots = vec![NUM_SLOTS / page_size; components.len()];
    TreeCore::new(TreeConfig::on_device(page_size, components, slots)).expect("a valid configuration")
}

/// Token ids that nobody guesses (a linear congruence).
struct Draw(u64);

impl Draw {
    fn tokens(&mut self, count: usize) -> Vec<i32> {
        let mut next = || {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) as i32 % 128_000
        };
        (0..count).map(|_| next()).collect()
    }
}

fn serve(core: &mut TreeCore, tokens: &[i32]) {
    let opened = core.open(tokens, &Namespace::default(), false, 50, None).expect("whole tokens");
    let (lease, lacking) = (opened.lease as i64, tokens.len() - opened.found.boundary);
    assert!(core.reserve(lease, lacking as i64).expect("an open lease").short.is_empty());
    core.release(lease, Some(tokens), 0).expect("an open lease");
    for ticket in core.in_flight() {
        core.commit(ticket as i64).expect("a state's copy");
    }
}

/// Leaves of two pages (64 tokens at page 1), a hundred under each shared prefix.
fn wide(core: &mut TreeCore, page: usize) {
    let (prefix_len, leaf_len) = if page == 1 { (256, 64) } else { (4 * page, 2 * page) };
    let mut draw = Draw(1);
    for _ in 0..200 {
        let prefix = draw.tokens(prefix_len);
        for _ in 0..100 {
            serve(core, &[&prefix[..], &draw.tokens(leaf_len)].concat());
        }
    }
}

/// Sessions that take turns, some 500 tokens each; 6,400 turns in all.
fn chats(core: &mut TreeCore, page: usize, num_turns: usize) {
    let turn_len = 500_usize.div_ceil(page) * page;
    let mut draw = Draw(1);
    let histories: Vec<Vec<i32>> = (0..6400 / num_turns).map(|_| draw.tokens(num_turns * turn_len)).collect();
    for turn in 1..=num_turns {
        for history in &histories {
            serve(core, &history[..turn * turn_len]);
        }
    }
}

/// Bytes for each node beyond the tokens' ids, and for each token with them.
fn measure(has_all: bool, page: usize, fill: impl Fn(&mut TreeCore, usize)) -> (f64, f64) {
    let region = Region::new(COUNTING);
    let mut core = tree(has_all, page);
    fill(&mut core, page);
    let change = region.change();
    let used = change.bytes_allocated as f64 - change.bytes_deallocated as f64;
    let views = core.snapshot();
    let (num_nodes, num_tokens) = (views.len(), views.iter().map(|view| view.tokens.len()).sum::<usize>());
    ((used - ID_BYTES * num_tokens as f64) / num_nodes as f64, used / num_tokens as f64)
}

/// One test, since all threads share the count.
#[test]
fn a_tree_keeps_no_more_than_so_many_bytes_a_node_and_a_token() {
    for (has_all, page, a_node, a_token) in
        [(false, 1, 175.0, 6.5), (false, 64, 175.0, 5.5), (true, 1, 275.0, 8.0), (true, 64, 275.0, 6.25)]
    {
        let found = measure(has_all, page, wide);
        println!("wide, all {has_all}, page {page}: {:.1} a node, {:.2} a token", found.0, found.1);
        assert!(found.0 <= a_node && found.1 <= a_token, "{found:?}");
        for num_turns in [9, 16, 25, 100] {
            let found = measure(has_all, page, |core, page| chats(core, page, num_turns));
            println!(
                "chats of {num_turns}, all {has_all}, page {page}: {:.1} a node, {:.2} a token",
                found.0, found.1
            );
            // A path alone is one node a chat.
            assert!(found.1 <= if has_all { 4.6 } else { 4.25 }, "{found:?}");
            assert!(!has_all || found.0 <= 300.0, "{found:?}");
        }
    }
}
