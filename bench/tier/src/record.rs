//! Measurements as one JSON file that `canal-bench-figures cost` reads: each part of the bench
//! writes its own section, with the command and the machine. It computes nothing.

use std::path::PathBuf;

use anyhow::Context;
use serde_json::{Value, json};

/// File of the measurements, if there is one.
#[derive(Debug, Default)]
pub struct FigureFile {
    pub file: Option<PathBuf>,
}

impl FigureFile {
    /// Replaces a section; the others stay.
    pub fn put(&self, section: &str, mut figures: Value) -> anyhow::Result<()> {
        let Some(file) = &self.file else {
            return Ok(());
        };
        let mut document: Value = match std::fs::read(file) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .with_context(|| format!("{}: remove it, or name another file", file.display()))?,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => json!({}),
            Err(e) => return Err(e).with_context(|| file.display().to_string()),
        };
        figures["command"] = command(std::env::args()).into();
        figures["machine"] = machine().into();
        document[section] = figures;
        std::fs::write(file, format!("{document:#}\n")).with_context(|| file.display().to_string())
    }
}

/// Returns the command as a user would type it, without the folder and without the file that it
/// writes.
fn command(mut words: impl Iterator<Item = String>) -> String {
    let program = words.next().unwrap_or_default();
    let mut text = vec![program.rsplit('/').next().unwrap_or_default().to_string()];
    while let Some(word) = words.next() {
        if word == "--json" {
            words.next();
        } else {
            text.push(word);
        }
    }
    text.join(" ")
}

/// Returns the description of the machine.
fn machine() -> String {
    let read = |file| std::fs::read_to_string(file).unwrap_or_default();
    let cpus = read("/proc/cpuinfo");
    let model = cpus
        .lines()
        .find_map(|l| l.strip_prefix("model name"))
        .map_or("", |l| l.trim_start_matches([' ', '\t', ':']));
    let cores = cpus.lines().filter(|l| l.starts_with("processor")).count();
    format!(
        "{cores} × {model}, Linux {}",
        read("/proc/sys/kernel/osrelease").trim()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_section_replaces_its_own_and_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let record = FigureFile {
            file: Some(folder.path().join("measured.json")),
        };
        record.put("cost", json!({"l7_us": 1.0})).unwrap();
        record.put("hop", json!({"lb_us": 2.0})).unwrap();
        record.put("cost", json!({"l7_us": 3.0})).unwrap();
        let document: Value =
            serde_json::from_slice(&std::fs::read(record.file.as_ref().unwrap()).unwrap()).unwrap();
        assert_eq!(
            (&document["cost"]["l7_us"], &document["hop"]["lb_us"]),
            (&json!(3.0), &json!(2.0))
        );
        assert!(
            document["cost"]["machine"]
                .as_str()
                .unwrap()
                .contains("Linux")
        );
        std::fs::write(record.file.as_ref().unwrap(), "no JSON").unwrap();
        assert!(
            record.put("cost", json!({})).is_err(),
            "what is there is not lost"
        );
    }

    #[test]
    fn a_command_is_recorded_as_typed() {
        let words = [
            "target/release/canal-bench-tier",
            "cost",
            "--seconds",
            "8",
            "--json",
            "x.json",
        ];
        assert_eq!(
            command(words.iter().map(ToString::to_string)),
            "canal-bench-tier cost --seconds 8"
        );
    }
}
