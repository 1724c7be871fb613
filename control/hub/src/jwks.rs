//! Key sets for JWTs (RFC 7517) that tenants name by URI: fetched here, and given to the writer when they change. A tenant must not make the
//! controller call arbitrary places, so hosts are on a list of the provider's. What was last good stays, also across restarts.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use canal_model::ids::TenantName;
use http::header::{ACCEPT, HeaderName, HeaderValue, IF_NONE_MATCH};
use http::{Method, StatusCode, Uri};
use hyper::body::Bytes;
use rustix::fs::{Mode, OFlags, ResolveFlags};
use serde_json::Value;
use tokio::task::JoinSet;

use crate::fetch::{Ask, Client, FetchFault, Fetched, place};
use crate::metrics;
use crate::shared::Shared;

/// Bytes of a key set.
pub const JWKS_BYTES_MAX: usize = 256 << 10;
/// URIs of one tenant that are fetched; those after them, by name, are refused.
pub const JWKS_URIS_MAX: usize = 64;
/// Fetches under way.
pub const JWKS_FETCHES_MAX: usize = 16;
/// Of these for one tenant, so that slow issuers of one hold up no other.
pub const JWKS_FETCHES_PER_TENANT_MAX: usize = 4;
/// For one fetch.
const FETCH: Duration = Duration::from_secs(5);
/// After the first failure of a set that was never had; doubled up to the interval.
const RETRY: Duration = Duration::from_secs(1);
/// How often it is looked at what is due.
const LOOK: Duration = Duration::from_millis(250);

/// How key sets are fetched.
#[derive(Debug, Clone)]
pub struct JwksOptions {
    /// Who may be asked.
    pub hosts: Vec<AllowedHost>,
    /// How often a set is fetched again.
    pub refresh: Duration,
}

impl Default for JwksOptions {
    fn default() -> Self {
        Self { hosts: Vec::new(), refresh: Duration::from_secs(60) }
    }
}

/// A host that may be asked, as a flag says it: `host[:port]`. Without a port it is that of the scheme.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllowedHost {
    host: String,
    port: Option<u16>,
}

impl std::str::FromStr for AllowedHost {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        let authority: http::uri::Authority = s.parse().map_err(|_| format!("{s:?} is no host; write host or host:port"))?;
        let port = match s.rsplit_once(':') {
            Some((_, port)) if !s.ends_with(']') => Some(port.parse().map_err(|_| format!("{port:?} is no port"))?),
            _ => None,
        };
        if authority.host().is_empty() || s.contains('@') {
            return Err(format!("{s:?} is no host; write host or host:port"));
        }
        Ok(Self { host: authority.host().to_ascii_lowercase(), port })
    }
}

impl AllowedHost {
    fn allows(&self, uri: &Uri) -> bool {
        let default = if uri.scheme_str() == Some("https") { 443 } else { 80 };
        place(uri).is_some_and(|(host, port)| host.eq_ignore_ascii_case(&self.host) && port == self.port.unwrap_or(default))
    }
}

/// Why a key set is not had. The name is a counter's label.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum JwksFault {
    #[error("the controller may not ask {0}; the provider adds it to --jwks-hosts, or write the keys into jwks")]
    Host(String),
    #[error("{JWKS_URIS_MAX} key sets of a tenant are fetched and this is one more; write some into jwks")]
    Uris,
    #[error("the tenant has no source folder, so no file: of it; write the keys into jwks")]
    NoFolder,
    #[error("the file cannot be read: {0}; name a file inside the tenant's source folder, as in file:keys/issuer.json")]
    File(String),
    #[error("it is no key set: {0}; RFC 7517 asks for an object with an array `keys`")]
    Form(String),
    #[error("{0}")]
    Fetch(#[from] FetchFault),
}

impl JwksFault {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Host(_) => "host_not_allowed",
            Self::Uris => "uris",
            Self::NoFolder => "no_folder",
            Self::File(_) => "file",
            Self::Form(_) => "form",
            Self::Fetch(fault) => fault.name(),
        }
    }
}

/// What a fetch brought.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Brought {
    Set { body: String, etag: Option<HeaderValue> },
    Unchanged,
}

/// One key set of one tenant.
pub(crate) type Place = (TenantName, String);

