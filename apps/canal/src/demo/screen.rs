//! Output of the demo: steps, the expected and observed results, and the report at the end.

use std::io::Write;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use serde_json::{Value, json};

use crate::exit::VerbResult;
use crate::output;

/// Content of stdout: text or the JSON report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OutputForm {
    Table,
    Json,
}

/// Expectation of the demo with its result.
#[derive(Debug, Clone)]
pub(crate) struct Expectation {
    pub(crate) expected: String,
    pub(crate) observation: String,
    pub(crate) is_met: bool,
}

impl Expectation {
    pub(crate) fn new(is_met: bool, expected: impl Into<String>, seen: impl Into<String>) -> Self {
        Self {
            expected: expected.into(),
            observation: seen.into(),
            is_met,
        }
    }
}

/// A step that has begun.
#[must_use]
pub(crate) struct DemoStep {
    title: &'static str,
    started: Instant,
}

/// Prints results at once, and collects them for the report.
pub(crate) struct DemoOutput {
    form: OutputForm,
    number: u32,
    steps: Vec<Value>,
    expectations: Vec<Expectation>,
    notes: Vec<String>,
}

impl DemoOutput {
    pub(crate) fn new(form: OutputForm) -> Self {
        Self {
            form,
            number: 0,
            steps: Vec::new(),
            expectations: Vec::new(),
            notes: Vec::new(),
        }
    }

    /// Prints a line for people: to stdout, or to stderr if stdout gets JSON.
    pub(crate) fn print_line(&self, text: &str) {
        // The reader of the output may have ended. The world is removed anyway.
        let _ = match self.form {
            OutputForm::Table => writeln!(std::io::stdout(), "{text}"),
            OutputForm::Json => writeln!(std::io::stderr(), "{text}"),
        };
    }

    /// Adds lines that are shown after the expectations of the running step, such as a table.
    pub(crate) fn note(&mut self, lines: Vec<String>) {
        self.notes.extend(lines);
    }

    pub(crate) fn begin(&mut self, title: &'static str) -> DemoStep {
        self.number += 1;
        self.print_line(&format!("\n{}. {title}", self.number));
        DemoStep {
            title,
            started: Instant::now(),
        }
    }

    /// Shows the results of a step's expectations. A step that could not run counts as one failed
    /// expectation.
    pub(crate) fn end(&mut self, step: DemoStep, seen: VerbResult<Vec<Expectation>>) {
        let expectations = seen.unwrap_or_else(|failure| {
            vec![Expectation::new(
                false,
                "the step can be done",
                failure.to_string(),
            )]
        });
        for expectation in &expectations {
            let mark = if expectation.is_met {
                "held  "
            } else {
                "BROKEN"
            };
            self.print_line(&format!("   {mark}  expected {}", expectation.expected));
            self.print_line(&format!(
                "           seen {}",
                expectation.observation.replace('\n', "\n                ")
            ));
        }
        for line in std::mem::take(&mut self.notes) {
            self.print_line(&format!("   {line}"));
        }
        let each = expectations
            .iter()
            .map(|p| json!({ "expected": p.expected, "seen": p.observation, "held": p.is_met }));
        let seconds = step.started.elapsed().as_secs_f64();
        self.steps.push(json!({ "title": step.title, "seconds": seconds, "expectations": each.collect::<Vec<_>>() }));
        self.expectations.extend(expectations);
    }

    pub(crate) fn all_held(&self) -> bool {
        !self.expectations.is_empty() && self.expectations.iter().all(|p| p.is_met)
    }

    /// Prints the summary, and with JSON the report.
    pub(crate) fn finish(&self, elapsed: Duration) -> VerbResult {
        let is_met = self.expectations.iter().filter(|p| p.is_met).count();
        let text = format!(
            "{is_met} of {} expectations passed in {:.0} s; the world was removed",
            self.expectations.len(),
            elapsed.as_secs_f64()
        );
        self.print_line(&format!("\n{text}"));
        if !self.all_held() {
            self.expectations
                .iter()
                .filter(|p| !p.is_met)
                .for_each(|p| {
                    self.print_line(&format!("   FAILED  {}: {}", p.expected, p.observation))
                });
        }
        match self.form {
            OutputForm::Table => Ok(()),
            OutputForm::Json => {
                let report = json!({ "held": self.all_held(), "seconds": elapsed.as_secs_f64(), "steps": self.steps });
                output::line(&format!("{report:#}"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit::VerbError;

    #[test]
    fn a_failed_step_is_a_failed_expectation() {
        let mut screen = DemoOutput::new(OutputForm::Json);
        assert!(
            !screen.all_held(),
            "a run without expectations does not pass"
        );
        let step = screen.begin("one");
        screen.end(step, Ok(vec![Expectation::new(true, "a", "a")]));
        assert!(screen.all_held());
        let step = screen.begin("two");
        screen.end(step, Err(VerbError::failed("x", "y", "z")));
        assert!(!screen.all_held());
    }
}
