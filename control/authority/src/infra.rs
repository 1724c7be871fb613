//! The controller's own authority, kept in a folder: `root.pem` (0644) is given to every client, `root.key` (0600) never leaves.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use canal_model::identity::components;
use rcgen::{ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, SanType};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use zeroize::{Zeroize, Zeroizing};

use crate::SERVER_LIFETIME_SECONDS;
use crate::issuer::{Root, dated};
use crate::request::Refusal;
use crate::tenant::TenantAuthority;

const ROOT_FILE: &str = "root.pem";
const KEY_FILE: &str = "root.key";

/// What seals the root's key on disk, as the store's keys are sealed.
pub trait KeySealer {
    /// The key as it is to lie on disk.
    ///
    /// # Errors
    /// Why it could not be sealed.
    fn seal(&self, plain: &[u8]) -> Result<Vec<u8>, String>;
    /// The key as it was before.
    ///
    /// # Errors
    /// It was sealed under another key, or is damaged.
    fn unseal(&self, sealed: &[u8]) -> Result<Zeroizing<Vec<u8>>, String>;
}

/// The controller's authority.
pub struct Infra {
    root: Root,
}

/// A server certificate and its key.
pub struct ServerCertificate {
    /// The leaf.
    pub chain: Vec<CertificateDer<'static>>,
    /// Its key.
    pub key: PrivateKeyDer<'static>,
    /// Seconds since 1970.
    pub not_after: u64,
}

/// Why the controller has no certificate of its own.
#[derive(Debug, thiserror::Error)]
pub enum InfraError {
    /// The folder or a file in it cannot be used.
    #[error("{path}: {why}; give --infra-dir a folder that this user may write")]
    File { path: PathBuf, why: String },
    /// Only one half of the pair is there, or the two do not belong together.
    #[error(
        "{dir} does not hold a usable root: {why}; restore root.key, or remove both root.key and root.pem and give the new root.pem to every client"
    )]
    Pair { dir: PathBuf, why: String },
    /// The root has ended.
    #[error("the root in {dir} ended at {not_after} s since 1970; remove root.key and root.pem and give the new root.pem to every client")]
    Ended { dir: PathBuf, not_after: u64 },
    /// The crypto library refused.
    #[error("the controller's certificate could not be made: {0}")]
    Signing(String),
}

impl Infra {
    /// Reads the authority in `dir`, or makes one if the folder holds none.
    ///
    /// # Errors
    /// An [`InfraError`]; a root of which only one half is left is never replaced silently, since clients trust the old one.
    pub fn open(dir: &Path, now: u64) -> Result<Self, InfraError> {
        Self::open_sealed(dir, now, None)
    }

    /// As [`Infra::open`]; with a `sealer` the key is sealed on disk, one that lies there unsealed too.
    ///
    /// # Errors
    /// As [`Infra::open`], and when a sealed key cannot be opened.
    pub fn open_sealed(dir: &Path, now: u64, sealer: Option<&dyn KeySealer>) -> Result<Self, InfraError> {
        let (root_path, key_path) = (dir.join(ROOT_FILE), dir.join(KEY_FILE));
        let file = |path: &Path| {
            let path = path.to_path_buf();
            move |e: io::Error| InfraError::File { path, why: e.to_string() }
        };
        DirBuilder::new().recursive(true).mode(0o755).create(dir).map_err(file(dir))?;
        let pem = read_if_there(&root_path).map_err(file(&root_path))?;
        let key = read_if_there(&key_path).map_err(file(&key_path))?.map(Zeroizing::new);
        let pair = |why: String| InfraError::Pair { dir: dir.into(), why };
        let root = match (pem, key) {
            (Some(pem), Some(key)) => {
                let is_plain = key.starts_with(b"-----BEGIN");
                let plain = match sealer {
                    _ if is_plain => key,
                    Some(sealer) => sealer.unseal(&key).map_err(|e| pair(format!("root.key: {e}")))?,
                    None => return Err(pair("root.key is sealed or damaged; give the controller its --store-key-file".into())),
                };
                let mut der = PrivatePkcs8KeyDer::from_pem_slice(&plain).map_err(|e| pair(format!("root.key: {e}")))?;
                let root = Root::load(der.secret_pkcs8_der(), &String::from_utf8_lossy(&pem)).map_err(pair);
                // What was decoded is not wiped by its type.
                der.zeroize();
                let root = root?;
                if is_plain && sealer.is_some() {
                    write_key(dir, &key_path, &plain, sealer)?;
                }
                root
            }
            (Some(_), None) => return Err(pair("root.pem is there and root.key is not".into())),
            // A key without a certificate was never shown to anyone: an earlier start ended between the two writes.
            (None, _) => {
                let root = Root::generate("Canal controller", now).map_err(InfraError::Signing)?;
                write_key(dir, &key_path, Zeroizing::new(root.issuer.key().serialize_pem()).as_bytes(), sealer)?;
                write_whole(dir, &root_path, root.pem.as_bytes(), 0o644).map_err(file(&root_path))?;
                root
            }
        };
        if now >= root.not_after {
            return Err(InfraError::Ended { dir: dir.into(), not_after: root.not_after });
        }
        Ok(Self { root })
    }

    /// The root certificate, PEM.
    pub fn certificate(&self) -> &str {
        &self.root.pem
    }

    /// The same root as the authority of Canal's own parts, which show its certificates on the channel to key servers.
    ///
    /// # Errors
    /// [`Refusal::Signing`].
    pub fn of_components(&self) -> Result<TenantAuthority, Refusal> {
        TenantAuthority::load(&components().1, &self.root.key_der(), &self.root.pem)
    }

    /// A fresh server certificate for the DNS name `name`.
    ///
    /// # Errors
    /// [`InfraError::Signing`].
    pub fn server_certificate(&self, name: &str, now: u64) -> Result<ServerCertificate, InfraError> {
        let not_after = now.saturating_add(SERVER_LIFETIME_SECONDS).min(self.root.not_after);
        let mut p = dated(now, not_after).map_err(InfraError::Signing)?;
        let dns = name.to_string().try_into().map_err(|e: rcgen::Error| InfraError::Signing(e.to_string()))?;
        p.subject_alt_names = vec![SanType::DnsName(dns)];
        p.is_ca = IsCa::ExplicitNoCa;
        p.use_authority_key_identifier_extension = true;
        p.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        p.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(|e| InfraError::Signing(e.to_string()))?;
        let leaf = p.signed_by(&key, &self.root.issuer).map_err(|e| InfraError::Signing(e.to_string()))?;
        Ok(ServerCertificate { chain: vec![leaf.der().clone()], key: PrivatePkcs8KeyDer::from(key.serialize_der()).into(), not_after })
    }
}

/// Writes the root's key, sealed if there is something to seal with.
fn write_key(dir: &Path, path: &Path, pem: &[u8], sealer: Option<&dyn KeySealer>) -> Result<(), InfraError> {
    let sealed = sealer.map(|sealer| sealer.seal(pem)).transpose().map_err(|why| InfraError::File { path: path.into(), why })?;
    let bytes = sealed.as_deref().unwrap_or(pem);
    write_whole(dir, path, bytes, 0o600).map_err(|e| InfraError::File { path: path.into(), why: e.to_string() })
}

fn read_if_there(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// Whole or not at all, also across a power loss: write beside, flush, rename, flush the folder.
fn write_whole(dir: &Path, path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let beside = path.with_extension("new");
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(&beside)?;
    file.set_permissions(fs::Permissions::from_mode(mode))?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&beside, path)?;
    File::open(dir)?.sync_all()
}
