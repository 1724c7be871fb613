//! Tests policies against facts: cases with Istio's semantics, and a simple evaluator with which
//! every policy must agree.

mod cases;
mod language;
mod peer;
mod property;
