//! A small world of tenants as the catalog has it, and a model subscriber that checks every
//! response.

use super::*;

/// Short description of one tenant: its services, the workloads behind them, and the routes of
/// services.
#[derive(Clone, Default)]
pub(super) struct TenantScript {
    pub(super) services: BTreeMap<String, u32>,
    /// Workload name to (service, node, ready).
    pub(super) workloads: BTreeMap<String, (String, String, bool)>,
    /// Service name to the services that its route splits to.
    pub(super) routes: BTreeMap<String, Vec<String>>,
    pub(super) gateways: BTreeSet<String>,
    /// Names of the tenant's authorization policies.
    pub(super) policies: BTreeSet<String>,
    pub(super) is_partial: bool,
}

pub(super) fn tenant(name: &str) -> TenantName {
    TenantName::new(name).unwrap()
}

pub(super) fn itself(name: &TenantName) -> program::Tenant {
    program::Tenant {
        name: name.clone(),
        vni: canal_model::ids::Vni::new(7).unwrap(),
        trust_domain: format!("{name}.example").parse().unwrap(),
        pod_cidrs: vec![],
        gateway_cidrs: vec![],
        outbound_traffic_policy: program::OutboundTrafficPolicy::Deny,
        resolvers: Vec::new(),
        keys: Default::default(),
        shares: Default::default(),
    }
}

fn no_precedence() -> Precedence {
    Precedence {
        class: 0,
        specificity: [0; 5],
        created: 0,
        object: String::new(),
        indexes: [0; 2],
    }
}

/// What the compiler would make of `script`. A service has at most one route and that one match, so
/// precedence decides nothing and is zero.
pub(super) fn resources(name: &str, script: &TenantScript) -> Vec<Resource> {
    // Fields on which no scope depends are empty or the same in all resources.
    let t = tenant(name);
    let key = |s: &str| format!("{name}/shop/{s}").parse().unwrap();
    let mut out = vec![Resource::Tenant(itself(&t))];
    out.extend(script.gateways.iter().map(|g| {
        Resource::GatewayReplica(program::GatewayReplica {
            tenant: t.clone(),
            replica: g.parse().unwrap(),
            az: "az1".parse().unwrap(),
            addresses: vec![],
            draining: false,
        })
    }));
    out.extend(script.services.iter().map(|(s, id)| {
        Resource::Service(Service {
            key: key(s),
            id: canal_model::ids::ServiceId::new(*id).unwrap(),
            hostname: format!("{s}.shop.svc.cluster.local"),
            vips: vec![],
            ports: vec![],
            upstream_pool: Default::default(),
            policy_paths: Default::default(),
            load_balancers: Vec::new(),
        })
    }));
    out.extend(script.workloads.iter().map(|(w, (service, node, ready))| {
        Resource::Workload(Workload {
            tenant: t.clone(),
            namespace: "shop".parse().unwrap(),
            name: w.parse().unwrap(),
            service_account: "default".parse().unwrap(),
            node: node.parse().unwrap(),
            az: "az1".parse().unwrap(),
            addresses: vec![],
            labels: BTreeMap::new(),
            ready: *ready,
            tunnel: TunnelProtocol::Hbone,
            endpoints: vec![program::EndpointPort {
                service: key(service),
                port: 80,
                target_port: 8080,
            }],
            udp_ports: Default::default(),
        })
    }));
    out.extend(script.policies.iter().map(|p| refused::policy(&t, p)));
    out.extend(script.routes.iter().map(|(s, to)| {
        let backend = |b: &String| Backend {
            weight: 1,
            filters: None,
            target: BackendTarget::Service {
                service: key(b),
                port: 80,
                subset: BTreeMap::new(),
            },
        };
        Resource::Route(RouteRule {
            key: RouteKey {
                tenant: t.clone(),
                kind: "HTTPRoute".into(),
                namespace: "shop".parse().unwrap(),
                name: s.parse().unwrap(),
                rule: "0".into(),
            },
            parent: key(s),
            parent_port: None,
            consumer: None,
            hosts: vec![],
            matches: vec![HttpMatch {
                precedence: no_precedence(),
                path: PathMatch::ElementPrefix("/".into()),
                method: None,
                headers: vec![],
                query: vec![],
            }],
            filters: None,
            attempts: None,
            faults: None,
            cors: None,
            mirrors: Vec::new(),
            action: RouteAction::Split(to.iter().map(backend).collect()),
        })
    }));
    out
}

#[derive(Default)]
pub(super) struct StreamWorld {
    pub(super) catalog: Catalog,
}

