//! A controller in this process on loopback, and the clients that judge it: a subscriber, an operator, a requester of certificates.

#![allow(dead_code, reason = "every test file uses its own part of the rig")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use canal_hub::{Config, Hub, HubError, JwksOptions, Limits, TrustOptions};
use canal_model::program::{Kind, Manifest, Resource};
use canal_wire::api::admin_client::AdminClient;
use canal_wire::api::{self, Severity};
use canal_wire::citadel::istio_certificate_service_client::IstioCertificateServiceClient;
use canal_wire::citadel::{IstioCertificateRequest, IstioCertificateResponse};
use canal_wire::discovery::aggregated_discovery_service_client::AggregatedDiscoveryServiceClient;
use canal_wire::discovery::{DeltaDiscoveryRequest, DeltaDiscoveryResponse, Node, Status as WireStatus};
use canal_wire::southbound::{decode, kind_of, manifest, type_url};
use rcgen::{CertificateParams, DistinguishedName, KeyPair};
use sha2::{Digest, Sha256};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::MetadataValue;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tonic::{Request, Status, Streaming};

/// Longest time a test waits for something that must happen.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// A controller and its folders. Tokens are the principals' names.
pub(crate) struct Rig {
    pub(crate) hub: Option<Hub>,
    pub(crate) dir: tempfile::TempDir,
    pub(crate) config: Config,
}

pub(crate) const PRINCIPALS: [(&str, &str); 8] = [
    ("n1", "kind: node, name: n1, tenant: alpha, az: az1"),
    ("n2", "kind: node, name: n2, tenant: alpha, az: az2"),
    ("m1", "kind: node, name: m1, tenant: beta, az: az1"),
    ("g1", "kind: gateway, name: g1, az: az1"),
    ("g2", "kind: gateway, name: g2, az: az2"),
    ("root", "kind: operator, name: root"),
    ("ann", "kind: operator, name: ann, tenant: alpha"),
    ("bob", "kind: operator, name: bob, tenant: beta"),
];

impl Rig {
    /// A controller without any tenant.
    pub(crate) async fn empty() -> Self {
        Self::with(Limits::default(), |_| {}).await
    }

    /// A controller with tenants alpha and beta, each with a Tenant, a gateway, two services, and a pod per service.
    pub(crate) async fn two_tenants() -> Self {
        Self::with(Limits::default(), |config| {
            write(config, "alpha/mesh.yaml", &tenant("alpha", 1));
            write(config, "beta/mesh.yaml", &tenant("beta", 2));
        })
        .await
    }

    pub(crate) async fn with(limits: Limits, prepare: impl FnOnce(&Path)) -> Self {
        Self::tuned(limits, |config| prepare(config.config_dir.as_ref().unwrap())).await
    }

    /// A controller whose settings `tune` changes before it starts.
    pub(crate) async fn tuned(limits: Limits, tune: impl FnOnce(&mut Config)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir(at("config")).unwrap();
        write_principals(&at("principals.yaml"), &PRINCIPALS);
        let loopback = "127.0.0.1:0".parse().unwrap();
        let mut config = Config {
            listen: loopback,
            admin: Some(loopback),
            metrics: Some(loopback),
            data_dir: at("data"),
            config_dir: Some(at("config")),
            principals: at("principals.yaml"),
            infra_dir: at("infra"),
            svid_seconds: 24 * 3600,
            trust: TrustOptions::default(),
            jwks: JwksOptions::default(),
            limits,
        };
        tune(&mut config);
        let hub = Some(Hub::start(config.clone()).await.unwrap());
        Self { hub, dir, config }
    }

    pub(crate) fn hub(&self) -> &Hub {
        self.hub.as_ref().unwrap()
    }

    pub(crate) async fn stop(&mut self) {
        self.hub.take().unwrap().stop().await;
    }

    pub(crate) async fn start(&mut self) {
        self.hub = Some(self.try_start().await.unwrap());
    }

