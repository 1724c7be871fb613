//! `canal completion`: prints the completion script of a shell.

use clap::{Args, CommandFactory};
use clap_complete::Shell;

use crate::cli::Canal;
use crate::exit::VerbResult;
use crate::output;

/// Prints a shell's completion script
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  canal completion bash > /etc/bash_completion.d/canal
  canal completion zsh > ~/.zfunc/_canal")]
pub(crate) struct CompletionArgs {
    shell: Shell,
}

pub(crate) fn run(args: &CompletionArgs) -> VerbResult {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Canal::command(), "canal", &mut script);
    output::line(String::from_utf8_lossy(&script).trim_end())
}
