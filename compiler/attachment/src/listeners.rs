//! The listeners of a tenant's Gateways: which Gateways are Canal's, what their ListenerSets add,
//! and which listeners are closed, with the reason. Start at [`resolve`].

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use canal_model::client_validation::ClientValidation;
use canal_model::diagnostic::Diagnostic;
use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::{Namespace, ObjectName, ServiceKey, TenantName};
use canal_model::ingress::{
    GatewayCertificates, Listener, ListenerFault, ListenerFaultReason, ListenerProtocol,
    gateway_service,
};
use canal_model::limits::LISTENERS_PER_GATEWAY_MAX;
use canal_model::policy::config_map::ConfigMap;
use canal_model::policy::gateway_api::ReferenceGrant;
use canal_model::policy::istio_gateway::IstioGateway;
use canal_model::policy::kubernetes::NamespaceObject;
use canal_model::policy::listeners::{
    AllowedRoutes, Gateway, GatewayClass, GatewayListener, ListenerSet,
};
use canal_model::policy::secret::Secret;
use canal_model::policy::trust_bundle::ClusterTrustBundle;
use canal_model::policy::{ObjectKind, RejectedField};

use crate::allowed::{AllowedNamespaces, NamespaceLabels};
use crate::annotations::{GatewayAnnotations, ProxiedPorts};
use crate::certificates::CertificateIndex;
use crate::faults::{fault, fault_of, is_within};
use crate::frontend_validation::{AuthorityIndex, FrontendValidation, GATEWAY_TLS, PortValidation};
use crate::kinds::{KindHosts, route_kinds};
use crate::{DocumentReport, GROUP, Written, hostname, listener_filters, shorten};

/// Value of `controllerName` in the GatewayClasses that are Canal's.
pub const CONTROLLER_NAME: &str = "canal.mesh/gateway";
/// Name of the GatewayClass that every tenant has without an object.
pub const DEFAULT_CLASS: &str = "canal";
/// Maximum number of listeners of one tenant.
/// These are eight Gateways of the largest size (`LISTENERS_PER_GATEWAY_MAX`). Nobody measured this
/// value.
pub const LISTENERS_PER_TENANT_MAX: usize = 4096;
/// Maximum number of comparisons of routes with listeners that one tenant may cost: one for each
/// listener of a parent, each part of a selector of namespaces, and each host.
/// About 4,000 routes on Gateways with all 4,096 listeners of a tenant cost as many.
/// Nobody measured this value.
pub const COMPARISONS_PER_TENANT_MAX: usize = 16_000_000;
/// Port at which gateway replicas take HBONE, on every address.
/// It is `canal_wire::hbone::HBONE_PORT`, so a listener cannot have it.
pub(crate) const HBONE_PORT: u16 = 15008;

/// Field of a Gateway that says which ListenerSets may add listeners. If it is broken, none may.
const ALLOWED_SETS: &str = "spec.allowedListeners";

/// The objects of a tenant that make listeners, each list with the oldest object first.
#[derive(Debug, Default)]
pub struct ListenerObjects<'a> {
    pub classes: Vec<Written<'a, GatewayClass>>,
    pub gateways: Vec<Written<'a, Gateway>>,
    pub listener_sets: Vec<Written<'a, ListenerSet>>,
    pub namespaces: Vec<Written<'a, NamespaceObject>>,
    pub secrets: Vec<Written<'a, Secret>>,
    pub config_maps: Vec<Written<'a, ConfigMap>>,
    pub trust_bundles: Vec<Written<'a, ClusterTrustBundle>>,
    pub grants: Vec<Written<'a, ReferenceGrant>>,
    pub istio_gateways: Vec<Written<'a, IstioGateway>>,
    /// Whether the tenant has GRPCRoutes: only then can HTTPRoutes be in conflict with another kind.
    pub has_grpc_routes: bool,
}

/// The listeners of all Gateways of a tenant.
#[derive(Debug)]
pub struct TenantListeners {
    /// Gateways by namespace and name; `None` for one of another controller.
    pub(crate) gateways: BTreeMap<(Namespace, ObjectName), Option<GatewayListeners>>,
    /// Gateways of Istio; `None` for one that selects another ingress than Canal's.
    pub(crate) istio_gateways: BTreeMap<(Namespace, ObjectName), Option<GatewayListeners>>,
    /// ListenerSets by namespace and name, each with its Gateway. A set that adds nothing has none.
    pub(crate) listener_sets: BTreeMap<(Namespace, ObjectName), Option<(Namespace, ObjectName)>>,
    /// The GatewayClasses that are Canal's.
    pub(crate) own_classes: BTreeSet<ObjectName>,
    pub(crate) namespaces: NamespaceLabels,
    /// Comparisons that attaching further routes may take.
    pub(crate) comparisons_left: usize,
    /// Number of routes of each closed listener that would be on it if it were open. Gateway API counts
    /// them as attached.
    pub(crate) closed_routes: BTreeMap<(ServiceKey, usize), usize>,
    /// Hosts of the routes on each listener of each Gateway, if there are routes of both kinds.
    pub(crate) kind_hosts: Option<BTreeMap<ServiceKey, BTreeMap<usize, KindHosts>>>,
}

