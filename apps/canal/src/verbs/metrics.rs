//! `canal metrics`: the metrics of gateways as Prometheus text, for one tenant or for all.

use std::collections::BTreeMap;
use std::fmt::Write;

use canal_wire::api::observe_request::Subject;
use clap::Args;

use crate::admin::{self, MeshArgs};
use crate::exit::VerbResult;
use crate::{observe, output};

/// Shows the metrics of gateways as Prometheus text
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  canal metrics --tenant alpha
  canal metrics --tenant alpha | grep '^istio_requests_total'
  canal metrics --from alpha-n1                    # a node's

A tenant's operator gets its tenant's series. The label `instance` names the data plane.")]
pub(crate) struct MetricsArgs {
    /// Print only series of this tenant
    #[arg(short, long, env = "CANAL_TENANT")]
    tenant: Option<String>,
    /// Read only these data planes [default: all gateways that serve the tenant]
    #[arg(long, value_name = "NAME")]
    from: Vec<String>,
    #[command(flatten)]
    mesh: MeshArgs,
}

pub(crate) async fn run(args: MetricsArgs) -> VerbResult {
    let mut admin = admin::connect(&args.mesh).await?;
    let request = observe::request(Subject::Metrics, args.tenant.as_deref(), &args.from);
    let answers = observe::begin(&mut admin, request).await?.collect().await?;
    output::line(merge(&answers).trim_end())
}

/// Merges the samples of all data planes under one heading for each family. Each sample gets the
/// label `instance`.
fn merge(answers: &BTreeMap<String, String>) -> String {
    let mut families: BTreeMap<&str, (Vec<&str>, String)> = BTreeMap::new();
    for (instance, text) in answers {
        let mut family = "";
        for line in text.lines() {
            if let Some(heading) = line.strip_prefix("# ") {
                let name = heading.split(' ').nth(1).unwrap_or_default();
                let (headings, _) = families.entry(name).or_default();
                if !headings.contains(&line) {
                    headings.push(line);
                }
                family = name;
            } else if let Some(at) = line.find(['{', ' ']) {
                let (name, rest) = line.split_at(at);
                let (_, samples) = families.entry(family).or_default();
                // Writing to a String cannot fail.
                let _ = match rest.strip_prefix('{') {
                    Some(labels) => writeln!(samples, "{name}{{instance=\"{instance}\",{labels}"),
                    None => writeln!(samples, "{name}{{instance=\"{instance}\"}}{rest}"),
                };
            }
        }
    }
    families
        .into_values()
        .flat_map(|(headings, samples)| [headings.join("\n"), "\n".into(), samples])
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_of_several_gateways_stand_under_one_heading() {
        let text = |n: u32| {
            format!(
                "# HELP b B.\n# TYPE b counter\nb{{tenant=\"a\"}} {n}\n# HELP a A.\n# TYPE a gauge\na {n}\n"
            )
        };
        let merged = merge(&BTreeMap::from([
            ("gw-1".to_owned(), text(1)),
            ("gw-2".to_owned(), text(2)),
        ]));
        assert_eq!(
            merged,
            "# HELP a A.\n# TYPE a gauge\na{instance=\"gw-1\"} 1\na{instance=\"gw-2\"} 2\n\
             # HELP b B.\n# TYPE b counter\nb{instance=\"gw-1\",tenant=\"a\"} 1\nb{instance=\"gw-2\",tenant=\"a\"} 2\n"
        );
    }
}
