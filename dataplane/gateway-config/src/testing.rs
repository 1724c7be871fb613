//! Resources of one tenant for tests of this crate and of the engine. It asserts nothing. Start
//! with [`set_of`].

use std::sync::Arc;

use canal_model::ids::{Generation, ServiceId, ServiceKey, Vni};
use canal_model::load_balancing::{
    ConsistentHash, HashKey, HashTableKind, LoadBalancer, PortLoadBalancer,
};
use canal_model::program::*;
use canal_router::RoutableRequest;

use crate::{EndpointSet, SnapshotBuilder};

/// Returns a set of `endpoints` endpoints, for tests of the endpoint selection.
pub fn set_of(endpoints: usize) -> EndpointSet {
    set_with(endpoints, Vec::new())
}

/// Returns a set of `endpoints` endpoints whose load balancer hashes the client's address.
pub fn hashing_set_of(endpoints: usize) -> EndpointSet {
    let hash = ConsistentHash {
        key: HashKey::SourceIp,
        table: HashTableKind::Ring { size_min: 1024 },
    };
    let load_balancer = PortLoadBalancer {
        port: 80,
        subset: Labels::new(),
        load_balancer: LoadBalancer::ConsistentHash(Box::new(hash)),
    };
    set_with(endpoints, vec![load_balancer])
}

fn set_with(endpoints: usize, load_balancers: Vec<PortLoadBalancer>) -> EndpointSet {
    let mut builder = SnapshotBuilder::new("gw", None, None);
    let Resource::Service(own) = &*service("s", &[80]) else {
        unreachable!("it is a service")
    };
    let own = Service {
        load_balancers,
        ..own.clone()
    };
    let mut all = vec![Arc::new(Resource::Service(own))];
    all.extend((0..endpoints).map(|n| workload(&format!("w-{n}"), n as u8, "s")));
    let snapshot = builder.apply(&all, &[], Generation(1));
    let port = snapshot
        .tenant("t")
        .unwrap()
        .service(&key("s"))
        .unwrap()
        .port(80)
        .unwrap()
        .slot;
    let set = snapshot.set(port).unwrap();
    EndpointSet {
        id: set.id,
        service: set.service.clone(),
        port: 80,
        protocol: set.protocol,
        pool: set.pool,
        policy_paths: set.policy_paths,
        exists: true,
        filters: set.filters,
        load_balancing: set.load_balancing.clone(),
        endpoints: set.endpoints.clone(),
    }
}

/// A request to route, without a query and without headers.
pub struct PlainRequest {
    pub host: &'static str,
    pub method: &'static str,
    pub path: &'static str,
}

impl RoutableRequest for PlainRequest {
    fn host(&self) -> &[u8] {
        self.host.as_bytes()
    }
    fn method(&self) -> &[u8] {
        self.method.as_bytes()
    }
    fn path(&self) -> &[u8] {
        self.path.as_bytes()
    }
    fn query(&self) -> Option<&[u8]> {
        None
    }
    fn header(&self, _: &str, _: &mut dyn FnMut(&[u8])) {}
}

/// Returns the key of a service of tenant `t`.
pub fn key(name: &str) -> ServiceKey {
    format!("t/ns/{name}").parse().unwrap()
}

/// Returns the precedence of the first match of a route.
pub fn first_precedence() -> Precedence {
    Precedence {
        class: 0,
        specificity: [0; 5],
        created: 0,
        object: String::new(),
        indexes: [0, 0],
    }
}

/// Returns the resource of tenant `t`.
pub fn tenant() -> Arc<Resource> {
    tenant_named("t")
}

/// Returns a tenant whose network is numbered by the first letter of its name.
pub fn tenant_named(name: &str) -> Arc<Resource> {
    Arc::new(Resource::Tenant(Tenant {
        name: name.parse().unwrap(),
        vni: Vni::new(u32::from(name.as_bytes()[0])).unwrap(),
        trust_domain: format!("{name}.example").parse().unwrap(),
        pod_cidrs: vec![],
        gateway_cidrs: vec![],
        outbound_traffic_policy: OutboundTrafficPolicy::Deny,
        resolvers: Vec::new(),
        keys: Default::default(),
        shares: Default::default(),
    }))
}

/// Returns a service with HTTP/1.1 ports.
pub fn service(name: &str, ports: &[u16]) -> Arc<Resource> {
    Arc::new(Resource::Service(Service {
        key: key(name),
        id: ServiceId::new(1).unwrap(),
        hostname: format!("{name}.ns"),
        vips: vec![format!("10.96.0.{}", name.as_bytes()[0]).parse().unwrap()],
        ports: ports
            .iter()
            .map(|port| ServicePort {
                port: *port,
                name: String::new(),
                protocol: AppProtocol::Http1,
            })
            .collect(),
        upstream_pool: Default::default(),
        policy_paths: Default::default(),
        load_balancers: Vec::new(),
    }))
}

/// Returns the first rule of the HTTPRoute `name`, for all ports of a service, with one match by
/// path.
pub fn route(
    parent: ServiceKey,
    name: &str,
    (precedence, path): (Precedence, PathMatch),
    action: RouteAction,
) -> RouteRule {
    RouteRule {
        key: RouteKey {
            tenant: parent.tenant.clone(),
            kind: "HTTPRoute".into(),
            namespace: parent.namespace.clone(),
            name: name.parse().unwrap(),
            rule: "0".into(),
        },
        parent,
        parent_port: None,
        consumer: None,
        hosts: vec![],
        matches: vec![HttpMatch {
            precedence,
            path,
            method: None,
            headers: vec![],
            query: vec![],
        }],
        filters: None,
        attempts: None,
        faults: None,
        cors: None,
        mirrors: Vec::new(),
        action,
    }
}

/// Returns the action that forwards all requests to port 80 of a service of tenant `t`, to the
/// workloads of this version if it is not empty.
pub fn forward_to(service: &str, version: &str) -> RouteAction {
    let subset = match version {
        "" => Labels::new(),
        _ => [("version".to_owned(), version.to_owned())].into(),
    };
    RouteAction::Split(vec![Backend {
        weight: 1,
        filters: None,
        target: BackendTarget::Service {
            service: key(service),
            port: 80,
            subset,
        },
    }])
}

/// Returns a ready workload with one address that serves a service on port 80.
pub fn workload(name: &str, host: u8, of: &str) -> Arc<Resource> {
    Arc::new(Resource::Workload(Workload {
        tenant: "t".parse().unwrap(),
        namespace: "ns".parse().unwrap(),
        name: name.parse().unwrap(),
        service_account: "sa".parse().unwrap(),
        node: "n".parse().unwrap(),
        az: "az1".parse().unwrap(),
        addresses: vec![format!("10.1.0.{host}").parse().unwrap()],
        labels: [("version".to_string(), name.to_string())].into(),
        ready: true,
        tunnel: TunnelProtocol::Hbone,
        endpoints: vec![EndpointPort {
            service: key(of),
            port: 80,
            target_port: 8080,
        }],
        udp_ports: Default::default(),
    }))
}
