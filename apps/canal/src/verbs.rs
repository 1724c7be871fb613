//! One module per verb. A verb gets parsed arguments and prints its own result. Errors are returned
//! to `main`.

pub(crate) mod analyze;
pub(crate) mod apply;
pub(crate) mod ca;
pub(crate) mod compile;
pub(crate) mod completion;
pub(crate) mod conditions;
pub(crate) mod config;
pub(crate) mod delete;
pub(crate) mod demo;
pub(crate) mod diff;
pub(crate) mod explain;
pub(crate) mod gateway;
pub(crate) mod get;
pub(crate) mod logs;
pub(crate) mod metrics;
pub(crate) mod sessions;
pub(crate) mod status;
pub(crate) mod tap;
pub(crate) mod up;
pub(crate) mod world;