impl Default for TenantListeners {
    fn default() -> Self {
        Self {
            gateways: BTreeMap::new(),
            istio_gateways: BTreeMap::new(),
            listener_sets: BTreeMap::new(),
            own_classes: BTreeSet::new(),
            namespaces: NamespaceLabels::default(),
            comparisons_left: COMPARISONS_PER_TENANT_MAX,
            closed_routes: BTreeMap::new(),
            kind_hosts: None,
        }
    }
}

/// The listeners of one Gateway.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayListeners {
    /// The service that stands for the Gateway.
    pub service: ServiceKey,
    /// The GatewayClass that the Gateway names; `None` for a Gateway of Istio.
    pub class: Option<ObjectName>,
    /// The addresses that the Gateway requests; if there are none, it gets one. Nothing has checked
    /// yet that the tier has them to give: whoever assigns addresses must refuse any other.
    pub addresses: Vec<IpAddr>,
    /// Number of proxies between clients and the Gateway that append to `x-forwarded-for`.
    pub trusted_proxies: u8,
    /// Ports at which connections begin with a header of the PROXY protocol.
    pub(crate) proxied: ProxiedPorts,
    /// The Gateway's own listeners, then those of its ListenerSets; at most
    /// [`LISTENERS_PER_GATEWAY_MAX`].
    pub listeners: Vec<PlacedListener>,
    /// The certificates that open listeners name.
    pub certificates: GatewayCertificates,
    /// How listeners for HTTPS validate clients, those of ListenerSets included.
    pub(crate) validation: Arc<FrontendValidation>,
    /// How servers of a Gateway of Istio validate clients.
    pub(crate) server_validations: Vec<ClientValidation>,
    /// The reason why all listeners are closed, those of ListenerSets included, if they are.
    pub(crate) closed: Option<Arc<ListenerFault>>,
    /// Namespaces of the ListenerSets that may add listeners.
    pub(crate) allowed_sets: AllowedNamespaces,
}

/// A listener of a Gateway, with the routes that it allows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacedListener {
    pub listener: Listener,
    /// Name in its own object; `None` for a listener of a Gateway of Istio.
    pub(crate) section: Option<ObjectName>,
    /// The ListenerSet that it comes from; `None` for a Gateway's own.
    pub(crate) listener_set: Option<(Namespace, ObjectName)>,
    /// Namespace of the object that it is written in.
    pub(crate) namespace: Namespace,
    pub(crate) allowed: AllowedNamespaces,
    /// Kinds of routes that may attach to it.
    pub(crate) route_kinds: Vec<ObjectKind>,
    /// Whether its hostname is broken, so that nothing is known to be the same.
    pub(crate) is_host_broken: bool,
    /// Whether all its requests are sent to HTTPS, and no route is on it.
    pub redirects_to_https: bool,
}

impl GatewayListeners {
    /// Returns the ports of listeners at which connections begin with a header of the PROXY protocol.
    pub fn proxied_ports(&self) -> BTreeSet<u16> {
        let ports = self.listeners.iter().map(|placed| placed.listener.port);
        ports.filter(|port| self.proxied.has(*port)).collect()
    }

    /// Returns the validations of clients: of Gateway API at the ports with open listeners for HTTPS,
    /// and of Istio's servers.
    pub fn client_validations(&self) -> Vec<ClientValidation> {
        let listeners = self.listeners.iter().map(|placed| &placed.listener);
        let open =
            listeners.filter(|it| it.closed.is_none() && it.protocol == ListenerProtocol::Https);
        let mut all = self.validation.of_ports(open.map(|it| it.port));
        all.extend(self.server_validations.iter().cloned());
        all
    }
}

impl TenantListeners {
    /// Returns whether a Gateway of Gateway API is Canal's, and has a listener of its own with this
    /// name if one is given.
    pub fn has_listener(
        &self,
        namespace: &Namespace,
        gateway: &ObjectName,
        section: Option<&str>,
    ) -> bool {
        let key = (namespace.clone(), gateway.clone());
        let Some(Some(found)) = self.gateways.get(&key) else {
            return false;
        };
        section.is_none_or(|section| {
            let mut own = found.listeners.iter();
            own.any(|it| {
                let name = it.section.as_ref();
                it.listener_set.is_none() && name.is_some_and(|name| name.as_str() == section)
            })
        })
    }

    /// Returns whether a Gateway is Canal's.
    pub fn is_own(&self, namespace: &Namespace, name: &ObjectName) -> bool {
        let key = (namespace.clone(), name.clone());
        matches!(self.gateways.get(&key), Some(Some(_)))
    }

    /// Returns whether Canal serves the Gateways of a class.
    pub fn is_own_class(&self, name: &ObjectName) -> bool {
        self.own_classes.contains(name)
    }

    /// Returns whether a ListenerSet adds its listeners to a Gateway of Canal's.
    pub fn has_set(&self, namespace: &Namespace, name: &ObjectName) -> bool {
        let key = (namespace.clone(), name.clone());
        matches!(self.listener_sets.get(&key), Some(Some(_)))
    }

