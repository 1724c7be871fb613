//! Keyless: a tenant's own keys, read from `NAMESPACE.NAME.crt` and `NAMESPACE.NAME.key` of one folder, and who may have signatures with them,
//! from `allow.yaml` there. A key is of one service: one of the same name in another namespace has nothing of it. A key in use is replaced when its files are; who may use it is looked up in the file at every operation.

use std::collections::{BTreeMap, HashMap};
use std::fs::Metadata;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use canal_kit::metrics::{Family, Registry, SharedCounter};
use canal_model::ids::{Namespace, ObjectName, ServiceKey, TenantName};
use canal_model::trust::Requester;
use canal_wire::keyrpc::{KeyName, Refusal, SpkiHash};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use zeroize::Zeroizing;

use crate::certified::Certified;
use crate::held::Held;
use crate::key::PrivateKey;
use crate::limits::{FILE_BYTES_MAX, FILES_MAX};
use crate::rights::Caller;
use crate::vault::Vault;

/// The allow list's name.
pub const ALLOW: &str = "allow.yaml";
/// How often the folder is looked at for new keys and certificates.
pub const LOOK: Duration = Duration::from_millis(500);

/// What tells a changed file.
type Stamp = (u64, u64, i64, i64, i64, i64);

fn stamp(m: &Metadata) -> Stamp {
    (m.ino(), m.size(), m.mtime(), m.mtime_nsec(), m.ctime(), m.ctime_nsec())
}

/// The allow list as it is written.
#[derive(Debug, Default, Clone, PartialEq, Eq, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    /// By service as `namespace/name`: requesters as `gateway/NAME`, or `gateway/*` for all that serve the tenant.
    #[serde(default)]
    allow: BTreeMap<String, Vec<String>>,
}

/// The allow list as it is looked up.
type List = BTreeMap<ServiceKey, Vec<String>>;

impl Written {
    fn read(self, tenant: &TenantName) -> Result<List, String> {
        let wrong = |key: &str| format!("{key:?} is no service; write namespace/name, as in default/shop");
        let row = |(key, requesters): (String, Vec<String>)| {
            let service = format!("{tenant}/{key}").parse().map_err(|_| wrong(&key))?;
            Ok((service, requesters))
        };
        self.allow.into_iter().map(row).collect()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Allowed,
    Refused,
}

fn decide(list: &List, key: &ServiceKey, requester: &Requester) -> Verdict {
    let named = requester.to_string();
    let any = "gateway/*";
    let is = |r: &String| *r == named || r == any && matches!(requester, Requester::Gateway(_));
    if list.get(key).is_some_and(|l| l.iter().any(is)) { Verdict::Allowed } else { Verdict::Refused }
}

/// The files of a service's key, without what follows the last dot. No namespace has a dot, so that no two services have one name.
fn stem(service: &ServiceKey) -> String {
    format!("{}.{}", service.namespace, service.name)
}

/// Which files [`Files::find`] looks for.
pub(crate) fn looked_for(service: &ServiceKey) -> String {
    format!("{0}.crt and {0}.key", stem(service))
}

struct Allow {
    stamp: Option<Stamp>,
    list: List,
    /// Why nobody is allowed anything.
    error: String,
}

struct Known {
    stamps: (Stamp, Stamp),
    held: Option<Held>,
    error: String,
}

/// A tenant's folder.
pub struct Files {
    folder: PathBuf,
    tenant: TenantName,
    vault: Arc<Vault>,
    allow: Mutex<Allow>,
    known: RwLock<HashMap<ServiceKey, Known>>,
    /// Certificates whose names are of no service, as last seen.
    misnamed: Mutex<Vec<String>>,
    /// Keys beyond [`FILES_MAX`], as last seen.
    over: AtomicUsize,
    broken: SharedCounter,
}

impl std::fmt::Debug for Files {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Files({})", self.folder.display())
    }
}

/// One key for `/config_dump`.
#[derive(Debug, Clone, serde::Serialize)]
pub struct FileStatus {
    pub name: String,
    pub algorithm: Option<&'static str>,
    /// Of the last read; the key read before stays in use.
    pub error: String,
}

