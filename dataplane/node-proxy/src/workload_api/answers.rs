//! Responses of the Workload API. The location of the sockets determines the client.
//! [`super::keys`] creates the keys.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::SystemTime;

use canal_model::trust::TrustBundle;
use canal_runtime::limits::{Limit, Permit};
use canal_runtime::metrics::CounterFamily;
use canal_tls::Certificate;
use futures::Stream;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, CertificateRevocationListDer};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status};

use super::generated::spiffe_workload_api_server::SpiffeWorkloadApi;
use super::generated::{
    JwtBundlesRequest, JwtBundlesResponse, JwtsvidRequest, JwtsvidResponse, ValidateJwtsvidRequest,
    ValidateJwtsvidResponse, X509BundlesRequest, X509BundlesResponse, X509svid, X509svidRequest,
    X509svidResponse,
};
use super::keys::Svid;

/// Metadata that every request must carry, so that a confused program cannot be made to send one
/// (Workload API §3).
const HEADER: (&str, &str) = ("workload.spiffe.io", "true");

type ApiResult<T> = Result<Response<T>, Status>;
type ApiStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Workload API service of one pod.
#[derive(Clone)]
pub(super) struct WorkloadApiService {
    pub(super) svid: watch::Receiver<Option<Arc<Svid>>>,
    /// Trust bundles of the tenant. While they are empty, before the first update, the
    /// certificate's own bundle counts.
    pub(super) bundles: watch::Receiver<Arc<[TrustBundle]>>,
    pub(super) streams: Limit,
    pub(super) requests: CounterFamily,
    pub(super) end: CancellationToken,
}

/// Returns a trust domain's SPIFFE ID, which is the key of bundle maps.
fn id(trust_domain: impl std::fmt::Display) -> String {
    format!("spiffe://{trust_domain}")
}

fn roots(bundle: &TrustBundle) -> Vec<u8> {
    let pem = bundle.roots.join("\n");
    CertificateDer::pem_slice_iter(pem.as_bytes())
        .flatten()
        .flat_map(|der| der.to_vec())
        .collect()
}

fn revoked(bundles: &[TrustBundle]) -> Vec<Vec<u8>> {
    let lists = bundles.iter().flat_map(|b| &b.revoked);
    lists
        .flat_map(|pem| {
            CertificateRevocationListDer::pem_slice_iter(pem.as_bytes())
                .flatten()
                .map(|der| der.to_vec())
                .collect::<Vec<_>>()
        })
        .collect()
}

fn own_roots(certificate: &Certificate) -> Vec<u8> {
    certificate
        .bundle()
        .iter()
        .flat_map(|der| der.to_vec())
        .collect()
}

/// Builds the response to FetchX509SVID; `None`: there is no valid certificate now.
fn svid_answer(
    svid: Option<&Svid>,
    bundles: &[TrustBundle],
    now: SystemTime,
) -> Option<X509svidResponse> {
    let svid = svid.filter(|s| s.certificate.valid_at(now))?;
    let certificate = &svid.certificate;
    let own = bundles
        .iter()
        .find(|b| !b.federated && b.trust_domain == certificate.identity().trust_domain);
    Some(X509svidResponse {
        svids: vec![X509svid {
            spiffe_id: certificate.identity().to_string(),
            x509_svid: certificate
                .chain()
                .iter()
                .flat_map(|der| der.to_vec())
                .collect(),
            x509_svid_key: svid.key.clone(),
            bundle: own.map_or_else(|| own_roots(certificate), roots),
            hint: String::new(),
        }],
        crl: revoked(bundles),
        federated_bundles: bundles
            .iter()
            .filter(|b| b.federated)
            .map(|b| (id(&b.trust_domain), roots(b)))
            .collect(),
    })
}

