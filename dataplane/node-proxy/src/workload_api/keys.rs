//! An application's own key and certificate: generated in memory, certified by the controller, and
//! replaced at half life.
//!
//! They are never written to disk: after a restart there is another key.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use canal_identity::certs::{
    BACKOFF, CertificateClient, CertificateRequestError, RENEWAL_CHECK_INTERVAL, SUPERSEDED_SPREAD,
    SignedChain, half_life,
};
use canal_model::identity::Identity;
use canal_model::trust::KeyAlgorithm;
use canal_runtime::backoff::Backoff;
use canal_runtime::metrics::CounterFamily;
use canal_tls::{Certificate, TrustView};
use rand::Rng;
use rcgen::{
    CertificateParams, DistinguishedName, KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_RSA_SHA256,
    RsaKeySize, SanType,
};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// An application's X.509-SVID with its private key.
pub struct Svid {
    pub certificate: Certificate,
    /// The private key in PKCS#8, DER.
    pub key: Vec<u8>,
}

impl std::fmt::Debug for Svid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Svid({:?})", self.certificate)
    }
}

/// Renews one application's certificate so that it stays valid.
pub(super) struct SvidRenewer {
    issuer: Arc<CertificateClient>,
    results: CounterFamily,
    identity: Identity,
    algorithm: KeyAlgorithm,
    trust: TrustView,
}

/// A new key (PKCS#8, PEM and DER) and a certificate request for an identity.
type KeyAndCsr = (String, Vec<u8>, String);

fn make(identity: &Identity, algorithm: KeyAlgorithm) -> Result<KeyAndCsr, rcgen::Error> {
    let key = match algorithm {
        KeyAlgorithm::EcdsaP256 => KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?,
        KeyAlgorithm::Rsa2048 => KeyPair::generate_rsa_for(&PKCS_RSA_SHA256, RsaKeySize::_2048)?,
    };
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.subject_alt_names = vec![SanType::URI(identity.to_string().try_into()?)];
    let csr = params.serialize_request(&key)?.pem()?;
    Ok((key.serialize_pem(), key.serialize_der(), csr))
}

/// Validates the controller's response: the requested identity, valid now, and signed by a root of
/// the bundle.
fn accept(
    identity: &Identity,
    pem: &str,
    key: Vec<u8>,
    signed: &SignedChain,
    now: SystemTime,
) -> Result<Svid, CertificateRequestError> {
    let unusable = |e: canal_tls::CertificateError| CertificateRequestError::Answer(e.to_string());
    let certificate =
        Certificate::from_pem(pem, &signed.chain.join("\n"), &signed.bundle).map_err(unusable)?;
    if certificate.identity() != identity {
        return Err(CertificateRequestError::Identity {
            requested: identity.clone(),
            names: certificate.identity().to_string(),
        });
    }
    if !certificate.valid_at(now) {
        return Err(CertificateRequestError::Clock);
    }
    certificate.is_signed_by(now).map_err(unusable)?;
    Ok(Svid { certificate, key })
}

impl SvidRenewer {
    pub(super) fn new(
        issuer: Arc<CertificateClient>,
        results: CounterFamily,
        identity: Identity,
        algorithm: KeyAlgorithm,
        trust: TrustView,
    ) -> Self {
        Self {
            issuer,
            results,
            identity,
            algorithm,
            trust,
        }
    }

    /// Renews until `end`. Returns a receiver of the newest certificate.
    pub(super) fn follow(mut self, end: CancellationToken) -> watch::Receiver<Option<Arc<Svid>>> {
        let (newest, seen) = watch::channel(None);
        tokio::spawn(async move {
            tokio::select! {
                () = self.renew_for_ever(&newest) => {}
                () = end.cancelled() => {}
            }
        });
        seen
    }

