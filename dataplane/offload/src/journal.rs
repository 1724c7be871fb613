//! Collects libbpf's latest output, the verifier's log included, for the errors that operators
//! read. All of it goes to `tracing` as well.

use std::collections::VecDeque;
use std::sync::{Mutex, Once};

use libbpf_rs::PrintLevel;

/// Number of lines that are retained. The verifier's result is in the last few. They are part of
/// one error message, so there are not more.
const LINES_MAX: usize = 12;

static LINES: Mutex<VecDeque<String>> = Mutex::new(VecDeque::new());
static INSTALL: Once = Once::new();

fn keep(level: PrintLevel, text: String) {
    for line in text.lines().map(str::trim).filter(|l| !l.is_empty()) {
        match level {
            PrintLevel::Debug => tracing::trace!(target: "libbpf", "{line}"),
            PrintLevel::Info | PrintLevel::Warn => tracing::debug!(target: "libbpf", "{line}"),
        }
        if let Ok(mut lines) = LINES.lock() {
            if lines.len() == LINES_MAX {
                lines.pop_front();
            }
            lines.push_back(line.to_string());
        }
    }
}

/// Redirects libbpf's output from stderr to this module, once per process.
pub(crate) fn install() {
    INSTALL.call_once(|| {
        libbpf_rs::set_print(Some((PrintLevel::Info, keep)));
    });
}

/// Returns the retained lines, joined, and clears them.
pub(crate) fn last_words() -> String {
    LINES
        .lock()
        .map(|mut l| l.drain(..).collect::<Vec<_>>().join(" | "))
        .unwrap_or_default()
}