/// At most [`FILE_BYTES_MAX`].
fn read(path: &Path) -> Result<Zeroizing<Vec<u8>>, String> {
    let told = |e: std::io::Error| format!("{}: {e}", path.display());
    let file = std::fs::File::open(path).map_err(told)?;
    let length = file.metadata().map_err(told)?.len();
    if length > FILE_BYTES_MAX {
        return Err(format!("{}: {length} bytes; at most {FILE_BYTES_MAX} are read", path.display()));
    }
    // With room for all, so that it is never moved while it holds a key.
    let mut bytes = Zeroizing::new(Vec::with_capacity(usize::try_from(length).unwrap_or(0) + 1));
    file.take(length).read_to_end(&mut bytes).map_err(told)?;
    Ok(bytes)
}

impl Files {
    /// Reads the folder. It must be there; what is broken in it is told, and is not in use.
    ///
    /// Metric: `canal_key_files_broken_total`.
    pub fn open(folder: PathBuf, tenant: TenantName, vault: Arc<Vault>, registry: &Registry) -> std::io::Result<Self> {
        std::fs::read_dir(&folder)?;
        let broken = Family::new("canal_key_files_broken_total", "Keys, certificates and allow lists that could not be read.", &[]);
        let files = Self {
            folder,
            tenant,
            vault,
            allow: Mutex::new(Allow { stamp: None, list: List::new(), error: "not read yet".into() }),
            known: RwLock::default(),
            misnamed: Mutex::default(),
            over: AtomicUsize::new(0),
            broken: registry.counters(broken).shared(&[]),
        };
        files.look();
        Ok(files)
    }

    /// Whose folder it is.
    pub fn tenant(&self) -> &TenantName {
        &self.tenant
    }

