//! Certificates of listeners that terminate TLS: which Secrets a listener names, whether it may, and which of
//! them have a usable certificate.

use std::collections::BTreeMap;
use std::sync::Arc;

use canal_model::certificate::ServingCertificate;
use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::{Namespace, ObjectName, SecretKey};
use canal_model::ingress::{GatewayCertificates, ListenerFaultReason};
use canal_model::limits::CERTIFICATES_PER_LISTENER_MAX;
use canal_model::policy::gateway_api::ReferenceGrant;
use canal_model::policy::listeners::{ListenerTls, SecretReference};
use canal_model::policy::secret::{Secret, SecretProblem, TLS_SECRET};

use crate::{DocumentReport, GROUP, Written, shorten};

/// Maximum number of certificates of one tenant's listeners, counted once for each Gateway.
/// These are two for each of 512 listeners of a Gateway. Nobody measured this value; gateways hold
/// all of them, with their keys.
pub const CERTIFICATES_PER_TENANT_MAX: usize = 1024;
/// Maximum length of those certificates with their keys, in bytes of PEM.
/// On average it leaves 8 KiB for each of the certificates above, chain and key included.
pub const CERTIFICATE_BYTES_PER_TENANT_MAX: usize = 8 << 20;

/// The reason why a listener has no certificate, and the description of the problem.
type CertificateFault = (ListenerFaultReason, String);

/// A problem with one reference, and its fix.
pub(crate) struct ReferenceProblem {
    /// Whether only another object is missing, which may come later: cert-manager writes Secrets for
    /// Gateways that exist.
    pub(crate) is_pending: bool,
    pub(crate) code: Code,
    pub(crate) reason: ListenerFaultReason,
    pub(crate) problem: String,
    pub(crate) fix: String,
}

/// The Secrets that a reference may name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SecretTypes {
    /// Those of type [`TLS_SECRET`], as Gateway API demands.
    Tls,
    /// Also those of no particular type, as Istio allows.
    TlsOrGeneric,
}

impl SecretTypes {
    /// Returns the certificate of a Secret, or what is wrong with it; `None` if the Secret is of
    /// another type.
    fn certificate_of(
        self,
        secret: &Secret,
    ) -> Option<&Result<Arc<ServingCertificate>, SecretProblem>> {
        let is_of_type = secret.is_tls() || self == Self::TlsOrGeneric;
        secret.certificate.as_ref().filter(|_| is_of_type)
    }
}

/// The Secrets of a tenant, and how many further certificates its listeners may have.
pub(crate) struct CertificateIndex<'a> {
    secrets: BTreeMap<(&'a Namespace, &'a ObjectName), &'a Secret>,
    grants: &'a [Written<'a, ReferenceGrant>],
    certificates_left: usize,
    bytes_left: usize,
}

