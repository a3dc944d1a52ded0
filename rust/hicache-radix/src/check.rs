//! What a tree refuses to be built with.

use crate::error::{Error, Result};
use crate::interface::{TreeConfig, MAX_PAGE_SIZE};

/// What the tree itself relies on; the YAML's own checks are stricter and name the key.
pub fn check(config: &TreeConfig) -> Result<()> {
    let names: Vec<&str> = config.components.iter().map(|spec| spec.name.as_str()).collect();
    let mut problems = Vec::new();
    if names.is_empty() {
        problems.push("components: a model needs at least one".to_owned());
    }
    if (1..names.len()).any(|at| names[..at].contains(&names[at])) {
        let quoted: Vec<String> = names.iter().map(|name| format!("'{name}'")).collect();
        problems.push(format!("components: names must differ, got [{}]", quoted.join(", ")));
    }
    if !(1..=MAX_PAGE_SIZE).contains(&config.page_size) {
        problems.push(format!("page_size: {} is not within 1 to {MAX_PAGE_SIZE}", config.page_size));
    }
    for (name, slots) in names.iter().zip(&config.device_slots) {
        if *slots < 1 {
            problems.push(format!("device_slots: {name} needs at least one slot"));
        }
    }
    let most = u32::MAX as usize - 1;
    if config.device_slots.iter().chain(&config.host_slots).any(|slots| *slots > most) {
        problems.push(format!("device_slots, host_slots: at most {most} slots a pool"));
    }
    if config.device_slots.len() != names.len() || config.host_slots.len() != names.len() {
        problems.push("device_slots, host_slots: one number a component".to_owned());
    }
    for (tier, units, costs, slots) in [
        ("host", config.host_units, &config.host_costs, &config.host_slots),
        ("device", config.device_units, &config.device_costs, &config.device_slots),
    ] {
        let holds = |(cost, slots): (&usize, &usize)| *cost == 0 || *slots == units / cost;
        if costs.len() != names.len() || !costs.iter().zip(slots).all(holds) {
            problems
                .push(format!("{tier}_slots: what {units} units hold, at one cost a component, expected"));
        }
    }
    if config.has_store && config.host_slots.iter().all(|slots| *slots == 0) {
        problems.push("has_store: pages travel to L3 through L2, which has no slots".to_owned());
    }
    if problems.is_empty() {
        Ok(())
    } else {
        Err(Error::Config(problems))
    }
}
