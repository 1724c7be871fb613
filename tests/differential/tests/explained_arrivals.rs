//! The explanations of `canal explain` for clients outside the mesh, compared with the oracle and with
//! what a gateway replica does by the same objects: the listener, the rule, the response of a redirect,
//! and the decision of the policies. Every tenant follows from its seed.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use canal_authorization::{
    AttributeValue, AttributeVisibility, Attributes, AuthorizationDecision, PolicyDestination,
};
use canal_compiler::ir::Ir;
use canal_compiler::oracle::{OracleClient, OracleRequest, endpoints};
use canal_differential::target::served_by_replica;
use canal_explain::{
    ArrivalDescription, ArrivalExplanation, ArrivalOutcome, EnforcementPoint, HopDecision,
    MatchStanding, explain_arrival,
};
use canal_gateway_config::{AnsweredRequest, Snapshot};
use canal_identity::ClientIdentityFactory;
use canal_model::authorization::Attribute;
use canal_model::program::{BackendTarget, PolicyPaths};
use canal_model::route_filters::UrlScheme;
use canal_router::{normalize_path, routing_path};

use crate::ingress::{
    self, ArrivedRequest, Draw, IngressRequest, NAMES, authorities, certificate, keyring,
};
use crate::relays;

/// Number of tenants of each kind; fewer in debug builds, which are slower.
const TENANTS: u64 = if cfg!(debug_assertions) { 40 } else { 400 };
const PORTS: [u16; 4] = [80, 443, 5432, 9090];
const HOSTS: [&str; 4] = [
    "a.example.com",
    "B.example.com.",
    "y.a.example.com",
    "other.test",
];
const REQUESTS: [(&str, &str); 4] = [
    ("GET", "/"),
    ("POST", "/one/two"),
    ("GET", "//one/./two"),
    ("GET", "/moved/x"),
];
const ADDRESSES: [&str; 2] = ["203.0.113.9", "198.51.100.7"];
const FORWARDED: [Option<&str>; 3] = [None, Some("203.0.113.9"), Some("198.51.100.7, 203.0.113.9")];

/// Returns objects beside those of the Gateway: a pod, a redirect, and policies of the Gateway and of
/// the workload.
fn further_objects(draw: &mut Draw) -> String {
    let mut text = "---\napiVersion: v1\nkind: Pod\n\
         metadata: {name: web-0, namespace: shop, labels: {app: web}}\n\
         spec: {nodeName: n1, serviceAccountName: web}\n\
         status: {podIP: 10.1.0.1, conditions: [{type: Ready, status: \"True\"}]}\n\
         ---\napiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\n\
         metadata: {name: moved, namespace: shop}\n\
         spec:\n  parentRefs: [{name: public}]\n  rules:\n\
         \x20 - matches: [{path: {value: /moved}}]\n\
         \x20   filters: [{type: RequestRedirect, requestRedirect: {hostname: new.test}}]\n"
        .to_owned();
    // Up to three policies, so that several may be about one request. Each part may be left out.
    for n in 0..draw.below(4) {
        let (namespace, target) = *draw.of(&[
            ("shop", ""),
            ("shop", "selector: {matchLabels: {app: web}}, "),
            ("shop", "selector: {matchLabels: {istio: ingressgateway}}, "),
            ("istio-system", ""),
            ("shop", "targetRefs: [{kind: Service, name: web}], "),
            (
                "shop",
                "targetRefs: [{group: gateway.networking.k8s.io, kind: Gateway, name: public}], ",
            ),
            (
                "istio-system",
                "targetRefs: [{group: gateway.networking.k8s.io, kind: GatewayClass, name: canal}], ",
            ),
        ]);
        let action = draw.of(&["ALLOW", "DENY"]);
        let address = draw.of(&ADDRESSES);
        let from = match draw.below(4) {
            0 => String::new(),
            1 => format!("from: [{{source: {{ipBlocks: [{address}]}}}}]"),
            2 => format!("from: [{{source: {{remoteIpBlocks: [{address}]}}}}]"),
            _ => format!("from: [{{source: {{notRemoteIpBlocks: [{address}]}}}}]"),
        };
        let to = match draw.below(6) {
            0 => "to: [{operation: {methods: [POST]}}]",
            1 => "to: [{operation: {paths: [\"/one*\"]}}]",
            2 => "to: [{operation: {hosts: [a.example.com]}}]",
            3 => "when: [{key: connection.sni, values: [\"*.example.com\"]}]",
            4 => "to: [{operation: {ports: [\"80\"]}}]",
            _ => "",
        };
        let rule = [from.as_str(), to].map(|part| part.to_owned());
        let rule: Vec<String> = rule.into_iter().filter(|part| !part.is_empty()).collect();
        text += &format!(
            "---\napiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\n\
             metadata: {{name: p{n}, namespace: {namespace}}}\n\
             spec: {{{target}action: {action}, rules: [{{{}}}]}}\n",
            rule.join(", ")
        );
    }
    text
}

