//! The software bill of materials: every package of `Cargo.lock` with its checksum, license and
//! dependencies, as CycloneDX JSON. The same tree gives the same bytes. It does not evaluate
//! licenses; `deny.toml` does.

use std::collections::BTreeMap;
use std::process::Command;

use anyhow::Context;
use serde_json::{Value, json};

use crate::tree::SourceTree;

/// File that `make sbom` writes.
const FILE: &str = "target/sbom.cdx.json";
/// Target of the build. The lock file also has packages that no build for this target uses; cargo
/// knows their licenses only if it has downloaded them.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// One package of the lock file.
#[derive(Debug, Default, PartialEq, Eq)]
struct Locked {
    name: String,
    version: String,
    /// Source of the package; `None` for a package of this repository.
    source: Option<String>,
    checksum: Option<String>,
    /// Names of the dependencies: `name`, or `name version` if the lock file has several versions.
    dependencies: Vec<String>,
}

impl Locked {
    /// Returns the package URL (<https://github.com/package-url/purl-spec>).
    fn reference(&self) -> String {
        format!("pkg:cargo/{}@{}", self.name, self.version)
    }
}

/// Writes the bill of materials.
pub(crate) fn write(tree: &SourceTree) -> anyhow::Result<bool> {
    let (bill, problems) = make(tree)?;
    problems.iter().for_each(|problem| eprintln!("{problem}"));
    let path = tree.root.join(FILE);
    std::fs::create_dir_all(path.parent().context("a file has a folder")?)?;
    std::fs::write(&path, format!("{}\n", serde_json::to_string_pretty(&bill)?))
        .with_context(|| FILE.to_owned())?;
    println!(
        "{FILE}: {} packages",
        bill["components"].as_array().map_or(0, Vec::len)
    );
    Ok(problems.is_empty())
}

/// Finds packages of the lock file that the bill would omit or describe incompletely.
pub(crate) fn check(tree: &SourceTree, found: &mut Vec<String>) -> anyhow::Result<()> {
    let (bill, problems) = make(tree)?;
    found.extend(problems);
    let is_whole = |text: &String| {
        text.contains("Apache License") && text.contains("END OF TERMS AND CONDITIONS")
    };
    if !tree.files.get("LICENSE").is_some_and(is_whole) {
        found.push(
            "LICENSE: the text of Apache-2.0, which every manifest names, is missing".to_owned(),
        );
    }
    let lock = tree.files.get("Cargo.lock").context("Cargo.lock")?;
    let packages = lock.lines().filter(|line| *line == "[[package]]").count();
    let components = bill["components"].as_array().map_or(0, Vec::len);
    if components != packages {
        found.push(format!(
            "Cargo.lock: {packages} packages, and {components} in the bill of materials"
        ));
    }
    Ok(())
}

fn make(tree: &SourceTree) -> anyhow::Result<(Value, Vec<String>)> {
    let lock = read_lock(tree.files.get("Cargo.lock").context("Cargo.lock")?);
    let out = Command::new("cargo")
        .args([
            "metadata",
            "--locked",
            "--format-version",
            "1",
            "--filter-platform",
            TARGET,
        ])
        .current_dir(&tree.root)
        .output()?;
    anyhow::ensure!(
        out.status.success(),
        "cargo metadata: {}",
        String::from_utf8_lossy(&out.stderr)
    );
    let metadata: Value = serde_json::from_slice(&out.stdout).context("cargo metadata")?;
    Ok(bill(&lock, &licences(&metadata)))
}

