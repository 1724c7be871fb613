//! The command line: the verbs, and the options that all of them share.

use clap::{Parser, Subcommand};

use crate::exit::EXIT_CODES;
use crate::verbs::{
    analyze, apply, ca, compile, completion, config, delete, demo, diff, explain, gateway, get,
    logs, metrics, sessions, status, tap, up, world,
};

/// Canal: a sidecar-free, multi-tenant service mesh
#[derive(Debug, Parser)]
#[command(name = "canal", version, after_help = EXIT_CODES, arg_required_else_help = true)]
pub(crate) struct Canal {
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    Up(up::UpArgs),
    Demo(demo::DemoArgs),
    World(world::WorldArgs),
    Analyze(analyze::AnalyzeArgs),
    Apply(apply::ApplyArgs),
    Ca(ca::CaArgs),
    Get(get::GetArgs),
    Delete(delete::DeleteArgs),
    Diff(diff::DiffArgs),
    Explain(explain::ExplainArgs),
    Status(status::StatusArgs),
    Gateway(gateway::GatewayArgs),
    Sessions(sessions::SessionsArgs),
    Config(config::ConfigArgs),
    Logs(logs::LogsArgs),
    Metrics(metrics::MetricsArgs),
    Tap(tap::TapArgs),
    Compile(compile::CompileArgs),
    Completion(completion::CompletionArgs),
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    /// Returns the verb and all verbs below it.
    fn all(command: &clap::Command) -> Vec<&clap::Command> {
        std::iter::once(command)
            .chain(command.get_subcommands().flat_map(all))
            .collect()
    }

    #[test]
    fn the_command_line_is_sound() {
        Canal::command().debug_assert();
    }

    #[test]
    fn every_verb_has_a_line_and_an_example() {
        let command = Canal::command();
        for verb in all(&command)
            .into_iter()
            .skip(1)
            .filter(|verb| !verb.is_hide_set())
        {
            assert!(
                verb.get_about().is_some(),
                "{} has no line",
                verb.get_name()
            );
            let help = verb
                .get_after_help()
                .map(ToString::to_string)
                .unwrap_or_default();
            assert!(
                help.contains("canal "),
                "{} has no example",
                verb.get_name()
            );
        }
    }

    #[test]
    fn examples_can_be_typed() {
        let command = Canal::command();
        for verb in all(&command) {
            let help = verb
                .get_after_help()
                .map(ToString::to_string)
                .unwrap_or_default();
            for line in help
                .lines()
                .map(str::trim)
                .filter(|line| line.starts_with("canal "))
            {
                let typed = line.split(['|', '>', '#', '&']).next().unwrap_or_default();
                if let Err(problem) = Canal::try_parse_from(typed.split_whitespace()) {
                    panic!("{line}: {problem}");
                }
            }
        }
    }
}