impl StreamWorld {
    pub(super) fn set(&mut self, name: &str, script: &TenantScript) {
        let t = tenant(name);
        let generation = Generation(self.catalog.generation.0 + 1);
        let gateways = script
            .gateways
            .iter()
            .map(|g| GatewayClaim {
                replica: g.parse().unwrap(),
                addresses: vec![],
            })
            .collect();
        let isolation = Isolation {
            vni: canal_model::ids::Vni::new(7).unwrap(),
            trust_domain: format!("{name}.example").parse().unwrap(),
            pod_cidrs: vec![],
            gateway_cidrs: vec![],
        };
        let compiled = CompiledTenant {
            resources: if script.is_partial {
                vec![]
            } else {
                resources(name, script).into_iter().map(Arc::new).collect()
            },
            complete: !script.is_partial,
            ..CompiledTenant::nothing(TenantClaims {
                tenant: t.clone(),
                isolation: Some(isolation),
                gateways,
            })
        };
        let view = TenantCatalog::next(
            self.catalog.tenants.get(&t).map(Arc::as_ref),
            compiled,
            generation,
        );
        self.catalog.tenants.insert(t, Arc::new(view));
        self.catalog.generation = generation;
    }

    pub(super) fn remove(&mut self, name: &str) {
        self.catalog.tenants.remove(&tenant(name));
        self.catalog.generation = Generation(self.catalog.generation.0 + 1);
    }
}

pub(super) fn shop(services: &[&str]) -> TenantScript {
    let mut script = TenantScript {
        gateways: ["g1".to_string()].into(),
        ..TenantScript::default()
    };
    for (i, s) in services.iter().enumerate() {
        script.services.insert(s.to_string(), i as u32 + 1);
        script.workloads.insert(
            format!("{s}-0"),
            (s.to_string(), format!("n{}", i % 2), true),
        );
        script.routes.insert(s.to_string(), vec![s.to_string()]);
    }
    script
}

pub(super) fn node(t: &str, name: &str) -> Principal {
    Principal::Node {
        name: name.parse().unwrap(),
        tenant: tenant(t),
        az: "az1".parse().unwrap(),
    }
}
pub(super) fn gateway(name: &str) -> Principal {
    Principal::Gateway {
        name: name.parse().unwrap(),
        az: "az1".parse().unwrap(),
    }
}

/// A model subscriber that keeps what it is sent. It refuses a response with one of `refuses`: as a
/// whole, or by name as Canal's data planes do.
pub(super) struct TestSubscriber {
    pub(super) session: SubscriberStream,
    pub(super) resources: BTreeMap<(ResourceKind, String), (String, Resource)>,
    pub(super) refuses: BTreeSet<String>,
    pub(super) by_name: bool,
    /// True for a tenant whose held resources agreed with its manifest when that came.
    pub(super) sealed: BTreeMap<String, bool>,
    /// Every response in the form `Kind +a -b`.
    pub(super) log: Vec<String>,
    pub(super) check_parents: bool,
}

impl TestSubscriber {
    pub(super) fn new(principal: Principal) -> Self {
        Self::with_limits(principal, SessionLimits::default())
    }

    pub(super) fn with_limits(principal: Principal, limits: SessionLimits) -> Self {
        let mut c = Self {
            session: SubscriberStream::new(principal, limits),
            // A manifest repeats names and versions of what the log lists already.
            resources: BTreeMap::new(),
            refuses: BTreeSet::new(),
            by_name: false,
            sealed: BTreeMap::new(),
            log: Vec::new(),
            check_parents: true,
        };
        c.subscribe();
        c
    }

    pub(super) fn subscribe(&mut self) {
        for kind in ResourceKind::ALL {
            let held = self.resources.iter().filter(|((k, _), _)| *k == kind);
            let initial_resource_versions = held
                .map(|((_, n), (v, _))| (n.clone(), v.clone()))
                .collect();
            let request = DeltaDiscoveryRequest {
                initial_resource_versions,
                ..request(kind)
            };
            assert_eq!(
                self.session.handle_request_alone(request).unwrap(),
                SubscriberMessage::Subscription
            );
        }
    }

    pub(super) fn reconnect(&mut self) {
        self.session = SubscriberStream::new(self.session.principal.clone(), self.session.limits);
        self.subscribe();
    }

    /// Takes one response and answers it; returns false if there is none.
    pub(super) fn step(&mut self, world: &StreamWorld) -> bool {
        let Some(response) = self.session.next_response(&world.catalog) else {
            return false;
        };
        self.answer(response);
        true
    }

