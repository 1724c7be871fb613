//! The planner: pure.
#![forbid(unsafe_code)]
