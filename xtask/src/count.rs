//! Counts tests from libtest's output. It decides no verdict.

/// Numbers of tests by outcome.
#[derive(Default, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Count {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
    /// Number of tests whose outcome libtest reported, ignored ones included.
    pub(crate) reported: u64,
}

impl Count {
    /// Returns the count of one check.
    pub(crate) fn of(is_well: bool) -> Self {
        Self {
            passed: is_well.into(),
            failed: (!is_well).into(),
            ..Self::default()
        }
    }

    pub(crate) fn add(&mut self, more: Self) {
        self.passed += more.passed;
        self.failed += more.failed;
        self.skipped += more.skipped;
        self.reported += more.reported;
    }
}

/// Reads `test result: ok. 5 passed; 0 failed; 0 ignored; …` and our own `SKIPPED: why` lines.
pub(crate) fn read_line(line: &str) -> Count {
    let mut c = Count::default();
    // If tests run one by one, the first output of a test follows its name on the same line.
    let text = line
        .split_once(" ... ")
        .filter(|_| line.starts_with("test "))
        .map_or(line, |(_, text)| text);
    if text.trim_start().starts_with("SKIPPED:") {
        c.skipped = 1;
    }
    let Some(rest) = line.strip_prefix("test result: ") else {
        return c;
    };
    for part in rest.split(['.', ';']) {
        let mut words = part.split_whitespace();
        let (Some(n), Some(what)) = (
            words.next().and_then(|n| n.parse::<u64>().ok()),
            words.next(),
        ) else {
            continue;
        };
        match what {
            "passed" => c.passed = n,
            "failed" => c.failed = n,
            "ignored" => c.skipped += n,
            _ => continue,
        }
        c.reported += n;
    }
    c
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn result_lines_are_counted() {
        let counted = |line: &str| {
            let c = read_line(line);
            (c.passed, c.failed, c.skipped, c.reported)
        };
        let line = "test result: FAILED. 12 passed; 3 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.10s";
        assert_eq!(counted(line), (12, 3, 1, 16));
        assert_eq!(counted("SKIPPED: no BPF here"), (0, 0, 1, 0));
        assert_eq!(counted("test a_world ... SKIPPED: no root"), (0, 0, 1, 0));
        assert_eq!(counted("running 5 tests"), (0, 0, 0, 0));
    }
}