    pub(super) fn answer(&mut self, response: DeltaDiscoveryResponse) {
        let kind = kind_of(&response.type_url).unwrap();
        let names = response.resources.iter().map(|r| format!("+{}", r.name));
        let gone = response.removed_resources.iter().map(|n| format!("-{n}"));
        self.log.push(
            format!(
                "{kind:?} {}",
                names.chain(gone).collect::<Vec<_>>().join(" ")
            )
            .trim()
            .to_string(),
        );
        // The log omits manifests, which only repeat names and versions.
        if kind == ResourceKind::Manifest {
            self.log.pop();
        }
        let (refused, good): (Vec<_>, Vec<_>) = response
            .resources
            .clone()
            .into_iter()
            .partition(|r| self.refuses.contains(&r.name));
        let mut answer = DeltaDiscoveryRequest {
            response_nonce: response.nonce.clone(),
            ..request(kind)
        };
        if refused.is_empty() {
            self.take(kind, response);
            assert_eq!(
                self.session.handle_request_alone(answer).unwrap(),
                SubscriberMessage::Ack
            );
            return;
        }
        let mut error = WireStatus {
            // The code is INVALID_ARGUMENT; the controller reads only the message and the details.
            code: 3,
            message: format!("{} is not good", refused[0].name),
            ..WireStatus::default()
        };
        // A data plane that names its refusals applies the other resources of the response.
        if self.by_name {
            let names = refused
                .into_iter()
                .map(|r| (r.name.clone(), format!("{} is not good", r.name)));
            error.details = vec![canal_wire::southbound::refused::pack(names)];
            self.take(
                kind,
                DeltaDiscoveryResponse {
                    resources: good,
                    ..response
                },
            );
        }
        answer.error_detail = Some(error);
        assert!(matches!(
            self.session.handle_request_alone(answer).unwrap(),
            SubscriberMessage::Nack { .. }
        ));
    }

    pub(super) fn take(&mut self, kind: ResourceKind, response: DeltaDiscoveryResponse) {
        for r in response.resources {
            let any = r.resource.unwrap();
            assert_eq!(any.type_url, kind.type_url());
            let resource = decode(kind, &r.name, &any.value).unwrap();
            if let Resource::Manifest(wanted) = &resource {
                self.compare(wanted);
                continue;
            }
            self.resources.insert((kind, r.name), (r.version, resource));
        }
        for name in response.removed_resources {
            if kind == ResourceKind::Manifest {
                assert!(self.sealed.remove(&name).is_some(), "{name} was sealed");
                continue;
            }
            assert!(
                self.resources.remove(&(kind, name.clone())).is_some(),
                "{name} was removed and is not held"
            );
        }
        if self.check_parents {
            self.nothing_dangles();
        }
    }

    /// Compares the held security resources with the manifest, as data planes do.
    pub(super) fn compare(&mut self, wanted: &program::Manifest) {
        let of_tenant = self
            .resources
            .iter()
            .filter(|((kind, _), (_, r))| kind.is_security() && r.tenant() == Some(&wanted.tenant));
        let held = manifest::compute(
            &wanted.tenant,
            of_tenant.map(|((kind, name), (version, _))| (*kind, name.as_str(), version.as_str())),
        );
        self.sealed
            .insert(wanted.tenant.to_string(), held == *wanted);
    }

    /// Checks that no held resource refers to a missing one.
    pub(super) fn nothing_dangles(&self) {
        let has = |kind, name: String| {
            assert!(
                self.resources.contains_key(&(kind, name.clone())),
                "{name} is missing after {:?}",
                self.log.last()
            )
        };
        for (_, resource) in self.resources.values() {
            match resource {
                Resource::Route(r) => {
                    let is_gateway = canal_model::ingress::is_gateway_service(&r.parent);
                    let parent = match is_gateway {
                        true => ResourceKind::Ingress,
                        false => ResourceKind::Service,
                    };
                    has(parent, r.parent.to_string());
                    let RouteAction::Split(backends) = &r.action else {
                        continue;
                    };
                    for b in backends {
                        if let BackendTarget::Service { service, .. } = &b.target {
                            has(ResourceKind::Service, service.to_string());
                        }
                    }
                }
                Resource::Workload(w) => w
                    .endpoints
                    .iter()
                    .for_each(|e| has(ResourceKind::Service, e.service.to_string())),
                Resource::Service(s) => has(ResourceKind::Tenant, s.key.tenant.to_string()),
                Resource::Ingress(g) => has(ResourceKind::Tenant, g.key.tenant.to_string()),
                _ => {}
            }
        }
    }

    pub(super) fn settle(&mut self, world: &StreamWorld) -> Vec<String> {
        self.log.clear();
        while self.step(world) {}
        std::mem::take(&mut self.log)
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.resources
            .keys()
            .map(|(k, n)| format!("{k:?} {n}"))
            .collect()
    }

    pub(super) fn is_converged(&self) -> bool {
        let p = self.session.progress();
        p.acked >= p.target && p.nack.is_empty()
    }
}
