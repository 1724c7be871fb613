//! Lists of differences: one per line with id, case, paths, and the observations of the meshed
//! ends. They are compared with the results of runs and with docs/compatibility.md. This module
//! runs no case itself.

use std::collections::{BTreeMap, BTreeSet};

use canal_e2e::root;

/// Observation of one case on one path by one tenant.
#[derive(Debug, Clone)]
pub(crate) struct CaseObservation {
    pub(crate) case: String,
    pub(crate) path: String,
    pub(crate) is_meshed: bool,
    pub(crate) text: String,
}

/// The cases that differ, and the meshed paths of each case.
#[derive(Default)]
pub(crate) struct CaseDifferences {
    /// Observations by case and path: (unmeshed, meshed).
    differing: BTreeMap<String, BTreeMap<String, (String, String)>>,
    walked: BTreeMap<String, BTreeSet<String>>,
}

impl CaseDifferences {
    /// Compares each meshed observation with the unmeshed one of the same address family.
    pub(crate) fn of(observed: &[CaseObservation]) -> Self {
        let family = |path: &str| path.chars().last();
        let plain: BTreeMap<_, _> = observed
            .iter()
            .filter(|o| !o.is_meshed)
            .map(|o| ((o.case.as_str(), family(&o.path)), o))
            .collect();
        let mut found = Self::default();
        for meshed in observed.iter().filter(|o| o.is_meshed) {
            found
                .walked
                .entry(meshed.case.clone())
                .or_default()
                .insert(meshed.path.clone());
            let unmeshed = plain
                .get(&(meshed.case.as_str(), family(&meshed.path)))
                .map(|o| o.text.clone());
            let unmeshed = unmeshed.unwrap_or_else(|| "not run".to_owned());
            if unmeshed != meshed.text {
                let both = (unmeshed, meshed.text.clone());
                found
                    .differing
                    .entry(meshed.case.clone())
                    .or_default()
                    .insert(meshed.path.clone(), both);
            }
        }
        found
    }
}

/// Placeholder for an observation that varies from run to run, on at least one path.
const ANY: &str = "*";
/// Placeholder for an observation that may differ with the machine or its load.
const MAY: &str = "~";
/// Placeholder for all paths.
const ALL: &str = "all";
/// Placeholder for an id: the difference has no reason yet.
const UNKNOWN: &str = "?";
/// Prefix of the names of paths to ports without a declared protocol.
const UNDECLARED: &str = "undeclared-";
/// Number of runs if the differences are not the listed ones; more than half of them must show a
/// problem. An odd number has a majority; a case that depends on chance costs one run or two.
const ROUNDS: usize = 5;
const HEAD: &str = "# Differences between meshed and unmeshed: id in docs/compatibility.md, case, paths, what the meshed ends observe.\n\
                    # `*`: it differs from run to run, on one path at the least; `~`: it may differ. CANAL_BLESS=1 writes this file.\n";
/// Both lists, and the document with their reasons.
const LISTS: [&str; 2] = [
    "tests/e2e/tests/cases/differences.tsv",
    "tests/e2e/tests/software/differences.tsv",
];
const DOCUMENT: &str = "docs/compatibility.md";

/// Repeats the runs until the differences equal the listed ones. Panics if most runs show other
/// differences.
///
/// `run` gets the programs in whose cases the last round showed a problem, and repeats at least
/// those; at first it gets none, and runs all.
pub(crate) fn compare_runs(
    list: &str,
    mut run: impl FnMut(&BTreeSet<String>) -> Vec<CaseObservation>,
) {
    let path = root().join(list);
    let mut counts: BTreeMap<String, (usize, String)> = BTreeMap::new();
    let mut again = BTreeSet::new();
    // Timing decides some observations, so only what most runs show counts as a difference.
    for round in 0..ROUNDS {
        let found = CaseDifferences::of(&run(&again));
        let listed = Differences::read(list);
        // With CANAL_BLESS=1 the list is written instead of compared.
        if std::env::var_os("CANAL_BLESS").is_some() {
            std::fs::write(&path, listed.renewed(&found))
                .unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            break;
        }
        let problems: Vec<Problem> = listed
            .unlisted(&found)
            .into_iter()
            .chain(listed.missing(&found))
            .collect();
        if problems.is_empty() {
            return;
        }
        println!("round {round}: {} problems", problems.len());
        again = problems
            .iter()
            .map(|problem| problem.program.clone())
            .collect();
        for Problem { what, detail, .. } in problems {
            println!("{what}{detail}");
            let entry = counts.entry(what).or_insert((0, detail));
            entry.0 += 1;
        }
        // No problem can still occur in most of the rounds, so the rest need not run.
        if counts
            .values()
            .all(|(count, _)| *count + (ROUNDS - 1 - round) <= ROUNDS / 2)
        {
            return;
        }
    }
    let problems: Vec<String> = counts
        .into_iter()
        .filter(|(_, (n, _))| *n > ROUNDS / 2)
        .map(|(what, (_, detail))| what + &detail)
        .collect();
    assert!(
        problems.is_empty(),
        "{} problems:\n{}",
        problems.len(),
        problems.join("\n")
    );
}

