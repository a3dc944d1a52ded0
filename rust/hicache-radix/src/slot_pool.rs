//! The free lists of all components in L1 and L2, and the budgets they draw on.

use crate::interface::{ReuseRule, Tier, TreeConfig};
use crate::slots::{Run, Slots};

/// Units of room in one tier: one pool's own, or shared by the pools of several components.
#[derive(Debug, Clone)]
pub struct Budget {
    /// Units in use; it follows `limit` as units come free.
    pub capacity: usize,
    pub limit: usize,
    pub num_free: usize,
    total: usize,
    /// Units of all slots that were handed out since their memory last went back: what the slots' memory takes.
    num_touched: usize,
}

impl Budget {
    fn new(total: usize) -> Self {
        Self { capacity: total, limit: total, num_free: total, total, num_touched: 0 }
    }

    /// Use fewer units, as far as they are free, or more. True once the limit is reached.
    pub fn approach_limit(&mut self) -> bool {
        if self.limit >= self.capacity {
            self.num_free += self.limit - self.capacity;
            self.capacity = self.limit;
        } else {
            let num_out = self.num_free.min(self.capacity - self.limit);
            self.num_free -= num_out;
            self.capacity -= num_out;
        }
        self.capacity == self.limit
    }
}

/// The pools of all components, by component and tier.
///
/// ```text
/// own budget      [ withheld by the limit | free, the top goes out first ]
/// shared budget   [ all free; how many may go out, the budget says       ]
///                 [ untouched               | touched, free now          ]
/// ```
#[derive(Debug, Default)]
pub struct Pools {
    lists: Vec<[FreeList; 2]>,
    /// By component and tier; a shared one stands at the first that draws on it.
    budgets: Vec<[Budget; 2]>,
    /// Units of a slot, by tier and component.
    costs: [Vec<usize>; 2],
    /// All components.
    each: Vec<usize>,
    /// Those that share the budget of L1, and that of L2.
    sharers: [Vec<usize>; 2],
}

impl Pools {
    /// Pools with all slots free. *Caller guarantees*: capacities fit 32 bits.
    pub fn new(config: &TreeConfig) -> Self {
        let each: Vec<usize> = (0..config.components.len()).collect();
        let sharers = [&config.device_costs, &config.host_costs].map(|costs| {
            let mut sharers: Vec<usize> = each.iter().copied().filter(|i| costs[*i] > 0).collect();
            // Where two go at the same time, what depends on a path before it: it cannot outlive it.
            sharers.sort_by_key(|i| matches!(config.components[*i].rule, ReuseRule::Path));
            sharers
        });
        let slots = |i: &usize| [config.device_slots[*i], config.host_slots[*i]];
        let mut budgets: Vec<[Budget; 2]> = each.iter().map(|i| slots(i).map(Budget::new)).collect();
        for (tier, units) in [config.device_units, config.host_units].into_iter().enumerate() {
            if let Some(first) = sharers[tier].first() {
                budgets[*first][tier] = Budget::new(units);
            }
        }
        Self {
            lists: each.iter().map(|i| slots(i).map(FreeList::new)).collect(),
            budgets,
            costs: [&config.device_costs, &config.host_costs]
                .map(|costs| costs.iter().map(|cost| (*cost).max(1)).collect()),
            each,
            sharers,
        }
    }

    /// Whether others draw on the same budget.
    pub fn is_shared(&self, component: usize, tier: Tier) -> bool {
        self.sharers.get(tier as usize).is_some_and(|sharers| sharers.contains(&component))
    }

    /// The components whose slots come out of the same budget.
    pub fn sharers(&self, component: usize, tier: Tier) -> &[usize] {
        if self.is_shared(component, tier) {
            &self.sharers[tier as usize]
        } else {
            &self.each[component..=component]
        }
    }

    /// What names the budget: the first that draws on it.
    pub fn purse(&self, component: usize, tier: Tier) -> usize {
        self.sharers(component, tier)[0]
    }

    pub fn budget(&self, component: usize, tier: Tier) -> &Budget {
        &self.budgets[self.purse(component, tier)][tier as usize]
    }

