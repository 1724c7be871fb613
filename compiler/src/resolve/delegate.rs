//! Delegation between VirtualServices (Istio): the rules of an object, with those of the objects to
//! which it delegates in place of the rules that do. It merges matches and defaults as Istio does
//! (`pilot/pkg/model/virtualservice.go`), and resolves nothing else. Start at
//! [`DelegateIndex::rules_of`].

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};

use canal_attachment::{MESH, gateway_name};
use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::{Namespace, ObjectName};
use canal_model::policy::Document;
use canal_model::policy::istio::{
    Destination, Headers, HttpMatchRequest, StringMatch, VirtualService, VirtualServiceRoute,
};

use super::tenant_objects::Sourced;
use crate::limits::{
    DELEGATION_COMPARISONS_PER_TENANT_MAX, MATCHES_PER_RULE_MAX, RULES_PER_ROUTE_MAX,
};
use crate::resource_budget::ResourceBudget;

/// The VirtualServices to which others may delegate: those without hosts.
pub(super) struct DelegateIndex<'a> {
    delegates: BTreeMap<(&'a Namespace, &'a ObjectName), &'a Sourced<'a, VirtualService>>,
    /// Objects to which a rule delegates, whether or not they exist.
    named: BTreeSet<(&'a Namespace, &'a ObjectName)>,
    /// Comparisons of matches that the tenant may still cost. Rules are merged anew for each host
    /// and Gateway of an object, through a shared reference.
    comparisons_left: Cell<usize>,
    /// Whether a rule needed more than were left.
    is_exhausted: Cell<bool>,
}

/// A rule as it applies, and where it is written.
pub(super) struct EffectiveRule<'a> {
    pub(super) document: &'a Document,
    /// Namespace in which short names are read.
    pub(super) namespace: &'a Namespace,
    /// Namespace of the rule that delegates, if its rewrite or headers apply to this one.
    pub(super) changes_of: Option<&'a Namespace>,
    /// Path of the rule in its document.
    pub(super) field: String,
    pub(super) written: Cow<'a, VirtualServiceRoute>,
    /// The reason why the rule refuses, if a part of it was rejected.
    pub(super) broken: Option<String>,
    /// A problem with the delegation, for a diagnostic. The rule refuses unless it is dropped.
    pub(super) problem: Option<DelegationProblem>,
}

/// A problem with a delegation.
pub(super) struct DelegationProblem {
    pub(super) code: Code,
    /// Field of the rule that the problem is about.
    pub(super) field: &'static str,
    pub(super) problem: String,
    pub(super) fix: &'static str,
    /// Whether the rule can match nothing, so that it is left out.
    pub(super) drops_rule: bool,
}

impl<'a> EffectiveRule<'a> {
    /// Returns the rule of an object of which no rule could be read.
    pub(super) fn implied(sourced: &Sourced<'a, VirtualService>) -> Self {
        Self {
            document: sourced.document,
            namespace: &sourced.object.metadata.namespace,
            changes_of: None,
            field: "spec.http[0]".to_owned(),
            written: Cow::Owned(VirtualServiceRoute::default()),
            broken: fault_in(sourced.document, "spec.http[0]"),
            problem: None,
        }
    }
}

impl DelegationProblem {
    fn refused(code: Code, problem: String, fix: &'static str) -> Option<Self> {
        Some(Self {
            code,
            field: "delegate",
            problem,
            fix,
            drops_rule: false,
        })
    }
}

