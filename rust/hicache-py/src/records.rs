//! What goes out to Python: the record classes of `hicache.radix.interface`, `.actions` and `hicache.events`.

use hicache_radix::actions::Action;
use hicache_radix::interface::{
    Cause, Choice, Cleared, Inserted, MatchResult, Namespace, NodeView, PlanStep, PoolCount, ProbeResult,
    Regard, Reserved, ResidencyEvent, Room, Settled, Started, StoreQuery, Tier, TierTokens,
};
use hicache_radix::keys::Key;
use hicache_radix::slots::Slots;
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString, PyTuple};
use pyo3::IntoPyObjectExt;

type Object<'py> = PyResult<Bound<'py, PyAny>>;

/// The classes, and the words that stand in them.
pub struct Records {
    names: Vec<Py<PyString>>,
    tiers: Vec<Py<PyAny>>,
    causes: Vec<Py<PyAny>>,
    stored: Py<PyAny>,
    removed: Py<PyAny>,
    probe_result: Py<PyAny>,
    match_result: Py<PyAny>,
    store_query: Py<PyAny>,
    page_keys: Py<PyAny>,
    plan_step: Py<PyAny>,
    choice: Py<PyAny>,
    started: Py<PyAny>,
    settled: Py<PyAny>,
    reserved: Py<PyAny>,
    inserted: Py<PyAny>,
    room: Py<PyAny>,
    pool_count: Py<PyAny>,
    node_view: Py<PyAny>,
    free: Py<PyAny>,
    copy: Py<PyAny>,
    store: Py<PyAny>,
    fetch: Py<PyAny>,
    forget: Py<PyAny>,
    hint: Py<PyAny>,
    regards: Vec<Py<PyAny>>,
    cleared: Py<PyAny>,
    event: Py<PyAny>,
    tier_tokens: Py<PyAny>,
    namespace: Py<PyAny>,
}

impl Records {
    /// Import the classes. Args: `names`: of the components, in their order.
    pub fn new(py: Python<'_>, names: &[String]) -> PyResult<Self> {
        let interface = py.import("hicache.radix.interface")?;
        let actions = py.import("hicache.radix.actions")?;
        let events = py.import("hicache.events")?;
        let types = py.import("hicache.types")?;
        let of = |module: &Bound<'_, PyModule>, name: &str| Ok::<_, PyErr>(module.getattr(name)?.unbind());
        let (tier, regard) = (types.getattr("Tier")?, types.getattr("Regard")?);
        let cause = events.getattr("Cause")?;
        let change = events.getattr("ResidencyChange")?;
        Ok(Self {
            names: names.iter().map(|name| PyString::intern(py, name).unbind()).collect(),
            tiers: (0..3).map(|number| Ok(tier.call1((number,))?.unbind())).collect::<PyResult<_>>()?,
            causes: Cause::NAMES
                .iter()
                .map(|name| Ok(cause.call1((*name,))?.unbind()))
                .collect::<PyResult<_>>()?,
            stored: change.call1(("stored",))?.unbind(),
            removed: change.call1(("removed",))?.unbind(),
            probe_result: of(&interface, "ProbeResult")?,
            match_result: of(&interface, "MatchResult")?,
            store_query: of(&interface, "StoreQuery")?,
            page_keys: of(&interface, "PageKeys")?,
            plan_step: of(&interface, "PlanStep")?,
            choice: of(&interface, "Choice")?,
            started: of(&interface, "Started")?,
            settled: of(&interface, "Settled")?,
            reserved: of(&interface, "Reserved")?,
            inserted: of(&interface, "Inserted")?,
            room: of(&interface, "Room")?,
            pool_count: of(&interface, "PoolCount")?,
            node_view: of(&interface, "NodeView")?,
            free: of(&actions, "Free")?,
            copy: of(&actions, "Copy")?,
            store: of(&actions, "Store")?,
            fetch: of(&actions, "Fetch")?,
            forget: of(&actions, "Forget")?,
            hint: of(&actions, "Hint")?,
            regards: Regard::ALL
                .iter()
                .map(|known| Ok(regard.call1((*known as i8,))?.unbind()))
                .collect::<PyResult<_>>()?,
            cleared: of(&interface, "Cleared")?,
            event: of(&events, "ResidencyEvent")?,
            tier_tokens: of(&types, "TierTokens")?,
            namespace: of(&types, "Namespace")?,
        })
    }

