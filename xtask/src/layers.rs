//! The direction of dependencies between crates, from `cargo metadata`, held against the layers and the golden graph `docs/layers.txt`.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use anyhow::Context;

use crate::tree::Tree;

/// The layers in order; a crate may name crates of earlier layers and of its own. `control` and `dataplane` are apart.
const ORDER: [(&str, &[&str]); 10] = [
    ("model", &["model"]),
    ("runtime", &["model", "runtime"]),
    ("compiler", &["model", "compiler"]),
    ("wire", &["model", "wire"]),
    ("control", &["model", "runtime", "compiler", "wire", "control"]),
    ("dataplane", &["model", "runtime", "wire", "dataplane"]),
    ("world", &["model", "world"]),
    ("apps", &["model", "runtime", "compiler", "wire", "control", "dataplane", "world", "apps"]),
    ("tests", &["model", "runtime", "compiler", "wire", "control", "dataplane", "world", "apps", "tests", "samples"]),
    ("bench", &["model", "runtime", "compiler", "wire", "control", "dataplane", "world", "apps", "bench", "samples"]),
];

/// Pure crates: no sockets, no wall clock, no ambient randomness. Dependencies that would bring them are refused.
const PURE: [(&str, &[&str]); 4] = [
    ("canal-model", &["tokio", "rand", "socket2", "hyper", "tonic"]),
    ("canal-compiler", &["tokio", "rand", "socket2", "hyper", "tonic"]),
    ("canal-h1", &["tokio", "rand", "socket2", "hyper", "tonic"]),
    ("canal-router", &["tokio", "rand", "socket2", "hyper", "tonic"]),
];

/// Words that a pure crate's sources may not hold outside tests.
const PURE_WORDS: [&str; 5] = ["SystemTime::now", "Instant::now", "std::net::Tcp", "std::net::Udp", "thread_rng"];

/// Data planes that must not link the compiler, a control crate or a Kubernetes client.
const DATA_APPS: [&str; 3] = ["canal-gateway", "canal-node", "canal-keyserver"];

struct Crate {
    folder: String,
    layer: String,
    needs: BTreeSet<String>,
}

pub(crate) fn check(tree: &Tree, bless: bool, found: &mut Vec<String>) -> anyhow::Result<()> {
    let crates = read(tree)?;
    directions(&crates, found);
    purity(tree, &crates, found);
    data_apps(&crates, found);
    golden(tree, &crates, bless, found)
}

fn read(tree: &Tree) -> anyhow::Result<BTreeMap<String, Crate>> {
    let out = Command::new("cargo").args(["metadata", "--no-deps", "--format-version", "1"]).current_dir(&tree.root).output()?;
    let meta: serde_json::Value = serde_json::from_slice(&out.stdout).context("cargo metadata")?;
    let mut crates = BTreeMap::new();
    for p in meta["packages"].as_array().context("packages")? {
        let manifest = p["manifest_path"].as_str().context("manifest_path")?;
        let folder =
            std::path::Path::new(manifest).parent().and_then(|d| d.strip_prefix(&tree.root).ok()).context("a crate outside the root")?;
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
        crates.insert(p["name"].as_str().context("name")?.to_string(), Crate { folder, layer, needs });
    }
    Ok(crates)
}

fn directions(crates: &BTreeMap<String, Crate>, found: &mut Vec<String>) {
    for (name, c) in crates {
        let Some((_, may)) = ORDER.iter().find(|(l, _)| *l == c.layer) else { continue };
        for need in &c.needs {
            let Some(other) = crates.get(need) else { continue };
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

fn purity(tree: &Tree, crates: &BTreeMap<String, Crate>, found: &mut Vec<String>) {
    for (name, refused) in PURE {
        let Some(c) = crates.get(name) else { continue };
        for need in c.needs.iter().filter(|n| refused.contains(&n.as_str())) {
            found.push(format!("{}/Cargo.toml: {name} is pure and may not name {need}: take time, seed and bytes as arguments", c.folder));
        }
        let src = format!("{}/src/", c.folder);
        for (path, text) in tree.files.iter().filter(|(p, _)| p.starts_with(&src) && !p.contains("test")) {
            let code = text.split("#[cfg(test)]").next().unwrap_or_default();
            for word in PURE_WORDS.iter().filter(|w| code.contains(**w)) {
                found.push(format!("{path}: {word} in a pure crate: take it as an argument"));
            }
        }
    }
}

fn data_apps(crates: &BTreeMap<String, Crate>, found: &mut Vec<String>) {
    for app in DATA_APPS {
        let mut seen = BTreeSet::new();
        let mut todo = vec![app.to_string()];
        while let Some(n) = todo.pop() {
            let Some(c) = crates.get(&n) else { continue };
            if !seen.insert(n.clone()) {
                continue;
            }
            if c.layer == "control" || c.layer == "compiler" || c.needs.contains("kube") {
                found.push(format!(
                    "{}: {app} reaches {n} ({}): a data plane links neither the control side nor Kubernetes",
                    c.folder, c.layer
                ));
            }
            todo.extend(c.needs.iter().cloned());
        }
    }
}

fn golden(tree: &Tree, crates: &BTreeMap<String, Crate>, bless: bool, found: &mut Vec<String>) -> anyhow::Result<()> {
    let mut text =
        String::from("# crate (folder): the crates of this repository it names. `cargo xtask tidy --bless` rewrites this file.\n");
    for (name, c) in crates {
        let needs: Vec<&str> = c.needs.iter().filter(|n| crates.contains_key(*n)).map(String::as_str).collect();
        text.push_str(&format!("{name} ({}): {}\n", c.folder, if needs.is_empty() { "-".to_string() } else { needs.join(" ") }));
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