/// Puts some Gateways behind trusted proxies.
fn with_proxies(text: String, draw: &mut Draw) -> String {
    let proxies = draw.below(3);
    if proxies == 0 {
        return text;
    }
    text.replacen(
        "kind: Gateway\nmetadata: {name: public, namespace: shop}",
        &format!(
            "kind: Gateway\nmetadata: {{name: public, namespace: shop, annotations: {{canal.mesh/trusted-proxies: \"{proxies}\"}}}}"
        ),
        1,
    )
}

/// A client as a replica sees it, for the policies.
struct ReplicaAttributes<'a> {
    arrival: &'a ArrivalDescription,
    /// The endpoint; `None` if the gateway answers.
    to: Option<SocketAddr>,
    proxies: u8,
    is_relayed: bool,
    server_name: Option<&'a str>,
}

impl ReplicaAttributes<'_> {
    fn remote_address(&self) -> Option<IpAddr> {
        let own = self.arrival.address;
        if self.proxies == 0 {
            return own;
        }
        let request = self.arrival.request.as_ref().filter(|_| !self.is_relayed)?;
        let lines = request.headers.iter().map(|(_, line)| line.as_str());
        let joined = lines.collect::<Vec<_>>().join(",");
        let elements: Vec<&str> = joined.split(',').map(str::trim).collect();
        let wanted = elements.len().checked_sub(usize::from(self.proxies));
        match wanted.filter(|_| !joined.is_empty()) {
            Some(wanted) => elements[wanted].parse().ok(),
            None => own,
        }
    }
}

impl Attributes for ReplicaAttributes<'_> {
    fn visit_attribute(
        &self,
        attribute: &Attribute,
        each: &mut dyn FnMut(AttributeValue<'_>) -> bool,
    ) -> AttributeVisibility {
        let request = self.arrival.request.as_ref().filter(|_| !self.is_relayed);
        let value = match (attribute, request) {
            // Attributes of the connection are known without a request.
            (Attribute::SourceAddress, _) => self.arrival.address.map(AttributeValue::Address),
            (Attribute::RemoteAddress, _) => self.remote_address().map(AttributeValue::Address),
            (Attribute::DestinationPort, _) => self.to.map(|to| AttributeValue::Port(to.port())),
            (Attribute::DestinationAddress, _) => {
                self.to.map(|to| AttributeValue::Address(to.ip()))
            }
            (Attribute::ServerName, _) => {
                if let Some(name) = self.server_name {
                    each(AttributeValue::Text(name.as_bytes()));
                }
                return AttributeVisibility::Known;
            }
            (Attribute::Method, Some(it)) => Some(AttributeValue::Text(it.method.as_bytes())),
            (Attribute::Host, Some(it)) => Some(AttributeValue::Text(it.host.as_bytes())),
            (Attribute::Path, Some(it)) => {
                // Policies read the normalized path, as in the gateway.
                let path = it.target.as_bytes();
                let normal = normalize_path(path, PolicyPaths::default()).expect("a safe path");
                each(AttributeValue::Text(
                    normal.as_ref().map_or(path, |normal| normal.as_bytes()),
                ));
                return AttributeVisibility::Known;
            }
            // A replica reads no requests of a connection that it relays.
            (_, None) => None,
            (other, Some(_)) => panic!("{other:?}"),
        };
        match value {
            Some(value) => {
                each(value);
                AttributeVisibility::Known
            }
            None => AttributeVisibility::Unknown,
        }
    }
}

