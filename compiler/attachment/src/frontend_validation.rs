//! Validation of clients' certificates: which authorities the listeners for HTTPS of a Gateway
//! trust, by port; and those of a server of a Gateway of Istio. What cannot be resolved closes the
//! listeners of its ports, or its server. Start at [`AuthorityIndex::resolve`].

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use canal_model::certificate::CaCertificates;
use canal_model::client_validation::{ClientValidation, ClientValidationMode};
use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::{Namespace, ObjectName};
use canal_model::ingress::{ListenerFault, ListenerFaultReason};
use canal_model::limits::{CLIENT_CA_BYTES_MAX, CLIENT_CA_CERTIFICATES_MAX};
use canal_model::policy::config_map::{CA_BUNDLE, ConfigMap};
use canal_model::policy::frontend_tls::{
    CaCertificateReference, FrontendTlsConfig, FrontendTlsValidation,
};
use canal_model::policy::gateway_api::ReferenceGrant;
use canal_model::policy::listeners::Gateway;
use canal_model::policy::secret::{Secret, SecretProblem};
use canal_model::policy::trust_bundle::ClusterTrustBundle;

use crate::certificates::{ReferenceProblem, is_granted};
use crate::faults::{fault, fault_of, is_within};
use crate::{DocumentReport, Written, shorten};

/// Maximum length of the certificates of authorities of one tenant's Gateways, in bytes of PEM,
/// counted once for each validation.
/// As many bytes as 32 validations may have at most (`CLIENT_CA_BYTES_MAX`).
pub const CLIENT_CA_BYTES_PER_TENANT_MAX: usize = 4 << 20;
/// Maximum number of references of one validation, as Gateway API's schema allows: an API server
/// refuses more.
const REFERENCES_MAX: usize = 8;
/// Maximum number of ports with settings of their own (Gateway API's FrontendTLSConfig).
const PORTS_MAX: usize = 64;

/// Field of a Gateway with the settings of TLS. If it is broken, all listeners for HTTPS are closed.
pub(crate) const GATEWAY_TLS: &str = "spec.tls";
/// Ends the name of a Secret with only the authorities of a credential, as Istio names it.
const CA_SUFFIX: &str = "-cacert";
/// API group of ClusterTrustBundles.
const CERTIFICATES_GROUP: &str = "certificates.k8s.io";

/// The validation of clients at one port.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) enum PortValidation {
    /// Clients are not asked for a certificate.
    #[default]
    Absent,
    Authorities(ClientValidationMode, Arc<CaCertificates>),
    /// The listeners of the port are closed.
    Closed(Arc<ListenerFault>),
}

/// The validation of clients at all ports of a Gateway.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct FrontendValidation {
    default: PortValidation,
    ports: BTreeMap<u16, PortValidation>,
}

impl FrontendValidation {
    pub(crate) fn at(&self, port: u16) -> &PortValidation {
        self.ports.get(&port).unwrap_or(&self.default)
    }

    /// Returns the validations of these ports, those of several ports once.
    pub(crate) fn of_ports(&self, ports: impl Iterator<Item = u16>) -> Vec<ClientValidation> {
        let mut found: Vec<ClientValidation> = Vec::new();
        for port in ports.collect::<BTreeSet<u16>>() {
            let PortValidation::Authorities(mode, authorities) = self.at(port) else {
                continue;
            };
            let known = found
                .iter_mut()
                .find(|it| it.mode == *mode && it.authorities == *authorities);
            match known {
                Some(known) => drop(known.ports.insert(port)),
                None => found.push(ClientValidation {
                    ports: [port].into(),
                    listeners: BTreeSet::new(),
                    mode: *mode,
                    authorities: authorities.clone(),
                }),
            }
        }
        found
    }
}

/// The objects of a tenant with certificates of authorities, and how many bytes of them its
/// Gateways may have yet.
pub(crate) struct AuthorityIndex<'a> {
    config_maps: BTreeMap<(&'a Namespace, &'a ObjectName), &'a ConfigMap>,
    secrets: BTreeMap<(&'a Namespace, &'a ObjectName), &'a Secret>,
    trust_bundles: BTreeMap<&'a ObjectName, &'a ClusterTrustBundle>,
    grants: &'a [Written<'a, ReferenceGrant>],
    bytes_left: usize,
}