    async fn renew_for_ever(&mut self, newest: &watch::Sender<Option<Arc<Svid>>>) {
        let mut backoff = Backoff::new(BACKOFF.0, BACKOFF.1);
        loop {
            match self.obtain().await {
                Ok(svid) => {
                    self.results.shared(&["certified"]).inc();
                    backoff.reset();
                    let svid = Arc::new(svid);
                    newest.send_replace(Some(svid.clone()));
                    self.due(&svid.certificate).await;
                }
                Err(error) => {
                    self.results.shared(&[error.reason()]).inc();
                    let wait = backoff.next_wait();
                    tracing::warn!(identity = %self.identity, %error, ?wait, "workload API: could not obtain a certificate for the application's own key; retrying");
                    tokio::time::sleep(wait).await;
                }
            }
        }
    }

    async fn obtain(&self) -> Result<Svid, CertificateRequestError> {
        let (identity, algorithm) = (self.identity.clone(), self.algorithm);
        // Off the runtime's threads, because an RSA key takes a tenth of a second and more.
        let made = tokio::task::spawn_blocking(move || make(&identity, algorithm)).await;
        let (pem, key, csr) = made
            .map_err(|e| CertificateRequestError::Key(e.to_string()))?
            .map_err(|e| CertificateRequestError::Key(e.to_string()))?;
        let signed = self.issuer.sign(&self.identity, None, csr).await?;
        accept(&self.identity, &pem, key, &signed, SystemTime::now())
    }

    /// Resolves when a certificate should be renewed: half of its life is over, or another root
    /// signs now.
    async fn due(&mut self, certificate: &Certificate) {
        let at = half_life(
            certificate.not_before(),
            certificate.not_after(),
            rand::rng().random_range(-1.0..=1.0),
        );
        loop {
            if self
                .trust
                .current_and_seen()
                .is_superseded(&self.identity.trust_domain, certificate.chain())
            {
                // A new root concerns all certificates at once, so their renewals are spread.
                let spread = rand::rng().random_range(Duration::ZERO..SUPERSEDED_SPREAD);
                return tokio::time::sleep(spread).await;
            }
            // The wall clock may jump, so the time left is computed anew at every check.
            let Ok(left) = at.duration_since(SystemTime::now()) else {
                return;
            };
            tokio::select! {
                () = tokio::time::sleep(left.min(RENEWAL_CHECK_INTERVAL)) => {}
                () = self.trust.changed() => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use canal_testing::TestCa;

    use super::*;

    #[test]
    fn controller_answers_are_verified() {
        let (ca, other) = (TestCa::new("alpha"), TestCa::new("other"));
        let identity: Identity = "spiffe://alpha.example/ns/b/sa/app".parse().unwrap();
        for algorithm in [KeyAlgorithm::EcdsaP256, KeyAlgorithm::Rsa2048] {
            let (pem, der, csr) = make(&identity, algorithm).unwrap();
            let signed = |bundle: &TestCa| SignedChain {
                chain: vec![ca.sign_request(&csr, |_| {})],
                bundle: bundle.root_pem(),
            };
            let now = SystemTime::now();
            let svid = accept(&identity, &pem, der.clone(), &signed(&ca), now).unwrap();
            assert_eq!((svid.certificate.identity(), &svid.key), (&identity, &der));
            let foreign: Identity = "spiffe://alpha.example/ns/b/sa/other".parse().unwrap();
            for (case, who, key, answer, at, want) in [
                (
                    "another identity",
                    &foreign,
                    &pem,
                    signed(&ca),
                    now,
                    "wrong_identity",
                ),
                (
                    "another root",
                    &identity,
                    &pem,
                    signed(&other),
                    now,
                    "bad_answer",
                ),
                (
                    "another key",
                    &identity,
                    &make(&identity, algorithm).unwrap().0,
                    signed(&ca),
                    now,
                    "bad_answer",
                ),
                (
                    "another time",
                    &identity,
                    &pem,
                    signed(&ca),
                    // The certificate is not valid yet.
                    SystemTime::UNIX_EPOCH,
                    "clock",
                ),
            ] {
                assert_eq!(
                    accept(who, key, der.clone(), &answer, at)
                        .unwrap_err()
                        .reason(),
                    want,
                    "{algorithm:?}: {case}"
                );
            }
        }
    }
}