impl<'a> DelegateIndex<'a> {
    pub(super) fn new(declared: &'a [Sourced<'a, VirtualService>]) -> Self {
        let delegates = declared.iter().filter(|it| is_delegate(it));
        let delegates = delegates.map(|it| {
            let metadata = &it.object.metadata;
            ((&metadata.namespace, &metadata.name), it)
        });
        let named = declared.iter().flat_map(|it| {
            let own = &it.object.metadata.namespace;
            let rules = it.object.spec.http.iter();
            let named = rules.filter_map(|rule| rule.delegate.as_ref());
            named.map(move |it| (it.namespace.as_ref().unwrap_or(own), &it.name))
        });
        Self {
            delegates: delegates.collect(),
            named: named.collect(),
            comparisons_left: Cell::new(DELEGATION_COMPARISONS_PER_TENANT_MAX),
            is_exhausted: Cell::new(false),
        }
    }

    /// Returns whether a rule delegates to this object.
    pub(super) fn is_named(&self, namespace: &Namespace, name: &ObjectName) -> bool {
        self.named.contains(&(namespace, name))
    }

    /// Returns the number of rules of an object with those of its delegates.
    pub(super) fn count_rules(&self, root: &Sourced<'_, VirtualService>) -> usize {
        let namespace = &root.object.metadata.namespace;
        let counts = root.object.spec.http.iter().map(|rule| {
            self.delegate_of(namespace, rule)
                .map_or(1, |delegate| delegate.object.spec.http.len())
        });
        counts.fold(0, usize::saturating_add)
    }

    /// Returns whether this holds for a rule of an object, or for one of its delegates as it is written.
    pub(super) fn any_rule(
        &self,
        root: &Sourced<'_, VirtualService>,
        mut holds: impl FnMut(&Namespace, &VirtualServiceRoute) -> bool,
    ) -> bool {
        let own = &root.object.metadata.namespace;
        let rules = root.object.spec.http.iter().flat_map(|rule| {
            let delegate = self.delegate_of(own, rule).into_iter();
            let inner = delegate.flat_map(|it| {
                let rules = it.object.spec.http.iter();
                rules.map(move |rule| (&it.object.metadata.namespace, rule))
            });
            std::iter::once((own, rule)).chain(inner)
        });
        // An object with more rules is broken, and they are not read.
        let mut rules = rules.take(2 * RULES_PER_ROUTE_MAX);
        rules.any(|(namespace, rule)| holds(namespace, rule))
    }

    /// Iterates over the rules of an object, at most [`RULES_PER_ROUTE_MAX`]. Each is made when it
    /// is asked for, because a delegate's rules are copied for each rule that delegates to it.
    pub(super) fn rules_of<'i>(
        &'i self,
        root: &'i Sourced<'a, VirtualService>,
    ) -> impl Iterator<Item = EffectiveRule<'i>> {
        let written = root.object.spec.http.iter().enumerate();
        let rules = written.flat_map(move |(at, rule)| self.expanded(root, at, rule));
        rules.take(RULES_PER_ROUTE_MAX)
    }

    fn delegate_of(
        &self,
        own: &Namespace,
        rule: &VirtualServiceRoute,
    ) -> Option<&'a Sourced<'a, VirtualService>> {
        let delegate = rule.delegate.as_ref()?;
        let namespace = delegate.namespace.as_ref().unwrap_or(own);
        let found = self.delegates.get(&(namespace, &delegate.name)).copied()?;
        is_exported_to(found, own).then_some(found)
    }

    /// Returns a rule of an object, or the rules of its delegate.
    fn expanded<'i>(
        &'i self,
        root: &'i Sourced<'a, VirtualService>,
        at: usize,
        rule: &'i VirtualServiceRoute,
    ) -> Box<dyn Iterator<Item = EffectiveRule<'i>> + 'i> {
        let field = format!("spec.http[{at}]");
        let namespace = &root.object.metadata.namespace;
        let mut own = EffectiveRule {
            document: root.document,
            namespace,
            changes_of: None,
            broken: fault_in(root.document, &field),
            field,
            written: Cow::Borrowed(rule),
            problem: None,
        };
        let Some(named) = &rule.delegate else {
            return Box::new(std::iter::once(own));
        };
        let has_action =
            !rule.route.is_empty() || rule.redirect.is_some() || rule.direct_response.is_some();
        let found = self.delegate_of(namespace, rule);
        match found {
            // First, because its own actions conflict with any delegate, even a missing one.
            _ if has_action => {
                let problem = "a rule that delegates has no route, redirect or directResponse";
                own.problem = DelegationProblem::refused(
                    Code::ConflictingActions,
                    problem.to_owned(),
                    "remove one of them",
                );
            }
            None => {
                let namespace = named.namespace.as_ref().unwrap_or(namespace);
                let problem = format!(
                    "there is no VirtualService {namespace}/{} without hosts that is exported here",
                    named.name
                );
                let fix = "create it, correct the name, or remove its hosts";
                own.problem = DelegationProblem::refused(Code::UnresolvedBackend, problem, fix);
            }
            Some(delegate) => {
                let outer = fault_outside_rules(delegate);
                // What is broken in the rule that delegates is broken in each merged rule.
                let outer = own.broken.clone().or(outer);
                let has_unknown_match = has_unknown_match(root.document, &own.field);
                let rules = delegate.object.spec.http.iter().enumerate();
                return Box::new(rules.map(move |(inner_at, inner)| {
                    // Merging compares each match with each, and a tenant has a limited number of
                    // comparisons.
                    if !self.has_comparisons_for((root, rule), (delegate, inner)) {
                        return exhausted(delegate, inner_at);
                    }
                    merged(
                        (namespace, rule),
                        (delegate, inner_at, inner),
                        (outer.clone(), has_unknown_match),
                    )
                }));
            }
        }
        Box::new(std::iter::once(own))
    }

    /// Takes the comparisons that merging two rules costs. Returns false if the tenant has too few.
    fn has_comparisons_for(&self, root: WrittenRule<'_>, leaf: WrittenRule<'_>) -> bool {
        // Computing the cost of every rule beyond the limit would take as long as merging it.
        if self.is_exhausted.get() {
            return false;
        }
        let compared = comparisons_of(&root.1.matches, &leaf.1.matches);
        // The rules are copied, too, before they are compared.
        let cost = compared.saturating_add(copies_of(root) + copies_of(leaf));
        let left = self.comparisons_left.get().checked_sub(cost);
        match left {
            Some(left) => self.comparisons_left.set(left),
            None => self.is_exhausted.set(true),
        }
        left.is_some()
    }

    /// Records in the tenant's budget what merging cost.
    pub(super) fn record_comparisons(&self, budget: &mut ResourceBudget) {
        let used = DELEGATION_COMPARISONS_PER_TENANT_MAX - self.comparisons_left.get();
        budget.record_comparisons(used, self.is_exhausted.get());
    }
}

