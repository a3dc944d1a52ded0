//! The radix tree core of HiCache: it decides and accounts, and never touches bytes.
//!
//! The files carry the names of the Python core's (`radix/*.py`), which is the readable
//! specification: read the two side by side. Given the same calls both return the same results,
//! actions, numbers and audits.
//!
//! ```text
//! tree  check  brief   the interface: one method per call of `TreeCore`
//! lookup  publish  restore  demote  backup  storing  keeping  ticket_ends   what a call does, as `impl Forest` blocks
//! forest  topology  merging  residency  queues  digests  dead_weight  counters   the state and the few moves that keep it consistent
//! node leases tickets  records        rules/  ordering   who is needed, who goes first
//! arena slots slot_pool tokens children     the compact containers underneath (Python has numpy here)
//! session_order  session_hints  session_records  ages  return_hazard  shadows   what sessions are worth: beside the tree, not in it
//! ```
#![forbid(unsafe_code)]

pub mod actions;
mod admission;
mod ages;
mod arena;
mod audit;
mod backup;
mod brief;
mod change;
mod check;
mod children;
mod counters;
mod dead_weight;
mod declining;
mod demote;
mod digests;
mod error;
mod forest;
mod forest_state;
pub mod interface;
mod keeping;
pub mod keys;
mod leases;
mod lookup;
mod merging;
mod node;
mod ordering;
mod publish;
mod queues;
mod records;
mod residency;
mod restore;
pub mod return_hazard;
mod rules;
mod session_hints;
pub mod session_order;
mod session_records;
mod shadow_tree;
pub mod shadows;
mod slot_pool;
pub mod slots;
mod storing;
mod ticket_ends;
mod tickets;
mod tokens;
mod topology;
mod tree;
mod trust;
mod turns;

pub use error::Error;
pub use tokens::Token;
pub use tree::TreeCore;