    /// Returns a Gateway of Istio, if it is for Canal's ingress.
    pub fn of_istio(&self, namespace: &Namespace, name: &ObjectName) -> Option<&GatewayListeners> {
        let key = (namespace.clone(), name.clone());
        self.istio_gateways.get(&key)?.as_ref()
    }

    /// Returns the number of routes that would be on a closed listener if it were open.
    pub fn closed_routes(&self, gateway: &ServiceKey, listener: usize) -> usize {
        let key = (gateway.clone(), listener);
        self.closed_routes.get(&key).copied().unwrap_or_default()
    }

    /// Iterates over the Gateways that are Canal's: those of Gateway API by namespace and name, then
    /// those of Istio.
    pub fn gateways(&self) -> impl Iterator<Item = &GatewayListeners> {
        let of_istio = self.istio_gateways.values();
        self.gateways.values().chain(of_istio).flatten()
    }
}

/// Resolves the listeners of a tenant's objects of Gateway API, and reports what is wrong with them.
/// Also returns what further listeners of the tenant may take.
pub(crate) fn resolve<'a>(
    tenant: &TenantName,
    objects: &'a ListenerObjects<'a>,
    sink: &mut dyn FnMut(Diagnostic),
) -> (TenantListeners, TenantQuota<'a>) {
    let mut resolved = TenantListeners {
        namespaces: NamespaceLabels::new(&objects.namespaces),
        // Only an HTTPRoute and a GRPCRoute can claim one host, so without GRPCRoutes no host is
        // recorded.
        kind_hosts: objects.has_grpc_routes.then(BTreeMap::new),
        ..TenantListeners::default()
    };
    let classes = accepted_classes(objects, sink);
    resolved.own_classes = classes.own.keys().cloned().collect();
    let mut left = TenantQuota {
        listeners: LISTENERS_PER_TENANT_MAX,
        certificates: CertificateIndex::new(&objects.secrets, &objects.grants),
        authorities: AuthorityIndex::new(
            &objects.config_maps,
            &objects.secrets,
            &objects.trust_bundles,
            &objects.grants,
        ),
    };
    // The oldest Gateways come first, so that the limits close the newest.
    for gateway in &objects.gateways {
        let mut report = DocumentReport {
            document: gateway.document,
            sink: &mut *sink,
        };
        let listeners = accept(tenant, gateway, &classes, &mut left, &mut report);
        let metadata = &gateway.object.metadata;
        let key = (metadata.namespace.clone(), metadata.name.clone());
        resolved.gateways.insert(key, listeners);
    }
    // Sets come after all Gateways, because they add listeners to them.
    for set in &objects.listener_sets {
        let mut report = DocumentReport {
            document: set.document,
            sink: &mut *sink,
        };
        let metadata = &set.object.metadata;
        let key = (metadata.namespace.clone(), metadata.name.clone());
        let gateway = add_set(&mut resolved, set, &mut left, &mut report);
        resolved.listener_sets.insert(key, gateway);
    }
    (resolved, left)
}

/// What further listeners of a tenant may take.
pub(crate) struct TenantQuota<'a> {
    /// Number of listeners that the tenant may still get.
    pub(crate) listeners: usize,
    pub(crate) certificates: CertificateIndex<'a>,
    pub(crate) authorities: AuthorityIndex<'a>,
}

/// What a tenant's GatewayClasses mean: for each class of Canal's, the reason why its Gateways are
/// closed, if they are. Classes of other controllers have no entry.
struct AcceptedClasses {
    own: BTreeMap<ObjectName, Option<Arc<ListenerFault>>>,
    others: BTreeSet<ObjectName>,
}

fn accepted_classes(
    objects: &ListenerObjects<'_>,
    sink: &mut dyn FnMut(Diagnostic),
) -> AcceptedClasses {
    let mut classes = AcceptedClasses {
        own: BTreeMap::new(),
        others: BTreeSet::new(),
    };
    for class in &objects.classes {
        let mut report = DocumentReport {
            document: class.document,
            sink: &mut *sink,
        };
        let (name, spec) = (&class.object.metadata.name, &class.object.spec);
        // Another controller may serve the class, so this is no error.
        if spec.controller_name != CONTROLLER_NAME {
            let short = shorten(&spec.controller_name);
            let problem = format!("the class is of the controller {short:?}, so Canal ignores it");
            let fix = format!("write {CONTROLLER_NAME} if its Gateways are to be Canal's");
            report.warning(
                Code::ForeignGatewayClass,
                "spec.controllerName",
                problem,
                &fix,
            );
            classes.others.insert(name.clone());
            continue;
        }
        let fault = match (&spec.parameters_ref, class.document.faults.first()) {
            (Some(parameters), _) => {
                let problem = no_parameters(&parameters.kind);
                report.error(
                    Code::UnsupportedParameters,
                    "spec.parametersRef",
                    problem.clone(),
                    "remove the field",
                );
                Some(fault(ListenerFaultReason::InvalidParameters, problem))
            }
            (None, Some(rejected)) => Some(fault_of(rejected)),
            (None, None) => None,
        };
        classes.own.insert(name.clone(), fault);
    }
    // The default class needs no object.
    if let Ok(default) = ObjectName::new(DEFAULT_CLASS)
        && !classes.others.contains(&default)
    {
        classes.own.entry(default).or_default();
    }
    classes
}

