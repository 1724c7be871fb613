//! What a file of a corpus needs around it to be compiled: a tenant, and the services and the
//! GatewayClasses to which its documents refer. It evaluates nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::sync::Arc;

use canal_attachment::CONTROLLER_NAME;
use canal_model::ids::{Namespace, ObjectName, ServiceKey, TenantName};
use canal_model::policy::gateway_api::{BackendRef, ParentRef, RouteBackendRef};
use canal_model::policy::{Document, Object, ObjectKind};

/// File name of the documents that this module makes.
const MADE: &str = "surroundings";

/// The tenant in which each file is compiled, on the cloud tier. Its ranges have room for the
/// addresses that the corpora write.
const TENANT: &str = "
apiVersion: canal.mesh/v1
kind: Tenant
metadata: {name: corpus}
spec:
  vni: 1
  trustDomain: corpus.example
  podCidrs: [10.0.0.0/9]
  serviceCidrs: [10.128.0.0/9]
  gatewayCidrs: [198.18.0.0/20]
";

/// The objects around the files of a corpus.
#[derive(Debug)]
pub(crate) struct Surroundings {
    pub(crate) tenant: TenantName,
    documents: Vec<Arc<Document>>,
    /// Whether the services that a file names are made for it.
    makes_services: bool,
}

impl Surroundings {
    /// Reads the objects of a corpus's base files. Without any, each file gets the services that it
    /// names.
    pub(crate) fn new<'t>(base: impl IntoIterator<Item = (&'t str, &'t str)>) -> Self {
        let mut documents = parsed(MADE, TENANT);
        let of_tenant = documents.len();
        for (path, text) in base {
            documents.extend(parsed(&format!("base/{path}"), text));
        }
        // Every kind of object except the provider's is the tenant's own.
        documents.retain(|document| {
            let kind = document.object.kind();
            kind == ObjectKind::Tenant || !kind.is_providers()
        });
        Self {
            tenant: TenantName::new("corpus").expect("the name is valid"),
            makes_services: documents.len() == of_tenant,
            documents,
        }
    }

    /// Returns the objects of a file with those around them. Each GatewayClass that a document names
    /// is Canal's, as if the user had written the file for Canal.
    pub(crate) fn around(&self, mut own: Vec<Document>) -> Vec<Arc<Document>> {
        let mut missing = BTreeMap::new();
        let mut classes = BTreeSet::new();
        for document in &mut own {
            match &mut document.object {
                Object::GatewayClass(class) => {
                    class.spec.controller_name = CONTROLLER_NAME.to_owned();
                }
                Object::Gateway(gateway) => {
                    classes.insert(gateway.spec.gateway_class_name.clone());
                }
                _ => {}
            }
        }
        if self.makes_services {
            for document in &own {
                self.services_of(&document.object, &mut missing);
            }
        }
        let mut all: Vec<Arc<Document>> = own.into_iter().map(Arc::new).collect();
        let known: BTreeSet<_> = all.iter().map(|document| document.object.key()).collect();
        let around = self
            .documents
            .iter()
            .cloned()
            .chain(headless_services(&missing))
            .chain(gateway_classes(&classes));
        all.extend(around.filter(|document| !known.contains(&document.object.key())));
        all
    }

    /// Adds the services that an object names by a name of the cluster, each with its ports.
    fn services_of(&self, object: &Object, found: &mut NamedServices) {
        let namespace = &object.metadata().namespace;
        match object {
            Object::HttpRoute(route) => {
                self.add_parents(found, namespace, &route.spec.parent_refs);
                for rule in &route.spec.rules {
                    self.add_backends(found, namespace, &rule.backend_refs);
                    let of_backends = rule
                        .backend_refs
                        .iter()
                        .flat_map(|backend| &backend.filters);
                    for filter in rule.filters.iter().chain(of_backends) {
                        let mirror = filter.request_mirror.iter().map(|own| &own.backend_ref);
                        let authorizer = filter.external_auth.iter().map(|own| &own.backend_ref);
                        mirror
                            .chain(authorizer)
                            .for_each(|backend| self.add_backend(found, namespace, backend));
                    }
                }
            }
            Object::GrpcRoute(route) => {
                self.add_parents(found, namespace, &route.spec.parent_refs);
                for rule in &route.spec.rules {
                    self.add_backends(found, namespace, &rule.backend_refs);
                    let of_backends = rule
                        .backend_refs
                        .iter()
                        .flat_map(|backend| &backend.filters);
                    for filter in rule.filters.iter().chain(of_backends) {
                        if let Some(mirror) = &filter.request_mirror {
                            self.add_backend(found, namespace, &mirror.backend_ref);
                        }
                    }
                }
            }
            // A UDPRoute of the corpora has only Gateways as parents.
            Object::UdpRoute(route) => {
                let backends = route.spec.rules.iter().flat_map(|rule| &rule.backend_refs);
                backends.for_each(|backend| self.add_backend(found, namespace, backend));
            }
            Object::TlsRoute(route) => {
                self.add_parents(found, namespace, &route.spec.parent_refs);
                let backends = route.spec.rules.iter().flat_map(|rule| &rule.backend_refs);
                backends.for_each(|backend| self.add_backend(found, namespace, backend));
            }
            Object::TcpRoute(route) => {
                self.add_parents(found, namespace, &route.spec.parent_refs);
                let backends = route.spec.rules.iter().flat_map(|rule| &rule.backend_refs);
                backends.for_each(|backend| self.add_backend(found, namespace, backend));
            }
            Object::VirtualService(virtual_service) => {
                for host in &virtual_service.spec.hosts {
                    self.add_host(found, namespace, host, None);
                }
                let spec = &virtual_service.spec;
                let routes = spec.http.iter().flat_map(|rule| &rule.route);
                let mirrors = spec.http.iter().flat_map(|rule| {
                    let others = rule.mirrors.iter().map(|other| &other.destination);
                    rule.mirror.iter().chain(others)
                });
                let rules = spec.tls.iter().chain(&spec.tcp);
                let of_connections = rules.flat_map(|rule| &rule.route);
                let destinations = routes
                    .map(|share| &share.destination)
                    .chain(of_connections.map(|share| &share.destination))
                    .chain(mirrors);
                for destination in destinations {
                    let port = destination.port.as_ref().map(|port| port.number.get());
                    self.add_host(found, namespace, &destination.host, port);
                }
            }
            Object::DestinationRule(rule) => {
                self.add_host(found, namespace, &rule.spec.host, None);
            }
            // Nobody checked whether documents of other kinds need services.
            _ => {}
        }
    }

    /// Adds the services that the parents of a route name.
    fn add_parents(&self, found: &mut NamedServices, namespace: &Namespace, parents: &[ParentRef]) {
        for parent in parents.iter().filter(|parent| parent.kind == "Service") {
            let namespace = parent.namespace.as_ref().unwrap_or(namespace);
            let port = parent.port.map(u16::from);
            self.add(found, namespace, parent.name.as_str(), port);
        }
    }

    fn add_backends<F>(
        &self,
        found: &mut NamedServices,
        own: &Namespace,
        backends: &[RouteBackendRef<F>],
    ) {
        for backend in backends {
            self.add_backend(found, own, &backend.reference());
        }
    }

    fn add_backend(&self, found: &mut NamedServices, own: &Namespace, backend: &BackendRef) {
        if backend.kind == "Service" {
            let namespace = backend.namespace.as_ref().unwrap_or(own);
            let port = backend.port.map(u16::from);
            self.add(found, namespace, backend.name.as_str(), port);
        }
    }

    /// Adds the service of a host of Istio's. A name of two or three parts may be one outside the
    /// cluster, so only short and full names are made services.
    fn add_host(&self, found: &mut NamedServices, own: &Namespace, host: &str, port: Option<u16>) {
        match host.split('.').collect::<Vec<_>>().as_slice() {
            [name] => self.add(found, own, name, port),
            [name, namespace, "svc", "cluster", "local"] => {
                if let Ok(namespace) = Namespace::new(namespace) {
                    self.add(found, &namespace, name, port);
                }
            }
            _ => {}
        }
    }

    fn add(&self, found: &mut NamedServices, namespace: &Namespace, name: &str, port: Option<u16>) {
        let Ok(name) = ObjectName::new(name) else {
            return;
        };
        let key = ServiceKey {
            tenant: self.tenant.clone(),
            namespace: namespace.clone(),
            name,
        };
        found.entry(key).or_default().extend(port);
    }
}