impl<'a> CertificateIndex<'a> {
    pub(crate) fn new(
        secrets: &'a [Written<'a, Secret>],
        grants: &'a [Written<'a, ReferenceGrant>],
    ) -> Self {
        let secrets = secrets.iter().map(|secret| {
            let metadata = &secret.object.metadata;
            ((&metadata.namespace, &metadata.name), secret.object)
        });
        Self {
            secrets: secrets.collect(),
            grants,
            certificates_left: CERTIFICATES_PER_TENANT_MAX,
            bytes_left: CERTIFICATE_BYTES_PER_TENANT_MAX,
        }
    }

    /// Returns the Secrets with the certificates of a listener, and adds the certificates to those
    /// of its Gateway. A reference without a usable certificate is reported; the listener serves
    /// with the others.
    ///
    /// # Errors
    /// Returns the fault that closes the listener, if it has no usable certificate at all.
    pub(crate) fn resolve(
        &mut self,
        (kind, namespace): (&str, &Namespace),
        tls: Option<&ListenerTls>,
        field: &str,
        certificates: &mut GatewayCertificates,
        report: &mut DocumentReport<'_>,
    ) -> Result<Vec<SecretKey>, CertificateFault> {
        let mut close = |code, field: String, problem: String, reason, fix: &str| {
            report.error(code, field, problem.clone(), fix);
            Err((reason, problem))
        };
        let references = tls.map_or(&[][..], |tls| &tls.certificate_refs);
        match tls.and_then(|tls| tls.mode.as_deref()) {
            // Terminate is the default of the Gateway API.
            None | Some("Terminate") => {}
            Some(mode) => {
                let problem = format!("mode {:?} is not one of HTTPS listeners", shorten(mode));
                let reason = ListenerFaultReason::Invalid;
                return close(
                    Code::InvalidListener,
                    format!("{field}.mode"),
                    problem,
                    reason,
                    "write Terminate",
                );
            }
        }
        let invalid = ListenerFaultReason::InvalidCertificateRef;
        let refs = format!("{field}.certificateRefs");
        if references.is_empty() {
            let problem = "a listener that terminates TLS needs a certificate".to_owned();
            return close(
                Code::InvalidCertificate,
                refs,
                problem,
                invalid,
                "name a Secret with a certificate",
            );
        }
        if references.len() > CERTIFICATES_PER_LISTENER_MAX {
            let count = references.len();
            let problem = format!(
                "the listener has {count} certificates, more than {CERTIFICATES_PER_LISTENER_MAX}"
            );
            return close(
                Code::LimitExceeded,
                refs,
                problem,
                invalid,
                "use several listeners",
            );
        }
        let mut named: Vec<SecretKey> = Vec::new();
        let mut first_fault = None;
        for (at, reference) in references.iter().enumerate() {
            match self.find((kind, namespace), reference, SecretTypes::Tls, certificates) {
                // A certificate that is named twice is sent once.
                Ok(key) if named.contains(&key) => {}
                Ok(key) => named.push(key),
                Err(found) => {
                    report.reference(format!("{refs}[{at}]"), &found);
                    first_fault.get_or_insert((found.reason, found.problem));
                }
            }
        }
        match first_fault {
            // One usable certificate keeps the listener open.
            Some(fault) if named.is_empty() => Err(fault),
            _ => Ok(named),
        }
    }

    /// Returns the Secret that a reference names, whose certificate is then one of the Gateway's.
    pub(crate) fn find(
        &mut self,
        (kind, own): (&str, &Namespace),
        reference: &SecretReference,
        types: SecretTypes,
        certificates: &mut GatewayCertificates,
    ) -> Result<SecretKey, ReferenceProblem> {
        // A reference is pending where another object can still make it valid.
        let problem_of = |is_pending, code, reason, problem: String, fix: &str| {
            let fix = fix.to_owned();
            Err(ReferenceProblem {
                is_pending,
                code,
                reason,
                problem,
                fix,
            })
        };
        let refuse = |problem, fix: &str| {
            problem_of(
                false,
                Code::InvalidCertificate,
                ListenerFaultReason::InvalidCertificateRef,
                problem,
                fix,
            )
        };
        if !reference.group.is_empty() || reference.kind != "Secret" {
            let (kind, group) = (shorten(&reference.kind), shorten(&reference.group));
            let problem = format!("a certificate cannot be a {kind:?} of group {group:?}");
            return refuse(problem, "write kind: Secret, and no group");
        }
        let namespace = reference.namespace.as_ref().unwrap_or(own);
        let name = &reference.name;
        // Whether the Secret exists is not to be learned without a grant.
        if namespace != own && !is_granted(self.grants, (kind, own), "Secret", (namespace, name)) {
            let problem =
                format!("no ReferenceGrant lets {kind}s in {own} use Secret {namespace}/{name}");
            let fix = format!(
                "write a ReferenceGrant in {namespace} from {kind}s in {own} to that Secret"
            );
            let code = Code::CertificateNotPermitted;
            return problem_of(
                true,
                code,
                ListenerFaultReason::RefNotPermitted,
                problem,
                &fix,
            );
        }
        let Some(&secret) = self.secrets.get(&(namespace, name)) else {
            let problem = format!("there is no Secret {namespace}/{name}");
            let reason = ListenerFaultReason::InvalidCertificateRef;
            let code = Code::InvalidCertificate;
            return problem_of(true, code, reason, problem, "create it or correct the name");
        };
        let certificate = match types.certificate_of(secret) {
            Some(Ok(certificate)) => certificate,
            Some(Err(found)) => {
                let problem = format!("Secret {namespace}/{name}: {}", found.problem);
                return refuse(problem, found.fix);
            }
            None => {
                let problem = format!("Secret {namespace}/{name} is not of type {TLS_SECRET}");
                return refuse(problem, "write it with that type, tls.crt and tls.key");
            }
        };
        let key = (namespace.clone(), name.clone());
        // A certificate that the Gateway has already counts once against the tenant's limits.
        if certificates.contains_key(&key) {
            return Ok(key);
        }
        let bytes = certificate.bytes();
        if self.certificates_left == 0 || self.bytes_left < bytes {
            let problem = format!(
                "with Secret {namespace}/{name} the tenant's listeners have more than {CERTIFICATES_PER_TENANT_MAX} certificates or {CERTIFICATE_BYTES_PER_TENANT_MAX} bytes of them"
            );
            return refuse(problem, "use certificates with several names");
        }
        self.certificates_left -= 1;
        self.bytes_left -= bytes;
        certificates.insert(key.clone(), certificate.clone());
        Ok(key)
    }
}

/// Returns whether objects of a kind in namespace `from` may use an object of the core group.
pub(crate) fn is_granted(
    grants: &[Written<'_, ReferenceGrant>],
    (kind, from): (&str, &Namespace),
    to_kind: &str,
    (to, name): (&Namespace, &ObjectName),
) -> bool {
    grants.iter().any(|grant| {
        let (document, spec) = (grant.document, &grant.object.spec);
        let is_whole = document
            .faults
            .iter()
            .all(|fault| !fault.field.starts_with("spec"));
        let may_refer = spec
            .from
            .iter()
            .any(|it| it.group == GROUP && it.kind == kind && it.namespace == *from);
        let may_be_used = spec.to.iter().any(|it| {
            it.group.is_empty()
                && it.kind == to_kind
                && it.name.as_ref().is_none_or(|granted| granted == name)
        });
        grant.object.metadata.namespace == *to && is_whole && may_refer && may_be_used
    })
}
