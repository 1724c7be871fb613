//! Routes in the builder: stores rules, decides which services must be compiled for a change, and
//! takes routes that were compiled before. It schedules nothing; `tenant_builds` does.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use canal_model::ids::{Generation, ServiceKey};
use canal_model::program::{
    HttpMatch, IngressGateway, Labels, PathMatch, Resource, ResourceKind, RouteRule,
};
use canal_model::route_table::RouteTable;

use super::SnapshotBuilder;
use crate::routes::{CompiledRoutes, TargetResolver};
use crate::{EndpointSetId, FilterChain, ServiceRoutes, ServiceView};

/// Rules of one service that must be compiled before a change can be applied.
#[derive(Debug)]
pub(crate) struct CompileJob {
    service: ServiceKey,
    table: RouteTable,
    /// The Gateway for which the service stands, if it does.
    gateway: Option<Arc<IngressGateway>>,
}

/// Name of services whose rules panic in tests, like those that trigger a fault in this program.
#[cfg(test)]
pub(crate) const PANICKING: &str = "panicking";

impl CompileJob {
    /// Returns the number of regexes, which decides how long the job takes unless there are very
    /// many rules. Those of a Gateway count for each of its tables.
    pub(crate) fn regexes(&self) -> usize {
        let of_match = |http: &HttpMatch| {
            let values = http.headers.iter().chain(&http.query);
            let in_values = values.filter(|value| value.value.regex().is_some()).count();
            in_values + usize::from(matches!(http.path, PathMatch::Regex(_)))
        };
        let rules = self.table.rules();
        let in_filters = rules.iter().filter(|rule| {
            let filters = rule.filters.as_ref();
            filters.is_some_and(|filters| filters.rewrite.path_regex.is_some())
        });
        let in_matches = rules.iter().flat_map(|rule| &rule.matches).map(of_match);
        in_matches
            .sum::<usize>()
            .saturating_mul(self.table_count())
            .saturating_add(in_filters.count())
    }

    /// Returns how many tables the job builds: a Gateway has one for each distinct set of routes.
    fn table_count(&self) -> usize {
        let Some(gateway) = &self.gateway else {
            return 1;
        };
        let hosts = gateway.listeners.iter().flat_map(|it| &it.virtual_hosts);
        let sets: BTreeSet<_> = hosts.map(|host| &host.routes).collect();
        sets.len()
    }

    pub(crate) fn service(&self) -> &ServiceKey {
        &self.service
    }

    /// Returns whether these routes are the result of the job.
    pub(crate) fn is_done_by(&self, compiled: &CompiledRoutes) -> bool {
        self.service == compiled.service
            && compiled.is_of(self.table.rules(), self.gateway.as_ref())
    }

    /// Compiles the rules. It needs no access to the builder, so the builder can be used meanwhile.
    pub(crate) fn run(self) -> CompiledRoutes {
        #[cfg(test)]
        assert_ne!(self.service.name.as_str(), PANICKING, "as the test wants");
        CompiledRoutes::compile(self.service, self.table, self.gateway)
    }
}

impl SnapshotBuilder {
    pub(super) fn upsert_route(&mut self, name: String, rule: &RouteRule) {
        // A route may only affect services of its own tenant.
        if rule.key.tenant != rule.parent.tenant {
            self.remove_route(&name);
            tracing::error!(route = %rule.key, parent = %rule.parent, "gateway: left out a route that names another tenant's service");
            return;
        }
        // An equal rule is kept, so that its service is not compiled again.
        if self
            .state(&rule.parent)
            .routes
            .get(&name)
            .is_some_and(|previous| **previous == *rule)
        {
            return;
        }
        self.remove_route(&name);
        self.route_parents.insert(name.clone(), rule.parent.clone());
        self.state(&rule.parent)
            .routes
            .insert(name, Arc::new(rule.clone()));
        self.touched.views.insert(rule.parent.clone());
    }

    pub(super) fn remove_route(&mut self, name: &str) {
        if let Some(parent) = self.route_parents.remove(name) {
            self.state(&parent).routes.remove(name);
            self.touched.views.insert(parent);
        }
    }

