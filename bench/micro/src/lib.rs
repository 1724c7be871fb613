//! The operations that the micro-benches measure: codec and router, each a closure over inputs that
//! are prepared in advance. Criterion (`benches/micro.rs`) and the table (`src/main.rs`) run the
//! same operations. [`CompileBench`] times the compiler on a large tenant, and
//! [`ControllerBench`] the controller. This module does not
//! measure the operations.

#![forbid(unsafe_code)]

mod codec;
mod compiler;
mod controller;
mod routes;

pub use compiler::CompileBench;
pub use controller::ControllerBench;
pub use routes::{RuleSet, SETS};

/// One operation. `make` builds its inputs; each call of the returned closure executes the
/// operation once.
pub struct BenchOperation {
    pub name: &'static str,
    pub make: fn() -> Box<dyn FnMut()>,
    /// Target of the design in nanoseconds, if it has one.
    pub target_ns: Option<f64>,
}

/// Returns all operations in the order of the table.
pub fn operations() -> Vec<BenchOperation> {
    let mut all = codec::operations();
    all.extend(routes::operations());
    all
}
