//! The repository's rules and test runner: `cargo xtask tidy` checks the tree, `cargo xtask test`
//! runs every suite and counts. It never edits sources.

#![forbid(unsafe_code)]

mod ast;
mod claims;
mod clocks;
mod commits;
mod compile;
mod count;
mod cycles;
mod doc_comments;
mod durations;
mod host;
mod jobs;
mod layers;
mod names;
mod outcomes;
mod process;
mod programs;
mod prose;
mod recipes;
mod report;
mod sbom;
mod schedule;
mod sizes;
mod soak;
mod source;
mod spare;
mod standstill;
mod suites;
mod supply;
mod tiers;
mod timing;
mod timing_table;
mod timing_verdict;
mod timings;
mod tree;
mod verdict;

use std::process::ExitCode;

const HELP: &str = "\
usage: cargo xtask <command>

  tidy            check the rules of the house: layers, import cycles, unsafe code, dead files, doc paths and tests named in docs, sizes, names, commit subjects,
                  bill of materials
  tidy --bless    rewrite docs/layers.txt from the crates as they are; read the diff before you commit it
  sbom            write the software bill of materials, CycloneDX JSON, to target/sbom.cdx.json
  test [SUITE..]  run the suites (tidy, supply, lint, plain, unit, e2e; default all), run what failed once more, alone, and close with
                  `N passed, N failed, N skipped`; the report is target/test-report.json; `--install` runs `setup/install test` beside the
                  build, `--no-worlds` leaves out programs that make network namespaces or worlds
  timing [JOB..]  build the release profile and run each timed test alone, 5 times or `--tries N`; evaluate its times and losses over the tries
                  and write docs/timing.md; exit 1: a bound does not hold, 3: the machine was too busy to say
  soak [PART..]   run the long parts (default all), each at most an hour; CANAL_SEED=N repeats a seeded one; writes docs/soak/PART.md:
";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = match words.as_slice() {
        // Help is also printed for `--help` after the command: `timing --help` must not start a run
        // of an hour.
        words
            if words.is_empty()
                || words[0] == "help"
                || words.iter().any(|word| ["--help", "-h"].contains(word)) =>
        {
            print!("{HELP}{}", soak::list());
            return ExitCode::SUCCESS;
        }
        ["tidy"] => tidy(false),
        ["tidy", "--bless"] => tidy(true),
        ["sbom"] => tree::SourceTree::read().and_then(|tree| sbom::write(&tree)),
        ["test", suites @ ..] => suites::run(suites),
        // A timing run has exit codes of its own.
        ["timing", words @ ..] => {
            return timing::run(words).unwrap_or_else(|e| {
                eprintln!("xtask: {e:#}");
                ExitCode::FAILURE
            });
        }
        ["soak", parts @ ..] => soak::run(parts),
        _ => {
            eprint!(
                "xtask: unknown command {:?}\n{HELP}{}",
                words.join(" "),
                soak::list()
            );
            // 1 and 3 have a meaning: a check that failed, and a machine that was too busy.
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("xtask: {e:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs every rule and prints each finding on one line. Returns true if there is none.
fn tidy(bless: bool) -> anyhow::Result<bool> {
    let tree = tree::SourceTree::read()?;
    let mut found = Vec::new();
    layers::check(&tree, bless, &mut found)?;
    cycles::check(&tree, &mut found);
    source::check(&tree, &mut found)?;
    names::check(&tree, &mut found);
    doc_comments::check(&tree, &mut found);
    sizes::check(&tree, &mut found);
    commits::check(&tree.root, &mut found)?;
    prose::check(&tree, &mut found)?;
    claims::check(&tree, &mut found);
    clocks::check(&tree, &mut found);
    recipes::check(&tree, &mut found);
    sbom::check(&tree, &mut found)?;
    for f in &found {
        println!("{f}");
    }
    println!(
        "tidy: {} files read, {} found",
        tree.files.len(),
        found.len()
    );
    Ok(found.is_empty())
}
