//! Step: alpha publishes its page by a Gateway with HTTPS. A client outside the tenants reaches it by
//! curl, and a new certificate is in use at once.

use std::path::Path;

use rcgen::{CertificateParams, KeyPair};

use crate::demo::demo_world::{ClientOutput, DemoWorld, client};
use crate::demo::screen::Expectation;
use crate::exit::{VerbError, VerbResult};

const HOST: &str = "bookinfo.example.com";
/// Address that the Gateway requests, of the first AZ's part of the pool in `demo/world.yaml`.
const ADDRESS: &str = "198.19.0.40";
/// Exit code of curl for a handshake that failed.
const NO_HANDSHAKE: i32 = 35;

const GATEWAY: &str = r#"---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: public, namespace: bookinfo}
spec:
  gatewayClassName: canal
  addresses: [{value: 198.19.0.40}]
  listeners:
  - {name: http, port: 80, protocol: HTTP, hostname: bookinfo.example.com}
  - {name: https, port: 443, protocol: HTTPS, hostname: bookinfo.example.com, tls: {certificateRefs: [{name: public}]}}
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: to-https, namespace: bookinfo}
spec:
  parentRefs: [{name: public, sectionName: http}]
  rules: [{filters: [{type: RequestRedirect, requestRedirect: {scheme: https, statusCode: 301}}]}]
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: public, namespace: bookinfo}
spec:
  parentRefs: [{name: public, sectionName: https}]
  rules: [{backendRefs: [{name: productpage, port: 9080}]}]
"#;

pub(crate) async fn run(world: &DemoWorld) -> VerbResult<Vec<Expectation>> {
    let dir = tempfile::tempdir().map_err(failed)?;
    let [first, second] = ["first.pem", "second.pem"].map(|name| dir.path().join(name));
    let secret = certificate(&first)?;
    world
        .apply("alpha", "demo/alpha/public.yaml", secret + GATEWAY)
        .await?;
    // `-L` follows redirects, so that the counts below tell HTTPS from the redirect to it.
    let page = curl(world, &first, "https", HOST, &["-L"]).await?;
    let redirected = curl(world, &first, "http", HOST, &["-L"]).await?;
    // curl ends with a failed handshake, not with a status.
    let other = curl(world, &first, "https", "other.example.com", &[]).await?;
    // Only the Secret is applied again; the Gateway from above stays.
    world
        .apply("alpha", "demo/alpha/public.yaml", certificate(&second)?)
        .await?;
    // The client trusts only the new certificate, which it retries for.
    let renewed = curl(world, &second, "https", HOST, &[]).await?;
    let is_page = |output: &ClientOutput, redirects: u32| {
        output.code == Some(0)
            && output.stdout == format!("200 by HTTP/2 after {redirects} redirects")
    };
    Ok(vec![
        Expectation::new(
            is_page(&page, 0),
            format!(
                "a client outside the tenants: curl https://{HOST} is answered by alpha's page"
            ),
            page.brief(),
        ),
        Expectation::new(
            is_page(&redirected, 1),
            format!("curl http://{HOST} is redirected to HTTPS, and answered"),
            redirected.brief(),
        ),
        Expectation::new(
            other.code == Some(NO_HANDSHAKE),
            "a server name that no listener has gets no handshake",
            other.brief(),
        ),
        Expectation::new(
            is_page(&renewed, 0),
            "after `canal apply` of another Secret, the new certificate is presented",
            renewed.brief(),
        ),
    ])
}

/// Requests the page as a client outside the tenants that trusts one certificate.
async fn curl(
    world: &DemoWorld,
    trusted: &Path,
    scheme: &str,
    host: &str,
    more: &[&str],
) -> VerbResult<ClientOutput> {
    let resolve = [80, 443].map(|port| format!("{host}:{port}:{ADDRESS}"));
    let (trusted, url) = (
        trusted.display().to_string(),
        format!("{scheme}://{host}/productpage"),
    );
    // Addresses and certificates reach edges and replicas a moment after `canal apply`.
    let retry = ["--retry", "10", "--retry-delay", "1", "--retry-all-errors"];
    let is_served = host == HOST;
    let mut argv = vec!["curl", "-sS", "--max-time", "5", "-o", "/dev/null"];
    argv.extend(retry.iter().filter(|_| is_served));
    argv.extend(["--cacert", &trusted]);
    argv.extend(resolve.iter().flat_map(|it| ["--resolve", it.as_str()]));
    argv.extend(more);
    let shown = "%{http_code} by HTTP/%{http_version} after %{num_redirects} redirects";
    argv.extend(["-w", shown, &url]);
    world.run(&client("outside"), &argv).await
}

/// Makes a certificate for the page, writes it to a file for the client, and returns the Secret with
/// it.
fn certificate(path: &Path) -> VerbResult<String> {
    let made = KeyPair::generate().and_then(|key| {
        let params = CertificateParams::new(vec![HOST.to_owned()])?;
        Ok((params.self_signed(&key)?.pem(), key.serialize_pem()))
    });
    let (chain, key) = made.map_err(failed)?;
    std::fs::write(path, &chain).map_err(failed)?;
    let indented = |pem: &str| pem.trim_end().replace('\n', "\n    ");
    Ok(format!(
        "apiVersion: v1\nkind: Secret\nmetadata: {{name: public, namespace: bookinfo}}\ntype: kubernetes.io/tls\n\
         stringData:\n  tls.crt: |\n    {}\n  tls.key: |\n    {}\n",
        indented(&chain),
        indented(&key)
    ))
}

fn failed(problem: impl std::fmt::Display) -> VerbError {
    VerbError::failed(
        "demo",
        problem,
        "check that the temporary directory has space",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_secret_and_the_gateway_are_read_as_they_are_written() {
        let dir = tempfile::tempdir().unwrap();
        let text = certificate(&dir.path().join("a.pem")).unwrap() + GATEWAY;
        let parsed = canal_sources::parse("public.yaml", &text);
        assert_eq!(parsed.diagnostics, []);
        assert_eq!(parsed.documents.len(), 4);
        assert!(GATEWAY.contains(ADDRESS) && GATEWAY.contains(HOST));
    }
}
