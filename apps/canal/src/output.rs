//! Prints results: a table for people, JSON or YAML for programs. Results go to stdout, everything
//! else to stderr. Start at [`print`].

use std::io::{IsTerminal, Write};

use canal_json_api::v1::VersionedView;
use clap::{Args, ValueEnum};
use serde::Serialize;
use serde_json::Value;

use crate::exit::{ExitStatus, VerbError, VerbResult};

/// Format in which results are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    Table,
    Json,
    Yaml,
}

/// The option that all verbs share that print results.
#[derive(Debug, Clone, Args)]
pub(crate) struct OutputArgs {
    /// How to print the result
    #[arg(
        short = 'o',
        long = "output",
        value_enum,
        default_value = "table",
        value_name = "FORMAT"
    )]
    pub(crate) format: Format,
}

/// Rows under a heading. Columns are as wide as their widest cell.
#[derive(Debug, Default)]
pub(crate) struct TextTable {
    heading: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

impl TextTable {
    pub(crate) fn new(heading: &[&'static str]) -> Self {
        Self {
            heading: heading.to_vec(),
            rows: Vec::new(),
        }
    }

    pub(crate) fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.rows.push(cells.to_vec());
    }

    /// Returns one line per row. The last column is not padded, so that long texts do not widen the
    /// table.
    pub(crate) fn lines(&self) -> Vec<String> {
        let heading: Vec<String> = self.heading.iter().map(|h| (*h).to_owned()).collect();
        let all: Vec<&Vec<String>> = std::iter::once(&heading).chain(&self.rows).collect();
        let width = |column: usize| {
            all.iter()
                .filter_map(|row| row.get(column))
                .map(|c| c.chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.heading.len()).map(width).collect();
        let line = |row: &Vec<String>| {
            let cells =
                row.iter()
                    .enumerate()
                    .map(|(column, cell)| match column + 1 == row.len() {
                        true => cell.clone(),
                        false => format!(
                            "{cell:<width$}",
                            width = widths.get(column).copied().unwrap_or(0)
                        ),
                    });
            cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
        };
        all.into_iter().map(line).collect()
    }
}

/// Prints a view of the operators' API as the controller's HTTP face shows it, or `table` if the
/// format is a table.
pub(crate) fn print_view(
    format: Format,
    view: impl Serialize,
    table: impl FnOnce() -> Vec<String>,
) -> VerbResult {
    print(format, &view_value(view)?, table)
}

/// Returns a view as JSON, with the name of its version.
pub(crate) fn view_value(view: impl Serialize) -> VerbResult<Value> {
    serde_json::to_value(VersionedView::new(view))
        .map_err(|problem| VerbError::failed("output", problem, ""))
}

/// Prints `value`, or `table` if the format is a table.
pub(crate) fn print(
    format: Format,
    value: &Value,
    table: impl FnOnce() -> Vec<String>,
) -> VerbResult {
    let text = match format {
        Format::Table => table().join("\n"),
        Format::Json => format!("{value:#}"),
        Format::Yaml => yaml(value)?,
    };
    line(text.trim_end())
}

/// Prints one result line. If the reader has gone (`canal get | head`), the program ends without a
/// message.
pub(crate) fn line(text: &str) -> VerbResult {
    match writeln!(std::io::stdout(), "{text}") {
        Err(problem) if problem.kind() == std::io::ErrorKind::BrokenPipe => {
            Err(VerbError::already_printed(ExitStatus::Done))
        }
        Err(problem) => Err(VerbError::failed(
            "stdout",
            problem,
            "free some space where the output goes",
        )),
        Ok(()) => Ok(()),
    }
}

/// Returns a value as YAML.
pub(crate) fn yaml(value: &Value) -> VerbResult<String> {
    serde_saphyr::to_string(value)
        .map_err(|problem| VerbError::failed("output", problem, "use -o json"))
}

/// Progress messages of long work, on stderr, only if that is a terminal.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ProgressLine {
    watched: bool,
}

impl ProgressLine {
    pub(crate) fn new() -> Self {
        Self {
            watched: std::io::stderr().is_terminal(),
        }
    }

    /// Prints the operation in progress.
    pub(crate) fn print_line(self, text: &str) {
        if self.watched {
            eprintln!("{text}");
        }
    }
}

/// Returns milliseconds in a readable unit.
pub(crate) fn span(ms: u64) -> String {
    match ms {
        0..1_000 => format!("{ms} ms"),
        1_000..120_000 => format!("{} s", ms / 1_000),
        120_000..7_200_000 => format!("{} min", ms / 60_000),
        _ => format!("{} h", ms / 3_600_000),
    }
}

/// Returns bytes in a readable unit.
pub(crate) fn size(bytes: u64) -> String {
    let scaled = |unit: u32, name: &str| format!("{:.1} {name}", bytes as f64 / f64::from(unit));
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => scaled(1 << 10, "KiB"),
        1_048_576..1_073_741_824 => scaled(1 << 20, "MiB"),
        _ => scaled(1 << 30, "GiB"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = TextTable::new(&["NAME", "WORD"]);
        table.row(["a-long-name".into(), "x".into()]);
        table.row(["b".into(), "a long text".into()]);
        assert_eq!(
            table.lines(),
            [
                "NAME         WORD",
                "a-long-name  x",
                "b            a long text"
            ]
        );
    }

    #[test]
    fn sizes_and_spans_are_short() {
        for (bytes, want) in [
            (0, "0 B"),
            (2048, "2.0 KiB"),
            (5 << 20, "5.0 MiB"),
            (3 << 30, "3.0 GiB"),
        ] {
            assert_eq!(size(bytes), want);
        }
        for (ms, want) in [
            (5, "5 ms"),
            (1500, "1 s"),
            (180_000, "3 min"),
            (7_200_000, "2 h"),
        ] {
            assert_eq!(span(ms), want);
        }
    }
}
