//! The compile time of each unit, from the page that cargo writes with `--timings`. It measures
//! nothing itself.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use crate::count::Count;
use crate::report::{COMPILED, Report};

/// The page of the last build, and the text before the units in it.
const PAGE: &str = "target/cargo-timings/cargo-timing.html";
const UNITS: &str = "const UNIT_DATA = ";
/// A crate of the workspace that compiled faster has no row of its own.
/// The table then has the crates that are worth an improvement.
const ROW_MIN: Duration = Duration::from_secs(1);

/// One run of the compiler, or of a build script.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct CompiledUnit {
    package: String,
    /// Kind and name of the target; empty for the package's library.
    target: String,
    took: Duration,
}

/// Returns the units of the build since the last call; none if the build failed or had nothing to
/// compile.
pub(crate) fn take(root: &Path) -> Vec<CompiledUnit> {
    let page = root.join(PAGE);
    let Ok(text) = std::fs::read_to_string(&page) else {
        return Vec::new();
    };
    // If the page cannot be removed, it is read again and its units are reported twice.
    let _ = std::fs::remove_file(&page);
    units(&text).unwrap_or_else(|| {
        println!("== {PAGE} has no units that can be read: this cargo writes it otherwise");
        Vec::new()
    })
}

fn units(page: &str) -> Option<Vec<CompiledUnit>> {
    let (_, rest) = page.split_once(UNITS)?;
    let all = serde_json::Deserializer::from_str(rest)
        .into_iter::<Vec<Value>>()
        .next()?
        .ok()?;
    let unit = |value: &Value| {
        let text = |field: &str| value[field].as_str().map(|text| text.trim().to_owned());
        Some(CompiledUnit {
            package: text("name")?,
            target: text("target")?,
            took: Duration::try_from_secs_f64(value["duration"].as_f64()?).ok()?,
        })
    };
    all.iter().map(unit).collect()
}

/// Adds a row for each unit of the packages that are the workspace's `own`, and one for all other
/// crates.
pub(crate) fn add_to(report: &mut Report, units: &[CompiledUnit], own: &BTreeSet<String>) {
    let (own, foreign): (Vec<&CompiledUnit>, Vec<&CompiledUnit>) =
        units.iter().partition(|unit| own.contains(&unit.package));
    let took = |units: &[&CompiledUnit]| units.iter().map(|unit| unit.took).sum::<Duration>();
    let (slow, fast): (Vec<&CompiledUnit>, Vec<&CompiledUnit>) =
        own.into_iter().partition(|unit| unit.took >= ROW_MIN);
    for (what, units) in [
        ("units of other crates", &foreign),
        ("units below a second", &fast),
    ] {
        report.add(
            COMPILED,
            &format!("{} {what}", units.len()),
            took(units),
            Count::default(),
        );
    }
    for unit in slow {
        report.add(
            COMPILED,
            format!("{} {}", unit.package, unit.target).trim_end(),
            unit.took,
            Count::default(),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_of_a_page_become_rows() {
        let unit = |name: &str, target: &str, duration: f64| {
            format!(
                r#"{{"i":0,"name":"{name}","target":"{target}","start":0.1,"duration":{duration}}}"#
            )
        };
        let all = [
            unit("h2", "", 4.0),
            unit("h2", " build-script", 3.0),
            unit("canal-model", "", 2.0),
            unit("canal-model", " test \\\"suite\\\"", 0.5),
        ];
        let page = format!(
            "<script>\n{UNITS}[\n{}\n];\nconst CONCURRENCY_DATA = [];",
            all.join(",\n")
        );
        let mut report = Report::new((String::new(), false), String::new(), Duration::ZERO);
        add_to(
            &mut report,
            &units(&page).unwrap(),
            &BTreeSet::from(["canal-model".to_owned()]),
        );
        let rows: Vec<String> = report
            .markdown()
            .lines()
            .skip(2)
            .map(str::to_owned)
            .collect();
        assert_eq!(
            rows[1..4],
            [
                "| 2 units of other crates | 7 | 0 | 0 | 0 |",
                "| canal-model | 2 | 0 | 0 | 0 |",
                "| 1 units below a second | 1 | 0 | 0 | 0 |"
            ]
        );
        assert_eq!(units("<html>"), None);
    }
}