/// Returns license expressions by package URL. Cargo reads `MIT/Apache-2.0` as `MIT OR Apache-2.0`.
fn licences(metadata: &Value) -> BTreeMap<String, String> {
    let licence = |package: &Value| {
        let (name, version) = (package["name"].as_str()?, package["version"].as_str()?);
        let licence = package["license"].as_str()?.replace('/', " OR ");
        Some((format!("pkg:cargo/{name}@{version}"), licence))
    };
    metadata["packages"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(licence)
        .collect()
}

fn read_lock(text: &str) -> Vec<Locked> {
    let mut packages = Vec::new();
    for block in text.split("[[package]]").skip(1) {
        let value = |key: &str| {
            block
                .lines()
                .find_map(|line| {
                    line.strip_prefix(key)?
                        .strip_prefix(" = \"")?
                        .strip_suffix('"')
                })
                .map(str::to_owned)
        };
        let listed = block
            .lines()
            .filter_map(|line| line.strip_prefix(" \"")?.strip_suffix("\","));
        packages.push(Locked {
            name: value("name").unwrap_or_default(),
            version: value("version").unwrap_or_default(),
            source: value("source"),
            checksum: value("checksum"),
            dependencies: listed.map(str::to_owned).collect(),
        });
    }
    packages
}

/// Returns the bill, and the problems with it.
fn bill(lock: &[Locked], licences: &BTreeMap<String, String>) -> (Value, Vec<String>) {
    let mut problems = Vec::new();
    let mut components = Vec::new();
    let mut dependencies = Vec::new();
    for package in lock {
        let reference = package.reference();
        let mut component = json!({
            "type": if package.source.is_none() { "application" } else { "library" },
            "bom-ref": reference,
            "name": package.name,
            "version": package.version,
            "purl": reference,
        });
        // Cargo reports licences only of packages that are built for the target.
        match licences.get(&reference) {
            Some(licence) => component["licenses"] = json!([{ "expression": licence }]),
            None => {
                component["properties"] =
                    json!([{ "name": "canal:built", "value": format!("not for {TARGET}") }])
            }
        }
        match (&package.source, &package.checksum) {
            (_, Some(checksum)) => {
                component["hashes"] = json!([{ "alg": "SHA-256", "content": checksum }])
            }
            (Some(_), None) => problems.push(format!(
                "Cargo.lock: {reference} has no checksum; fix: take it from a registry"
            )),
            // A crate of the workspace is not downloaded, so it has no checksum.
            (None, None) => {}
        }
        let mut on = Vec::new();
        for dependency in &package.dependencies {
            match resolve(lock, dependency) {
                Some(package) => on.push(package.reference()),
                None => {
                    problems.push(format!("Cargo.lock: {reference} depends on {dependency:?}, which is not in it; fix: run cargo update"))
                }
            }
        }
        components.push(component);
        dependencies.push(json!({ "ref": reference, "dependsOn": on }));
    }
    let bill = json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": { "component": { "type": "application", "bom-ref": "canal-mesh", "name": "canal", "licenses": [{ "expression": "Apache-2.0" }] } },
        "components": components,
        "dependencies": dependencies,
    });
    (bill, problems)
}

/// Returns the package that a dependency of the lock file names.
fn resolve<'a>(lock: &'a [Locked], dependency: &str) -> Option<&'a Locked> {
    let mut words = dependency.split(' ');
    let (name, version) = (words.next()?, words.next());
    lock.iter().find(|package| {
        package.name == name && version.is_none_or(|version| package.version == version)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCK: &str = "version = 4\n\n[[package]]\nname = \"canal\"\nversion = \"0.1.0\"\ndependencies = [\n \"a\",\n \"b 2.0.0\",\n]\n\n\
        [[package]]\nname = \"a\"\nversion = \"1.0.0\"\nsource = \"registry\"\nchecksum = \"aa\"\n\n\
        [[package]]\nname = \"b\"\nversion = \"1.0.0\"\nsource = \"registry\"\nchecksum = \"b1\"\n\n\
        [[package]]\nname = \"b\"\nversion = \"2.0.0\"\nsource = \"registry\"\nchecksum = \"b2\"\n";

    #[test]
    fn every_package_has_checksum_licence_and_dependencies() {
        let metadata = json!({ "packages": [{ "name": "a", "version": "1.0.0", "license": "MIT/Apache-2.0" }] });
        let (bill, problems) = bill(&read_lock(LOCK), &licences(&metadata));
        assert_eq!(problems, Vec::<String>::new());
        assert_eq!(bill["components"].as_array().unwrap().len(), 4);
        assert_eq!(
            bill["components"][1]["licenses"][0]["expression"],
            "MIT OR Apache-2.0"
        );
        assert_eq!(bill["components"][3]["hashes"][0]["content"], "b2");
        assert_eq!(
            bill["components"][3]["properties"][0]["name"],
            "canal:built"
        );
        assert_eq!(
            bill["dependencies"][0]["dependsOn"],
            json!(["pkg:cargo/a@1.0.0", "pkg:cargo/b@2.0.0"])
        );
    }

    #[test]
    fn package_without_checksum_or_dependency_is_found() {
        let broken = LOCK
            .replace("checksum = \"aa\"\n", "")
            .replace("\"b 2.0.0\"", "\"c\"");
        let (_, problems) = bill(&read_lock(&broken), &BTreeMap::new());
        assert_eq!(problems.len(), 2, "{problems:?}");
    }

    #[test]
    fn the_same_tree_yields_the_same_bill_of_materials() {
        let tree = SourceTree::read().unwrap();
        let mut found = Vec::new();
        check(&tree, &mut found).unwrap();
        assert_eq!(found, Vec::<String>::new());
        assert_eq!(
            make(&tree).unwrap().0.to_string(),
            make(&tree).unwrap().0.to_string()
        );
    }
}
