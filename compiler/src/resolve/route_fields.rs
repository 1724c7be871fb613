//! Parts that all kinds of routes have in common: parents, validated texts, conditions and weights,
//! and how a broken rule fails closed.

use std::collections::BTreeSet;

use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::{Namespace, ServiceKey, TenantName};
use canal_model::policy::Document;
use canal_model::policy::gateway_api::ParentRef;
use canal_model::program::{Backend, BackendTarget, PathMatch, RouteAction, TextMatch, ValueMatch};
use canal_model::route_filters::RouteAnswer;

use super::pattern_costs::PatternCosts;
use crate::diagnostic_collector::DiagnosticCollector;
use crate::limits::{
    BACKENDS_PER_RULE_MAX, CONDITIONS_PER_MATCH_MAX, REGEXES_PER_SERVICE_BYTES_MAX, TEXT_BYTES_MAX,
    WEIGHT_MAX,
};
use canal_ir::pattern;
use canal_oracle::authorization::normal_path;

/// Status of the response if the request's rule or backend is broken (Gateway API v1.6.1
/// HTTPRouteRule.backendRefs).
pub(crate) const STATUS_BROKEN: u16 = 500;
/// Status of the response if all weights of the rule are 0. An operator drained it; nothing is
/// broken.
const STATUS_NO_WEIGHT: u16 = 503;
/// Status of the response if the rule or backend of a gRPC request is broken. A gRPC client
/// receives UNAVAILABLE for it (Gateway API v1.7.0 GRPCRouteRule.backendRefs).
pub(crate) const STATUS_BROKEN_GRPC: u16 = 503;

/// A problem with a part of a rule.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct FieldIssue {
    pub(crate) code: Code,
    /// Field relative to the part's own field; may be empty.
    pub(crate) field: String,
    pub(crate) problem: String,
    pub(crate) fix: String,
}

impl FieldIssue {
    pub(crate) fn new(
        field: impl Into<String>,
        problem: impl Into<String>,
        fix: impl Into<String>,
    ) -> Self {
        Self {
            code: Code::InvalidValue,
            field: field.into(),
            problem: problem.into(),
            fix: fix.into(),
        }
    }

    /// Returns the issue with a code that says more than that a value is not valid.
    pub(crate) fn with_code(self, code: Code) -> Self {
        Self { code, ..self }
    }
}

/// Returns the Service to which this reference attaches a route in the namespace `own`; it may be of
/// another namespace. Does not check whether the Service exists.
pub(crate) fn parent_service(
    tenant: &TenantName,
    own: &Namespace,
    written: &ParentRef,
) -> Result<ServiceKey, FieldIssue> {
    // Istio accepts `core` as another name of the core group, which Kubernetes writes as empty
    // text.
    if written.kind != "Service" || !(written.group.is_empty() || written.group == "core") {
        let problem = format!(
            "a route of this kind cannot attach to {} ({}) in this version",
            written.kind, written.group
        );
        return Err(
            FieldIssue::new("kind", problem, "write group: \"\" and kind: Service")
                .with_code(Code::UnsupportedParent),
        );
    }
    Ok(ServiceKey {
        tenant: tenant.clone(),
        namespace: written.namespace.as_ref().unwrap_or(own).clone(),
        name: written.name.clone(),
    })
}

/// The state of reading one rule: all problems are reported, and the first one that breaks the rule
/// makes it refuse.
pub(crate) struct RuleContext<'a> {
    pub(crate) document: &'a Document,
    /// Namespace of another object whose changes of requests apply in this rule.
    pub(crate) changes_of: Option<&'a Namespace>,
    /// Path of the rule, e.g. `spec.rules[3]`.
    pub(crate) field: String,
    pub(crate) report: &'a mut DiagnosticCollector,
    /// The reason why the rule refuses all requests that it matches.
    pub(crate) broken: Option<String>,
    /// Status of the response if the rule or a backend refuses a request.
    pub(crate) refusal_status: u16,
    pub(crate) regexes: &'a mut RegexBudget,
}

impl RuleContext<'_> {
    /// Returns whether each object that changes requests in this rule is of this namespace.
    pub(crate) fn may_change_requests_to(&self, namespace: &Namespace) -> bool {
        let own = self.document.object.key().namespace;
        own == *namespace && self.changes_of.is_none_or(|it| it == namespace)
    }
}

