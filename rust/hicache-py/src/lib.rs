//! `hicache.radix._core`: the tree core in Rust, as `hicache.radix.interface.TreeCore` has it.
//!
//! Arguments in, records out. The work itself runs without the GIL; only a policy or a
//! rule that is written in Python is called back.

mod arguments;
mod errors;
mod gil;
mod ordering;
mod records;
mod session_order;
mod span_rule;

use hicache_radix::interface::Tier;
use hicache_radix::TreeCore;
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::arguments::{with_tokens, Tokens};
use crate::gil::{unlocked, worked};
use crate::records::Records;

type Object<'py> = PyResult<Bound<'py, PyAny>>;

/// The Rust core. Every method's contract is that of `hicache.radix.interface.TreeCore`.
#[pyclass(module = "hicache.radix._core")]
struct RustTreeCore {
    core: TreeCore,
    records: Records,
    names: Vec<String>,
    #[pyo3(get)]
    config: Py<PyAny>,
}

impl RustTreeCore {
    fn component(&self, py: Python<'_>, name: &str) -> PyResult<usize> {
        self.names.iter().position(|known| known == name).ok_or_else(|| {
            let known = self.names.join(", ");
            errors::protocol(py, format!("no component is called '{name}'; there are {known}"))
        })
    }

    fn pool(&self, component: &str, tier: &Bound<'_, PyAny>) -> PyResult<(usize, Tier)> {
        Ok((self.component(tier.py(), component)?, arguments::tier(tier)?))
    }

    fn known_lease(&self, lease: &Bound<'_, PyAny>) -> PyResult<i64> {
        let number = arguments::number("lease", lease)?;
        self.core.check_lease(number).map_err(|error| errors::to_python(lease.py(), error))?;
        Ok(number)
    }
}

#[pymethods]
impl RustTreeCore {
    /// Args: config: a `TreeConfig` that `hicache.radix.interface.check_config` has passed.
    #[new]
    fn new(config: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = config.py();
        let plain = arguments::config(config)?;
        let names: Vec<String> = plain.components.iter().map(|spec| spec.name.clone()).collect();
        let records = Records::new(py, &names)?;
        let core = unlocked(py, || TreeCore::new(plain))?;
        Ok(Self { core, records, names, config: config.clone().unbind() })
    }