fn no_parameters(kind: &str) -> String {
    format!("Canal has no parameters of kind {:?}", shorten(kind))
}

/// Returns the fault of the class of a Gateway, if it has one; `None` if the class is not Canal's, so
/// that Canal ignores the Gateway.
fn class_fault(
    class: &ObjectName,
    classes: &AcceptedClasses,
    report: &mut DocumentReport<'_>,
) -> Option<Option<Arc<ListenerFault>>> {
    let field = "spec.gatewayClassName";
    match classes.own.get(class) {
        Some(fault) => Some(fault.clone()),
        None if classes.others.contains(class) => {
            let problem =
                format!("GatewayClass {class} is not Canal's, so Canal ignores the Gateway");
            let fix = "name a GatewayClass of Canal's, such as canal, to have it served";
            report.warning(Code::ForeignGatewayClass, field, problem, fix);
            None
        }
        None => {
            let problem = format!("there is no GatewayClass {class}, so Canal ignores the Gateway");
            let fix = "name the class canal, or write a GatewayClass with Canal's controllerName";
            report.warning(Code::UnresolvedGatewayClass, field, problem, fix);
            None
        }
    }
}

/// Returns the namespaces whose ListenerSets may add listeners to a Gateway. A choice that cannot be
/// read admits no set, because it may have been meant to exclude some.
fn allowed_sets(
    gateway: &Written<'_, Gateway>,
    report: &mut DocumentReport<'_>,
) -> AllowedNamespaces {
    let choice = &gateway.object.spec.allowed_listeners.namespaces;
    let is_rejected = |fault: &RejectedField| {
        ["", "spec"].contains(&fault.field.as_str()) || is_within(&fault.field, ALLOWED_SETS)
    };
    match AllowedNamespaces::read(choice, AllowedNamespaces::None) {
        Ok(_) if gateway.document.faults.iter().any(is_rejected) => AllowedNamespaces::None,
        Ok(allowed) => allowed,
        Err(problem) => {
            let fix = "write from: All, from: Same, or from: Selector with a selector";
            let field = "spec.allowedListeners.namespaces";
            report.error(Code::InvalidListener, field, problem, fix);
            AllowedNamespaces::None
        }
    }
}

/// Returns the listeners of a Gateway; `None` if it is not Canal's.
fn accept(
    tenant: &TenantName,
    gateway: &Written<'_, Gateway>,
    classes: &AcceptedClasses,
    left: &mut TenantQuota<'_>,
    report: &mut DocumentReport<'_>,
) -> Option<GatewayListeners> {
    let (metadata, spec) = (&gateway.object.metadata, &gateway.object.spec);
    let class = &spec.gateway_class_name;
    let of_class = class_fault(class, classes, report)?;
    let Some(service) = gateway_service(tenant, &metadata.namespace, &metadata.name) else {
        // A name has 253 characters at most, and the service's name adds a suffix of 8.
        let fix = "use at most 245 characters";
        report.error(
            Code::LimitExceeded,
            "metadata.name",
            "the name is too long for a Gateway",
            fix,
        );
        return None;
    };
    // A Gateway is closed for the first of its faults.
    let mut object_fault = of_class;
    let addresses = requested_addresses(gateway, &mut object_fault, report);
    let annotations = GatewayAnnotations::read(metadata, &mut object_fault, report);
    if let Some(parameters) = &spec.infrastructure.parameters_ref {
        let problem = no_parameters(&parameters.kind);
        let field = "spec.infrastructure.parametersRef";
        report.error(
            Code::UnsupportedParameters,
            field,
            problem.clone(),
            "remove the field",
        );
        object_fault.get_or_insert(fault(ListenerFaultReason::InvalidParameters, problem));
    }
    if let Some(rejected) = fault_of_whole(&gateway.document.faults) {
        object_fault.get_or_insert_with(|| fault_of(rejected));
    }
    // A Gateway that is closed as a whole has a diagnostic already.
    if spec.listeners.is_empty() && object_fault.is_none() {
        let fix = "write at least one listener";
        report.warning(
            Code::GatewayWithoutListener,
            "spec.listeners",
            "the Gateway has no listener",
            fix,
        );
    }
    let validation = Arc::new(left.authorities.resolve(gateway, report));
    let source = ListenerSource {
        kind: "Gateway",
        validation: &validation,
        namespace: &metadata.namespace,
        listener_set: None,
        faults: &gateway.document.faults,
        object_fault: object_fault.as_ref(),
    };
    let mut gateway_so_far = (Vec::new(), GatewayCertificates::new());
    source.add(&spec.listeners, &mut gateway_so_far, left, report);
    let (listeners, certificates) = gateway_so_far;
    let allowed_sets = allowed_sets(gateway, report);
    Some(GatewayListeners {
        trusted_proxies: annotations.trusted_proxies,
        proxied: annotations.proxied,
        service,
        class: Some(class.clone()),
        addresses,
        listeners,
        certificates,
        validation: validation.clone(),
        server_validations: Vec::new(),
        closed: object_fault,
        allowed_sets,
    })
}

