//! Generates GRPCRoutes. Their services and methods collide with each other, and with the paths of
//! other rules.

use canal_model::policy::gateway_api::{
    BackendRef, GrpcMethodMatch, GrpcRouteMatch, GrpcRouteSpec, GrpcRule, ParentRef,
    ValueCondition, ValueConditionType,
};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use crate::filters;
use crate::vocabulary::{HOSTS, words};

const SERVICES: [&str; 5] = ["a", "b", "a.b", "ab", ""];
const METHODS: [&str; 4] = ["b", "bc", "Echo", ""];
const PATTERNS: [&str; 5] = ["a.*", "[ab]+", "a|ab", ".*b", "b"];

/// Generates GRPCRoutes of parents, conditions on headers and backends such as these.
pub(crate) fn route(
    parent_ref: impl Strategy<Value = ParentRef>,
    header: impl Strategy<Value = ValueCondition>,
    backend_ref: impl Strategy<Value = BackendRef> + Clone,
) -> impl Strategy<Value = GrpcRouteSpec> {
    let rule = (
        vec(route_match(header), 0..3),
        filters::of_grpc_route(backend_ref.clone()),
        vec(backend_ref, 0..3),
    );
    let rule = rule.prop_map(|(matches, filters, backend_refs)| GrpcRule {
        name: None,
        matches,
        filters,
        backend_refs,
    });
    let spec = (
        vec(parent_ref, 1..3),
        vec(words(&HOSTS), 0..3),
        vec(rule, 0..4),
    );
    spec.prop_map(|(parent_refs, hostnames, rules)| GrpcRouteSpec {
        parent_refs,
        hostnames,
        rules,
    })
}

fn route_match(
    header: impl Strategy<Value = ValueCondition>,
) -> impl Strategy<Value = GrpcRouteMatch> {
    let method = prop_oneof![
        3 => names(ValueConditionType::Exact, &SERVICES, &METHODS),
        1 => names(ValueConditionType::RegularExpression, &PATTERNS, &PATTERNS),
    ];
    (option::of(method), vec(header, 0..2))
        .prop_map(|(method, headers)| GrpcRouteMatch { method, headers })
}

fn names(
    kind: ValueConditionType,
    services: &'static [&'static str],
    methods: &'static [&'static str],
) -> impl Strategy<Value = GrpcMethodMatch> {
    (option::of(words(services)), option::of(words(methods))).prop_map(move |(service, method)| {
        GrpcMethodMatch {
            kind,
            service,
            method,
        }
    })
}