/// Builds the response to FetchX509Bundles; `None`: there is no bundle yet.
fn bundles_answer(svid: Option<&Svid>, bundles: &[TrustBundle]) -> Option<X509BundlesResponse> {
    let mut all: BTreeMap<String, Vec<u8>> = bundles
        .iter()
        .map(|b| (id(&b.trust_domain), roots(b)))
        .collect();
    if let Some(svid) = svid {
        let certificate = &svid.certificate;
        all.entry(id(&certificate.identity().trust_domain))
            .or_insert_with(|| own_roots(certificate));
    }
    (!all.is_empty()).then(|| X509BundlesResponse {
        crl: revoked(bundles),
        bundles: all,
    })
}

fn has_header(metadata: &MetadataMap) -> bool {
    metadata
        .get(HEADER.0)
        .is_some_and(|v| v.as_bytes() == HEADER.1.as_bytes())
}

impl WorkloadApiService {
    /// Checks the metadata, which every method does first.
    fn admit<T>(&self, method: &'static str, request: &Request<T>) -> Result<(), Status> {
        if has_header(request.metadata()) {
            return Ok(());
        }
        self.count(method, "no_metadata");
        Err(Status::invalid_argument(
            "the metadata workload.spiffe.io: true is missing; fix: use a SPIFFE client",
        ))
    }

    fn count(&self, method: &'static str, result: &'static str) {
        self.requests.shared(&[method, result]).inc();
    }

    /// Takes a permit from the pod's limit of streams.
    fn take_permit(&self, method: &'static str) -> Result<Permit, Status> {
        let place = self.streams.take().ok_or_else(|| {
            self.count(method, "stream_limit");
            Status::resource_exhausted(format!(
                "this pod has {} streams open, its limit; fix: close streams that are not needed",
                super::STREAMS_MAX
            ))
        })?;
        self.count(method, "served");
        Ok(place)
    }

    /// Returns a stream of what `build` makes of the newest state: now, and whenever the result
    /// changes.
    fn follow<T: Clone + PartialEq + Send + 'static>(
        &self,
        place: Permit,
        build: impl Fn(Option<&Svid>, &[TrustBundle]) -> Option<T> + Send + 'static,
    ) -> ApiStream<T> {
        struct TrustFollower<T, F> {
            svid: watch::Receiver<Option<Arc<Svid>>>,
            bundles: watch::Receiver<Arc<[TrustBundle]>>,
            end: CancellationToken,
            message: Option<T>,
            build: F,
            _place: Permit,
        }
        let start = TrustFollower {
            svid: self.svid.clone(),
            bundles: self.bundles.clone(),
            end: self.end.clone(),
            message: None,
            build,
            _place: place,
        };
        Box::pin(futures::stream::unfold(start, |mut f| async move {
            loop {
                let (svid, bundles) = (
                    f.svid.borrow_and_update().clone(),
                    f.bundles.borrow_and_update().clone(),
                );
                let new = (f.build)(svid.as_deref(), &bundles)
                    .filter(|new| f.message.as_ref() != Some(new));
                if let Some(new) = new {
                    f.message = Some(new.clone());
                    return Some((Ok(new), f));
                }
                tokio::select! {
                    Ok(()) = f.svid.changed() => {}
                    Ok(()) = f.bundles.changed() => {}
                    () = f.end.cancelled() => return None,
                    // The sources of SVID and bundles are gone, so the state cannot change any
                    // more.
                    else => return None,
                }
            }
        }))
    }

    fn no_jwt<T>(&self, method: &'static str) -> ApiResult<T> {
        self.count(method, "unimplemented");
        Err(Status::unimplemented(
            "Canal issues X.509-SVIDs only; fix: use the X.509-SVID",
        ))
    }
}

#[tonic::async_trait]
impl SpiffeWorkloadApi for WorkloadApiService {
    type FetchX509SVIDStream = ApiStream<X509svidResponse>;
    type FetchX509BundlesStream = ApiStream<X509BundlesResponse>;
    type FetchJWTBundlesStream = ApiStream<JwtBundlesResponse>;

    async fn fetch_x509svid(
        &self,
        request: Request<X509svidRequest>,
    ) -> ApiResult<Self::FetchX509SVIDStream> {
        self.admit("FetchX509SVID", &request)?;
        let place = self.take_permit("FetchX509SVID")?;
        Ok(Response::new(self.follow(place, |svid, bundles| {
            svid_answer(svid, bundles, SystemTime::now())
        })))
    }

