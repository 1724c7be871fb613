//! `canal config dump`: the configuration that a data plane runs now, as the process reports it. It
//! uses the controller. In a world, if the controller has no answer, it uses the process's own
//! socket.

use canal_wire::api::observe_request::Subject;
use clap::{Args, Subcommand};
use serde_json::Value;

use crate::admin::{self, MeshArgs};
use crate::dataplane::{self, AdminPage};
use crate::exit::{ExitStatus, VerbError, VerbResult};
use crate::observe;
use crate::output::{self, Format};
use crate::running_world::RunningWorld;

/// Shows a data plane's configuration
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  canal config dump gw-1
  canal config dump alpha-n1 --part certificates -o yaml")]
pub(crate) struct ConfigArgs {
    #[command(subcommand)]
    verb: ConfigVerb,
}

#[derive(Debug, Subcommand)]
enum ConfigVerb {
    /// Prints all of it
    #[command(after_help = "Examples:
  canal config dump gw-1
  canal config dump gw-1 --part engine.tenants -o yaml
  canal config dump alpha-n1 --tenant alpha

A tenant's operator gets complete dumps of its own nodes, and its tenant's part of gateways' dumps.")]
    Dump(DumpArgs),
}

#[derive(Debug, Args)]
struct DumpArgs {
    /// Node or gateway replica, by its name in `canal status`
    #[arg(value_name = "NODE")]
    host: String,
    /// Only this part; parts of parts are joined by '.', e.g. certificates.0
    #[arg(long)]
    part: Option<String>,
    /// How to print it; the table is one line per part with its size
    #[arg(
        short = 'o',
        long = "output",
        value_enum,
        default_value = "json",
        value_name = "FORMAT"
    )]
    format: Format,
    /// With a gateway: only this tenant's part; with a node: its tenant, if nodes of several
    /// tenants have the name
    #[arg(short, long, env = "CANAL_TENANT")]
    tenant: Option<String>,
    #[command(flatten)]
    mesh: MeshArgs,
}

pub(crate) async fn run(args: ConfigArgs) -> VerbResult {
    let ConfigVerb::Dump(args) = args.verb;
    let text = match through_controller(&args).await {
        // Processes that are unknown to the controller, and the controller itself, have a socket in
        // the world.
        Err(failure)
            if args.mesh.server.is_none()
                && failure.exit != ExitStatus::Usage
                && args.tenant.is_none() =>
        {
            let running = RunningWorld::open(args.mesh.world.as_deref())?;
            dataplane::get(&running, &args.host, AdminPage::Admin, "/config_dump")
                .await?
                .to_vec()
        }
        dumped => dumped?.into_bytes(),
    };
    let dump: Value = serde_json::from_slice(&text)
        .map_err(|problem| VerbError::failed(format!("{} /config_dump", args.host), problem, ""))?;
    let part = match &args.part {
        Some(path) => select(&dump, path)?,
        None => &dump,
    };
    output::print(args.format, part, || summary(part))
}

async fn through_controller(args: &DumpArgs) -> VerbResult<String> {
    let mut admin = admin::connect(&args.mesh).await?;
    let request = observe::request(
        Subject::ConfigDump,
        args.tenant.as_deref(),
        std::slice::from_ref(&args.host),
    );
    let answers = observe::begin(&mut admin, request).await?.collect().await?;
    Ok(answers.into_values().next().unwrap_or_default())
}

fn select<'a>(dump: &'a Value, path: &str) -> VerbResult<&'a Value> {
    let mut here = dump;
    for name in path.split('.') {
        let next = match here {
            Value::Array(items) => name
                .parse::<usize>()
                .ok()
                .and_then(|index| items.get(index)),
            other => other.get(name),
        };
        here = next.ok_or_else(|| {
            let known = names(here).join(", ");
            VerbError::failed(
                format!("--part {path}"),
                format!("there is no {name:?}"),
                format!("use one of: {known}"),
            )
        })?;
    }
    Ok(here)
}

fn names(value: &Value) -> Vec<String> {
    match value {
        Value::Object(map) => map.keys().cloned().collect(),
        Value::Array(items) => (0..items.len()).map(|index| index.to_string()).collect(),
        _ => Vec::new(),
    }
}

fn summary(value: &Value) -> Vec<String> {
    let size = |value: &Value| match value {
        Value::Object(map) => format!("{} entries", map.len()),
        Value::Array(items) => format!("{} entries", items.len()),
        other => other.to_string(),
    };
    match value {
        Value::Object(map) => map
            .iter()
            .map(|(name, value)| format!("{name}: {}", size(value)))
            .collect(),
        other => vec![size(other)],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn parts_are_found_by_path() {
        let dump = json!({ "services": [{ "name": "a" }], "generation": 7 });
        assert_eq!(select(&dump, "services.0.name").unwrap(), "a");
        assert!(
            select(&dump, "service")
                .unwrap_err()
                .fix
                .contains("services")
        );
        assert_eq!(summary(&dump), ["services: 1 entries", "generation: 7"]);
    }
}