/// Returns the addresses that a Gateway requests. One that Canal cannot give closes the Gateway:
/// it may not be reachable by another one instead.
fn requested_addresses(
    gateway: &Written<'_, Gateway>,
    object_fault: &mut Option<Arc<ListenerFault>>,
    report: &mut DocumentReport<'_>,
) -> Vec<IpAddr> {
    let mut addresses = Vec::new();
    for (at, written) in gateway.object.spec.addresses.iter().enumerate() {
        let kind = written.kind.as_deref().unwrap_or("IPAddress");
        let short = shorten(&written.value);
        let problem = match (kind, written.value.parse::<IpAddr>()) {
            ("IPAddress", Ok(address)) if is_unusable(address) => {
                format!("{address} is not the address of one host on a network")
            }
            ("IPAddress", Ok(address)) => {
                addresses.push(address);
                continue;
            }
            // Without a value, any address of the type will do.
            ("IPAddress", Err(_)) if written.value.is_empty() => continue,
            ("IPAddress", Err(_)) => format!("{short:?} is not an address"),
            _ => format!(
                "addresses of type {:?} are not supported in this version",
                shorten(kind)
            ),
        };
        let fix = "write type: IPAddress with an address of the tier's pool, or remove it";
        report.error(
            Code::UnsupportedAddress,
            format!("spec.addresses[{at}]"),
            problem.clone(),
            fix,
        );
        object_fault.get_or_insert(fault(ListenerFaultReason::UnsupportedAddress, problem));
    }
    addresses
}

/// Returns whether no client can reach a Gateway by an address, on whatever network it is.
fn is_unusable(address: IpAddr) -> bool {
    address.is_loopback() || address.is_multicast() || address.is_unspecified()
}

/// Returns the first fault that concerns more than one listener. One that removed a listener from
/// the list is such a fault: the positions of those behind it are not those that were written.
fn fault_of_whole(faults: &[RejectedField]) -> Option<&RejectedField> {
    faults.iter().find(|fault| {
        let is_own = listener_field(&fault.field)
            .is_some_and(|(_, field)| !["name", "port", "protocol"].contains(&field));
        (fault.field.is_empty() || fault.field.starts_with("spec"))
            && !is_within(&fault.field, ALLOWED_SETS)
            && !is_within(&fault.field, GATEWAY_TLS)
            && !is_own
    })
}

/// Returns the position of the listener that a field is inside, and the name of the listener's
/// field; an empty name stands for one that needs quotes.
fn listener_field(field: &str) -> Option<(usize, &str)> {
    let (at, rest) = field.strip_prefix("spec.listeners[")?.split_once(']')?;
    let name = match rest.strip_prefix('.') {
        Some(rest) => rest.split(['.', '[']).next().unwrap_or_default(),
        None if rest.starts_with('[') => "",
        None => return None,
    };
    Some((at.parse().ok()?, name))
}

/// Where a listener is written.
struct ListenerSource<'a> {
    /// Kind of the object.
    kind: &'static str,
    /// That of the Gateway.
    validation: &'a FrontendValidation,
    namespace: &'a Namespace,
    listener_set: Option<&'a ObjectName>,
    faults: &'a [RejectedField],
    /// Closes all listeners of the object.
    object_fault: Option<&'a Arc<ListenerFault>>,
}

impl ListenerSource<'_> {
    /// Adds the listeners of one object, and their certificates, to those that its Gateway has from
    /// objects with precedence.
    fn add(
        &self,
        written: &[GatewayListener],
        (listeners, certificates): &mut (Vec<PlacedListener>, GatewayCertificates),
        quota: &mut TenantQuota<'_>,
        report: &mut DocumentReport<'_>,
    ) {
        let mut own_faults: BTreeMap<usize, Vec<&RejectedField>> = BTreeMap::new();
        for fault in self.faults {
            if let Some((at, _)) = listener_field(&fault.field) {
                own_faults.entry(at).or_default().push(fault);
            }
        }
        let first = listeners.len();
        let gateway_left = LISTENERS_PER_GATEWAY_MAX.saturating_sub(first);
        // Both limits hold; the diagnostic names the one that is reached first.
        let left = gateway_left.min(quota.listeners);
        for (at, listener) in written.iter().take(left).enumerate() {
            let faults = own_faults.get(&at).map_or(&[][..], Vec::as_slice);
            listeners.push(read_listener(listener, at, self, faults, report));
        }
        if written.len() > left {
            let (who, limit, fix) = if gateway_left <= quota.listeners {
                (
                    "Gateway",
                    LISTENERS_PER_GATEWAY_MAX,
                    "use a further Gateway",
                )
            } else {
                ("tenant", LISTENERS_PER_TENANT_MAX, "remove listeners")
            };
            let problem = format!(
                "with this one the {who} has more than {limit} listeners; it and those behind it are left out"
            );
            report.error(
                Code::LimitExceeded,
                format!("spec.listeners[{left}]"),
                problem,
                fix,
            );
        }
        quota.listeners -= listeners.len() - first;
        close_conflicts(listeners, first, report);
        // A listener that is closed needs no certificate, so no key is sent for it.
        for (at, placed) in listeners[first..].iter_mut().enumerate() {
            let listener = &mut placed.listener;
            if listener.protocol.terminates_tls() && listener.closed.is_none() {
                // Gateway API's frontend validation is for HTTPS only.
                if listener.protocol == ListenerProtocol::Https
                    && let PortValidation::Closed(fault) = self.validation.at(listener.port)
                {
                    listener.closed = Some(fault.clone());
                    continue;
                }
                let referrer = (self.kind, self.namespace);
                let tls = written[at].tls.as_ref();
                let field = format!("spec.listeners[{at}].tls");
                let found = quota
                    .certificates
                    .resolve(referrer, tls, &field, certificates, report);
                match found {
                    Ok(named) => placed.listener.certificates = named,
                    Err((reason, problem)) => {
                        placed.listener.closed = Some(fault(reason, problem));
                    }
                }
            }
        }
    }
}

