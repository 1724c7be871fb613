//! Resolves all that a rule does with its requests beside its action, for HTTPRoutes, GRPCRoutes and
//! VirtualServices. Each effect has a file of its own. Start with [`RouteEffects`].

use canal_model::policy::gateway_api::{BackendRef, GrpcRule, HttpRule};
use canal_model::policy::istio::VirtualServiceRoute;
use canal_model::program::{BackendTarget, RouteAction, RouteMirror, RouteRule};
use canal_model::route_attempts::AttemptPolicy;
use canal_model::route_cors::CorsPolicy;
use canal_model::route_faults::FaultPolicy;
use canal_model::route_filters::RouteFilters;

use super::route_fields::{FieldIssue, RuleContext};
use super::{
    route_attempts, route_authorizers, route_cors, route_faults, route_filters, route_mirrors,
};

/// The effects of one written rule.
pub(super) struct RouteEffects {
    filters: Option<Box<RouteFilters>>,
    attempts: Option<Box<AttemptPolicy>>,
    faults: Option<FaultPolicy>,
    cors: Option<Box<CorsPolicy>>,
    mirrors: Vec<RouteMirror>,
}

impl RouteEffects {
    /// Returns the effects of a rule about connections: it has none.
    pub(super) fn of_connections() -> Self {
        Self {
            filters: None,
            attempts: None,
            faults: None,
            cors: None,
            mirrors: Vec::new(),
        }
    }

    /// `resolve` finds the Service of a mirror, and of an authorizer.
    pub(super) fn of_http_route(
        written: &HttpRule,
        resolve: &dyn Fn(&BackendRef) -> Result<BackendTarget, FieldIssue>,
        rule: &mut RuleContext<'_>,
    ) -> Self {
        let mut filters = route_filters::of_http_route(&written.filters, &written.matches, rule);
        if let Some(authorizer) = route_authorizers::of_http_route(written, resolve, rule) {
            let filters: &mut Box<_> = filters.get_or_insert_default();
            filters.authorizer = Some(authorizer);
        }
        Self {
            filters,
            attempts: route_attempts::of_http_route(written, rule),
            // Gateway API has no faults.
            faults: None,
            cors: route_cors::of_http_route(written, rule),
            mirrors: route_mirrors::of_http_route(written, resolve, rule),
        }
    }

    /// `resolve` finds the Service of a mirror.
    pub(super) fn of_grpc_route(
        written: &GrpcRule,
        resolve: &dyn Fn(&BackendRef) -> Result<BackendTarget, FieldIssue>,
        rule: &mut RuleContext<'_>,
    ) -> Self {
        Self {
            filters: route_filters::of_grpc_route(&written.filters, rule),
            // Gateway API has no timeouts and retries of GRPCRoutes, no faults and no CORS.
            attempts: None,
            faults: None,
            cors: None,
            mirrors: route_mirrors::of_grpc_route(written, resolve, rule),
        }
    }

    /// Its mirrors depend on the port: see [`RouteEffects::set_mirrors`].
    pub(super) fn of_virtual_service(
        written: &VirtualServiceRoute,
        rule: &mut RuleContext<'_>,
    ) -> Self {
        Self {
            filters: route_filters::of_virtual_service(written, rule),
            attempts: route_attempts::of_virtual_service(written, rule),
            faults: route_faults::of_virtual_service(written, rule),
            cors: route_cors::of_virtual_service(written, rule),
            mirrors: Vec::new(),
        }
    }

    pub(super) fn set_mirrors(&mut self, mirrors: Vec<RouteMirror>) {
        self.mirrors = mirrors;
    }

    /// Returns the action, unless the effects cannot be had with it. Leaves out mirrors that cannot
    /// be had with the other effects.
    pub(super) fn guard(&mut self, action: RouteAction, rule: &mut RuleContext<'_>) -> RouteAction {
        let filters = self.filters.as_deref();
        let action = route_filters::guard(filters, action, rule);
        route_mirrors::guard(&mut self.mirrors, filters, &action, rule);
        action
    }

    /// Sets the effects of a rule, as far as its action has them.
    pub(super) fn apply(&self, rule: &mut RouteRule) {
        rule.filters = route_filters::of_action(self.filters.as_deref(), &rule.action);
        rule.attempts = route_attempts::of_action(self.attempts.as_deref(), &rule.action);
        rule.faults = route_faults::of_action(self.faults, &rule.action);
        rule.cors = route_cors::of_action(self.cors.as_deref(), &rule.action);
        rule.mirrors = route_mirrors::of_action(&self.mirrors, &rule.action);
    }
}