    pub(crate) async fn try_start(&self) -> Result<Hub, HubError> {
        // The writer thread holds the store a moment longer than the server.
        let until = Instant::now() + PATIENCE;
        loop {
            match Hub::start(self.config.clone()).await {
                Err(HubError::Store(e)) if e.to_string().contains("another process") && Instant::now() < until => {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                other => return other,
            }
        }
    }

    /// Writes a file of the configuration directory whole, by renaming.
    pub(crate) fn write(&self, file: &str, yaml: &str) {
        write(&self.dir.path().join("config"), file, yaml);
    }

    pub(crate) fn path(&self, file: &str) -> PathBuf {
        self.dir.path().join("config").join(file)
    }

    pub(crate) async fn channel(&self) -> Channel {
        self.channel_to(self.hub().address()).await
    }

    pub(crate) async fn channel_to(&self, address: std::net::SocketAddr) -> Channel {
        let root = std::fs::read_to_string(self.config.infra_dir.join("root.pem")).unwrap();
        let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(root)).domain_name(canal_wire::CONTROLLER_NAME);
        let endpoint = Endpoint::from_shared(format!("https://{address}")).unwrap().tls_config(tls).unwrap();
        endpoint.connect().await.unwrap()
    }

    pub(crate) async fn admin(&self, token: &'static str) -> Operator {
        Operator { client: AdminClient::new(self.channel().await), token }
    }

    pub(crate) async fn subscribe(&self, token: &'static str) -> Subscriber {
        Subscriber::open(self.channel().await, token, BTreeMap::new()).await
    }

    /// Asks for a certificate of a fresh P-256 key.
    pub(crate) async fn certificate(
        &self,
        token: &str,
        identity: Option<&str>,
        csr: Option<String>,
    ) -> Result<IstioCertificateResponse, Status> {
        self.ask(token, &[("ImpersonatedIdentity", identity)], csr).await
    }

    /// The same, with a service's host names.
    pub(crate) async fn certificate_of(
        &self,
        token: &str,
        identity: &str,
        service: Option<&str>,
        csr: Option<String>,
    ) -> Result<IstioCertificateResponse, Status> {
        self.ask(token, &[("ImpersonatedIdentity", Some(identity)), ("Service", service)], csr).await
    }

    async fn ask(&self, token: &str, fields: &[(&str, Option<&str>)], csr: Option<String>) -> Result<IstioCertificateResponse, Status> {
        let mut client = IstioCertificateServiceClient::new(self.channel().await);
        let csr = csr.unwrap_or_else(fresh_csr);
        let value = |s: &str| prost_types::Value { kind: Some(prost_types::value::Kind::StringValue(s.into())) };
        let fields = fields.iter().filter_map(|(name, text)| Some((name.to_string(), value((*text)?)))).collect();
        let metadata = Some(prost_types::Struct { fields });
        let request = IstioCertificateRequest { csr, validity_duration: 3600, metadata };
        client.create_certificate(with_token(request, token)).await.map(tonic::Response::into_inner)
    }

    pub(crate) async fn http(&self, address: std::net::SocketAddr, path: &str) -> String {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let mut tcp = tokio::net::TcpStream::connect(address).await.unwrap();
        tcp.write_all(format!("GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n").as_bytes()).await.unwrap();
        let mut text = String::new();
        tcp.read_to_string(&mut text).await.unwrap();
        text
    }