    pub fn budget_mut(&mut self, component: usize, tier: Tier) -> &mut Budget {
        let purse = self.purse(component, tier);
        &mut self.budgets[purse][tier as usize]
    }

    /// Units of one slot.
    pub fn cost(&self, component: usize, tier: Tier) -> usize {
        self.costs[tier as usize][component]
    }

    /// Free slots to ask for of each component, so that there is room for `wanted` of all together.
    ///
    /// Where a budget is shared all is asked for in slots of the cheapest, which waste least. What fits the units
    /// that are free, or all there are, is not to fail as slots are rounded up: it is as many as those units hold.
    pub fn needs(&self, wanted: &[usize], tier: Tier) -> Vec<usize> {
        let mut needed = wanted.to_vec();
        let sharers = &self.sharers[tier as usize];
        let Some(cheapest) = sharers.iter().copied().min_by_key(|i| self.cost(*i, tier)) else {
            return needed;
        };
        let units: usize = sharers.iter().map(|i| wanted[*i] * self.cost(*i, tier)).sum();
        let (budget, cost) = (self.budget(cheapest, tier), self.cost(cheapest, tier));
        let mut slots = units.div_ceil(cost);
        for there in [budget.num_free, budget.capacity] {
            if units <= there {
                slots = slots.min(there / cost);
            }
        }
        for i in sharers {
            needed[*i] = if *i == cheapest { slots } else { 0 };
        }
        needed
    }

    /// How many slots there are, in use or not.
    pub fn total(&self, component: usize, tier: Tier) -> usize {
        self.lists[component][tier as usize].total
    }

    /// Slots that the room in use holds, whoever has it.
    pub fn capacity(&self, component: usize, tier: Tier) -> usize {
        self.budget(component, tier).capacity / self.cost(component, tier)
    }

    pub fn num_free(&self, component: usize, tier: Tier) -> usize {
        self.budget(component, tier).num_free / self.cost(component, tier)
    }

    /// Slots handed out.
    pub fn num_held(&self, component: usize, tier: Tier) -> usize {
        let list = &self.lists[component][tier as usize];
        list.total - list.height
    }

    /// Take `count` slots. *Caller guarantees*: so many are free.
    pub fn allocate(&mut self, component: usize, tier: Tier, count: usize) -> Slots {
        debug_assert!(count <= self.num_free(component, tier));
        let taken = self.lists[component][tier as usize].allocate(count);
        let cost = self.cost(component, tier);
        let num_new = self.lists[component][tier as usize].touch();
        let budget = self.budget_mut(component, tier);
        budget.num_free -= taken.len() * cost;
        budget.num_touched += num_new * cost;
        taken
    }

    /// Free slots of a shared L1 whose memory is needed elsewhere, by component; it goes back now.
    pub fn take_surplus(&mut self) -> Vec<(usize, Vec<Run>)> {
        let mut sharers = self.sharers[Tier::Device as usize].clone();
        let Some(first) = sharers.first() else { return Vec::new() };
        let budget = self.budget(*first, Tier::Device);
        if budget.num_touched <= budget.total {
            return Vec::new();
        }
        sharers.sort_unstable();
        let mut surplus = Vec::new();
        for i in sharers {
            let runs = self.lists[i][Tier::Device as usize].take_touched();
            let num_slots: usize = runs.iter().map(|run| run.len as usize).sum();
            let units = num_slots * self.cost(i, Tier::Device);
            self.budget_mut(i, Tier::Device).num_touched -= units;
            surplus.push((i, runs));
        }
        surplus
    }

    /// Give slots back. *Caller guarantees*: they were handed out and nobody holds them.
    pub fn free(&mut self, component: usize, tier: Tier, slots: &Slots) {
        self.lists[component][tier as usize].free(slots);
        let units = slots.len() * self.cost(component, tier);
        self.budget_mut(component, tier).num_free += units;
    }

    /// Slots that are not in use because of the limit, and the free list, bottom first.
    pub fn idle_runs(&self, component: usize, tier: Tier) -> (Vec<Run>, Vec<Run>) {
        let is_shared = self.is_shared(component, tier);
        let total = self.total(component, tier);
        let num_withheld = if is_shared { 0 } else { total - self.capacity(component, tier) };
        self.lists[component][tier as usize].split(num_withheld)
    }
}

