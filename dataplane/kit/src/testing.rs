//! For tests only (feature `testing`): certificate authorities that issue what a test asks for, right or wrong. Never in a product build.

use canal_model::identity::Identity;

use crate::tls::{Certificate, Credential};

/// A CA of one trust domain.
pub struct TestCa {}

impl TestCa {
    /// A fresh self-signed CA.
    pub fn new(name: &str) -> Self {
        let _ = name;
        unreachable!("body lands in the next commit")
    }
    /// Its root, PEM.
    pub fn root_pem(&self) -> String {
        unreachable!("body lands in the next commit")
    }
    /// A certificate for `identity`, valid for an hour, trusting this CA.
    pub fn issue(&self, identity: &Identity) -> Certificate {
        let _ = identity;
        unreachable!("body lands in the next commit")
    }
    /// [`TestCa::issue`] as a credential that stays.
    pub fn credential(&self, identity: &Identity) -> Credential {
        Credential::fixed(self.issue(identity))
    }
}
