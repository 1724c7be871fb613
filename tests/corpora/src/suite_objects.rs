//! The objects that Gateway API's conformance suite creates by calls of its own code, before it
//! applies its manifests (`utils/suite/suite.go`, "Applying programmatic resources"). The
//! certificates are made anew for each run, as the suite makes them.

use std::fmt::Write;

use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair};

/// Namespaces of the suite.
const INFRA: &str = "gateway-conformance-infra";
const APP_BACKEND: &str = "gateway-conformance-app-backend";
const WEB_BACKEND: &str = "gateway-conformance-web-backend";

/// Secrets with a certificate for these names. The certificates of the suite's clients have none.
const SECRETS: [(&str, &str, &[&str]); 9] = [
    (WEB_BACKEND, "certificate", &["*"]),
    (
        INFRA,
        "tls-validity-checks-certificate",
        &["*", "*.org", "*.wildcard.org"],
    ),
    (INFRA, "tls-validity-checks-client-certificate", &[]),
    (
        INFRA,
        "tls-validity-checks-per-port-client-certificate",
        &[],
    ),
    (
        INFRA,
        "tls-checks-certificate",
        &["abc.example.com", "other.example.com"],
    ),
    (INFRA, "tls-checks-client-certificate", &[]),
    (
        INFRA,
        "tls-passthrough-checks-certificate",
        &["abc.example.com"],
    ),
    (
        APP_BACKEND,
        "tls-passthrough-checks-certificate",
        &["abc.example.com"],
    ),
    (
        INFRA,
        "tls-terminate-checks-certificate",
        &["tls.example.com"],
    ),
];

/// ConfigMaps with the certificate of an authority.
const CONFIG_MAPS: [(&str, &str); 5] = [
    (WEB_BACKEND, "web-backend-cm"),
    (INFRA, "tls-validity-checks-ca-certificate"),
    (INFRA, "tls-validity-checks-per-port-ca-certificate"),
    (INFRA, "tls-checks-ca-certificate"),
    (INFRA, "mismatch-ca-certificate"),
];

/// Returns the YAML of the objects.
pub(crate) fn suite_objects() -> anyhow::Result<String> {
    let mut text = String::new();
    for (namespace, name, hosts) in SECRETS {
        let key = KeyPair::generate()?;
        let hosts: Vec<String> = hosts.iter().map(ToString::to_string).collect();
        let certificate = CertificateParams::new(hosts)?.self_signed(&key)?;
        write!(
            text,
            "---\napiVersion: v1\nkind: Secret\nmetadata: {{name: {name}, namespace: {namespace}}}\n\
             type: kubernetes.io/tls\nstringData:\n  tls.crt: {:?}\n  tls.key: {:?}\n",
            certificate.pem(),
            key.serialize_pem()
        )?;
    }
    for (namespace, name) in CONFIG_MAPS {
        let mut params = CertificateParams::new(Vec::new())?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = params.self_signed(&KeyPair::generate()?)?;
        write!(
            text,
            "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {name}, namespace: {namespace}}}\n\
             data:\n  ca.crt: {:?}\n",
            authority.pem()
        )?;
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_objects_of_the_suite_are_read_without_a_problem() {
        let parsed = canal_sources::parse("suite.yaml", &suite_objects().unwrap());
        let count = SECRETS.len() + CONFIG_MAPS.len();
        assert_eq!(parsed.documents.len(), count);
        assert!(parsed.diagnostics.is_empty(), "{:?}", parsed.diagnostics);
    }
}
