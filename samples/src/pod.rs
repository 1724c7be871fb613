//! Who a sample says it is: service, version and pod, taken from the environment as Kubernetes would set it.

use http::HeaderValue;
use http::header::HeaderMap;

use crate::answer::Answer;

/// Response header with `service-version`; the load client counts its values.
pub const SERVED_BY: &str = "x-served-by";
/// Response header with the pod's name.
pub const POD: &str = "x-pod";

/// The name a sample answers with.
#[derive(Debug, Clone)]
pub struct Pod {
    /// e.g. `reviews`.
    pub service: String,
    /// e.g. `v2`; `$SERVICE_VERSION`, else `v1`.
    pub version: String,
    /// `$POD_NAME`, else `$HOSTNAME`, else `unknown`.
    pub name: String,
}

impl Pod {
    /// Reads the environment; `service` is the role unless `$SERVICE_NAME` says otherwise.
    pub fn from_env(service: &str) -> Self {
        let var = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
        Self {
            service: var("SERVICE_NAME").unwrap_or_else(|| service.to_owned()),
            version: var("SERVICE_VERSION").unwrap_or_else(|| "v1".to_owned()),
            name: var("POD_NAME").or_else(|| var("HOSTNAME")).unwrap_or_else(|| "unknown".to_owned()),
        }
    }

    /// `service-version`, the value of [`SERVED_BY`].
    pub fn served_by(&self) -> String {
        format!("{}-{}", self.service, self.version)
    }

    /// The answer with both headers on it.
    pub fn signed(&self, mut answer: Answer) -> Answer {
        self.sign(answer.headers_mut());
        answer
    }

    /// Puts both headers on a response.
    pub fn sign(&self, headers: &mut HeaderMap) {
        for (name, value) in [(SERVED_BY, self.served_by()), (POD, self.name.clone())] {
            // A pod name that is no header value is left out rather than failing the request it decorates.
            if let Ok(value) = HeaderValue::from_str(&value) {
                headers.insert(name, value);
            }
        }
    }
}
