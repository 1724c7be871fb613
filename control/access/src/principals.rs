//! The principals that may connect to the controller: a YAML list of token hashes, each with its
//! principal. The file is read again when it changes. A token is never stored, logged or compared
//! as text. Start at [`Principals`].

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use canal_model::ids::{
    AzName, BackendName, EdgeName, NodeName, ObjectName, ReplicaName, TenantName,
};
use canal_model::principal::Principal;
use serde::Deserialize;
use sha2::{Digest, Sha256};
use tokio::sync::watch;

/// Maximum number of entries in the file.
/// One tenant at its limit of nodes (8,192, `NODES_PER_TENANT_MAX`) and the provider's components
/// fit.
pub const PRINCIPALS_MAX: usize = 10_000;
/// Maximum bytes of the file.
/// These are 838 bytes for each of [`PRINCIPALS_MAX`] entries, which are a hash of 64 digits and
/// some names.
pub const PRINCIPALS_BYTES_MAX: u64 = 8 << 20;
/// Maximum bytes of a token.
/// A Kubernetes service account token has about 1 KiB. Each request hashes the token, so the limit
/// bounds what a client without a valid one can cost.
pub const TOKEN_BYTES_MAX: usize = 4096;
/// Interval between checks of the file for changes.
/// A removed token is refused from then on, so this is how long it may still be used. A check
/// without a change is one stat(2).
const POLL: Duration = Duration::from_secs(1);

/// SHA-256 hash of a token.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TokenHash([u8; 32]);

impl TokenHash {
    /// Returns the hash of a token.
    pub fn of(token: &str) -> Self {
        Self(Sha256::digest(token.as_bytes()).into())
    }

    fn read(hex: &str) -> Option<Self> {
        if hex.len() != 64 || !hex.is_ascii() {
            return None;
        }
        let mut h = [0; 32];
        for (i, byte) in h.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).ok()?;
        }
        Some(Self(h))
    }
}

/// The principals from one reading of the file.
#[derive(Clone, Default)]
pub struct Principals {
    entries: HashMap<TokenHash, Principal>,
    /// Backends to which gateways are restricted.
    backends: BTreeMap<Principal, BackendName>,
}

/// Reason why the file was not applied.
#[derive(Debug, thiserror::Error)]
pub enum PrincipalsError {
    /// The file cannot be read.
    #[error(
        "the principals file {path} cannot be read: {why}; fix: give --principals a YAML list of {{tokenSha256, kind, name, tenant, az, backend}}"
    )]
    File { path: PathBuf, why: String },
    /// The content of the file is not valid. `faults` has one line per fault.
    #[error("the principals file {path} is not usable:\n{}", .faults.join("\n"))]
    Content { path: PathBuf, faults: Vec<String> },
}

/// One entry of the file, before it is validated.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct PrincipalRow {
    token_sha256: String,
    kind: String,
    name: String,
    tenant: Option<String>,
    az: Option<String>,
    backend: Option<String>,
}

impl Principals {
    /// Reads and validates the file.
    ///
    /// # Errors
    /// A [`PrincipalsError`] with every fault in the file.
    pub fn read(path: &Path) -> Result<Self, PrincipalsError> {
        let file = |why: String| PrincipalsError::File {
            path: path.into(),
            why,
        };
        let size = std::fs::metadata(path)
            .map_err(|e| file(e.to_string()))?
            .len();
        if size > PRINCIPALS_BYTES_MAX {
            return Err(file(format!(
                "it has {size} bytes; at most {PRINCIPALS_BYTES_MAX} are allowed"
            )));
        }
        let text = std::fs::read_to_string(path).map_err(|e| file(e.to_string()))?;
        Self::parse(&text).map_err(|faults| PrincipalsError::Content {
            path: path.into(),
            faults,
        })
    }