impl<'a> AuthorityIndex<'a> {
    pub(crate) fn new(
        config_maps: &'a [Written<'a, ConfigMap>],
        secrets: &'a [Written<'a, Secret>],
        trust_bundles: &'a [Written<'a, ClusterTrustBundle>],
        grants: &'a [Written<'a, ReferenceGrant>],
    ) -> Self {
        let config_maps = config_maps.iter().map(|map| {
            let metadata = &map.object.metadata;
            ((&metadata.namespace, &metadata.name), map.object)
        });
        let secrets = secrets.iter().map(|secret| {
            let metadata = &secret.object.metadata;
            ((&metadata.namespace, &metadata.name), secret.object)
        });
        let trust_bundles = trust_bundles.iter();
        Self {
            config_maps: config_maps.collect(),
            secrets: secrets.collect(),
            trust_bundles: trust_bundles
                .map(|bundle| (&bundle.object.metadata.name, bundle.object))
                .collect(),
            grants,
            bytes_left: CLIENT_CA_BYTES_PER_TENANT_MAX,
        }
    }

    /// Returns how the listeners of a Gateway validate clients.
    pub(crate) fn resolve(
        &mut self,
        gateway: &Written<'_, Gateway>,
        report: &mut DocumentReport<'_>,
    ) -> FrontendValidation {
        let faults = &gateway.document.faults;
        if let Some(rejected) = faults.iter().find(|it| is_within(&it.field, GATEWAY_TLS)) {
            return FrontendValidation {
                default: PortValidation::Closed(fault_of(rejected)),
                ports: BTreeMap::new(),
            };
        }
        let Some(frontend) = &gateway.object.spec.tls.frontend else {
            return FrontendValidation::default();
        };
        let own = &gateway.object.metadata.namespace;
        let field = "spec.tls.frontend.default";
        let default = self.of_config(own, &frontend.default, field, report);
        let mut ports = BTreeMap::new();
        for (at, written) in frontend.per_port.iter().enumerate() {
            let field = format!("spec.tls.frontend.perPort[{at}]");
            let port = written.port.get();
            let is_repeated = ports.contains_key(&port);
            let of_port = if is_repeated {
                let problem = format!("port {port} has its TLS settings twice");
                close(&field, problem, "write each port once", report)
            } else if at >= PORTS_MAX {
                let problem = format!("more than {PORTS_MAX} ports have TLS settings of their own");
                close(&field, problem, "write each port once", report)
            } else {
                self.of_config(own, &written.tls, &format!("{field}.tls"), report)
            };
            ports.insert(port, of_port);
        }
        FrontendValidation { default, ports }
    }

    fn of_config(
        &mut self,
        own: &Namespace,
        config: &FrontendTlsConfig,
        field: &str,
        report: &mut DocumentReport<'_>,
    ) -> PortValidation {
        match &config.validation {
            None => PortValidation::Absent,
            Some(validation) => {
                self.of_validation(own, validation, &format!("{field}.validation"), report)
            }
        }
    }

    /// Resolves the references of a validation. One that leads to no authority is reported; the
    /// others are used, which trusts fewer clients than what was written.
    fn of_validation(
        &mut self,
        own: &Namespace,
        validation: &FrontendTlsValidation,
        field: &str,
        report: &mut DocumentReport<'_>,
    ) -> PortValidation {
        // AllowValidOnly is the default of the Gateway API.
        let mode = match validation.mode.as_deref() {
            None | Some("AllowValidOnly") => ClientValidationMode::AllowValidOnly,
            Some("AllowInsecureFallback") => ClientValidationMode::AllowInsecureFallback,
            Some(other) => {
                let problem = format!("mode {:?} is not one of validations", shorten(other));
                let fix = "write AllowValidOnly or AllowInsecureFallback";
                return close(&format!("{field}.mode"), problem, fix, report);
            }
        };
        let refs = format!("{field}.caCertificateRefs");
        let references = &validation.ca_certificate_refs;
        if references.is_empty() || references.len() > REFERENCES_MAX {
            let problem = format!("a validation has 1 to {REFERENCES_MAX} references");
            return close(&refs, problem, "name a ConfigMap with ca.crt", report);
        }
        let mut authorities = CaCertificates {
            pem: String::new(),
            count: 0,
        };
        let mut first_fault = None;
        for (at, reference) in references.iter().enumerate() {
            let found = self.find(own, reference).and_then(|found| {
                self.add(&authorities, found).map(|()| {
                    authorities.pem += &found.pem;
                    authorities.count += found.count;
                })
            });
            if let Err(found) = found {
                report.reference(format!("{refs}[{at}]"), &found);
                // A listener without authorities is not accepted; one without certificates is.
                let reason = match found.reason {
                    ListenerFaultReason::RefNotPermitted => ListenerFaultReason::CaRefNotPermitted,
                    other => other,
                };
                first_fault.get_or_insert((reason, found.problem));
            }
        }
        match first_fault {
            // No client can be verified without an authority. One that is usable is enough.
            Some((reason, problem)) if authorities.count == 0 => {
                PortValidation::Closed(fault(reason, problem))
            }
            _ => {
                if mode == ClientValidationMode::AllowInsecureFallback {
                    let problem = "clients without a valid certificate are served (InsecureFrontendValidationMode)";
                    let fix = "write AllowValidOnly once all clients have certificates";
                    let field = format!("{field}.mode");
                    report.warning(Code::InsecureClientValidation, field, problem, fix);
                }
                PortValidation::Authorities(mode, Arc::new(authorities))
            }
        }
    }

    /// Returns the authorities by which a server of a Gateway of Istio validates clients: those of
    /// the Secret `named`, else of the one whose name is that of the credential and `-cacert`, else of
    /// the credential itself.
    pub(crate) fn of_server(
        &mut self,
        own: &Namespace,
        named: Option<&str>,
        credential: &str,
    ) -> Result<Arc<CaCertificates>, ReferenceProblem> {
        let separate = format!("{credential}{CA_SUFFIX}");
        let first = named.unwrap_or(&separate);
        // As in Istio, `NAME-cacert` without an object of that name means `NAME`.
        let names = [Some(first), first.strip_suffix(CA_SUFFIX)];
        let found = names.into_iter().flatten().find_map(|name| {
            // No object has a name that is not valid.
            let name = ObjectName::new(name).ok()?;
            let secret = self.secrets.get(&(own, &name))?;
            Some((format!("Secret {own}/{name}"), *secret))
        });
        let Some((text, secret)) = found else {
            let first = shorten(first);
            return Err(ReferenceProblem {
                is_pending: true,
                ..refusal(
                    format!("there is no Secret {own}/{first} with the authorities of clients"),
                    "create it, or write ca.crt into the Secret with the certificate",
                )
            });
        };
        // Without the list, clients with revoked certificates would be served, so the server is
        // closed.
        if secret.has_revocation_list {
            return Err(refusal(
                format!(
                    "{text} has a list of revoked certificates, which is not supported in this version"
                ),
                "remove the entry, and have the authority issue certificates for a short time",
            ));
        }
        // Istio prefers its own name of the entry.
        match secret.generic_ca.as_ref().or(secret.ca.as_ref()) {
            None => Err(refusal(
                format!("{text} has no entry {CA_BUNDLE}"),
                "write the certificates of the authorities of clients in that entry, as PEM",
            )),
            Some(Err(SecretProblem { problem, fix })) => {
                Err(refusal(format!("{text}: {problem}"), fix))
            }
            Some(Ok(authorities)) => {
                let authorities = authorities.clone();
                let empty = CaCertificates {
                    pem: String::new(),
                    count: 0,
                };
                self.add(&empty, &authorities)?;
                Ok(authorities)
            }
        }
    }

    /// Takes room for further authorities of a validation.
    fn add(
        &mut self,
        authorities: &CaCertificates,
        found: &CaCertificates,
    ) -> Result<(), ReferenceProblem> {
        let count = authorities.count + found.count;
        let bytes = authorities.pem.len() + found.pem.len();
        let problem = if count > CLIENT_CA_CERTIFICATES_MAX || bytes > CLIENT_CA_BYTES_MAX {
            format!(
                "with this one the validation has more than {CLIENT_CA_CERTIFICATES_MAX} certificates or {CLIENT_CA_BYTES_MAX} bytes of them"
            )
        } else if let Some(left) = self.bytes_left.checked_sub(found.pem.len()) {
            self.bytes_left = left;
            return Ok(());
        } else {
            format!(
                "with this one the tenant's validations have more than {CLIENT_CA_BYTES_PER_TENANT_MAX} bytes of certificates"
            )
        };
        let fix = "keep the certificates of the authorities that issue to clients";
        Err(ReferenceProblem {
            code: Code::LimitExceeded,
            ..refusal(problem, fix)
        })
    }

    /// Returns the authorities that a reference names.
    fn find(
        &self,
        own: &Namespace,
        reference: &CaCertificateReference,
    ) -> Result<&'a CaCertificates, ReferenceProblem> {
        let name = &reference.name;
        let (text, ca) = match (reference.group.as_str(), reference.kind.as_str()) {
            ("", kind @ ("ConfigMap" | "Secret")) => {
                // A reference without a namespace is to an object in the Gateway's.
                let namespace = reference.namespace.as_ref().unwrap_or(own);
                let text = format!("{kind} {namespace}/{name}");
                let to = (namespace, name);
                // Whether the object exists is not to be learned without a grant.
                if namespace != own && !is_granted(self.grants, ("Gateway", own), kind, to) {
                    return Err(ReferenceProblem {
                        is_pending: true,
                        code: Code::CertificateNotPermitted,
                        reason: ListenerFaultReason::RefNotPermitted,
                        problem: format!("no ReferenceGrant lets Gateways in {own} use {text}"),
                        fix: format!(
                            "write a ReferenceGrant in {namespace} from Gateways in {own} to that {kind}"
                        ),
                    });
                }
                let found = match kind {
                    "Secret" => self.secrets.get(&to).map(|secret| &secret.ca),
                    // Only `ConfigMap` is left.
                    _ => self.config_maps.get(&to).map(|map| &map.ca),
                };
                (text, found)
            }
            (CERTIFICATES_GROUP, "ClusterTrustBundle") => {
                let text = format!("ClusterTrustBundle {name}");
                // The kind is cluster-scoped.
                if reference.namespace.is_some() {
                    let problem = format!("{text} has no namespace");
                    return Err(refusal(problem, "remove namespace from the reference"));
                }
                let found = self.trust_bundles.get(name).map(|bundle| &bundle.ca);
                (text, found)
            }
            (group, kind) => {
                let (kind, group) = (shorten(kind), shorten(group));
                return Err(ReferenceProblem {
                    reason: ListenerFaultReason::InvalidCaCertificateKind,
                    ..refusal(
                        format!("authorities cannot be a {kind:?} of group {group:?}"),
                        "write kind: ConfigMap or kind: Secret, and group: \"\"",
                    )
                });
            }
        };
        match ca {
            // It is pending, because the object may be created later.
            None => Err(ReferenceProblem {
                is_pending: true,
                ..refusal(
                    format!("there is no {text}"),
                    "create it or correct the name",
                )
            }),
            Some(None) => Err(refusal(
                format!("{text} has no entry {CA_BUNDLE}"),
                "write the authorities' certificates in that entry, as PEM",
            )),
            Some(Some(Err(SecretProblem { problem, fix }))) => {
                Err(refusal(format!("{text}: {problem}"), fix))
            }
            Some(Some(Ok(authorities))) => Ok(authorities),
        }
    }
}

fn refusal(problem: String, fix: &str) -> ReferenceProblem {
    ReferenceProblem {
        is_pending: false,
        code: Code::InvalidCaCertificate,
        reason: ListenerFaultReason::InvalidCaCertificateRef,
        problem,
        fix: fix.to_owned(),
    }
}

/// Reports a problem that closes the listeners of a port.
fn close(
    field: &str,
    problem: String,
    fix: &str,
    report: &mut DocumentReport<'_>,
) -> PortValidation {
    report.error(Code::InvalidListener, field, problem.clone(), fix);
    PortValidation::Closed(fault(ListenerFaultReason::Invalid, problem))
}
