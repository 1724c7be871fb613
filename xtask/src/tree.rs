//! The files that git tracks or would track, read once. This module has no rules.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context;

/// Every text file of the repository by its path from the root.
pub(crate) struct SourceTree {
    pub(crate) root: PathBuf,
    pub(crate) files: BTreeMap<String, String>,
}

impl SourceTree {
    pub(crate) fn read() -> anyhow::Result<Self> {
        let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
            .parent()
            .context("xtask runs in the repository's root")?
            .to_path_buf();
        let list = Command::new("git")
            .args(["ls-files", "--cached", "--others", "--exclude-standard"])
            .current_dir(&root)
            .output()
            .context("git ls-files: is git installed?")?;
        let mut files = BTreeMap::new();
        for path in String::from_utf8(list.stdout)?.lines() {
            // No rule applies to files that are deleted but still in the index, or that are not
            // text.
            if let Ok(text) = std::fs::read_to_string(root.join(path)) {
                files.insert(path.to_string(), text);
            }
        }
        Ok(Self { root, files })
    }

    pub(crate) fn with_suffix<'a>(
        &'a self,
        suffix: &'a str,
    ) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.files
            .iter()
            .filter(move |(p, _)| p.ends_with(suffix))
            .map(|(p, t)| (p.as_str(), t.as_str()))
    }

    /// Returns whether the path is a file or a folder of the tree.
    pub(crate) fn has(&self, path: &str) -> bool {
        let path = path.trim_end_matches('/');
        self.files.contains_key(path)
            || self
                .files
                .keys()
                .any(|f| f.strip_prefix(path).is_some_and(|r| r.starts_with('/')))
    }
}
