//! An eviction policy written in Python.

use hicache_radix::interface::{Facts, Ordering};
use pyo3::prelude::*;

/// `hicache.radix.ordering.make_ordering` of a dotted path, which guards against a policy that fails.
#[derive(Debug)]
pub struct PyOrdering {
    rank: Py<PyAny>,
    facts: Py<PyAny>,
    tells_uses_apart: bool,
    tells_ages_apart: bool,
    tells_priorities_apart: bool,
}

impl PyOrdering {
    /// Load the class; raises `ConfigError` where that fails.
    pub fn new(py: Python<'_>, name: &str) -> PyResult<Self> {
        let module = py.import("hicache.radix.ordering")?;
        let ordering = module.getattr("make_ordering")?.call1((name,))?;
        Ok(Self {
            rank: ordering.getattr("rank")?.unbind(),
            facts: module.getattr("Facts")?.unbind(),
            tells_uses_apart: ordering.getattr("tells_uses_apart")?.is_truthy()?,
            tells_ages_apart: ordering.getattr("tells_ages_apart")?.is_truthy()?,
            tells_priorities_apart: ordering.getattr("tells_priorities_apart")?.is_truthy()?,
        })
    }
}

impl Ordering for PyOrdering {
    fn rank(&self, facts: Facts) -> i64 {
        Python::attach(|py| {
            let given = (facts.used, facts.created, facts.uses, facts.priority);
            let record = self.facts.call1(py, given);
            let rank = record.and_then(|record| self.rank.call1(py, (record,)));
            rank.and_then(|rank| rank.extract(py)).unwrap_or_else(|error| {
                // What the guard does not catch: an interrupt. The tree must not stop half-way.
                error.write_unraisable(py, Some(self.rank.bind(py)));
                facts.used
            })
        })
    }

    fn tells_uses_apart(&self) -> bool {
        self.tells_uses_apart
    }

    fn tells_ages_apart(&self) -> bool {
        self.tells_ages_apart
    }

    fn tells_priorities_apart(&self) -> bool {
        self.tells_priorities_apart
    }
}
