//! Certificates with their keys on disk, one file per identity, readable by the owner only. Expired
//! ones are ignored and removed.

use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use canal_model::ids::TrustDomain;
use canal_runtime::atomic_file;
use canal_tls::Certificate;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use zeroize::{Zeroize, Zeroizing};

use super::CertificateKey;
use super::certificate_client::PersistedCertificate;

/// Content of a file. The key is erased when it is dropped.
#[derive(Serialize, Deserialize)]
struct CertificateFile {
    identity: String,
    key: String,
    chain: String,
    bundle: String,
}

impl Drop for CertificateFile {
    fn drop(&mut self) {
        self.key.zeroize();
    }
}

impl CertificateFile {
    fn read(path: &Path) -> Result<Self, String> {
        let text = std::fs::read(path)
            .map(Zeroizing::new)
            .map_err(|e| e.to_string())?;
        serde_json::from_slice(&text).map_err(|e| e.to_string())
    }

    /// Serializes the file into one buffer of the final size, because a buffer that grows would
    /// leave copies of the key in memory.
    fn to_json(&self) -> io::Result<Zeroizing<Vec<u8>>> {
        let Self {
            identity,
            key,
            chain,
            bundle,
        } = self;
        // The factor 2 is for line ends, which become two characters; the constant is for the field
        // names.
        let capacity = 2 * (identity.len() + key.len() + chain.len() + bundle.len()) + 128;
        let mut text = Zeroizing::new(Vec::with_capacity(capacity));
        serde_json::to_writer(&mut *text, self)?;
        Ok(text)
    }
}

fn path(folder: &Path, what: &CertificateKey) -> PathBuf {
    // The name is hashed, because an identity contains '/' and may be longer than a file name.
    let name: String = Sha256::digest(what.to_string())
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect();
    folder.join(format!("{name}.json"))
}

pub(super) fn write(
    folder: &Path,
    what: &CertificateKey,
    issued: &PersistedCertificate,
) -> io::Result<()> {
    let PersistedCertificate {
        key, chain, bundle, ..
    } = issued;
    let file = CertificateFile {
        identity: what.to_string(),
        key: String::clone(key),
        chain: chain.clone(),
        bundle: bundle.clone(),
    };
    atomic_file::replace(&path(folder, what), &file.to_json()?)
}

fn load(path: &Path) -> Result<(String, Certificate), String> {
    let mut file = CertificateFile::read(path)?;
    let certificate =
        Certificate::from_pem(&file.key, &file.chain, &file.bundle).map_err(|e| e.to_string())?;
    Ok((std::mem::take(&mut file.identity), certificate))
}

/// Removes the file, if it exists.
pub(super) fn remove(folder: &Path, what: &CertificateKey) -> io::Result<()> {
    match std::fs::remove_file(path(folder, what)) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// Removes all files of identities of `domain`, best effort: a file that cannot be read cannot be
/// used either.
pub(super) fn remove_domain(folder: &Path, domain: &TrustDomain) {
    let Ok(files) = std::fs::read_dir(folder) else {
        return;
    };
    let member = format!("spiffe://{domain}/");
    for path in files
        .flatten()
        .map(|f| f.path())
        .filter(|p| p.extension().is_some_and(|e| e == "json"))
    {
        if CertificateFile::read(&path).is_ok_and(|file| file.identity.starts_with(&member))
            && let Err(error) = std::fs::remove_file(&path)
        {
            tracing::error!(file = %path.display(), %error, "identity: could not remove a key that moved to key servers; it is still on disk");
        }
    }
}

/// Returns the stored certificate, if it is valid at `now`.
pub(super) fn read(folder: &Path, what: &CertificateKey, now: SystemTime) -> Option<Certificate> {
    let path = path(folder, what);
    if !path.exists() {
        return None;
    }
    match load(&path) {
        Ok((name, c)) if name == what.to_string() && *c.identity() == what.identity => {
            c.valid_at(now).then_some(c)
        }
        Ok((name, _)) => {
            tracing::warn!(file = %path.display(), name, "identity: the stored certificate has another identity; requesting a new one");
            None
        }
        Err(error) => {
            tracing::warn!(file = %path.display(), error, "identity: the stored certificate cannot be used; requesting a new one");
            None
        }
    }
}

/// Removes unused files, best effort: a file that stays does no harm.
pub(super) fn remove_expired(folder: &Path, now: SystemTime) {
    let Ok(files) = std::fs::read_dir(folder) else {
        return;
    };
    for path in files
        .flatten()
        .map(|f| f.path())
        .filter(|p| p.extension().is_some_and(|e| e == "json" || e == "new"))
    {
        // A `.new` file is what a kill left of an unfinished replacement.
        let useless = load(&path).map_or(true, |(_, c)| c.not_after() <= now);
        if useless || path.extension().is_some_and(|e| e == "new") {
            let _ = std::fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn persisted_file_is_written_without_growing_its_buffer() {
        let pem = "-----BEGIN X-----\nAAAA\n-----END X-----\n".repeat(50);
        let text = || pem.clone();
        let file = CertificateFile {
            identity: "spiffe://a.example/ns/b/sa/c".into(),
            key: text(),
            chain: text(),
            bundle: text(),
        };
        let capacity = 2 * (file.identity.len() + 3 * pem.len()) + 128;
        let json = file.to_json().unwrap();
        assert!(
            json.len() <= capacity && json.capacity() == capacity,
            "{} of {capacity}, {}",
            json.len(),
            json.capacity()
        );
        let back: CertificateFile = serde_json::from_slice(&json).unwrap();
        assert_eq!((&back.identity, &back.key), (&file.identity, &file.key));
    }
}