    /// Reads what has changed: new and replaced keys come into use, those whose files are gone go out of it.
    pub fn look(&self) {
        let (mut found, mut misnamed, mut over) = (HashMap::new(), Vec::new(), 0);
        for entry in std::fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.extension().is_none_or(|e| e != "crt") {
                continue;
            }
            let Some(name) = path.file_stem().and_then(|s| s.to_str()).and_then(|s| self.service(s)) else {
                misnamed.push(entry.file_name().to_string_lossy().into_owned());
                continue;
            };
            let (certificate, key) = (std::fs::metadata(&path), std::fs::metadata(path.with_extension("key")));
            match (certificate, key) {
                (Ok(_), Ok(_)) if found.len() >= FILES_MAX => over += 1,
                (Ok(certificate), Ok(key)) => drop(found.insert(name, (stamp(&certificate), stamp(&key)))),
                _ => {}
            }
        }
        if self.over.swap(over, Relaxed) < over {
            self.broken.inc();
            tracing::error!(over, "there are more than {FILES_MAX} keys in the folder; the others are not read");
        }
        self.tell_misnamed(misnamed);
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        known.retain(|name, _| found.contains_key(name));
        let now = Instant::now();
        known.values_mut().filter_map(|k| k.held.as_mut()).for_each(|held| held.tidy(now));
        for (name, stamps) in found {
            if known.get(&name).is_some_and(|k| k.stamps == stamps) {
                continue;
            }
            let before = known.remove(&name).and_then(|k| k.held);
            let (held, error) = match self.load(&name) {
                Ok(certified) => {
                    tracing::info!(key = %name, until = ?certified.not_after, "key read");
                    (Some(Held::after(before, Arc::new(certified), now)), String::new())
                }
                Err(error) => {
                    self.broken.inc();
                    tracing::error!(key = %name, error, "the key cannot be read; the one read before stays in use");
                    (before, error)
                }
            };
            known.insert(name, Known { stamps, held, error });
        }
        drop(known);
        drop(self.fresh());
    }

    /// Whose key is in files of this name; `None`: nobody's.
    fn service(&self, stem: &str) -> Option<ServiceKey> {
        let (namespace, name) = stem.split_once('.')?;
        let (namespace, name) = (Namespace::new(namespace).ok()?, ObjectName::new(name).ok()?);
        Some(ServiceKey { tenant: self.tenant.clone(), namespace, name })
    }

    fn tell_misnamed(&self, mut now: Vec<String>) {
        now.sort();
        now.truncate(FILES_MAX);
        let mut before = self.misnamed.lock().unwrap_or_else(PoisonError::into_inner);
        for file in now.iter().filter(|file| !before.contains(file)) {
            self.broken.inc();
            tracing::error!(file, "the name is of no service, so nobody uses the key; name it NAMESPACE.NAME.crt, as in default.shop.crt");
        }
        *before = now;
    }

    fn load(&self, service: &ServiceKey) -> Result<Certified, String> {
        let name = stem(service);
        let path = |extension: &str| self.folder.join(format!("{name}.{extension}"));
        let text = read(&path("crt"))?;
        let chain = CertificateDer::pem_slice_iter(&text).collect::<Result<Vec<_>, _>>().map_err(|e| format!("{name}.crt: {e}"))?;
        let text = read(&path("key"))?;
        let der = PrivateKeyDer::from_pem_slice(&text).map_err(|e| format!("{name}.key: {e}"))?;
        let key = PrivateKey::read(&self.vault, &der).map_err(|e| format!("{name}.key: {e}"));
        // What was decoded is not wiped by its type.
        let mut der = der;
        zeroize::Zeroize::zeroize(&mut der);
        Certified::new(KeyName::File(service.clone()), self.tenant.clone(), Arc::new(key?), chain, None).map_err(|e| format!("{name}: {e}"))
    }

    /// The allow list as it is in the file now.
    fn fresh(&self) -> std::sync::MutexGuard<'_, Allow> {
        let mut allow = self.allow.lock().unwrap_or_else(PoisonError::into_inner);
        let path = self.folder.join(ALLOW);
        let now = std::fs::metadata(&path).ok().map(|m| stamp(&m));
        if now.is_some() && now == allow.stamp {
            return allow;
        }
        let parsed = match now {
            None => Err(format!("{}: there is no allow list, so nobody may use a key", path.display())),
            Some(_) => read(&path).and_then(|bytes| {
                let text = std::str::from_utf8(&bytes).map_err(|e| format!("{}: {e}", path.display()))?;
                let written = serde_saphyr::from_str::<Written>(text).map_err(|e| format!("{}: {e}", path.display()))?;
                written.read(&self.tenant).map_err(|e| format!("{}: {e}", path.display()))
            }),
        };
        allow.stamp = now;
        match parsed {
            Ok(list) => {
                if list != allow.list || !allow.error.is_empty() {
                    tracing::info!(keys = list.len(), "allow list read");
                }
                (allow.list, allow.error) = (list, String::new());
            }
            Err(error) => {
                // Fails closed: a list that cannot be read may have been about to refuse somebody.
                if error != allow.error {
                    self.broken.inc();
                    tracing::error!(error, "nobody is allowed to use a key");
                }
                (allow.list, allow.error) = (List::new(), error);
            }
        }
        allow
    }

    /// The key, if `caller`, which serves the tenant, is allowed to use it now.
    pub fn find(&self, name: &ServiceKey, caller: &Caller) -> Result<Arc<Certified>, Refusal> {
        if decide(&self.fresh().list, name, &caller.requester) == Verdict::Refused {
            return Err(Refusal::NotAllowed);
        }
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        known.get(name).and_then(|k| k.held.as_ref()).map(|held| held.current().clone()).ok_or(Refusal::UnknownKey)
    }

    /// The key of certificates that a peer is shown, in use or just replaced. Who may use it is asked of [`Files::find`].
    pub(crate) fn shown(&self, name: &ServiceKey, spki: &SpkiHash) -> Option<Arc<Certified>> {
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        known.get(name)?.held.as_ref()?.shown(spki, Instant::now()).cloned()
    }

    /// Keys in use.
    pub fn count(&self) -> usize {
        self.known.read().unwrap_or_else(PoisonError::into_inner).values().filter(|k| k.held.is_some()).count()
    }

    /// Sorted by name, then files whose names are of no service; the last one is the allow list, if it cannot be read.
    pub fn status(&self) -> Vec<FileStatus> {
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        let one = |(service, k): (&ServiceKey, &Known)| FileStatus {
            name: stem(service),
            algorithm: k.held.as_ref().map(|held| held.current().key.lane().name()),
            error: k.error.clone(),
        };
        let mut all: Vec<_> = known.iter().map(one).collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        let error = "the name is of no service: NAMESPACE.NAME.crt is looked for";
        let misnamed = self.misnamed.lock().unwrap_or_else(PoisonError::into_inner);
        all.extend(misnamed.iter().map(|file| FileStatus { name: file.clone(), algorithm: None, error: error.into() }));
        let allow = self.fresh();
        if !allow.error.is_empty() {
            all.push(FileStatus { name: ALLOW.into(), algorithm: None, error: allow.error.clone() });
        }
        all
    }
}

#[cfg(test)]
mod tests;
