//! Where the rules of a VirtualService apply: a service in the mesh, or a Gateway. It decides which
//! matches hold there, for which ports, and in which order.

use std::collections::BTreeSet;

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
    /// Whether each rule of the object is attached to each port of the Gateway alone.
    is_split: bool,
    /// Ports at which a match of the object holds for all requests, so that later ones hold for none.
    catch_all_ports: BTreeSet<Option<u16>>,
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
            is_split: false,
            catch_all_ports: BTreeSet::new(),
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
            is_split: false,
            catch_all_ports: BTreeSet::new(),
        }
    }

    /// Attaches each rule to each port of the Gateway alone if there are several, and a rule of the
    /// object depends on the port. Istio makes the rules of each port on their own, so that their
    /// order may differ too.
    pub(super) fn split_ports(&mut self, depends_on_port: impl FnOnce() -> bool) {
        self.is_split = self.gateway.is_some() && self.ports.len() > 1 && depends_on_port();
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
        if self.gateway.is_some() && !self.is_split {
            return 1;
        }
        self.ports.len().max(1)
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

    /// Returns whether a match can hold for a client here. `gateways` are those of the object. Clients of
    /// a Gateway are outside the mesh, so no match on their workload holds there.
    pub(super) fn may_have_source(
        &self,
        gateways: &[String],
        condition: &HttpMatchRequest,
        field: &str,
        rule: &mut RuleContext<'_>,
    ) -> bool {
        let is_for_all =
            condition.source_labels.is_empty() && condition.source_namespace.is_empty();
        if self.gateway.is_none() || is_for_all {
            return true;
        }
        // An object that also applies to the mesh means its clients there.
        if !gateways.iter().any(|written| written == MESH) {
            let problem =
                "clients of a Gateway have no labels and no namespace, so this never matches";
            let fix = "add mesh to spec.gateways, or remove sourceLabels and sourceNamespace";
            let issue = FieldIssue::new("", problem, fix).with_code(Code::MatchNeverApplies);
            rule.warning(field, issue);
        }
        false
    }

    /// Returns the ports to which a match is limited; `None` means all.
    pub(super) fn ports_of(
        &self,
        condition: &HttpMatchRequest,
        field: &str,
        rule: &mut RuleContext<'_>,
    ) -> Result<Vec<Option<u16>>, NeverMatches> {
        let Some(port) = condition.port.map(std::num::NonZeroU16::get) else {
            let each = self.ports.iter().copied().map(Some);
            return Ok(match self.is_split {
                true => each.collect(),
                false => vec![None],
            });
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
        // A rule on a Gateway with one port needs no port.
        let is_needed = self.gateway.is_none() || self.is_split;
        Ok(vec![is_needed.then_some(port)])
    }

    /// Returns whether a rule that follows the dialled port is attached to each port by itself. On a
    /// Gateway, all rules of its object are, or there is one port.
    pub(super) fn fans_out(&self) -> bool {
        self.gateway.is_none()
    }

    /// Sorts a match at a port, which is in the order of its object. On a Gateway, Istio merges the objects of a
    /// host, the oldest first, and puts the matches that hold for all requests at the end.
    pub(super) fn sort(
        &mut self,
        http: &mut HttpMatch,
        root: &Document,
        (port, hosts): (Option<u16>, &[HostMatch]),
    ) {
        if self.gateway.is_none() {
            return;
        }
        let is_catch_all = hosts.is_empty()
            && http.method.is_none()
            && http.headers.is_empty()
            && http.query.is_empty()
            && matches!(&http.path, PathMatch::StringPrefix(path) if path == "/");
        let order = match (self.catch_all_ports.contains(&port), is_catch_all) {
            (false, false) => CatchAllOrder::Before,
            (false, true) => CatchAllOrder::CatchAll,
            (true, _) => CatchAllOrder::After,
        };
        if is_catch_all {
            self.catch_all_ports.insert(port);
        }
        let indexes = http.precedence.indexes;
        http.precedence = precedence::istio_on_gateway(root, indexes, order);
    }
}