    /// What the admin socket answers.
    pub(crate) async fn ask_socket(&self, path: &str) -> String {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let socket = self.config.data_dir.join(canal_hub::ADMIN_SOCKET_NAME);
        let mut unix = tokio::net::UnixStream::connect(socket).await.unwrap();
        unix.write_all(format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").as_bytes()).await.unwrap();
        let mut text = String::new();
        unix.read_to_string(&mut text).await.unwrap();
        text
    }

    /// The value of a metric's line, 0 if it is not there.
    pub(crate) async fn metric(&self, line: &str) -> f64 {
        let text = self.http(self.hub().metrics_address().unwrap(), "/metrics").await;
        text.lines().find_map(|l| l.strip_prefix(line)?.trim().parse().ok()).unwrap_or(0.0)
    }
}

pub(crate) fn fresh_csr() -> String {
    let mut p = CertificateParams::default();
    p.distinguished_name = DistinguishedName::new();
    p.serialize_request(&KeyPair::generate().unwrap()).unwrap().pem().unwrap()
}

pub(crate) fn write_principals(path: &Path, list: &[(&str, &str)]) {
    let row = |(token, rest): &(&str, &str)| {
        let hash: String = Sha256::digest(token.as_bytes()).iter().map(|b| format!("{b:02x}")).collect();
        format!("- {{tokenSha256: {hash}, {rest}}}\n")
    };
    let beside = path.with_extension("new");
    std::fs::write(&beside, list.iter().map(row).collect::<String>()).unwrap();
    std::fs::rename(&beside, path).unwrap();
}

/// Writes a file of a configuration directory whole, by renaming. What is there when the controller starts is in force when it has started;
/// what comes later is read tenant by tenant, in any order.
pub(crate) fn write(config: &Path, file: &str, yaml: &str) {
    let path = config.join(file);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let beside = path.with_extension("new");
    std::fs::write(&beside, yaml).unwrap();
    std::fs::rename(&beside, &path).unwrap();
}

pub(crate) fn with_token<T>(message: T, token: &str) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("authorization", MetadataValue::try_from(format!("Bearer {token}")).unwrap());
    request
}

// ---- YAML ----

/// Tenant number `n` (its VNI and addresses), with gateway g<n> and services a and b.
pub(crate) fn tenant(name: &str, n: u8) -> String {
    let prefix = if name == "alpha" { "n" } else { "m" };
    [
        tenant_object(name, n),
        gateway(n, &format!("g{n}")),
        service(n, "a", 1),
        service(n, "b", 2),
        pod(n, "a-0", "a", &format!("{prefix}1"), 1, true),
        pod(n, "b-0", "b", &format!("{prefix}2"), 2, true),
    ]
    .join("---\n")
}

