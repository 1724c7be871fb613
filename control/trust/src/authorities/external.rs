//! Client of an external CA. The controller is the registration authority, and requests
//! certificates by CFSSL's HTTP API (`sign`, or `authsign` with an HMAC). `canal-ca` checks what
//! comes back before it is used. Start at [`ExternalCaClient::sign`].

use std::path::Path;
use std::time::Duration;

use aws_lc_rs::hmac;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use canal_ca::CertificateRequest;
use canal_model::ids::TrustDomain;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Method, Uri};
use hyper::body::Bytes;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use super::authority_folder::text;
use crate::fetch::{FetchClient, FetchError, FetchRequest, host_and_port};

/// Maximum number of requests to one external CA at once.
/// More are refused at once, and data planes repeat them. Nobody measured what an external CA
/// serves.
pub const EXTERNAL_REQUESTS_MAX: usize = 16;
/// Timeout of one attempt to get a certificate. All attempts and their delays take at most 9.6 s,
/// because a data plane gives up its request after 10 s.
const ATTEMPT: Duration = Duration::from_secs(3);
/// Maximum number of attempts for one certificate; data planes repeat their requests by themselves.
/// More would not fit into the 10 s (see [`ATTEMPT`]).
const ATTEMPTS: u32 = 3;
/// Delay before the second attempt; it is doubled before the third.
/// Nobody measured this value; with it, all attempts fit into the 10 s (see [`ATTEMPT`]).
const BACKOFF: Duration = Duration::from_millis(200);
/// Maximum bytes of a response.
/// A chain of some certificates has a few KiB for each.
const ANSWER_BYTES_MAX: usize = 256 << 10;

/// Address of an external CA, as a flag states it: `TRUST_DOMAIN=URL`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExternalCa {
    /// Trust domain for which the CA signs.
    pub domain: TrustDomain,
    /// URL of the CA, up to and without `/api/v1/cfssl`.
    pub url: String,
}

impl std::str::FromStr for ExternalCa {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        let (domain, url) = s
            .split_once('=')
            .ok_or("there is no '='; fix: write TRUST_DOMAIN=URL, as in alpha.example=https://ca.alpha.example:8888")?;
        let domain = TrustDomain::new(domain).map_err(|e| e.to_string())?;
        let url = url.trim_end_matches('/').to_string();
        match url.parse::<Uri>() {
            Ok(uri) if host_and_port(&uri).is_some() => Ok(Self { domain, url }),
            _ => Err(format!(
                "{url} is not a usable URL; fix: write http://host[:port] or https://host[:port]"
            )),
        }
    }
}

/// Reason why the external CA did not sign.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExternalCaError {
    #[error(
        "the external CA is unavailable, so data planes keep their certificates and retry: {0}"
    )]
    Unreachable(FetchError),
    #[error(
        "the external CA refused: {0}; fix: correct its profile, or auth-key and profile in the domain's directory of --ca-dir"
    )]
    Refused(String),
    #[error(
        "the external CA sent an invalid answer: {0}; fix: check that the URL is that of a CFSSL API"
    )]
    Answer(String),
    #[error("{0}")]
    Settings(String),
    #[error(
        "{EXTERNAL_REQUESTS_MAX} requests to the external CA are in progress, and it is slow; fix: try again"
    )]
    Busy,
}

impl ExternalCaError {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Unreachable(_) => "external_unreachable",
            Self::Refused(_) => "external_refused",
            Self::Answer(_) => "external_answer",
            Self::Settings(_) => "external_settings",
            Self::Busy => "external_busy",
        }
    }
}

/// Client of one external CA.
pub(crate) struct ExternalCaClient {
    url: String,
    client: FetchClient,
    request_permits: Semaphore,
}

impl ExternalCaClient {
    pub(crate) fn new(url: &str, client: FetchClient) -> Self {
        Self {
            url: url.into(),
            client,
            request_permits: Semaphore::new(EXTERNAL_REQUESTS_MAX),
        }
    }