/// Reads one listener. What is wrong with it closes it; `faults` are those inside it.
fn read_listener(
    written: &GatewayListener,
    at: usize,
    source: &ListenerSource<'_>,
    faults: &[&RejectedField],
    report: &mut DocumentReport<'_>,
) -> PlacedListener {
    let field = format!("spec.listeners[{at}]");
    let mut closed = source.object_fault.cloned();
    // A listener is closed for one reason: the object's, or else the first of its own.
    if let Some(rejected) = faults.first() {
        closed.get_or_insert_with(|| fault_of(rejected));
    }
    let mut is_host_broken = faults
        .iter()
        .any(|fault| listener_field(&fault.field).is_some_and(|(_, name)| name == "hostname"));
    let protocol = protocol(written, &field, &mut closed, report);
    let mut host = None;
    // Gateway API: an empty host name is that of all hosts, as none is.
    match written.hostname.as_deref().filter(|name| !name.is_empty()) {
        None => {}
        // Gateway API ignores the field for protocols without host names.
        Some(_) if matches!(protocol, ListenerProtocol::Tcp | ListenerProtocol::Other(_)) => {}
        Some(name) => match hostname::parse(name) {
            Ok(parsed) => host = Some(parsed),
            Err(problem) => {
                let fix = "write a name such as www.example.com or *.example.com";
                report.error(
                    Code::InvalidHostname,
                    format!("{field}.hostname"),
                    problem.clone(),
                    fix,
                );
                closed.get_or_insert(fault(ListenerFaultReason::Invalid, problem));
                is_host_broken = true;
            }
        },
    }
    if written.port.get() == HBONE_PORT {
        let problem = format!("port {HBONE_PORT} is that of Canal's own connections");
        report.error(
            Code::InvalidListener,
            format!("{field}.port"),
            problem.clone(),
            "use another port",
        );
        closed.get_or_insert(fault(ListenerFaultReason::Invalid, problem));
    }
    let kinds = route_kinds(&protocol);
    let (allowed, route_kinds) =
        allowed_routes(&written.allowed_routes, kinds, &field, &mut closed, report);
    let name = match source.listener_set {
        // Names are unique within an object only, and a Gateway may have several sets.
        Some(set) => format!("{}/{set}/{}", source.namespace, written.name),
        None => written.name.to_string(),
    };
    listener_filters::check(&written.filters, &protocol, &field, &mut closed, report);
    PlacedListener {
        listener: Listener {
            name,
            port: written.port.get(),
            protocol,
            host,
            certificates: Vec::new(),
            // The compiler finds the Services that filters name.
            filters: Vec::new(),
            closed,
        },
        section: Some(written.name.clone()),
        listener_set: source
            .listener_set
            .map(|set| (source.namespace.clone(), set.clone())),
        namespace: source.namespace.clone(),
        allowed,
        route_kinds,
        is_host_broken,
        // Gateway API redirects by routes.
        redirects_to_https: false,
    }
}

