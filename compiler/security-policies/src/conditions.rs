//! Converts the rules of an AuthorizationPolicy to clauses. Every problem is reported and breaks
//! the policy.

use canal_model::authorization::{
    ALTERNATIVES_MAX, AllOf, Attribute, AttributeMatch, CLAUSES_MAX, Clause, PolicyRule, VALUES_MAX,
};
use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::policy::istio_security::{
    AuthorizationPolicy, AuthorizationRule, OperationSpec, SourceSpec, StringList, WhenCondition,
};

use crate::PolicyResolver;
use crate::values::{ValueContext, ValueResult, attribute, read, trust_domain};

type AuthorizationResolver<'a> = PolicyResolver<'a, AuthorizationPolicy>;

/// A list as written, with its field.
type FieldList<'a> = (&'static str, &'a StringList);

/// Converts one rule; `field` is its path.
pub(crate) fn rule(
    context: ValueContext<'_>,
    field: &str,
    written: &AuthorizationRule,
    reading: &mut AuthorizationResolver<'_>,
) -> PolicyRule {
    let mut rule = PolicyRule::default();
    for (at, from) in items(
        &format!("{field}.from"),
        &written.from,
        ALTERNATIVES_MAX,
        reading,
    ) {
        match &from.source {
            Some(source) => {
                rule.from
                    .push(of_source(context, &format!("{at}.source"), source, reading))
            }
            None if reading.source.fault(&at).is_none() => reading.breaks(
                Code::MissingField,
                format!("{at}.source"),
                "the source is missing",
                "write it",
            ),
            // An entry that could not be decoded has a diagnostic already.
            None => {}
        }
    }
    for (at, to) in items(
        &format!("{field}.to"),
        &written.to,
        ALTERNATIVES_MAX,
        reading,
    ) {
        match &to.operation {
            Some(operation) => rule.to.push(of_operation(
                context,
                &format!("{at}.operation"),
                operation,
                reading,
            )),
            None if reading.source.fault(&at).is_none() => reading.breaks(
                Code::MissingField,
                format!("{at}.operation"),
                "the operation is missing",
                "write it",
            ),
            // As above, the entry has a diagnostic already.
            None => {}
        }
    }
    for (at, condition) in items(
        &format!("{field}.when"),
        &written.when,
        CLAUSES_MAX,
        reading,
    ) {
        rule.when
            .extend(of_condition(context, &at, condition, reading));
    }
    rule
}

/// Returns the items of a list with their fields; none if the list itself is invalid.
fn items<'w, T>(
    field: &str,
    list: &'w Option<Vec<T>>,
    most: usize,
    reading: &mut AuthorizationResolver<'_>,
) -> Vec<(String, &'w T)> {
    let Some(list) = list else { return Vec::new() };
    if list.is_empty() {
        // If the list is empty because its items were rejected, that was reported before.
        if reading.source.fault(field).is_none() {
            reading.breaks(
                Code::MissingField,
                field,
                "the list is empty",
                "write an item, or remove the field to set no condition",
            );
        }
        return Vec::new();
    }
    if list.len() > most {
        reading.breaks(
            Code::LimitExceeded,
            field,
            format!("there are {} items, more than {most}", list.len()),
            "write several rules or policies",
        );
        return Vec::new();
    }
    list.iter()
        .enumerate()
        .map(|(at, item)| (format!("{field}[{at}]"), item))
        .collect()
}

fn of_source(
    context: ValueContext<'_>,
    field: &str,
    source: &SourceSpec,
    reading: &mut AuthorizationResolver<'_>,
) -> AllOf {
    let lists: [(Attribute, FieldList<'_>, FieldList<'_>); 6] = [
        (
            Attribute::SourcePrincipal,
            ("principals", &source.principals),
            ("notPrincipals", &source.not_principals),
        ),
        (
            Attribute::RequestPrincipal,
            ("requestPrincipals", &source.request_principals),
            ("notRequestPrincipals", &source.not_request_principals),
        ),
        (
            Attribute::SourceNamespace,
            ("namespaces", &source.namespaces),
            ("notNamespaces", &source.not_namespaces),
        ),
        (
            Attribute::SourceServiceAccount,
            ("serviceAccounts", &source.service_accounts),
            ("notServiceAccounts", &source.not_service_accounts),
        ),
        (
            Attribute::SourceAddress,
            ("ipBlocks", &source.ip_blocks),
            ("notIpBlocks", &source.not_ip_blocks),
        ),
        (
            Attribute::RemoteAddress,
            ("remoteIpBlocks", &source.remote_ip_blocks),
            ("notRemoteIpBlocks", &source.not_remote_ip_blocks),
        ),
    ];
    // Istio refuses the combination too: the lists would restrict the same identity twice.
    let has_accounts = source.service_accounts.is_some() || source.not_service_accounts.is_some();
    let others = [
        &source.principals,
        &source.not_principals,
        &source.namespaces,
        &source.not_namespaces,
    ];
    if has_accounts && others.iter().any(|list| list.is_some()) {
        let problem = "service accounts are given together with principals or namespaces, which mean the same";
        reading.breaks(
            Code::ConflictingFields,
            format!("{field}.serviceAccounts"),
            problem,
            "write one of them",
        );
    }
    let mut all = clauses(context, field, &lists, reading);
    let domain = |value: &str| trust_domain(context.trust_domain, value).map(|m| (m, None));
    // Not in `lists`: a trust domain is compared as the beginning of a principal.
    if source.trust_domains.is_some() || source.not_trust_domains.is_some() {
        let any = matches(
            &format!("{field}.trustDomains"),
            &source.trust_domains,
            &domain,
            reading,
        );
        let none = matches(
            &format!("{field}.notTrustDomains"),
            &source.not_trust_domains,
            &domain,
            reading,
        );
        all.push(clause(
            field,
            Attribute::SourcePrincipal,
            any,
            none,
            reading,
        ));
    }
    check_not_empty(field, &all, reading);
    all
}

