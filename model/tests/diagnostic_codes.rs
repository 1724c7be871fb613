//! The list of all codes of diagnostics is golden, and a document is generated from them.
//! `CANAL_BLESS=1` writes both again.

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

use canal_model::diagnostic_code::DiagnosticCode;

fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap()
        .to_owned()
}

/// Compares a file of the repository with its text.
fn check(path: &str, text: &str) {
    let file = repository().join(path);
    if std::env::var_os("CANAL_BLESS").is_some() {
        fs::write(&file, text).unwrap();
        return;
    }
    let blessed = fs::read_to_string(&file).unwrap_or_default();
    assert!(
        blessed == text,
        "{path} differs from the codes; CANAL_BLESS=1 writes it anew"
    );
}

/// Returns the codes of the golden list.
fn read_list() -> Vec<String> {
    let file = repository().join(LIST);
    let text = fs::read_to_string(file).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

const LIST: &str = "model/tests/diagnostic-codes.txt";

#[test]
fn a_released_code_keeps_its_name() {
    let mut text = String::new();
    for code in DiagnosticCode::ALL {
        writeln!(text, "{code} {}", code.description().name).unwrap();
    }
    let present: Vec<&str> = text.lines().collect();
    for line in read_list() {
        assert!(
            present.contains(&line.as_str()),
            "{line}: a code is never removed, renamed or used for something else"
        );
    }
    check(LIST, &text);
}

#[test]
fn the_document_describes_every_code() {
    let mut text = String::from(HEAD);
    let mut subject = "";
    for code in DiagnosticCode::ALL {
        if code.subject() != subject {
            subject = code.subject();
            write!(text, "\n## {subject}\n").unwrap();
        }
        let description = code.description();
        write!(
            text,
            "\n### {code} {}\n\n{}.\n\n- Why it matters: {}\n- Fix: {}\n",
            description.name,
            capitalize(description.title),
            description.why,
            description.fix
        )
        .unwrap();
        if let Some((condition, reason)) = description.condition {
            writeln!(
                text,
                "- Condition of Gateway API: `{condition}`, reason `{reason}`"
            )
            .unwrap();
        }
    }
    check("docs/diagnostics.md", &text);
}

fn capitalize(text: &str) -> String {
    let mut chars = text.chars();
    let first = chars.next().map(|c| c.to_uppercase().to_string());
    first.unwrap_or_default() + chars.as_str()
}

const HEAD: &str = "# Diagnostics

Every diagnostic of Canal has a stable code. `canal apply`, `canal compile` and the controller show it
as in `routes.yaml:3:7: error[CANAL0408]: ...`; the JSON views have it in the field `code`. A code says
what the diagnostic is about; its sentence names the object, the field and the value. An error means
that a part of the object does not work as written and fails closed; a warning means that the object
works as written, but perhaps not as intended.

A code is never used again for something else, so scripts may rely on it. This document is generated
from `model/src/diagnostic_code.rs`: run the tests of `canal-model` with `CANAL_BLESS=1` after a change.
";
