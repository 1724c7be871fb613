//! Where the rules of a VirtualService apply: a service in the mesh, or a Gateway. It decides which
//! matches hold there, for which ports, and in which order.

use canal_attachment::{MESH, gateway_name};
use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::{Namespace, ObjectName, ServiceKey};
use canal_model::policy::Document;
use canal_model::policy::istio::{HttpMatchRequest, VirtualService};
use canal_model::program::{HostMatch, HttpMatch, PathMatch, Service};

use super::route_fields::{FieldIssue, RuleContext};
use super::tenant_objects::Sourced;
use crate::limits::REGEXES_PER_SERVICE_BYTES_MAX;
use crate::precedence::{self, CatchAllOrder};

/// A service, or a Gateway, to which rules are attached.
pub(super) struct RoutePoint<'a> {
    /// The service, or that which stands for the Gateway.
    pub(super) service: &'a ServiceKey,
    /// Ports of the service, or of the Gateway's listeners with a host of the object.
    pub(super) ports: Vec<u16>,
    /// Bytes that the regular expressions of further rules may use.
    pub(super) regex_bytes_left: usize,
    /// The Gateway; `None` for a service.
    gateway: Option<(Namespace, ObjectName)>,
    /// Whether a match of the object holds for all requests, so that later ones hold for none.
    has_catch_all: bool,
}

/// Says that a match holds for no request.
pub(super) struct NeverMatches;

impl<'a> RoutePoint<'a> {
    pub(super) fn of_service(service: &'a Service) -> Self {
        Self {
            service: &service.key,
            ports: service.ports.iter().map(|port| port.port).collect(),
            regex_bytes_left: REGEXES_PER_SERVICE_BYTES_MAX,
            gateway: None,
            has_catch_all: false,
        }
    }

    pub(super) fn of_gateway(
        service: &'a ServiceKey,
        gateway: (Namespace, ObjectName),
        ports: Vec<u16>,
        regex_bytes_left: usize,
    ) -> Self {
        Self {
            service,
            ports,
            regex_bytes_left,
            gateway: Some(gateway),
            has_catch_all: false,
        }
    }