    /// Validates the text of the file.
    ///
    /// # Errors
    /// Every fault in the text, one per element.
    pub fn parse(text: &str) -> Result<Self, Vec<String>> {
        // YAML reads an empty text as null and not as an empty list.
        let rows: Vec<PrincipalRow> = if text.trim().is_empty() {
            Vec::new()
        } else {
            serde_saphyr::from_str(text).map_err(|e| {
                vec![format!(
                    "{e}; fix: write a list of {{tokenSha256, kind, name, tenant, az, backend}}"
                )]
            })?
        };
        if rows.len() > PRINCIPALS_MAX {
            return Err(vec![format!(
                "{} entries; at most {PRINCIPALS_MAX} are accepted; fix: remove those that no longer connect",
                rows.len()
            )]);
        }
        let mut faults = Vec::new();
        let mut entries = HashMap::new();
        let mut backends: BTreeMap<Principal, BackendName> = BTreeMap::new();
        let mut seen = BTreeSet::new();
        // All entries are checked, so that every fault is reported at once.
        for (i, row) in rows.iter().enumerate() {
            match entry(row) {
                // One token for two principals would give one of them the other's scope.
                Ok((hash, _)) if !seen.insert(hash) => {
                    faults.push(format!(
                        "entry {} ({} {}): another entry has the same token; fix: give each its own",
                        i + 1,
                        row.kind,
                        row.name
                    ));
                }
                Ok((hash, principal)) => {
                    match backend(row, &principal, &backends) {
                        Ok(own) => backends.extend(own.map(|b| (principal.clone(), b))),
                        Err(why) => faults.push(format!(
                            "entry {} ({} {}): {why}",
                            i + 1,
                            row.kind,
                            row.name
                        )),
                    }
                    entries.insert(hash, principal);
                }
                Err(why) => faults.push(format!(
                    "entry {} ({} {}): {why}",
                    i + 1,
                    row.kind,
                    row.name
                )),
            }
        }
        // A file with a fault is refused whole: a part would lock out the principals of the rest.
        if faults.is_empty() {
            Ok(Self { entries, backends })
        } else {
            Err(faults)
        }
    }

    /// Returns the principal that a token stands for. The time of the lookup may reveal hashes that
    /// are close. That does not help an attacker, who would need tokens whose SHA-256 has a chosen
    /// prefix.
    pub fn find(&self, hash: &TokenHash) -> Option<&Principal> {
        self.entries.get(hash)
    }

    /// Returns the backend to which a gateway is restricted; `None` if it may be of any backend.
    pub fn backend(&self, principal: &Principal) -> Option<&BackendName> {
        self.backends.get(principal)
    }

    /// True if any token stands for `principal`.
    pub fn has_principal(&self, principal: &Principal) -> bool {
        self.entries.values().any(|p| p == principal)
    }

    /// Returns each principal once, in sorted order.
    pub fn all(&self) -> impl Iterator<Item = &Principal> {
        self.entries.values().collect::<BTreeSet<_>>().into_iter()
    }

    /// Returns the number of entries, one per token.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// True if no principal may connect to the controller.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

/// Returns the kind of a principal as metric labels and `canal status` spell it.
pub fn principal_name(p: &Principal) -> &'static str {
    match p {
        Principal::Node { .. } => "node",
        Principal::Gateway { .. } => "gateway",
        Principal::Edge { .. } => "edge",
        Principal::KeyServer { .. } => "keyserver",
        Principal::Operator { .. } => "operator",
    }
}

/// Converts an entry to a token hash and its principal.
fn entry(row: &PrincipalRow) -> Result<(TokenHash, Principal), String> {
    let hash = TokenHash::read(&row.token_sha256)
        .ok_or("tokenSha256 is not 64 hexadecimal digits; fix: write the SHA-256 of the token")?;
    let tenant = || -> Result<TenantName, String> {
        let name = row
            .tenant
            .as_deref()
            .ok_or("tenant is missing; fix: write the node's tenant")?;
        TenantName::new(name).map_err(|e| e.to_string())
    };
    // A cluster with one AZ needs no name for it.
    let az = || AzName::new(row.az.as_deref().unwrap_or("default")).map_err(|e| e.to_string());
    let principal = match row.kind.as_str() {
        "node" => Principal::Node {
            name: NodeName::new(&row.name).map_err(|e| e.to_string())?,
            tenant: tenant()?,
            az: az()?,
        },
        "gateway" if row.tenant.is_some() => {
            return Err("a gateway serves many tenants; fix: remove tenant".into());
        }
        "gateway" => Principal::Gateway {
            name: ReplicaName::new(&row.name).map_err(|e| e.to_string())?,
            az: az()?,
        },
        "edge" if row.tenant.is_some() => {
            return Err("an edge serves all tenants; fix: remove tenant".into());
        }
        "edge" => Principal::Edge {
            name: EdgeName::new(&row.name).map_err(|e| e.to_string())?,
            az: az()?,
        },
        // A key server without a tenant is the provider's, and serves all tenants.
        "keyserver" => {
            let tenant = row
                .tenant
                .as_deref()
                .map(TenantName::new)
                .transpose()
                .map_err(|e| e.to_string())?;
            Principal::KeyServer {
                name: ObjectName::new(&row.name).map_err(|e| e.to_string())?,
                az: az()?,
                tenant,
            }
        }
        // An operator without a tenant is the provider's, and may change every tenant.
        "operator" => {
            let tenant = row
                .tenant
                .as_deref()
                .map(TenantName::new)
                .transpose()
                .map_err(|e| e.to_string())?;
            Principal::Operator {
                name: ObjectName::new(&row.name).map_err(|e| e.to_string())?,
                tenant,
            }
        }
        other => {
            return Err(format!(
                "kind {other:?} is unknown; fix: write node, gateway, edge, keyserver or operator"
            ));
        }
    };
    Ok((hash, principal))
}

