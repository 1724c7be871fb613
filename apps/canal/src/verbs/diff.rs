//! `canal diff`: prints what apply would change as unified text, and changes nothing.

use std::path::PathBuf;

use canal_json_api::v1::DiffView;
use canal_wire::api::{ApplyRequest, DiffResponse, change};
use clap::Args;

use crate::admin::{self, MeshArgs};
use crate::diagnostics;
use crate::exit::{ExitStatus, VerbError, VerbResult};
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

pub(crate) async fn run(args: DiffArgs) -> VerbResult {
    let files = files::read(&args.files)?;
    let mut admin = admin::connect(&args.mesh).await?;
    let tenant = tenant::decide(&args.tenant, &mut admin).await?;
    let request = ApplyRequest {
        tenant,
        files,
        dry_run: true,
    };
    let answer = admin
        .diff(request)
        .await
        .map_err(|status| admin::refused(&status))?
        .into_inner();
    diagnostics::lines(&answer.diagnostics)
        .iter()
        .for_each(|line| eprintln!("{line}"));
    output::print_view(args.output.format, DiffView::from(&answer), || {
        lines(&answer)
    })?;
    if diagnostics::any_error(&answer.diagnostics) {
        return Err(VerbError::already_printed(ExitStatus::Failed));
    }
    let differs = answer.changes_left_out > 0
        || answer
            .changes
            .iter()
            .any(|c| c.what() != change::ChangeKind::Unchanged);
    if differs && args.exit_code {
        Err(VerbError::already_printed(ExitStatus::Differs))
    } else {
        Ok(())
    }
}

fn lines(answer: &DiffResponse) -> Vec<String> {
    let changed = answer
        .changes
        .iter()
        .filter(|c| c.what() != change::ChangeKind::Unchanged);
    changed
        .map(|c| {
            format!(
                "# {} {}\n{}",
                diagnostics::object(c),
                diagnostics::what(c),
                c.diff.trim_end()
            )
        })
        .chain(diagnostics::left_out(answer.changes_left_out).map(|line| format!("# {line}")))
        .chain(
            (answer.changes.is_empty() && answer.changes_left_out == 0)
                .then(|| "no objects".to_owned()),
        )
        .collect()
}
