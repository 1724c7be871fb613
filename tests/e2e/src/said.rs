//! What a client program said and how it ended.

use std::process::Output;

use serde_json::Value;

/// A client's end.
#[derive(Debug)]
pub struct Said {
    /// The command, for messages.
    pub command: String,
    /// `None` when a signal ended it.
    pub code: Option<i32>,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

impl Said {
    pub(crate) fn new(command: String, out: Output) -> Self {
        let text = |b: Vec<u8>| String::from_utf8_lossy(&b).into_owned();
        Self { command, code: out.status.code(), stdout: text(out.stdout), stderr: text(out.stderr) }
    }

    /// The standard output, or a panic that tells what the command said when it did not end with 0.
    pub fn ok(self) -> String {
        assert_eq!(self.code, Some(0), "{}\nstdout: {}\nstderr: {}", self.command, self.stdout, self.stderr);
        self.stdout
    }

    /// The standard output as JSON, whatever the exit code.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout)
            .unwrap_or_else(|e| panic!("{}: not JSON ({e})\nstdout: {}\nstderr: {}", self.command, self.stdout, self.stderr))
    }
}
