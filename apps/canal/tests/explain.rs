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
    let files = ["_shop.yaml", "authorization.yaml"].map(|name| golden("compiler").join(name));
    run(words, &files)
}

/// Explains a request to the Gateway of `ingress.yaml`.
fn at_gateway(words: &str) -> Output {
    run(words, &[golden("explain").join("ingress.yaml")])
}

fn run(words: &str, files: &[PathBuf]) -> Output {
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
    command.arg("explain").args(words.split_whitespace());
    for file in files {
        command.arg("-f").arg(file);
    }
    command.output().unwrap()
}

#[test]
fn explanations_are_golden() {
    check_goldens(
        canal,
        &[
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
        ],
    );
}

#[test]
fn explanations_of_arrivals_at_a_gateway_are_golden() {
    check_goldens(
        at_gateway,
        &[
            (
                "url",
                "http://shop.example.com/cart?q=1 --from-ip 203.0.113.9 -X GET",
            ),
            (
                "url-post",
                "http://192.0.2.7/cart --host shop.example.com --from-ip 203.0.113.9 -X POST -H x-a:b",
            ),
            (
                "url-denied",
                "http://shop.example.com/ --gateway infra/public --from-ip 198.51.100.1",
            ),
            (
                "url-redirect",
                "http://shop.example.com/old --gateway infra/public --from-ip 203.0.113.9",
            ),
            ("url-no-host", "http://other.example.com/ --listener http"),
            (
                "url-tls",
                "https://shop.example.com/cart --from-ip 203.0.113.9",
            ),
            ("url-sni", "tls://192.0.2.7 --sni other.example.org"),
            ("url-port", "tcp://192.0.2.7:5432"),
            (
                "url-json",
                "http://shop.example.com/cart --from-ip 203.0.113.9 -o json",
            ),
        ],
    );
}

/// Compares what `canal explain` prints for each words with the golden file of the name.
fn check_goldens(explain: fn(&str) -> Output, cases: &[(&str, &str)]) {
    let mut differing = Vec::new();
    for (name, words) in cases {
        let output = explain(words);
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
    // Code 2 is a wrong command line, 5 a named object that does not exist, 1 any other failure.
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
        check_failure(name, &canal(words), code, text);
    }
}

#[test]
fn wrong_arguments_of_an_arrival_have_an_exit_code_and_a_reason() {
    for (name, words, code, text) in [
        ("no scheme", "shop.example.com", 2, "has no scheme"),
        ("path of tcp", "tcp://a:1/x", 2, "has a path"),
        ("no port of tcp", "tcp://a", 2, "no default port"),
        (
            "no Gateway",
            "http://a/ --gateway infra/gone",
            5,
            "there is no Gateway infra/gone",
        ),
        (
            "no listener",
            "http://a/ --listener gone",
            5,
            "has no listener gone",
        ),
        (
            "another port",
            "http://a:81/ --listener http",
            2,
            "listener http has port 80",
        ),
        ("both", "http://a/ --to shop/web:80", 2, "cannot be used"),
        ("neither", "--from -", 2, "--to"),
    ] {
        check_failure(name, &at_gateway(words), code, text);
    }
}

fn check_failure(name: &str, output: &Output, code: i32, text: &str) {
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{name}: {errors}");
    assert!(errors.contains(text), "{name}: {errors}");
}
