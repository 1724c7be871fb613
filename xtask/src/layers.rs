//! Rule on dependencies between crates: compares `cargo metadata` with the layers and with the
//! golden graph `docs/layers.txt`.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use anyhow::Context;

use crate::tree::SourceTree;

/// The layers in order. A crate may depend on crates of earlier layers and of its own. `control`
/// and `dataplane` may not depend on each other. Only dev-dependencies may name `testing`.
const ORDER: [(&str, &[&str]); 14] = [
    ("model", &["model"]),
    ("yaml", &["yaml"]),
    ("runtime", &["model", "runtime"]),
    ("compiler", &["model", "compiler"]),
    ("wire", &["model", "wire"]),
    (
        "control",
        &["model", "yaml", "runtime", "compiler", "wire", "control"],
    ),
    ("dataplane", &["model", "runtime", "wire", "dataplane"]),
    ("world", &["model", "yaml", "world"]),
    (
        "apps",
        &[
            "model",
            "runtime",
            "compiler",
            "wire",
            "control",
            "dataplane",
            "world",
            "apps",
        ],
    ),
    ("samples", &["samples"]),
    (
        "testing",
        &[
            "model",
            "runtime",
            "wire",
            "control",
            "dataplane",
            "testing",
        ],
    ),
    ("xtask", &["xtask"]),
    (
        "tests",
        &[
            "model",
            "yaml",
            "runtime",
            "compiler",
            "wire",
            "control",
            "dataplane",
            "world",
            "apps",
            "tests",
            "testing",
            "samples",
        ],
    ),
    (
        "bench",
        &[
            "model",
            "runtime",
            "compiler",
            "wire",
            "control",
            "dataplane",
            "world",
            "apps",
            "tests",
            "bench",
            "samples",
        ],
    ),
];

/// Pure crates: no sockets, no wall clock, no ambient randomness. Dependencies that would bring
/// these are refused.
const PURE: [(&str, &[&str]); 9] = [
    (
        "canal-model",
        &["tokio", "rand", "socket2", "hyper", "tonic"],
    ),
    (
        "canal-compiler",
        &["tokio", "rand", "socket2", "hyper", "tonic"],
    ),
    ("canal-ir", &["tokio", "rand", "socket2", "hyper", "tonic"]),
    (
        "canal-attachment",
        &["tokio", "rand", "socket2", "hyper", "tonic"],
    ),
    (
        "canal-certificate",
        &["tokio", "rand", "socket2", "hyper", "tonic"],
    ),
    (
        "canal-scope",
        &["tokio", "rand", "socket2", "hyper", "tonic"],
    ),
    (
        "canal-security-policies",
        &["tokio", "rand", "socket2", "hyper", "tonic"],
    ),
    ("canal-h1", &["tokio", "rand", "socket2", "hyper", "tonic"]),
    (
        "canal-router",
        &["tokio", "rand", "socket2", "hyper", "tonic"],
    ),
];

/// Words that the sources of a pure crate may not contain outside tests.
const PURE_WORDS: [&str; 5] = [
    "SystemTime::now",
    "Instant::now",
    "std::net::Tcp",
    "std::net::Udp",
    "thread_rng",
];

struct Crate {
    folder: String,
    layer: String,
    needs: BTreeSet<String>,
}

pub(crate) fn check(tree: &SourceTree, bless: bool, found: &mut Vec<String>) -> anyhow::Result<()> {
    let crates = read(tree)?;
    directions(&crates, found);
    purity(tree, &crates, found);
    data_apps(&crates, found);
    golden(tree, &crates, bless, found)
}

fn read(tree: &SourceTree) -> anyhow::Result<BTreeMap<String, Crate>> {
    let out = Command::new("cargo")
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .current_dir(&tree.root)
        .output()?;
    let meta: serde_json::Value = serde_json::from_slice(&out.stdout).context("cargo metadata")?;
    let mut crates = BTreeMap::new();
    for p in meta["packages"].as_array().context("packages")? {
        let manifest = p["manifest_path"].as_str().context("manifest_path")?;
        let folder = std::path::Path::new(manifest)
            .parent()
            .and_then(|d| d.strip_prefix(&tree.root).ok())
            .context("a crate outside the root")?;
        let folder = folder.to_string_lossy().into_owned();
        let needs = p["dependencies"]
            .as_array()
            .into_iter()
            .flatten()
            .filter(|d| d["kind"].is_null())
            .filter_map(|d| d["name"].as_str())
            .map(str::to_string)
            .collect();
        let layer = folder.split('/').next().unwrap_or_default().to_string();
        crates.insert(
            p["name"].as_str().context("name")?.to_string(),
            Crate {
                folder,
                layer,
                needs,
            },
        );
    }
    Ok(crates)
}

