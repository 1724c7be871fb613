//! The operations that the micro-benches measure: codec and router, each a closure over inputs that were made before.
//! Criterion (`benches/micro.rs`) and the table (`src/main.rs`) run the same ones. Nothing here measures.

#![forbid(unsafe_code)]

mod codec;
mod routes;

pub use routes::{RuleSet, SETS};

/// One operation. `make` builds its inputs; each call of what it gives does the operation once.
pub struct Operation {
    pub name: &'static str,
    pub make: fn() -> Box<dyn FnMut()>,
    /// What the design allows, in nanoseconds, if it says so.
    pub target_ns: Option<f64>,
}

/// All operations, in the order of the table.
pub fn operations() -> Vec<Operation> {
    let mut all = codec::operations();
    all.extend(routes::operations());
    all
}