    async fn fetch_x509_bundles(
        &self,
        request: Request<X509BundlesRequest>,
    ) -> ApiResult<Self::FetchX509BundlesStream> {
        self.admit("FetchX509Bundles", &request)?;
        let place = self.take_permit("FetchX509Bundles")?;
        Ok(Response::new(self.follow(place, bundles_answer)))
    }

    async fn fetch_jwtsvid(&self, request: Request<JwtsvidRequest>) -> ApiResult<JwtsvidResponse> {
        self.admit("FetchJWTSVID", &request)?;
        self.no_jwt("FetchJWTSVID")
    }

    async fn fetch_jwt_bundles(
        &self,
        request: Request<JwtBundlesRequest>,
    ) -> ApiResult<Self::FetchJWTBundlesStream> {
        self.admit("FetchJWTBundles", &request)?;
        self.no_jwt("FetchJWTBundles")
    }

    async fn validate_jwtsvid(
        &self,
        request: Request<ValidateJwtsvidRequest>,
    ) -> ApiResult<ValidateJwtsvidResponse> {
        self.admit("ValidateJWTSVID", &request)?;
        self.no_jwt("ValidateJWTSVID")
    }
}

#[cfg(test)]
mod tests {
    use canal_model::identity::Identity;
    use canal_model::program::Resource;
    use canal_testing::TestCa;

    use super::*;

    #[test]
    fn answers_hold_the_newest_bundles_and_only_valid_certificates() {
        let (ca, friends) = (TestCa::new("alpha"), TestCa::new("friends"));
        let identity: Identity = "spiffe://alpha.example/ns/b/sa/app".parse().unwrap();
        let svid = Svid {
            certificate: ca.issue(&identity),
            key: vec![1, 2, 3],
        };
        let bundle = |ca: &TestCa, domain: &str, federated, revoked| match &*ca
            .bundle("alpha", domain, federated, revoked)
        {
            Resource::Bundle(b) => b.clone(),
            other => panic!("{other:?}"),
        };
        let der = |ca: &TestCa| {
            CertificateDer::from_pem_slice(ca.root_pem().as_bytes())
                .unwrap()
                .to_vec()
        };
        let bundle_list = [
            bundle(&ca, "alpha.example", false, vec![ca.revocations(&[7])]),
            bundle(&friends, "friend.example", true, vec![]),
        ];
        let now = SystemTime::now();

        let answer = svid_answer(Some(&svid), &bundle_list, now).unwrap();
        let one = &answer.svids[0];
        assert_eq!(
            (one.spiffe_id.as_str(), &one.x509_svid_key),
            ("spiffe://alpha.example/ns/b/sa/app", &vec![1, 2, 3])
        );
        assert_eq!(
            (&one.x509_svid, &one.bundle),
            (&svid.certificate.chain()[0].to_vec(), &der(&ca))
        );
        assert_eq!(
            answer.federated_bundles,
            BTreeMap::from([("spiffe://friend.example".to_string(), der(&friends))])
        );
        assert_eq!(answer.crl.len(), 1);

        let untold = svid_answer(Some(&svid), &[], now).unwrap();
        assert_eq!(
            (&untold.svids[0].bundle, untold.federated_bundles.len()),
            (&der(&ca), 0),
            "the data that came with the certificate"
        );
        // In 1970 the certificate is not valid yet.
        assert!(
            svid_answer(None, &bundle_list, now).is_none()
                && svid_answer(Some(&svid), &bundle_list, SystemTime::UNIX_EPOCH).is_none()
        );

        let all = bundles_answer(None, &bundle_list).unwrap().bundles;
        assert_eq!(
            all.keys().map(String::as_str).collect::<Vec<_>>(),
            ["spiffe://alpha.example", "spiffe://friend.example"]
        );
        assert_eq!(
            bundles_answer(Some(&svid), &[]).unwrap().bundles["spiffe://alpha.example"],
            der(&ca)
        );
        assert!(bundles_answer(None, &[]).is_none());
    }
}
