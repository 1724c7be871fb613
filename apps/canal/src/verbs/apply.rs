//! `canal apply`: sends objects to the controller, which accepts all of them or none.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use canal_json_api::v1::WriteResultView;
use canal_wire::api::{ApplyRequest, ApplyResponse, File};
use clap::Args;

use crate::admin::{self, Admin, MeshArgs};
use crate::diagnostics;
use crate::exit::{ExitStatus, VerbError, VerbResult};
use crate::files;
use crate::output::{self, OutputArgs, ProgressLine};
use crate::tenant;
use crate::verbs::status;

/// Timeout of the demo for convergence, in seconds.
/// The demo expects a change within 1 s; ten times as long tells a slow change from one that never
/// ends.
const CONVERGE_SECONDS_MAX: u64 = 10;

/// Creates or changes objects, all or none
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  canal apply --tenant alpha -f routes.yaml
  canal apply --tenant alpha -f mesh/ --wait 10     # and wait until every data plane runs it
  kubectl get httproute -o yaml | canal apply --tenant alpha -f -")]
pub(crate) struct ApplyArgs {
    /// YAML file, directory of YAML files, or - for stdin
    #[arg(short = 'f', long = "file", required = true, value_name = "PATH")]
    files: Vec<PathBuf>,
    #[command(flatten)]
    tenant: tenant::TenantArgs,
    /// Validate only
    #[arg(long)]
    dry_run: bool,
    /// Wait up to this many seconds until every connected data plane has applied it
    #[arg(long, value_name = "SECONDS")]
    wait: Option<u64>,
    #[command(flatten)]
    mesh: MeshArgs,
    #[command(flatten)]
    output: OutputArgs,
}

pub(crate) async fn run(args: ApplyArgs) -> VerbResult {
    let files = files::read(&args.files)?;
    let mut admin = admin::connect(&args.mesh).await?;
    let tenant = tenant::decide(&args.tenant, &mut admin).await?;
    let request = ApplyRequest {
        tenant,
        files,
        dry_run: args.dry_run,
    };
    let answer = admin
        .apply(request)
        .await
        .map_err(|status| admin::refused(&status))?
        .into_inner();
    show(&args, &answer)?;
    if !answer.accepted {
        return Err(VerbError::already_printed(ExitStatus::Failed));
    }
    match args.wait {
        Some(seconds) if !args.dry_run => wait(&mut admin, answer.generation, seconds).await,
        _ => Ok(()),
    }
}

fn show(args: &ApplyArgs, answer: &ApplyResponse) -> VerbResult {
    diagnostics::lines(&answer.diagnostics)
        .iter()
        .for_each(|line| eprintln!("{line}"));
    output::print_view(
        args.output.format,
        WriteResultView::of_apply(answer, args.dry_run),
        || match answer.accepted {
            false => vec!["refused: nothing was changed".to_owned()],
            true => {
                let suffix = if args.dry_run { " (dry run)" } else { "" };
                let each = answer.changes.iter().map(|c| {
                    format!(
                        "{} {}{suffix}",
                        diagnostics::object(c),
                        diagnostics::what(c)
                    )
                });
                each.chain(diagnostics::left_out(answer.changes_left_out))
                    .chain([format!("generation {}", answer.generation)])
                    .collect()
            }
        },
    )
}

/// Applies one text, waits until every connected data plane runs it, and returns how long that
/// took. It is for the demo.
pub(crate) async fn apply_text(
    admin: &mut Admin,
    tenant: &str,
    path: &str,
    yaml: String,
) -> VerbResult<Duration> {
    let started = Instant::now();
    let files = vec![File {
        path: path.to_owned(),
        yaml,
    }];
    let request = ApplyRequest {
        tenant: tenant.to_owned(),
        files,
        dry_run: false,
    };
    let answer = admin
        .apply(request)
        .await
        .map_err(|status| admin::refused(&status))?
        .into_inner();
    if !answer.accepted {
        return Err(VerbError::failed(
            "apply",
            diagnostics::lines(&answer.diagnostics).join("\n"),
            "",
        ));
    }
    wait(admin, answer.generation, CONVERGE_SECONDS_MAX).await?;
    Ok(started.elapsed())
}

/// Waits until every connected data plane has acknowledged the resources in its scope.
async fn wait(admin: &mut Admin, generation: u64, seconds: u64) -> VerbResult {
    let progress = ProgressLine::new();
    progress.print_line(&format!(
        "waiting for the data planes to apply generation {generation}"
    ));
    let limit = Duration::from_secs(seconds);
    match tokio::time::timeout(limit, status::converged(admin, generation)).await {
        Ok(converged) => converged.map(|_| ()),
        Err(_) => {
            let what =
                format!("not every data plane applied generation {generation} within {seconds} s");
            Err(VerbError::new(
                ExitStatus::Partial,
                "apply",
                what,
                "find those that lag, and why, in `canal status`",
            ))
        }
    }
}