fn of_operation(
    context: ValueContext<'_>,
    field: &str,
    operation: &OperationSpec,
    reading: &mut AuthorizationResolver<'_>,
) -> AllOf {
    let lists: [(Attribute, FieldList<'_>, FieldList<'_>); 4] = [
        (
            Attribute::Host,
            ("hosts", &operation.hosts),
            ("notHosts", &operation.not_hosts),
        ),
        (
            Attribute::DestinationPort,
            ("ports", &operation.ports),
            ("notPorts", &operation.not_ports),
        ),
        (
            Attribute::Method,
            ("methods", &operation.methods),
            ("notMethods", &operation.not_methods),
        ),
        (
            Attribute::Path,
            ("paths", &operation.paths),
            ("notPaths", &operation.not_paths),
        ),
    ];
    let all = clauses(context, field, &lists, reading);
    check_not_empty(field, &all, reading);
    all
}

/// Reports a source or operation without any condition.
fn check_not_empty(field: &str, all: &AllOf, reading: &mut AuthorizationResolver<'_>) {
    if all.is_empty() && reading.source.fault(field).is_none() {
        reading.breaks(
            Code::MissingField,
            field,
            "it has no condition",
            "write a condition, or remove the field around it",
        );
    }
}

/// Converts pairs of lists to one clause for each attribute that has a list.
fn clauses(
    context: ValueContext<'_>,
    field: &str,
    lists: &[(Attribute, FieldList<'_>, FieldList<'_>)],
    reading: &mut AuthorizationResolver<'_>,
) -> AllOf {
    let mut all = AllOf::new();
    for (attribute, any, none) in lists {
        if any.1.is_some() || none.1.is_some() {
            let one = |value: &str| read(context, attribute, value);
            let [any, none] = [any, none]
                .map(|(name, values)| matches(&format!("{field}.{name}"), values, &one, reading));
            all.push(clause(field, attribute.clone(), any, none, reading));
        }
    }
    all
}

/// Builds a clause, and checks that its two lists together are within the limit of data planes.
fn clause(
    field: &str,
    attribute: Attribute,
    any: Vec<AttributeMatch>,
    none: Vec<AttributeMatch>,
    reading: &mut AuthorizationResolver<'_>,
) -> Clause {
    let count = any.len() + none.len();
    if count > VALUES_MAX {
        let problem = format!(
            "there are {count} items in a list and its opposite together, more than {VALUES_MAX}"
        );
        reading.breaks(
            Code::LimitExceeded,
            field,
            problem,
            "write several rules or policies",
        );
    }
    Clause {
        attribute,
        any,
        none,
    }
}

fn of_condition(
    context: ValueContext<'_>,
    field: &str,
    condition: &WhenCondition,
    reading: &mut AuthorizationResolver<'_>,
) -> Option<Clause> {
    if reading.source.fault(field).is_some() {
        return None;
    }
    let attribute = match attribute(&condition.key) {
        Ok(attribute) => attribute,
        Err((problem, fix)) => {
            reading.breaks(Code::InvalidCondition, format!("{field}.key"), problem, fix);
            return None;
        }
    };
    if condition.values.is_none() && condition.not_values.is_none() {
        reading.breaks(
            Code::MissingField,
            field,
            "it has no condition",
            "write values or notValues",
        );
        return None;
    }
    let one = |value: &str| read(context, &attribute, value);
    let any = matches(&format!("{field}.values"), &condition.values, &one, reading);
    let none = matches(
        &format!("{field}.notValues"),
        &condition.not_values,
        &one,
        reading,
    );
    Some(clause(field, attribute, any, none, reading))
}

fn matches(
    field: &str,
    values: &StringList,
    one: &dyn Fn(&str) -> ValueResult,
    reading: &mut AuthorizationResolver<'_>,
) -> Vec<AttributeMatch> {
    let mut found: Vec<AttributeMatch> = Vec::new();
    for (at, value) in items(field, values, VALUES_MAX, reading) {
        if reading.source.fault(&at).is_some() {
            continue;
        }
        match one(value) {
            Ok((m, odd)) => {
                if let Some((problem, fix)) = odd {
                    reading.warning(Code::SuspiciousValue, at, problem, fix);
                }
                if !found.contains(&m) {
                    found.push(m);
                }
            }
            Err((problem, fix)) => reading.breaks(Code::InvalidCondition, at, problem, fix),
        }
    }
    found
}
