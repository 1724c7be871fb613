//! [`TenantKeyFiles`], for keyless operation: a tenant's own keys, and the requesters that may use
//! them.
//!
//! The keys are in `NAMESPACE.NAME.crt` and `NAMESPACE.NAME.key` of one directory, the requesters
//! in `allow.yaml` there. A key belongs to one service; a service of the same name in another
//! namespace cannot use it. A key is replaced when its files change. The allow list is read from
//! its file at every operation.

use std::collections::{BTreeMap, HashMap};
use std::fs::Metadata;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use canal_model::ids::{Namespace, ObjectName, ServiceKey, TenantName};
use canal_model::trust::KeyRequester;
use canal_runtime::metrics::{MetricFamily, Registry, SharedCounter};
use canal_wire::keyrpc::{KeyName, KeyRefusal, SpkiHash};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use zeroize::Zeroizing;

use crate::certified_key::CertifiedPrivateKey;
use crate::entitlements::ChannelPeer;
use crate::key::PrivateKey;
use crate::key_slot::KeySlot;
use crate::limits::{FILE_BYTES_MAX, FILES_MAX};
use crate::vault::Vault;

/// File name of the allow list.
pub const ALLOW: &str = "allow.yaml";
/// Interval at which the directory is scanned for new keys and certificates. A new certificate is
/// in use within a second of its file; a scan reads only the state of unchanged files.
pub const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Properties by which a changed file is recognized.
type KeyFileFingerprint = (u64, u64, i64, i64, i64, i64);

/// Fingerprints of a certificate's file and of its key's.
type KeyPairFingerprint = (KeyFileFingerprint, KeyFileFingerprint);

fn stamp(m: &Metadata) -> KeyFileFingerprint {
    (
        m.ino(),
        m.size(),
        m.mtime(),
        m.mtime_nsec(),
        m.ctime(),
        m.ctime_nsec(),
    )
}

/// Content of the allow list's file.
#[derive(Debug, Default, Clone, PartialEq, Eq, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct AllowListFile {
    /// Requesters by service (`namespace/name`): `gateway/NAME`, or `gateway/*` for all gateways
    /// that serve the tenant.
    #[serde(default)]
    allow: BTreeMap<String, Vec<String>>,
}

/// The allow list by service, for lookups.
type AllowList = BTreeMap<ServiceKey, Vec<String>>;

impl AllowListFile {
    fn read(self, tenant: &TenantName) -> Result<AllowList, String> {
        let wrong = |key: &str| {
            format!("{key:?} is not a service; fix: write namespace/name, as in default/shop")
        };
        let row = |(key, requesters): (String, Vec<String>)| {
            let service = format!("{tenant}/{key}").parse().map_err(|_| wrong(&key))?;
            Ok((service, requesters))
        };
        self.allow.into_iter().map(row).collect()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AllowResult {
    Allowed,
    Refused,
}

fn decide(list: &AllowList, key: &ServiceKey, requester: &KeyRequester) -> AllowResult {
    let named = requester.to_string();
    let any = "gateway/*";
    let is = |r: &String| *r == named || r == any && matches!(requester, KeyRequester::Gateway(_));
    if list.get(key).is_some_and(|l| l.iter().any(is)) {
        AllowResult::Allowed
    } else {
        AllowResult::Refused
    }
}

/// Returns the name of a service's key files without extension. No namespace contains a dot, so no
/// two services have the same name.
fn stem(service: &ServiceKey) -> String {
    format!("{}.{}", service.namespace, service.name)
}

/// Returns the names of the files that [`TenantKeyFiles::find`] needs.
pub(crate) fn expected_files(service: &ServiceKey) -> String {
    format!("{0}.crt and {0}.key", stem(service))
}

struct Allow {
    stamp: Option<KeyFileFingerprint>,
    list: AllowList,
    /// Reason why no requester may use a key.
    error: String,
}

struct LoadedKeyFile {
    stamps: KeyPairFingerprint,
    key: Option<KeySlot>,
    error: String,
}

/// Keys and allow list in a tenant's directory.
pub struct TenantKeyFiles {
    folder: PathBuf,
    tenant: TenantName,
    vault: Arc<Vault>,
    allow: Mutex<Allow>,
    keys: RwLock<HashMap<ServiceKey, LoadedKeyFile>>,
    /// Certificate files whose names are of no service, as of the last scan.
    misnamed: Mutex<Vec<String>>,
    /// Number of keys above [`FILES_MAX`], as of the last scan.
    over: AtomicUsize,
    broken: SharedCounter,
}

impl std::fmt::Debug for TenantKeyFiles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Files({})", self.folder.display())
    }
}

