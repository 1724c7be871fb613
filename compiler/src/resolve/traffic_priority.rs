//! Resolves TrafficPriorities: the conditions of their rules, and who may name a class. A rule with
//! a broken part is `normal` for what it matches. It decides about no request, because no data plane
//! reads them yet.

use std::num::NonZeroU8;

use canal_model::authorization::{Attribute, AttributeMatch};
use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::{Namespace, ServiceKey};
use canal_model::policy::preferences::{
    PriorityClass, PriorityMatch, PriorityRule, TrafficPriority,
};

use canal_ir::preferences::{PriorityIr, PriorityMatchIr, PriorityRuleIr};

use super::http_route::{http_match, matches};
use super::offload_preference::{PreferenceReferences, listeners};
use super::pattern_costs::PatternCosts;
use super::route_fields::{FieldIssue, RegexBudget, RuleContext, STATUS_BROKEN};
use super::tenant_objects::Sourced;
use crate::diagnostic_collector::DiagnosticCollector;
use crate::limits::{
    ASSERTING_PRINCIPALS_MAX, PRIORITY_MATCHES_PER_TENANT_MAX, REGEXES_PER_SERVICE_BYTES_MAX,
    RULES_PER_PRIORITY_MAX, TRAFFIC_PRIORITIES_PER_TENANT_MAX,
};
use canal_security_policies::values::{self, ValueContext};

/// Default of `spec.highShare`, in percent. A class that most requests have would order nothing.
/// Nobody measured this value.
const HIGH_SHARE: u8 = 30;

/// What further rules of the tenant may take.
struct PriorityBudget {
    regexes: RegexBudget,
    matches_left: usize,
}

