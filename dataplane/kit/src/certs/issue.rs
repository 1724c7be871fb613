//! One certificate from the controller: key, request, answer, and whether the answer is what was asked for.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, SystemTime};

use canal_model::identity::Identity;
use canal_model::ids::ServiceKey;
use canal_model::trust::KeyAlgorithm;
use canal_wire::citadel::istio_certificate_service_client::IstioCertificateServiceClient;
use canal_wire::citadel::{IstioCertificateRequest, IstioCertificateResponse};
use prost_types::Struct;
use prost_types::value::Kind;
use rcgen::{CertificateParams, DistinguishedName, KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_RSA_SHA256, RsaKeySize, SanType};
use tokio::sync::Mutex;
use tokio::time::Instant;
use zeroize::Zeroizing;

use super::What;
use crate::controller::{Connection, Controller, ControllerError};
use crate::tls::{Certificate, CertificateError};

/// A request that takes longer has failed.
const TIMEOUT: Duration = Duration::from_secs(10);
/// A connection without requests is closed after: renewals are hours apart.
const REST: Duration = Duration::from_secs(30);
/// The metadata field that names the identity asked for (istio/api security/v1alpha1, as ztunnel sends it).
const IMPERSONATED: &str = "ImpersonatedIdentity";
/// The metadata field that names a service whose host names the certificate shall have too.
const SERVICE: &str = "Service";

/// Why there is no certificate. The name is the label `reason` of `canal_certificate_failures_total`.
#[derive(Debug, thiserror::Error)]
pub enum IssueError {
    /// It could not be called.
    #[error(transparent)]
    Controller(#[from] ControllerError),
    #[error("the controller refused: {0}")]
    Refused(String),
    #[error("the controller failed: {0}")]
    Failed(String),
    #[error("the controller gave no answer in {TIMEOUT:?}")]
    Timeout,
    #[error("the controller's answer is unusable: {0}")]
    Answer(String),
    #[error("the certificate names {seen}, asked was {asked}")]
    Identity { asked: Identity, seen: String },
    #[error("the certificate is not valid at this machine's time; is one of the two clocks wrong?")]
    Clock,
    #[error("no key could be made: {0}")]
    Key(String),
}

impl IssueError {
    /// The label `reason`.
    pub fn reason(&self) -> &'static str {
        match self {
            IssueError::Controller(_) => "connect",
            IssueError::Refused(_) => "refused",
            IssueError::Failed(_) => "failed",
            IssueError::Timeout => "timeout",
            IssueError::Answer(_) => "bad_answer",
            IssueError::Identity { .. } => "wrong_identity",
            IssueError::Clock => "clock",
            IssueError::Key(_) => "key",
        }
    }
}

/// What the controller made of a request: PEM.
#[derive(Debug, Clone)]
pub struct Signed {
    /// One certificate each, leaf first, roots left out. Never empty.
    pub chain: Vec<String>,
    /// All roots of the trust domain, the one that signs first.
    pub bundle: String,
}

/// A certificate with the PEM it was read from, to be kept.
pub(super) struct Issued {
    pub(super) certificate: Certificate,
    pub(super) key: Zeroizing<String>,
    pub(super) chain: String,
    pub(super) bundle: String,
}

/// Asks the controller, over one connection for all identities.
pub struct Issuer {
    controller: Controller,
    validity: Duration,
    connection: Mutex<Option<(Connection, Instant)>>,
    attempt: AtomicUsize,
}

impl Issuer {
    /// Asks for certificates that live for `validity`.
    pub fn new(controller: Controller, validity: Duration) -> Self {
        Self { controller, validity, connection: Mutex::new(None), attempt: AtomicUsize::new(0) }
    }

    pub(super) async fn issue(&self, what: &What) -> Result<Issued, IssueError> {
        // Off the runtime's threads: an RSA key takes a tenth of a second and more.
        let (identity, algorithm) = (what.identity.clone(), what.algorithm);
        let made = tokio::task::spawn_blocking(move || request(&identity, algorithm)).await;
        let (key, csr) = made.map_err(|e| IssueError::Key(e.to_string()))?.map_err(|e| IssueError::Key(e.to_string()))?;
        let signed = self.sign(&what.identity, what.service.as_ref(), csr).await?;
        accept(&what.identity, key, signed, SystemTime::now())
    }

