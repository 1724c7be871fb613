//! Resolves all that a rule does with its requests beside its action, for HTTPRoutes and
//! VirtualServices. Each effect has a file of its own. Start with [`RouteEffects`].

use canal_model::policy::gateway_api::HttpRule;
use canal_model::policy::istio::{Destination, VirtualServiceRoute};
use canal_model::policy::mirrors::HttpRequestMirrorFilter;
use canal_model::program::{BackendTarget, RouteAction, RouteMirror, RouteRule};
use canal_model::route_attempts::AttemptPolicy;
use canal_model::route_cors::CorsPolicy;
use canal_model::route_faults::FaultPolicy;
use canal_model::route_filters::RouteFilters;

use super::route_fields::{FieldIssue, RuleContext};
use super::{route_attempts, route_cors, route_faults, route_filters, route_mirrors};

/// The effects of one written rule.
pub(super) struct RouteEffects {
    filters: Option<Box<RouteFilters>>,
    attempts: Option<Box<AttemptPolicy>>,
    faults: Option<FaultPolicy>,
    cors: Option<Box<CorsPolicy>>,
    mirrors: Vec<RouteMirror>,
}

impl RouteEffects {
    /// `mirror` finds the Service of a mirror.
    pub(super) fn of_http_route(
        written: &HttpRule,
        mirror: impl Fn(&HttpRequestMirrorFilter) -> Result<BackendTarget, FieldIssue>,
        rule: &mut RuleContext<'_>,
    ) -> Self {
        Self {
            filters: route_filters::of_http_route(&written.filters, &written.matches, rule),
            attempts: route_attempts::of_http_route(written, rule),
            // Gateway API has no faults.
            faults: None,
            cors: route_cors::of_http_route(written, rule),
            mirrors: route_mirrors::of_http_route(written, mirror, rule),
        }
    }

    /// `mirror` finds the Service of a mirror.
    pub(super) fn of_virtual_service(
        written: &VirtualServiceRoute,
        mirror: impl Fn(&Destination) -> Result<BackendTarget, FieldIssue>,
        rule: &mut RuleContext<'_>,
    ) -> Self {
        Self {
            filters: route_filters::of_virtual_service(written, rule),
            attempts: route_attempts::of_virtual_service(written, rule),
            faults: route_faults::of_virtual_service(written, rule),
            cors: route_cors::of_virtual_service(written, rule),
            mirrors: route_mirrors::of_virtual_service(written, mirror, rule),
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
        rule.mirrors = route_mirrors::of_action(&self.mirrors, &rule.action);
    }
}