/// Returns the objects, the oldest first.
pub(super) fn resolve(
    known: PreferenceReferences<'_>,
    declared: &[Sourced<'_, TrafficPriority>],
    report: &mut DiagnosticCollector,
) -> Vec<PriorityIr> {
    let limit = TRAFFIC_PRIORITIES_PER_TENANT_MAX;
    if let Some(first) = declared.get(limit) {
        let count = declared.len();
        let problem = format!(
            "the tenant has {count} TrafficPriorities, more than {limit}; from this one on they are left out"
        );
        report.refuse_excess(first.document, "", problem, "put more rules into one");
    }
    // All objects of the tenant together use as much memory for expressions as one service may.
    let regexes = RegexBudget {
        bytes_left: REGEXES_PER_SERVICE_BYTES_MAX,
        copies: 1,
        service: "the tenant's TrafficPriorities".to_owned(),
        gateways: Vec::new(),
        costs: PatternCosts::default(),
    };
    let mut budget = PriorityBudget {
        regexes,
        matches_left: PRIORITY_MATCHES_PER_TENANT_MAX,
    };
    let mut resolved = Vec::new();
    for sourced in declared.iter().take(limit) {
        resolved.push(priority(known, sourced, &mut budget, report));
        let problem = "TrafficPriority is not acted on yet: all requests are of one class";
        let fix = "keep it for a later version, or remove it";
        report.warning(Code::NotActedOn, sourced.document, "", problem, fix);
    }
    resolved
}

fn priority(
    known: PreferenceReferences<'_>,
    sourced: &Sourced<'_, TrafficPriority>,
    budget: &mut PriorityBudget,
    report: &mut DiagnosticCollector,
) -> PriorityIr {
    let TrafficPriority { metadata, spec } = sourced.object;
    let document = sourced.document;
    if spec.rules.len() > RULES_PER_PRIORITY_MAX {
        let problem = format!(
            "the object has {} rules, more than {RULES_PER_PRIORITY_MAX}; the rest is left out",
            spec.rules.len()
        );
        report.refuse_excess(document, "spec.rules", problem, "split the object");
    }
    let rules = spec.rules.iter().take(RULES_PER_PRIORITY_MAX).enumerate();
    let mut resolved = Vec::new();
    for (at, rule) in rules {
        let field = format!("spec.rules[{at}]");
        // A rule without matches has one that holds for every request.
        let Some(left) = budget.matches_left.checked_sub(rule.matches.len().max(1)) else {
            budget.matches_left = 0;
            let problem = format!(
                "with this rule the tenant's TrafficPriorities have more than {PRIORITY_MATCHES_PER_TENANT_MAX} matches; it and those behind it are left out"
            );
            report.refuse_excess(document, field, problem, "use wider matches");
            break;
        };
        budget.matches_left = left;
        let mut context = RuleContext {
            document,
            changes_of: None,
            field,
            report: &mut *report,
            broken: fault_in(sourced, at),
            // A broken rule gives requests the normal class and refuses none, so no response has
            // the status.
            refusal_status: STATUS_BROKEN,
            regexes: &mut budget.regexes,
        };
        resolved.push(resolve_rule(known, sourced, (at, rule), &mut context));
    }
    let high_share = spec.high_share.map_or(HIGH_SHARE, NonZeroU8::get);
    if high_share > 100 {
        let problem = "a share has at most 100 percent, so all requests may be high";
        let fix = "write a percentage from 1 to 100";
        report.error(Code::InvalidValue, document, "spec.highShare", problem, fix);
    }
    PriorityIr {
        namespace: metadata.namespace.clone(),
        name: metadata.name.clone(),
        rules: resolved,
        asserted_by: asserting(known, sourced, report),
        high_share: high_share.min(100),
    }
}

/// Returns the reason why a rule is broken, if a part of it could not be read.
fn fault_in(sourced: &Sourced<'_, TrafficPriority>, at: usize) -> Option<String> {
    let prefix = format!("spec.rules[{at}]");
    let mut faults = sourced.document.faults.iter();
    let fault = faults.find(|it| it.field.starts_with(&prefix) || it.field == "spec.rules")?;
    Some(format!("{}: {}", fault.field, fault.problem))
}

fn resolve_rule(
    known: PreferenceReferences<'_>,
    sourced: &Sourced<'_, TrafficPriority>,
    (at, written): (usize, &PriorityRule),
    rule: &mut RuleContext<'_>,
) -> PriorityRuleIr {
    let resolved = matches(
        &written.matches,
        rule,
        &|index, it: &PriorityMatch, rule| resolve_match(known, sourced, [at, index], it, rule),
    );
    PriorityRuleIr {
        matches: resolved,
        class: match rule.broken {
            Some(_) => PriorityClass::Normal,
            None => written.class,
        },
    }
}

/// Resolves one match. What cannot be resolved breaks the rule, which then gives the normal class.
fn resolve_match(
    known: PreferenceReferences<'_>,
    sourced: &Sourced<'_, TrafficPriority>,
    place: [usize; 2],
    written: &PriorityMatch,
    rule: &mut RuleContext<'_>,
) -> PriorityMatchIr {
    let own = &sourced.object.metadata.namespace;
    let field = format!("matches[{}]", place[1]);
    let http = http_match(place, &written.of_route(), rule);
    let mut broken = |inner: &str, code: Code, problem: String, fix: &str| {
        let issue = FieldIssue::new("", problem, fix).with_code(code);
        rule.broken(&format!("{field}.{inner}"), issue);
    };
    // `*` allows every host, as no host does.
    let host = written.host.as_deref().filter(|host| *host != "*");
    let host = host.and_then(|host| match canal_attachment::hostname::parse(host) {
        Ok(host) => Some(host),
        Err(problem) => {
            let fix = "write a name such as www.example.com or *.example.com";
            broken("host", Code::InvalidHostname, problem, fix);
            None
        }
    });
    let principal = written.principal.as_deref();
    let principal = principal.and_then(|value| match read_principal(known, own, value) {
        Ok(principal) => Some(principal),
        Err((problem, fix)) => {
            broken("principal", Code::InvalidCondition, problem, fix);
            None
        }
    });
    let listener = written.listener.as_ref();
    let listener = listener.and_then(|it| match listeners(known, own, it) {
        Ok(listener) => Some(listener),
        Err(problem) => {
            let fix = "create it, or correct the name";
            broken("listener", Code::UnresolvedTarget, problem, fix);
            None
        }
    });
    let service = written.service.as_ref().and_then(|it| {
        let key = ServiceKey {
            tenant: known.tenant.name.clone(),
            namespace: it.namespace.as_ref().unwrap_or(own).clone(),
            name: it.name.clone(),
        };
        if known.services.contains_key(&key) {
            return Some(key);
        }
        let problem = format!("there is no Service {}/{}", key.namespace, key.name);
        broken(
            "service",
            Code::UnresolvedTarget,
            problem,
            "correct the name",
        );
        None
    });
    PriorityMatchIr {
        host,
        http,
        source: written.selector.as_ref().map(|it| it.match_labels.clone()),
        principal,
        listener,
        service,
    }
}

fn read_principal(
    known: PreferenceReferences<'_>,
    own: &Namespace,
    value: &str,
) -> Result<AttributeMatch, values::ValueIssue> {
    let context = ValueContext {
        namespace: own,
        trust_domain: &known.tenant.trust_domain,
    };
    values::read(context, &Attribute::SourcePrincipal, value).map(|(principal, _)| principal)
}

/// Returns the principals that may name a class. One that is broken may not.
fn asserting(
    known: PreferenceReferences<'_>,
    sourced: &Sourced<'_, TrafficPriority>,
    report: &mut DiagnosticCollector,
) -> Vec<AttributeMatch> {
    let written = &sourced.object.spec.asserted_by;
    let document = sourced.document;
    if written.len() > ASSERTING_PRINCIPALS_MAX {
        let problem = format!(
            "the object has {} principals, more than {ASSERTING_PRINCIPALS_MAX}; the rest is left out",
            written.len()
        );
        report.refuse_excess(document, "spec.assertedBy", problem, "use prefixes");
    }
    let principals = written.iter().take(ASSERTING_PRINCIPALS_MAX).enumerate();
    let principals = principals.filter_map(|(at, value)| {
        match read_principal(known, &sourced.object.metadata.namespace, value) {
            Ok(principal) => Some(principal),
            Err((problem, fix)) => {
                let field = format!("spec.assertedBy[{at}]");
                report.error(Code::InvalidCondition, document, field, problem, fix);
                None
            }
        }
    });
    principals.collect()
}
