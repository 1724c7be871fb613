//! The verdict on the tries of a timed test, for each of its figures by the figure's kind. It runs
//! nothing.

use std::collections::BTreeMap;

/// Factor by which a single time may exceed its bound, if the median is within the bound.
/// docs/testing.md states it.
const OUTLIER_FACTOR: f64 = 3.0;
/// Number of tries per failed one: of five tries, one may fail.
/// docs/testing.md states it.
const TRIES_PER_NO: usize = 5;
/// Maximum number of void tries of a test. With more, the test is undecided on this machine.
/// As many as the tries that must count, so that at most every second try is void.
pub(crate) const VOID_MAX: usize = 5;
/// Name of the figure that every test has: it passed, or it did not.
const PASSES: &str = "the test passes";

/// The kind of bound that a figure is compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FigureKind {
    Holds,
    Seconds,
    Losses,
}

/// A figure of one try.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Figure {
    kind: FigureKind,
    value: f64,
    bound: f64,
}

/// The figures of one try, by name.
pub(crate) type Try = BTreeMap<String, Figure>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Passed,
    Failed,
    Undecided,
}

/// A figure over all tries.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct JudgedFigure {
    pub(crate) name: String,
    pub(crate) kind: FigureKind,
    pub(crate) bound: String,
    pub(crate) tries: String,
    pub(crate) result: String,
    pub(crate) verdict: Verdict,
}

impl FigureKind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Holds => "yes or no",
            Self::Seconds => "seconds",
            Self::Losses => "losses",
        }
    }
}

impl Verdict {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed => "FAILED",
            Self::Undecided => "No verdict: the machine",
        }
    }
}

/// Reads a line of a figure: kind, name, figure and bound, separated by tabs.
fn read_figure(line: &str) -> Option<(String, Figure)> {
    let [kind, name, value, bound] = line.split('\t').collect::<Vec<_>>()[..] else {
        return None;
    };
    let number = |text: &str| match text {
        "true" => Some(1.0),
        "false" => Some(0.0),
        _ => text.parse::<f64>().ok(),
    };
    let kind = match kind {
        "holds" => FigureKind::Holds,
        "seconds" => FigureKind::Seconds,
        "losses" => FigureKind::Losses,
        _ => return None,
    };
    Some((
        name.to_owned(),
        Figure {
            kind,
            value: number(value)?,
            bound: number(bound)?,
        },
    ))
}

/// Reads a try from a process that ran one test. Of a figure that was reported several times, it
/// takes the longest time, the sum of losses, and "yes" only if it held each time. A failed
/// assertion that does not concern time makes the try fail.
pub(crate) fn read_try<'a>(
    lines: impl Iterator<Item = &'a str>,
    is_passed: bool,
) -> anyhow::Result<Try> {
    let mut figures = Try::new();
    for line in lines {
        let (name, new) = read_figure(line)
            .ok_or_else(|| anyhow::anyhow!("{line:?} is no figure: kind, name, figure, bound"))?;
        figures
            .entry(name)
            .and_modify(|old| *old = join(*old, new))
            .or_insert(new);
    }
    figures.insert(
        PASSES.to_owned(),
        Figure {
            kind: FigureKind::Holds,
            value: f64::from(u8::from(is_passed)),
            bound: 1.0,
        },
    );
    Ok(figures)
}

fn join(old: Figure, new: Figure) -> Figure {
    match old.kind {
        FigureKind::Holds => Figure {
            value: old.value.min(new.value),
            ..old
        },
        FigureKind::Seconds => {
            if ratio(new) > ratio(old) {
                new
            } else {
                old
            }
        }
        FigureKind::Losses => Figure {
            value: old.value + new.value,
            bound: old.bound + new.bound,
            ..old
        },
    }
}

/// Returns a time as a fraction of its bound.
fn ratio(figure: Figure) -> f64 {
    if figure.value <= 0.0 {
        0.0
    } else {
        figure.value / figure.bound
    }
}

/// Decides the verdict on the valid tries of a test.
pub(crate) fn decide_figures(tries: &[Try], voids: usize) -> Vec<JudgedFigure> {
    let mut figures: BTreeMap<&String, Vec<Figure>> = BTreeMap::new();
    tries
        .iter()
        .flatten()
        .for_each(|(name, figure)| figures.entry(name).or_default().push(*figure));
    if voids > VOID_MAX {
        let tries = format!("{voids} void");
        let verdict = Verdict::Undecided;
        let (bound, result) = ("yes".to_owned(), "-".to_owned());
        return vec![JudgedFigure {
            name: PASSES.to_owned(),
            kind: FigureKind::Holds,
            bound,
            tries,
            result,
            verdict,
        }];
    }
    figures
        .into_iter()
        .map(|(name, all)| decide_figure(name, &all, tries.len()))
        .collect()
}