/// Reads the protocol of a listener, and closes the listener if Canal does not serve it.
fn protocol(
    written: &GatewayListener,
    field: &str,
    closed: &mut Option<Arc<ListenerFault>>,
    report: &mut DocumentReport<'_>,
) -> ListenerProtocol {
    let short = shorten(&written.protocol);
    let (protocol, problem) = match written.protocol.as_str() {
        "HTTP" => (ListenerProtocol::Http, None),
        "HTTPS" => (ListenerProtocol::Https, None),
        "TCP" => (ListenerProtocol::Tcp, None),
        "TLS" => (ListenerProtocol::Tls, None),
        // Gateway API knows it, so it is no typing error as below.
        "UDP" => {
            let problem = format!("{short} listeners are not served in this version");
            let found = (Code::UnsupportedProtocol, problem);
            (ListenerProtocol::Other(short), Some(found))
        }
        _ => {
            let problem = format!("{short:?} is not a protocol of listeners that Canal knows");
            let found = (Code::UnknownListenerProtocol, problem);
            (ListenerProtocol::Other(short), Some(found))
        }
    };
    if let Some((code, problem)) = problem {
        let fix = "use protocol: HTTP, HTTPS, TLS or TCP, or remove the listener";
        report.error(code, format!("{field}.protocol"), problem.clone(), fix);
        closed.get_or_insert(fault(ListenerFaultReason::UnsupportedProtocol, problem));
    }
    let mode = written.tls.as_ref().and_then(|tls| tls.mode.as_deref());
    let protocol = match (protocol, mode) {
        // Terminate is the default of the Gateway API.
        (ListenerProtocol::Tls, None | Some("Terminate")) => ListenerProtocol::TerminatedTls,
        (ListenerProtocol::Tls, Some(other)) if other != "Passthrough" => {
            let problem = format!("mode {:?} is not one of TLS listeners", shorten(other));
            let fix = "write mode: Terminate or mode: Passthrough";
            let field = format!("{field}.tls.mode");
            report.error(Code::UnsupportedProtocol, field, problem.clone(), fix);
            closed.get_or_insert(fault(ListenerFaultReason::UnsupportedValue, problem));
            ListenerProtocol::Tls
        }
        // The mode of HTTPS is checked with its certificates, and HTTP and TCP have no TLS at all.
        (protocol, _) => protocol,
    };
    let has_no_tls = matches!(protocol, ListenerProtocol::Http | ListenerProtocol::Tcp);
    if has_no_tls && written.tls.is_some() {
        let problem = format!("a listener of protocol {protocol} has no TLS");
        let fix = "use protocol: HTTPS or TLS, or remove tls";
        let field = format!("{field}.tls");
        report.error(Code::InvalidListener, field, problem.clone(), fix);
        closed.get_or_insert(fault(ListenerFaultReason::Invalid, problem));
    }
    protocol
}

/// Reads the routes that a listener allows: their namespaces and kinds.
fn allowed_routes(
    written: &AllowedRoutes,
    of_protocol: &[ObjectKind],
    field: &str,
    closed: &mut Option<Arc<ListenerFault>>,
    report: &mut DocumentReport<'_>,
) -> (AllowedNamespaces, Vec<ObjectKind>) {
    let allowed = AllowedNamespaces::read(&written.namespaces, AllowedNamespaces::Same)
        .unwrap_or_else(|problem| {
            let field = format!("{field}.allowedRoutes.namespaces");
            let fix = "write from: All, from: Same, or from: Selector with a selector";
            report.error(Code::InvalidListener, field, problem.clone(), fix);
            closed.get_or_insert(fault(ListenerFaultReason::Invalid, problem));
            // The listener is closed, and takes no route.
            AllowedNamespaces::None
        });
    let mut kinds = Vec::new();
    // Without a list, a listener allows all kinds of its protocol (Gateway API).
    if written.kinds.is_empty() {
        kinds.extend(of_protocol);
    }
    for (at, kind) in written.kinds.iter().enumerate() {
        let mut known = of_protocol.iter().copied();
        let known = known.find(|known| kind.group == GROUP && kind.kind == known.as_str());
        if let Some(known) = known {
            kinds.push(known);
            continue;
        }
        let short = shorten(&kind.kind);
        let problem = format!("routes of kind {short:?} cannot attach to the listener");
        let known: Vec<&str> = of_protocol.iter().map(|kind| kind.as_str()).collect();
        let fix = format!("write {}, or remove the kind", known.join(" or "));
        report.error(
            Code::UnsupportedRouteKind,
            format!("{field}.allowedRoutes.kinds[{at}]"),
            problem,
            &fix,
        );
    }
    // Each of the kinds has a diagnostic from above.
    if kinds.is_empty() {
        let problem = "the listener allows no kind of route that Canal can attach to it";
        closed.get_or_insert(fault(ListenerFaultReason::InvalidRouteKinds, problem));
    }
    (allowed, kinds)
}

/// Adds the listeners of a ListenerSet to its Gateway, and returns the Gateway's key.
fn add_set(
    resolved: &mut TenantListeners,
    set: &Written<'_, ListenerSet>,
    left: &mut TenantQuota<'_>,
    report: &mut DocumentReport<'_>,
) -> Option<(Namespace, ObjectName)> {
    let (metadata, spec) = (&set.object.metadata, &set.object.spec);
    let parent = &spec.parent_ref;
    if parent.group != GROUP || parent.kind != "Gateway" {
        let problem = "a ListenerSet adds listeners to a Gateway only";
        let fix = "write kind: Gateway and its group, or remove both";
        report.error(Code::UnsupportedParent, "spec.parentRef.kind", problem, fix);
        return None;
    }
    // A reference without a namespace is to a Gateway in the set's.
    let namespace = parent.namespace.as_ref().unwrap_or(&metadata.namespace);
    let key = (namespace.clone(), parent.name.clone());
    let Some(gateway) = resolved.gateways.get_mut(&key) else {
        let problem = format!("there is no Gateway {namespace}/{}", parent.name);
        // Only a warning, because the Gateway may be created after its set.
        report.warning(
            Code::UnresolvedGateway,
            "spec.parentRef.name",
            problem,
            "create it or correct the name",
        );
        return None;
    };
    let Some(gateway) = gateway else {
        let problem = format!("Gateway {namespace}/{} is not Canal's", parent.name);
        let fix = "the set belongs to the Gateway's controller";
        report.warning(
            Code::ForeignGatewayClass,
            "spec.parentRef.name",
            problem,
            fix,
        );
        return None;
    };
    let is_allowed = gateway
        .allowed_sets
        .has(namespace, &metadata.namespace, &resolved.namespaces);
    if !is_allowed {
        // Only a warning, because the Gateway may allow the set later.
        let problem = format!(
            "Gateway {namespace}/{} takes no ListenerSets of namespace {}",
            parent.name, metadata.namespace
        );
        let fix = "allow them in the Gateway's spec.allowedListeners";
        report.warning(Code::ListenerSetNotAllowed, "spec.parentRef", problem, fix);
        return None;
    }
    // What closes the Gateway concerns all that clients reach by it.
    let of_set = || fault_of_whole(&set.document.faults).map(fault_of);
    let object_fault = gateway.closed.clone().or_else(of_set);
    let source = ListenerSource {
        kind: "ListenerSet",
        validation: &gateway.validation.clone(),
        namespace: &metadata.namespace,
        listener_set: Some(&metadata.name),
        faults: &set.document.faults,
        object_fault: object_fault.as_ref(),
    };
    // Both are taken for the call, which extends them together.
    let mut gateway_so_far = (
        std::mem::take(&mut gateway.listeners),
        std::mem::take(&mut gateway.certificates),
    );
    source.add(&spec.listeners, &mut gateway_so_far, left, report);
    (gateway.listeners, gateway.certificates) = gateway_so_far;
    Some(key)
}

