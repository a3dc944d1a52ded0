//! A reuse rule written in Python.

use hicache_radix::interface::{SpanRule, SpanVote};
use pyo3::prelude::*;

/// A `hicache.radix.rules.base.GuardedRule`, which guards against a rule that fails.
#[derive(Debug)]
pub struct PySpanRule {
    name: String,
    rule: Py<PyAny>,
    stop: Py<PyAny>,
    is_resident: Py<PyAny>,
}

impl PySpanRule {
    /// Load the class that a component names; raises `ConfigError` where that fails.
    pub fn new(spec: &Bound<'_, PyAny>, page_size: usize) -> PyResult<Self> {
        let py = spec.py();
        let module = py.import("hicache.radix.rules.base")?;
        // Neither its place in the model nor what it depends on is the rule's business here.
        let rule = module.getattr("make_rule")?.call1((0, spec, page_size, ()))?;
        let getter = py.import("operator")?.getattr("attrgetter")?;
        Ok(Self {
            name: spec.getattr("rule")?.extract()?,
            rule: rule.unbind(),
            stop: module.getattr("Stop")?.unbind(),
            is_resident: getter.call1(("is_resident",))?.unbind(),
        })
    }
}

/// What the guard does not catch is an interrupt; the tree must not stop half-way.
fn told<T>(py: Python<'_>, result: PyResult<T>, otherwise: T) -> T {
    result.unwrap_or_else(|error| {
        error.write_unraisable(py, None);
        otherwise
    })
}

impl SpanRule for PySpanRule {
    fn name(&self) -> &str {
        &self.name
    }

    fn span(&self, end: usize) -> usize {
        Python::attach(|py| {
            let first = self.rule.call_method1(py, "span", (end,)).and_then(|first| first.extract(py));
            told(py, first, 0)
        })
    }

    fn validator(&self) -> Box<dyn SpanVote> {
        Python::attach(|py| {
            let vote = self.rule.call_method1(py, "validator", (&self.is_resident,));
            let vote = told(py, vote.map(Some), None);
            Box::new(PySpanVote { vote, stop: self.stop.clone_ref(py) })
        })
    }
}

struct PySpanVote {
    vote: Option<Py<PyAny>>,
    stop: Py<PyAny>,
}

impl SpanVote for PySpanVote {
    fn accepts(&mut self, start: usize, node_end: usize, is_resident: bool, end: usize) -> bool {
        let Some(vote) = &self.vote else { return false };
        Python::attach(|py| {
            let stop = self.stop.call1(py, (start, node_end, is_resident));
            let accepts = stop.and_then(|stop| vote.call1(py, (stop, end)));
            told(py, accepts.and_then(|accepts| accepts.is_truthy(py)), false)
        })
    }
}
