//! Explains a request or a connection of a client outside the mesh that arrives at a Gateway: the
//! listener that takes it, TLS, the rule that decides and why the others do not, the policies of the
//! Gateway and of the endpoints. The oracles decide. Start at [`explain_arrival`].

use std::net::IpAddr;

use canal_compiler::ir::Ir;
use canal_compiler::ir_ingress::{GatewayIr, ListenerIr};
use canal_compiler::oracle::{self, OracleClient, OracleRequest, RoutingVerdict, normal_host};
use canal_compiler::oracle_ingress::{
    self, IngressVerdict, deciding_rule, gateway_of, listener_for, protocol_of, validation_of,
};
use canal_compiler::oracle_relay::{self, RelayVerdict};
use canal_compiler::text;
use canal_model::client_validation::ClientValidationMode;
use canal_model::ids::ServiceKey;
use canal_model::ingress::ListenerProtocol;
use canal_model::program::{
    Backend, BackendTarget, HostMatch, HttpMatch, RouteAction, RouteKey, RouteRule, Workload,
};
use canal_oracle::answers::OracleAnswer;
use canal_oracle::cors::OracleCors;

use super::arrival_description::ArrivalDescription;
use super::listener_trace::{ListenerTrace, SelectingName, describe_tls, trace_listeners};
use super::route_trace::{CandidateMatch, MatchTrace, trace_matches};
use super::workload_path::{GatewayEntry, WorkloadPath};
use super::{HopExplanation, RequestDescription, answer_text, balancing, is_passed};

/// What a gateway does with a request or a connection before policies are evaluated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ArrivalOutcome {
    /// The gateway closes the connection; the text says why.
    Closed(String),
    /// The gateway sends a response with this status, because no rule leads to an endpoint.
    LocalReply { status: u16, reason: String },
    /// The gateway answers by the rule: a redirect, a direct response, or a preflight's response.
    Answered(OracleAnswer),
    /// The request or the connection goes to an endpoint.
    Forwarded,
}

/// A backend of the rule that decides.
#[derive(Debug, Clone, PartialEq)]
pub struct BackendTrace {
    pub weight: u32,
    /// Share of the rule's requests, in percent.
    pub share: f64,
    /// The service with its port and subset, or the response of a broken reference.
    pub target: String,
    /// Endpoints that are ready: name of the workload, address and port.
    pub endpoints: Vec<String>,
    /// Parts of the request that filters change, each as text.
    pub changes: Vec<String>,
}

/// The explanation of a request or connection that arrives at a Gateway.
#[derive(Debug, Clone)]
pub struct ArrivalExplanation {
    /// Kind, namespace and name of the Gateway.
    pub gateway: String,
    /// Addresses that the Gateway requests; if there are none, it gets one of the pool.
    pub addresses: Vec<IpAddr>,
    /// Name of the listener that takes the connection, or the request of a plaintext connection.
    pub listener: Option<String>,
    /// All listeners of the Gateway, in the order of its objects.
    pub listeners: Vec<ListenerTrace>,
    /// What the gateway does with TLS, as text.
    pub tls: String,
    /// Filters that the listener runs before a route is selected, in order, each as text.
    pub filters: Vec<String>,
    /// The rule that decides; `None` if there is none.
    pub rule: Option<RouteKey>,
    /// The rule's action with its filters, or the reason why no rule decides.
    pub route: String,
    /// The matches that apply to the request's host, in match order.
    pub matches: Vec<MatchTrace>,
    /// Hosts of the listener's routes that are not the request's, each with the number of its
    /// matches.
    pub other_hosts: Vec<(String, usize)>,
    pub backends: Vec<BackendTrace>,
    /// Decisions of the hops; empty if the request ends at the route.
    pub steps: Vec<HopExplanation>,
    pub outcome: ArrivalOutcome,
}

impl ArrivalExplanation {
    /// Returns whether the client gets the response of an endpoint or of a rule, or its connection is
    /// relayed.
    pub fn passes(&self) -> bool {
        let is_served = matches!(
            self.outcome,
            ArrivalOutcome::Answered(_) | ArrivalOutcome::Forwarded
        );
        is_served && is_passed(&self.steps)
    }
}