fn directions(crates: &BTreeMap<String, Crate>, found: &mut Vec<String>) {
    for (name, c) in crates {
        let Some((_, may)) = ORDER.iter().find(|(l, _)| *l == c.layer) else {
            found.push(format!(
                "{}/Cargo.toml: {name} is in no layer; put its folder under one, or add a layer to xtask/src/layers.rs",
                c.folder
            ));
            continue;
        };
        for need in &c.needs {
            let Some(other) = crates.get(need) else {
                continue;
            };
            if !may.contains(&other.layer.as_str()) {
                found.push(format!(
                    "{}/Cargo.toml: {name} ({}) may not name {need} ({}): {} may name {}",
                    c.folder,
                    c.layer,
                    other.layer,
                    c.layer,
                    may.join(", ")
                ));
            }
        }
    }
}

fn purity(tree: &SourceTree, crates: &BTreeMap<String, Crate>, found: &mut Vec<String>) {
    for (name, refused) in PURE {
        let Some(c) = crates.get(name) else { continue };
        for need in c.needs.iter().filter(|n| refused.contains(&n.as_str())) {
            found.push(format!("{}/Cargo.toml: {name} is pure and may not name {need}: take time, seed and bytes as arguments", c.folder));
        }
        let src = format!("{}/src/", c.folder);
        for (path, text) in tree
            .files
            .iter()
            .filter(|(p, _)| p.starts_with(&src) && !p.contains("test"))
        {
            let code = text.split("#[cfg(test)]").next().unwrap_or_default();
            for word in PURE_WORDS.iter().filter(|w| code.contains(**w)) {
                found.push(format!(
                    "{path}: {word} in a pure crate: take it as an argument"
                ));
            }
        }
    }
}

/// Programs that link a data plane link neither the compiler, nor the control side, nor a
/// Kubernetes client.
fn data_apps(crates: &BTreeMap<String, Crate>, found: &mut Vec<String>) {
    for (app, _) in crates.iter().filter(|(_, c)| c.layer == "apps") {
        let reached = reachable(crates, app);
        if !reached.iter().any(|(_, c)| c.layer == "dataplane") {
            continue;
        }
        for (name, c) in reached {
            if c.layer == "control" || c.layer == "compiler" || c.needs.contains("kube") {
                found.push(format!(
                    "{}: {app} reaches {name} ({}): a data plane links neither the control side nor Kubernetes",
                    c.folder, c.layer
                ));
            }
        }
    }
}

/// Returns the crate and all crates of the workspace that it depends on, directly or indirectly.
fn reachable<'a>(crates: &'a BTreeMap<String, Crate>, from: &str) -> BTreeMap<&'a str, &'a Crate> {
    let mut reached = BTreeMap::new();
    let mut todo = vec![from];
    while let Some((name, c)) = todo.pop().and_then(|name| crates.get_key_value(name)) {
        if reached.insert(name.as_str(), c).is_none() {
            todo.extend(
                c.needs
                    .iter()
                    .map(String::as_str)
                    .filter(|need| crates.contains_key(*need)),
            );
        }
    }
    reached
}

fn golden(
    tree: &SourceTree,
    crates: &BTreeMap<String, Crate>,
    bless: bool,
    found: &mut Vec<String>,
) -> anyhow::Result<()> {
    let mut text = String::from(
        "# crate (folder): the crates of this repository it names. `cargo xtask tidy --bless` rewrites this file.\n",
    );
    for (name, c) in crates {
        let needs: Vec<&str> = c
            .needs
            .iter()
            .filter(|n| crates.contains_key(*n))
            .map(String::as_str)
            .collect();
        text.push_str(&format!(
            "{name} ({}): {}\n",
            c.folder,
            if needs.is_empty() {
                "-".to_string()
            } else {
                needs.join(" ")
            }
        ));
    }
    let path = "docs/layers.txt";
    if bless {
        std::fs::create_dir_all(tree.root.join("docs"))?;
        std::fs::write(tree.root.join(path), &text)?;
    } else if tree.files.get(path) != Some(&text) {
        found.push(format!("{path}: the crate graph has changed; `cargo xtask tidy --bless`, and say why in the commit"));
    }
    Ok(())
}
