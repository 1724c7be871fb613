//! Makes routes of Gateway API that belong to another namespace than their Services, and so apply only
//! to the clients of that namespace. `routing` makes the routes.

use canal_model::ids::Namespace;
use canal_model::policy::Object;
use canal_model::policy::gateway_api::{ParentRef, RouteBackendRef};
use proptest::prelude::*;
use proptest::sample::select;

/// Namespaces of consumers. The first may refer to every Service, the second has no ReferenceGrant.
pub(crate) const CONSUMERS: [&str; 2] = ["front", "back"];

/// Generates the namespace of a route or a client; `None` is that of the Services, or a client without
/// a namespace.
pub(crate) fn consumer() -> impl Strategy<Value = Option<&'static str>> + Clone {
    prop_oneof![3 => Just(None), 1 => select(&CONSUMERS[..]).prop_map(Some)]
}

/// Moves an HTTPRoute or GRPCRoute to another namespace. It still refers to what it referred to.
pub(crate) fn move_route(object: &mut Object, consumer: Namespace) {
    let own = match object {
        Object::HttpRoute(route) => {
            let before = &route.metadata.namespace;
            refer(before, &mut route.spec.parent_refs);
            let rules = route.spec.rules.iter_mut();
            rules.for_each(|rule| keep_backends(before, &mut rule.backend_refs));
            &mut route.metadata.namespace
        }
        Object::GrpcRoute(route) => {
            let before = &route.metadata.namespace;
            refer(before, &mut route.spec.parent_refs);
            let rules = route.spec.rules.iter_mut();
            rules.for_each(|rule| keep_backends(before, &mut rule.backend_refs));
            &mut route.metadata.namespace
        }
        // Only these two kinds have rules for the clients of one namespace.
        _ => return,
    };
    *own = consumer;
}

fn refer(namespace: &Namespace, parents: &mut [ParentRef]) {
    for parent in parents {
        parent.namespace = Some(namespace.clone());
    }
}

fn keep_backends<F>(namespace: &Namespace, backends: &mut [RouteBackendRef<F>]) {
    for backend in backends {
        backend.namespace = Some(namespace.clone());
    }
}