/// Closes listeners that are not distinct: those at `first` and behind it that have a conflict with a
/// listener in front of `first`, which comes from an object with precedence; and all of the others
/// that have one with each other, as they are of one object. A listener that is closed for that takes
/// nothing from those behind it.
fn close_conflicts(
    listeners: &mut [PlacedListener],
    first: usize,
    report: &mut DocumentReport<'_>,
) {
    let (before, own) = listeners.split_at(first);
    let between = |own: &PlacedListener, other: &PlacedListener| {
        conflict(own, other).map(|reason| (reason, other.listener.name.clone()))
    };
    let mut conflicts: BTreeMap<usize, (ListenerFaultReason, String)> = BTreeMap::new();
    for (at, listener) in own.iter().enumerate() {
        let mut others = before.iter().filter(|it| !is_conflicted(it));
        if let Some(found) = others.find_map(|other| between(listener, other)) {
            conflicts.insert(at, found);
        }
    }
    let left: Vec<(usize, &PlacedListener)> = own
        .iter()
        .enumerate()
        .filter(|(at, _)| !conflicts.contains_key(at))
        .collect();
    for (at, listener) in own.iter().enumerate() {
        // Listeners of one name are ambiguous whatever else closes them.
        let of_name = own.iter().enumerate();
        let of_name = of_name.filter(|(_, it)| it.listener.name == listener.listener.name);
        // A listener with a conflict from above is compared by name only.
        let is_left = !conflicts.contains_key(&at);
        let others = left.iter().copied().filter(|_| is_left).chain(of_name);
        let mut others = others.filter(|(other, _)| *other != at);
        if let Some(found) = others.find_map(|(_, other)| between(listener, other)) {
            conflicts.entry(at).or_insert(found);
        }
    }
    for (at, (reason, other)) in conflicts {
        let own = &mut listeners[first + at];
        let port = own.listener.port;
        let problem = match reason {
            ListenerFaultReason::ProtocolConflict => {
                format!("listener {other} has another protocol on port {port}")
            }
            ListenerFaultReason::HostnameConflict => {
                format!("listener {other} has the same hostname on port {port}")
            }
            // `conflict` has only one other reason.
            _ => format!("listener {other} has the same name"),
        };
        let field = format!("spec.listeners[{at}]");
        let fix = "give the listeners different names, and different ports or hostnames";
        report.error(Code::ListenerConflict, field, problem.clone(), fix);
        own.listener.closed.get_or_insert(fault(reason, problem));
    }
}

/// Returns whether a listener is closed because of a conflict with another one.
fn is_conflicted(listener: &PlacedListener) -> bool {
    use ListenerFaultReason::{HostnameConflict, ProtocolConflict};
    let closed = listener.listener.closed.as_ref();
    closed.is_some_and(|fault| matches!(fault.reason, HostnameConflict | ProtocolConflict))
}

/// Returns why two listeners of a Gateway are not distinct, if they are not.
fn conflict(a: &PlacedListener, b: &PlacedListener) -> Option<ListenerFaultReason> {
    if a.listener.name == b.listener.name {
        return Some(ListenerFaultReason::Invalid);
    }
    // UDP has ports of its own.
    let is_udp = |listener: &PlacedListener| matches!(&listener.listener.protocol, ListenerProtocol::Other(name) if name == "UDP");
    if a.listener.port != b.listener.port || is_udp(a) != is_udp(b) {
        return None;
    }
    let (own, other) = (&a.listener.protocol, &b.listener.protocol);
    if !own.shares_port_with(other) {
        return Some(ListenerFaultReason::ProtocolConflict);
    }
    let is_broken = a.is_host_broken || b.is_host_broken;
    (!is_broken && a.listener.host == b.listener.host)
        .then_some(ListenerFaultReason::HostnameConflict)
}