pub(crate) fn tenant_object(name: &str, n: u8) -> String {
    format!(
        "apiVersion: canal.mesh/v1\nkind: Tenant\nmetadata: {{name: {name}}}\nspec: {{vni: {n}, trustDomain: {name}.example, podCidrs: [10.{n}.0.0/16]}}\n"
    )
}
pub(crate) fn gateway(n: u8, replica: &str) -> String {
    format!("apiVersion: canal.mesh/v1\nkind: Gateway\nmetadata: {{name: {replica}}}\nspec: {{az: az1, addresses: [10.{n}.255.{n}]}}\n")
}
pub(crate) fn service(n: u8, name: &str, ip: u8) -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: shop}}\nspec: {{clusterIP: 10.9{n}.0.{ip}, selector: {{app: {name}}}, ports: [{{name: http, port: 80}}]}}\n"
    )
}
pub(crate) fn pod(n: u8, name: &str, app: &str, node: &str, ip: u16, ready: bool) -> String {
    let status = if ready { "True" } else { "False" };
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: shop, labels: {{app: {app}}}, annotations: {{canal.mesh/az: az1}}}}\n\
         spec: {{nodeName: {node}, serviceAccountName: {app}}}\n\
         status: {{podIPs: [{{ip: 10.{n}.{}.{}}}], conditions: [{{type: Ready, status: \"{status}\"}}]}}\n",
        ip / 250,
        ip % 250 + 1
    )
}
/// An HTTPRoute of service `parent` that splits to `backends`.
pub(crate) fn route(name: &str, parent: &str, backends: &[(&str, u32)]) -> String {
    let refs: Vec<String> = backends.iter().map(|(s, w)| format!("{{name: {s}, port: 80, weight: {w}}}")).collect();
    format!(
        "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {{name: {name}, namespace: shop}}\n\
         spec:\n  parentRefs: [{{group: \"\", kind: Service, name: {parent}}}]\n  rules:\n  - backendRefs: [{}]\n",
        refs.join(", ")
    )
}

// ---- the operator ----

pub(crate) struct Operator {
    pub(crate) client: AdminClient<Channel>,
    pub(crate) token: &'static str,
}

/// A refused or accepted wish in a few words.
pub(crate) fn errors(diagnostics: &[api::Diagnostic]) -> Vec<String> {
    diagnostics
        .iter()
        .filter(|d| d.severity() == Severity::Error)
        .map(|d| format!("{}:{} {} {}: {}", d.file, d.line, d.object, d.field, d.problem))
        .collect()
}

impl Operator {
    pub(crate) fn files(texts: &[&str]) -> Vec<api::File> {
        texts.iter().enumerate().map(|(i, t)| api::File { path: format!("f{i}.yaml"), yaml: t.to_string() }).collect()
    }

    pub(crate) async fn apply(&mut self, tenant: &str, texts: &[&str]) -> Result<api::ApplyResponse, Status> {
        let request = api::ApplyRequest { tenant: tenant.into(), files: Self::files(texts), dry_run: false };
        self.client.apply(with_token(request, self.token)).await.map(tonic::Response::into_inner)
    }

    pub(crate) async fn dry_run(&mut self, tenant: &str, texts: &[&str]) -> Result<api::ApplyResponse, Status> {
        let request = api::ApplyRequest { tenant: tenant.into(), files: Self::files(texts), dry_run: true };
        self.client.apply(with_token(request, self.token)).await.map(tonic::Response::into_inner)
    }

    pub(crate) async fn diff(&mut self, tenant: &str, texts: &[&str]) -> Result<api::DiffResponse, Status> {
        let request = api::ApplyRequest { tenant: tenant.into(), files: Self::files(texts), dry_run: false };
        self.client.diff(with_token(request, self.token)).await.map(tonic::Response::into_inner)
    }

    /// Applies what must be taken; the generation.
    pub(crate) async fn must_apply(&mut self, tenant: &str, texts: &[&str]) -> u64 {
        let done = self.apply(tenant, texts).await.unwrap();
        assert!(done.accepted, "{:?}", errors(&done.diagnostics));
        done.generation
    }

    pub(crate) async fn delete(
        &mut self,
        tenant: &str,
        objects: &[(&str, &str, &str)],
        ignore_missing: bool,
    ) -> Result<api::DeleteResponse, Status> {
        let object = |(kind, namespace, name): &(&str, &str, &str)| api::ObjectRef {
            kind: kind.to_string(),
            namespace: namespace.to_string(),
            name: name.to_string(),
        };
        let request =
            api::DeleteRequest { tenant: tenant.into(), objects: objects.iter().map(object).collect(), ignore_missing, all: false };
        self.client.delete(with_token(request, self.token)).await.map(tonic::Response::into_inner)
    }

    pub(crate) async fn delete_all(&mut self, tenant: &str) -> Result<api::DeleteResponse, Status> {
        let request = api::DeleteRequest { tenant: tenant.into(), all: true, ..api::DeleteRequest::default() };
        self.client.delete(with_token(request, self.token)).await.map(tonic::Response::into_inner)
    }

    pub(crate) async fn get(&mut self, tenant: &str, kind: &str) -> Result<Vec<api::Object>, Status> {
        let request = api::GetRequest { tenant: tenant.into(), kind: kind.into(), ..api::GetRequest::default() };
        self.client.get(with_token(request, self.token)).await.map(|r| r.into_inner().objects)
    }

    pub(crate) async fn names(&mut self, tenant: &str, kind: &str) -> Vec<String> {
        self.get(tenant, kind)
            .await
            .unwrap()
            .into_iter()
            .map(|o| format!("{} {}/{} ({})", o.kind, o.namespace, o.name, short(&o.origin)))
            .collect()
    }

    pub(crate) async fn status(&mut self) -> api::StatusResponse {
        self.client.status(with_token(api::StatusRequest {}, self.token)).await.unwrap().into_inner()
    }

    pub(crate) async fn fleet(&mut self) -> Result<api::FleetResponse, Status> {
        self.client.fleet(with_token(api::FleetRequest {}, self.token)).await.map(tonic::Response::into_inner)
    }

    pub(crate) async fn drain(&mut self, name: &str) -> Result<api::ReplicaResponse, Status> {
        let request = api::ReplicaRequest { name: name.into() };
        self.client.drain_replica(with_token(request, self.token)).await.map(tonic::Response::into_inner)
    }

    pub(crate) async fn undrain(&mut self, name: &str) -> Result<api::ReplicaResponse, Status> {
        let request = api::ReplicaRequest { name: name.into() };
        self.client.undrain_replica(with_token(request, self.token)).await.map(tonic::Response::into_inner)
    }

    pub(crate) async fn forget(&mut self, name: &str) -> Result<api::ReplicaResponse, Status> {
        let request = api::ReplicaRequest { name: name.into() };
        self.client.forget_replica(with_token(request, self.token)).await.map(tonic::Response::into_inner)
    }

    pub(crate) async fn explain(&mut self, service: &str) -> Result<api::ExplainResponse, Status> {
        let request = api::ExplainRequest { service: service.into() };
        self.client.explain_service(with_token(request, self.token)).await.map(tonic::Response::into_inner)
    }

    pub(crate) async fn subscriber(&mut self, name: &str) -> api::Subscriber {
        self.status().await.subscribers.into_iter().find(|s| s.name == name).unwrap_or_default()
    }

    /// Waits until every connected data plane has acknowledged what concerns it.
    pub(crate) async fn converged(&mut self) -> api::StatusResponse {
        let until = Instant::now() + PATIENCE;
        loop {
            let status = self.status().await;
            let mut connected = status.subscribers.iter().filter(|s| s.connected);
            if connected.all(|s| s.generation_acked >= s.generation_wanted && s.nack.is_empty()) {
                return status;
            }
            assert!(Instant::now() < until, "not converged: {:?}", status.subscribers);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

fn short(origin: &str) -> &str {
    origin.rsplit('/').next().unwrap_or(origin)
}

// ---- the subscriber ----

pub(crate) type Held = BTreeMap<(Kind, String), (String, Resource)>;

/// A data plane's end of a stream, by hand: it answers only when told.
pub(crate) struct Subscriber {
    requests: mpsc::Sender<DeltaDiscoveryRequest>,
    responses: Streaming<DeltaDiscoveryResponse>,
    pub(crate) held: Held,
    pub(crate) refuses: BTreeSet<String>,
    /// Every response as `Kind +a -b`.
    pub(crate) log: Vec<String>,
    pub(crate) generation: u64,
    /// Of the last response that said anything; a data plane counts no others.
    pub(crate) content: u64,
}

impl Subscriber {
    pub(crate) async fn open(channel: Channel, token: &str, held: Held) -> Self {
        Self::try_open(channel, token, held).await.unwrap()
    }

    pub(crate) async fn try_open(channel: Channel, token: &str, held: Held) -> Result<Self, Status> {
        let mut client = AggregatedDiscoveryServiceClient::new(channel).max_decoding_message_size(canal_wire::MESSAGE_BYTES_MAX);
        let (requests, outbound) = mpsc::channel(2 * Kind::ALL.len());
        for kind in Kind::ALL {
            let versions = held.iter().filter(|((k, _), _)| *k == kind).map(|((_, n), (v, _))| (n.clone(), v.clone())).collect();
            let node = Node { id: format!("test~{token}"), user_agent_version: "1.2.3".into(), ..Node::default() };
            let request = DeltaDiscoveryRequest {
                node: Some(node),
                type_url: type_url(kind).into(),
                initial_resource_versions: versions,
                ..DeltaDiscoveryRequest::default()
            };
            requests.send(request).await.unwrap();
        }
        let responses = client.delta_aggregated_resources(with_token(ReceiverStream::new(outbound), token)).await?.into_inner();
        Ok(Self { requests, responses, held, refuses: BTreeSet::new(), log: Vec::new(), generation: 0, content: 0 })
    }

    /// The next response, if one comes within `wait`.
    pub(crate) async fn next(&mut self, wait: Duration) -> Option<DeltaDiscoveryResponse> {
        match tokio::time::timeout(wait, self.responses.message()).await {
            Ok(Ok(response)) => Some(response.expect("the stream ended")),
            Ok(Err(status)) => panic!("the stream ended: {status}"),
            Err(_) => None,
        }
    }

    /// Why the stream ended; what still came before is dropped.
    pub(crate) async fn end(&mut self) -> Status {
        let ended = async {
            loop {
                match self.responses.message().await {
                    Ok(Some(_)) => {}
                    Ok(None) => return Status::ok("ended"),
                    Err(status) => return status,
                }
            }
        };
        tokio::time::timeout(PATIENCE, ended).await.expect("the stream did not end")
    }

    /// Keeps or refuses a response and answers it.
    pub(crate) async fn answer(&mut self, response: DeltaDiscoveryResponse) {
        let kind = kind_of(&response.type_url).unwrap();
        let names = response.resources.iter().map(|r| format!("+{}", r.name));
        let gone = response.removed_resources.iter().map(|n| format!("-{n}"));
        if kind != Kind::Manifest {
            self.log.push(format!("{kind:?} {}", names.chain(gone).collect::<Vec<_>>().join(" ")).trim().to_string());
        }
        let refused = response.resources.iter().find(|r| self.refuses.contains(&r.name)).map(|r| r.name.clone());
        let error_detail = refused.map(|name| WireStatus { code: 3, message: format!("{name} is not good"), ..WireStatus::default() });
        if error_detail.is_none() {
            let generation = response.system_version_info.parse().unwrap();
            assert!(generation >= self.generation, "the generation went back from {} to {generation}", self.generation);
            self.generation = generation;
            if !response.resources.is_empty() || !response.removed_resources.is_empty() {
                self.content = generation;
            }
            for r in response.resources {
                let resource = decode(kind, &r.name, &r.resource.unwrap().value).unwrap();
                if let Resource::Manifest(wanted) = &resource {
                    self.compare(wanted);
                    continue;
                }
                self.held.insert((kind, r.name), (r.version, resource));
            }
            for name in response.removed_resources.into_iter().filter(|_| kind != Kind::Manifest) {
                assert!(self.held.remove(&(kind, name.clone())).is_some(), "{name} was removed and is not held");
            }
        }
        let request = DeltaDiscoveryRequest {
            type_url: response.type_url,
            response_nonce: response.nonce,
            error_detail,
            ..DeltaDiscoveryRequest::default()
        };
        // A stream that has ended says so at the next read.
        let _ = self.requests.send(request).await;
    }

    /// A manifest seals what was told before it: nothing is missing, unless it was refused.
    fn compare(&self, wanted: &Manifest) {
        let own = self.held.iter().filter(|((kind, _), (_, r))| kind.is_security() && r.tenant() == Some(&wanted.tenant));
        let held = manifest::compute(&wanted.tenant, own.map(|((kind, name), (version, _))| (*kind, name.as_str(), version.as_str())));
        assert!(held == *wanted || !self.refuses.is_empty(), "holds {held:?} where the manifest says {wanted:?}");
    }

    /// Takes and answers everything until nothing comes for `quiet`; what came.
    pub(crate) async fn drain(&mut self, quiet: Duration) -> Vec<String> {
        self.log.clear();
        while let Some(response) = self.next(quiet).await {
            self.answer(response).await;
        }
        std::mem::take(&mut self.log)
    }

    pub(crate) async fn settle(&mut self) -> Vec<String> {
        self.drain(Duration::from_millis(150)).await
    }

    /// Takes and answers until `done` holds.
    pub(crate) async fn until(&mut self, what: &str, done: impl Fn(&Held) -> bool) {
        let until = Instant::now() + PATIENCE;
        while !done(&self.held) {
            let left = until.saturating_duration_since(Instant::now());
            let response = self.next(left).await.unwrap_or_else(|| panic!("{what} did not come"));
            self.answer(response).await;
        }
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.held.keys().map(|(k, n)| format!("{k:?} {n}")).collect()
    }

    pub(crate) fn has(&self, kind: Kind, name: &str) -> bool {
        self.held.contains_key(&(kind, name.to_string()))
    }
}