/// A rule and the object that has it.
type WrittenRule<'r> = (&'r Sourced<'r, VirtualService>, &'r VirtualServiceRoute);

/// Bytes of text whose copy costs as much as one comparison, about 160 ns.
/// Nobody measured it; memory is copied at several gigabytes per second.
const COPIED_BYTES_PER_COMPARISON: usize = 4096;

/// Returns the comparisons of merging two lists of matches. Each pair of matches is compared by the
/// conditions of both and by each pair of their Gateways; a tenant may write thousands of them.
fn comparisons_of(roots: &[HttpMatchRequest], leaves: &[HttpMatchRequest]) -> usize {
    let conditions = |matches: &[HttpMatchRequest]| -> usize {
        let each = matches.iter();
        each.map(|it| it.headers.len() + it.without_headers.len() + it.query_params.len())
            .sum()
    };
    let gateways = |matches: &[HttpMatchRequest]| -> usize {
        matches.iter().map(|it| it.gateways.len()).sum()
    };
    let pairs = roots.len().saturating_mul(leaves.len());
    let of_leaves = roots.len().saturating_mul(conditions(leaves));
    let of_roots = leaves.len().saturating_mul(conditions(roots));
    let of_gateways = gateways(roots).saturating_mul(gateways(leaves));
    pairs
        .saturating_add(of_leaves)
        .saturating_add(of_roots)
        .saturating_add(of_gateways)
}

/// Returns what the copy of a rule costs, in comparisons: its matches, conditions, destinations and
/// changes of headers, and its longest possible text.
fn copies_of((sourced, rule): WrittenRule<'_>) -> usize {
    let changes = |headers: &Option<Headers>| -> usize {
        let both = headers.iter().flat_map(|it| [&it.request, &it.response]);
        both.map(|it| it.set.len() + it.add.len() + it.remove.len())
            .sum()
    };
    let matches = rule.matches.iter().map(|it| {
        let conditions = it.headers.len() + it.without_headers.len() + it.query_params.len();
        1 + conditions + it.gateways.len()
    });
    let destinations = rule.route.iter().map(|it| 1 + changes(&it.headers));
    let cors = rule.cors_policy.iter().map(|it| {
        let origins = it.allow_origin.len() + it.allow_origins.len();
        origins + it.allow_methods.len() + it.allow_headers.len() + it.expose_headers.len()
    });
    let lists = matches.chain(destinations).chain(cors).sum::<usize>();
    let text = sourced.document.text.len() / COPIED_BYTES_PER_COMPARISON;
    lists + changes(&rule.headers) + rule.mirrors.len() + text
}

