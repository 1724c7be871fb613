//! `canal get`: the objects in the controller, with the compiler's diagnostics about them.

use canal_json_api::v1::ObjectListView;
use canal_wire::api::{GetRequest, Object};
use clap::Args;

use crate::admin::{self, MeshArgs};
use crate::diagnostics;
use crate::exit::{ExitStatus, VerbError, VerbResult};
use crate::output::{self, Format, OutputArgs, TextTable};
use crate::tenant;

/// Shows objects as they were written, without the annotations that nothing reads: their lines are
/// empty
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  canal get --tenant alpha                            # everything
  canal get --tenant alpha httproutes -n bookinfo
  canal get --tenant alpha httproute reviews -n bookinfo -o yaml")]
pub(crate) struct GetArgs {
    /// Kind, in any case, singular or plural [default: all]
    kind: Option<String>,
    /// Name [default: all]
    name: Option<String>,
    /// Namespace [default: all]
    #[arg(short, long)]
    namespace: Option<String>,
    #[command(flatten)]
    tenant: tenant::TenantArgs,
    #[command(flatten)]
    mesh: MeshArgs,
    #[command(flatten)]
    output: OutputArgs,
}

pub(crate) async fn run(args: GetArgs) -> VerbResult {
    let mut admin = admin::connect(&args.mesh).await?;
    let tenant = tenant::decide(&args.tenant, &mut admin).await?;
    let request = GetRequest {
        tenant,
        kind: args.kind.clone().unwrap_or_default(),
        namespace: args.namespace.clone().unwrap_or_default(),
        name: args.name.clone().unwrap_or_default(),
    };
    let answer = admin
        .get(request)
        .await
        .map_err(|status| admin::refused(&status))?
        .into_inner();
    if let (Some(kind), Some(name), true) = (&args.kind, &args.name, answer.objects.is_empty()) {
        return Err(VerbError::new(
            ExitStatus::Missing,
            format!("{kind} {name}"),
            "does not exist",
            "name one that `canal get` lists",
        ));
    }
    if args.output.format == Format::Yaml {
        // YAML output is the writer's own text, including comments, and not a new serialization.
        return output::line(documents(&answer.objects).trim_end());
    }
    output::print_view(args.output.format, ObjectListView::from(&answer), || {
        table(&answer.objects)
    })
}

fn documents(objects: &[Object]) -> String {
    objects
        .iter()
        .map(|o| format!("---\n{}\n", o.yaml.trim_start_matches("---\n").trim_end()))
        .collect()
}

fn table(objects: &[Object]) -> Vec<String> {
    let mut table = TextTable::new(&["KIND", "NAMESPACE", "NAME", "ORIGIN", "STATE"]);
    for o in objects {
        table.row([
            o.kind.clone(),
            o.namespace.clone(),
            o.name.clone(),
            o.origin.clone(),
            state(o),
        ]);
    }
    let all = objects
        .iter()
        .flat_map(|o| diagnostics::lines(&o.diagnostics));
    table.lines().into_iter().chain(all).collect()
}

fn state(object: &Object) -> String {
    match (
        object.diagnostics.len(),
        diagnostics::any_error(&object.diagnostics),
    ) {
        (0, _) => "ok".to_owned(),
        (_, true) => "broken".to_owned(),
        (_, false) => "warned".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn yaml_is_one_stream_of_documents() {
        let object = |yaml: &str| Object {
            yaml: yaml.into(),
            ..Object::default()
        };
        let text = documents(&[object("---\nkind: A\n"), object("kind: B")]);
        assert_eq!(text, "---\nkind: A\n---\nkind: B\n");
    }
}