/// Returns the backend to which an entry restricts its gateway. Two tokens of one gateway must
/// agree on it.
fn backend(
    row: &PrincipalRow,
    principal: &Principal,
    held: &BTreeMap<Principal, BackendName>,
) -> Result<Option<BackendName>, String> {
    let Some(name) = row.backend.as_deref() else {
        return Ok(None);
    };
    if !matches!(principal, Principal::Gateway { .. }) {
        return Err("only a gateway has a backend; fix: remove backend".into());
    }
    let name = BackendName::new(name).map_err(|e| e.to_string())?;
    match held.get(principal) {
        Some(other) if *other != name => Err(format!(
            "another entry of the same gateway has backend {other}; fix: use one backend"
        )),
        _ => Ok(Some(name)),
    }
}

/// Inode, size, mtime and ctime of the file, by which a change is noticed.
type PrincipalsFingerprint = (u64, u64, [i64; 2], [i64; 2]);

fn fingerprint(path: &Path) -> Option<PrincipalsFingerprint> {
    use std::os::unix::fs::MetadataExt;
    let m = std::fs::metadata(path).ok()?;
    // A change of permissions changes only the ctime, and may make the file readable.
    Some((
        m.ino(),
        m.size(),
        [m.mtime(), m.mtime_nsec()],
        [m.ctime(), m.ctime_nsec()],
    ))
}