    /// Requests a certificate, and returns its chain as PEM. `folder` may contain `auth-key`,
    /// `profile` and `tls-root.pem`, and in `cert-chain.pem` the intermediates that the CA does not
    /// send along.
    ///
    /// # Errors
    /// The CA is busy, cannot be reached, refuses, or sends something else; or a file of the folder
    /// is not usable.
    pub(crate) async fn sign(
        &self,
        request: &CertificateRequest<'_>,
        folder: &Path,
    ) -> Result<String, ExternalCaError> {
        // Requests must not gather at a slow CA: a client that waits would have gone before its
        // turn.
        let _permit = self
            .request_permits
            .try_acquire()
            .map_err(|_| ExternalCaError::Busy)?;
        let settings = |name: &str| text(&folder.join(name)).map_err(ExternalCaError::Settings);
        let (key, profile, root) = (
            settings("auth-key")?,
            settings("profile")?,
            settings("tls-root.pem")?,
        );
        let above = settings("cert-chain.pem")?.unwrap_or_default();
        let (path, body) = request_body(request, key.as_deref(), profile.as_deref())
            .map_err(ExternalCaError::Settings)?;
        let uri: Uri = format!("{}/api/v1/cfssl/{path}", self.url)
            .parse()
            .map_err(|_| {
                ExternalCaError::Settings(format!(
                    "{} is not a URL; fix: correct --external-ca",
                    self.url
                ))
            })?;
        let own = root
            .map(|pem| FetchClient::new(pem.as_bytes()))
            .transpose()
            .map_err(|e| {
                ExternalCaError::Settings(format!(
                    "tls-root.pem: {e}; fix: write root certificates in PEM into it"
                ))
            })?;
        let client = own.as_ref().unwrap_or(&self.client);
        let mut attempt = 0;
        loop {
            let fetch_request = FetchRequest {
                method: Method::POST,
                uri: &uri,
                headers: vec![(CONTENT_TYPE, HeaderValue::from_static("application/json"))],
                body: Bytes::from(body.clone()),
                bytes: ANSWER_BYTES_MAX,
                time: ATTEMPT,
            };
            attempt += 1;
            match client.send(fetch_request).await {
                Ok(answer) => return Ok(certificate(&answer.body)? + "\n" + &above),
                // Signing again is safe: an unused certificate only expires.
                Err(fault) if fault.is_passing() && attempt < ATTEMPTS => {
                    tokio::time::sleep(BACKOFF * 2_u32.pow(attempt - 1)).await
                }
                // Such a status is a refusal, which a repetition does not change.
                Err(FetchError::Status(status)) if status < 500 => {
                    return Err(ExternalCaError::Refused(format!(
                        "status {status}; fix: check that auth-key is its key and that it has the profile"
                    )));
                }
                Err(fault) => return Err(ExternalCaError::Unreachable(fault)),
            }
        }
    }
}

/// Returns the end of the path, and the body. The names are stated beside the CSR, so that neither
/// side relies on the names in the CSR.
fn request_body(
    request: &CertificateRequest<'_>,
    key: Option<&str>,
    profile: Option<&str>,
) -> Result<(&'static str, String), String> {
    let hosts: Vec<String> = std::iter::once(request.identity.to_string())
        .chain(request.names.iter().cloned())
        .collect();
    let mut order =
        json!({ "certificate_request": request.csr, "hosts": hosts, "subject": { "names": [] } });
    if let Some(profile) = profile {
        order["profile"] = json!(profile.trim());
    }
    let order = order.to_string();
    let Some(key) = key else {
        return Ok(("sign", order));
    };
    let key = key.trim();
    let digit = |at: usize| {
        key.get(2 * at..2 * at + 2)
            .and_then(|d| u8::from_str_radix(d, 16).ok())
    };
    let bytes: Option<Vec<u8>> = (0..key.len() / 2).map(digit).collect();
    let bytes = bytes
        .filter(|b| !b.is_empty() && key.len().is_multiple_of(2))
        .ok_or("auth-key is not hexadecimal; fix: write the key as cfssl's configuration has it")?;
    let token = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, &bytes), order.as_bytes());
    let body =
        json!({ "token": STANDARD.encode(token.as_ref()), "request": STANDARD.encode(&order) });
    Ok(("authsign", body.to_string()))
}