    fn name<'py>(&self, py: Python<'py>, component: usize) -> Bound<'py, PyString> {
        self.names[component].bind(py).clone()
    }

    fn tier<'py>(&self, py: Python<'py>, tier: Tier) -> Bound<'py, PyAny> {
        self.tiers[tier as usize].bind(py).clone()
    }

    // ---- results -------------------------------------------------------------------------------
    fn tier_tokens<'py>(&self, py: Python<'py>, tokens: TierTokens) -> Object<'py> {
        let [device, host, store] = tokens.0;
        self.tier_tokens.bind(py).call1((device, host, store))
    }

    fn by_component<'py>(&self, py: Python<'py>, tokens: &[TierTokens]) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        for (i, tokens) in tokens.iter().enumerate() {
            dict.set_item(self.names[i].bind(py), self.tier_tokens(py, *tokens)?)?;
        }
        Ok(dict)
    }

    pub fn probe_result<'py>(&self, py: Python<'py>, found: &ProbeResult) -> Object<'py> {
        self.probe_result.bind(py).call1((
            found.boundary,
            found.walked,
            self.tier_tokens(py, found.source)?,
            self.by_component(py, &found.by_component)?,
            found.fork,
        ))
    }

    pub fn match_result<'py>(&self, py: Python<'py>, result: MatchResult) -> Object<'py> {
        let found = self.probe_result(py, &result.found)?;
        let actions = self.actions(py, result.actions)?;
        self.match_result.bind(py).call1((result.lease, found, actions, result.met, result.met_end))
    }

    pub fn store_query<'py>(&self, py: Python<'py>, query: StoreQuery) -> Object<'py> {
        let keys = PyDict::new(py);
        for (i, pages) in query {
            // Two buffers, not an object for each page: no copy is made with the GIL held.
            let indices = PyArray1::from_vec(py, pages.indices);
            let raw = PyArray1::from_vec(py, pages.keys.into_flattened());
            keys.set_item(self.names[i].bind(py), self.page_keys.bind(py).call1((indices, raw))?)?;
        }
        self.store_query.bind(py).call1((keys,))
    }

    pub fn plan<'py>(&self, py: Python<'py>, steps: Vec<PlanStep>) -> Object<'py> {
        let mut records = Vec::with_capacity(steps.len());
        for step in steps {
            let (name, tier) = (self.name(py, step.component), self.tier(py, step.source));
            records.push(self.plan_step.bind(py).call1((name, tier, step.first_page, step.last_page))?);
        }
        Ok(PyTuple::new(py, records)?.into_any())
    }

    pub fn choices<'py>(&self, py: Python<'py>, choices: Vec<Choice>) -> Object<'py> {
        let mut records = Vec::with_capacity(choices.len());
        for Choice { boundary, steps } in choices {
            records.push(self.choice.bind(py).call1((boundary, self.plan(py, steps)?))?);
        }
        Ok(PyTuple::new(py, records)?.into_any())
    }

    pub fn started<'py>(&self, py: Python<'py>, started: Started) -> Object<'py> {
        let tickets = PyTuple::new(py, started.tickets)?;
        self.started.bind(py).call1((tickets, self.actions(py, started.actions)?))
    }

    pub fn settled<'py>(&self, py: Python<'py>, settled: Settled) -> Object<'py> {
        self.settled.bind(py).call1((
            settled.boundary,
            self.tier_tokens(py, settled.source)?,
            self.by_component(py, &settled.by_component)?,
            PyTuple::new(py, settled.tickets)?,
            self.actions(py, settled.actions)?,
        ))
    }

    pub fn reserved<'py>(&self, py: Python<'py>, reserved: Reserved) -> Object<'py> {
        let short = PyDict::new(py);
        for (i, count) in reserved.short {
            short.set_item(self.names[i].bind(py), count)?;
        }
        let tickets = PyTuple::new(py, reserved.tickets)?;
        self.reserved.bind(py).call1((short, tickets, self.actions(py, reserved.actions)?))
    }

    pub fn inserted<'py>(&self, py: Python<'py>, done: Inserted) -> Object<'py> {
        self.inserted.bind(py).call1((
            done.published,
            done.duplicate_tokens,
            done.adopted_tokens,
            done.new_tokens,
            PyTuple::new(py, done.states.iter().map(|i| self.name(py, *i)).collect::<Vec<_>>())?,
            PyTuple::new(py, done.tickets)?,
            self.actions(py, done.actions)?,
        ))
    }

    pub fn room<'py>(&self, py: Python<'py>, room: Room) -> Object<'py> {
        let tickets = PyTuple::new(py, room.tickets)?;
        self.room.bind(py).call1((room.free_slots, tickets, self.actions(py, room.actions)?))
    }

    pub fn cleared<'py>(&self, py: Python<'py>, cleared: Cleared) -> Object<'py> {
        let removed = PyDict::new(py);
        for ((i, tier), slots) in cleared.removed {
            removed.set_item((self.name(py, i), self.tiers[tier].bind(py)), slots)?;
        }
        let tickets = PyTuple::new(py, cleared.tickets)?;
        self.cleared.bind(py).call1((removed, cleared.kept, tickets, self.actions(py, cleared.actions)?))
    }

    pub fn pool_count<'py>(&self, py: Python<'py>, count: PoolCount) -> Object<'py> {
        let PoolCount { capacity, free, evictable, protected, lease_owned, in_flight, others } = count;
        self.pool_count.bind(py).call1((capacity, free, evictable, protected, lease_owned, in_flight, others))
    }

    pub fn snapshot<'py>(&self, py: Python<'py>, views: Vec<NodeView>) -> Object<'py> {
        let mut records = Vec::with_capacity(views.len());
        for (at, view) in views.into_iter().enumerate() {
            breathe(py, at);
            records.push(self.node_view(py, view)?);
        }
        Ok(PyTuple::new(py, records)?.into_any())
    }

    fn node_view<'py>(&self, py: Python<'py>, view: NodeView) -> Object<'py> {
        let slots = PyDict::new(py);
        for (i, tier, numbers) in view.slots {
            slots.set_item((self.name(py, i), self.tier(py, tier)), tuple(py, numbers)?)?;
        }
        let locks = PyDict::new(py);
        for (i, count) in view.locks.into_iter().enumerate() {
            locks.set_item(self.names[i].bind(py), count)?;
        }
        let more = PyDict::new(py); // a call takes a tuple of twelve at most
        more.set_item("priority", view.priority)?;
        more.set_item("reach", view.reach)?;
        more.set_item("is_protected", view.is_protected)?;
        more.set_item("is_shared", view.is_shared)?;
        more.set_item("is_kept", view.is_kept)?;
        more.set_item("turn", view.turn)?;
        let first = (
            view.node,
            view.parent,
            self.namespace(py, &view.namespace)?,
            view.start,
            tuple(py, view.tokens)?,
            slots,
            locks,
            view.last_use,
            view.num_uses,
            view.mark,
        );
        self.node_view.bind(py).call(first, Some(&more))
    }

    fn namespace<'py>(&self, py: Python<'py>, namespace: &Namespace) -> Object<'py> {
        let text = |part: &Option<Vec<u8>>| {
            let decode =
                |raw: &Vec<u8>| PyBytes::new(py, raw).call_method1("decode", ("utf-8", "surrogatepass"));
            part.as_ref().map(decode).transpose()
        };
        let parts = (text(&namespace.salt)?, text(&namespace.lora)?, text(&namespace.extra)?);
        self.namespace.bind(py).call1(parts)
    }

    // ---- actions and events --------------------------------------------------------------------
    pub fn actions<'py>(&self, py: Python<'py>, actions: Vec<Action>) -> PyResult<Bound<'py, PyTuple>> {
        let actions =
            actions.into_iter().map(|action| self.action(py, action)).collect::<PyResult<Vec<_>>>()?;
        PyTuple::new(py, actions)
    }

    fn action<'py>(&self, py: Python<'py>, action: Action) -> Object<'py> {
        match action {
            Action::Free { component, tier, slots } => {
                self.free.bind(py).call1((self.name(py, component), self.tier(py, tier), array(py, &slots)))
            }
            Action::Copy { ticket, component, source, source_slots, target, target_slots } => {
                self.copy.bind(py).call1((
                    ticket,
                    self.name(py, component),
                    self.tier(py, source),
                    array(py, &source_slots),
                    self.tier(py, target),
                    array(py, &target_slots),
                ))
            }
            Action::Store { ticket, component, keys, parents, slots } => {
                let parents = parents.iter().map(|parent| parent.map(|key| PyBytes::new(py, &key)));
                self.store.bind(py).call1((
                    ticket,
                    self.name(py, component),
                    keys_of(py, &keys)?,
                    tuple(py, parents)?,
                    array(py, &slots),
                ))
            }
            Action::Forget { component, keys } => {
                self.forget.bind(py).call1((self.name(py, component), keys_of(py, &keys)?))
            }
            Action::Hint { component, keys, regard } => {
                let regard = self.regards[(regard as i8 - Regard::Over as i8) as usize].bind(py);
                self.hint.bind(py).call1((self.name(py, component), keys_of(py, &keys)?, regard))
            }
            Action::Fetch { ticket, component, keys, slots } => self.fetch.bind(py).call1((
                ticket,
                self.name(py, component),
                keys_of(py, &keys)?,
                array(py, &slots),
            )),
        }
    }

    pub fn events<'py>(&self, py: Python<'py>, events: Vec<ResidencyEvent>) -> Object<'py> {
        let mut records = Vec::with_capacity(events.len());
        for event in events {
            let change = if event.stored { &self.stored } else { &self.removed };
            let told = (
                change.bind(py),
                self.tier(py, event.tier),
                self.name(py, event.component),
                keys_of(py, &event.keys)?,
                self.causes[event.cause as usize].bind(py),
            );
            let Some(arrived) = event.arrived else {
                records.push(self.event.bind(py).call1(told)?);
                continue;
            };
            let (change, tier, name, keys, cause) = told;
            let parent = arrived.parent.map(|key| PyBytes::new(py, &key));
            let mut raw = Vec::with_capacity(4 * arrived.tokens.len());
            for token in &arrived.tokens {
                raw.extend_from_slice(&token.to_le_bytes());
            }
            let namespace = self.namespace(py, &arrived.namespace)?;
            let tokens = PyBytes::new(py, &raw);
            records.push(
                self.event.bind(py).call1((change, tier, name, keys, cause, parent, tokens, namespace))?,
            );
        }
        Ok(PyTuple::new(py, records)?.into_any())
    }
}

