//! Tests of `canal explain` without a controller: its texts are golden (`CANAL_BLESS=1` writes them
//! again), and its failures have their exit codes.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/golden")
        .join(name)
}

fn canal(words: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_canal"));
    for name in [
        "CANAL_WORLD",
        "CANAL_TENANT",
        "CANAL_SERVER",
        "CANAL_ROOT_CA",
        "CANAL_TOKEN_FILE",
    ] {
        command.env_remove(name);
    }
    let files = ["_shop.yaml", "authorization.yaml"].map(|name| golden("compiler").join(name));
    command.arg("explain").args(words.split_whitespace());
    for file in files {
        command.arg("-f").arg(file);
    }
    command.output().unwrap()
}

#[test]
fn explanations_are_golden() {
    let mut differing = Vec::new();
    for (name, words) in [
        (
            "allowed",
            "--from front/caller --to shop/web:80 --path /items/7",
        ),
        (
            "asks",
            "--from front/caller --to shop/web:80 --method POST --header X-Token=abc",
        ),
        (
            "header",
            "--from front/caller --to shop/web:80 --path /items/7 --header X-Token=evil-1",
        ),
        (
            "denied",
            "--from spiffe://alpha.example/ns/front/sa/caller --to shop/web:80 --path /items/../admin/x",
        ),
        (
            "opaque",
            "--from alpha.example/ns/shop/sa/web --to shop/cache:6379",
        ),
        ("direct", "--from 10.1.0.3 --to shop/cache:6379 --direct"),
        ("nobody", "--from - --to shop/web:80"),
        ("json", "--from front/caller --to shop/cache:6379 -o json"),
    ] {
        let output = canal(words);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(
            output.status.code(),
            Some(0),
            "{name}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        // CANAL_BLESS=1 writes the golden files anew, after a deliberate change.
        let path = golden("explain").join(format!("{name}.txt"));
        if std::env::var_os("CANAL_BLESS").is_some() {
            std::fs::create_dir_all(golden("explain")).unwrap();
            std::fs::write(&path, &text).unwrap();
        }
        // A golden file that is missing differs from every text.
        if std::fs::read_to_string(&path).unwrap_or_default() != text {
            differing.push(format!("{}\n--- now\n{text}", path.display()));
        }
    }
    assert!(differing.is_empty(), "{}", differing.join("\n"));
}

#[test]
fn wrong_arguments_have_an_exit_code_and_a_reason() {
    for (name, words, code, text) in [
        (
            "no port",
            "--from front/caller --to shop/web",
            2,
            "has no port",
        ),
        (
            "no service",
            "--from front/caller --to shop/gone:80",
            5,
            "there is no Service shop/gone",
        ),
        (
            "no identity",
            "--from a/b/c/d --to shop/web:80",
            2,
            "--from",
        ),
        (
            "header",
            "--from - --to shop/web:80 --header x",
            2,
            "has no value",
        ),
        (
            "claims",
            "--from - --to shop/web:80 --jwt-claims {",
            2,
            "--jwt-claims",
        ),
        (
            "another tenant",
            "--tenant beta --from - --to shop/web:80",
            1,
            "no valid Tenant object",
        ),
    ] {
        let output = canal(words);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{name}: {errors}");
        assert!(errors.contains(text), "{name}: {errors}");
    }
}
