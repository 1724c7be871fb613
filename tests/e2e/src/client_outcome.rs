//! Output and exit status of a client program.

use std::process::Output;

use serde_json::Value;

/// Output and exit status of a client.
#[derive(Debug)]
pub struct ClientOutcome {
    /// Command line of the client, for messages.
    pub command: String,
    /// Exit code; `None` if a signal ended the client.
    pub code: Option<i32>,
    /// Standard output of the client.
    pub stdout: String,
    /// Standard error of the client.
    pub stderr: String,
}

impl ClientOutcome {
    pub(crate) fn new(command: String, out: Output) -> Self {
        let text = |b: Vec<u8>| String::from_utf8_lossy(&b).into_owned();
        Self {
            command,
            code: out.status.code(),
            stdout: text(out.stdout),
            stderr: text(out.stderr),
        }
    }

    /// Returns the standard output. Panics with the command's output if it did not end with 0.
    pub fn expect_success(self) -> String {
        assert_eq!(
            self.code,
            Some(0),
            "{}\nstdout: {}\nstderr: {}",
            self.command,
            self.stdout,
            self.stderr
        );
        self.stdout
    }

    /// Returns the standard output as JSON, whatever the exit code.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| {
            panic!(
                "{}: not JSON ({e})\nstdout: {}\nstderr: {}",
                self.command, self.stdout, self.stderr
            )
        })
    }
}