fn decide_figure(name: &str, all: &[Figure], tries: usize) -> JudgedFigure {
    let kind = all[0].kind;
    let (bound, result, is_held) = match kind {
        FigureKind::Holds => {
            let no = all.iter().filter(|figure| figure.value < 1.0).count();
            (
                "yes".to_owned(),
                format!("{} of {}", all.len() - no, all.len()),
                // A condition may fail now and then on a shared machine.
                no <= tries / TRIES_PER_NO,
            )
        }
        FigureKind::Seconds => {
            let mut sorted = all.to_vec();
            sorted.sort_by(|a, b| ratio(*a).total_cmp(&ratio(*b)));
            // With an even number of tries, the median is the longer of the two in the middle.
            let (median, longest) = (sorted[sorted.len() / 2], sorted[sorted.len() - 1]);
            // The median decides; one slow try may exceed the bound by a factor.
            let is_held = ratio(median) <= 1.0 && ratio(longest) <= OUTLIER_FACTOR;
            (
                number(median.bound),
                format!("median {}", number(median.value)),
                is_held,
            )
        }
        // Losses are summed, because each try counts few of them.
        FigureKind::Losses => {
            let sum = |part: fn(&Figure) -> f64| all.iter().map(part).sum::<f64>();
            let (lost, bound) = (sum(|figure| figure.value), sum(|figure| figure.bound));
            (
                number(bound / all.len() as f64),
                format!("sum {} of {}", number(lost), number(bound)),
                lost <= bound,
            )
        }
    };
    let value = |figure: &Figure| match kind {
        FigureKind::Holds => (if figure.value < 1.0 { "no" } else { "yes" }).to_owned(),
        FigureKind::Seconds | FigureKind::Losses => number(figure.value),
    };
    let tries = all.iter().map(value).collect::<Vec<_>>().join(", ");
    let verdict = if is_held {
        Verdict::Passed
    } else {
        Verdict::Failed
    };
    JudgedFigure {
        name: name.to_owned(),
        kind,
        bound,
        tries,
        result,
        verdict,
    }
}

/// Formats a number with at most three decimals.
fn number(value: f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tries(lines: &[&[&str]]) -> Vec<Try> {
        lines
            .iter()
            .map(|lines| read_try(lines.iter().copied(), true).unwrap())
            .collect()
    }

    fn verdict(kind: &str, bound: &str, values: [&str; 5]) -> Verdict {
        let lines = values.map(|value| format!("{kind}\ta name\t{value}\t{bound}"));
        let tries = tries(
            &lines
                .each_ref()
                .map(|line| [line.as_str()])
                .each_ref()
                .map(|lines| &lines[..]),
        );
        decide_figures(&tries, 0)
            .iter()
            .find(|figure| figure.name == "a name")
            .unwrap()
            .verdict
    }

    #[test]
    fn yes_or_no_holds_in_four_of_five_tries() {
        let (t, f) = ("true", "false");
        assert_eq!(verdict("holds", "true", [t, t, f, t, t]), Verdict::Passed);
        assert_eq!(verdict("holds", "true", [t, f, f, t, t]), Verdict::Failed);
    }

    #[test]
    fn the_median_of_times_is_within_the_bound_and_none_is_three_times_as_long() {
        assert_eq!(
            verdict("seconds", "1", ["0.1", "2.9", "1.0", "2.0", "0.5"]),
            Verdict::Passed
        );
        assert_eq!(
            verdict("seconds", "1", ["0.1", "3.1", "0.2", "0.3", "0.5"]),
            Verdict::Failed,
            "one is too long"
        );
        assert_eq!(
            verdict("seconds", "1", ["0.1", "1.1", "1.2", "1.3", "0.5"]),
            Verdict::Failed,
            "the median is too long"
        );
    }

    #[test]
    fn the_sum_of_losses_is_within_five_times_the_bound() {
        assert_eq!(
            verdict("losses", "2", ["10", "0", "0", "0", "0"]),
            Verdict::Passed
        );
        assert_eq!(
            verdict("losses", "2", ["10", "1", "0", "0", "0"]),
            Verdict::Failed
        );
        assert_eq!(
            verdict("losses", "0", ["0", "0", "0", "0", "0"]),
            Verdict::Passed
        );
    }

    #[test]
    fn a_failed_assertion_is_a_no() {
        let of = |passed: [bool; 5]| {
            let tries: Vec<Try> = passed
                .iter()
                .map(|passed| read_try([].into_iter(), *passed).unwrap())
                .collect();
            decide_figures(&tries, 5)[0].clone()
        };
        assert_eq!(
            (
                of([true, true, false, true, true]).verdict,
                of([false, true, false, true, true]).verdict
            ),
            (Verdict::Passed, Verdict::Failed)
        );
        assert_eq!(
            of([true, true, false, true, true]).tries,
            "yes, yes, no, yes, yes"
        );
    }

    #[test]
    fn more_than_five_void_tries_give_no_verdict() {
        let judged = decide_figures(&[], VOID_MAX + 1);
        assert_eq!(
            (judged[0].verdict, judged[0].tries.as_str()),
            (Verdict::Undecided, "6 void")
        );
    }

    #[test]
    fn a_figure_that_is_reported_twice_in_a_try_is_one() {
        let one = &tries(&[&[
            "seconds\tt\t0.5\t1",
            "seconds\tt\t1.5\t2",
            "losses\tl\t1\t2",
            "losses\tl\t4\t2",
            "holds\th\ttrue\ttrue",
            "holds\th\tfalse\ttrue",
        ]])[0];
        assert_eq!((one["t"].value, one["t"].bound), (1.5, 2.0));
        assert_eq!((one["l"].value, one["l"].bound), (5.0, 4.0));
        assert_eq!(one["h"].value, 0.0);
        assert!(read_try(["seconds\tt\tlate\t1"].into_iter(), true).is_err());
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!(
            [0.25, 3.0, 0.1234, 100.0].map(number),
            ["0.25", "3", "0.123", "100"]
        );
    }
}
