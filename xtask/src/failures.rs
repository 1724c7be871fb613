//! Panics in a run's log: repeats those of failing tests at its end, and omits those that passing tests caught, because they look like
//! failures. It reads libtest's output and decides nothing about a test.

/// Limits on the repeated part of one panic: lines, and characters per line.
const LINES_MAX: usize = 10;
const CHARS_MAX: usize = 400;

/// Panics and names of the failed tests, one program after another.
#[derive(Default)]
pub(crate) struct Failures {
    /// Panics of the running program: the thread's name and the lines that it printed.
    panics: Vec<(String, Vec<String>)>,
    is_panicking: bool,
    /// Names of the running program's failed tests.
    names: Vec<String>,
    lists_names: bool,
    repeated: Vec<String>,
}

impl Failures {
    /// Processes the next line.
    pub(crate) fn read_line(&mut self, line: &str) {
        if let Some(name) = line.strip_prefix("thread '").filter(|l| l.contains("panicked at")).and_then(|l| l.split('\'').next()) {
            self.panics.push((name.to_owned(), Vec::new()));
            self.is_panicking = true;
        }
        self.is_panicking &= !line.starts_with("note: ") && !line.starts_with("test ");
        if let Some((_, output)) = self.panics.last_mut().filter(|(_, output)| self.is_panicking && output.len() < LINES_MAX) {
            output.push(line.chars().take(CHARS_MAX).collect());
        }
        if line == "failures:" {
            // libtest prints the list of names last, under this heading.
            (self.lists_names, self.is_panicking) = (true, false);
            self.names.clear();
        } else if self.lists_names && line.starts_with("    ") {
            self.names.push(line.trim().to_owned());
        }
        if line.starts_with("test result: ") {
            self.end();
        }
    }

    fn end(&mut self) {
        for name in std::mem::take(&mut self.names) {
            self.repeated.push(format!("== failed: {name}"));
            let output = self.panics.iter().filter(|(thread, _)| *thread == name).flat_map(|(_, output)| output);
            self.repeated.extend(output.cloned());
        }
        *self = Self { repeated: std::mem::take(&mut self.repeated), ..Self::default() };
    }

    /// Returns all lines that are repeated at the end.
    pub(crate) fn print_failures(&self) -> &[String] {
        &self.repeated
    }
}

/// Returns the lines without the panics that libtest shows as output of passed tests (`--show-output`). All other output of those tests
/// stays.
pub(crate) fn without_caught_panics(lines: &[String]) -> impl Iterator<Item = &String> {
    let (mut is_of_passed, mut is_panicking) = (false, false);
    lines.iter().filter(move |line| {
        if line.starts_with("failures:") || line.starts_with("test result: ") {
            (is_of_passed, is_panicking) = (false, false);
        }
        is_of_passed |= *line == "successes:";
        is_panicking |= is_of_passed && line.starts_with("thread '") && line.contains("panicked at");
        let is_shown = !is_panicking;
        // The hint about backtraces, or the next test's heading, ends a panic.
        if line.starts_with("note: ") || line.starts_with("---- ") || line.is_empty() {
            is_panicking = false;
        }
        is_shown
    })
}

#[cfg(test)]
mod tests {
    use super::{Failures, without_caught_panics};

    #[test]
    fn panic_of_a_passing_test_is_left_out() {
        let printed = "test a ... ok\n\nsuccesses:\n\n---- a stdout ----\nSKIPPED: no BPF\n\nthread 'a' (8) panicked at c.rs:3:3:\ncaught\nstack backtrace:\n   \
            0: main\nnote: run with\n3 of 5\n\nsuccesses:\n    a\n\nfailures:\n\n---- b stdout ----\n\nthread 'b' (9) panicked at c.rs:4:4:\nlost\n\nfailures:\n    b\n";
        let printed: Vec<String> = printed.lines().map(str::to_owned).collect();
        let caught = ["thread 'a' (8) panicked at c.rs:3:3:", "caught", "stack backtrace:", "   0: main", "note: run with"];
        let wanted: Vec<&String> = printed.iter().filter(|line| !caught.contains(&line.as_str())).collect();
        assert_eq!(without_caught_panics(&printed).collect::<Vec<_>>(), wanted);
    }

    #[test]
    fn only_output_of_failing_tests_is_repeated() {
        let mut failures = Failures::default();
        let one_by_one = "running 2 tests\ntest that_passes ... \nthread 'that_passes' (6) panicked at a.rs:1:1:\ncaught\nok\n\
            test that_fails ... \nthread 'that_fails' (7) panicked at b.rs:2:2:\nnot within 20s: peace\nnote: run with `RUST_BACKTRACE=1`\nFAILED\n\n\
            failures:\n\nfailures:\n    that_fails\n\ntest result: FAILED. 1 passed; 1 failed;";
        let captured = "test a::b ... FAILED\n\nfailures:\n\n---- a::b stdout ----\n\nthread 'a::b' (8) panicked at c.rs:3:3:\n    left: 1\n   right: 2\n\
            note: run with\n\n\nfailures:\n    a::b\n\ntest result: FAILED. 0 passed; 1 failed;";
        let well = "test c ... ok\ntest result: ok. 1 passed; 0 failed;";
        [one_by_one, captured, well].iter().flat_map(|text| text.lines()).for_each(|line| failures.read_line(line));
        let wanted = [
            "== failed: that_fails",
            "thread 'that_fails' (7) panicked at b.rs:2:2:",
            "not within 20s: peace",
            "== failed: a::b",
            "thread 'a::b' (8) panicked at c.rs:3:3:",
            "    left: 1",
            "   right: 2",
        ];
        assert_eq!(failures.print_failures(), wanted);
    }
}
