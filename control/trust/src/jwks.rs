//! Key sets for JWTs (RFC 7517) that tenants name by URI. This module fetches them, and reports
//! those that changed. It contacts only hosts on the provider's list, so that tenants cannot make
//! the controller call arbitrary servers. The last good set stays in use, also across restarts.
//! Start at [`follow`].

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use canal_catalog::Catalog;
use canal_controller_metrics::{self as metrics, ControllerMetrics};
use canal_model::ids::TenantName;
use canal_store::Store;
use http::header::{ACCEPT, HeaderName, HeaderValue, IF_NONE_MATCH};
use http::{Method, StatusCode, Uri};
use hyper::body::Bytes;
use rustix::fs::{Mode, OFlags, ResolveFlags};
use serde_json::Value;
use tokio::sync::{mpsc, watch};
use tokio::task::{self, JoinSet};

use crate::fetch::{FetchClient, FetchError, FetchRequest, FetchResponse, host_and_port};

/// Maximum bytes of a key set.
/// These are 4 KiB for each of the 64 keys of a set that gateways use (`KEYS_MAX`).
pub const JWKS_BYTES_MAX: usize = 256 << 10;
/// Maximum number of URIs of one tenant that are fetched; those after them, sorted by name, are
/// refused.
/// With sets of the largest size, they take 16 MiB (`JWKS_BYTES_MAX`).
pub const JWKS_URIS_MAX: usize = 64;
/// Maximum number of fetches that run at once.
/// If every server is silent until the timeout of 5 s, 192 sets are tried in a refresh interval of
/// 60 s. Nobody measured a larger number.
pub const JWKS_FETCHES_MAX: usize = 16;
/// Maximum number of fetches of one tenant that run at once, so that its slow issuers do not delay
/// other tenants.
/// A quarter of [`JWKS_FETCHES_MAX`].
pub const JWKS_FETCHES_PER_TENANT_MAX: usize = 4;
/// Timeout of one fetch of a key set.
/// istiod's requests to issuers have the same timeout.
const FETCH: Duration = Duration::from_secs(5);
/// Delay after the first failure of a set that was never available. It doubles up to the refresh
/// interval.
/// A tenant whose issuer starts later than the gateway has its keys soon, and the issuer is not
/// flooded.
const RETRY: Duration = Duration::from_secs(1);
/// Interval between checks for fetches that are due.
/// A quarter of the shortest delay ([`RETRY`]), which it lengthens by that much at most.
const DUE_CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// Options for fetching key sets.
#[derive(Debug, Clone)]
pub struct JwksOptions {
    /// Hosts that may be contacted.
    pub hosts: Vec<AllowedHost>,
    /// Interval between fetches of a set.
    pub refresh: Duration,
}

impl Default for JwksOptions {
    fn default() -> Self {
        Self {
            hosts: Vec::new(),
            // An issuer that rotates its keys is noticed within a minute. Nobody measured this
            // value; the operator sets it by `--jwks-refresh`.
            refresh: Duration::from_secs(60),
        }
    }
}

/// A host that may be contacted, as a flag states it: `host[:port]`. Without a port it is that of
/// the scheme.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllowedHost {
    host: String,
    port: Option<u16>,
}

impl std::str::FromStr for AllowedHost {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        let authority: http::uri::Authority = s
            .parse()
            .map_err(|_| format!("{s:?} is not a host; fix: write host or host:port"))?;
        let port = match s.rsplit_once(':') {
            Some((_, port)) if !s.ends_with(']') => Some(
                port.parse()
                    .map_err(|_| format!("{port:?} is not a port; fix: write 1 to 65535"))?,
            ),
            _ => None,
        };
        if authority.host().is_empty() || s.contains('@') {
            return Err(format!("{s:?} is not a host; fix: write host or host:port"));
        }
        Ok(Self {
            host: authority.host().to_ascii_lowercase(),
            port,
        })
    }
}