/// The number of compared arrivals, and of those that met what the test is about.
#[derive(Debug, Default)]
struct ArrivalCounts {
    compared: usize,
    forwarded: usize,
    answered: usize,
    refused: usize,
    denied: usize,
    /// Matches that held, and came after the one that decided.
    later: usize,
}

/// One tenant as the oracle and as a replica have it.
struct ExplainedTenant {
    text: String,
    ir: Ir,
    snapshot: Arc<Snapshot>,
}

impl ExplainedTenant {
    fn of(text: String, keyring: &ClientIdentityFactory) -> Self {
        let (ir, snapshot) = served_by_replica(&text, keyring);
        Self { text, ir, snapshot }
    }

    /// Compares the explanation of one arrival with the oracle and the replica.
    fn compare(&self, arrival: &ArrivalDescription, counts: &mut ArrivalCounts) {
        let explained = explain_arrival(&self.ir, arrival).expect("a Gateway");
        let fail = |what: &str| -> ! {
            panic!("{what}\n{arrival:?}\n{explained}\n{}", self.text);
        };
        let (expected, served) = self.decide(arrival);
        if describe(&explained, &expected) != expected {
            fail(&format!("the oracle says {expected}"));
        }
        if served != expected {
            fail(&format!(
                "the oracle says {expected}, and the replica does {served}"
            ));
        }
        check_traces(&explained, counts).unwrap_or_else(|why| fail(why));
        if let ArrivalOutcome::Answered(answer) = &explained.outcome
            && let Some(location) = self.replica_location(arrival)
            && !answer
                .headers
                .contains(&("location".to_owned(), location.clone()))
        {
            fail(&format!("the replica redirects to {location}"));
        }
        let is_denied = self.is_denied_by_replica(arrival, &explained);
        if is_denied == explained.passes() && is_served(&explained) {
            fail(&format!("the replica denies: {is_denied}"));
        }
        counts.compared += 1;
        counts.denied += usize::from(is_denied);
        match explained.outcome {
            ArrivalOutcome::Forwarded => counts.forwarded += 1,
            ArrivalOutcome::Answered(_) => counts.answered += 1,
            ArrivalOutcome::Closed(_) | ArrivalOutcome::LocalReply { .. } => counts.refused += 1,
        }
    }

    /// Returns what the oracle says, and what the replica does.
    fn decide(&self, arrival: &ArrivalDescription) -> (String, String) {
        let gateway = &self.ir.ingress[0];
        let transport = transport(arrival);
        let port = arrival.port;
        let Some(request) = &arrival.request else {
            let expected = relays::expected(gateway, transport, port);
            let served = relays::served(&self.snapshot, &gateway.service, transport, port);
            return (expected, served);
        };
        let sent = IngressRequest {
            method: &request.method,
            host: &request.host,
            path: &request.target,
        };
        let expected = ingress::expected(gateway, transport, request);
        let served = ingress::served(&self.snapshot, &gateway.service, transport, port, sent);
        (expected, served)
    }

    /// Returns the location of the replica's redirect.
    fn replica_location(&self, arrival: &ArrivalDescription) -> Option<String> {
        let request = arrival.request.as_ref()?;
        let service = &self.ir.ingress[0].service;
        let view = self.snapshot.tenant("alpha")?.service(service)?;
        let routes = view.routes.as_ref()?;
        let path = request.target.as_bytes();
        let normal = routing_path(path).unwrap_or_else(|| request.target.clone());
        let sent = IngressRequest {
            method: &request.method,
            host: &request.host,
            path: &normal,
        };
        let sent = ArrivedRequest(sent, transport(arrival));
        let (_, matched) = routes.decide(arrival.port, &sent, 0);
        let reply = routes
            .filters(matched?, None, &sent, || 0)
            .answer(&AnsweredRequest {
                scheme: match arrival.is_tls {
                    true => UrlScheme::Https,
                    false => UrlScheme::Http,
                },
                authority: request.host.as_bytes(),
                port: arrival.port,
                path,
                query: None,
                normal_path: &normal,
            })?;
        let mut headers = reply.headers.into_iter();
        let location = headers.find(|(name, _)| name == "location")?.1;
        Some(String::from_utf8_lossy(&location).into_owned())
    }