/// Memory that the regular expressions of a service may still use.
pub(crate) struct RegexBudget {
    pub(crate) bytes_left: usize,
    /// Number of copies of each expression: data planes receive a rule once for each port that it
    /// is attached to by number.
    pub(crate) copies: usize,
    /// Name of the service, for diagnostics.
    pub(crate) service: String,
    /// Gateways that have the expressions too. What they lack refuses on them only.
    pub(crate) gateways: Vec<GatewayRegexBudget>,
    /// Costs of the expressions that were measured before, of all routes.
    pub(crate) costs: PatternCosts,
}

/// Memory that the regular expressions of routes on one Gateway may still use.
pub(crate) struct GatewayRegexBudget {
    pub(crate) gateway: ServiceKey,
    pub(crate) bytes_left: usize,
    /// Whether an expression of the present rule did not fit.
    pub(crate) is_exceeded: bool,
}

impl RegexBudget {
    /// Subtracts the memory of an expression at each Gateway that has room for it.
    fn charge_gateways(&mut self, bytes: usize) {
        for budget in &mut self.gateways {
            match budget.bytes_left.checked_sub(bytes) {
                Some(left) => budget.bytes_left = left,
                None => budget.is_exceeded = true,
            }
        }
    }

    /// Returns the Gateways on which an expression of the rule did not fit, and begins the next
    /// rule.
    pub(crate) fn take_exceeded(&mut self) -> Vec<ServiceKey> {
        let budgets = self.gateways.iter_mut();
        let exceeded = budgets.filter_map(|budget| {
            std::mem::take(&mut budget.is_exceeded).then(|| budget.gateway.clone())
        });
        exceeded.collect()
    }
}

