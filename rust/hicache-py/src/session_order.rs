//! `hicache.policy.session_order.SessionOrder` for the Rust core.

use hicache_radix::session_order::SessionOrder;
use hicache_radix::shadows::Shadows;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::arguments::{self, with_tokens};
use crate::RustTreeCore;

/// What sessions are worth. Every method's contract is that of `SessionOrder` in Python.
#[pyclass(module = "hicache.radix._core")]
pub struct RustSessionOrder {
    order: SessionOrder,
}

#[pymethods]
impl RustSessionOrder {
    /// With shadows where the capacity of L1 and L2, in tokens, is given.
    #[new]
    #[pyo3(signature = (capacity_tokens = None, block_tokens = 1))]
    fn new(capacity_tokens: Option<usize>, block_tokens: usize) -> Self {
        let shadows = capacity_tokens.map(|capacity_tokens| Shadows::new(capacity_tokens, block_tokens));
        Self { order: SessionOrder::new(shadows) }
    }

    #[pyo3(signature = (name, reused, now_s, priority = 50, core = None))]
    fn begin(
        &mut self,
        name: i64,
        reused: Option<u64>,
        now_s: f64,
        priority: i64,
        core: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        if let Some(core) = core {
            self.tell(core, now_s)?;
        }
        self.order.begin(name, reused, now_s, priority);
        Ok(())
    }

    #[pyo3(signature = (name, lease, stop, now_s, core = None))]
    fn end(
        &mut self,
        name: i64,
        lease: u64,
        stop: usize,
        now_s: f64,
        core: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.order.end(name, lease, stop, now_s);
        core.map_or(Ok(()), |core| self.tell(core, now_s))
    }

    fn watch(&mut self, name: i64, tokens: &Bound<'_, PyAny>, prompt_len: usize, seed: u64) -> PyResult<()> {
        if !self.order.samples(name) {
            return Ok(());
        }
        let array = arguments::tokens(tokens)?;
        with_tokens!(array, |tokens| {
            self.order.watch(name, tokens, prompt_len, seed);
            Ok(())
        })
    }

    #[getter]
    fn followed(&self) -> &'static str {
        self.order.followed().name()
    }

    #[getter]
    fn shadow_hits<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.order.shadow_hits())
    }

    /// Nothing crosses into Python where the core is the Rust one.
    fn tell(&mut self, core: &Bound<'_, PyAny>, now_s: f64) -> PyResult<()> {
        if let Ok(native) = core.cast_exact::<RustTreeCore>() {
            self.order.tell(&mut native.try_borrow_mut()?.core, now_s);
            return Ok(());
        }
        let gone: Vec<u64> = core.call_method1("rate", self.take_ratings(now_s))?.extract()?;
        self.order.bury(gone);
        Ok(())
    }

    fn take_ratings(&mut self, now_s: f64) -> (Vec<u64>, Vec<u32>, Vec<i8>) {
        let ratings = self.order.take_ratings(now_s);
        ratings.into_iter().map(|rating| (rating.lease, rating.worth, rating.regard as i8)).collect()
    }

    fn bury(&mut self, leases: Vec<i64>) {
        self.order.bury(leases.into_iter().map(|lease| lease as u64));
    }

    fn session_of(&self, lease: u64) -> Option<i64> {
        self.order.session_of(lease)
    }

    fn close(&mut self, name: i64) {
        self.order.close(name);
    }

    fn one_shot(&mut self, name: i64) {
        self.order.one_shot(name);
    }

    fn reopen(&mut self, name: i64) {
        self.order.reopen(name);
    }

    fn abandon_branch(&mut self, name: i64) {
        self.order.abandon_branch(name);
    }

    fn expects_return(&mut self, name: i64, in_s: f64, now_s: f64) {
        self.order.expects_return(name, in_s, now_s);
    }

    fn clear(&mut self) {
        self.order.clear();
    }

    fn __len__(&self) -> usize {
        self.order.num_sessions()
    }
}
