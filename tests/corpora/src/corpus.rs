//! The corpora: modules of Go with folders of YAML, each of one version. Go's own cache stores
//! them, so that a second run fetches nothing. This module does not read what the documents say.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};
use canal_attachment::CONTROLLER_NAME;

use crate::suite_objects::suite_objects;

/// A folder of a published module.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Corpus {
    pub(crate) name: &'static str,
    pub(crate) module: &'static str,
    pub(crate) version: &'static str,
    folder: &'static str,
    /// Files of the module with the objects that each document may refer to. If there are none, the
    /// services that a document names are made for it.
    base: &'static [&'static str],
    /// Whether the conformance suite creates further objects by its own code.
    has_suite_objects: bool,
}

/// The corpora that Canal is measured by.
pub(crate) const CORPORA: [Corpus; 3] = [
    Corpus {
        name: "istio-samples",
        module: "istio.io/istio",
        version: "v0.0.0-20260827124520-eed52ebb66ad",
        folder: "samples",
        base: &[],
        has_suite_objects: false,
    },
    Corpus {
        name: "gateway-api-examples",
        module: "sigs.k8s.io/gateway-api",
        version: "v1.7.0",
        folder: "examples",
        base: &[],
        has_suite_objects: false,
    },
    Corpus {
        name: "gateway-api-conformance",
        module: "sigs.k8s.io/gateway-api/conformance",
        version: "v1.7.0",
        folder: "tests",
        base: &["base/manifests.yaml", "mesh/manifests.yaml"],
        has_suite_objects: true,
    },
];

/// Placeholders of the conformance suite, and what the suite puts there for an implementation.
const PLACEHOLDERS: [(&str, &str); 2] = [
    ("{GATEWAY_CLASS_NAME}", "canal"),
    ("{GATEWAY_CONTROLLER_NAME}", CONTROLLER_NAME),
];

/// The files of a corpus.
pub(crate) struct CorpusFiles {
    /// Files whose documents are evaluated, in the order of their paths.
    pub(crate) policies: Vec<CorpusFile>,
    /// Files with the objects to which the evaluated documents refer.
    pub(crate) base: Vec<CorpusFile>,
}

/// A file of a corpus.
#[derive(Debug)]
pub(crate) struct CorpusFile {
    /// Path below the corpus's folder.
    pub(crate) path: String,
    pub(crate) text: String,
}

impl Corpus {
    /// Returns the folder of the module that is read.
    pub(crate) fn folder(&self) -> &'static str {
        self.folder
    }

    /// Fetches the corpus, unless Go's cache has it, and reads its YAML files.
    pub(crate) fn read(&self) -> anyhow::Result<CorpusFiles> {
        let module = self.fetch()?;
        let root = module.join(self.folder);
        let mut paths = Vec::new();
        yaml_paths(&root, &mut paths)?;
        paths.sort();
        let policies = paths.iter().map(|path| read_file(&root, path));
        let base = self
            .base
            .iter()
            .map(|path| read_file(&module, &module.join(path)));
        let mut base: Vec<CorpusFile> = base.collect::<anyhow::Result<_>>()?;
        if self.has_suite_objects {
            base.push(CorpusFile {
                path: "suite".to_owned(),
                text: suite_objects()?,
            });
        }
        Ok(CorpusFiles {
            policies: policies.collect::<anyhow::Result<_>>()?,
            base,
        })
    }

    /// Returns the folder of the module in Go's cache.
    fn fetch(&self) -> anyhow::Result<PathBuf> {
        let version = format!("{}@{}", self.module, self.version);
        // Outside a module, Go takes the version as it is written and adds it to no go.mod.
        let output = Command::new("go")
            .args(["mod", "download", "-json", &version])
            .env("GOTOOLCHAIN", "auto")
            .env("GOFLAGS", "-mod=mod")
            .env("GO111MODULE", "on")
            .current_dir(std::env::temp_dir())
            .output()
            .context("go cannot be started; fix: run setup/install test")?;
        let answer: serde_json::Value = serde_json::from_slice(&output.stdout)
            .with_context(|| format!("go mod download {version}: the answer is not JSON"))?;
        match answer["Dir"].as_str() {
            Some(folder) => Ok(folder.into()),
            None => bail!(
                "go mod download {version}: {}; fix: give this machine access to the module proxy",
                answer["Error"].as_str().unwrap_or("no folder")
            ),
        }
    }
}

/// Reads a file below `root`, with the placeholders filled.
fn read_file(root: &Path, path: &Path) -> anyhow::Result<CorpusFile> {
    let mut text = std::fs::read_to_string(path)
        .with_context(|| format!("{} cannot be read", path.display()))?;
    for (placeholder, value) in PLACEHOLDERS {
        text = text.replace(placeholder, value);
    }
    let path = path.strip_prefix(root).unwrap_or(path);
    Ok(CorpusFile {
        path: path.display().to_string(),
        text,
    })
}

fn yaml_paths(folder: &Path, found: &mut Vec<PathBuf>) -> anyhow::Result<()> {
    let entries = std::fs::read_dir(folder)
        .with_context(|| format!("{} cannot be read", folder.display()))?;
    for entry in entries {
        let path = entry?.path();
        if path.is_dir() {
            yaml_paths(&path, found)?;
        } else if path
            .extension()
            .is_some_and(|ext| ext == "yaml" || ext == "yml")
        {
            found.push(path);
        }
    }
    Ok(())
}