    // ---- look up -------------------------------------------------------------------------------
    #[pyo3(signature = (tokens, namespace = None, *, cap = true))]
    fn probe<'py>(
        &self,
        py: Python<'py>,
        tokens: &Bound<'py, PyAny>,
        namespace: Option<&Bound<'py, PyAny>>,
        cap: bool,
    ) -> Object<'py> {
        let (array, namespace) = (arguments::tokens(tokens)?, arguments::namespace(namespace)?);
        let core = &self.core;
        let is_brief = core.is_brief(array.len(), 0);
        let found =
            with_tokens!(array, |tokens| worked(py, is_brief, || core.probe(tokens, &namespace, cap)))?;
        self.records.probe_result(py, &found)
    }

    #[pyo3(signature = (tokens, namespace = None, *, cap = true))]
    fn store_query<'py>(
        &mut self,
        py: Python<'py>,
        tokens: &Bound<'py, PyAny>,
        namespace: Option<&Bound<'py, PyAny>>,
        cap: bool,
    ) -> Object<'py> {
        let (array, namespace) = (arguments::tokens(tokens)?, arguments::namespace(namespace)?);
        let core = &mut self.core;
        let query = with_tokens!(array, |tokens| unlocked(py, || core.store_query(tokens, &namespace, cap)))?;
        self.records.store_query(py, query)
    }

    #[pyo3(signature = (tokens, found, namespace = None))]
    fn learn<'py>(
        &mut self,
        py: Python<'py>,
        tokens: &Bound<'py, PyAny>,
        found: &Bound<'py, PyAny>,
        namespace: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<()> {
        let answers = arguments::answers(found, &self.names)?;
        let (array, namespace) = (arguments::tokens(tokens)?, arguments::namespace(namespace)?);
        let core = &mut self.core;
        with_tokens!(array, |tokens| unlocked(py, move || {
            let answers = answers; // freed here, without the GIL
            core.learn(tokens, &answers, &namespace)
        }))
    }

    #[pyo3(name = "match", signature = (tokens, namespace = None, *, session = None, priority = None, cap = true))]
    fn open<'py>(
        &mut self,
        py: Python<'py>,
        tokens: &Bound<'py, PyAny>,
        namespace: Option<&Bound<'py, PyAny>>,
        session: Option<i64>,
        priority: Option<&Bound<'py, PyAny>>,
        cap: bool,
    ) -> Object<'py> {
        let (array, namespace) = (arguments::tokens(tokens)?, arguments::namespace(namespace)?);
        let priority = arguments::priority(py, priority)?;
        let core = &mut self.core;
        let is_brief = core.is_brief(array.len(), 0);
        let result = with_tokens!(array, |tokens| {
            worked(py, is_brief, || core.open(tokens, &namespace, cap, priority, session))
        })?;
        self.records.match_result(py, result)
    }

    // ---- restore -------------------------------------------------------------------------------
    fn plan<'py>(&self, py: Python<'py>, lease: &Bound<'py, PyAny>) -> Object<'py> {
        let (core, lease) = (&self.core, arguments::number("lease", lease)?);
        let steps = unlocked(py, || core.plan(lease))?;
        self.records.plan(py, steps)
    }

    fn choices<'py>(&mut self, py: Python<'py>, lease: &Bound<'py, PyAny>) -> Object<'py> {
        let (core, lease) = (&self.core, arguments::number("lease", lease)?);
        let choices = unlocked(py, || core.choices(lease))?;
        self.records.choices(py, choices)
    }

    fn lower(
        &mut self,
        py: Python<'_>,
        lease: &Bound<'_, PyAny>,
        boundary: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (core, number) = (&mut self.core, arguments::number("lease", lease)?);
        let refusal = |given: &Bound<'_, PyAny>| format!("lease {number} cannot settle for {given} tokens");
        let boundary = arguments::whole(boundary, refusal)?;
        unlocked(py, || core.lower(number, boundary))
    }

    fn fetch<'py>(&mut self, py: Python<'py>, lease: &Bound<'py, PyAny>) -> Object<'py> {
        let (core, lease) = (&mut self.core, arguments::number("lease", lease)?);
        let started = unlocked(py, || core.fetch(lease))?;
        self.records.started(py, started)
    }

    fn load<'py>(&mut self, py: Python<'py>, lease: &Bound<'py, PyAny>) -> Object<'py> {
        let (core, lease) = (&mut self.core, arguments::number("lease", lease)?);
        let started = unlocked(py, || core.load(lease))?;
        self.records.started(py, started)
    }

    #[pyo3(signature = (lease, *, arriving=false))]
    fn settle<'py>(&mut self, py: Python<'py>, lease: &Bound<'py, PyAny>, arriving: bool) -> Object<'py> {
        let (core, lease) = (&mut self.core, arguments::number("lease", lease)?);
        let settled = unlocked(py, || core.settle(lease, arriving))?;
        self.records.settled(py, settled)
    }

    // ---- compute and publish -------------------------------------------------------------------
    fn reserve<'py>(
        &mut self,
        py: Python<'py>,
        lease: &Bound<'py, PyAny>,
        num_tokens: &Bound<'py, PyAny>,
    ) -> Object<'py> {
        let (core, lease) = (&mut self.core, arguments::number("lease", lease)?);
        let num_tokens = arguments::whole(num_tokens, |given| format!("cannot reserve {given} tokens"))?;
        let has_room = core.has_room_for(num_tokens);
        let reserved = worked(py, has_room, || core.reserve(lease, num_tokens))?;
        self.records.reserved(py, reserved)
    }

    #[pyo3(signature = (lease, tokens, *, mark = true, verified_len = None))]
    fn insert<'py>(
        &mut self,
        py: Python<'py>,
        lease: &Bound<'py, PyAny>,
        tokens: &Bound<'py, PyAny>,
        mark: bool,
        verified_len: Option<&Bound<'py, PyAny>>,
    ) -> Object<'py> {
        let (lease, array) = (arguments::number("lease", lease)?, arguments::tokens(tokens)?);
        let verified_len = arguments::verified_len(verified_len, array.len())?;
        let core = &mut self.core;
        let is_brief = core.is_brief(array.len(), verified_len);
        let done = with_tokens!(array, |tokens| {
            worked(py, is_brief, || core.insert(lease, tokens, mark, verified_len))
        })?;
        self.records.inserted(py, done)
    }

    #[pyo3(signature = (lease, tokens = None, *, verified_len = None))]
    fn release<'py>(
        &mut self,
        py: Python<'py>,
        lease: &Bound<'py, PyAny>,
        tokens: Option<&Bound<'py, PyAny>>,
        verified_len: Option<&Bound<'py, PyAny>>,
    ) -> Object<'py> {
        let lease = arguments::number("lease", lease)?;
        let array = tokens.map(arguments::tokens).transpose()?;
        let verified_len = arguments::verified_len(verified_len, array.as_ref().map_or(0, Tokens::len))?;
        let core = &mut self.core;
        let done = match array {
            None => worked(py, true, || core.release(lease, None::<&[i32]>, verified_len)),
            Some(array) => {
                let is_brief = core.is_brief(array.len(), verified_len);
                with_tokens!(array, |tokens| {
                    worked(py, is_brief, || core.release(lease, Some(tokens), verified_len))
                })
            }
        }?;
        self.records.inserted(py, done)
    }

    fn lease_slots<'py>(
        &self,
        py: Python<'py>,
        lease: &Bound<'py, PyAny>,
        component: &str,
    ) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let lease = self.known_lease(lease)?;
        let (core, component) = (&self.core, self.component(py, component)?);
        let slots = unlocked(py, || core.lease_slots(lease, component))?;
        Ok(PyArray1::from_vec(py, slots))
    }

    fn lease_state(
        &self,
        py: Python<'_>,
        lease: &Bound<'_, PyAny>,
        component: &str,
    ) -> PyResult<Option<u32>> {
        let lease = self.known_lease(lease)?;
        let component = self.component(py, component)?;
        self.core.lease_state(lease, component).map_err(|error| errors::to_python(py, error))
    }

    #[pyo3(signature = (leases, worths, regards = None))]
    fn rate<'py>(
        &mut self,
        py: Python<'py>,
        leases: Vec<i64>,
        worths: Vec<i64>,
        regards: Option<Vec<i64>>,
    ) -> PyResult<Bound<'py, PyTuple>> {
        let ratings = arguments::ratings(&leases, &worths, regards)?;
        let core = &mut self.core;
        let mut over = Vec::new();
        unlocked(py, || {
            core.rate(ratings, &mut over);
            Ok(())
        })?;
        PyTuple::new(py, over.into_iter().map(|lease| lease as i64))
    }

    #[pyo3(signature = (tokens, namespace = None))]
    fn keep(
        &mut self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        namespace: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<usize> {
        let (array, namespace) = (arguments::tokens(tokens)?, arguments::namespace(namespace)?);
        let core = &mut self.core;
        with_tokens!(array, |tokens| unlocked(py, || core.keep(tokens, &namespace)))
    }

    #[pyo3(signature = (tokens, namespace = None))]
    fn unkeep(
        &mut self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        namespace: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (array, namespace) = (arguments::tokens(tokens)?, arguments::namespace(namespace)?);
        let core = &mut self.core;
        with_tokens!(array, |tokens| unlocked(py, || core.unkeep(tokens, &namespace)))
    }

    // ---- pressure ------------------------------------------------------------------------------
    fn make_room<'py>(
        &mut self,
        py: Python<'py>,
        component: &str,
        tier: &Bound<'py, PyAny>,
        free_slots: i64,
    ) -> Object<'py> {
        let (component, tier) = self.pool(component, tier)?;
        let core = &mut self.core;
        let room = unlocked(py, || core.make_room(component, tier, free_slots))?;
        self.records.room(py, room)
    }

    fn persist<'py>(&mut self, py: Python<'py>) -> Object<'py> {
        let core = &mut self.core;
        let started = unlocked(py, || Ok(core.persist()))?;
        self.records.started(py, started)
    }

    fn retry_stores<'py>(&mut self, py: Python<'py>) -> Object<'py> {
        let core = &mut self.core;
        let started = unlocked(py, || Ok(core.retry_stores()))?;
        self.records.started(py, started)
    }

    // ---- change while serving ------------------------------------------------------------------
    #[pyo3(signature = (namespace = None, tokens = None, *, alone = false))]
    fn clear<'py>(
        &mut self,
        py: Python<'py>,
        namespace: Option<&Bound<'py, PyAny>>,
        tokens: Option<&Bound<'py, PyAny>>,
        alone: bool,
    ) -> Object<'py> {
        let namespace = namespace.map(|given| arguments::namespace(Some(given))).transpose()?;
        let array = tokens.map(arguments::tokens).transpose()?;
        let (core, namespace) = (&mut self.core, namespace.as_ref());
        let cleared = match array {
            None => unlocked(py, || core.clear(namespace, None::<&[i32]>, alone)),
            Some(array) => {
                with_tokens!(array, |tokens| unlocked(py, || core.clear(namespace, Some(tokens), alone)))
            }
        }?;
        self.records.cleared(py, cleared)
    }

    fn forget_store(&mut self, py: Python<'_>) -> PyResult<()> {
        let core = &mut self.core;
        unlocked(py, || {
            core.forget_store();
            Ok(())
        })
    }

    fn resize<'py>(
        &mut self,
        py: Python<'py>,
        component: &str,
        tier: &Bound<'py, PyAny>,
        num_slots: i64,
    ) -> Object<'py> {
        let (component, tier) = self.pool(component, tier)?;
        let core = &mut self.core;
        let room = unlocked(py, || core.resize(component, tier, num_slots))?;
        self.records.room(py, room)
    }

    fn withheld_slots<'py>(
        &self,
        component: &str,
        tier: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let py = tier.py();
        let (core, (component, tier)) = (&self.core, self.pool(component, tier)?);
        let slots = unlocked(py, || core.withheld_slots(component, tier))?;
        Ok(PyArray1::from_vec(py, slots))
    }

    fn surplus_slots<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let named = PyDict::new(py);
        for (component, slots) in self.core.surplus_slots() {
            named.set_item(self.names[component].as_str(), PyArray1::from_vec(py, slots))?;
        }
        Ok(named)
    }

    fn reconfigure(&mut self, config: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = config.py();
        let check = py.import("hicache.radix.check")?.getattr("check_change")?;
        let reorders = check.call1((self.config.bind(py), config))?.extract()?;
        let plain = arguments::config(config)?;
        let core = &mut self.core;
        unlocked(py, || core.reconfigure(plain, reorders))?;
        self.config = config.clone().unbind();
        Ok(())
    }

    // ---- tickets -------------------------------------------------------------------------------
    fn commit<'py>(&mut self, py: Python<'py>, ticket: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyTuple>> {
        let (core, ticket) = (&mut self.core, arguments::number("ticket", ticket)?);
        let actions = unlocked(py, || core.commit(ticket))?;
        self.records.actions(py, actions)
    }

    #[pyo3(signature = (ticket, done_slots = None, *, missing = true))]
    fn abort<'py>(
        &mut self,
        py: Python<'py>,
        ticket: &Bound<'py, PyAny>,
        done_slots: Option<&Bound<'py, PyAny>>,
        missing: bool,
    ) -> PyResult<Bound<'py, PyTuple>> {
        let (core, ticket) = (&mut self.core, arguments::number("ticket", ticket)?);
        let done_slots = match done_slots {
            None => 0,
            Some(given) => {
                arguments::whole(given, |given| format!("ticket {ticket}: {given} slots cannot be done"))?
            }
        };
        let actions = unlocked(py, || core.abort(ticket, done_slots, missing))?;
        self.records.actions(py, actions)
    }

    fn in_flight<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.core.in_flight())
    }

    // ---- inspect -------------------------------------------------------------------------------
    fn audit(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        let core = &self.core;
        unlocked(py, || Ok(core.audit()))
    }

    fn free_slots(&self, component: &str, tier: &Bound<'_, PyAny>) -> PyResult<(usize, usize)> {
        let (component, tier_number) = self.pool(component, tier)?;
        let free = self.core.free_slots(component, tier_number);
        free.map_err(|error| errors::to_python(tier.py(), error))
    }

    fn held_slots(&self, component: &str, tier: &Bound<'_, PyAny>) -> PyResult<usize> {
        let py = tier.py();
        let (component, tier) = self.pool(component, tier)?;
        self.core.held_slots(component, tier).map_err(|error| errors::to_python(py, error))
    }

    fn pool_count<'py>(&self, py: Python<'py>, component: &str, tier: &Bound<'py, PyAny>) -> Object<'py> {
        let (component, tier) = self.pool(component, tier)?;
        let core = &self.core;
        let count = unlocked(py, || core.pool_count(component, tier))?;
        self.records.pool_count(py, count)
    }

    fn dead_slots(&self, component: &str, tier: &Bound<'_, PyAny>) -> PyResult<usize> {
        let (component, tier) = self.pool(component, tier)?;
        Ok(self.core.dead_slots(component, tier))
    }

    fn counters(&self) -> std::collections::BTreeMap<String, u64> {
        self.core.counters()
    }

    fn snapshot<'py>(&self, py: Python<'py>) -> Object<'py> {
        let core = &self.core;
        let views = unlocked(py, || Ok(core.snapshot()))?;
        self.records.snapshot(py, views)
    }

    fn drain_events<'py>(&mut self, py: Python<'py>) -> Object<'py> {
        let events = self.core.drain_events();
        self.records.events(py, events)
    }

    fn reset(&mut self, py: Python<'_>) -> PyResult<()> {
        let core = &mut self.core;
        unlocked(py, || {
            core.reset();
            Ok(())
        })
    }
}

/// The tree core in Rust.
#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<RustTreeCore>()?;
    module.add_class::<session_order::RustSessionOrder>()?;
    module.add("IS_DEBUG_BUILD", cfg!(debug_assertions))?;
    Ok(())
}
