//! Keeps libbpf's last words (the verifier's log among them) for the error that an operator reads; all of it goes to `tracing` as well.

use std::collections::VecDeque;
use std::sync::{Mutex, Once};

use libbpf_rs::PrintLevel;

/// Lines kept; the verifier's verdict is in the last few.
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

/// Takes libbpf's output away from stderr, once per process.
pub(crate) fn install() {
    INSTALL.call_once(|| {
        libbpf_rs::set_print(Some((PrintLevel::Info, keep)));
    });
}

/// The last lines, joined, and forgets them.
pub(crate) fn last_words() -> String {
    LINES.lock().map(|mut l| l.drain(..).collect::<Vec<_>>().join(" | ")).unwrap_or_default()
}
