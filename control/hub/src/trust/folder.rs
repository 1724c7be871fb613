//! Authorities that somebody else gives: `--ca-dir`, one folder per trust domain, read again when it changes. What was last good stays.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use canal_authority::{AuthorityFiles, FilesFault, ForeignCrl, TenantAuthority, read_crls, read_roots};
use canal_model::ids::TrustDomain;

/// Bytes of one file of a trust domain's folder.
pub const CA_FILE_BYTES_MAX: u64 = 1 << 20;
/// Trust domains in the folder.
pub const CA_DOMAINS_MAX: usize = 10_000;

/// What stands in a folder, beside the fault of its newest state.
#[derive(Clone, Default)]
pub(crate) struct Folder {
    /// Signs; `None` where another process does, or nothing was ever good.
    pub(crate) authority: Option<Arc<TenantAuthority>>,
    pub(crate) roots: Vec<String>,
    pub(crate) foreign: Vec<ForeignCrl>,
    /// What is wrong with what stands there now.
    pub(crate) fault: Option<String>,
    stamp: Stamp,
}

/// Tells files that changed: inode, size, time.
type Stamp = Vec<Option<(u64, u64, i64, i64)>>;

const NAMES: [&str; 4] = ["cert-chain.pem", "key.pem", "root-cert.pem", "crl.pem"];

fn stamp(folder: &Path) -> Stamp {
    use std::os::unix::fs::MetadataExt;
    let one = |name: &str| std::fs::metadata(folder.join(name)).ok().map(|m| (m.ino(), m.size(), m.mtime(), m.mtime_nsec()));
    NAMES.iter().copied().map(one).collect()
}

/// A text file of a folder; `None`: it is not there.
pub(crate) fn text(path: &Path) -> Result<Option<String>, String> {
    let refused = |e: std::io::Error| format!("{}: {e}", path.display());
    let file = match std::fs::File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(refused(e)),
    };
    let mut text = String::new();
    file.take(CA_FILE_BYTES_MAX + 1).read_to_string(&mut text).map_err(refused)?;
    if text.len() as u64 > CA_FILE_BYTES_MAX {
        return Err(format!("{}: more than {CA_FILE_BYTES_MAX} bytes", path.display()));
    }
    Ok(Some(text))
}

/// Why a folder is not taken over; the name is a counter's label.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FolderFault {
    #[error("{0}")]
    Read(String),
    #[error("{0} is not there")]
    Missing(&'static str),
    #[error(transparent)]
    Content(#[from] FilesFault),
}

impl FolderFault {
    fn name(&self) -> &'static str {
        match self {
            Self::Read(_) => "read",
            Self::Missing(_) => "missing",
            Self::Content(fault) => fault.name(),
        }
    }
}

struct Good {
    authority: Option<Arc<TenantAuthority>>,
    roots: Vec<String>,
    foreign: Vec<ForeignCrl>,
}

/// Reads a folder. `is_external`: another process signs, so only roots and lists are there.
fn read(folder: &Path, domain: &TrustDomain, is_external: bool, now: u64) -> Result<Good, FolderFault> {
    let file = |name: &'static str| text(&folder.join(name)).map_err(FolderFault::Read);
    let needed = |name| file(name)?.ok_or(FolderFault::Missing(name));
    let root = needed("root-cert.pem")?;
    let crl = file("crl.pem")?;
    if is_external {
        let roots = read_roots(&root, now)?;
        let issuers: Vec<&str> = roots.iter().map(String::as_str).collect();
        let foreign = read_crls(crl.as_deref(), &issuers)?;
        return Ok(Good { authority: None, foreign, roots });
    }
    let files = AuthorityFiles { chain: needed("cert-chain.pem")?, key: needed("key.pem")?, root, crl };
    let (authority, foreign) = TenantAuthority::from_files(domain, &files, now)?;
    Ok(Good { roots: authority.roots().to_vec(), authority: Some(Arc::new(authority)), foreign })
}

/// The trust domains that folders are named after; what is over the limit is left out.
fn decide_domains(names: impl Iterator<Item = String>, limit: usize) -> Vec<TrustDomain> {
    let mut domains: Vec<TrustDomain> = names.filter_map(|name| TrustDomain::new(&name).ok()).collect();
    domains.sort();
    domains.truncate(limit);
    domains
}

