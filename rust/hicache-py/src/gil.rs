//! Who has the GIL while the tree works, and what a panic becomes.

use std::panic::{catch_unwind, AssertUnwindSafe};

use hicache_radix::Error;
use pyo3::prelude::*;

use crate::errors;

/// Work without the GIL; a panic, which only a broken invariant can cause, becomes an exception.
pub fn unlocked<T: Send>(py: Python<'_>, work: impl Send + FnOnce() -> Result<T, Error>) -> PyResult<T> {
    caught(py, py.detach(|| catch_unwind(AssertUnwindSafe(work))))
}

/// The same with the GIL where the work is brief: handing the GIL over takes longer than that, and a thread
/// that gives it up waits for it afterwards.
pub fn worked<T: Send>(
    py: Python<'_>,
    is_brief: bool,
    work: impl Send + FnOnce() -> Result<T, Error>,
) -> PyResult<T> {
    match is_brief {
        true => caught(py, catch_unwind(AssertUnwindSafe(work))),
        false => unlocked(py, work),
    }
}

fn caught<T>(py: Python<'_>, outcome: std::thread::Result<Result<T, Error>>) -> PyResult<T> {
    match outcome {
        Ok(result) => result.map_err(|error| errors::to_python(py, error)),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            let finding = text.unwrap_or_else(|| "the Rust core stopped for an unknown reason".to_owned());
            Err(errors::invariant(py, finding))
        }
    }
}