impl AllowedHost {
    /// True if this entry allows requests to the URI.
    fn allows(&self, uri: &Uri) -> bool {
        let default = if uri.scheme_str() == Some("https") {
            443
        } else {
            80
        };
        host_and_port(uri).is_some_and(|(host, port)| {
            host.eq_ignore_ascii_case(&self.host) && port == self.port.unwrap_or(default)
        })
    }
}

/// Reason why a key set is not available. The name is a counter's label.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum JwksError {
    #[error(
        "the controller may not connect to {0}; fix: have the provider add it to --jwks-hosts, or write the keys into jwks"
    )]
    Host(String),
    #[error(
        "the tenant has more than {JWKS_URIS_MAX} key sets to fetch; fix: write some into jwks"
    )]
    Uris,
    #[error(
        "the tenant has no source folder, so file: URLs are not possible; fix: write the keys into jwks"
    )]
    NoFolder,
    #[error(
        "the file cannot be read: {0}; fix: name a file inside the tenant's source folder, as in file:keys/issuer.json"
    )]
    File(String),
    #[error("it is not a key set: {0}; fix: write an object with an array `keys` (RFC 7517)")]
    Form(String),
    #[error("{0}")]
    Fetch(#[from] FetchError),
    #[error("the fetch panicked, which is a bug in the controller; fix: report it")]
    Panicked,
}

impl JwksError {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Host(_) => "host_not_allowed",
            Self::Uris => "uris",
            Self::NoFolder => "no_folder",
            Self::File(_) => "file",
            Self::Form(_) => "form",
            Self::Fetch(fault) => fault.name(),
            Self::Panicked => "panicked",
        }
    }
}

/// The result of a successful fetch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum JwksFetch {
    Set {
        body: String,
        etag: Option<HeaderValue>,
    },
    Unchanged,
}

/// Identifies one key set of a tenant by its URI.
pub type JwksRef = (TenantName, String);

/// Fetch state of one key set.
struct JwksEntry {
    /// Time of the next fetch.
    due: Instant,
    etag: Option<HeaderValue>,
    /// True once a good set was fetched or loaded from the store.
    has_set: bool,
    failures: u32,
    fault: Option<JwksError>,
    under_way: bool,
}

/// Decides the delay until the next fetch of a key set.
fn decide_pause(has_set: bool, failures: u32, refresh: Duration) -> Duration {
    match failures {
        0 => refresh,
        // The last good set stays in use, so the failure is not urgent.
        _ if has_set => refresh,
        // The cap keeps the shift from overflowing. 2^16 seconds are 18 hours, so that only a longer
        // refresh interval is not reached.
        n => RETRY.saturating_mul(1 << (n - 1).min(16)).min(refresh),
    }
}

/// Returns all key sets of the tenants; the value is true for one that exceeds its tenant's limit.
fn list_key_sets<'a>(
    tenants: impl Iterator<Item = (&'a TenantName, &'a BTreeSet<String>)>,
) -> BTreeMap<JwksRef, bool> {
    let of = |(tenant, uris): (&'a TenantName, &'a BTreeSet<String>)| {
        uris.iter()
            .enumerate()
            .map(move |(nth, uri)| ((tenant.clone(), uri.clone()), nth >= JWKS_URIS_MAX))
    };
    tenants.flat_map(of).collect()
}

/// Decides whether a URI may be fetched.
///
/// # Errors
/// The URI has another form, or its host is not on the list.
fn decide_uri(uri: &str, hosts: &[AllowedHost]) -> Result<Uri, JwksError> {
    let parsed: Uri = uri.parse().map_err(|_| FetchError::Uri(uri.into()))?;
    let (host, port) = host_and_port(&parsed).ok_or_else(|| FetchError::Uri(uri.into()))?;
    if hosts.iter().any(|h| h.allows(&parsed)) {
        Ok(parsed)
    } else {
        Err(JwksError::Host(format!("{host}:{port}")))
    }
}