/// Services with the ports by which documents name them.
type NamedServices = BTreeMap<ServiceKey, BTreeSet<u16>>;

/// Makes the services: headless, because no client dials them, and speaking HTTP.
fn headless_services(services: &NamedServices) -> Vec<Arc<Document>> {
    let mut text = String::new();
    for (key, ports) in services {
        let ports = if ports.is_empty() {
            "{name: http, port: 80}".to_owned()
        } else {
            let one = |port: &u16| format!("{{name: http-{port}, port: {port}}}");
            ports.iter().map(one).collect::<Vec<_>>().join(", ")
        };
        let (namespace, name) = (&key.namespace, &key.name);
        // Writing to a String cannot fail.
        let _ = write!(
            text,
            "---\napiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: {namespace}}}\n\
             spec: {{clusterIP: None, selector: {{app: {name}}}, ports: [{ports}]}}\n"
        );
    }
    parsed(MADE, &text)
}

/// Makes a GatewayClass of Canal's for each name.
fn gateway_classes(names: &BTreeSet<ObjectName>) -> Vec<Arc<Document>> {
    let class = |name: &ObjectName| {
        format!(
            "---\napiVersion: gateway.networking.k8s.io/v1\nkind: GatewayClass\n\
             metadata: {{name: {name}}}\nspec: {{controllerName: {CONTROLLER_NAME}}}\n"
        )
    };
    let text: String = names.iter().map(class).collect();
    parsed(MADE, &text)
}

fn parsed(path: &str, text: &str) -> Vec<Arc<Document>> {
    let documents = canal_sources::parse(path, text).documents;
    documents.into_iter().map(Arc::new).collect()
}
