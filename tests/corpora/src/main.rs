//! `canal-corpora`: reads the YAML that other projects publish as examples and tests, and counts
//! the documents that Canal loads as they are written. It sends no traffic and judges no answers.
//! Start at [`judge::judge_document`].

#![forbid(unsafe_code)]

mod corpus;
mod judge;
mod tally;

use std::process::ExitCode;

use clap::Parser;

use crate::corpus::{CORPORA, Corpus};
use crate::judge::JudgedDocument;
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
}

fn main() -> anyhow::Result<ExitCode> {
    let flags = Flags::parse();
    let is_chosen =
        |corpus: &&Corpus| flags.corpus.is_empty() || flags.corpus.iter().any(|n| n == corpus.name);
    for corpus in CORPORA.iter().filter(is_chosen) {
        eprintln!(
            "{}: fetching {}@{}",
            corpus.name, corpus.module, corpus.version
        );
        let files = corpus.read()?;
        let documents: Vec<JudgedDocument> = files
            .iter()
            .flat_map(|file| judge::judge_file(&file.path, &file.text))
            .collect();
        let tally = Tally::of(&documents);
        print!("{}", tally.text(corpus.name, flags.kinds));
        for document in documents
            .iter()
            .filter(|document| flags.left && !document.is_loaded())
        {
            println!("  {document}");
        }
    }
    Ok(ExitCode::SUCCESS)
}
