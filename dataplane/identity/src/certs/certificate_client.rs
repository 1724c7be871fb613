//! One certificate request to the controller: key, CSR, response, and the check that the response
//! matches the request.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, SystemTime};

use canal_model::identity::Identity;
use canal_model::ids::ServiceKey;
use canal_model::trust::KeyAlgorithm;
use canal_southbound_client::controller_client::{
    ControllerConnectError, ControllerConnection, ControllerEndpoint,
};
use canal_tls::{Certificate, CertificateError};
use canal_wire::citadel::istio_certificate_service_client::IstioCertificateServiceClient;
use canal_wire::citadel::{IstioCertificateRequest, IstioCertificateResponse};
use prost_types::Struct;
use prost_types::value::Kind;
use rcgen::{
    CertificateParams, DistinguishedName, KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_RSA_SHA256,
    RsaKeySize, SanType,
};
use tokio::sync::Mutex;
use tokio::time::Instant;
use zeroize::Zeroizing;

use super::CertificateKey;

/// Timeout of a certificate request. As long as a connection waits for the pod's first certificate
/// (`IDENTITY_TIMEOUT` of the node proxy).
const TIMEOUT: Duration = Duration::from_secs(10);
/// Time after which a connection without requests is closed, because renewals are hours apart. A
/// start with many pods uses one connection for all.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);
/// Metadata field that names the requested identity (istio/api security/v1alpha1, as ztunnel sends
/// it).
const IMPERSONATED: &str = "ImpersonatedIdentity";
/// Metadata field that names a service whose host names the certificate shall have too.
const SERVICE: &str = "Service";

/// Reasons why no certificate was obtained. [`CertificateRequestError::reason`] is the label of
/// `canal_certificate_failures_total`.
#[derive(Debug, thiserror::Error)]
pub enum CertificateRequestError {
    /// The connection to the controller failed.
    #[error(transparent)]
    Controller(#[from] ControllerConnectError),
    #[error("the controller refused: {0}")]
    Refused(String),
    #[error("the controller failed: {0}")]
    Failed(String),
    #[error(
        "the controller did not answer within {TIMEOUT:?}; fix: check its load and the network to it"
    )]
    Timeout,
    #[error("the controller's answer is unusable: {0}")]
    Answer(String),
    #[error("the certificate names {names}, but {requested} was requested")]
    Identity { requested: Identity, names: String },
    #[error(
        "the certificate is not valid at this machine's time; fix: correct the clock of this machine or of the controller"
    )]
    Clock,
    #[error("no key could be created: {0}")]
    Key(String),
}

impl CertificateRequestError {
    /// Returns the label value of `reason`.
    pub fn reason(&self) -> &'static str {
        match self {
            CertificateRequestError::Controller(_) => "connect",
            CertificateRequestError::Refused(_) => "refused",
            CertificateRequestError::Failed(_) => "failed",
            CertificateRequestError::Timeout => "timeout",
            CertificateRequestError::Answer(_) => "bad_answer",
            CertificateRequestError::Identity { .. } => "wrong_identity",
            CertificateRequestError::Clock => "clock",
            CertificateRequestError::Key(_) => "key",
        }
    }
}

/// The controller's response to a request, in PEM.
#[derive(Debug, Clone)]
pub struct SignedChain {
    /// One certificate per element, leaf first, without roots. It is never empty.
    pub chain: Vec<String>,
    /// All roots of the trust domain, with the signing root first.
    pub bundle: String,
}

/// A certificate with the PEM it was read from, for storage.
pub(super) struct PersistedCertificate {
    pub(super) certificate: Certificate,
    pub(super) key: Zeroizing<String>,
    pub(super) chain: String,
    pub(super) bundle: String,
}

/// Client of the controller's certificate service, with one connection for all identities.
pub struct CertificateClient {
    controller: ControllerEndpoint,
    validity: Duration,
    connection: Mutex<Option<(ControllerConnection, Instant)>>,
    attempt: AtomicUsize,
}

impl CertificateClient {
    /// Creates a client that requests certificates with a lifetime of `validity`.
    pub fn new(controller: ControllerEndpoint, validity: Duration) -> Self {
        Self {
            controller,
            validity,
            connection: Mutex::new(None),
            attempt: AtomicUsize::new(0),
        }
    }

    pub(super) async fn issue(
        &self,
        what: &CertificateKey,
    ) -> Result<PersistedCertificate, CertificateRequestError> {
        // An RSA key takes a tenth of a second or more, so it is not generated on a thread of the
        // runtime.
        let (identity, algorithm) = (what.identity.clone(), what.algorithm);
        let made = tokio::task::spawn_blocking(move || request(&identity, algorithm)).await;
        let (key, csr) = made
            .map_err(|e| CertificateRequestError::Key(e.to_string()))?
            .map_err(|e| CertificateRequestError::Key(e.to_string()))?;
        let signed = self
            .sign(&what.identity, what.service.as_ref(), csr)
            .await?;
        accept(&what.identity, key, signed, SystemTime::now())
    }

