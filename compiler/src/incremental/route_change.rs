//! Compiles the routes that depend on a change, and puts their rules in the place of those that they
//! had. Nothing is changed before all checks have passed. Start at [`RouteChange::new`].

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use canal_ir::resource_budget::subsets_of;
use canal_model::diagnostic::Diagnostic;
use canal_model::ids::TenantName;
use canal_model::policy::{Document, ObjectKey, ObjectKind};
use canal_model::program::{Resource, RouteRule};

use super::ResourceChanges;
use super::document_changes::DocumentChanges;
use super::route_graph::{LinkedRoute, RouteGraph, RouteLink};
use crate::diagnostic_collector::DiagnosticCollector;
use crate::direct::DirectSettings;
use crate::limits::DELEGATION_COMPARISONS_PER_TENANT_MAX;
use crate::resolve::RouteReferences;
use crate::resource_budget::{CompiledSize, ResourceBudget};
use crate::{CompileOutput, size_of};

/// Maximum number of connected routes that are compiled alone. For more of them the whole tenant is
/// compiled. Nobody measured this value.
const CONNECTED_ROUTES_MAX: usize = 1024;

/// What later compiles of some routes need of a compile of the whole tenant.
pub(super) struct RouteBasis {
    pub(super) references: RouteReferences,
    pub(super) graph: RouteGraph,
    pub(super) direct: DirectSettings,
    /// What was counted of the resources.
    pub(super) used: CompiledSize,
    /// At least the comparisons that merging the delegates of all routes costs.
    pub(super) comparisons: usize,
    /// Indexes of the routes among the resources.
    pub(super) routes: Range<usize>,
}

/// Rules of some routes in the place of those that they had.
pub(super) struct RouteChange {
    /// Each route that was compiled or is gone, with its new rules sorted by key.
    rules: BTreeMap<ObjectKey, Vec<RouteRule>>,
    diagnostics: Vec<Diagnostic>,
    /// What is counted of all resources after the change.
    used: CompiledSize,
    comparisons: usize,
    /// Size of all resources after the change.
    pub(super) size: CompiledSize,
}

impl RouteChange {
    /// Compiles the changed routes and those that are connected with them. Returns `None` if something
    /// else depends on the change.
    pub(super) fn new(
        basis: &RouteBasis,
        tenant: &TenantName,
        documents: &DocumentChanges,
        last: &CompileOutput<Arc<Resource>>,
        max: CompiledSize,
    ) -> Option<Self> {
        let links = basis.graph.links_of(tenant, documents)?;
        let (mut keys, links) = basis.graph.connected(links, CONNECTED_ROUTES_MAX)?;
        // Ports of other objects may become direct, or cease to be so.
        if basis.directness_depends_on(&links) {
            return None;
        }
        keys.extend(documents.changed.keys().cloned());
        let mut routes: Vec<&Arc<Document>> = Vec::with_capacity(keys.len());
        for key in &keys {
            let known = basis.graph.get(key);
            let document = match documents.changed.get(key) {
                Some(change) => change.after.as_ref(),
                None => known.map(|it| &it.document),
            };
            // Routes on Gateways share listeners and limits with more than the connected routes.
            if known.is_some_and(|it| it.is_on_gateway) {
                return None;
            }
            routes.extend(document);
        }
        let mut budget = ResourceBudget::new(max);
        let mut report = DiagnosticCollector::default();
        let compiled = basis
            .references
            .rules_of(tenant, routes, &mut budget, &mut report);
        let mut rules: BTreeMap<ObjectKey, Vec<RouteRule>> =
            keys.into_iter().map(|key| (key, Vec::new())).collect();
        for rule in compiled {
            // A rule of an object outside `keys` depends on more than the connected routes.
            rules.get_mut(&object_of(&rule)?)?.push(rule);
        }
        for own in rules.values_mut() {
            // The whole compilation sorts the rules of a route by key too.
            own.sort_by(|a, b| a.key.cmp(&b.key));
        }
        let diagnostics = report.into_sorted();
        let is_own = |it: &Diagnostic| {
            it.object
                .as_ref()
                .is_some_and(|key| rules.contains_key(key))
        };
        // What the old rules cost is not subtracted: nobody knows it. So the whole tenant is compiled
        // once the sum reaches the limit, which counts exactly again.
        let comparisons = basis.comparisons + budget.comparisons();
        if comparisons > DELEGATION_COMPARISONS_PER_TENANT_MAX || budget.has_refused() {
            return None;
        }
        // What is wrong with other objects, or exceeds a limit, depends on the whole tenant.
        if budget.is_exceeded() || !diagnostics.iter().all(is_own) {
            return None;
        }
        let change = Self {
            used: basis.used,
            comparisons,
            size: last.size,
            rules,
            diagnostics,
        };
        change.counted(basis, &links, &last.resources, &budget, max)
    }