/// Explains a request or a connection; `None` if the tenant has no such Gateway.
pub fn explain_arrival(ir: &Ir, arrival: &ArrivalDescription) -> Option<ArrivalExplanation> {
    let gateway = gateway_of(ir, &arrival.gateway)?;
    Some(Arrival::of(ir, gateway, arrival).explain())
}

/// The rule that decides, with the match that holds.
type DecidingMatch<'a> = (&'a RouteRule, &'a HttpMatch);

/// The decision of the listeners, before the rule's backends are known.
struct ListenerDecision<'a> {
    outcome: ArrivalOutcome,
    /// The listener whose routes decide, if it is open.
    listener: Option<&'a ListenerIr>,
}

/// One arrival at its Gateway.
struct Arrival<'a> {
    ir: &'a Ir,
    gateway: &'a GatewayIr,
    arrival: &'a ArrivalDescription,
    /// The port's protocol; `None` if no listener has the port.
    protocol: Option<&'a ListenerProtocol>,
    /// The request, or a connection as routes match it.
    request: OracleRequest,
    /// The name with which routes compare their hosts, in its normal form.
    host: String,
    is_relayed: bool,
}

impl<'a> Arrival<'a> {
    fn of(ir: &'a Ir, gateway: &'a GatewayIr, arrival: &'a ArrivalDescription) -> Self {
        let protocol = protocol_of(gateway, arrival.port);
        let is_relayed = matches!(
            protocol,
            Some(ListenerProtocol::Tls | ListenerProtocol::TerminatedTls | ListenerProtocol::Tcp)
        );
        let is_tcp = protocol == Some(&ListenerProtocol::Tcp);
        // The gateway reads neither the handshake nor the request of a connection that it relays by
        // TCP.
        let server_name = arrival.server_name.as_deref().filter(|_| !is_tcp);
        let connection = || OracleRequest {
            service: gateway.service.clone(),
            port: arrival.port,
            host: normal_host(server_name.unwrap_or_default()),
            method: String::new(),
            target: "/".to_owned(),
            headers: Vec::new(),
            client: OracleClient::default(),
        };
        let request = match &arrival.request {
            Some(request) if !is_relayed => OracleRequest {
                service: gateway.service.clone(),
                port: arrival.port,
                // A client of a Gateway has no identity of the mesh.
                client: OracleClient {
                    is_tls: arrival.is_tls,
                    ..OracleClient::default()
                },
                ..request.clone()
            },
            _ => connection(),
        };
        Self {
            ir,
            gateway,
            arrival,
            protocol,
            host: normal_host(&request.host),
            request,
            is_relayed,
        }
    }

    fn explain(&self) -> ArrivalExplanation {
        let name = self.selecting_name();
        let decision = self.decide();
        let deciding = decision
            .listener
            .and_then(|listener| deciding_rule(self.gateway, listener, &self.host, &self.request));
        let mut explanation = ArrivalExplanation {
            gateway: text::gateway(&self.gateway.service),
            addresses: self.gateway.addresses.clone(),
            listener: self
                .taking_listener(&name)
                .filter(|it| it.listener.closed.is_none())
                .map(|it| it.listener.name.clone()),
            listeners: trace_listeners(self.gateway, self.arrival.port, &name),
            tls: describe_tls(
                self.gateway,
                self.arrival,
                self.protocol,
                self.taking_listener(&name),
            ),
            filters: self.filters(&name),
            rule: deciding.map(|(rule, _)| rule.key.clone()),
            route: String::new(),
            matches: Vec::new(),
            other_hosts: Vec::new(),
            backends: Vec::new(),
            steps: Vec::new(),
            outcome: decision.outcome,
        };
        if let Some(listener) = decision.listener {
            (explanation.matches, explanation.other_hosts) = self.matches(listener);
        }
        match deciding {
            Some(deciding) => self.follow(deciding, &mut explanation),
            None => explanation.route = describe_outcome(&explanation.outcome),
        }
        explanation
    }

