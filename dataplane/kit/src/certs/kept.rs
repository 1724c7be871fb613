//! Certificates with their keys on disk, one file per identity, for the owner only. What has expired is ignored and removed.

use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use canal_model::identity::Identity;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::issue::Issued;
use crate::durable;
use crate::tls::Certificate;

/// A file's content.
#[derive(Serialize, Deserialize)]
struct Kept {
    identity: String,
    key: String,
    chain: String,
    bundle: String,
}

fn path(folder: &Path, identity: &Identity) -> PathBuf {
    // Hashed: an identity holds '/' and may be longer than a file name.
    let name: String = Sha256::digest(identity.to_string()).iter().map(|b| format!("{b:02x}")).collect();
    folder.join(format!("{name}.json"))
}

pub(super) fn write(folder: &Path, identity: &Identity, issued: &Issued) -> io::Result<()> {
    let Issued { key, chain, bundle, .. } = issued;
    let kept = Kept { identity: identity.to_string(), key: key.clone(), chain: chain.clone(), bundle: bundle.clone() };
    durable::replace(&path(folder, identity), &serde_json::to_vec(&kept)?)
}

fn load(path: &Path) -> Result<(String, Certificate), String> {
    let text = std::fs::read(path).map_err(|e| e.to_string())?;
    let kept: Kept = serde_json::from_slice(&text).map_err(|e| e.to_string())?;
    let certificate = Certificate::from_pem(&kept.key, &kept.chain, &kept.bundle).map_err(|e| e.to_string())?;
    Ok((kept.identity, certificate))
}

/// The kept certificate of `identity`, if it is valid at `now`.
pub(super) fn read(folder: &Path, identity: &Identity, now: SystemTime) -> Option<Certificate> {
    let path = path(folder, identity);
    if !path.exists() {
        return None;
    }
    match load(&path) {
        Ok((name, c)) if name == identity.to_string() && c.identity() == identity => c.valid_at(now).then_some(c),
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