    /// Has `csr` (PEM) signed for `identity`; the key stays with the caller. With `service`, the
    /// leaf also has the service's host names, and `identity` is that of the tenant's gateway. The
    /// response is not verified.
    ///
    /// # Errors
    /// The controller cannot be reached, does not answer in time, refuses, or sends fewer than two
    /// elements.
    pub async fn sign(
        &self,
        identity: &Identity,
        service: Option<&ServiceKey>,
        csr: String,
    ) -> Result<SignedChain, CertificateRequestError> {
        let connection = self.connection().await?;
        let mut fields = vec![(
            IMPERSONATED.to_string(),
            Kind::StringValue(identity.to_string()).into(),
        )];
        fields.extend(
            service.map(|s| (SERVICE.to_string(), Kind::StringValue(s.to_string()).into())),
        );
        let message = IstioCertificateRequest {
            csr,
            // No operator configures a lifetime that does not fit; the longest one stands for it.
            validity_duration: i64::try_from(self.validity.as_secs()).unwrap_or(i64::MAX),
            metadata: Some(Struct {
                fields: fields.into_iter().collect(),
            }),
        };
        let mut client = IstioCertificateServiceClient::new(connection.channel.clone());
        let answer = match tokio::time::timeout(
            TIMEOUT,
            client.create_certificate(connection.request(message)),
        )
        .await
        {
            Ok(Ok(answer)) => answer.into_inner(),
            Ok(Err(status)) => {
                let text = format!("{}: {}", status.code(), status.message());
                let refused = matches!(
                    status.code(),
                    tonic::Code::PermissionDenied | tonic::Code::InvalidArgument
                );
                // After a refusal the connection still works; after another failure the next
                // address may be better.
                if !refused {
                    self.drop_connection().await;
                }
                return Err(if refused {
                    CertificateRequestError::Refused(text)
                } else {
                    CertificateRequestError::Failed(text)
                });
            }
            Err(_) => {
                self.drop_connection().await;
                return Err(CertificateRequestError::Timeout);
            }
        };
        split(answer)
    }

    async fn connection(&self) -> Result<ControllerConnection, CertificateRequestError> {
        let mut connection_slot = self.connection.lock().await;
        if let Some((connection, used)) = &mut *connection_slot {
            *used = Instant::now();
            return Ok(connection.clone());
        }
        // One caller connects while the others wait, because they need the same connection.
        let connection = self
            .controller
            .connect(self.attempt.fetch_add(1, Relaxed))
            .await?;
        *connection_slot = Some((connection.clone(), Instant::now()));
        Ok(connection)
    }

    /// Drops the connection. The next request connects again: to the next address, with the current
    /// token.
    async fn drop_connection(&self) {
        *self.connection.lock().await = None;
    }

    /// Closes a connection that has been idle for [`IDLE_TIMEOUT`].
    pub(super) async fn close_if_idle(&self) {
        if let Ok(mut connection_slot) = self.connection.try_lock()
            && connection_slot
                .as_ref()
                .is_some_and(|(_, used)| used.elapsed() >= IDLE_TIMEOUT)
        {
            *connection_slot = None;
        }
    }
}

/// Creates a key (PKCS#8 PEM) and a CSR for `identity`. Like ztunnel's, it has a URI SAN only, and
/// an empty DN.
fn request(
    identity: &Identity,
    algorithm: KeyAlgorithm,
) -> Result<(Zeroizing<String>, String), rcgen::Error> {
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

/// Splits the response, which has the leaf first and the bundle last.
fn split(answer: IstioCertificateResponse) -> Result<SignedChain, CertificateRequestError> {
    let mut chain = answer.cert_chain;
    let bundle = chain
        .pop()
        .ok_or_else(|| CertificateRequestError::Answer("no certificates".into()))?;
    if chain.is_empty() {
        return Err(CertificateRequestError::Answer(
            "the list has one element; it needs the leaf first and the bundle last".into(),
        ));
    }
    Ok(SignedChain { chain, bundle })
}

/// Accepts the response if it has the requested identity, is valid now, and is signed by a root in
/// the bundle.
fn accept(
    identity: &Identity,
    key: Zeroizing<String>,
    signed: SignedChain,
    now: SystemTime,
) -> Result<PersistedCertificate, CertificateRequestError> {
    let (chain, bundle) = (signed.chain.join("\n"), signed.bundle);
    let certificate = Certificate::from_pem(&key, &chain, &bundle).map_err(|e| match e {
        CertificateError::Identity(seen) => CertificateRequestError::Identity {
            requested: identity.clone(),
            names: seen.join(", "),
        },
        e => CertificateRequestError::Answer(e.to_string()),
    })?;
    if certificate.identity() != identity {
        return Err(CertificateRequestError::Identity {
            requested: identity.clone(),
            names: certificate.identity().to_string(),
        });
    }
    if !certificate.valid_at(now) {
        return Err(CertificateRequestError::Clock);
    }
    certificate
        .is_signed_by(now)
        .map_err(|e| CertificateRequestError::Answer(e.to_string()))?;
    Ok(PersistedCertificate {
        certificate,
        key,
        chain,
        bundle,
    })
}