/// Returns a rule in place of one that the tenant has no comparisons left to merge. It refuses all
/// requests, because nobody knows which ones the merged rule would match.
fn exhausted<'i>(delegate: &'i Sourced<'i, VirtualService>, at: usize) -> EffectiveRule<'i> {
    let problem = format!(
        "with this rule, merging the tenant's delegates costs more than {DELEGATION_COMPARISONS_PER_TENANT_MAX} comparisons of matches"
    );
    let fix = "use fewer matches, or delegate for fewer hosts";
    EffectiveRule {
        document: delegate.document,
        namespace: &delegate.object.metadata.namespace,
        changes_of: None,
        field: format!("spec.http[{at}]"),
        written: Cow::Owned(VirtualServiceRoute::default()),
        broken: None,
        problem: DelegationProblem::refused(Code::LimitExceeded, problem, fix),
    }
}

/// Returns whether an object is one to which others delegate.
pub(super) fn is_delegate(sourced: &Sourced<'_, VirtualService>) -> bool {
    sourced.object.spec.hosts.is_empty() && sourced.fault("spec.hosts").is_none()
}

/// Returns whether an object applies in a namespace.
pub(super) fn is_exported_to(sourced: &Sourced<'_, VirtualService>, to: &Namespace) -> bool {
    let own = &sourced.object.metadata.namespace;
    let export_to = &sourced.object.spec.export_to;
    let is_meant = |text: &str| match text {
        "*" => true,
        "." => own == to,
        namespace => namespace == to.as_str(),
    };
    sourced.fault("spec.exportTo").is_none()
        && (export_to.is_empty() || export_to.iter().any(|text| is_meant(text)))
}

/// Rules for connections that are no HTTP. A fault in them leaves the rules of `http` as they are.
pub(super) const OTHER_PROTOCOLS: [&str; 2] = ["spec.tcp", "spec.tls"];

/// Returns the fault of the object that belongs to no rule and so breaks all of them.
pub(super) fn fault_outside_rules(sourced: &Sourced<'_, VirtualService>) -> Option<String> {
    let mut faults = sourced.document.faults.iter();
    let outside = faults.find(|f| {
        f.field.starts_with("spec")
            && !f.field.starts_with("spec.http[")
            && !OTHER_PROTOCOLS
                .iter()
                .any(|field| is_within(&f.field, field))
    });
    outside.map(|fault| format!("{}: {}", fault.field, fault.problem))
}

/// Returns true for the field `outer` itself, and for what is inside it.
pub(super) fn is_within(field: &str, outer: &str) -> bool {
    field
        .strip_prefix(outer)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
}

/// Returns the first fault in a rule.
fn fault_in(document: &Document, rule: &str) -> Option<String> {
    let mut faults = document.faults.iter();
    let fault = faults.find(|fault| fault.field.starts_with(rule))?;
    Some(format!("{}: {}", fault.field, fault.problem))
}

/// Returns whether a rule has a fault in a field of its matches without which two matches may seem to
/// conflict. Other fields are left out if they are broken, and so conflict with none.
fn has_unknown_match(document: &Document, rule: &str) -> bool {
    let mut faults = document.faults.iter();
    faults.any(|fault| {
        let inner = fault.field.strip_prefix(rule);
        inner.is_some_and(|it| it.contains(".ignoreUriCase") || it.contains(".gateways"))
    })
}

