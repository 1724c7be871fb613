//! `canal diff`: what apply would change, as unified text; changes nothing.

use std::path::PathBuf;

use canal_wire::api::{ApplyRequest, DiffResponse, change};
use clap::Args;
use serde_json::{Value, json};

use crate::admin::{self, MeshArgs};
use crate::diagnostics;
use crate::exit::{Exit, Failure, Outcome};
use crate::files;
use crate::output::{self, OutputArgs};
use crate::tenant;

/// Shows what apply would change
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  canal diff --tenant alpha -f routes.yaml
  canal diff --tenant alpha -f mesh/ --exit-code    # exit code 6 when something would change")]
pub(crate) struct DiffArgs {
    /// YAML file, directory of YAML files, or - for stdin
    #[arg(short = 'f', long = "file", required = true, value_name = "PATH")]
    files: Vec<PathBuf>,
    /// End with exit code 6 when there are differences
    #[arg(long)]
    exit_code: bool,
    #[command(flatten)]
    tenant: tenant::TenantArgs,
    #[command(flatten)]
    mesh: MeshArgs,
    #[command(flatten)]
    output: OutputArgs,
}

pub(crate) async fn run(args: DiffArgs) -> Outcome {
    let files = files::read(&args.files)?;
    let mut admin = admin::connect(&args.mesh).await?;
    let tenant = tenant::decide(&args.tenant, &mut admin).await?;
    let request = ApplyRequest { tenant, files, dry_run: true };
    let answer = admin.diff(request).await.map_err(|status| admin::refused(&status))?.into_inner();
    diagnostics::lines(&answer.diagnostics).iter().for_each(|line| eprintln!("{line}"));
    output::print(args.output.format, &value(&answer), || lines(&answer))?;
    if diagnostics::any_error(&answer.diagnostics) {
        return Err(Failure::told(Exit::Failed));
    }
    let differs = answer.changes.iter().any(|c| c.what() != change::What::Unchanged);
    if differs && args.exit_code { Err(Failure::told(Exit::Differs)) } else { Ok(()) }
}

fn value(answer: &DiffResponse) -> Value {
    let changes = answer
        .changes
        .iter()
        .map(|c| json!({ "what": diagnostics::what(c), "kind": c.kind, "namespace": c.namespace, "name": c.name, "diff": c.diff }));
    json!({ "changes": changes.collect::<Vec<_>>(), "diagnostics": diagnostics::values(&answer.diagnostics) })
}

fn lines(answer: &DiffResponse) -> Vec<String> {
    let changed = answer.changes.iter().filter(|c| c.what() != change::What::Unchanged);
    changed
        .map(|c| format!("# {} {}\n{}", diagnostics::object(c), diagnostics::what(c), c.diff.trim_end()))
        .chain(answer.changes.is_empty().then(|| "no objects".to_owned()))
        .collect()
}
