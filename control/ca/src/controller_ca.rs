//! The controller's own CA in a directory: `root.pem` (0644) is given to every client, `root.key`
//! (0600) never leaves the host.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use canal_model::identity::components;
use rcgen::{
    ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, SanType,
};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use zeroize::{Zeroize, Zeroizing};

use crate::SERVER_LIFETIME_SECONDS;
use crate::csr::CsrError;
use crate::issuer::{SigningCa, dated};
use crate::tenant::TenantAuthority;

const ROOT_FILE: &str = "root.pem";
const KEY_FILE: &str = "root.key";

/// Seals and unseals the root's key on disk, like the keys in the store.
pub trait KeySealer {
    /// Returns the key in the form in which it is stored.
    ///
    /// # Errors
    /// Returns the reason that the key cannot be sealed.
    fn seal(&self, plain: &[u8]) -> Result<Vec<u8>, String>;
    /// Returns the plaintext of a sealed key.
    ///
    /// # Errors
    /// Returns the reason: the key was sealed under another key, or is damaged.
    fn unseal(&self, sealed: &[u8]) -> Result<Zeroizing<Vec<u8>>, String>;
}

/// The controller's own CA, able to sign.
pub struct ControllerCa {
    root: SigningCa,
}

/// A server certificate with its private key.
pub struct ServerCertificate {
    /// The certificate chain, which is only the leaf.
    pub chain: Vec<CertificateDer<'static>>,
    /// The private key of the leaf.
    pub key: PrivateKeyDer<'static>,
    /// End of the validity, in seconds since 1970.
    pub not_after: u64,
}

/// The reason that the controller has no certificate of its own.
#[derive(Debug, thiserror::Error)]
pub enum ControllerCaError {
    /// The directory or a file in it cannot be used.
    #[error("{path}: {why}; fix: give --infra-dir a folder that this user may write")]
    File { path: PathBuf, why: String },
    /// Only one of the two files exists, or they do not match.
    #[error(
        "{dir} contains no usable root: {why}; fix: restore root.key, or remove both root.key and root.pem and give the new root.pem to every client"
    )]
    Pair { dir: PathBuf, why: String },
    /// The root has expired.
    #[error(
        "the root in {dir} expired at {not_after} s since 1970; fix: remove root.key and root.pem and give the new root.pem to every client"
    )]
    Ended { dir: PathBuf, not_after: u64 },
    /// The crypto library failed.
    #[error("the controller's certificate could not be created: {0}")]
    Signing(String),
}

impl ControllerCa {
    /// Loads the CA in `dir`, or creates one if the directory contains no `root.pem`.
    ///
    /// # Errors
    /// Returns a [`ControllerCaError`]. A root without its key is never replaced silently, because
    /// clients trust the old root.
    pub fn open(dir: &Path, now: u64) -> Result<Self, ControllerCaError> {
        Self::open_sealed(dir, now, None)
    }