/// Decides whether a body may be sent to data planes, and returns it in a normal form.
///
/// # Errors
/// The body is not a key set, or contains private or symmetric keys.
fn decide_set(body: &[u8]) -> Result<String, JwksError> {
    let form = |why: String| JwksError::Form(why);
    let set: Value = serde_json::from_slice(body).map_err(|e| form(e.to_string()))?;
    if !set["keys"].is_array() {
        return Err(form("it has no array `keys`".into()));
    }
    // A private or symmetric key in a set is a mistake, and must not be distributed.
    let is_private = |key: &Value| {
        ["d", "p", "q", "dp", "dq", "qi", "k"]
            .iter()
            .any(|part| key.get(part).is_some())
    };
    if set["keys"].as_array().into_iter().flatten().any(is_private) {
        return Err(form("it contains a private or symmetric key".into()));
    }
    // Serialized as one line, equal sets have equal bytes whatever their white space.
    Ok(set.to_string())
}

/// Reads a file inside a folder. Symbolic links and `..` do not lead out of it.
fn read_inside(folder: &Path, name: &str) -> Result<Vec<u8>, JwksError> {
    use std::io::Read;
    let file = |e: std::io::Error| JwksError::File(e.to_string());
    let root = std::fs::File::open(folder).map_err(|_| JwksError::NoFolder)?;
    let inside = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    // `NONBLOCK`, because opening a FIFO would block the thread.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let opened: OwnedFd = rustix::fs::openat2(&root, name, flags, Mode::empty(), inside)
        .map_err(|e| file(e.into()))?;
    let opened = std::fs::File::from(opened);
    if !opened.metadata().map_err(file)?.is_file() {
        return Err(JwksError::File("it is not a regular file".into()));
    }
    let mut body = Vec::new();
    // One byte more than allowed shows that the file is too large.
    opened
        .take(JWKS_BYTES_MAX as u64 + 1)
        .read_to_end(&mut body)
        .map_err(file)?;
    if body.len() > JWKS_BYTES_MAX {
        return Err(FetchError::Bytes(JWKS_BYTES_MAX).into());
    }
    Ok(body)
}

/// Sources of key sets: HTTP servers, and the tenants' folders.
#[derive(Clone)]
pub struct JwksSource {
    pub client: FetchClient,
    pub options: Arc<JwksOptions>,
    /// Folder with one folder per tenant, if there is one.
    pub config_dir: Option<Arc<PathBuf>>,
}

impl JwksSource {
    /// Fetches one key set. `etag` is that of the last set.
    async fn fetch(
        &self,
        tenant: &TenantName,
        uri: &str,
        etag: Option<HeaderValue>,
    ) -> Result<JwksFetch, JwksError> {
        if let Some(name) = uri.strip_prefix("file:") {
            let folder = self
                .config_dir
                .as_ref()
                .ok_or(JwksError::NoFolder)?
                // A file is read from the tenant's own folder only.
                .join(tenant.as_str());
            let name = name.to_string();
            let read = tokio::task::spawn_blocking(move || read_inside(&folder, &name)).await;
            let body = read.map_err(|_| JwksError::File("reading failed".into()))??;
            return Ok(JwksFetch::Set {
                body: decide_set(&body)?,
                etag: None,
            });
        }
        let uri = decide_uri(uri, &self.options.hosts)?;
        let mut headers: Vec<(HeaderName, HeaderValue)> =
            vec![(ACCEPT, HeaderValue::from_static("application/json"))];
        headers.extend(etag.map(|etag| (IF_NONE_MATCH, etag)));
        let request = FetchRequest {
            method: Method::GET,
            uri: &uri,
            headers,
            body: Bytes::new(),
            bytes: JWKS_BYTES_MAX,
            time: FETCH,
        };
        let FetchResponse { status, etag, body } = self.client.send(request).await?;
        // The tenant's last set stays in use.
        if status == StatusCode::NOT_MODIFIED {
            return Ok(JwksFetch::Unchanged);
        }
        Ok(JwksFetch::Set {
            body: decide_set(&body)?,
            etag,
        })
    }
}

