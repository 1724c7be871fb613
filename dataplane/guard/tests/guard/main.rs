//! Policies against facts: named cases with Istio's semantics, and a naive evaluator that any policy must agree with.

mod cases;
mod language;
mod peer;
mod property;