/// A difference that is not listed, or a listed one that did not occur.
struct Problem {
    /// Beginning of the names of a program's cases.
    program: String,
    what: String,
    /// Observations of both sides.
    detail: String,
}

impl Problem {
    fn of(case: &str, what: String, detail: String) -> Self {
        Self {
            program: case.split(':').next().unwrap_or(case).to_owned(),
            what,
            detail,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Difference {
    case: String,
    paths: String,
    observed: String,
    id: String,
}

impl Difference {
    fn is_on(&self, path: &str) -> bool {
        self.paths == ALL || self.paths.split(',').any(|own| own == path)
    }

    fn covers(&self, case: &str, path: &str, observed: &str) -> bool {
        self.case == case
            && self.is_on(path)
            && [ANY, MAY, observed].contains(&self.observed.as_str())
    }
}

/// The rows of the file `differences.tsv`.
pub(crate) struct Differences(Vec<Difference>);

impl Differences {
    fn read(list: &str) -> Self {
        Self::parse(&std::fs::read_to_string(root().join(list)).unwrap_or_default())
    }

    fn parse(text: &str) -> Self {
        let lines = text
            .lines()
            .filter(|line| !line.is_empty() && !line.starts_with('#'));
        let parse = |line: &str| {
            let parts: Vec<&str> = line.split('\t').collect();
            let &[id, case, paths, observed] = parts.as_slice() else {
                panic!("differences.tsv: {line:?}: four columns are needed")
            };
            Difference {
                id: id.into(),
                case: case.into(),
                paths: paths.into(),
                observed: observed.into(),
            }
        };
        Self(lines.map(parse).collect())
    }

    /// Differences that were found and are not listed.
    fn unlisted(&self, found: &CaseDifferences) -> Vec<Problem> {
        let mut all = Vec::new();
        for (case, by_path) in &found.differing {
            for (path, (unmeshed, meshed)) in by_path {
                if !self.0.iter().any(|one| one.covers(case, path, meshed)) {
                    let detail = format!("\n  unmeshed {unmeshed}\n  meshed   {meshed}");
                    all.push(Problem::of(
                        case,
                        format!("not listed: {case} {path}"),
                        detail,
                    ));
                }
            }
        }
        all
    }

    /// Listed differences that did not occur. Cases that did not run because their software is
    /// missing are left out.
    fn missing(&self, found: &CaseDifferences) -> Vec<Problem> {
        let mut missing = Vec::new();
        for (one, walked) in self
            .0
            .iter()
            .filter_map(|one| Some((one, found.walked.get(&one.case)?)))
        {
            let by_path = found.differing.get(&one.case);
            let meshed = |path: &String| {
                by_path
                    .and_then(|by_path| by_path.get(path))
                    .map(|(_, meshed)| meshed)
            };
            let paths = if one.paths == ALL {
                walked.clone()
            } else {
                one.paths.split(',').map(str::to_owned).collect()
            };
            let is_shown = |path: &String| {
                meshed(path).is_some_and(|meshed| one.covers(&one.case, path, meshed))
            };
            let (on, off): (Vec<&String>, Vec<&String>) =
                paths.iter().partition(|path| is_shown(path));
            // A gateway relays an undeclared port after a silence of 100 ms, as without the mesh; a
            // busy client may be silent for so long.
            let is_relayed =
                |path: &&String| path.starts_with(UNDECLARED) && meshed(path).is_none();
            // A difference that varies must show on some path; one that depends on load need not
            // show at all.
            let occurs = match one.observed.as_str() {
                MAY => true,
                ANY => !on.is_empty(),
                _ => !on.is_empty() && off.iter().all(is_relayed),
            };
            if !occurs {
                let what = format!(
                    "listed and gone, fix: remove it: {} {} {}",
                    one.id, one.case, one.paths
                );
                missing.push(Problem::of(
                    &one.case,
                    what,
                    format!(" {} (not on {off:?})", one.observed),
                ));
            }
        }
        missing
    }

    /// Returns ids that docs/compatibility.md lacks, and ids there that no listed difference has.
    fn unexplained(&self, document: &str) -> Vec<String> {
        let used: BTreeSet<&str> = self.0.iter().map(|one| one.id.as_str()).collect();
        let rows = document.lines().filter_map(|line| line.strip_prefix("| `"));
        let written: BTreeSet<&str> = rows
            .filter_map(|line| line.split('`').next())
            .filter(|id| id.starts_with("case-"))
            .collect();
        let missing = used
            .difference(&written)
            .map(|id| format!("docs/compatibility.md has no row that begins with `{id}`"));
        let unused = written
            .difference(&used)
            .map(|id| format!("docs/compatibility.md: no case shows `{id}`"));
        missing.chain(unused).collect()
    }

    /// Returns the list as this run found it. Ids stay with their cases, and so do observations
    /// that vary.
    fn renewed(&self, found: &CaseDifferences) -> String {
        let mut lines = BTreeSet::new();
        for (case, by_path) in &found.differing {
            let old = self.0.iter().find(|one| one.case == *case);
            let id = old.map_or(UNKNOWN, |one| one.id.as_str());
            if let Some(loose) = old.filter(|one| [ANY, MAY].contains(&one.observed.as_str())) {
                lines.insert(format!("{id}\t{case}\t{ALL}\t{}\n", loose.observed));
                continue;
            }
            let mut by_text: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
            by_path
                .iter()
                .for_each(|(path, (_, meshed))| by_text.entry(meshed).or_default().push(path));
            for (text, paths) in by_text {
                let paths = if paths.len() == found.walked[case].len() {
                    ALL.to_owned()
                } else {
                    paths.join(",")
                };
                lines.insert(format!("{id}\t{case}\t{paths}\t{text}\n"));
            }
        }
        // Cases that did not run, and differences that need not occur, stay.
        let kept = self
            .0
            .iter()
            .filter(|one| one.observed == MAY || !found.walked.contains_key(&one.case));
        lines.extend(kept.map(|one| {
            format!(
                "{}\t{}\t{}\t{}\n",
                one.id, one.case, one.paths, one.observed
            )
        }));
        HEAD.to_owned() + &lines.into_iter().collect::<String>()
    }
}

#[test]
fn every_difference_has_its_reason_in_the_document() {
    let text: String = LISTS
        .iter()
        .map(|list| {
            std::fs::read_to_string(root().join(list)).unwrap_or_else(|e| panic!("{list}: {e}"))
        })
        .collect();
    let document = std::fs::read_to_string(root().join(DOCUMENT))
        .unwrap_or_else(|e| panic!("{DOCUMENT}: {e}"));
    let problems = Differences::parse(&text).unexplained(&document);
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn unlisted_and_vanished_differences_are_reported() {
    let one = |is_meshed, text: &str| CaseObservation {
        case: "tcp:a".into(),
        path: "declared-pod4".into(),
        is_meshed,
        text: text.into(),
    };
    let found = CaseDifferences::of(&[one(false, "x"), one(true, "y")]);
    // A line has the ID of the reason, the case, its paths, and what is observed with the mesh.
    let list = Differences::parse;
    assert_eq!(list("").unlisted(&found).len(), 1);
    assert!(
        list("case-1\ttcp:a\tdeclared-pod4\ty")
            .unlisted(&found)
            .is_empty()
    );
    assert_eq!(
        list("case-1\ttcp:a\tdeclared-pod4\tz")
            .unlisted(&found)
            .len(),
        1,
        "another observation is another difference"
    );
    assert_eq!(
        list("case-1\ttcp:a\tdeclared-pod4\tz")
            .missing(&found)
            .len(),
        1
    );
    assert!(list("case-1\ttcp:a\tall\ty").missing(&found).is_empty());
    assert_eq!(
        list("case-1\ttcp:a\tdeclared-pod4,declared-pod6\ty")
            .missing(&found)
            .len(),
        1,
        "a difference that is listed for two paths and seen on one is reported"
    );
    // An undeclared port that shows no difference was relayed after its silence, as without the
    // mesh.
    let relayed = CaseObservation {
        path: "undeclared-pod4".into(),
        ..one(true, "x")
    };
    let both = CaseDifferences::of(&[one(false, "x"), one(true, "y"), relayed.clone()]);
    assert!(
        list("case-1\ttcp:a\tall\ty").missing(&both).is_empty(),
        "an undeclared port may be relayed"
    );
    let relayed = CaseDifferences::of(&[one(false, "x"), one(true, "x"), relayed]);
    assert_eq!(
        list("case-1\ttcp:a\tall\ty").missing(&relayed).len(),
        1,
        "a difference that no path shows is reported"
    );
    let equal = CaseDifferences::of(&[one(false, "x"), one(true, "x")]);
    assert_eq!(list("case-1\ttcp:a\tall\t*").missing(&equal).len(), 1);
    assert!(list("case-1\ttcp:a\tall\t~").missing(&equal).is_empty());
    assert!(
        list("case-1\ttcp:b\tall\t*").missing(&found).is_empty(),
        "a difference of a case that was not run is not reported"
    );
    let document = "| `case-1` | x |\n| `case-2` | y |\n";
    assert_eq!(
        list("case-1\ttcp:a\tall\t*").unexplained(document),
        ["docs/compatibility.md: no case shows `case-2`"]
    );
    assert_eq!(
        // Two problems: the document has no `case-3`, and no case shows `case-1`.
        list("case-3\ttcp:a\tall\t*")
            .unexplained("| `case-1` |")
            .len(),
        2
    );
    assert_eq!(
        list("?\ttcp:a\tall\t*").unexplained("").len(),
        1,
        "a difference without a reason"
    );
    assert!(
        list(&list("case-1\ttcp:a\tall\t*").renewed(&found))
            .missing(&found)
            .is_empty()
    );
}