/// What is known of a place.
struct Known {
    due: Instant,
    etag: Option<HeaderValue>,
    had: bool,
    failures: u32,
    fault: Option<JwksFault>,
    under_way: bool,
}

/// When a place is looked at again.
fn decide_pause(had: bool, failures: u32, refresh: Duration) -> Duration {
    match failures {
        0 => refresh,
        _ if had => refresh,
        n => RETRY.saturating_mul(1 << (n - 1).min(16)).min(refresh),
    }
}

/// All places, and whether each is one too many of its tenant's.
fn decide_places<'a>(tenants: impl Iterator<Item = (&'a TenantName, &'a BTreeSet<String>)>) -> BTreeMap<Place, bool> {
    let of = |(tenant, uris): (&'a TenantName, &'a BTreeSet<String>)| {
        uris.iter().enumerate().map(move |(nth, uri)| ((tenant.clone(), uri.clone()), nth >= JWKS_URIS_MAX))
    };
    tenants.flat_map(of).collect()
}

/// Whether a URI may be asked at all.
fn decide_uri(uri: &str, hosts: &[AllowedHost]) -> Result<Uri, JwksFault> {
    let parsed: Uri = uri.parse().map_err(|_| FetchFault::Uri(uri.into()))?;
    let (host, port) = place(&parsed).ok_or_else(|| FetchFault::Uri(uri.into()))?;
    if hosts.iter().any(|h| h.allows(&parsed)) { Ok(parsed) } else { Err(JwksFault::Host(format!("{host}:{port}"))) }
}

/// A body that may go to data planes.
fn decide_set(body: &[u8]) -> Result<String, JwksFault> {
    let form = |why: String| JwksFault::Form(why);
    let set: Value = serde_json::from_slice(body).map_err(|e| form(e.to_string()))?;
    if !set["keys"].is_array() {
        return Err(form("it has no array `keys`".into()));
    }
    // A private key in a set is a mistake that must not be handed around.
    let is_private = |key: &Value| ["d", "p", "q", "dp", "dq", "qi", "k"].iter().any(|part| key.get(part).is_some());
    if set["keys"].as_array().into_iter().flatten().any(is_private) {
        return Err(form("it holds a private or symmetric key".into()));
    }
    // As one line: the same set has the same bytes whatever its white space.
    Ok(set.to_string())
}

/// Reads a file inside a folder; links and `..` do not lead out.
fn read_inside(folder: &Path, name: &str) -> Result<Vec<u8>, JwksFault> {
    use std::io::Read;
    let file = |e: std::io::Error| JwksFault::File(e.to_string());
    let root = std::fs::File::open(folder).map_err(|_| JwksFault::NoFolder)?;
    let inside = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let opened: OwnedFd = rustix::fs::openat2(&root, name, flags, Mode::empty(), inside).map_err(|e| file(e.into()))?;
    let opened = std::fs::File::from(opened);
    if !opened.metadata().map_err(file)?.is_file() {
        return Err(JwksFault::File("it is no plain file".into()));
    }
    let mut body = Vec::new();
    opened.take(JWKS_BYTES_MAX as u64 + 1).read_to_end(&mut body).map_err(file)?;
    if body.len() > JWKS_BYTES_MAX {
        return Err(FetchFault::Bytes(JWKS_BYTES_MAX).into());
    }
    Ok(body)
}

/// Where key sets come from.
#[derive(Clone)]
pub(crate) struct Origin {
    pub(crate) client: Client,
    pub(crate) options: Arc<JwksOptions>,
    /// One folder per tenant.
    pub(crate) config_dir: Option<Arc<PathBuf>>,
}

impl Origin {
    async fn bring(&self, tenant: &TenantName, uri: &str, etag: Option<HeaderValue>) -> Result<Brought, JwksFault> {
        if let Some(name) = uri.strip_prefix("file:") {
            let folder = self.config_dir.as_ref().ok_or(JwksFault::NoFolder)?.join(tenant.as_str());
            let name = name.to_string();
            let read = tokio::task::spawn_blocking(move || read_inside(&folder, &name)).await;
            let body = read.map_err(|_| JwksFault::File("the reading failed".into()))??;
            return Ok(Brought::Set { body: decide_set(&body)?, etag: None });
        }
        let uri = decide_uri(uri, &self.options.hosts)?;
        let mut headers: Vec<(HeaderName, HeaderValue)> = vec![(ACCEPT, HeaderValue::from_static("application/json"))];
        headers.extend(etag.map(|etag| (IF_NONE_MATCH, etag)));
        let ask = Ask { method: Method::GET, uri: &uri, headers, body: Bytes::new(), bytes: JWKS_BYTES_MAX, time: FETCH };
        let Fetched { status, etag, body } = self.client.send(ask).await?;
        if status == StatusCode::NOT_MODIFIED {
            return Ok(Brought::Unchanged);
        }
        Ok(Brought::Set { body: decide_set(&body)?, etag })
    }
}