/// News of one tenant's key set.
#[derive(Debug)]
pub struct KeySetUpdate {
    pub tenant: TenantName,
    pub uri: String,
    /// The set, if there is a new one.
    pub set: Option<String>,
    /// Reason why it could not be fetched.
    pub fault: Option<String>,
}

/// Handles of the controller that the fetcher uses.
#[derive(Clone)]
pub struct JwksContext {
    /// Names the key sets that tenants use.
    pub catalog: watch::Receiver<Arc<Catalog>>,
    pub store: Arc<Store>,
    pub metrics: Arc<ControllerMetrics>,
    /// Takes key sets that changed.
    pub updates: mpsc::Sender<KeySetUpdate>,
}

/// Fetches key sets for as long as the controller runs. `stored` are those that the store had at
/// the start.
pub async fn follow(context: JwksContext, origin: JwksSource, stored: BTreeSet<JwksRef>) {
    let mut fetcher = Fetcher {
        context,
        origin,
        stored,
        entries: BTreeMap::new(),
        tasks: JoinSet::new(),
        running: HashMap::new(),
    };
    loop {
        fetcher.follow_catalog().await;
        tokio::select! {
            () = tokio::time::sleep(DUE_CHECK_INTERVAL) => {}
            Some(done) = fetcher.tasks.join_next_with_id() => fetcher.take_done(done).await,
        }
    }
}

type FetchResult = Result<JwksFetch, JwksError>;

/// State of the task that fetches key sets.
struct Fetcher {
    context: JwksContext,
    origin: JwksSource,
    /// Key sets that the store had at the start of the controller.
    stored: BTreeSet<JwksRef>,
    entries: BTreeMap<JwksRef, JwksEntry>,
    tasks: JoinSet<FetchResult>,
    /// Key sets that the tasks fetch.
    running: HashMap<task::Id, JwksRef>,
}

impl Fetcher {
    /// Follows the catalog: forgets key sets that no tenant needs any more, and starts the fetches
    /// that are due.
    async fn follow_catalog(&mut self) {
        let catalog = self.context.catalog.borrow().clone();
        let now = Instant::now();
        let wanted = list_key_sets(
            catalog
                .tenants
                .iter()
                .map(|(tenant, view)| (tenant, view.jwks.as_ref())),
        );
        // It is unknown which key sets a tenant needs whose sources cannot be read.
        let is_certain =
            |tenant: &TenantName| catalog.tenants.get(tenant).is_none_or(|view| view.complete);
        let gone = |key_set: &&JwksRef| !wanted.contains_key(*key_set) && is_certain(&key_set.0);
        let gone: BTreeSet<JwksRef> = self
            .entries
            .keys()
            .chain(&self.stored)
            .filter(gone)
            .cloned()
            .collect();
        for key_set in gone {
            self.entries.remove(&key_set);
            self.stored.remove(&key_set);
            self.keep(&key_set, None).await;
        }
        let mut under_way: BTreeMap<TenantName, usize> = BTreeMap::new();
        for (key_set, _) in self.entries.iter().filter(|(_, entry)| entry.under_way) {
            *under_way.entry(key_set.0.clone()).or_default() += 1;
        }
        for (key_set, is_over) in wanted {
            let has_set = self.stored.contains(&key_set);
            let fresh = || JwksEntry {
                due: now,
                etag: None,
                has_set,
                failures: 0,
                fault: None,
                under_way: false,
            };
            let entry = self.entries.entry(key_set.clone()).or_insert_with(fresh);
            let of_tenant = under_way.entry(key_set.0.clone()).or_default();
            // One tenant with slow servers must not use all fetches.
            let is_full =
                self.tasks.len() >= JWKS_FETCHES_MAX || *of_tenant >= JWKS_FETCHES_PER_TENANT_MAX;
            if entry.under_way || entry.due > now || is_full {
                continue;
            }
            entry.under_way = true;
            *of_tenant += 1;
            let (origin, etag) = (self.origin.clone(), entry.etag.clone());
            let fetched = key_set.clone();
            let task = self.tasks.spawn(async move {
                // A set beyond the tenant's limit is an error, like one that cannot be fetched.
                if is_over {
                    Err(JwksError::Uris)
                } else {
                    origin.fetch(&key_set.0, &key_set.1, etag).await
                }
            });
            self.running.insert(task.id(), fetched);
        }
    }

