//! Reads policy objects from YAML text and from a directory of YAML files per tenant. It does not
//! interpret objects together; the compiler does that.
//!
//! Start at [`parse`], which reads one file. [`pinpoint`] finds the position of a field in the text
//! again. [`DirectoryWatch`] follows a directory. Input that Canal does not understand is never
//! dropped silently: a diagnostic names it, its position and the fix.

#![forbid(unsafe_code)]

mod annotations;
mod directory;
mod entries;
mod fields;
mod file;
mod kinds;
pub mod limits;
mod list;
mod locate;
mod read;
mod renamed;
mod split;
mod watch;

pub use directory::{Directory, ScanResult, TenantFiles};
pub use locate::{add_positions, pinpoint};
pub use read::{ParsedFile, parse};
pub use watch::{BUSY_MAX, DEBOUNCE, DELAY_MAX, DirectoryWatch, RESCAN_INTERVAL, WatchError};