/// Fetches for as long as the controller runs.
pub(crate) async fn follow(shared: Arc<Shared>, origin: Origin, had: BTreeSet<Place>) {
    let mut fetcher = Fetcher { shared, origin, had, known: BTreeMap::new(), tasks: JoinSet::new() };
    loop {
        fetcher.look();
        tokio::select! {
            () = tokio::time::sleep(LOOK) => {}
            Some(done) = fetcher.tasks.join_next() => match done {
                Ok((place, brought)) => fetcher.take(place, brought).await,
                Err(_) => tracing::error!("a fetch failed, which is a fault of the controller"),
            },
        }
    }
}

struct Fetcher {
    shared: Arc<Shared>,
    origin: Origin,
    /// Kept from before this start.
    had: BTreeSet<Place>,
    known: BTreeMap<Place, Known>,
    tasks: JoinSet<(Place, Result<Brought, JwksFault>)>,
}

impl Fetcher {
    /// Follows the catalog, and begins what is due.
    fn look(&mut self) {
        let catalog = self.shared.catalog.borrow().clone();
        let now = Instant::now();
        let wanted = decide_places(catalog.tenants.iter().map(|(tenant, view)| (tenant, view.jwks.as_ref())));
        // What a tenant wants whose sources cannot be read is not known.
        let is_certain = |tenant: &TenantName| catalog.tenants.get(tenant).is_none_or(|view| view.complete);
        let gone = |place: &&Place| !wanted.contains_key(*place) && is_certain(&place.0);
        let gone: BTreeSet<Place> = self.known.keys().chain(&self.had).filter(gone).cloned().collect();
        for place in gone {
            self.known.remove(&place);
            self.had.remove(&place);
            self.keep(&place, None);
        }
        let mut under_way: BTreeMap<TenantName, usize> = BTreeMap::new();
        for (place, _) in self.known.iter().filter(|(_, known)| known.under_way) {
            *under_way.entry(place.0.clone()).or_default() += 1;
        }
        for (place, is_over) in wanted {
            let had = self.had.contains(&place);
            let fresh = || Known { due: now, etag: None, had, failures: 0, fault: None, under_way: false };
            let known = self.known.entry(place.clone()).or_insert_with(fresh);
            let of_tenant = under_way.entry(place.0.clone()).or_default();
            let is_full = self.tasks.len() >= JWKS_FETCHES_MAX || *of_tenant >= JWKS_FETCHES_PER_TENANT_MAX;
            if known.under_way || known.due > now || is_full {
                continue;
            }
            known.under_way = true;
            *of_tenant += 1;
            let (origin, etag) = (self.origin.clone(), known.etag.clone());
            self.tasks.spawn(async move {
                let brought = if is_over { Err(JwksFault::Uris) } else { origin.bring(&place.0, &place.1, etag).await };
                (place, brought)
            });
        }
    }

