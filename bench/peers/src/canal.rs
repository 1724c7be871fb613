//! A build of Canal, and the configuration that benches give its gateway: tenants with one origin,
//! services with prefix routes, optionally policies. A gateway cannot read the state file of
//! another build, so each build compiles its own.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use crate::origin;
use crate::process::{PROXY_CORE, PinnedProcess};

/// Keys of the issuer of [`TOKEN`]. The private key does not exist any more, so that nothing else
/// can be signed with it.
pub const JWKS: &str = r#"{"keys":[{"kty":"EC","crv":"P-256","kid":"bench","alg":"ES256","use":"sig","x":"XbWKhgPith9bgltTrDmV4ig9W0dlmblAuvW-QWySUPw","y":"SRYx_l08c-Ht2baU3ddoLa20E34AeLe6l68u9DLvxNI"}]}"#;
/// A JSON Web Token of `https://bench.example` for the audience `bench`, valid until 2100.
pub const TOKEN: &str = concat!(
    "eyJhbGciOiJFUzI1NiIsImtpZCI6ImJlbmNoIiwidHlwIjoiSldUIn0.",
    "eyJpc3MiOiJodHRwczovL2JlbmNoLmV4YW1wbGUiLCJzdWIiOiJsb2FkIiwiYXVkIjoiYmVuY2giLCJleHAiOjQxMDI0NDQ4MDB9.",
    "GXfmkM1Eg3VyoBVkH76Jb1dOQIb5t4l5eYEdFu-iJ09afkKG27mFV6ZdpzUJ7sMr8Jvurh88jE6gM-H8nW1mZA"
);

/// Port on which a gateway reports whether it is ready.
/// Ports of this bench begin at 18,081; each program has one of its own.
pub const READINESS_PORT: u16 = 18_088;

/// A folder with the programs of one build.
#[derive(Debug, Clone)]
pub struct Build {
    folder: PathBuf,
}

/// A listener without TLS, and the tenant to whose service it leads.
#[derive(Debug, Clone)]
pub struct BenchListener {
    pub address: SocketAddr,
    pub tenant: String,
}

impl Build {
    /// Finds the programs in `folder`, which is a checkout's `target/release`.
    pub fn at(folder: &Path) -> anyhow::Result<Self> {
        for program in ["canal", "canal-gateway"] {
            let path = folder.join(program);
            anyhow::ensure!(
                path.exists(),
                "{} is missing; fix: build it with `cargo build --release -p {program}`",
                path.display()
            );
        }
        Ok(Self {
            folder: folder.to_owned(),
        })
    }

    fn program(&self, name: &str) -> String {
        self.folder.join(name).to_string_lossy().into_owned()
    }

    /// Compiles a folder of tenants into the file `snapshot`.
    pub fn compile(&self, config: &Path, snapshot: &Path) -> anyhow::Result<()> {
        let words = [
            "compile",
            &config.to_string_lossy(),
            "--snapshot",
            &snapshot.to_string_lossy(),
        ]
        .map(str::to_owned);
        let out = std::process::Command::new(self.program("canal"))
            .args(words)
            .output()?;
        anyhow::ensure!(
            out.status.success(),
            "canal compile failed: {}",
            String::from_utf8_lossy(&out.stderr)
        );
        Ok(())
    }

    /// Returns the command line of a gateway with one worker that serves service `s0` of each
    /// listener's tenant, without an access log.
    pub fn gateway(
        &self,
        snapshot: &Path,
        data: &Path,
        listeners: &[BenchListener],
    ) -> Vec<String> {
        self.gateway_fed(
            &[
                "--snapshot",
                &snapshot.to_string_lossy(),
                "--access-log",
                "off",
            ],
            data,
            listeners,
        )
    }

    /// Returns such a command line with flags for the source of its configuration and the
    /// destination of its access log.
    pub fn gateway_fed(
        &self,
        feed: &[&str],
        data: &Path,
        listeners: &[BenchListener],
    ) -> Vec<String> {
        let words = format!(
            "--replica bench --az az1 --workers 1 --drain-seconds 1 --admin-addr 127.0.0.1:18086 --metrics-addr 127.0.0.1:18087 \
             --readiness-addr 127.0.0.1:{READINESS_PORT}"
        );
        let mut argv = vec![self.program("canal-gateway")];
        argv.extend(
            words
                .split_whitespace()
                .chain(feed.iter().copied())
                .map(str::to_owned),
        );
        argv.extend(["--data-dir".to_owned(), data.to_string_lossy().into_owned()]);
        for listener in listeners {
            argv.extend([
                "--plain".to_owned(),
                format!("{}={}/default/s0:80", listener.address, listener.tenant),
            ]);
        }
        argv
    }

    /// Returns the command line of a controller, without its flags.
    pub fn controller(&self) -> anyhow::Result<String> {
        let path = self.folder.join("canal-controller");
        anyhow::ensure!(
            path.exists(),
            "{} is missing; fix: build it with `cargo build --release -p canal-controller`",
            path.display()
        );
        Ok(path.to_string_lossy().into_owned())
    }