impl RuleContext<'_> {
    /// Reports a problem that breaks the rule.
    pub(crate) fn broken(&mut self, field: &str, complaint: FieldIssue) {
        let field = self.field_path(field, &complaint.field);
        self.broken
            .get_or_insert_with(|| format!("{field}: {}", complaint.problem));
        self.report.error(
            complaint.code,
            self.document,
            field,
            complaint.problem,
            complaint.fix,
        );
    }

    pub(crate) fn warning(&mut self, field: &str, complaint: FieldIssue) {
        let field = self.field_path(field, &complaint.field);
        self.report.warning(
            complaint.code,
            self.document,
            field,
            complaint.problem,
            complaint.fix,
        );
    }

    /// Warns about a path that is not in normalized form. It matches nothing, because requests'
    /// paths are compared in normalized form.
    pub(crate) fn warn_of_form(&mut self, field: &str, path: &PathMatch) {
        let sample = match path {
            PathMatch::Exact(text) => text.clone(),
            PathMatch::ElementPrefix(text) => {
                format!("{}/x", text.strip_suffix('/').unwrap_or(text))
            }
            PathMatch::StringPrefix(text) => format!("{text}x"),
            PathMatch::Regex(_) => return,
        };
        if !sample.is_ascii() {
            let problem =
                "no request has such a path: clients send non-ASCII characters as %-escapes";
            self.warning(
                field,
                FieldIssue::new(
                    "",
                    problem,
                    "write it as clients send it, with upper-case %-escapes",
                )
                .with_code(Code::UnmatchablePath),
            );
        } else if normal_path(&sample).as_ref() != Some(&sample) {
            let problem = "no request has such a path: paths are compared in their normal form";
            self.warning(
                field,
                FieldIssue::new(
                    "",
                    problem,
                    "write it without //, and %-escape only what needs it, in upper case",
                )
                .with_code(Code::UnmatchablePath),
            );
        }
    }

    fn field_path(&self, field: &str, inner: &str) -> String {
        [self.field.as_str(), field, inner]
            .into_iter()
            .filter(|part| !part.is_empty())
            .collect::<Vec<_>>()
            .join(".")
    }

    /// Validates a regular expression, subtracts its memory from the service's budget, and returns
    /// it as data planes read it.
    pub(crate) fn regex(&mut self, written: &str) -> Result<String, FieldIssue> {
        let pattern = pattern::without_quotes(written);
        let fix = "use RE2 syntax; the whole text must match";
        self.charge_regex(&pattern, || pattern::cost(&pattern), fix)?;
        Ok(pattern.into_owned())
    }

    /// Subtracts the memory of a regular expression from the service's budget. `build` measures it,
    /// unless one with the same text was measured before.
    pub(crate) fn charge_regex(
        &mut self,
        text: &str,
        build: impl FnOnce() -> Result<usize, String>,
        fix: &str,
    ) -> Result<(), FieldIssue> {
        let costs = &mut self.regexes.costs;
        let one = costs
            .measure(text, build)
            .map_err(|problem| FieldIssue::new("", problem, fix).with_code(Code::InvalidRegex))?;
        let needed = one.saturating_mul(self.regexes.copies);
        if needed > self.regexes.bytes_left {
            let service = &self.regexes.service;
            let problem = format!(
                "with this one the regular expressions of service {service} need more than {REGEXES_PER_SERVICE_BYTES_MAX} bytes"
            );
            return Err(FieldIssue::new(
                "",
                problem,
                "use prefixes, or fewer and shorter expressions",
            )
            .with_code(Code::RegexMemoryExceeded));
        }
        self.regexes.bytes_left -= needed;
        self.regexes.charge_gateways(one);
        Ok(())
    }

    /// Builds a backend. If its reference is broken, the backend keeps its weight, and requests
    /// that it receives fail.
    pub(crate) fn backend(
        &mut self,
        field: &str,
        weight: u32,
        target: Result<BackendTarget, FieldIssue>,
    ) -> Backend {
        let target = target.unwrap_or_else(|complaint| self.refused_backend(field, complaint));
        if weight <= WEIGHT_MAX {
            return Backend {
                weight,
                target,
                filters: None,
            };
        }
        let complaint = FieldIssue::new(
            "weight",
            format!("{weight} is more than {WEIGHT_MAX}"),
            "use smaller shares",
        )
        .with_code(Code::LimitExceeded);
        Backend {
            weight: WEIGHT_MAX,
            target: self.refused_backend(field, complaint),
            filters: None,
        }
    }

    /// Makes a backend refuse its requests, unless it does already.
    pub(crate) fn refuse_backend(&self, backend: &mut Backend, reason: String) {
        backend.filters = None;
        if let BackendTarget::Service { .. } = backend.target {
            backend.target = BackendTarget::Refuse {
                status: self.refusal_status,
                reason,
            };
        }
    }

    pub(crate) fn refused_backend(&mut self, field: &str, complaint: FieldIssue) -> BackendTarget {
        let field = self.field_path(field, &complaint.field);
        let reason = format!("{field}: {}", complaint.problem);
        self.report.error(
            complaint.code,
            self.document,
            field,
            complaint.problem,
            complaint.fix,
        );
        BackendTarget::Refuse {
            status: self.refusal_status,
            reason,
        }
    }

    /// Builds the action of a rule that the gateway answers; a broken rule refuses.
    pub(crate) fn answer(&self, answer: RouteAnswer) -> RouteAction {
        match &self.broken {
            Some(reason) => RouteAction::Refuse {
                status: self.refusal_status,
                reason: reason.clone(),
            },
            None => RouteAction::Answer(Box::new(answer)),
        }
    }

    /// Breaks a rule with too many backends.
    pub(crate) fn check_backend_count(&mut self, field: &str, count: usize) {
        if count > BACKENDS_PER_RULE_MAX {
            let problem =
                format!("the rule has {count} backends, more than {BACKENDS_PER_RULE_MAX}");
            self.broken(
                field,
                FieldIssue::new("", problem, "use fewer backends").with_code(Code::LimitExceeded),
            );
        }
    }

    /// Builds the action of the rule; a broken rule refuses.
    pub(crate) fn action(&mut self, field: &str, backends: Vec<Backend>) -> RouteAction {
        if backends.is_empty() && self.broken.is_none() {
            let status = self.refusal_status;
            let problem = format!("the rule has no backend, so it answers {status}");
            let issue = FieldIssue::new("", problem, "name a Service to send requests to")
                .with_code(Code::RuleWithoutBackend);
            self.broken(field, issue);
        } else {
            self.check_backend_count(field, backends.len());
        }
        if let Some(reason) = &self.broken {
            return RouteAction::Refuse {
                status: self.refusal_status,
                reason: reason.clone(),
            };
        }
        if backends.iter().all(|backend| backend.weight == 0) {
            let complaint = FieldIssue::new(
                "",
                "all weights are 0, so the rule answers 503",
                "give at least one backend a share",
            )
            .with_code(Code::ZeroWeights);
            self.warning(field, complaint);
            return RouteAction::Refuse {
                status: STATUS_NO_WEIGHT,
                reason: format!("{}.{field}: all weights are 0", self.field),
            };
        }
        RouteAction::Split(backends)
    }
}

