//! Random calls on every kind of model: nothing panics, and the audit stays clean.

use std::collections::BTreeMap;

use hicache_radix::actions::Action;
use hicache_radix::interface::{
    ComponentSpec, Eviction, Namespace, ReuseRule, Tier, TreeConfig, WritePolicy,
};
use hicache_radix::TreeCore;
use proptest::prelude::*;
use proptest::sample::select;

const PATH: ReuseRule = ReuseRule::Path;
const WINDOW: ReuseRule = ReuseRule::Window;
const CHECKPOINT: ReuseRule = ReuseRule::Checkpoint;

fn models() -> Vec<Vec<ReuseRule>> {
    vec![
        vec![PATH],
        vec![PATH, WINDOW],
        vec![PATH, CHECKPOINT],
        vec![PATH, WINDOW, CHECKPOINT],
        vec![WINDOW],
        vec![CHECKPOINT],
        vec![PATH, PATH, WINDOW, WINDOW],
    ]
}

fn configurations() -> impl Strategy<Value = TreeConfig> {
    let policies = [
        Eviction::Lru,
        Eviction::Lfu,
        Eviction::Fifo,
        Eviction::Mru,
        Eviction::Filo,
        Eviction::Slru,
        Eviction::Priority,
        Eviction::Tlru,
        Eviction::Session,
        Eviction::Adaptive,
    ];
    let writes = [WritePolicy::WriteThrough, WritePolicy::WriteThroughSelective, WritePolicy::WriteBack];
    (
        select(models()),
        select(vec![1usize, 2, 4, 16, 64]),
        (2usize..12, select(vec![0usize, 1, 2, 4, 8]), 1usize..6),
        (select(policies.to_vec()), select(writes.to_vec())),
        (any::<bool>(), any::<bool>(), any::<bool>(), 1usize..5),
    )
        .prop_map(|(rules, page_size, (device, host, states), (eviction, write), flags)| {
            let (by_leaf, has_store, remembers_all, window_pages) = flags;
            let components: Vec<ComponentSpec> = rules
                .iter()
                .enumerate()
                .map(|(i, rule)| ComponentSpec {
                    name: format!("part{i}"),
                    rule: rule.clone(),
                    window_tokens: (window_pages + i) * page_size / 2,
                    num_layers: 1,
                    bytes_per_token: 8,
                    state_bytes: 64,
                })
                .collect();
            // Every second time all share one budget of a tier, in which a slot of each takes more than one of the last.
            let costs: Vec<usize> = (1..=rules.len()).collect();
            let units = 2 * host;
            let is_shared = host % 2 == 0 && host > 0;
            let slots =
                |rule: &ReuseRule| if matches!(rule, ReuseRule::Checkpoint) { states } else { device };
            let shares_device = device % 2 == 0;
            let device_units = 3 * device;
            let device_slots = rules.iter().zip(&costs);
            let device_slots =
                device_slots
                    .map(|(rule, cost)| if shares_device { device_units / cost } else { slots(rule) });
            let device_slots = device_slots.collect();
            TreeConfig {
                device_units: if shares_device { device_units } else { 0 },
                device_costs: if shares_device { costs.clone() } else { vec![0; rules.len()] },
                host_slots: costs.iter().map(|cost| if is_shared { units / cost } else { host }).collect(),
                host_units: if is_shared { units } else { 0 },
                host_costs: if is_shared { costs } else { vec![0; rules.len()] },
                has_store: has_store && host > 0,
                max_stored_pages: if remembers_all { 1 << 20 } else { 3 },
                write,
                eviction,
                by_leaf,
                tail_tokens: page_size,
                mark_spacing: 2 * page_size,
                identity: b"test".to_vec(),
                emit_events: true,
                ..TreeConfig::on_device(page_size, components, device_slots)
            }
        })
}

struct Caller {
    core: TreeCore,
    page_size: usize,
    leases: Vec<(u64, Vec<i32>, usize)>,
    prompts: Vec<Vec<i32>>,
    choices: std::vec::IntoIter<u8>,
}

impl Caller {
    /// None when the choices are used up.
    fn pick(&mut self, bound: usize) -> Option<usize> {
        Some(self.choices.next()? as usize % bound.max(1))
    }

    fn prompt(&mut self) -> Option<Vec<i32>> {
        let from = self.pick(self.prompts.len())?;
        let mut tokens = self.prompts[from].clone();
        let keep = self.pick(tokens.len() / self.page_size + 1)?;
        tokens.truncate(keep * self.page_size);
        for _ in 0..self.pick(5)? {
            let letter = self.pick(3)? as i32;
            tokens.extend(vec![letter.min(1); self.page_size]);
            if letter == 2 {
                let at = tokens.len() - 1;
                tokens[at] = 2;
            }
        }
        let tail = self.pick(self.page_size + 1)?;
        tokens.extend(vec![1; tail]);
        self.prompts.push(tokens.clone());
        Some(tokens)
    }

    fn ticket(&mut self) -> Option<i64> {
        let tickets = self.core.in_flight();
        let at = self.pick(tickets.len() + 1)?;
        Some(tickets.get(at).map_or(9_999, |ticket| *ticket as i64))
    }