    /// Returns whether the replica's policies of the Gateway, or of the endpoint, deny.
    fn is_denied_by_replica(
        &self,
        arrival: &ArrivalDescription,
        explained: &ArrivalExplanation,
    ) -> bool {
        if !is_served(explained) {
            return false;
        }
        let gateway = &self.ir.ingress[0];
        let tenant = self.snapshot.tenant("alpha").expect("the tenant");
        let web = BackendTarget::Service {
            service: "alpha/shop/web".parse().expect("a key"),
            port: 80,
            subset: Default::default(),
        };
        let is_answered = matches!(explained.outcome, ArrivalOutcome::Answered(_));
        let (workload, port) = endpoints(&self.ir, &web)[0];
        let is_tcp = gateway.ports().get(&arrival.port).map(ToString::to_string);
        let reads_tls = arrival.is_tls && is_tcp.as_deref() != Some("TCP");
        let attributes = ReplicaAttributes {
            arrival,
            to: (!is_answered).then(|| SocketAddr::new(workload.addresses[0], port)),
            proxies: tenant
                .service(&gateway.service)
                .map_or(0, |view| view.trusted_proxies),
            is_relayed: arrival.request.is_none(),
            server_name: arrival.server_name.as_deref().filter(|_| reads_tls),
        };
        let BackendTarget::Service { service, .. } = &web else {
            unreachable!("the target is a service")
        };
        let of_endpoint = PolicyDestination::workload(&workload.namespace, &workload.labels);
        let of_endpoint = of_endpoint.serving(Some(service));
        let sets = [
            tenant.policies.guard_of_service(&gateway.service),
            tenant.policies.guard(&of_endpoint).filter(|_| !is_answered),
        ];
        let mut sets = sets.into_iter().flatten();
        sets.any(|set| set.policies.decide(&attributes) != AuthorizationDecision::Allow)
    }
}

fn transport(arrival: &ArrivalDescription) -> canal_compiler::oracle_ingress::ArrivalTransport<'_> {
    use canal_compiler::oracle_ingress::ArrivalTransport;
    match arrival.is_tls {
        true => ArrivalTransport::Tls(arrival.server_name.as_deref()),
        false => ArrivalTransport::Plaintext,
    }
}

fn is_served(explained: &ArrivalExplanation) -> bool {
    matches!(
        explained.outcome,
        ArrivalOutcome::Forwarded | ArrivalOutcome::Answered(_)
    )
}

/// Returns the explanation in the words of the other tests. How a connection is closed, and how it is
/// relayed, is only in its text, so it is taken from `expected` if the kind agrees.
fn describe(explained: &ArrivalExplanation, expected: &str) -> String {
    let rule = || explained.rule.as_ref().map(ToString::to_string);
    match &explained.outcome {
        ArrivalOutcome::LocalReply { status, .. } => status.to_string(),
        ArrivalOutcome::Closed(_) if !expected.contains('/') && !expected.starts_with('4') => {
            expected.to_owned()
        }
        ArrivalOutcome::Closed(why) => format!("closed: {why}"),
        ArrivalOutcome::Answered(_) | ArrivalOutcome::Forwarded => {
            let how = match explained.tls.split([':', ' ']).next() {
                _ if !expected.contains(' ') => "",
                Some("terminated") => "terminated ",
                Some("passed") => "passed ",
                _ => "plain ",
            };
            format!("{how}{}", rule().unwrap_or_default())
        }
    }
}

/// Checks that the traces agree with each other: one listener, and the rule that decides is the first
/// match that holds.
fn check_traces(
    explained: &ArrivalExplanation,
    counts: &mut ArrivalCounts,
) -> Result<(), &'static str> {
    let chosen = explained.listeners.iter().filter(|it| it.is_chosen);
    let chosen: Vec<&String> = chosen.map(|it| &it.name).collect();
    if chosen != explained.listener.iter().collect::<Vec<_>>() {
        return Err("the traces name another listener");
    }
    let mut is_decided = false;
    for trace in &explained.matches {
        match &trace.standing {
            MatchStanding::Decides if is_decided => return Err("two matches decide"),
            MatchStanding::Decides if explained.rule.as_ref() != Some(&trace.rule) => {
                return Err("a match of another rule decides");
            }
            MatchStanding::Decides => is_decided = true,
            MatchStanding::Later(_) if !is_decided => {
                return Err("a match holds and does not decide");
            }
            MatchStanding::Later(_) => counts.later += 1,
            MatchStanding::Unmet(why) if why.is_empty() => return Err("a match has no reason"),
            MatchStanding::Unmet(_) => {}
        }
    }
    if is_decided != explained.rule.is_some() {
        return Err("a rule decides without a match");
    }
    let gateway_steps = explained.steps.iter();
    let denies = gateway_steps
        .filter(|step| step.hop == EnforcementPoint::Node)
        .any(|step| matches!(step.outcome, HopDecision::Denies(_)));
    match denies && explained.passes() {
        true => Err("a node denies what passes"),
        false => Ok(()),
    }
}

