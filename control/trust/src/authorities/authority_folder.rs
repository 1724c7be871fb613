//! CAs that are provided as files: `--ca-dir`, with one folder per trust domain. A folder is read
//! again when it changes. The last good state stays in force. Start at [`AuthorityFolders::scan`].

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use canal_ca::{
    AuthorityFiles, AuthorityFilesError, ImportedCrl, TenantAuthority, read_crls, read_roots,
};
use canal_model::ids::TrustDomain;

/// Maximum bytes of one file of a trust domain's folder.
/// The largest file is `crl.pem`: a list of 10,000 revoked certificates has about half of this.
pub const CA_FILE_BYTES_MAX: u64 = 1 << 20;
/// Maximum number of trust domains in the folder.
/// Above the 4,096 tenants that may have files (`TENANTS_MAX`).
pub const CA_DOMAINS_MAX: usize = 10_000;

/// Last good state of a folder, and the fault of its newest state.
#[derive(Clone, Default)]
pub(crate) struct AuthorityFolder {
    /// CA that signs; `None` if an external CA does, or no state was good yet.
    pub(crate) authority: Option<Arc<TenantAuthority>>,
    pub(crate) roots: Vec<String>,
    pub(crate) foreign: Vec<ImportedCrl>,
    /// Fault of the files that are there now.
    pub(crate) fault: Option<String>,
    stamp: FolderFingerprint,
}

/// Inode, size, mtime and ctime of a file, by which a change is noticed. A change of permissions
/// changes only the ctime, and may make the file readable.
type AuthorityFileFingerprint = (u64, u64, [i64; 2], [i64; 2]);

/// The fingerprints of the files that exist.
type FolderFingerprint = Vec<Option<AuthorityFileFingerprint>>;

/// Names of the files in a trust domain's folder whose changes are noticed.
const NAMES: [&str; 4] = ["cert-chain.pem", "key.pem", "root-cert.pem", "crl.pem"];

fn stamp(folder: &Path) -> FolderFingerprint {
    use std::os::unix::fs::MetadataExt;
    let one = |name: &str| {
        std::fs::metadata(folder.join(name)).ok().map(|m| {
            (
                m.ino(),
                m.size(),
                [m.mtime(), m.mtime_nsec()],
                [m.ctime(), m.ctime_nsec()],
            )
        })
    };
    NAMES.iter().copied().map(one).collect()
}

/// Reads a text file of a folder; `None` if it does not exist.
///
/// # Errors
/// The file cannot be read, or is larger than [`CA_FILE_BYTES_MAX`].
pub(crate) fn text(path: &Path) -> Result<Option<String>, String> {
    let refused = |e: std::io::Error| {
        format!(
            "{}: {e}; fix: make it readable for the controller",
            path.display()
        )
    };
    let file = match std::fs::File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(refused(e)),
    };
    let mut text = String::new();
    file.take(CA_FILE_BYTES_MAX + 1)
        .read_to_string(&mut text)
        .map_err(refused)?;
    if text.len() as u64 > CA_FILE_BYTES_MAX {
        return Err(format!(
            "{}: more than {CA_FILE_BYTES_MAX} bytes; fix: write only the certificates or the key into it",
            path.display()
        ));
    }
    Ok(Some(text))
}

/// Reason why the state of a folder is not used. The name is a counter's label.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FolderError {
    #[error("{0}")]
    Read(String),
    #[error("the CA folder {0} is missing; fix: create it with the CA's files")]
    Missing(&'static str),
    #[error(transparent)]
    Content(#[from] AuthorityFilesError),
}

impl FolderError {
    fn name(&self) -> &'static str {
        match self {
            Self::Read(_) => "read",
            Self::Missing(_) => "missing",
            Self::Content(fault) => fault.name(),
        }
    }
}

/// Content of a folder that is good.
struct LoadedAuthority {
    authority: Option<Arc<TenantAuthority>>,
    roots: Vec<String>,
    foreign: Vec<ImportedCrl>,
}

/// Reads a folder. With `is_external` an external CA signs, so only roots and lists are there.
fn read(
    folder: &Path,
    domain: &TrustDomain,
    is_external: bool,
    now: u64,
) -> Result<LoadedAuthority, FolderError> {
    let file = |name: &'static str| text(&folder.join(name)).map_err(FolderError::Read);
    let needed = |name| file(name)?.ok_or(FolderError::Missing(name));
    let root = needed("root-cert.pem")?;
    let crl = file("crl.pem")?;
    if is_external {
        let roots = read_roots(&root, now)?;
        let issuers: Vec<&str> = roots.iter().map(String::as_str).collect();
        let foreign = read_crls(crl.as_deref(), &issuers)?;
        return Ok(LoadedAuthority {
            authority: None,
            foreign,
            roots,
        });
    }
    let files = AuthorityFiles {
        chain: needed("cert-chain.pem")?,
        key: needed("key.pem")?,
        root,
        crl,
    };
    let (authority, foreign) = TenantAuthority::from_files(domain, &files, now)?;
    Ok(LoadedAuthority {
        roots: authority.roots().to_vec(),
        authority: Some(Arc::new(authority)),
        foreign,
    })
}

/// Returns the trust domains that folders are named after, sorted; those over the limit are left
/// out.
fn decide_domains(names: impl Iterator<Item = String>, limit: usize) -> Vec<TrustDomain> {
    let mut domains: Vec<TrustDomain> = names
        .filter_map(|name| TrustDomain::new(&name).ok())
        .collect();
    domains.sort();
    domains.truncate(limit);
    domains
}