    async fn take(&mut self, place: Place, brought: Result<Brought, JwksFault>) {
        let outcome = match &brought {
            Ok(Brought::Set { .. }) => "fetched",
            Ok(Brought::Unchanged) => "unchanged",
            Err(fault) => fault.name(),
        };
        self.shared.metrics.count(metrics::JWKS_FETCHES, &[("tenant", place.0.as_str()), ("outcome", outcome)]);
        let refresh = self.origin.options.refresh;
        let Some(known) = self.known.get_mut(&place) else { return };
        known.under_way = false;
        let (mut set, mut fault) = (None, None);
        match brought {
            Ok(Brought::Set { body, etag }) => {
                (known.etag, known.had) = (etag, true);
                set = Some(body);
            }
            Ok(Brought::Unchanged) => {}
            Err(f) => fault = Some(f),
        }
        known.failures = if fault.is_some() { known.failures.saturating_add(1) } else { 0 };
        known.due = Instant::now() + decide_pause(known.had, known.failures, refresh);
        let is_news = known.fault != fault;
        if let Some(fault) = fault.as_ref().filter(|_| is_news) {
            let kept = if known.had { "the last good one stays" } else { "tokens of its issuer are refused" };
            tracing::warn!(tenant = %place.0, uri = place.1, %fault, "a key set is not had; {kept}");
        }
        known.fault.clone_from(&fault);
        if set.is_none() && !is_news {
            return;
        }
        if let Some(set) = &set {
            self.keep(&place, Some(set.clone()));
        }
        let fault = fault.map(|f| f.to_string());
        let (changes, (tenant, uri)) = (self.shared.changes.clone(), place);
        // One tenant's turn must not hold up the key sets of others.
        tokio::spawn(async move { changes.take_key_set(&tenant, uri, set, fault).await });
    }

    /// For the next start; that it fails costs a refused token then, and is counted.
    fn keep(&self, place: &Place, body: Option<String>) {
        let (shared, (tenant, uri)) = (self.shared.clone(), place.clone());
        tokio::task::spawn_blocking(move || {
            if let Err(e) = shared.store.put_jwks(&tenant, &uri, body.as_deref()) {
                shared.metrics.count(metrics::STORE_ERRORS, &[("reason", e.name())]);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_that_may_be_asked() {
        let hosts: Vec<AllowedHost> = ["id.example", "id.example:8443", "127.0.0.1:9", "[::1]"].map(|h| h.parse().unwrap()).into();
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
            assert_eq!(decide_uri(uri, &hosts).map(|_| ()).map_err(|f| f.name()), want, "{uri}");
        }
        for bad in ["", "a b", "u@h", "h:x", "h:99999"] {
            assert!(bad.parse::<AllowedHost>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn sets() {
        for (body, want) in [
            (r#"{"keys":[]}"#, Ok(())),
            (r#" {"keys": [ {"kty":"RSA","n":"x","e":"AQAB"} ]} "#, Ok(())),
            (r#"{"keys":{}}"#, Err("form")),
            (r#"[]"#, Err("form")),
            ("x", Err("form")),
            (r#"{"keys":[{"kty":"RSA","n":"x","e":"AQAB","d":"secret"}]}"#, Err("form")),
            (r#"{"keys":[{"kty":"oct","k":"secret"}]}"#, Err("form")),
        ] {
            assert_eq!(decide_set(body.as_bytes()).map(|_| ()).map_err(|f| f.name()), want, "{body}");
        }
        assert_eq!(decide_set(b"{ \"keys\":\n []}").unwrap(), r#"{"keys":[]}"#);
    }

    #[test]
    fn places_of_a_tenant_are_so_many_at_most() {
        let (alpha, beta) = ("alpha".parse().unwrap(), "beta".parse().unwrap());
        let many: BTreeSet<String> = (0..=JWKS_URIS_MAX).map(|i| format!("file:{i:03}")).collect();
        let places = decide_places([(&alpha, &many), (&beta, &many)].into_iter());
        let over: Vec<&str> = places.iter().filter(|(_, over)| **over).map(|((_, uri), _)| uri.as_str()).collect();
        assert_eq!((places.len(), over), (2 * (JWKS_URIS_MAX + 1), vec!["file:064", "file:064"]));
    }

    #[test]
    fn pauses() {
        let minute = Duration::from_secs(60);
        for (had, failures, want) in
            [(true, 0, 60), (false, 0, 60), (true, 9, 60), (false, 1, 1), (false, 2, 2), (false, 5, 16), (false, 40, 60)]
        {
            assert_eq!(decide_pause(had, failures, minute).as_secs(), want, "{had} {failures}");
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
        std::fs::write(inside.join("large"), vec![b' '; JWKS_BYTES_MAX + 1]).unwrap();
        let link = |target: &str, name: &str| std::os::unix::fs::symlink(target, inside.join(name)).unwrap();
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
            assert_eq!(read_inside(&inside, name).map(|_| ()).map_err(|f| f.name()), want, "{name}");
        }
        assert_eq!(read_inside(&dir.path().join("gamma"), "x").unwrap_err().name(), "no_folder");
    }
}