    /// Returns what must be compiled before a change of one tenant is applied: one job for each
    /// service whose rules it changes.
    pub(crate) fn compile_jobs(
        &self,
        upserts: &[Arc<Resource>],
        removals: &[(ResourceKind, String)],
    ) -> Vec<CompileJob> {
        let mut services = BTreeSet::new();
        let mut gateways: BTreeMap<&ServiceKey, Arc<IngressGateway>> = BTreeMap::new();
        let mut rules: BTreeMap<ServiceKey, BTreeMap<String, Arc<RouteRule>>> = BTreeMap::new();
        // A service that is not stored has no rules yet.
        let previous_routes = |service: &ServiceKey| {
            self.services
                .get(service)
                .map(|state| state.routes.clone())
                .unwrap_or_default()
        };
        let taken = removals
            .iter()
            .filter(|(kind, _)| *kind == ResourceKind::Route)
            .map(|(_, name)| name.clone());
        let moved = upserts
            .iter()
            .filter(|resource| resource.kind() == ResourceKind::Route)
            .map(|resource| resource.name());
        // A rule that is changed may have had another parent, which loses it.
        for name in taken.chain(moved) {
            if let Some(parent) = self.route_parents.get(&name) {
                rules
                    .entry(parent.clone())
                    .or_insert_with(|| previous_routes(parent))
                    .remove(&name);
            }
        }
        for resource in upserts {
            match &**resource {
                // A tenant's rule must not decide about another tenant's service.
                Resource::Route(rule) if rule.key.tenant == rule.parent.tenant => {
                    let of_service = rules
                        .entry(rule.parent.clone())
                        .or_insert_with(|| previous_routes(&rule.parent));
                    of_service.insert(resource.name(), Arc::new(rule.clone()));
                }
                // Rules may have arrived before their service, and are compiled with it.
                Resource::Service(service) => _ = services.insert(service.key.clone()),
                Resource::Ingress(gateway) => {
                    services.insert(gateway.key.clone());
                    gateways.insert(&gateway.key, Arc::new(gateway.clone()));
                }
                // Other resources change no rules.
                _ => {}
            }
        }
        for service in &services {
            rules
                .entry(service.clone())
                .or_insert_with(|| previous_routes(service));
        }
        let jobs = rules.into_iter().filter(|(service, rules)| {
            // The rules of an unknown service are compiled when it arrives.
            let is_known = services.contains(service)
                || self
                    .services
                    .get(service)
                    .is_some_and(|state| state.service.is_some());
            is_known && !rules.is_empty()
        });
        let jobs = jobs.map(|(service, rules)| CompileJob {
            gateway: gateways
                .remove(&service)
                .or_else(|| self.gateway_of(&service)),
            service,
            table: RouteTable::new(rules.into_values().collect()),
        });
        jobs.filter(|job| !self.is_compiled(job)).collect()
    }

    /// Returns the Gateway for which a service stands.
    pub(super) fn gateway_of(&self, service: &ServiceKey) -> Option<Arc<IngressGateway>> {
        self.services.get(service)?.gateway.clone()
    }

    /// Withholds a service until [`SnapshotBuilder::release`] if it came with this generation and
    /// has no routes yet.
    pub(crate) fn withhold_new(&mut self, key: &ServiceKey, generation: Generation) {
        let state = self
            .services
            .get(key)
            .filter(|state| state.since == generation);
        if state
            .and_then(|state| state.view.as_ref())
            .is_some_and(|view| view.routes.is_none())
        {
            self.withheld.insert(key.clone());
            self.touched.views.insert(key.clone());
        }
    }

    /// Releases withheld services with the next change.
    pub(crate) fn release(&mut self, is_wanted: impl Fn(&ServiceKey) -> bool) {
        self.touched
            .views
            .extend(self.withheld.extract_if(|service| is_wanted(service)));
    }

    /// Returns whether the routes in use were compiled from the rules of a job.
    fn is_compiled(&self, job: &CompileJob) -> bool {
        let view = self
            .services
            .get(&job.service)
            .and_then(|state| state.view.as_ref());
        view.and_then(|view| view.routes.as_ref())
            .is_some_and(|routes| routes.is_of(job.table.rules(), job.gateway.as_ref()))
    }

    /// Returns the routes of a service: those of its earlier view if nothing about them changed.
    /// Its rules are compiled only if they changed and were not compiled in advance. `dialled` are
    /// the filters that the service's own policies require.
    pub(super) fn routes_of(
        &mut self,
        key: &ServiceKey,
        before: Option<&ServiceView>,
        dialled: FilterChain,
    ) -> Option<Arc<ServiceRoutes>> {
        let rules: Vec<Arc<RouteRule>> = self.state(key).routes.values().cloned().collect();
        let gateway = self.gateway_of(key);
        if rules.is_empty() && gateway.is_none() {
            self.faults.remove(key);
            return None;
        }
        let table = RouteTable::new(rules);
        let same = before
            .and_then(|view| view.routes.as_ref())
            .filter(|routes| routes.is_of(table.rules(), gateway.as_ref()));
        let compiled = match same {
            Some(routes) if routes.dialled() == dialled => return Some(routes.clone()),
            Some(routes) => routes.compiled().clone(),
            None => {
                let ready = self
                    .compiled
                    .remove(key)
                    .filter(|compiled| compiled.is_of(table.rules(), gateway.as_ref()));
                let compiled =
                    ready.unwrap_or_else(|| CompiledRoutes::compile(key.clone(), table, gateway));
                self.faults.insert(key.clone(), compiled.faults());
                Arc::new(compiled)
            }
        };
        Some(Arc::new(ServiceRoutes::resolve(
            compiled,
            dialled,
            &mut EndpointSetResolver(self),
        )))
    }
}

/// Resolves endpoint sets for routes while the builder is being modified.
struct EndpointSetResolver<'a>(&'a mut SnapshotBuilder);

impl TargetResolver for EndpointSetResolver<'_> {
    fn slot(&mut self, service: &ServiceKey, port: u16, subset: &Labels) -> EndpointSetId {
        self.0.endpoint_set(service, port, subset)
    }
}