/// Returns arrivals at each port: requests, or connections without them.
fn arrivals(ir: &Ir, draw: &mut Draw, are_requests: bool) -> Vec<ArrivalDescription> {
    let mut arrivals = Vec::new();
    let names = NAMES.into_iter().map(Some).chain([None]);
    for (port, name) in PORTS
        .into_iter()
        .flat_map(|port| names.clone().map(move |name| (port, name)))
    {
        let requests = match are_requests {
            true => HOSTS.len() * REQUESTS.len(),
            false => 1,
        };
        for n in 0..requests {
            let (method, target) = REQUESTS[n % REQUESTS.len()];
            let forwarded = *draw.of(&FORWARDED);
            let headers = forwarded.map(|line| ("x-forwarded-for".to_owned(), line.to_owned()));
            let request = OracleRequest {
                service: ir.ingress[0].service.clone(),
                port,
                host: HOSTS[n / REQUESTS.len()].to_owned(),
                method: method.to_owned(),
                target: target.to_owned(),
                headers: headers.into_iter().collect(),
                client: OracleClient::default(),
            };
            arrivals.push(ArrivalDescription {
                gateway: ir.ingress[0].service.clone(),
                port,
                address: Some(draw.of(&ADDRESSES).parse().expect("an address")),
                is_tls: name.is_some(),
                server_name: name.flatten().map(str::to_owned),
                has_certificate: true,
                request: are_requests.then_some(request),
                claims: None,
            });
        }
    }
    arrivals
}

type ObjectsFn = fn(&mut Draw, &str) -> String;

/// Compares the arrivals at the Gateways of generated tenants.
fn compare_all(objects: ObjectsFn, are_requests: bool) -> ArrivalCounts {
    let mut counts = ArrivalCounts::default();
    let (secrets, keyring) = (certificate() + &authorities(), keyring());
    for seed in 0..TENANTS {
        let mut draw = Draw(seed);
        let text = objects(&mut draw, &secrets);
        let text = with_proxies(text, &mut draw) + &further_objects(&mut draw);
        let tenant = ExplainedTenant::of(text, &keyring);
        for arrival in arrivals(&tenant.ir, &mut draw, are_requests) {
            // A port that relays reads no requests, and the other way round.
            let protocol = tenant.ir.ingress[0].ports();
            let protocol = protocol.get(&arrival.port).map(ToString::to_string);
            let is_http = protocol.as_deref().is_none_or(|it| it.starts_with("HTTP"));
            if is_http == are_requests {
                tenant.compare(&arrival, &mut counts);
            }
        }
    }
    counts
}

#[test]
fn requests_are_explained_as_the_oracle_and_replicas_decide() {
    for objects in [ingress::objects as ObjectsFn, ingress::istio_objects] {
        let counts = compare_all(objects, true);
        println!("{counts:?}");
        assert!(
            counts.compared > 5_000
                && counts.forwarded * 50 > counts.compared
                && counts.answered > 20
                && counts.denied > 100
                && counts.later > 50
                && counts.refused > 100,
            "{counts:?}"
        );
    }
}

#[test]
fn connections_are_explained_as_the_oracle_and_replicas_decide() {
    for objects in [relays::objects as ObjectsFn, relays::istio_objects] {
        let counts = compare_all(objects, false);
        println!("{counts:?}");
        assert!(
            counts.compared > 300
                && counts.forwarded * 20 > counts.compared
                && counts.denied > 10
                && counts.refused > 50,
            "{counts:?}"
        );
    }
}
