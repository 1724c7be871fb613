//! `canal-corpora`: reads the YAML that other projects publish as examples and tests, and counts
//! the documents that Canal loads as they are written. The objects of one file are compiled
//! together in a tenant. It sends no traffic and evaluates no answers. Start at [`evaluation::evaluate_file`].

#![forbid(unsafe_code)]

mod corpus;
mod evaluation;
mod outcome;
mod policy_document;
mod suite_objects;
mod surroundings;
mod tally;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;

use crate::corpus::{CORPORA, Corpus};
use crate::evaluation::DocumentVerdict;
use crate::policy_document::PolicyDocument;
use crate::surroundings::Surroundings;
use crate::tally::Tally;

/// Counts the documents of Istio's and Gateway API's corpora that Canal loads. It needs Go, which
/// fetches each corpus once.
#[derive(Debug, Parser)]
#[command(after_help = "Examples:
  canal-corpora                                  # the counts of all corpora
  canal-corpora --corpus istio-samples --left    # and each document that is not loaded, with the reason")]
struct Flags {
    /// Corpus to read; may be repeated [default: all]
    #[arg(long, value_name = "NAME", value_parser = CORPORA.map(|corpus| corpus.name))]
    corpus: Vec<String>,
    /// Also print each document that is not loaded, with the first reason
    #[arg(long)]
    left: bool,
    /// Also print the counts of each kind
    #[arg(long)]
    kinds: bool,
    /// Also print this many of the most frequent reasons for which documents of due kinds are not
    /// loaded
    #[arg(long, value_name = "N", default_value_t = 10)]
    reasons: usize,
    /// Write the documents of policy that are not loaded, with the specification's reasons, to this
    /// page
    #[arg(long, value_name = "FILE")]
    write_policy: Option<PathBuf>,
}

/// Exit code of a run of which a corpus has too few loaded documents.
const BAR_MISSED: u8 = 1;
/// Exit code of a run that could not count.
const NOT_COUNTED: u8 = 2;

fn main() -> ExitCode {
    match run(&Flags::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(BAR_MISSED),
        Err(problem) => {
            eprintln!("canal-corpora: {problem:#}");
            ExitCode::from(NOT_COUNTED)
        }
    }
}

/// Counts, and returns whether enough documents of every corpus are loaded.
fn run(flags: &Flags) -> anyhow::Result<bool> {
    let mut page = PolicyDocument::default();
    let is_chosen =
        |corpus: &&Corpus| flags.corpus.is_empty() || flags.corpus.iter().any(|n| n == corpus.name);
    for corpus in CORPORA.iter().filter(is_chosen) {
        eprintln!(
            "{}: fetching {}@{}",
            corpus.name, corpus.module, corpus.version
        );
        let files = corpus.read()?;
        let base = files.base.iter();
        let surroundings =
            Surroundings::new(base.map(|file| (file.path.as_str(), file.text.as_str())));
        let documents: Vec<DocumentVerdict> = files
            .policies
            .iter()
            .flat_map(|file| evaluation::evaluate_file(&surroundings, &file.path, &file.text))
            .collect();
        let tally = Tally::of(&documents);
        print!("{}", tally.text(corpus.name, flags.kinds, flags.reasons));
        for document in documents
            .iter()
            .filter(|document| flags.left && !document.is_loaded())
        {
            println!("  {document}");
        }
        println!("{}", page.add(corpus, &documents));
    }
    if let Some(path) = &flags.write_policy {
        std::fs::write(path, page.text()).with_context(|| path.display().to_string())?;
    }
    Ok(page.is_bar_held())
}
