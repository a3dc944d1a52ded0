//! One turn of a chat behind a history of so many tokens, call by call: `cargo bench`.
//!
//! What grows with the history is the match, which compares it once, and the list of slots, which copies
//! it once. Insert, lock and release must not.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion};
use hicache_radix::interface::{ComponentSpec, Namespace, ReuseRule, Tier, TreeConfig};
use hicache_radix::TreeCore;

const NEW_TOKENS: usize = 512;
const HISTORIES: [usize; 4] = [2_048, 16_384, 131_072, 1_048_576];

/// A chat whose history is in the tree.
struct Chat {
    core: TreeCore,
    history: usize,
    tokens: Vec<i32>,
    turn: i32,
}

impl Chat {
    fn new(history: usize) -> Self {
        let components = vec![
            ComponentSpec::new("full", ReuseRule::Path, 0),
            ComponentSpec::new("swa", ReuseRule::Window, 1024),
        ];
        let slots = vec![history + 4 * NEW_TOKENS; 2];
        let mut core =
            TreeCore::new(TreeConfig::on_device(1, components, slots)).expect("a sound configuration");
        let tokens: Vec<i32> = (0..history as i32).map(|at| at.wrapping_mul(7919) & 0xffff).collect();
        let lease = core.open(&tokens, &Namespace::default(), false, 50, None).expect("room").lease as i64;
        assert!(core.reserve(lease, history as i64).expect("open").short.is_empty());
        core.release(lease, Some(&tokens), 0).expect("reserved");
        Self { core, history, tokens, turn: 0 }
    }

    /// Serve a turn, and make the tree forget it; returns how long each call took.
    fn serve(&mut self) -> [Duration; 4] {
        self.turn += 1;
        self.tokens.truncate(self.history);
        let new = (0..NEW_TOKENS as i32).map(|at| 1_000_000 + self.turn * 1000 + at);
        self.tokens.extend(new);
        let begin = Instant::now();
        let lease =
            self.core.open(&self.tokens, &Namespace::default(), false, 50, None).expect("sound").lease as i64;
        let matched = Instant::now();
        let reserved = self.core.reserve(lease, NEW_TOKENS as i64).expect("open");
        assert!(reserved.short.is_empty());
        black_box(self.core.lease_slots(lease, 0).expect("open"));
        let listed = Instant::now();
        let done = self.core.insert(lease, &self.tokens, true, self.history as i64).expect("reserved");
        assert_eq!(done.new_tokens, NEW_TOKENS);
        let inserted = Instant::now();
        self.core.release(lease, None::<&[i32]>, 0).expect("open");
        let released = Instant::now();
        self.core.make_room(0, Tier::Device, 4 * NEW_TOKENS as i64).expect("known");
        [matched - begin, listed - matched, inserted - listed, released - inserted]
    }
}

fn turns(criterion: &mut Criterion) {
    for (call, name) in ["match", "reserve and list slots", "insert", "release"].into_iter().enumerate() {
        let mut group = criterion.benchmark_group(name);
        group.sample_size(20).measurement_time(Duration::from_secs(2));
        for history in HISTORIES {
            let mut chat = Chat::new(history);
            group.bench_function(BenchmarkId::from_parameter(history), |bencher| {
                bencher.iter_custom(|turns| (0..turns).map(|_| chat.serve()[call]).sum());
            });
        }
    }
}

mod group {
    #![allow(missing_docs)] // of what the macro makes
    use super::turns;
    criterion::criterion_group!(benches, turns);
}

criterion::criterion_main!(group::benches);
