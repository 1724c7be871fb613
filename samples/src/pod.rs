//! [`PodName`]: the service, version and pod with which a sample identifies itself. They come from the environment as Kubernetes would set
//! it.

use http::HeaderValue;
use http::header::HeaderMap;

use crate::answer::SampleResponse;

/// Response header with `service-version`. The load client counts its values.
pub const SERVED_BY: &str = "x-served-by";
/// Response header with the name of the pod.
pub const POD: &str = "x-pod";

/// Service, version and pod name of a sample.
#[derive(Debug, Clone)]
pub struct PodName {
    /// Name of the service, e.g. `reviews`.
    pub service: String,
    /// Version of the service, e.g. `v2`: `$SERVICE_VERSION`, else `v1`.
    pub version: String,
    /// Name of the pod: `$POD_NAME`, else `$HOSTNAME`, else `unknown`.
    pub name: String,
}

impl PodName {
    /// Reads the environment. `service` is the role; `$SERVICE_NAME` replaces it.
    pub fn from_env(service: &str) -> Self {
        let var = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
        Self {
            service: var("SERVICE_NAME").unwrap_or_else(|| service.to_owned()),
            version: var("SERVICE_VERSION").unwrap_or_else(|| "v1".to_owned()),
            name: var("POD_NAME")
                .or_else(|| var("HOSTNAME"))
                .unwrap_or_else(|| "unknown".to_owned()),
        }
    }

    /// Returns `service-version`, the value of [`SERVED_BY`].
    pub fn served_by(&self) -> String {
        format!("{}-{}", self.service, self.version)
    }

    /// Returns the response with both headers added.
    pub fn signed(&self, mut answer: SampleResponse) -> SampleResponse {
        self.sign(answer.headers_mut());
        answer
    }

    /// Adds both headers to a response.
    pub fn sign(&self, headers: &mut HeaderMap) {
        for (name, value) in [(SERVED_BY, self.served_by()), (POD, self.name.clone())] {
            // An invalid header value is left out, because the headers must not make the request
            // fail.
            if let Ok(value) = HeaderValue::from_str(&value) {
                headers.insert(name, value);
            }
        }
    }
}