    /// One call. Refusals are results here; what matters is the audit after each of them.
    fn step(&mut self) -> Option<()> {
        let namespace =
            Namespace { salt: (self.pick(4)? == 0).then(|| b"salt".to_vec()), ..Default::default() };
        let num_components = self.core.config().components.len();
        match self.pick(14)? {
            0 | 1 if self.leases.len() < 4 => {
                let tokens = self.prompt()?;
                let cap = self.pick(4)? > 0;
                let priority = self.pick(101)? as u32;
                let opened = self.core.open(&tokens, &namespace, cap, priority, None).expect("no refusal");
                self.leases.push((opened.lease, tokens, 0));
            }
            2 => {
                let tokens = self.prompt()?;
                let query = self.core.store_query(&tokens, &namespace, true).expect("no refusal");
                let mut answers = vec![BTreeMap::new(); num_components];
                for (i, pages) in query {
                    for page in pages.indices {
                        answers[i].insert(page as usize, self.pick(4)? > 0);
                    }
                }
                self.core.learn(&tokens, &answers, &namespace).expect("no refusal");
            }
            3 => drop(self.core.persist()),
            4 => {
                let (component, wanted) = (self.pick(num_components)?, self.pick(14)? as i64);
                let tier = Tier::POOLED[self.pick(2)?];
                self.core.make_room(component, tier, wanted).expect("no refusal");
            }
            5..=7 => {
                let ticket = self.ticket()?;
                if self.pick(4)? > 0 {
                    let _ = self.core.commit(ticket);
                } else {
                    let (done, missing) = (self.pick(5)? as i64, self.pick(2)? == 0);
                    let _ = self.core.abort(ticket, done, missing);
                }
            }
            8 if self.pick(12)? == 0 => {
                self.core.reset();
                self.leases.clear();
            }
            _ if !self.leases.is_empty() => self.use_lease()?,
            _ => {}
        }
        Some(())
    }

    fn use_lease(&mut self) -> Option<()> {
        let at = self.pick(self.leases.len())?;
        let (lease, tokens, reserved) = self.leases[at].clone();
        let number = lease as i64;
        match self.pick(7)? {
            0 => drop(self.core.fetch(number)),
            1 => drop(self.core.load(number)),
            2 | 3 => {
                let num_tokens = self.pick(2 * self.page_size + 2)?;
                let short = self.core.reserve(number, num_tokens as i64).expect("no refusal").short;
                if short.is_empty() {
                    self.leases[at].2 += num_tokens;
                }
            }
            choice => {
                let boundary = self.core.settle(number, false).expect("no refusal").boundary;
                let mut tokens = tokens;
                let reach = boundary + reserved;
                tokens.resize(tokens.len().max(reach), 2);
                let end = if self.pick(5)? > 0 { reach } else { self.pick(tokens.len() + 1)? };
                self.leases[at].1 = tokens.clone();
                tokens.truncate(end);
                if choice < 6 {
                    let mark = self.pick(3)? > 0;
                    let _ = self.core.insert(number, &tokens, mark, 0);
                } else if self.core.release(number, Some(&tokens), 0).is_ok()
                    || self.core.release(number, None::<&[i32]>, 0).is_ok()
                {
                    self.leases.remove(at);
                }
            }
        }
        Some(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_sequence_of_calls_breaks_an_invariant(
        config in configurations(),
        choices in prop::collection::vec(any::<u8>(), 50..600),
    ) {
        let page_size = config.page_size;
        let core = TreeCore::new(config).expect("a sound configuration");
        let mut caller =
            Caller { core, page_size, leases: Vec::new(), prompts: vec![Vec::new()], choices: choices.into_iter() };
        while caller.step().is_some() {
            let findings = caller.core.audit();
            prop_assert!(findings.is_empty(), "{findings:?}");
        }
        // Everything can be given back.
        for (lease, _, _) in std::mem::take(&mut caller.leases) {
            caller.core.release(lease as i64, None::<&[i32]>, 0).expect("an open lease");
        }
        while let Some(ticket) = caller.core.in_flight().first() {
            caller.core.commit(*ticket as i64).expect("a ticket in flight");
        }
        prop_assert!(caller.core.audit().is_empty());
        prop_assert!(caller.core.snapshot().iter().all(|view| view.locks.iter().all(|count| *count == 0)));
    }
}

#[test]
fn bad_input_is_refused_and_changes_nothing() {
    let config = TreeConfig::on_device(2, vec![ComponentSpec::new("full", PATH, 0)], vec![8]);
    let mut core = TreeCore::new(config.clone()).expect("sound");
    let namespace = Namespace::default();
    assert!(core.open(&[1, -1, 2], &namespace, true, 50, None).is_err());
    assert_eq!(core.counters().get("matches"), None);
    let lease = core.open(&[1, 2, 3], &namespace, true, 50, None).expect("sound").lease as i64;
    assert!(core.reserve(lease, -1).is_err());
    assert!(core.reserve(lease, 3).expect("room").short.is_empty());
    assert!(core.insert(lease, &[1, 2, 3, 4, 5, 6], true, 0).is_err());
    assert!(core.insert(lease, &[1, -2], true, 0).is_err());
    let done = core.insert(lease, &[1, 2, 3], true, 0).expect("reserved");
    assert!(done.actions.iter().all(|action| matches!(action, Action::Free { .. })));
    assert!(core.insert(lease, &[1, 3, 3], true, 0).is_err());
    core.release(lease, None::<&[i32]>, 0).expect("open");
    assert!(core.release(lease, None::<&[i32]>, 0).is_err());
    assert!(core.commit(0).is_err());
    assert!(core.free_slots(0, Tier::Store).is_err());
    assert!(core.audit().is_empty());
    assert!(TreeCore::new(TreeConfig { page_size: 0, ..config }).is_err());
}