/// Merges a rule of a delegate into the rule that delegates to it.
fn merged<'i>(
    (own, root): (&'i Namespace, &'i VirtualServiceRoute),
    (delegate, at, inner): (
        &'i Sourced<'i, VirtualService>,
        usize,
        &'i VirtualServiceRoute,
    ),
    (outer, has_unknown_match): (Option<String>, bool),
) -> EffectiveRule<'i> {
    let field = format!("spec.http[{at}]");
    let namespace = &delegate.object.metadata.namespace;
    let mut problem = None;
    let mut written = inner.clone();
    if inner.delegate.is_some() {
        let text = "a delegate cannot delegate, as in Istio".to_owned();
        problem = DelegationProblem::refused(Code::UnsupportedField, text, "write the rules here");
        written.delegate = None;
    }
    let broken = outer.or_else(|| fault_in(delegate.document, &field));
    let has_unknown_match = has_unknown_match || self::has_unknown_match(delegate.document, &field);
    let lists = [&root.matches, &inner.matches];
    if let Some(long) = lists.into_iter().find(|it| it.len() > MATCHES_PER_RULE_MAX) {
        // The rule refuses all requests, since it has too many matches.
        written.matches.clone_from(long);
    } else {
        let roots = with_full_gateways(own, &root.matches);
        let leaves = with_full_gateways(namespace, &inner.matches);
        match merged_matches(roots, leaves) {
            Some(matches) => written.matches = matches,
            // The rule is broken, and what is wrong may be all that keeps the matches apart. It
            // refuses what the delegate's rule matches.
            None if has_unknown_match => {}
            None => {
                let text = "no request matches this rule and the one that delegates to it";
                // It replaces a problem above, because a rule that is dropped needs no other one.
                problem = Some(DelegationProblem {
                    code: Code::MatchNeverApplies,
                    field: "match",
                    problem: text.to_owned(),
                    fix: "write matches that are part of those of the rule that delegates",
                    drops_rule: true,
                });
            }
        }
    }
    let changes_of = inherit(own, root, &mut written);
    EffectiveRule {
        document: delegate.document,
        namespace,
        changes_of,
        broken,
        field,
        written: Cow::Owned(written),
        problem,
    }
}

/// Gives each field that a delegate's rule leaves out the value of the rule that delegates, as Istio
/// does. Returns the namespace of the latter if it changes requests so.
fn inherit<'i>(
    own: &'i Namespace,
    root: &VirtualServiceRoute,
    written: &mut VirtualServiceRoute,
) -> Option<&'i Namespace> {
    let changes = written.rewrite.is_none() && root.rewrite.is_some()
        || written.headers.is_none() && root.headers.is_some();
    let complete_host = |destination: &mut Destination| {
        // A short name is one of the namespace where it is written.
        if !destination.host.contains('.') {
            destination.host = format!("{}.{own}", destination.host);
        }
    };
    written.rewrite = written.rewrite.take().or_else(|| root.rewrite.clone());
    written.timeout = written.timeout.or(root.timeout);
    written.retries = written.retries.take().or_else(|| root.retries.clone());
    written.fault = written.fault.take().or_else(|| root.fault.clone());
    written.cors_policy = written
        .cors_policy
        .take()
        .or_else(|| root.cors_policy.clone());
    written.headers = written.headers.take().or_else(|| root.headers.clone());
    if written.mirror.is_none() {
        written.mirror.clone_from(&root.mirror);
        written.mirror.iter_mut().for_each(complete_host);
    }
    written.mirror_percent = written.mirror_percent.take().or(root.mirror_percent);
    written.mirror_percentage = written.mirror_percentage.take().or(root.mirror_percentage);
    if written.mirrors.is_empty() {
        written.mirrors.clone_from(&root.mirrors);
        let mirrors = written.mirrors.iter_mut();
        mirrors.for_each(|it| complete_host(&mut it.destination));
    }
    changes.then_some(own)
}

/// Returns the matches with the full names of their Gateways, which two namespaces may spell
/// differently.
fn with_full_gateways(own: &Namespace, matches: &[HttpMatchRequest]) -> Vec<HttpMatchRequest> {
    let full = |written: &String| match gateway_name(own, written) {
        Ok((namespace, name)) if written != MESH => format!("{namespace}/{name}"),
        _ => written.clone(),
    };
    let with_full = |it: &HttpMatchRequest| HttpMatchRequest {
        gateways: it.gateways.iter().map(full).collect(),
        ..it.clone()
    };
    // One more than the limit is enough for the diagnostic about it.
    matches
        .iter()
        .take(MATCHES_PER_RULE_MAX + 1)
        .map(with_full)
        .collect()
}

