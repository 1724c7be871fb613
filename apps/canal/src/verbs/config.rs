//! `canal config dump`: what a data plane runs right now, as it tells itself.

use clap::{Args, Subcommand};
use serde_json::Value;

use crate::dataplane::{self, Page};
use crate::exit::{Failure, Outcome};
use crate::output::{self, Format};
use crate::realm::{Realm, RealmArgs};

/// Looks into a data plane's configuration
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
  canal config dump gw-1 --part services -o yaml")]
    Dump(DumpArgs),
}

#[derive(Debug, Args)]
struct DumpArgs {
    /// Node or gateway replica, as `canal status` names it
    #[arg(value_name = "NODE")]
    host: String,
    /// Only this part; parts of parts are joined by '.', e.g. certificates.0
    #[arg(long)]
    part: Option<String>,
    /// How to print it; the table is one line per part with its size
    #[arg(short = 'o', long = "output", value_enum, default_value = "json", value_name = "FORMAT")]
    format: Format,
    #[command(flatten)]
    realm: RealmArgs,
}

pub(crate) async fn run(args: ConfigArgs) -> Outcome {
    let ConfigVerb::Dump(args) = args.verb;
    let realm = Realm::open(args.realm.world.as_deref())?;
    let body = dataplane::get(&realm, &args.host, Page::Admin, "/config_dump").await?;
    let dump: Value =
        serde_json::from_slice(&body).map_err(|problem| Failure::failed(format!("{} /config_dump", args.host), problem, ""))?;
    let part = match &args.part {
        Some(path) => select(&dump, path)?,
        None => &dump,
    };
    output::print(args.format, part, || summary(part))
}

fn select<'a>(dump: &'a Value, path: &str) -> Outcome<&'a Value> {
    let mut here = dump;
    for name in path.split('.') {
        let next = match here {
            Value::Array(items) => name.parse::<usize>().ok().and_then(|index| items.get(index)),
            other => other.get(name),
        };
        here = next.ok_or_else(|| {
            let known = names(here).join(", ");
            Failure::failed(format!("--part {path}"), format!("there is no {name:?}"), format!("use one of: {known}"))
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
        Value::Object(map) => map.iter().map(|(name, value)| format!("{name}: {}", size(value))).collect(),
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
        assert!(select(&dump, "service").unwrap_err().mend.contains("services"));
        assert_eq!(summary(&dump), ["services: 1 entries", "generation: 7"]);
    }
}