/// All CA folders in their last good state.
pub(crate) struct AuthorityFolders {
    root: PathBuf,
    pub(crate) folders: BTreeMap<TrustDomain, AuthorityFolder>,
}

/// The change of a folder that a scan found.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum FolderChange {
    /// The folder has a new good state, which is in force now.
    Changed(TrustDomain),
    /// The folder changed and is not good; the text is the name of the error.
    Broken(TrustDomain, &'static str),
}

impl AuthorityFolders {
    pub(crate) fn new(root: PathBuf) -> Self {
        Self {
            root,
            folders: BTreeMap::new(),
        }
    }

    /// Returns the path of a trust domain's folder, whether or not it exists.
    pub(crate) fn of(&self, domain: &TrustDomain) -> PathBuf {
        self.root.join(domain.as_str())
    }

    /// Scans all folders, and reads those that changed.
    pub(crate) fn scan(
        &mut self,
        is_external: impl Fn(&TrustDomain) -> bool,
        now: u64,
    ) -> Vec<FolderChange> {
        let mut there = Vec::new();
        match std::fs::read_dir(&self.root) {
            Ok(entries) => {
                let names = entries
                    .filter_map(Result::ok)
                    .filter(|e| e.path().is_dir())
                    .filter_map(|e| e.file_name().into_string().ok());
                there = decide_domains(names, CA_DOMAINS_MAX);
            }
            Err(e) => {
                tracing::error!(path = %self.root.display(), error = %e, "trust: cannot read --ca-dir; the last good CA stays in use")
            }
        }
        // A folder that was removed must be noticed too.
        let all: std::collections::BTreeSet<TrustDomain> = there
            .into_iter()
            .chain(self.folders.keys().cloned())
            .collect();
        all.into_iter()
            .filter_map(|domain| self.look_at(domain, &is_external, now))
            .collect()
    }

    fn look_at(
        &mut self,
        domain: TrustDomain,
        is_external: impl Fn(&TrustDomain) -> bool,
        now: u64,
    ) -> Option<FolderChange> {
        let path = self.of(&domain);
        let stamp = stamp(&path);
        if self
            .folders
            .get(&domain)
            .is_some_and(|folder| folder.stamp == stamp)
        {
            return None;
        }
        let folder = self.folders.entry(domain.clone()).or_default();
        // A state that is not good is reported once, not by every scan.
        folder.stamp = stamp;
        match read(&path, &domain, is_external(&domain), now) {
            Ok(good) => {
                (folder.authority, folder.roots, folder.foreign, folder.fault) =
                    (good.authority, good.roots, good.foreign, None);
                tracing::info!(target: "audit", %domain, path = %path.display(), "trust: loaded the CA files");
                Some(FolderChange::Changed(domain))
            }
            Err(fault) => {
                let consequence = if folder.roots.is_empty() {
                    "no certificates are issued"
                } else {
                    "the last good CA stays in use"
                };
                tracing::error!(%domain, path = %path.display(), %fault, "trust: rejected the CA files; {consequence}");
                folder.fault = Some(fault.to_string());
                Some(FolderChange::Broken(domain, fault.name()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn folders_are_named_after_trust_domains_and_are_so_many_at_most() {
        let names = ["b.example", "..data", "A", "a.example", "c.example"].map(String::from);
        let got: Vec<String> = decide_domains(names.into_iter(), 2)
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(got, ["a.example", "b.example"]);
    }

    #[test]
    fn a_change_of_permissions_is_noticed() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let key = dir.path().join("key.pem");
        std::fs::write(&key, "x").unwrap();
        let first = stamp(dir.path());
        let until = Instant::now() + Duration::from_secs(60);
        // The kernel's clock for files is coarse.
        while stamp(dir.path()) == first {
            assert!(Instant::now() < until, "no change is noticed");
            std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o400)).unwrap();
        }
    }

    #[test]
    fn files_of_a_folder_are_classified() {
        let dir = tempfile::tempdir().unwrap();
        let mut folders = AuthorityFolders::new(dir.path().into());
        let folder = dir.path().join("a.example");
        std::fs::create_dir(&folder).unwrap();
        // One byte more than CA_FILE_BYTES_MAX.
        let large = " ".repeat(usize::try_from(CA_FILE_BYTES_MAX).unwrap() + 1);
        type AuthorityFileTexts<'a> = &'a [(&'a str, &'a str)];
        let cases: [(&str, AuthorityFileTexts<'_>, &str); 4] = [
            ("nothing", &[], "missing"),
            ("a root alone", &[("root-cert.pem", "x")], "missing"),
            (
                "no certificates",
                &[("cert-chain.pem", "x"), ("key.pem", "x")],
                "certificates",
            ),
            (
                "a file that is too large",
                &[("root-cert.pem", &large)],
                "read",
            ),
        ];
        for (what, files, want) in cases {
            // The files of earlier cases stay in the folder.
            for (name, text) in files {
                std::fs::write(folder.join(name), text).unwrap();
            }
            let domain: TrustDomain = "a.example".parse().unwrap();
            // No domain has an external CA, so each folder needs the key of its CA.
            // No file gets as far as the check of its validity, so any moment will do.
            assert_eq!(
                folders.scan(|_| false, 1_800_000_000),
                [FolderChange::Broken(domain.clone(), want)],
                "{what}"
            );
            // A second scan of unchanged files has no news.
            assert_eq!(
                folders.scan(|_| false, 1_800_000_000),
                [],
                "{what}: reported once"
            );
            assert!(
                folders.folders[&domain].fault.is_some()
                    && folders.folders[&domain].roots.is_empty(),
                "{what}"
            );
        }
    }
}
