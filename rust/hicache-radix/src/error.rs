//! Everything that a call can refuse. `hicache-py` maps it to `hicache.errors`, once.

use std::fmt;

/// Why a call was refused; nothing was changed unless the Python core changes it too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// Settings that make no sense; one line each.
    Config(Vec<String>),
    /// The caller broke a rule of the interface.
    Protocol(String),
    /// Token ids that are none: the message names the first position.
    Value(String),
}

/// What the crate's calls return.
pub type Result<T> = std::result::Result<T, Error>;

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Config(problems) => f.write_str(&problems.join("\n")),
            Error::Protocol(message) | Error::Value(message) => f.write_str(message),
        }
    }
}

impl std::error::Error for Error {}