    /// Has `csr` (PEM) signed for `identity`; the key is the caller's. With `service`, the leaf has the service's host names as well, and
    /// `identity` is the tenant's gateway's. What came back is not judged.
    pub async fn sign(&self, identity: &Identity, service: Option<&ServiceKey>, csr: String) -> Result<Signed, IssueError> {
        let connection = self.connection().await?;
        let mut fields = vec![(IMPERSONATED.to_string(), Kind::StringValue(identity.to_string()).into())];
        fields.extend(service.map(|s| (SERVICE.to_string(), Kind::StringValue(s.to_string()).into())));
        let message = IstioCertificateRequest {
            csr,
            validity_duration: i64::try_from(self.validity.as_secs()).unwrap_or(i64::MAX),
            metadata: Some(Struct { fields: fields.into_iter().collect() }),
        };
        let mut client = IstioCertificateServiceClient::new(connection.channel.clone());
        let answer = match tokio::time::timeout(TIMEOUT, client.create_certificate(connection.request(message))).await {
            Ok(Ok(answer)) => answer.into_inner(),
            Ok(Err(status)) => {
                let text = format!("{}: {}", status.code(), status.message());
                let refused = matches!(status.code(), tonic::Code::PermissionDenied | tonic::Code::InvalidArgument);
                if !refused {
                    self.drop_connection().await;
                }
                return Err(if refused { IssueError::Refused(text) } else { IssueError::Failed(text) });
            }
            Err(_) => {
                self.drop_connection().await;
                return Err(IssueError::Timeout);
            }
        };
        split(answer)
    }

    async fn connection(&self) -> Result<Connection, IssueError> {
        let mut held = self.connection.lock().await;
        if let Some((connection, used)) = &mut *held {
            *used = Instant::now();
            return Ok(connection.clone());
        }
        // One connects while the others wait: they want the same connection.
        let connection = self.controller.connect(self.attempt.fetch_add(1, Relaxed)).await?;
        *held = Some((connection.clone(), Instant::now()));
        Ok(connection)
    }

    /// The next request connects anew: to the next address, and with the token as it is then.
    async fn drop_connection(&self) {
        *self.connection.lock().await = None;
    }

    /// Closes a connection that was not used for a while.
    pub(super) async fn rest(&self) {
        if let Ok(mut held) = self.connection.try_lock()
            && held.as_ref().is_some_and(|(_, used)| used.elapsed() >= REST)
        {
            *held = None;
        }
    }
}

/// A new key (PKCS#8 PEM) and a request for `identity`: URI SAN only, empty DN (features.md A.2).
fn request(identity: &Identity, algorithm: KeyAlgorithm) -> Result<(Zeroizing<String>, String), rcgen::Error> {
    let key = match algorithm {
        KeyAlgorithm::EcdsaP256 => KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?,
        KeyAlgorithm::Rsa2048 => KeyPair::generate_rsa_for(&PKCS_RSA_SHA256, RsaKeySize::_2048)?,
    };
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.subject_alt_names = vec![SanType::URI(identity.to_string().try_into()?)];
    let csr = params.serialize_request(&key)?.pem()?;
    Ok((Zeroizing::new(key.serialize_pem()), csr))
}

/// Leaf first, bundle last.
fn split(answer: IstioCertificateResponse) -> Result<Signed, IssueError> {
    let mut chain = answer.cert_chain;
    let bundle = chain.pop().ok_or_else(|| IssueError::Answer("no certificates".into()))?;
    if chain.is_empty() {
        return Err(IssueError::Answer("one element only; leaf first, bundle last are needed".into()));
    }
    Ok(Signed { chain, bundle })
}

/// Judges the answer: the identity asked for, valid now, and signed by what the bundle holds.
fn accept(identity: &Identity, key: Zeroizing<String>, signed: Signed, now: SystemTime) -> Result<Issued, IssueError> {
    let (chain, bundle) = (signed.chain.join("\n"), signed.bundle);
    let certificate = Certificate::from_pem(&key, &chain, &bundle).map_err(|e| match e {
        CertificateError::Identity(seen) => IssueError::Identity { asked: identity.clone(), seen: seen.join(", ") },
        e => IssueError::Answer(e.to_string()),
    })?;
    if certificate.identity() != identity {
        return Err(IssueError::Identity { asked: identity.clone(), seen: certificate.identity().to_string() });
    }
    if !certificate.valid_at(now) {
        return Err(IssueError::Clock);
    }
    certificate.vouched_for(now).map_err(|e| IssueError::Answer(e.to_string()))?;
    Ok(Issued { certificate, key, chain, bundle })
}