/// Slot numbers from 0 on; the most recently freed go out first.
///
/// The list is a stack of runs. The run on top is handed out from its front, so the order is exactly
/// that of a stack of single slots onto which runs are pushed back to front.
#[derive(Debug, Clone)]
struct FreeList {
    total: usize,
    height: usize,
    /// The height below which no slot was ever out, since `take_touched`.
    lowest: usize,
    stack: Vec<Run>,
}

impl FreeList {
    fn new(total: usize) -> Self {
        let len = total as u32;
        let stack = if total == 0 { Vec::new() } else { vec![Run { first: 0, len }] };
        Self { total, height: total, lowest: total, stack }
    }

    fn allocate(&mut self, count: usize) -> Slots {
        let mut taken = Slots::default();
        let mut lacking = count.min(self.height);
        self.height -= lacking;
        while lacking > 0 {
            let Some(top) = self.stack.last_mut() else { break };
            let len = top.len as usize;
            if len > lacking {
                let part = lacking as u32; // less than top.len
                taken.push(Run { first: top.first, len: part });
                top.first += part;
                top.len -= part;
                break;
            }
            lacking -= len;
            taken.push(*top);
            self.stack.pop();
        }
        taken
    }

    fn free(&mut self, slots: &Slots) {
        for run in slots.runs().iter().rev() {
            self.height += run.len as usize;
            match self.stack.last_mut() {
                Some(top) if run.first + run.len == top.first => {
                    top.first = run.first;
                    top.len += run.len;
                }
                _ => self.stack.push(*run),
            }
        }
    }

    /// Note what is out; how many slots were not before.
    fn touch(&mut self) -> usize {
        let num_new = self.lowest.saturating_sub(self.height);
        self.lowest -= num_new;
        num_new
    }

    /// Free slots that were out since the last call, bottom first.
    fn take_touched(&mut self) -> Vec<Run> {
        let (_, touched) = self.split(self.lowest);
        self.lowest = self.height;
        touched
    }

    /// The lowest so many slots of the stack, and the rest.
    fn split(&self, count: usize) -> (Vec<Run>, Vec<Run>) {
        let (mut below, mut above) = (Vec::new(), Vec::new());
        let mut lacking = count;
        for run in &self.stack {
            let part = lacking.min(run.len as usize) as u32;
            lacking -= part as usize;
            let rest = run.len - part;
            if part > 0 {
                below.push(Run { first: run.first + rest, len: part });
            }
            if rest > 0 {
                above.push(Run { first: run.first, len: rest });
            }
        }
        (below, above)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_recently_freed_go_out_first_in_the_order_they_had() {
        let mut list = FreeList::new(8);
        let first = list.allocate(3);
        let second = list.allocate(2);
        list.free(&second);
        list.free(&first);
        assert_eq!(list.split(2), (vec![Run { first: 6, len: 2 }], vec![Run { first: 0, len: 6 }]));
        let all: Vec<u32> = list.allocate(8).iter().collect();
        assert_eq!(all, [0, 1, 2, 3, 4, 5, 6, 7]);
        let mut odd = Slots::one(5);
        odd.append(&Slots::one(1));
        list.free(&odd);
        assert_eq!(list.allocate(2).iter().collect::<Vec<_>>(), [5, 1]);
        assert_eq!(list.height, 0);
    }

    #[test]
    fn a_budget_follows_its_limit_as_units_come_free() {
        let mut budget = Budget::new(10);
        budget.num_free = 3;
        budget.limit = 5;
        assert!(!budget.approach_limit());
        assert_eq!((budget.capacity, budget.num_free), (7, 0));
        budget.num_free = 4;
        assert!(budget.approach_limit());
        assert_eq!((budget.capacity, budget.num_free), (5, 2));
        budget.limit = 9;
        assert!(budget.approach_limit());
        assert_eq!((budget.capacity, budget.num_free), (9, 6));
    }
}