/// Status of one key for `/config_dump`.
#[derive(Debug, Clone, serde::Serialize)]
pub struct FileStatus {
    pub name: String,
    pub algorithm: Option<&'static str>,
    /// Error of the last read; the key from before stays in use.
    pub error: String,
}

/// Reads a file of at most [`FILE_BYTES_MAX`] bytes.
fn read(path: &Path) -> Result<Zeroizing<Vec<u8>>, String> {
    let describe = |e: std::io::Error| {
        format!(
            "{}: {e}; fix: make it a file that the key server may read",
            path.display()
        )
    };
    let file = std::fs::File::open(path).map_err(describe)?;
    let length = file.metadata().map_err(describe)?.len();
    if length > FILE_BYTES_MAX {
        return Err(format!(
            "{}: {length} bytes; at most {FILE_BYTES_MAX} are read; fix: remove what does not belong into it",
            path.display()
        ));
    }
    // With capacity for all bytes, so that the buffer is never moved while it contains a key.
    let mut bytes = Zeroizing::new(Vec::with_capacity(usize::try_from(length).unwrap_or(0) + 1));
    file.take(length)
        .read_to_end(&mut bytes)
        .map_err(describe)?;
    Ok(bytes)
}

/// What a scan of a tenant's directory found.
#[derive(Default)]
struct KeyFolderScan {
    /// Services whose certificate and key both exist.
    key_pairs: HashMap<ServiceKey, KeyPairFingerprint>,
    /// Certificate files whose names are of no service.
    misnamed: Vec<String>,
    /// Number of keys above [`FILES_MAX`].
    over: usize,
}

/// Scans a tenant's directory. Keys that are `known` come before new ones, because the order of the
/// directory must not let a new key displace one that is in use.
fn scan(
    folder: &Path,
    tenant: &TenantName,
    known: &HashMap<ServiceKey, KeyPairFingerprint>,
) -> std::io::Result<KeyFolderScan> {
    let mut scan = KeyFolderScan::default();
    let mut new = Vec::new();
    let entries = match std::fs::read_dir(folder) {
        // The owner has removed the directory, and with it all keys.
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(scan),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let path = entry.path();
        // A pair is found by its certificate; the other files are keys and the allow list.
        if path.extension().is_none_or(|e| e != "crt") {
            continue;
        }
        let stem = path.file_stem().and_then(|stem| stem.to_str());
        let Some(service) = stem.and_then(|stem| service_of(tenant, stem)) else {
            let file = entry.file_name();
            scan.misnamed.push(file.to_string_lossy().into_owned());
            continue;
        };
        let files = (metadata_of(&path), metadata_of(&path.with_extension("key")));
        let stamps = match (files, known.get(&service)) {
            ((Ok(Some(certificate)), Ok(Some(key))), _) => (stamp(&certificate), stamp(&key)),
            // An error does not say that the owner removed the key.
            ((Err(_), _) | (_, Err(_)), Some(stamps)) => *stamps,
            // One of the two files is still being written; the next scan sees both. A known pair
            // whose owner removed one of its files is dropped.
            _ => continue,
        };
        if known.contains_key(&service) {
            scan.key_pairs.insert(service, stamps);
        } else if new.len() < FILES_MAX {
            new.push((service, stamps));
        } else {
            // The others could not be used anyway, so only their number is kept: the owner may have
            // any number of files.
            scan.over += 1;
        }
    }
    // At most FILES_MAX keys are known, because no scan finds more.
    let room = FILES_MAX - scan.key_pairs.len();
    scan.over += new.len().saturating_sub(room);
    scan.key_pairs.extend(new.into_iter().take(room));
    Ok(scan)
}

/// Returns the metadata of a file; `None` if there is no such file.
fn metadata_of(path: &Path) -> std::io::Result<Option<Metadata>> {
    match std::fs::metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        metadata => metadata.map(Some),
    }
}

/// Returns the service whose key has this file name; `None`: the name is of no service.
fn service_of(tenant: &TenantName, stem: &str) -> Option<ServiceKey> {
    let (namespace, name) = stem.split_once('.')?;
    let (namespace, name) = (Namespace::new(namespace).ok()?, ObjectName::new(name).ok()?);
    Some(ServiceKey {
        tenant: tenant.clone(),
        namespace,
        name,
    })
}