/// Validates a path that is compared as a whole or by its start.
pub(crate) fn path(value: &str) -> Result<String, FieldIssue> {
    if !value.starts_with('/') {
        return Err(FieldIssue::new(
            "",
            format!("{:?} does not begin with a slash", short(value)),
            "write an absolute path such as /reviews",
        )
        .with_code(Code::InvalidPath));
    }
    text(value)?;
    if value.contains(['?', '#']) {
        return Err(FieldIssue::new(
            "",
            format!("{:?} contains more than a path", short(value)),
            "leave out the query; match it by query parameters",
        )
        .with_code(Code::InvalidPath));
    }
    let bad = value
        .split('/')
        .any(|element| element == "." || element == "..");
    if bad {
        return Err(FieldIssue::new(
            "",
            format!("{:?} has a relative element", short(value)),
            "write the path without . and ..",
        )
        .with_code(Code::InvalidPath));
    }
    Ok(value.to_owned())
}

/// Validates a text that is compared as it is.
pub(crate) fn text(value: &str) -> Result<String, FieldIssue> {
    if value.len() > TEXT_BYTES_MAX {
        let problem = format!(
            "the text has {} bytes, more than {TEXT_BYTES_MAX}",
            value.len()
        );
        return Err(
            FieldIssue::new("", problem, "use a shorter text or a regular expression")
                .with_code(Code::LimitExceeded),
        );
    }
    if value.bytes().any(|c| c < b' ' || c == 0x7f) {
        return Err(FieldIssue::new(
            "",
            "the text contains a control character, which no request can contain",
            "remove it",
        ));
    }
    Ok(value.to_owned())
}

/// Validates the name of a header and returns it in lower case.
pub(crate) fn header_name(name: &str) -> Result<String, FieldIssue> {
    let is_token = !name.is_empty()
        && name
            .bytes()
            .all(|c| c.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&c));
    if is_token && name.len() <= TEXT_BYTES_MAX {
        return Ok(name.to_ascii_lowercase());
    }
    Err(FieldIssue::new(
        "",
        format!("{:?} is not a header's name", short(name)),
        "write a name such as x-user; hosts, paths and methods have fields of their own",
    ))
}

/// Resolves the conditions of one match on headers or query parameters. Their regular expressions
/// are validated here. A broken condition is reported, breaks the rule, and is left out.
pub(crate) fn conditions(
    rule: &mut RuleContext<'_>,
    field: &str,
    written: impl ExactSizeIterator<
        Item = (
            String,
            Result<String, FieldIssue>,
            Result<TextMatch, FieldIssue>,
        ),
    >,
) -> Vec<ValueMatch> {
    if written.len() > CONDITIONS_PER_MATCH_MAX {
        let problem = format!(
            "the match has {} conditions here, more than {CONDITIONS_PER_MATCH_MAX}",
            written.len()
        );
        rule.broken(
            field,
            FieldIssue::new("", problem, "use fewer conditions").with_code(Code::LimitExceeded),
        );
        return Vec::new();
    }
    let mut seen = BTreeSet::new();
    let mut good = Vec::new();
    for (place, name, value) in written {
        let field = format!("{field}{place}");
        let value = value.and_then(|value| match value {
            TextMatch::Regex(pattern) => rule.regex(&pattern).map(TextMatch::Regex),
            _ => Ok(value),
        });
        match (name, value) {
            (Ok(name), Ok(value)) if seen.insert(name.clone()) => {
                good.push(ValueMatch { name, value })
            }
            // Gateway API: of several conditions on one name, the first counts.
            (Ok(name), Ok(_)) => {
                let problem =
                    format!("{name:?} is compared twice; only the first condition counts");
                rule.warning(
                    &field,
                    FieldIssue::new("", problem, "remove one of them")
                        .with_code(Code::DuplicateCondition),
                );
            }
            (Err(complaint), _) | (_, Err(complaint)) => rule.broken(&field, complaint),
        }
    }
    good
}

/// Returns the beginning of a text of any length, for a problem that quotes it.
pub(crate) fn short(text: &str) -> String {
    text.chars().take(80).collect()
}
