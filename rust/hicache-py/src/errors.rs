//! The one map from the crate's errors to `hicache.errors`.

use hicache_radix::Error;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

fn raise(py: Python<'_>, class: &str, argument: impl for<'a> IntoPyObject<'a>) -> PyErr {
    let built = py
        .import("hicache.errors")
        .and_then(|module| module.getattr(class))
        .and_then(|class| class.call1((argument,)));
    match built {
        Ok(error) => PyErr::from_value(error),
        Err(error) => error,
    }
}

/// A caller broke a rule of the interface.
pub fn protocol(py: Python<'_>, message: String) -> PyErr {
    raise(py, "ProtocolError", message)
}

/// The core's own state is broken.
pub fn invariant(py: Python<'_>, finding: String) -> PyErr {
    raise(py, "InvariantError", vec![finding])
}

/// Any error of the crate.
pub fn to_python(py: Python<'_>, error: Error) -> PyErr {
    match error {
        Error::Config(problems) => raise(py, "ConfigError", problems),
        Error::Protocol(message) => protocol(py, message),
        Error::Value(message) => PyValueError::new_err(message),
    }
}