/// All folders as they stand.
pub(crate) struct Folders {
    root: PathBuf,
    pub(crate) held: BTreeMap<TrustDomain, Folder>,
}

/// What a look found.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// Something else is in force now.
    Changed(TrustDomain),
    /// It changed and is broken: the refusal's name.
    Broken(TrustDomain, &'static str),
}

impl Folders {
    pub(crate) fn new(root: PathBuf) -> Self {
        Self { root, held: BTreeMap::new() }
    }

    /// The folder of a trust domain, whether or not it is there.
    pub(crate) fn of(&self, domain: &TrustDomain) -> PathBuf {
        self.root.join(domain.as_str())
    }

    /// Looks at every folder; reads those that changed.
    pub(crate) fn look(&mut self, is_external: impl Fn(&TrustDomain) -> bool, now: u64) -> Vec<Found> {
        let mut there = Vec::new();
        match std::fs::read_dir(&self.root) {
            Ok(entries) => {
                let names = entries.filter_map(Result::ok).filter(|e| e.path().is_dir()).filter_map(|e| e.file_name().into_string().ok());
                there = decide_domains(names, CA_DOMAINS_MAX);
            }
            Err(e) => tracing::error!(path = %self.root.display(), error = %e, "--ca-dir cannot be read; what was last good stays"),
        }
        let all: std::collections::BTreeSet<TrustDomain> = there.into_iter().chain(self.held.keys().cloned()).collect();
        all.into_iter().filter_map(|domain| self.look_at(domain, &is_external, now)).collect()
    }

    fn look_at(&mut self, domain: TrustDomain, is_external: impl Fn(&TrustDomain) -> bool, now: u64) -> Option<Found> {
        let path = self.of(&domain);
        let stamp = stamp(&path);
        if self.held.get(&domain).is_some_and(|held| held.stamp == stamp) {
            return None;
        }
        let held = self.held.entry(domain.clone()).or_default();
        held.stamp = stamp;
        match read(&path, &domain, is_external(&domain), now) {
            Ok(good) => {
                (held.authority, held.roots, held.foreign, held.fault) = (good.authority, good.roots, good.foreign, None);
                tracing::info!(target: "audit", %domain, path = %path.display(), "took over the authority's files");
                Some(Found::Changed(domain))
            }
            Err(fault) => {
                let kept = if held.roots.is_empty() { "nothing is issued" } else { "what was last good stays" };
                tracing::error!(%domain, path = %path.display(), %fault, "the authority's files are not taken over; {kept}");
                held.fault = Some(fault.to_string());
                Some(Found::Broken(domain, fault.name()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_named_after_trust_domains_and_are_so_many_at_most() {
        let names = ["b.example", "..data", "A", "a.example", "c.example"].map(String::from);
        let got: Vec<String> = decide_domains(names.into_iter(), 2).iter().map(ToString::to_string).collect();
        assert_eq!(got, ["a.example", "b.example"]);
    }

    #[test]
    fn what_stands_in_a_folder_has_a_name() {
        let dir = tempfile::tempdir().unwrap();
        let mut folders = Folders::new(dir.path().into());
        let folder = dir.path().join("a.example");
        std::fs::create_dir(&folder).unwrap();
        let large = " ".repeat(usize::try_from(CA_FILE_BYTES_MAX).unwrap() + 1);
        type Files<'a> = &'a [(&'a str, &'a str)];
        let cases: [(&str, Files<'_>, &str); 4] = [
            ("nothing", &[], "missing"),
            ("a root alone", &[("root-cert.pem", "x")], "missing"),
            ("no certificates", &[("cert-chain.pem", "x"), ("key.pem", "x")], "certificates"),
            ("a file that is too large", &[("root-cert.pem", &large)], "read"),
        ];
        for (what, files, want) in cases {
            for (name, text) in files {
                std::fs::write(folder.join(name), text).unwrap();
            }
            let domain: TrustDomain = "a.example".parse().unwrap();
            assert_eq!(folders.look(|_| false, 1_800_000_000), [Found::Broken(domain.clone(), want)], "{what}");
            assert_eq!(folders.look(|_| false, 1_800_000_000), [], "{what}: told once");
            assert!(folders.held[&domain].fault.is_some() && folders.held[&domain].roots.is_empty(), "{what}");
        }
    }
}