    /// Takes a fetch that has ended.
    async fn take_done(&mut self, done: Result<(task::Id, FetchResult), task::JoinError>) {
        let (task, fetched) = match done {
            Ok(done) => done,
            // Nothing aborts a fetch, so it panicked. It is tried again as one that failed.
            Err(panicked) => (panicked.id(), Err(JwksError::Panicked)),
        };
        if let Some(key_set) = self.running.remove(&task) {
            self.take(key_set, fetched).await;
        }
    }

    /// Records the result of a fetch, and passes it on if it is news.
    async fn take(&mut self, key_set: JwksRef, fetched: FetchResult) {
        let outcome = match &fetched {
            Ok(JwksFetch::Set { .. }) => "fetched",
            Ok(JwksFetch::Unchanged) => "unchanged",
            Err(fault) => fault.name(),
        };
        self.context.metrics.count(
            metrics::JWKS_FETCHES,
            &[("tenant", key_set.0.as_str()), ("outcome", outcome)],
        );
        let refresh = self.origin.options.refresh;
        // No tenant needs the set any more.
        let Some(entry) = self.entries.get_mut(&key_set) else {
            return;
        };
        entry.under_way = false;
        let (mut set, mut fault) = (None, None);
        match fetched {
            Ok(JwksFetch::Set { body, etag }) => {
                (entry.etag, entry.has_set) = (etag, true);
                set = Some(body);
            }
            Ok(JwksFetch::Unchanged) => {}
            Err(f) => fault = Some(f),
        }
        entry.failures = if fault.is_some() {
            entry.failures.saturating_add(1)
        } else {
            0
        };
        entry.due = Instant::now() + decide_pause(entry.has_set, entry.failures, refresh);
        let is_news = entry.fault != fault;
        if let Some(fault) = fault.as_ref().filter(|_| is_news) {
            let consequence = if entry.has_set {
                "the last good key set stays in use"
            } else {
                "tokens of its issuer are refused"
            };
            tracing::warn!(tenant = %key_set.0, uri = key_set.1, %fault, "trust: could not fetch a key set; {consequence}");
        }
        entry.fault.clone_from(&fault);
        // A repeated error changes nothing for the tenant.
        if set.is_none() && !is_news {
            return;
        }
        if let Some(set) = &set {
            self.keep(&key_set, Some(set.clone())).await;
        }
        let fault = fault.map(|f| f.to_string());
        let (tenant, uri) = key_set;
        // The receiver ends with the controller only.
        let _ = self
            .context
            .updates
            .send(KeySetUpdate {
                tenant,
                uri,
                set,
                fault,
            })
            .await;
    }