    /// Returns why an object cannot apply here as written: the mesh has no routes for some clients
    /// only.
    pub(super) fn audience_problem(
        &self,
        sourced: &Sourced<'_, VirtualService>,
    ) -> Option<&'static str> {
        let export_to = &sourced.object.spec.export_to;
        let is_for_all = export_to.is_empty() || export_to.iter().any(|text| text == "*");
        (self.gateway.is_none() && !is_for_all)
            .then_some("a limited audience in the mesh is not supported in this version")
    }

    /// Returns the number of copies of a rule that data planes may receive.
    pub(super) fn rule_copies(&self) -> usize {
        match self.gateway {
            Some(_) => 1,
            None => self.ports.len().max(1),
        }
    }

    /// Returns the name in the keys of the rules of an object in `namespace`.
    pub(super) fn name_in(&self, namespace: &Namespace) -> String {
        Self::name_of(self.service, namespace)
    }

    /// Returns the name of a service in the keys of the rules of an object in `namespace`.
    pub(super) fn name_of(service: &ServiceKey, namespace: &Namespace) -> String {
        let ServiceKey {
            name,
            namespace: own,
            ..
        } = service;
        if own == namespace {
            name.to_string()
        } else {
            format!("{name}@{own}")
        }
    }

    /// Returns whether a match for these Gateways holds here. An empty list means those of the
    /// object.
    pub(super) fn is_meant(
        &self,
        own: &Namespace,
        gateways: &[String],
        field: &str,
        rule: &mut RuleContext<'_>,
    ) -> bool {
        if gateways.is_empty() {
            return true;
        }
        match &self.gateway {
            None => gateways.iter().any(|written| written == MESH),
            Some(gateway) => match Self::names_gateway(own, gateways, gateway) {
                Ok(is_meant) => is_meant,
                Err((at, problem)) => {
                    let field = format!("{field}.gateways[{at}]");
                    let fix = "write the name of a Gateway, or namespace/name";
                    rule.broken(&field, FieldIssue::new("", problem, fix));
                    true
                }
            },
        }
    }

    /// Returns whether these names, of an object in the namespace `own`, include a Gateway; no names
    /// mean those of the object, which includes it.
    ///
    /// # Errors
    /// Returns the position of a text that is no name, and the problem.
    pub(super) fn names_gateway(
        own: &Namespace,
        written: &[String],
        gateway: &(Namespace, ObjectName),
    ) -> Result<bool, (usize, String)> {
        let mut is_named = written.is_empty();
        for (at, written) in written.iter().enumerate() {
            match gateway_name(own, written) {
                _ if written == MESH => {}
                Ok(named) => is_named |= named == *gateway,
                Err(problem) => return Err((at, problem)),
            }
        }
        Ok(is_named)
    }

    /// Returns the port to which a match is limited; `None` means all.
    pub(super) fn port_of(
        &self,
        condition: &HttpMatchRequest,
        field: &str,
        rule: &mut RuleContext<'_>,
    ) -> Result<Option<u16>, NeverMatches> {
        let Some(port) = condition.port.map(std::num::NonZeroU16::get) else {
            return Ok(None);
        };
        let ServiceKey {
            namespace, name, ..
        } = self.service;
        if !self.ports.contains(&port) {
            let problem = match &self.gateway {
                None => format!(
                    "Service {namespace}/{name} has no TCP port {port}, so this never matches"
                ),
                Some((namespace, name)) => format!(
                    "Gateway {namespace}/{name} has no TCP port {port} for a host of the object, so this never matches"
                ),
            };
            let fix = "correct the port or remove the match";
            let issue = FieldIssue::new("port", problem, fix).with_code(Code::MatchNeverApplies);
            rule.warning(field, issue);
            return Err(NeverMatches);
        }
        if self.gateway.is_none() {
            return Ok(Some(port));
        }
        if self.ports.len() > 1 {
            let problem = "a port of a Gateway that serves the object's hosts at several ports cannot be matched in this version";
            let fix = "write a Gateway and a VirtualService for each port";
            let issue = FieldIssue::new("port", problem, fix).with_code(Code::UnsupportedField);
            rule.broken(field, issue);
        }
        Ok(None)
    }

    /// Returns whether a rule may be attached to each port alone, so that its destinations have the
    /// port that was dialled. On a Gateway with several ports, such a rule is broken.
    pub(super) fn can_fan_out(&self, rule: &mut RuleContext<'_>) -> bool {
        if self.gateway.is_none() {
            return true;
        }
        if self.ports.len() > 1 {
            let problem = "the destination has several ports and names none, and the Gateway serves the object's hosts at several ports";
            let fix = "write destination.port.number";
            rule.broken("route", FieldIssue::new("", problem, fix));
        }
        false
    }

    /// Sorts a match, which is in the order of its object. On a Gateway, Istio merges the objects of a
    /// host, the oldest first, and puts the matches that hold for all requests at the end.
    pub(super) fn sort(&mut self, http: &mut HttpMatch, root: &Document, hosts: &[HostMatch]) {
        if self.gateway.is_none() {
            return;
        }
        let is_catch_all = hosts.is_empty()
            && http.method.is_none()
            && http.headers.is_empty()
            && http.query.is_empty()
            && matches!(&http.path, PathMatch::StringPrefix(path) if path == "/");
        let order = match (self.has_catch_all, is_catch_all) {
            (false, false) => CatchAllOrder::Before,
            (false, true) => CatchAllOrder::CatchAll,
            (true, _) => CatchAllOrder::After,
        };
        self.has_catch_all |= is_catch_all;
        let indexes = http.precedence.indexes;
        http.precedence = precedence::istio_on_gateway(root, indexes, order);
    }
}