    /// Returns the name by which the port selects a listener.
    fn selecting_name(&self) -> SelectingName {
        match self.protocol {
            Some(ListenerProtocol::Http) if self.arrival.request.is_some() => {
                SelectingName::Host(self.host.clone())
            }
            Some(ListenerProtocol::Tcp | ListenerProtocol::Http) | None => SelectingName::None,
            Some(_) => {
                let name = self.arrival.server_name.as_deref();
                SelectingName::ServerName(normal_host(name.unwrap_or_default()))
            }
        }
    }

    fn taking_listener(&self, name: &SelectingName) -> Option<&'a ListenerIr> {
        self.protocol?;
        listener_for(self.gateway, self.arrival.port, name.text())
    }

    /// Returns the filters of the listener that takes the request.
    fn filters(&self, name: &SelectingName) -> Vec<String> {
        let listener = self.taking_listener(name).map(|it| &it.listener);
        let open = listener.filter(|it| it.closed.is_none());
        let filters = open.into_iter().flat_map(|it| &it.filters);
        filters.map(text::listener_filter).collect()
    }

    /// Returns what the listeners decide. A deciding rule may still refuse or answer.
    fn decide(&self) -> ListenerDecision<'a> {
        let transport = self.arrival.transport();
        let (outcome, listener) = match (self.is_relayed, &self.arrival.request) {
            (true, _) => {
                let port = self.arrival.port;
                self.relay_outcome(oracle_relay::decide(self.gateway, transport, port))
            }
            (false, Some(_)) => {
                let verdict = oracle_ingress::decide(self.gateway, transport, &self.request);
                self.request_outcome(verdict)
            }
            (false, None) => (self.outcome_without_request(), None),
        };
        let is_handshake_done = !matches!(outcome, ArrivalOutcome::Closed(_)) || listener.is_some();
        if is_handshake_done && let Some(why) = self.missing_certificate() {
            return ListenerDecision {
                outcome: ArrivalOutcome::Closed(why),
                listener: None,
            };
        }
        let listeners = self.gateway.listeners.iter();
        let named = |name: &String| listeners.clone().find(|it| it.listener.name == *name);
        ListenerDecision {
            outcome,
            listener: listener.as_ref().and_then(named),
        }
    }

    fn outcome_without_request(&self) -> ArrivalOutcome {
        let port = self.arrival.port;
        ArrivalOutcome::Closed(match self.protocol {
            None => format!("no listener has port {port}: the connection is refused"),
            Some(protocol) => format!(
                "port {port} is for {protocol}: the gateway reads requests, and the description has none"
            ),
        })
    }

    /// Returns why the handshake fails without the client's certificate, if it does.
    fn missing_certificate(&self) -> Option<String> {
        let is_terminated = match self.protocol {
            Some(ListenerProtocol::Https) => true,
            Some(ListenerProtocol::Tls | ListenerProtocol::TerminatedTls) => {
                let listener = self.taking_listener(&self.selecting_name());
                listener.is_some_and(|it| it.listener.protocol.terminates_tls())
            }
            _ => false,
        };
        let port = self.arrival.port;
        let validation = validation_of(self.gateway, port, self.arrival.server_name.as_deref())?;
        let is_required = validation.mode == ClientValidationMode::AllowValidOnly;
        (is_terminated && is_required && !self.arrival.has_certificate).then(|| {
            "the handshake fails: the listener accepts only clients with a certificate of its authorities"
                .to_owned()
        })
    }

    /// Returns the outcome of a request, and the name of the listener whose routes decide.
    fn request_outcome(&self, verdict: IngressVerdict) -> (ArrivalOutcome, Option<String>) {
        let port = self.arrival.port;
        let closed = |text: String| (ArrivalOutcome::Closed(text), None);
        // The statuses are those of the gateway ([`IngressVerdict`] has the reasons).
        let reply =
            |status: u16, reason: String| (ArrivalOutcome::LocalReply { status, reason }, None);
        match verdict {
            IngressVerdict::NoListener => closed(format!(
                "no listener has port {port}: the connection is refused"
            )),
            IngressVerdict::WrongTransport => closed(self.wrong_transport()),
            IngressVerdict::NoServerName => closed(self.no_server_name()),
            IngressVerdict::ClosedToHandshakes(fault) => {
                let (reason, problem) = (fault.reason.as_str(), &fault.problem);
                closed(format!(
                    "the handshake fails: its listener is closed ({reason}: {problem})"
                ))
            }
            IngressVerdict::Misdirected => {
                let own = listener_for(self.gateway, port, &self.host);
                let name = own.map_or("none", |it| it.listener.name.as_str());
                let text = "the request's host belongs to listener";
                reply(
                    421,
                    format!("{text} {name}, and its connection to another one"),
                )
            }
            IngressVerdict::NoHost => reply(
                404,
                format!("no listener of port {port} has host {:?}", self.host),
            ),
            IngressVerdict::Closed(fault) => {
                let (reason, problem) = (fault.reason.as_str(), &fault.problem);
                reply(
                    404,
                    format!("the host's listener is closed ({reason}: {problem})"),
                )
            }
            IngressVerdict::RefusedByFilter(listener) => reply(
                500,
                format!("the authorizer of a filter of listener {listener} could not be resolved"),
            ),
            IngressVerdict::Routed { listener, verdict } => {
                let outcome = match verdict {
                    RoutingVerdict::Split { .. } => ArrivalOutcome::Forwarded,
                    RoutingVerdict::Refuse { status, reason, .. } => {
                        ArrivalOutcome::LocalReply { status, reason }
                    }
                    RoutingVerdict::Answer { answer, .. } => match answer {
                        Some(answer) => ArrivalOutcome::Answered(*answer),
                        None => dot_segment(),
                    },
                    // A listener's routes lead nowhere else.
                    RoutingVerdict::NoRule
                    | RoutingVerdict::NoService
                    | RoutingVerdict::Service { .. } => ArrivalOutcome::LocalReply {
                        status: 404,
                        reason: format!("no rule of listener {listener} matches"),
                    },
                };
                (outcome, Some(listener))
            }
        }
    }

    /// Returns the outcome of a connection, and the name of the listener whose routes decide.
    fn relay_outcome(&self, verdict: RelayVerdict) -> (ArrivalOutcome, Option<String>) {
        let closed = |text: String| (ArrivalOutcome::Closed(text), None);
        let name = self.arrival.server_name.as_deref().unwrap_or_default();
        match verdict {
            RelayVerdict::NoListener => {
                let port = self.arrival.port;
                closed(format!("no listener that relays has port {port}"))
            }
            RelayVerdict::WrongTransport => closed(self.wrong_transport()),
            RelayVerdict::NoServerName => closed(self.no_server_name()),
            RelayVerdict::ClosedToHandshakes(fault) => {
                let (reason, problem) = (fault.reason.as_str(), &fault.problem);
                closed(format!(
                    "the handshake fails: its listener is closed ({reason}: {problem})"
                ))
            }
            RelayVerdict::NoRoute => closed(format!(
                "the connection is reset: no open listener has server name {name:?}"
            )),
            RelayVerdict::Relayed {
                listener, verdict, ..
            } => {
                let outcome = match verdict {
                    RoutingVerdict::Split { .. } => ArrivalOutcome::Forwarded,
                    RoutingVerdict::Refuse { reason, .. } => {
                        ArrivalOutcome::Closed(format!("the connection is reset: {reason}"))
                    }
                    _ => ArrivalOutcome::Closed(format!(
                        "the connection is reset: no rule of listener {listener} matches"
                    )),
                };
                (outcome, Some(listener))
            }
        }
    }

    fn wrong_transport(&self) -> String {
        let port = self.arrival.port;
        match self.arrival.is_tls {
            true => format!("port {port} is for plaintext, and the client begins with TLS"),
            false => format!(
                "the connection is reset: port {port} is for TLS, and the client sends none"
            ),
        }
    }

    fn no_server_name(&self) -> String {
        let port = self.arrival.port;
        match &self.arrival.server_name {
            Some(name) => {
                format!("the handshake fails: no listener of port {port} has server name {name:?}")
            }
            None => format!(
                "the handshake fails: the client sends no server name, and no listener of port {port} is for any host"
            ),
        }
    }

    /// Returns the matches that apply to the host, and the other hosts of the listener's routes.
    fn matches(&self, listener: &'a ListenerIr) -> (Vec<MatchTrace>, Vec<(String, usize)>) {
        let (gateway, port) = (self.gateway, listener.listener.port);
        let hosts = listener.virtual_hosts.iter();
        let is_own =
            |host: Option<&HostMatch>| host.is_none_or(|host| oracle::host_holds(host, &self.host));
        let all = hosts.clone().flat_map(|host| gateway.matches(port, host));
        let request = oracle::compared(all, &self.request);
        let own = hosts.clone().filter(|it| is_own(it.host.as_ref()));
        let candidates = own.flat_map(|host| {
            let matches = gateway.matches(port, host);
            matches
                .map(move |(rule, http)| -> CandidateMatch<'a> { (host.host.as_ref(), rule, http) })
        });
        let others = hosts.filter(|it| !is_own(it.host.as_ref()));
        let others = others.map(|host| {
            let count = gateway.matches(port, host).count();
            (text::host(host.host.as_ref()), count)
        });
        (trace_matches(candidates, &request), others.collect())
    }

    /// Adds what the deciding rule does: its backends and the decisions of their hops, or its
    /// response.
    fn follow(&self, (rule, http): DecidingMatch<'a>, explanation: &mut ArrivalExplanation) {
        explanation.route = format!(
            "{} => {}{}",
            rule.key,
            text::action(&rule.action),
            text::effects(rule)
        );
        // A rule that refuses does so before its cross-origin policy is read.
        let is_refused = matches!(rule.action, RouteAction::Refuse { .. });
        if let (false, Some(OracleCors::Preflight(answer))) = (is_refused, self.preflight(rule)) {
            explanation.outcome = ArrivalOutcome::Answered(answer);
        }
        match (explanation.outcome.clone(), &rule.action) {
            (ArrivalOutcome::Answered(answer), _) => {
                explanation.route += &format!("; {}", answer_text(Some(&answer)));
                explanation.steps = self.hops(&self.gateway.service, self.arrival.port, None);
            }
            (ArrivalOutcome::Forwarded, RouteAction::Split(backends)) => {
                self.follow_backends((rule, http), backends, explanation);
            }
            (outcome, _) => explanation.route += &format!("; {}", describe_outcome(&outcome)),
        }
    }

    /// Returns what the rule's cross-origin policy does with the request.
    fn preflight(&self, rule: &RouteRule) -> Option<OracleCors> {
        oracle::cors_of(rule, &self.request).filter(|_| !self.is_relayed)
    }

    fn follow_backends(
        &self,
        deciding: DecidingMatch<'a>,
        backends: &'a [Backend],
        explanation: &mut ArrivalExplanation,
    ) {
        let total: u64 = backends.iter().map(|it| u64::from(it.weight)).sum();
        let used = || backends.iter().filter(|it| it.weight > 0);
        for backend in backends {
            let share = 100.0 * f64::from(backend.weight) / (total.max(1) as f64);
            explanation
                .backends
                .push(self.backend(deciding, backend, share));
        }
        let targets: Vec<BackendTarget> = used().map(|it| it.target.clone()).collect();
        explanation.route += &balancing::text(self.ir, &targets);
        for target in used().map(|it| &it.target) {
            let BackendTarget::Service { service, port, .. } = target else {
                continue;
            };
            for (workload, target_port) in oracle::endpoints(self.ir, target) {
                let hops = self.hops(service, *port, Some((workload, target_port)));
                explanation.steps.extend(hops);
            }
        }
        if !explanation.steps.is_empty() {
            return;
        }
        let refused = used().find_map(|it| match &it.target {
            BackendTarget::Refuse { status, reason } => Some((*status, reason.clone())),
            BackendTarget::Service { .. } => None,
        });
        let (status, reason) =
            refused.unwrap_or_else(|| (503, "no endpoint of the backends is ready".to_owned()));
        explanation.outcome = match self.is_relayed {
            true => ArrivalOutcome::Closed(format!("the connection is reset: {reason}")),
            false => ArrivalOutcome::LocalReply { status, reason },
        };
    }

    fn backend(&self, (rule, http): DecidingMatch<'a>, it: &Backend, share: f64) -> BackendTrace {
        let endpoints = oracle::endpoints(self.ir, &it.target).into_iter();
        let endpoints = endpoints.map(|(workload, port)| {
            let (namespace, name) = (&workload.namespace, &workload.name);
            let addresses: Vec<String> = workload.addresses.iter().map(|a| a.to_string()).collect();
            format!("{namespace}/{name} at {}:{port}", addresses.join(","))
        });
        let weighted = text::backend(it);
        let target = weighted.split_once(' ').map_or("", |(_, target)| target);
        BackendTrace {
            weight: it.weight,
            share,
            target: target.to_owned(),
            endpoints: endpoints.collect(),
            changes: self.changes(rule, http, it),
        }
    }

    /// Returns the parts of the request that the filters of the rule and of a backend change.
    fn changes(&self, rule: &RouteRule, http: &HttpMatch, backend: &Backend) -> Vec<String> {
        let of_both = [rule.filters.as_deref(), backend.filters.as_deref()];
        if self.is_relayed || of_both == [None, None] {
            return Vec::new();
        }
        let sent = oracle::sent(&self.request);
        let Some(forwarded) = oracle::forwarded_by(rule, http, backend, &self.request) else {
            return vec!["400: the rewritten path is too long or has a dot segment".to_owned()];
        };
        let mut changes = Vec::new();
        if sent.host != forwarded.host {
            changes.push(format!("host becomes {:?}", forwarded.host));
        }
        if sent.target != forwarded.target {
            changes.push(format!("path becomes {:?}", forwarded.target));
        }
        let before: Vec<(String, String)> = sent
            .headers
            .into_iter()
            .map(|(name, value)| (name.to_ascii_lowercase(), value))
            .collect();
        let lost = before.iter().filter(|it| !forwarded.headers.contains(it));
        changes.extend(lost.map(|(name, value)| format!("header {name}: {value} is removed")));
        let gained = forwarded.headers.iter().filter(|it| !before.contains(it));
        changes.extend(gained.map(|(name, value)| format!("header {name}: {value} is added")));
        changes
    }

    /// Returns the decisions of the hops to a workload, or of the gateway that answers.
    fn hops(
        &self,
        service: &'a ServiceKey,
        port: u16,
        workload: Option<(&'a Workload, u16)>,
    ) -> Vec<HopExplanation> {
        let is_tls_read = self.protocol.is_some_and(|protocol| {
            !matches!(protocol, ListenerProtocol::Tcp | ListenerProtocol::Http)
        });
        let journey = RequestDescription {
            identity: None,
            address: self.arrival.address,
            direct: false,
            request: self.request.clone(),
            claims: self.arrival.claims.clone(),
            server_name: self.arrival.server_name.clone().filter(|_| is_tls_read),
        };
        WorkloadPath {
            ir: self.ir,
            journey: &journey,
            service,
            port,
            workload,
            is_direct: false,
            entry: Some(GatewayEntry {
                gateway: self.gateway,
                is_relayed: self.is_relayed,
            }),
        }
        .steps()
    }
}

/// Returns the outcome of a redirect whose path gets a dot segment.
fn dot_segment() -> ArrivalOutcome {
    ArrivalOutcome::LocalReply {
        status: 400,
        reason: "the redirect's path has a dot segment".to_owned(),
    }
}

/// Formats the outcome of a request that ends at the gateway.
pub(super) fn describe_outcome(outcome: &ArrivalOutcome) -> String {
    match outcome {
        ArrivalOutcome::Closed(why) => why.clone(),
        ArrivalOutcome::LocalReply { status, reason } => format!("{status}: {reason}"),
        ArrivalOutcome::Answered(answer) => answer_text(Some(answer)),
        ArrivalOutcome::Forwarded => String::new(),
    }
}