    /// Counts the resources after the change. Returns `None` if the count, or what is not compiled
    /// here, needs more than the connected routes.
    fn counted(
        mut self,
        basis: &RouteBasis,
        links: &BTreeSet<RouteLink>,
        resources: &[Arc<Resource>],
        budget: &ResourceBudget,
        max: CompiledSize,
    ) -> Option<Self> {
        let old = self.rules.keys().flat_map(|key| {
            let own = basis.range_of(key, resources);
            resources[own].iter().filter_map(|it| route_of(it))
        });
        let old: Vec<&RouteRule> = old.collect();
        let new = || self.rules.values().flatten();
        let is_linked =
            |rule: &&RouteRule| links.contains(&RouteLink::Service(rule.parent.clone()));
        // The links name the services whose routes are compiled here; rules of others depend on
        // more.
        if !old.iter().copied().all(|it| is_linked(&it)) || !new().all(|it| is_linked(&it)) {
            return None;
        }
        // Endpoint sets of subsets are counted once for all rules of the tenant.
        if subsets_of(old.iter().copied()) != subsets_of(new()) {
            return None;
        }
        let mut before = ResourceBudget::new(CompiledSize::UNLIMITED);
        for rule in &old {
            before.add_rule(rule);
        }
        let (before, after) = (before.used(), budget.used());
        // The basis has counted the old rules. If its number is smaller, it does not belong to
        // them, and the whole tenant is compiled.
        let replace =
            |all: u64, old: u64, new: u64| Some(all.checked_sub(old)?.saturating_add(new));
        self.used = CompiledSize {
            bytes: replace(basis.used.bytes, before.bytes, after.bytes)?,
            resources: replace(basis.used.resources, before.resources, after.resources)?,
            route_table_bytes: replace(
                basis.used.route_table_bytes,
                before.route_table_bytes,
                after.route_table_bytes,
            )?,
        };
        let count = resources.len() - old.len() + new().count();
        self.size = size_of(self.used, count);
        (!self.size.exceeds(&max)).then_some(self)
    }

    /// Returns the diagnostics of the tenant after the change; `None` if they stay as they were.
    pub(super) fn diagnostics(&self, before: &[Diagnostic]) -> Option<Vec<Diagnostic>> {
        let is_replaced = |it: &&Diagnostic| {
            it.object
                .as_ref()
                .is_some_and(|key| self.rules.contains_key(key))
        };
        let replaced = before.iter().filter(is_replaced);
        if replaced.eq(&self.diagnostics) {
            return None;
        }
        let kept = before.iter().filter(|it| !is_replaced(it));
        let all: Vec<Diagnostic> = kept.chain(&self.diagnostics).cloned().collect();
        Some(DiagnosticCollector::sorted(all))
    }