    /// Starts such a gateway on the proxy's core.
    pub fn start(
        &self,
        dir: &Path,
        snapshot: &Path,
        listeners: &[BenchListener],
    ) -> anyhow::Result<PinnedProcess> {
        // Listeners open in order, so when the last one is open all are.
        let Some(last) = listeners.last() else {
            anyhow::bail!("a gateway needs a listener")
        };
        let argv = self.gateway(
            snapshot,
            &dir.join(format!("data-{}", last.address.port())),
            listeners,
        );
        let argv: Vec<&str> = argv.iter().map(String::as_str).collect();
        PinnedProcess::start(&argv, PROXY_CORE, last.address, &dir.join("canal.log"))
    }
}

/// Returns a tenant whose only pod is the origin, with an address of its own. `number` is 1 to 255;
/// `shares` is part of its `spec`.
pub fn tenant(name: &str, number: u8, shares: &str) -> String {
    let (ip, port) = (origin::address(number), origin::PORT);
    // The first tenant has a range for very many services: no other tenant uses the rest of
    // 10.64.0.0/12.
    let services = if number == 1 {
        "10.64.0.0/12".to_owned()
    } else {
        format!("10.100.{number}.0/24")
    };
    format!(
        "apiVersion: canal.mesh/v1\nkind: Tenant\nmetadata: {{name: {name}}}\nspec: {{vni: {number}, trustDomain: {name}.example, podCidrs: [10.99.{number}.0/24], \
         serviceCidrs: [{services}], {shares}}}\n---\n\
         apiVersion: v1\nkind: Pod\nmetadata: {{name: origin, namespace: default, labels: {{app: origin}}, annotations: {{canal.mesh/tunnel: none, canal.mesh/az: az1}}}}\n\
         spec: {{nodeName: n1, serviceAccountName: origin, containers: [{{name: c, ports: [{{containerPort: {port}}}]}}]}}\n\
         status: {{podIP: {ip}, podIPs: [{{ip: {ip}}}], conditions: [{{type: Ready, status: \"True\"}}]}}\n"
    )
}

/// Returns service `number` of the first tenant in front of the origin, with a route for each
/// prefix.
pub fn service(number: usize, prefixes: impl IntoIterator<Item = String>) -> String {
    service_at(&service_address(number), number, prefixes)
}

/// Returns the address of service `number` of the first tenant.
pub fn service_address(number: usize) -> String {
    format!(
        "10.{}.{}.{}",
        // 10.64.0.0 and above: no origin has such an address.
        64 + (number >> 16),
        (number >> 8) & 255,
        number & 255
    )
}

/// Returns service `s0` of any other tenant.
pub fn only_service(tenant: u8, prefix: &str) -> String {
    service_at(&format!("10.100.{tenant}.1"), 0, [prefix.to_owned()])
}

fn service_at(ip: &str, n: usize, prefixes: impl IntoIterator<Item = String>) -> String {
    let port = origin::PORT;
    let mut out = format!(
        "---\napiVersion: v1\nkind: Service\nmetadata: {{name: s{n}, namespace: default}}\nspec:\n  clusterIP: {ip}\n  selector: {{app: origin}}\n  \
         ports: [{{name: http, port: 80, targetPort: {port}}}]\n---\napiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {{name: s{n}, namespace: default}}\nspec:\n  \
         parentRefs: [{{kind: Service, group: \"\", name: s{n}, port: 80}}]\n  rules:\n"
    );
    for prefix in prefixes {
        let _ = writeln!(
            out,
            "  - matches: [{{path: {{type: PathPrefix, value: {prefix}}}}}]\n    backendRefs: [{{name: s{n}, port: 80}}]"
        );
    }
    out
}

/// Returns policies for service `s0`: a token is required and checked, one kind of path is allowed,
/// another one is denied.
pub fn policies() -> String {
    let head = |kind: &str, name: &str| {
        format!(
            "---\napiVersion: security.istio.io/v1\nkind: {kind}\nmetadata: {{name: {name}, namespace: default}}\nspec:\n  targetRefs: [{{kind: Service, group: \"\", name: s0}}]\n"
        )
    };
    format!(
        "{}  jwtRules: [{{issuer: \"https://bench.example\", audiences: [bench], jwks: '{JWKS}'}}]\n\
         {}  action: DENY\n  rules: [{{to: [{{operation: {{paths: [\"/items/secret*\", \"/admin/*\"]}}}}]}}]\n\
         {}  action: ALLOW\n  rules: [{{from: [{{source: {{requestPrincipals: [\"https://bench.example/*\"]}}}}], \
         to: [{{operation: {{methods: [GET], paths: [\"/items/{{*}}\"]}}}}]}}]\n",
        head("RequestAuthentication", "tokens"),
        head("AuthorizationPolicy", "closed"),
        head("AuthorizationPolicy", "readers"),
    )
}
