//! Certificates with their keys on disk, one file per identity, for the owner only. What has expired is ignored and removed.

use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use canal_model::ids::TrustDomain;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use zeroize::{Zeroize, Zeroizing};

use super::What;
use super::issue::Issued;
use crate::durable;
use crate::tls::Certificate;

/// A file's content. The key is wiped when it is dropped.
#[derive(Serialize, Deserialize)]
struct Kept {
    identity: String,
    key: String,
    chain: String,
    bundle: String,
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.key.zeroize();
    }
}

impl Kept {
    fn read(path: &Path) -> Result<Self, String> {
        let text = std::fs::read(path).map(Zeroizing::new).map_err(|e| e.to_string())?;
        serde_json::from_slice(&text).map_err(|e| e.to_string())
    }

    /// The text of the file, in one piece of memory: a buffer that grew would leave the key behind.
    fn to_json(&self) -> io::Result<Zeroizing<Vec<u8>>> {
        let Self { identity, key, chain, bundle } = self;
        // Twice, because every line's end becomes two characters; and the names of the fields.
        let room = 2 * (identity.len() + key.len() + chain.len() + bundle.len()) + 128;
        let mut text = Zeroizing::new(Vec::with_capacity(room));
        serde_json::to_writer(&mut *text, self)?;
        Ok(text)
    }
}

fn path(folder: &Path, what: &What) -> PathBuf {
    // Hashed: an identity holds '/' and may be longer than a file name.
    let name: String = Sha256::digest(what.to_string()).iter().map(|b| format!("{b:02x}")).collect();
    folder.join(format!("{name}.json"))
}

pub(super) fn write(folder: &Path, what: &What, issued: &Issued) -> io::Result<()> {
    let Issued { key, chain, bundle, .. } = issued;
    let kept = Kept { identity: what.to_string(), key: String::clone(key), chain: chain.clone(), bundle: bundle.clone() };
    durable::replace(&path(folder, what), &kept.to_json()?)
}

fn load(path: &Path) -> Result<(String, Certificate), String> {
    let mut kept = Kept::read(path)?;
    let certificate = Certificate::from_pem(&kept.key, &kept.chain, &kept.bundle).map_err(|e| e.to_string())?;
    Ok((std::mem::take(&mut kept.identity), certificate))
}

/// Removes what is kept, if anything is.
pub(super) fn remove(folder: &Path, what: &What) -> io::Result<()> {
    match std::fs::remove_file(path(folder, what)) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// Removes all that is kept of members of `domain`, best effort: what cannot be read cannot be used either.
pub(super) fn remove_domain(folder: &Path, domain: &TrustDomain) {
    let Ok(files) = std::fs::read_dir(folder) else { return };
    let member = format!("spiffe://{domain}/");
    for path in files.flatten().map(|f| f.path()).filter(|p| p.extension().is_some_and(|e| e == "json")) {
        if Kept::read(&path).is_ok_and(|kept| kept.identity.starts_with(&member))
            && let Err(error) = std::fs::remove_file(&path)
        {
            tracing::error!(file = %path.display(), %error, "a key that is in key servers now is still on disk");
        }
    }
}

/// The kept certificate, if it is valid at `now`.
pub(super) fn read(folder: &Path, what: &What, now: SystemTime) -> Option<Certificate> {
    let path = path(folder, what);
    if !path.exists() {
        return None;
    }
    match load(&path) {
        Ok((name, c)) if name == what.to_string() && *c.identity() == what.identity => c.valid_at(now).then_some(c),
        Ok((name, _)) => {
            tracing::warn!(file = %path.display(), name, "the kept certificate is another's; asking for a new one");
            None
        }
        Err(error) => {
            tracing::warn!(file = %path.display(), error, "the kept certificate cannot be used; asking for a new one");
            None
        }
    }
}

/// Removes what is of no use any more. Best effort: a file that stays does no harm.
pub(super) fn remove_expired(folder: &Path, now: SystemTime) {
    let Ok(files) = std::fs::read_dir(folder) else { return };
    for path in files.flatten().map(|f| f.path()).filter(|p| p.extension().is_some_and(|e| e == "json" || e == "new")) {
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
    fn kept_file_is_written_without_growing_its_buffer() {
        let pem = "-----BEGIN X-----\nAAAA\n-----END X-----\n".repeat(50);
        let text = || pem.clone();
        let kept = Kept { identity: "spiffe://a.example/ns/b/sa/c".into(), key: text(), chain: text(), bundle: text() };
        let room = 2 * (kept.identity.len() + 3 * pem.len()) + 128;
        let json = kept.to_json().unwrap();
        assert!(json.len() <= room && json.capacity() == room, "{} of {room}, {}", json.len(), json.capacity());
        let back: Kept = serde_json::from_slice(&json).unwrap();
        assert_eq!((&back.identity, &back.key), (&kept.identity, &kept.key));
    }
}