    /// Loads or creates the CA like [`ControllerCa::open`]. With a `sealer`, the key is sealed on
    /// disk, even if it was unsealed before.
    ///
    /// # Errors
    /// Returns the errors of [`ControllerCa::open`], or [`ControllerCaError::Pair`] if a sealed key
    /// cannot be opened.
    pub fn open_sealed(
        dir: &Path,
        now: u64,
        sealer: Option<&dyn KeySealer>,
    ) -> Result<Self, ControllerCaError> {
        let (root_path, key_path) = (dir.join(ROOT_FILE), dir.join(KEY_FILE));
        let file = |path: &Path| {
            let path = path.to_path_buf();
            move |e: io::Error| ControllerCaError::File {
                path,
                why: e.to_string(),
            }
        };
        // Every client may read root.pem; root.key has a mode of its own.
        DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(dir)
            .map_err(file(dir))?;
        let pem = read_if_there(&root_path).map_err(file(&root_path))?;
        let key = read_if_there(&key_path)
            .map_err(file(&key_path))?
            .map(Zeroizing::new);
        let pair = |why: String| ControllerCaError::Pair {
            dir: dir.into(),
            why,
        };
        let root = match (pem, key) {
            (Some(pem), Some(key)) => {
                // A sealed key is binary, so only a key in plaintext begins like PEM.
                let is_plain = key.starts_with(b"-----BEGIN");
                let plain = match sealer {
                    _ if is_plain => key,
                    Some(sealer) => sealer
                        .unseal(&key)
                        .map_err(|e| pair(format!("root.key: {e}")))?,
                    None => return Err(pair(
                        "root.key is sealed or damaged; fix: give the controller its --store-key-file"
                            .into(),
                    )),
                };
                let mut der = PrivatePkcs8KeyDer::from_pem_slice(&plain)
                    .map_err(|e| pair(format!("root.key: {e}")))?;
                let root = SigningCa::load(der.secret_pkcs8_der(), &String::from_utf8_lossy(&pem))
                    .map_err(pair);
                // The type of the decoded key does not wipe its memory on drop.
                der.zeroize();
                let root = root?;
                // A sealing key that is given later also protects a key that is on disk already.
                if is_plain && sealer.is_some() {
                    write_key(dir, &key_path, &plain, sealer)?;
                }
                root
            }
            // A new root would cut off every client that trusts the old one.
            (Some(_), None) => return Err(pair("root.pem exists, but root.key does not".into())),
            // No client has seen a key without a certificate: an earlier start ended between the
            // two writes, so both are replaced.
            (None, _) => {
                let root = SigningCa::generate("Canal controller", now)
                    .map_err(ControllerCaError::Signing)?;
                write_key(
                    dir,
                    &key_path,
                    Zeroizing::new(root.issuer.key().serialize_pem()).as_bytes(),
                    sealer,
                )?;
                write_whole(dir, &root_path, root.pem.as_bytes(), 0o644)
                    .map_err(file(&root_path))?;
                root
            }
        };
        if now >= root.not_after {
            return Err(ControllerCaError::Ended {
                dir: dir.into(),
                not_after: root.not_after,
            });
        }
        Ok(Self { root })
    }

    /// Returns the root certificate as PEM.
    pub fn certificate(&self) -> &str {
        &self.root.pem
    }

    /// Returns the same root as the CA of Canal's components, which present its certificates on the
    /// channel to key servers.
    ///
    /// # Errors
    /// Returns [`CsrError::Signing`] if the root cannot be loaded.
    pub fn of_components(&self) -> Result<TenantAuthority, CsrError> {
        TenantAuthority::load(&components().1, &self.root.key_der(), &self.root.pem)
    }

    /// Issues a new server certificate for the DNS name `name`.
    ///
    /// # Errors
    /// Returns [`ControllerCaError::Signing`] if the certificate cannot be created.
    pub fn server_certificate(
        &self,
        name: &str,
        now: u64,
    ) -> Result<ServerCertificate, ControllerCaError> {
        let not_after = now
            .saturating_add(SERVER_LIFETIME_SECONDS)
            .min(self.root.not_after);
        let mut p = dated(now, not_after).map_err(ControllerCaError::Signing)?;
        let dns = name
            .to_string()
            .try_into()
            .map_err(|e: rcgen::Error| ControllerCaError::Signing(e.to_string()))?;
        p.subject_alt_names = vec![SanType::DnsName(dns)];
        p.is_ca = IsCa::ExplicitNoCa;
        p.use_authority_key_identifier_extension = true;
        p.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        p.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)
            .map_err(|e| ControllerCaError::Signing(e.to_string()))?;
        let leaf = p
            .signed_by(&key, &self.root.issuer)
            .map_err(|e| ControllerCaError::Signing(e.to_string()))?;
        Ok(ServerCertificate {
            chain: vec![leaf.der().clone()],
            key: PrivatePkcs8KeyDer::from(key.serialize_der()).into(),
            not_after,
        })
    }
}

/// Writes the root's key, sealed if there is a sealer.
fn write_key(
    dir: &Path,
    path: &Path,
    pem: &[u8],
    sealer: Option<&dyn KeySealer>,
) -> Result<(), ControllerCaError> {
    let sealed = sealer
        .map(|sealer| sealer.seal(pem))
        .transpose()
        .map_err(|why| ControllerCaError::File {
            path: path.into(),
            why,
        })?;
    let bytes = sealed.as_deref().unwrap_or(pem);
    write_whole(dir, path, bytes, 0o600).map_err(|e| ControllerCaError::File {
        path: path.into(),
        why: e.to_string(),
    })
}

fn read_if_there(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// Writes a file atomically, also across a power loss: writes a temporary file, flushes it, renames
/// it, flushes the directory.
fn write_whole(dir: &Path, path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let beside = path.with_extension("new");
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(mode)
        .open(&beside)?;
    file.set_permissions(fs::Permissions::from_mode(mode))?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&beside, path)?;
    File::open(dir)?.sync_all()
}
