//! The golden policies and the named cases of `cases/`: their questions, and requests made from
//! their rules, on every target. A case with an expected result must also give that result, so that
//! the oracle and the targets cannot be wrong together.

use std::path::{Path, PathBuf};

use canal_differential::policy::{Policy, files, name_of};
use canal_differential::probe::probes;
use canal_differential::{RoutingComparison, RoutingTally, format_verdict};

fn folder(place: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(place)
}

/// Returns the problems with one file.
fn check(path: &Path, tally: &mut RoutingTally) -> Vec<String> {
    let policy = Policy::read(path);
    let Some(comparison) = RoutingComparison::of(&policy.input()) else {
        return Vec::new();
    };
    let mut wrong = Vec::new();
    for question in &policy.questions {
        match (
            comparison.compare(&question.request, tally),
            &question.expected,
        ) {
            (Err(difference), _) => wrong.push(format!(
                "{}: {}: {difference}",
                name_of(path),
                question.text
            )),
            (Ok(verdict), Some(expected)) if format_verdict(&verdict) != *expected => {
                wrong.push(format!(
                    "{}: {}: all say {}",
                    name_of(path),
                    question.text,
                    format_verdict(&verdict)
                ));
            }
            (Ok(_), _) => {}
        }
    }
    let bent = probes(&comparison.ir)
        .into_iter()
        .filter_map(|request| comparison.compare(&request, tally).err());
    // One difference per policy is enough to start the analysis.
    wrong.extend(
        bent.take(1)
            .map(|difference| format!("{}: {difference}", name_of(path))),
    );
    wrong
}

fn check_all(place: &str, least_comparisons: usize) {
    let mut tally = RoutingTally::default();
    let wrong: Vec<String> = files(&folder(place))
        .iter()
        .flat_map(|path| check(path, &mut tally))
        .collect();
    assert!(
        wrong.is_empty(),
        "{} differences:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    println!("{place}: {tally:?}");
    assert!(
        tally.comparisons >= least_comparisons && tally.http1 * 3 >= tally.comparisons,
        "{tally:?}"
    );
}

#[test]
fn golden_policies_mean_the_same_everywhere() {
    check_all("../golden/compiler", 1_000);
}

#[test]
fn named_cases_have_their_expected_result_on_every_target() {
    check_all("cases", 1_000);
}

/// A case without an expected result has not been thought through.
#[test]
fn every_question_of_a_case_has_an_expectation() {
    let files = files(&folder("cases"));
    assert!(files.len() >= 12, "the cases are not there");
    for path in files {
        let policy = Policy::read(&path);
        assert!(
            !policy.questions.is_empty(),
            "{} asks nothing",
            name_of(&path)
        );
        for question in policy.questions {
            assert!(
                question.expected.is_some(),
                "{}: {}",
                name_of(&path),
                question.text
            );
        }
    }
}