impl TenantKeyFiles {
    /// Scans the directory, which must exist. Broken files in it are logged and not used.
    ///
    /// Registers the metric `canal_key_file_errors_total`.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn open(
        folder: PathBuf,
        tenant: TenantName,
        vault: Arc<Vault>,
        registry: &Registry,
    ) -> std::io::Result<Self> {
        std::fs::read_dir(&folder)?;
        let broken = MetricFamily::new(
            "canal_key_file_errors_total",
            "Keys, certificates and allow lists that could not be read.",
            &[],
        );
        let files = Self {
            folder,
            tenant,
            vault,
            allow: Mutex::new(Allow {
                stamp: None,
                list: AllowList::new(),
                error: "not read yet".into(),
            }),
            keys: RwLock::default(),
            misnamed: Mutex::default(),
            over: AtomicUsize::new(0),
            broken: registry.counters(broken).shared(&[]),
        };
        files.poll();
        Ok(files)
    }

    /// Returns the tenant that owns the directory.
    pub fn tenant(&self) -> &TenantName {
        &self.tenant
    }

    /// Reads the files that have changed: new and replaced keys come into use, and keys whose files
    /// are gone are dropped. If the directory cannot be scanned, all keys stay as they are.
    pub fn poll(&self) {
        let keys = self.keys.read().unwrap_or_else(PoisonError::into_inner);
        let known = keys.iter().map(|(name, key)| (name.clone(), key.stamps));
        let known: HashMap<_, _> = known.collect();
        // A slow disk must not delay operations with the keys.
        drop(keys);
        match scan(&self.folder, &self.tenant, &known) {
            Ok(scan) => self.adopt(scan),
            // A lack of descriptors or a disk's error does not say that the owner removed a key.
            Err(error) => {
                self.broken.inc();
                tracing::error!(
                    folder = %self.folder.display(),
                    %error,
                    "key server: cannot scan the key folder; the keys stay as they are until the next scan"
                );
            }
        }
        // This reports a broken allow list now, and not only when a requester asks for a key.
        drop(self.fresh());
    }

    /// Brings the keys to what a scan found.
    fn adopt(&self, scan: KeyFolderScan) {
        let KeyFolderScan {
            key_pairs,
            misnamed,
            over,
        } = scan;
        // Reported only when the number grows.
        if self.over.swap(over, Relaxed) < over {
            self.broken.inc();
            tracing::error!(
                over,
                limit = FILES_MAX,
                "key server: the key folder has more keys than the limit, so the others are not read; fix: remove keys that are no longer used"
            );
        }
        self.report_misnamed(misnamed);
        // A thread that panicked with the lock must not stop all others.
        let mut known = self.keys.write().unwrap_or_else(PoisonError::into_inner);
        // The owner has removed the files of the others.
        known.retain(|name, _| key_pairs.contains_key(name));
        let now = Instant::now();
        known
            .values_mut()
            .filter_map(|k| k.key.as_mut())
            .for_each(|slot| slot.tidy(now));
        for (name, stamps) in key_pairs {
            // An unchanged pair is not read again.
            if known.get(&name).is_some_and(|k| k.stamps == stamps) {
                continue;
            }
            let before = known.remove(&name).and_then(|k| k.key);
            let (slot, error) = match self.load(&name) {
                Ok(certified) => {
                    tracing::info!(key = %name, until = ?certified.not_after, "key server: loaded a key file");
                    (
                        Some(KeySlot::after(before, Arc::new(certified), now)),
                        String::new(),
                    )
                }
                // A failed replacement must not take a working key away.
                Err(error) => {
                    self.broken.inc();
                    tracing::error!(key = %name, error, "key server: cannot read a key file; the previous key stays in use");
                    (before, error)
                }
            };
            known.insert(
                name,
                LoadedKeyFile {
                    stamps,
                    key: slot,
                    error,
                },
            );
        }
    }

    fn report_misnamed(&self, mut now: Vec<String>) {
        now.sort();
        now.truncate(FILES_MAX);
        let mut before = self.misnamed.lock().unwrap_or_else(PoisonError::into_inner);
        for file in now.iter().filter(|file| !before.contains(file)) {
            self.broken.inc();
            tracing::error!(
                file,
                "key server: the file's name is not that of a service, so the key is not used; fix: name it NAMESPACE.NAME.crt, as in default.shop.crt"
            );
        }
        *before = now;
    }

    fn load(&self, service: &ServiceKey) -> Result<CertifiedPrivateKey, String> {
        let name = stem(service);
        let path = |extension: &str| self.folder.join(format!("{name}.{extension}"));
        let text = read(&path("crt"))?;
        let chain = CertificateDer::pem_slice_iter(&text)
            .collect::<Result<Vec<_>, _>>()
            .map_err(|e| format!("{name}.crt: {e}; fix: write certificates in PEM, leaf first"))?;
        let text = read(&path("key"))?;
        let der = PrivateKeyDer::from_pem_slice(&text)
            .map_err(|e| format!("{name}.key: {e}; fix: write one private key in PEM"))?;
        let key = PrivateKey::read(&self.vault, &der).map_err(|e| format!("{name}.key: {e}"));
        // The decoded key does not wipe itself.
        let mut der = der;
        zeroize::Zeroize::zeroize(&mut der);
        CertifiedPrivateKey::new(
            KeyName::File(service.clone()),
            self.tenant.clone(),
            Arc::new(key?),
            chain,
            None,
        )
        .map_err(|e| format!("{name}: {e}"))
    }

    /// Returns the allow list as it is in the file now.
    fn fresh(&self) -> std::sync::MutexGuard<'_, Allow> {
        // A thread that panicked with the lock must not stop all others.
        let mut allow = self.allow.lock().unwrap_or_else(PoisonError::into_inner);
        let path = self.folder.join(ALLOW);
        // A list whose state cannot be read counts as missing, so no requester may use a key.
        let now = std::fs::metadata(&path).ok().map(|m| stamp(&m));
        // A missing file is parsed each time, so that its absence is an error at once.
        if now.is_some() && now == allow.stamp {
            return allow;
        }
        let parsed = match now {
            None => Err(format!(
                "{}: there is no allow list, so no requester may use a key; fix: create it",
                path.display()
            )),
            Some(_) => read(&path).and_then(|bytes| {
                let text = std::str::from_utf8(&bytes)
                    .map_err(|e| format!("{}: {e}; fix: save it as UTF-8", path.display()))?;
                let written = serde_saphyr::from_str::<AllowListFile>(text)
                    .map_err(|e| format!("{}: {e}", path.display()))?;
                written
                    .read(&self.tenant)
                    .map_err(|e| format!("{}: {e}", path.display()))
            }),
        };
        allow.stamp = now;
        match parsed {
            Ok(list) => {
                if list != allow.list || !allow.error.is_empty() {
                    tracing::info!(keys = list.len(), "key server: loaded the allow list");
                }
                (allow.list, allow.error) = (list, String::new());
            }
            Err(error) => {
                // Fails closed: a list that is unreadable may have been about to refuse a
                // requester.
                if error != allow.error {
                    self.broken.inc();
                    tracing::error!(
                        error,
                        "key server: cannot read the allow list, so no requester may use a key"
                    );
                }
                (allow.list, allow.error) = (AllowList::new(), error);
            }
        }
        allow
    }

    /// Returns the key, if `caller`, which serves the tenant, may use it now.
    ///
    /// # Errors
    /// The allow list does not permit the caller, or there is no key of the service.
    pub fn find(
        &self,
        name: &ServiceKey,
        caller: &ChannelPeer,
    ) -> Result<Arc<CertifiedPrivateKey>, KeyRefusal> {
        if decide(&self.fresh().list, name, &caller.requester) == AllowResult::Refused {
            return Err(KeyRefusal::NotAllowed);
        }
        let known = self.keys.read().unwrap_or_else(PoisonError::into_inner);
        known
            .get(name)
            .and_then(|k| k.key.as_ref())
            .map(|slot| slot.current().clone())
            .ok_or(KeyRefusal::UnknownKey)
    }

    /// Returns the key of certificates that a peer is presented: the current one, or its
    /// predecessor. [`TenantKeyFiles::find`] decides on its use.
    pub(crate) fn presented_key(
        &self,
        name: &ServiceKey,
        spki: &SpkiHash,
    ) -> Option<Arc<CertifiedPrivateKey>> {
        let known = self.keys.read().unwrap_or_else(PoisonError::into_inner);
        known
            .get(name)?
            .key
            .as_ref()?
            .by_spki(spki, Instant::now())
            .cloned()
    }

    /// Returns the number of keys in use.
    pub fn count(&self) -> usize {
        self.keys
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .values()
            .filter(|k| k.key.is_some())
            .count()
    }

    /// Returns the status of the keys sorted by name, then of files whose names match no service,
    /// then of the allow list if it is unreadable.
    pub fn status(&self) -> Vec<FileStatus> {
        let known = self.keys.read().unwrap_or_else(PoisonError::into_inner);
        let one = |(service, k): (&ServiceKey, &LoadedKeyFile)| FileStatus {
            name: stem(service),
            algorithm: k.key.as_ref().map(|slot| slot.current().key.queue().name()),
            error: k.error.clone(),
        };
        let mut all: Vec<_> = known.iter().map(one).collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        let error = "the file name is not that of a service; it has the form NAMESPACE.NAME.crt";
        let misnamed = self.misnamed.lock().unwrap_or_else(PoisonError::into_inner);
        all.extend(misnamed.iter().map(|file| FileStatus {
            name: file.clone(),
            algorithm: None,
            error: error.into(),
        }));
        let allow = self.fresh();
        if !allow.error.is_empty() {
            all.push(FileStatus {
                name: ALLOW.into(),
                algorithm: None,
                error: allow.error.clone(),
            });
        }
        all
    }
}

#[cfg(test)]
mod tests;