    /// Puts the rules into the resources. Returns what differs.
    pub(super) fn apply(
        self,
        basis: &mut RouteBasis,
        resources: &mut Vec<Arc<Resource>>,
    ) -> ResourceChanges {
        let mut changes = ResourceChanges::default();
        for (key, rules) in self.rules {
            let own = basis.range_of(&key, resources);
            let is_equal = own.len() == rules.len()
                && resources[own.clone()]
                    .iter()
                    .zip(&rules)
                    .all(|(old, new)| route_of(old) == Some(new));
            if is_equal {
                continue;
            }
            let mut old: BTreeMap<&str, &Arc<Resource>> = BTreeMap::new();
            for resource in &resources[own.clone()] {
                old.extend(route_of(resource).map(|rule| (rule.key.rule.as_str(), resource)));
            }
            let mut new = Vec::with_capacity(rules.len());
            for rule in rules {
                // An equal rule stays the same allocation, so that nobody compares its content.
                let known = old.get(rule.key.rule.as_str()).copied();
                match known.filter(|it| route_of(it) == Some(&rule)) {
                    Some(known) => {
                        old.remove(rule.key.rule.as_str());
                        new.push(known.clone());
                    }
                    None => {
                        let resource = Arc::new(Resource::Route(rule));
                        changes.added.push(resource.clone());
                        new.push(resource);
                    }
                }
            }
            changes.removed.extend(old.into_values().cloned());
            basis.routes.end = basis.routes.end - own.len() + new.len();
            resources.splice(own, new);
        }
        basis.used = self.used;
        basis.comparisons = self.comparisons;
        changes
    }
}

impl RouteBasis {
    /// Returns whether the path to one of the Services depends on whether it has routes: only that of
    /// a Service which requests the direct path does, as all others with HTTP ports have gateways.
    fn directness_depends_on(&self, links: &BTreeSet<RouteLink>) -> bool {
        links.iter().any(|link| match link {
            RouteLink::Service(service) => self.direct.depends_on_routes(service),
            RouteLink::VirtualService(..) => false,
        })
    }

    /// Returns the indexes of the rules of a route.
    fn range_of(&self, key: &ObjectKey, resources: &[Arc<Resource>]) -> Range<usize> {
        let wanted = (key.kind.as_str(), &key.namespace, &key.name);
        let of = |resource: &Arc<Resource>| {
            route_of(resource)
                .map(|it| (it.key.kind.as_str(), &it.key.namespace, &it.key.name).cmp(&wanted))
        };
        let routes = &resources[self.routes.clone()];
        let begin = routes.partition_point(|it| of(it).is_some_and(std::cmp::Ordering::is_lt));
        let count =
            routes[begin..].partition_point(|it| of(it).is_some_and(std::cmp::Ordering::is_le));
        let begin = self.routes.start + begin;
        begin..begin + count
    }
}

impl RouteGraph {
    /// Returns what connects the changed documents with routes, before and after the change. Returns
    /// `None` if more than routes on Services depends on one of them.
    fn links_of(
        &self,
        tenant: &TenantName,
        documents: &DocumentChanges,
    ) -> Option<BTreeSet<RouteLink>> {
        let mut links = BTreeSet::new();
        let (mut grpc_routes, mut added) = (0_isize, 0);
        for (key, change) in &documents.changed {
            let known = self.get(key);
            // A second object with the same key has no effect but a diagnostic.
            if known.is_some() != change.before.is_some() {
                return None;
            }
            links.extend(known.iter().flat_map(|it| it.links.iter().cloned()));
            if key.kind == ObjectKind::GrpcRoute {
                grpc_routes += isize::from(change.after.is_some());
                grpc_routes -= isize::from(change.before.is_some());
            }
            if let Some(after) = &change.after {
                let route = LinkedRoute::of(tenant, after).filter(|it| !it.is_on_gateway)?;
                added += route.links.len();
                links.extend(route.links);
            }
        }
        // The links of the routes before the change are counted too, which only makes the whole tenant
        // be compiled a little earlier.
        if !self.has_room_for(added) {
            return None;
        }
        // The listeners of Gateways depend on whether there is any GRPCRoute.
        let count = self.grpc_routes().checked_add_signed(grpc_routes)?;
        ((count > 0) == (self.grpc_routes() > 0)).then_some(links)
    }
}

/// Returns the rule of a route.
pub(super) fn route_of(resource: &Resource) -> Option<&RouteRule> {
    match resource {
        Resource::Route(rule) => Some(rule),
        _ => None,
    }
}

/// Returns the object that has a rule.
fn object_of(rule: &RouteRule) -> Option<ObjectKey> {
    Some(ObjectKey {
        kind: ObjectKind::from_word(&rule.key.kind)?,
        namespace: rule.key.namespace.clone(),
        name: rule.key.name.clone(),
    })
}
