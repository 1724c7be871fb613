//! Where policy comes from: YAML text, and a directory of YAML per tenant. What the objects mean together is the compiler's.
//!
//! [`parse`] reads one file, [`pinpoint`] finds a field in it again, [`Watch`] follows a directory. Nothing is ever half
//! silent: what is not understood is refused by name, with its place and its mend.

#![forbid(unsafe_code)]

mod annotations;
mod decode;
mod directory;
mod error;
mod fields;
mod file;
pub mod limits;
mod path;
mod pinpoint;
mod read;
mod scalar;
mod split;
mod tree;
mod watch;

pub use directory::{Directory, Scan, TenantFiles};
pub use pinpoint::pinpoint;
pub use read::{Parsed, parse};
pub use watch::{BUSY_MAX, DELAY_MAX, LOOK_EVERY, QUIET, Watch, WatchError};
