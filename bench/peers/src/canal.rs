//! A build of Canal, and the configuration that benches give its gateway: tenants with one origin, services with prefix routes, optionally
//! policies. One build's snapshot is not read by another's gateway, so that each compiles its own.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use crate::origin;
use crate::process::{PROXY_CORE, Process};

/// Who signed [`TOKEN`]. The private key is nowhere: nothing else is to be signed with it.
const JWKS: &str = r#"{"keys":[{"kty":"EC","crv":"P-256","kid":"bench","alg":"ES256","use":"sig","x":"XbWKhgPith9bgltTrDmV4ig9W0dlmblAuvW-QWySUPw","y":"SRYx_l08c-Ht2baU3ddoLa20E34AeLe6l68u9DLvxNI"}]}"#;
/// A JSON Web Token of `https://bench.example` for the audience `bench`, valid until 2100.
pub const TOKEN: &str = concat!(
    "eyJhbGciOiJFUzI1NiIsImtpZCI6ImJlbmNoIiwidHlwIjoiSldUIn0.",
    "eyJpc3MiOiJodHRwczovL2JlbmNoLmV4YW1wbGUiLCJzdWIiOiJsb2FkIiwiYXVkIjoiYmVuY2giLCJleHAiOjQxMDI0NDQ4MDB9.",
    "GXfmkM1Eg3VyoBVkH76Jb1dOQIb5t4l5eYEdFu-iJ09afkKG27mFV6ZdpzUJ7sMr8Jvurh88jE6gM-H8nW1mZA"
);

/// A folder with the programs of one build.
#[derive(Debug, Clone)]
pub struct Build {
    folder: PathBuf,
}

/// A listener without TLS, and the service of which tenant it leads to.
#[derive(Debug, Clone)]
pub struct Door {
    pub address: SocketAddr,
    pub tenant: String,
}

impl Build {
    /// The programs in `folder`, which is a checkout's `target/release`.
    pub fn at(folder: &Path) -> anyhow::Result<Self> {
        for program in ["canal", "canal-gateway"] {
            let path = folder.join(program);
            anyhow::ensure!(path.exists(), "{} is missing: build it with `cargo build --release -p {program}`", path.display());
        }
        Ok(Self { folder: folder.to_owned() })
    }

    fn program(&self, name: &str) -> String {
        self.folder.join(name).to_string_lossy().into_owned()
    }

    /// Compiles a folder of tenants into the file `snapshot`.
    pub fn compile(&self, config: &Path, snapshot: &Path) -> anyhow::Result<()> {
        let words = ["compile", &config.to_string_lossy(), "--snapshot", &snapshot.to_string_lossy()].map(str::to_owned);
        let out = std::process::Command::new(self.program("canal")).args(words).output()?;
        anyhow::ensure!(out.status.success(), "canal compile failed: {}", String::from_utf8_lossy(&out.stderr));
        Ok(())
    }

    /// The command line of a gateway with one worker that serves service `s0` of each door's tenant.
    pub fn gateway(&self, snapshot: &Path, data: &Path, doors: &[Door]) -> Vec<String> {
        let words = "--replica bench --az az1 --workers 1 --drain-seconds 1 --access-log off --admin-addr 127.0.0.1:18086 \
                     --metrics-addr 127.0.0.1:18087 --readiness-addr 127.0.0.1:18088";
        let mut argv = vec![self.program("canal-gateway")];
        argv.extend(words.split_whitespace().map(str::to_owned));
        for (flag, path) in [("--data-dir", data), ("--snapshot", snapshot)] {
            argv.extend([flag.to_owned(), path.to_string_lossy().into_owned()]);
        }
        for door in doors {
            argv.extend(["--plain".to_owned(), format!("{}={}/default/s0:80", door.address, door.tenant)]);
        }
        argv
    }

    /// Starts such a gateway on the proxy's core.
    pub fn start(&self, dir: &Path, snapshot: &Path, doors: &[Door]) -> anyhow::Result<Process> {
        // Doors are opened in order: the last one is open when all are.
        let Some(last) = doors.last() else { anyhow::bail!("a gateway without a door serves nobody") };
        let argv = self.gateway(snapshot, &dir.join(format!("data-{}", last.address.port())), doors);
        let argv: Vec<&str> = argv.iter().map(String::as_str).collect();
        Process::start(&argv, PROXY_CORE, last.address, &dir.join("canal.log"))
    }
}

/// A tenant whose only pod is the origin, by an address of the tenant's own; `number` is 1 to 255, `shares` stands in its `spec`.
pub fn tenant(name: &str, number: u8, shares: &str) -> String {
    let (ip, port) = (origin::address(number), origin::PORT);
    // The first tenant has room for very many services: the rest of 10.64.0.0/12 is no other tenant's.
    let services = if number == 1 { "10.64.0.0/12".to_owned() } else { format!("10.100.{number}.0/24") };
    format!(
        "apiVersion: canal.mesh/v1\nkind: Tenant\nmetadata: {{name: {name}}}\nspec: {{vni: {number}, trustDomain: {name}.example, podCidrs: [{ip}/32], \
         serviceCidrs: [{services}], {shares}}}\n---\n\
         apiVersion: v1\nkind: Pod\nmetadata: {{name: origin, namespace: default, labels: {{app: origin}}, annotations: {{canal.mesh/tunnel: none, canal.mesh/az: az1}}}}\n\
         spec: {{nodeName: n1, serviceAccountName: origin, containers: [{{name: c, ports: [{{containerPort: {port}}}]}}]}}\n\
         status: {{podIP: {ip}, podIPs: [{{ip: {ip}}}], conditions: [{{type: Ready, status: \"True\"}}]}}\n"
    )
}

/// Service `number` of the first tenant in front of the origin, with a route for each prefix.
pub fn service(number: usize, prefixes: impl IntoIterator<Item = String>) -> String {
    let ip = format!("10.{}.{}.{}", 64 + (number >> 16), (number >> 8) & 255, number & 255);
    service_at(&ip, number, prefixes)
}

/// Service `s0` of any other tenant.
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
        let _ =
            writeln!(out, "  - matches: [{{path: {{type: PathPrefix, value: {prefix}}}}}]\n    backendRefs: [{{name: s{n}, port: 80}}]");
    }
    out
}

/// Policies for service `s0`: a token is required and checked, one kind of path is allowed, another one is denied.
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
