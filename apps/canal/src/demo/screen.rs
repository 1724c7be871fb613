//! What the demo prints: steps, promises with what was expected and seen, and the report at the end.

use std::io::Write;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use serde_json::{Value, json};

use crate::exit::Outcome;
use crate::output;

/// What goes to stdout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Form {
    Table,
    Json,
}

/// One promise, checked.
#[derive(Debug, Clone)]
pub(crate) struct Promise {
    pub(crate) expected: String,
    pub(crate) seen: String,
    pub(crate) held: bool,
}

impl Promise {
    pub(crate) fn new(held: bool, expected: impl Into<String>, seen: impl Into<String>) -> Self {
        Self { expected: expected.into(), seen: seen.into(), held }
    }
}

/// A step that has begun.
#[must_use]
pub(crate) struct Step {
    title: &'static str,
    started: Instant,
}

/// Prints as things happen, and keeps all for the report.
pub(crate) struct Screen {
    form: Form,
    number: u32,
    steps: Vec<Value>,
    promises: Vec<Promise>,
    notes: Vec<String>,
}

impl Screen {
    pub(crate) fn new(form: Form) -> Self {
        Self { form, number: 0, steps: Vec::new(), promises: Vec::new(), notes: Vec::new() }
    }

    /// A line for people.
    pub(crate) fn say(&self, text: &str) {
        // Nobody may be listening any more; the world is removed all the same.
        let _ = match self.form {
            Form::Table => writeln!(std::io::stdout(), "{text}"),
            Form::Json => writeln!(std::io::stderr(), "{text}"),
        };
    }

    /// Lines shown after the promises of the running step, such as a table.
    pub(crate) fn note(&mut self, lines: Vec<String>) {
        self.notes.extend(lines);
    }

    pub(crate) fn begin(&mut self, title: &'static str) -> Step {
        self.number += 1;
        self.say(&format!("\n{}. {title}", self.number));
        Step { title, started: Instant::now() }
    }

    /// Shows how the step's promises fared. A step that could not be done is one broken promise.
    pub(crate) fn end(&mut self, step: Step, seen: Outcome<Vec<Promise>>) {
        let promises = seen.unwrap_or_else(|failure| vec![Promise::new(false, "the step can be done", failure.to_string())]);
        for promise in &promises {
            let mark = if promise.held { "held  " } else { "BROKEN" };
            self.say(&format!("   {mark}  expected {}", promise.expected));
            self.say(&format!("           seen {}", promise.seen.replace('\n', "\n                ")));
        }
        for line in std::mem::take(&mut self.notes) {
            self.say(&format!("   {line}"));
        }
        let each = promises.iter().map(|p| json!({ "expected": p.expected, "seen": p.seen, "held": p.held }));
        let seconds = step.started.elapsed().as_secs_f64();
        self.steps.push(json!({ "title": step.title, "seconds": seconds, "promises": each.collect::<Vec<_>>() }));
        self.promises.extend(promises);
    }

    pub(crate) fn all_held(&self) -> bool {
        !self.promises.is_empty() && self.promises.iter().all(|p| p.held)
    }

    /// The last words.
    pub(crate) fn finish(&self, elapsed: Duration) -> Outcome {
        let held = self.promises.iter().filter(|p| p.held).count();
        let text = format!("{held} of {} promises held, in {:.0} s; the world is gone again", self.promises.len(), elapsed.as_secs_f64());
        self.say(&format!("\n{text}"));
        if !self.all_held() {
            self.promises.iter().filter(|p| !p.held).for_each(|p| self.say(&format!("   BROKEN  {}: {}", p.expected, p.seen)));
        }
        match self.form {
            Form::Table => Ok(()),
            Form::Json => {
                let report = json!({ "held": self.all_held(), "seconds": elapsed.as_secs_f64(), "steps": self.steps });
                output::line(&format!("{report:#}"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit::Failure;

    #[test]
    fn a_failed_step_is_a_broken_promise() {
        let mut screen = Screen::new(Form::Json);
        assert!(!screen.all_held(), "no promise is no success");
        let step = screen.begin("one");
        screen.end(step, Ok(vec![Promise::new(true, "a", "a")]));
        assert!(screen.all_held());
        let step = screen.begin("two");
        screen.end(step, Err(Failure::failed("x", "y", "z")));
        assert!(!screen.all_held());
    }
}