fn array<'py>(py: Python<'py>, slots: &Slots) -> Bound<'py, PyArray1<i64>> {
    let mut numbers = Vec::with_capacity(slots.len());
    slots.expand(&mut numbers);
    PyArray1::from_vec(py, numbers)
}

fn keys_of<'py>(py: Python<'py>, keys: &[Key]) -> PyResult<Bound<'py, PyTuple>> {
    tuple(py, keys.iter().map(|key| PyBytes::new(py, key)))
}

/// A tuple of any length, that lets other threads have the GIL while it is made.
///
/// Not by way of a list, out of which a tuple copies every reference: a millisecond for a hundred thousand.
fn tuple<'py, T: IntoPyObject<'py>>(
    py: Python<'py>,
    items: impl IntoIterator<Item = T>,
) -> PyResult<Bound<'py, PyTuple>> {
    let mut objects = Vec::new();
    for (at, item) in items.into_iter().enumerate() {
        breathe(py, at);
        objects.push(item.into_bound_py_any(py)?);
    }
    PyTuple::new(py, objects)
}

/// Let other threads have the GIL at every so manieth item, which is well within a millisecond.
pub fn breathe(py: Python<'_>, at: usize) {
    const ITEMS: usize = 2048;
    if at % ITEMS == ITEMS - 1 {
        py.detach(|| ());
    }
}