/// Merges the matches of two rules; `None` if one of the delegate's is no part of any of the root's.
fn merged_matches(
    roots: Vec<HttpMatchRequest>,
    leaves: Vec<HttpMatchRequest>,
) -> Option<Vec<HttpMatchRequest>> {
    if roots.is_empty() {
        return Some(leaves);
    }
    if leaves.is_empty() {
        return Some(roots);
    }
    let mut merged = Vec::new();
    for leaf in &leaves {
        let parts = roots.iter().filter(|root| !is_conflict(root, leaf));
        let before = merged.len();
        merged.extend(parts.map(|root| merged_match(root, leaf)));
        if merged.len() == before {
            return None;
        }
        if merged.len() > MATCHES_PER_RULE_MAX {
            break;
        }
    }
    Some(merged)
}

fn merged_match(root: &HttpMatchRequest, leaf: &HttpMatchRequest) -> HttpMatchRequest {
    let mut merged = leaf.clone();
    let root = root.clone();
    merged.uri = merged.uri.or(root.uri);
    merged.scheme = merged.scheme.or(root.scheme);
    merged.method = merged.method.or(root.method);
    merged.authority = merged.authority.or(root.authority);
    merged.port = merged.port.or(root.port);
    for (name, condition) in root.headers {
        merged.headers.entry(name).or_insert(condition);
    }
    for (name, condition) in root.without_headers {
        merged.without_headers.entry(name).or_insert(condition);
    }
    for (name, condition) in root.query_params {
        merged.query_params.entry(name).or_insert(condition);
    }
    for (key, value) in root.source_labels {
        merged.source_labels.entry(key).or_insert(value);
    }
    if merged.source_namespace.is_empty() {
        merged.source_namespace = root.source_namespace;
    }
    if merged.gateways.is_empty() {
        merged.gateways = root.gateways;
    }
    merged
}

/// Returns whether a match of a delegate is no part of a match of the rule that delegates.
fn is_conflict(root: &HttpMatchRequest, leaf: &HttpMatchRequest) -> bool {
    let is_outside = |root: &BTreeMap<String, StringMatch>, leaf: &BTreeMap<_, _>| {
        let mut leaves = leaf.iter();
        leaves.any(|(name, condition)| differs(root.get(name), Some(condition)))
    };
    differs(root.uri.as_ref(), leaf.uri.as_ref())
        || differs(root.scheme.as_ref(), leaf.scheme.as_ref())
        || differs(root.method.as_ref(), leaf.method.as_ref())
        || differs(root.authority.as_ref(), leaf.authority.as_ref())
        || is_outside(&root.headers, &leaf.headers)
        || is_outside(&root.without_headers, &leaf.without_headers)
        || is_outside(&root.query_params, &leaf.query_params)
        || differ(&root.source_namespace, &leaf.source_namespace)
        || leaf.source_labels.iter().any(|(key, value)| {
            let of_root = root.source_labels.get(key);
            of_root.is_some_and(|of_root| of_root != value)
        })
        || root.ignore_uri_case != leaf.ignore_uri_case
        || matches!((root.port, leaf.port), (Some(root), Some(leaf)) if root != leaf)
        || !root.gateways.is_empty() && leaf.gateways.iter().any(|it| !root.gateways.contains(it))
}

/// Returns whether two texts differ, of which an empty one means any.
fn differ(root: &str, leaf: &str) -> bool {
    !root.is_empty() && !leaf.is_empty() && root != leaf
}