/// Reads the file again when it changes, until no receiver is left. A file that is not valid
/// changes nothing, and is logged once.
pub async fn follow(path: PathBuf, current: watch::Sender<Arc<Principals>>) {
    // The file may have changed since it was first read, so the first check reads it again.
    let mut last = None;
    while !current.is_closed() {
        tokio::time::sleep(POLL).await;
        let now = fingerprint(&path);
        if now == last {
            continue;
        }
        last = now;
        match Principals::read(&path) {
            Ok(new) => {
                current.send_if_modified(|held| {
                    let differs = held.entries != new.entries || held.backends != new.backends;
                    if differs {
                        tracing::info!(
                            principals = new.len(),
                            "principals: loaded the changed principals file"
                        );
                        *held = Arc::new(new);
                    }
                    differs
                });
            }
            Err(e) => {
                tracing::error!(error = %e, "principals: rejected the changed principals file; the last good principals stay in force")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(token: &str) -> String {
        TokenHash::of(token)
            .0
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect()
    }

    #[test]
    fn a_change_of_permissions_is_noticed() {
        use std::os::unix::fs::PermissionsExt;
        let file = tempfile::NamedTempFile::new().unwrap();
        let first = fingerprint(file.path());
        let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
        // The kernel's clock for files is coarse.
        while fingerprint(file.path()) == first {
            assert!(std::time::Instant::now() < until, "no change is noticed");
            let mode = std::fs::Permissions::from_mode(0o400);
            std::fs::set_permissions(file.path(), mode).unwrap();
        }
    }

    #[test]
    fn tokens_stand_for_principals() {
        let text = format!(
            "- {{tokenSha256: {}, kind: node, name: n1, tenant: alpha, az: az1}}\n- {{tokenSha256: {}, kind: gateway, name: g1, az: az1}}\n\
             - {{tokenSha256: {}, kind: operator, name: root}}\n- {{tokenSha256: {}, kind: operator, name: ann, tenant: alpha}}\n\
             - {{tokenSha256: {}, kind: node, name: n1, tenant: alpha, az: az1}}\n\
             - {{tokenSha256: {}, kind: keyserver, name: ks1, az: az1}}\n\
             - {{tokenSha256: {}, kind: keyserver, name: ks1, az: az1, tenant: alpha}}\n",
            hex("t1"),
            hex("t2"),
            hex("t3"),
            hex("t4").to_uppercase(),
            hex("t5"),
            hex("t7"),
            hex("t8"),
        );
        let p = Principals::parse(&text).unwrap();
        for (token, want) in [
            ("t7", Some("keyserver ks1")),
            ("t8", Some("keyserver alpha/ks1")),
            ("t1", Some("node alpha/n1")),
            ("t2", Some("gateway g1")),
            ("t3", Some("operator root")),
            ("t4", Some("operator alpha/ann")),
            ("t5", Some("node alpha/n1")),
            ("t6", None),
            ("", None),
        ] {
            assert_eq!(
                p.find(&TokenHash::of(token))
                    .map(Principal::to_string)
                    .as_deref(),
                want,
                "{token:?}"
            );
        }
        assert!(Principals::parse(" \n").unwrap().is_empty());
    }

    #[test]
    fn every_fault_is_named() {
        let h = hex("t");
        let text = format!(
            "- {{tokenSha256: abc, kind: node, name: n1, tenant: alpha}}\n- {{tokenSha256: {h}, kind: node, name: n2}}\n\
             - {{tokenSha256: {}, kind: robot, name: r}}\n- {{tokenSha256: {}, kind: gateway, name: g, tenant: alpha}}\n\
             - {{tokenSha256: {}, kind: node, name: UPPER, tenant: alpha}}\n- {{tokenSha256: {h}, kind: operator, name: a}}\n\
             - {{tokenSha256: {h}, kind: operator, name: b}}\n",
            hex("u"),
            hex("v"),
            hex("w"),
        );
        let faults = Principals::parse(&text).err().unwrap();
        let want = [
            "64 hexadecimal",
            "tenant is missing",
            "robot",
            "remove tenant",
            "UPPER",
            "same token",
        ];
        assert_eq!(faults.len(), want.len(), "{faults:#?}");
        for (fault, part) in faults.iter().zip(want) {
            assert!(
                fault.starts_with("entry ") && fault.contains(part),
                "{fault}"
            );
        }
        for text in [
            "{a: b}",
            "- {kind: node}",
            "- {tokenSha256: x, kind: node, name: n, color: red}",
            "- [",
        ] {
            assert!(Principals::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_gateway_token_may_be_restricted_to_a_backend() {
        let row = |token: &str, rest: &str| format!("- {{tokenSha256: {}, {rest}}}\n", hex(token));
        let gateway = |token: &str, name: &str, backend: &str| {
            row(
                token,
                &format!("kind: gateway, name: {name}, az: az1{backend}"),
            )
        };
        let text = [
            // Two tokens of g1 name the same backend, which an overlap of old and new tokens needs.
            gateway("t1", "g1", ", backend: b1"),
            gateway("t2", "g1", ", backend: b1"),
            gateway("t3", "g2", ""),
            row("t4", "kind: edge, name: e1, az: az1"),
        ]
        .concat();
        let p = Principals::parse(&text).unwrap();
        let backend = |token: &str| {
            p.backend(p.find(&TokenHash::of(token)).unwrap())
                .map(ToString::to_string)
        };
        assert_eq!(
            ["t1", "t2", "t3", "t4"].map(backend),
            [Some("b1".into()), Some("b1".into()), None, None]
        );
        assert_eq!(p.find(&TokenHash::of("t4")).unwrap().to_string(), "edge e1");
        for (text, part) in [
            (
                [
                    gateway("t1", "g1", ", backend: b1"),
                    gateway("t2", "g1", ", backend: b2"),
                ]
                .concat(),
                "has backend b1",
            ),
            (gateway("t1", "g1", ", backend: B"), "backend name"),
            (
                row("t1", "kind: edge, name: e1, az: az1, backend: b1"),
                "only a gateway",
            ),
            (
                row("t1", "kind: edge, name: e1, tenant: alpha"),
                "remove tenant",
            ),
        ] {
            let faults = Principals::parse(&text).err().unwrap();
            assert!(faults.len() == 1 && faults[0].contains(part), "{faults:?}");
        }
    }

    #[test]
    fn the_number_of_entries_is_limited() {
        let row = |i: usize| format!("- {{tokenSha256: {i:064x}, kind: operator, name: o{i}}}\n");
        let text: String = (0..=PRINCIPALS_MAX).map(row).collect();
        let faults = Principals::parse(&text).err().unwrap();
        assert!(faults[0].contains("at most"), "{faults:?}");
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p.yaml");
        std::fs::File::create(&path)
            .unwrap()
            .set_len(PRINCIPALS_BYTES_MAX + 1)
            .unwrap();
        assert!(
            Principals::read(&path)
                .err()
                .unwrap()
                .to_string()
                .contains("at most")
        );
    }
}
