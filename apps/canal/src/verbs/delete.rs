//! `canal delete`: removes all or none of the given objects, by name or by the files that describe
//! them.

use std::path::PathBuf;

use canal_json_api::v1::WriteResultView;
use canal_model::diagnostic::Severity;
use canal_model::policy::ObjectKey;
use canal_wire::api::{DeleteRequest, DeleteResponse, File, ObjectRef};
use clap::Args;

use crate::admin::{self, MeshArgs};
use crate::diagnostics;
use crate::exit::{ExitStatus, VerbError, VerbResult};
use crate::files;
use crate::output::{self, OutputArgs};
use crate::tenant;

/// Removes objects, all or none
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  canal delete --tenant alpha httproute reviews -n bookinfo
  canal delete --tenant alpha -f routes.yaml --ignore-missing
  canal delete --tenant alpha --all      # the provider's: works however much the tenant has applied")]
pub(crate) struct DeleteArgs {
    /// Kind, in any case, singular or plural
    #[arg(required_unless_present_any = ["files", "all"], requires = "names")]
    kind: Option<String>,
    /// Names
    names: Vec<String>,
    /// Namespace of the names
    #[arg(short, long, default_value = "default")]
    namespace: String,
    /// Remove the objects these files describe: YAML file, directory of YAML files, or - for stdin
    #[arg(short = 'f', long = "file", value_name = "PATH", conflicts_with_all = ["kind", "names"])]
    files: Vec<PathBuf>,
    /// Remove all that was applied for the tenant, without compiling it; an operator of the
    /// provider only
    #[arg(long, conflicts_with_all = ["kind", "names", "files"])]
    all: bool,
    /// Succeed also if an object does not exist
    #[arg(long)]
    ignore_missing: bool,
    #[command(flatten)]
    tenant: tenant::TenantArgs,
    #[command(flatten)]
    mesh: MeshArgs,
    #[command(flatten)]
    output: OutputArgs,
}

pub(crate) async fn run(args: DeleteArgs) -> VerbResult {
    let objects = match &args.kind {
        Some(kind) => named(kind, &args),
        None if args.all => Vec::new(),
        None => files::read(&args.files)?
            .iter()
            .map(described)
            .collect::<VerbResult<Vec<_>>>()?
            .concat(),
    };
    let mut admin = admin::connect(&args.mesh).await?;
    let tenant = tenant::decide(&args.tenant, &mut admin).await?;
    let request = DeleteRequest {
        tenant,
        objects,
        ignore_missing: args.ignore_missing,
        all: args.all,
    };
    let answer = admin
        .delete(request)
        .await
        .map_err(|status| admin::refused(&status))?
        .into_inner();
    show(&args, &answer)?;
    if answer.accepted {
        Ok(())
    } else {
        Err(VerbError::already_printed(ExitStatus::Failed))
    }
}

fn named(kind: &str, args: &DeleteArgs) -> Vec<ObjectRef> {
    let object = |name: &String| ObjectRef {
        kind: kind.to_owned(),
        namespace: args.namespace.clone(),
        name: name.clone(),
    };
    args.names.iter().map(object).collect()
}

/// Returns every object that a file describes. Mistakes inside an object do not prevent its
/// removal.
fn described(file: &File) -> VerbResult<Vec<ObjectRef>> {
    let parsed = canal_sources::parse(&file.path, &file.yaml);
    let unnamed = parsed
        .diagnostics
        .iter()
        .find(|d| d.severity == Severity::Error && d.object.is_none());
    if let Some(diagnostic) = unnamed {
        return Err(VerbError::new(
            ExitStatus::Failed,
            "",
            diagnostic.to_string(),
            "",
        ));
    }
    let keys = parsed
        .documents
        .iter()
        .map(|document| document.object.key());
    let object = |key: ObjectKey| ObjectRef {
        kind: key.kind.to_string(),
        namespace: key.namespace.to_string(),
        name: key.name.to_string(),
    };
    Ok(keys.map(object).collect())
}

fn show(args: &DeleteArgs, answer: &DeleteResponse) -> VerbResult {
    diagnostics::lines(&answer.diagnostics)
        .iter()
        .for_each(|line| eprintln!("{line}"));
    output::print_view(
        args.output.format,
        WriteResultView::from(answer),
        || match answer.accepted {
            false => vec!["refused: nothing was removed".to_owned()],
            true => {
                let each = answer
                    .changes
                    .iter()
                    .map(|c| format!("{} {}", diagnostics::object(c), diagnostics::what(c)));
                each.chain(diagnostics::left_out(answer.changes_left_out))
                    .collect()
            }
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_name_their_objects_even_broken_ones() {
        let service = "apiVersion: v1\nkind: Service\nmetadata: {name: x, namespace: n}\n---\n";
        let broken = "apiVersion: v1\nkind: Service\nmetadata: {name: z}\nspec: {nonsense: 1}\n";
        let refs = described(&File {
            path: "f".into(),
            yaml: format!("{service}{broken}"),
        })
        .unwrap();
        let names: Vec<_> = refs
            .iter()
            .map(|r| (r.kind.as_str(), r.namespace.as_str(), r.name.as_str()))
            .collect();
        assert_eq!(names, [("Service", "n", "x"), ("Service", "default", "z")]);
        assert!(
            described(&File {
                path: "f".into(),
                yaml: "kind: Service".into()
            })
            .is_err()
        );
    }
}
