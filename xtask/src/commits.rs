//! Rules on commits: each subject since [`FIRST`] is in the imperative and at most 72 columns wide.
//! It reads git's log and changes nothing.

use std::path::Path;
use std::process::Command;

use anyhow::Context;

/// The commit after which the rules apply.
const FIRST: &str = "6dc33429c8fcce60b39d78ce36ea26a6d7fbcfeb";
/// Maximum columns of a subject, which `git log --oneline` then shows in 80 with the hash.
const SUBJECT_COLUMNS_MAX: usize = 72;
/// Verbs whose imperative ends like a participle or a third person.
const IMPERATIVES: [&str; 18] = [
    "access", "address", "bless", "bring", "bypass", "cross", "discuss", "embed", "express",
    "feed", "focus", "need", "pass", "press", "process", "shed", "string", "suppress",
];

pub(crate) fn check(root: &Path, found: &mut Vec<String>) -> anyhow::Result<()> {
    let range = format!("{FIRST}..HEAD");
    let log = Command::new("git")
        .args(["log", "--no-merges", "--format=%h %s", &range])
        .current_dir(root)
        .output()
        .context("git log")?;
    if !log.status.success() {
        // A shallow clone, or an archive without history, does not have the first commit.
        println!(
            "SKIPPED: commit subjects: the history does not reach back to {}",
            &FIRST[..10]
        );
        return Ok(());
    }
    for line in String::from_utf8_lossy(&log.stdout).lines() {
        let (commit, subject) = line.split_once(' ').unwrap_or((line, ""));
        if let Some(problem) = problem_of(subject) {
            found.push(format!("commit {commit}: {subject:?} {problem}"));
        }
    }
    Ok(())
}

/// Returns the problem of a subject, if it has one.
fn problem_of(subject: &str) -> Option<String> {
    let columns = subject.chars().count();
    if columns > SUBJECT_COLUMNS_MAX {
        return Some(format!(
            "has {columns} columns, the limit is {SUBJECT_COLUMNS_MAX}"
        ));
    }
    // The component before a colon is optional.
    let change = subject
        .split_once(": ")
        .map_or(subject, |(_, change)| change);
    let verb = change
        .split([' ', ','])
        .next()
        .unwrap_or_default()
        .to_lowercase();
    let is_other_form = ["ed", "ing", "s"]
        .iter()
        .any(|ending| verb.ends_with(ending))
        && !IMPERATIVES.contains(&verb.as_str());
    let is_word = !verb.is_empty() && verb.chars().all(|c| c.is_ascii_lowercase() || c == '-');
    (is_other_form || !is_word)
        .then(|| format!("does not begin with a verb in the imperative: {verb:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subjects_are_short_and_in_the_imperative() {
        for good in [
            "node: move the timeout into PodContext",
            "gateway, node: pass the peer on",
            "docs: retract a cause",
            "Fix the build",
        ] {
            assert_eq!(problem_of(good), None, "{good}");
        }
        for bad in [
            "hub's fleet test: its bounds of before, and a great deal more that nobody can read at once",
            "Fixed the build",
            "docs: fixed a figure",
            "docs: naming the commits",
            "",
        ] {
            assert!(problem_of(bad).is_some(), "{bad}");
        }
    }
}