    /// Stores a key set for the next start, or deletes it if `body` is `None`. It returns when that
    /// is done, so that a later change of the same set comes later on disk too. A failure is
    /// counted; it costs refused tokens after a restart.
    async fn keep(&self, key_set: &JwksRef, body: Option<String>) {
        let context = self.context.clone();
        let (tenant, uri) = key_set.clone();
        let written = tokio::task::spawn_blocking(move || {
            if let Err(e) = context.store.put_jwks(&tenant, &uri, body.as_deref()) {
                context
                    .metrics
                    .count(metrics::STORE_ERRORS, &[("reason", e.name())]);
            }
        });
        if written.await.is_err() {
            tracing::error!("trust: storing a key set panicked, which is a bug in the controller");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A fetcher with a store of its own, and what it passes on.
    struct FetcherFixture {
        fetcher: Fetcher,
        updates: mpsc::Receiver<KeySetUpdate>,
        _folder: tempfile::TempDir,
    }

    impl FetcherFixture {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let store = Store::open(folder.path(), canal_store::StoreLimits::default()).unwrap();
            let (sender, updates) = mpsc::channel(8);
            let fetcher = Fetcher {
                context: JwksContext {
                    catalog: watch::channel(Arc::default()).1,
                    store: Arc::new(store),
                    metrics: Arc::default(),
                    updates: sender,
                },
                origin: JwksSource {
                    client: FetchClient::new(b"").unwrap(),
                    options: Arc::default(),
                    config_dir: None,
                },
                stored: BTreeSet::new(),
                entries: BTreeMap::new(),
                tasks: JoinSet::new(),
                running: HashMap::new(),
            };
            Self {
                fetcher,
                updates,
                _folder: folder,
            }
        }

        fn stored(&self) -> Vec<String> {
            let all = self.fetcher.context.store.jwks().unwrap();
            all.into_iter().map(|(.., body)| body).collect()
        }
    }

    fn key_set() -> JwksRef {
        ("alpha".parse().unwrap(), "https://id.example/keys".into())
    }

    #[tokio::test]
    async fn a_fetch_that_panics_is_tried_again_as_one_that_failed() {
        let mut fixture = FetcherFixture::new();
        let fetcher = &mut fixture.fetcher;
        let entry = JwksEntry {
            due: Instant::now(),
            etag: None,
            has_set: false,
            failures: 0,
            fault: None,
            under_way: true,
        };
        fetcher.entries.insert(key_set(), entry);
        let task = fetcher.tasks.spawn(async { panic!("a bug") });
        fetcher.running.insert(task.id(), key_set());
        let done = fetcher.tasks.join_next_with_id().await.unwrap();
        fetcher.take_done(done).await;
        let entry = &fetcher.entries[&key_set()];
        assert!(!entry.under_way && entry.failures == 1);
        assert_eq!(entry.fault, Some(JwksError::Panicked));
        let update = fixture.updates.try_recv().unwrap();
        assert!(update.set.is_none() && update.fault.unwrap().contains("panicked"));
    }

    #[tokio::test]
    async fn a_key_set_is_stored_and_deleted_in_this_order() {
        let fixture = FetcherFixture::new();
        for n in 0..50 {
            let body = format!("{{\"keys\":[{n}]}}");
            fixture.fetcher.keep(&key_set(), Some(body.clone())).await;
            assert_eq!(fixture.stored(), [body]);
            fixture.fetcher.keep(&key_set(), None).await;
            assert!(fixture.stored().is_empty());
        }
    }

    #[test]
    fn only_listed_hosts_are_fetched() {
        let hosts: Vec<AllowedHost> = ["id.example", "id.example:8443", "127.0.0.1:9", "[::1]"]
            .map(|h| h.parse().unwrap())
            .into();
        for (uri, want) in [
            ("https://id.example/keys", Ok(())),
            ("https://ID.example:443/keys", Ok(())),
            ("http://id.example/keys", Ok(())),
            ("https://id.example:8443/keys", Ok(())),
            ("http://127.0.0.1:9/", Ok(())),
            ("https://[::1]/", Ok(())),
            ("https://id.example:9/keys", Err("host_not_allowed")),
            ("https://id.example.evil/keys", Err("host_not_allowed")),
            ("https://evil/?id.example", Err("host_not_allowed")),
            ("http://127.0.0.1/", Err("host_not_allowed")),
            ("https://id.example@evil/keys", Err("uri")),
            ("ftp://id.example/keys", Err("uri")),
            ("id.example", Err("uri")),
        ] {
            assert_eq!(
                decide_uri(uri, &hosts).map(|_| ()).map_err(|f| f.name()),
                want,
                "{uri}"
            );
        }
        for bad in ["", "a b", "u@h", "h:x", "h:99999"] {
            assert!(bad.parse::<AllowedHost>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn sets() {
        for (body, want) in [
            (r#"{"keys":[]}"#, Ok(())),
            (
                r#" {"keys": [ {"kty":"RSA","n":"x","e":"AQAB"} ]} "#,
                Ok(()),
            ),
            (r#"{"keys":{}}"#, Err("form")),
            (r#"[]"#, Err("form")),
            ("x", Err("form")),
            (
                r#"{"keys":[{"kty":"RSA","n":"x","e":"AQAB","d":"secret"}]}"#,
                Err("form"),
            ),
            (r#"{"keys":[{"kty":"oct","k":"secret"}]}"#, Err("form")),
        ] {
            assert_eq!(
                decide_set(body.as_bytes())
                    .map(|_| ())
                    .map_err(|f| f.name()),
                want,
                "{body}"
            );
        }
        assert_eq!(decide_set(b"{ \"keys\":\n []}").unwrap(), r#"{"keys":[]}"#);
    }

    #[test]
    fn fetched_key_sets_of_a_tenant_are_limited() {
        let (alpha, beta) = ("alpha".parse().unwrap(), "beta".parse().unwrap());
        let many: BTreeSet<String> = (0..=JWKS_URIS_MAX)
            .map(|i| format!("file:{i:03}"))
            .collect();
        let places = list_key_sets([(&alpha, &many), (&beta, &many)].into_iter());
        let over: Vec<&str> = places
            .iter()
            .filter(|(_, over)| **over)
            .map(|((_, uri), _)| uri.as_str())
            .collect();
        assert_eq!(
            (places.len(), over),
            (2 * (JWKS_URIS_MAX + 1), vec!["file:064", "file:064"])
        );
    }

    #[test]
    fn pauses() {
        let minute = Duration::from_secs(60);
        for (had, failures, want) in [
            (true, 0, 60),
            (false, 0, 60),
            (true, 9, 60),
            (false, 1, 1),
            (false, 2, 2),
            (false, 5, 16),
            (false, 40, 60),
        ] {
            assert_eq!(
                decide_pause(had, failures, minute).as_secs(),
                want,
                "{had} {failures}"
            );
        }
    }

    #[test]
    fn files_stay_inside_the_folder() {
        let dir = tempfile::tempdir().unwrap();
        let (inside, outside) = (dir.path().join("alpha"), dir.path().join("beta"));
        for folder in [&inside, &outside, &inside.join("keys")] {
            std::fs::create_dir(folder).unwrap();
        }
        std::fs::write(outside.join("secret"), "{}").unwrap();
        std::fs::write(inside.join("keys/a.json"), "{}").unwrap();
        // One byte more than JWKS_BYTES_MAX.
        std::fs::write(inside.join("large"), vec![b' '; JWKS_BYTES_MAX + 1]).unwrap();
        let link = |target: &str, name: &str| {
            std::os::unix::fs::symlink(target, inside.join(name)).unwrap()
        };
        link("keys/a.json", "within");
        link("../beta/secret", "out");
        link("../beta", "folder");
        link(outside.join("secret").to_str().unwrap(), "absolute");
        for (name, want) in [
            ("keys/a.json", Ok(())),
            ("./keys/../keys/a.json", Ok(())),
            ("within", Ok(())),
            ("none", Err("file")),
            ("keys", Err("file")),
            ("../beta/secret", Err("file")),
            ("keys/../../beta/secret", Err("file")),
            ("out", Err("file")),
            ("folder/secret", Err("file")),
            ("absolute", Err("file")),
            ("/etc/passwd", Err("file")),
            ("large", Err("bytes")),
            ("", Err("file")),
        ] {
            assert_eq!(
                read_inside(&inside, name).map(|_| ()).map_err(|f| f.name()),
                want,
                "{name}"
            );
        }
        assert_eq!(
            read_inside(&dir.path().join("gamma"), "x")
                .unwrap_err()
                .name(),
            "no_folder"
        );
    }
}