/// Returns whether a text that the delegate's condition accepts may be one that the other refuses,
/// as far as Istio decides it: two conditions of which one is a regular expression always differ.
fn differs(root: Option<&StringMatch>, leaf: Option<&StringMatch>) -> bool {
    let (Some(root), Some(leaf)) = (root, leaf) else {
        return false;
    };
    match (root, leaf) {
        (
            StringMatch {
                exact: Some(root), ..
            },
            StringMatch {
                exact: Some(leaf), ..
            },
        ) => root != leaf,
        (
            StringMatch {
                prefix: Some(root), ..
            },
            StringMatch {
                prefix: Some(leaf), ..
            }
            | StringMatch {
                exact: Some(leaf), ..
            },
        ) => !leaf.starts_with(root.as_str()),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exact(text: &str) -> StringMatch {
        StringMatch {
            exact: Some(text.to_owned()),
            ..StringMatch::default()
        }
    }

    fn prefix(text: &str) -> StringMatch {
        StringMatch {
            prefix: Some(text.to_owned()),
            ..StringMatch::default()
        }
    }

    fn regex(text: &str) -> StringMatch {
        StringMatch {
            regex: Some(text.to_owned()),
            ..StringMatch::default()
        }
    }

    #[test]
    fn a_condition_of_a_delegate_is_part_of_the_roots() {
        for (root, leaf, expected) in [
            (exact("/a"), exact("/a"), false),
            (exact("/a"), exact("/b"), true),
            (exact("/a"), prefix("/a"), true),
            (prefix("/a"), prefix("/a/b"), false),
            (prefix("/a/b"), prefix("/a"), true),
            (prefix("/a"), exact("/a/b"), false),
            (prefix("/a"), regex("/a.*"), true),
            (regex("/a"), regex("/a"), true),
            (regex("/a"), StringMatch::default(), true),
        ] {
            assert_eq!(
                differs(Some(&root), Some(&leaf)),
                expected,
                "{root:?} {leaf:?}"
            );
            assert!(!differs(None, Some(&leaf)) && !differs(Some(&root), None));
        }
    }

    #[test]
    fn matches_of_a_delegate_are_merged_with_each_match_of_the_root() {
        let of_uri = |uri: StringMatch| HttpMatchRequest {
            uri: Some(uri),
            ..HttpMatchRequest::default()
        };
        let with_header = |name: &str, uri: StringMatch| HttpMatchRequest {
            headers: [(name.to_owned(), exact("x"))].into(),
            ..of_uri(uri)
        };
        let roots = vec![with_header("a", prefix("/a")), of_uri(prefix("/b"))];
        let merged = merged_matches(roots.clone(), vec![with_header("b", exact("/a/c"))]).unwrap();
        assert_eq!(merged.len(), 1);
        assert_eq!(merged[0].uri, Some(exact("/a/c")));
        assert_eq!(merged[0].headers.len(), 2);
        assert_eq!(
            merged_matches(roots.clone(), vec![of_uri(exact("/c"))]),
            None
        );
        assert_eq!(
            merged_matches(roots.clone(), Vec::new()),
            Some(roots.clone())
        );
        assert_eq!(merged_matches(Vec::new(), roots.clone()), Some(roots));
    }

    #[test]
    fn conditions_and_gateways_are_counted_with_their_matches() {
        let with = |conditions: usize, gateways: usize| HttpMatchRequest {
            headers: (0..conditions)
                .map(|name| (name.to_string(), exact("x")))
                .collect(),
            gateways: vec![MESH.to_owned(); gateways],
            ..HttpMatchRequest::default()
        };
        let (roots, leaves) = (vec![with(1, 5); 2], vec![with(3, 2); 4]);
        // Eight pairs; the conditions of each side with each match of the other; ten Gateways with
        // eight.
        let expected = 8 + 2 * 12 + 4 * 2 + 10 * 8;
        assert_eq!(comparisons_of(&roots, &leaves), expected);
        assert_eq!(comparisons_of(&[with(0, 0)], &[with(0, 0)]), 1);
    }

    #[test]
    fn gateways_of_a_delegate_are_some_of_the_roots() {
        let of = |gateways: &[&str]| HttpMatchRequest {
            gateways: gateways.iter().map(|it| (*it).to_owned()).collect(),
            ..HttpMatchRequest::default()
        };
        let namespace = Namespace::new("shop").unwrap();
        let full = with_full_gateways(&namespace, &[of(&["web", "infra/web", MESH])]);
        assert_eq!(full[0].gateways, ["shop/web", "infra/web", MESH]);
        assert!(is_conflict(&of(&["a/b"]), &of(&["a/b", "a/c"])));
        assert!(!is_conflict(&of(&["a/b", MESH]), &of(&["a/b"])));
        assert!(!is_conflict(&of(&["a/b"]), &of(&[])));
    }
}