/// Reads the certificate from a response of the CA.
fn certificate(body: &[u8]) -> Result<String, ExternalCaError> {
    let answer: Value =
        serde_json::from_slice(body).map_err(|e| ExternalCaError::Answer(e.to_string()))?;
    if answer["success"] != json!(true) {
        let why: Vec<&str> = answer["errors"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|e| e["message"].as_str())
            .collect();
        return Err(ExternalCaError::Refused(
            // The CA chose this text; a line of the log stays readable.
            why.join("; ").chars().take(500).collect(),
        ));
    }
    match answer["result"]["certificate"].as_str() {
        Some(pem) => Ok(pem.to_string()),
        None => Err(ExternalCaError::Answer(
            "it has no result.certificate".into(),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags() {
        for (text, ok) in [
            ("alpha.example=https://ca:8888", true),
            ("alpha.example=http://127.0.0.1:8888/", true),
            ("alpha.example", false),
            ("ALPHA=https://ca", false),
            ("alpha.example=ftp://ca", false),
            ("alpha.example=ca:8888", false),
        ] {
            assert_eq!(text.parse::<ExternalCa>().is_ok(), ok, "{text}");
        }
        assert_eq!(
            "a.b=http://c/".parse::<ExternalCa>().unwrap().url,
            "http://c"
        );
    }

    #[test]
    fn requests_are_signed_where_there_is_a_key() {
        let identity = "spiffe://alpha.example/ns/a/sa/b".parse().unwrap();
        let request = CertificateRequest {
            csr: "CSR",
            identity: &identity,
            names: &[],
            rsa: false,
            lifetime_seconds: 60,
        };
        let (path, body) = request_body(&request, None, Some("mesh\n")).unwrap();
        let order: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(
            (path, &order["profile"], &order["certificate_request"]),
            ("sign", &json!("mesh"), &json!("CSR"))
        );
        assert_eq!(order["hosts"], json!(["spiffe://alpha.example/ns/a/sa/b"]));
        let (path, body) = request_body(&request, Some("00ff\n"), None).unwrap();
        let signed: Value = serde_json::from_str(&body).unwrap();
        let order = STANDARD
            .decode(signed["request"].as_str().unwrap())
            .unwrap();
        let token = STANDARD.decode(signed["token"].as_str().unwrap()).unwrap();
        hmac::verify(
            &hmac::Key::new(hmac::HMAC_SHA256, &[0, 0xff]),
            &order,
            &token,
        )
        .unwrap();
        assert_eq!(path, "authsign");
        for key in ["", "0", "zz", "00f"] {
            assert!(request_body(&request, Some(key), None).is_err(), "{key:?}");
        }
    }

    #[test]
    fn answers() {
        let cases: [(&str, Result<&str, &str>); 5] = [
            (
                r#"{"success":true,"result":{"certificate":"PEM"},"errors":[]}"#,
                Ok("PEM"),
            ),
            (
                r#"{"success":false,"result":null,"errors":[{"code":1,"message":"no"}]}"#,
                Err("external_refused"),
            ),
            (r#"{"success":true,"result":{}}"#, Err("external_answer")),
            ("{", Err("external_answer")),
            ("[]", Err("external_refused")),
        ];
        for (body, want) in cases {
            let got = certificate(body.as_bytes());
            assert_eq!(got.as_deref().map_err(|e| e.name()), want, "{body}");
        }
    }

    #[tokio::test]
    async fn a_slow_authority_gathers_no_requests() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let external =
            std::sync::Arc::new(ExternalCaClient::new(&url, FetchClient::new(b"").unwrap()));
        let dir = tempfile::tempdir().unwrap();
        let ask = async |external: std::sync::Arc<ExternalCaClient>, folder: std::path::PathBuf| {
            let identity = "spiffe://alpha.example/ns/a/sa/b".parse().unwrap();
            let request = CertificateRequest {
                csr: "CSR",
                identity: &identity,
                names: &[],
                rsa: false,
                lifetime_seconds: 60,
            };
            external.sign(&request, &folder).await.unwrap_err().name()
        };
        let waiting: Vec<_> = (0..EXTERNAL_REQUESTS_MAX)
            .map(|_| tokio::spawn(ask(external.clone(), dir.path().into())))
            .collect();
        while external.request_permits.available_permits() > 0 {
            tokio::task::yield_now().await;
        }
        assert_eq!(
            ask(external.clone(), dir.path().into()).await,
            "external_busy"
        );
        waiting.into_iter().for_each(|w| w.abort());
    }
}
