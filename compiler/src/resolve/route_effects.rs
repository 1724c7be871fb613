//! Resolves all that a rule does with its requests beside its action, for HTTPRoutes, GRPCRoutes and
//! VirtualServices. Each effect has a file of its own. Start with [`RouteEffects`].

use canal_model::policy::gateway_api::{GrpcRule, HttpRule};
use canal_model::policy::istio::VirtualServiceRoute;
use canal_model::program::{RouteAction, RouteRule};
use canal_model::route_attempts::AttemptPolicy;
use canal_model::route_cors::CorsPolicy;
use canal_model::route_faults::FaultPolicy;
use canal_model::route_filters::RouteFilters;

use super::route_fields::RuleContext;
use super::{route_attempts, route_cors, route_faults, route_filters};

/// The effects of one written rule.
pub(super) struct RouteEffects {
    filters: Option<Box<RouteFilters>>,
    attempts: Option<Box<AttemptPolicy>>,
    faults: Option<FaultPolicy>,
    cors: Option<Box<CorsPolicy>>,
}

impl RouteEffects {
    /// Returns the effects of a rule about connections: it has none.
    pub(super) fn of_connections() -> Self {
        Self {
            filters: None,
            attempts: None,
            faults: None,
            cors: None,
        }
    }

    pub(super) fn of_http_route(written: &HttpRule, rule: &mut RuleContext<'_>) -> Self {
        Self {
            filters: route_filters::of_http_route(&written.filters, &written.matches, rule),
            attempts: route_attempts::of_http_route(written, rule),
            // Gateway API has no faults.
            faults: None,
            cors: route_cors::of_http_route(written, rule),
        }
    }

    pub(super) fn of_grpc_route(written: &GrpcRule, rule: &mut RuleContext<'_>) -> Self {
        Self {
            filters: route_filters::of_grpc_route(&written.filters, rule),
            // Gateway API has no timeouts and retries of GRPCRoutes, no faults and no CORS.
            attempts: None,
            faults: None,
            cors: None,
        }
    }

    pub(super) fn of_virtual_service(
        written: &VirtualServiceRoute,
        rule: &mut RuleContext<'_>,
    ) -> Self {
        Self {
            filters: route_filters::of_virtual_service(written, rule),
            attempts: route_attempts::of_virtual_service(written, rule),
            faults: route_faults::of_virtual_service(written, rule),
            cors: route_cors::of_virtual_service(written, rule),
        }
    }

    /// Returns the action, unless the effects cannot be had with it.
    pub(super) fn guard(&self, action: RouteAction, rule: &mut RuleContext<'_>) -> RouteAction {
        route_filters::guard(self.filters.as_deref(), action, rule)
    }

    /// Sets the effects of a rule, as far as its action has them.
    pub(super) fn apply(&self, rule: &mut RouteRule) {
        rule.filters = route_filters::of_action(self.filters.as_deref(), &rule.action);
        rule.attempts = route_attempts::of_action(self.attempts.as_deref(), &rule.action);
        rule.faults = route_faults::of_action(self.faults, &rule.action);
        rule.cors = route_cors::of_action(self.cors.as_deref(), &rule.action);
    }
}
