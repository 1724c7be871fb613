//! The conditions that Gateway API defines for the objects of a tenant, as the compiler decides them.
//! They follow from the codes and fields of the compiler's diagnostics and from the IR, never from
//! sentences. They do not say whether data planes run the configuration yet. Start at
//! [`conditions`].

mod gateways;
mod routes;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use canal_ir::ir::Ir;
use canal_model::diagnostic::Diagnostic;
use canal_model::policy::{Document, Object, ObjectKey, ObjectKind};

/// One condition of an object, of a listener or of a route at a parent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatusCondition {
    /// Type of the condition, such as `Accepted`.
    pub kind: &'static str,
    pub is_true: bool,
    pub reason: &'static str,
    /// Description of the problem; empty if there is none.
    pub message: String,
}

impl StatusCondition {
    fn positive(kind: &'static str, reason: &'static str) -> Self {
        Self {
            kind,
            is_true: true,
            reason,
            message: String::new(),
        }
    }

    fn negative(kind: &'static str, reason: &'static str, message: impl Into<String>) -> Self {
        Self {
            kind,
            is_true: false,
            reason,
            message: message.into(),
        }
    }
}

/// The status of one listener of a Gateway or ListenerSet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenerConditions {
    /// Name in its own object.
    pub name: String,
    /// Number of routes that are attached to the listener.
    pub attached_routes: usize,
    /// Kinds of routes that can attach.
    pub supported_kinds: Vec<ObjectKind>,
    pub conditions: Vec<StatusCondition>,
}

/// The status of a route at one of its parents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParentConditions {
    /// Kind, namespace and name of the parent, with the section and port that the route names.
    pub parent: String,
    pub conditions: Vec<StatusCondition>,
}

/// The status of one object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectConditions {
    pub object: ObjectKey,
    pub conditions: Vec<StatusCondition>,
    pub listeners: Vec<ListenerConditions>,
    pub parents: Vec<ParentConditions>,
}

/// Returns the conditions of the objects of Gateway API that are Canal's, sorted by object.
/// `diagnostics` are those of compiling `documents` to `ir`. If they are so many that the compiler
/// left some out, conditions may be better than they should be.
pub fn conditions(
    documents: &[Arc<Document>],
    ir: &Ir,
    diagnostics: &[Diagnostic],
) -> Vec<ObjectConditions> {
    let mut reported: BTreeMap<&ObjectKey, Vec<&Diagnostic>> = BTreeMap::new();
    for diagnostic in diagnostics {
        if let Some(object) = &diagnostic.object {
            reported.entry(object).or_default().push(diagnostic);
        }
    }
    let of_documents = documents.iter().filter_map(|document| {
        let key = document.object.key();
        let own = reported.get(&key).map_or(&[][..], Vec::as_slice);
        let of_object = ObjectDiagnostics { document, own };
        match &document.object {
            Object::GatewayClass(_) => gateways::of_class(key, &of_object),
            Object::Gateway(gateway) => gateways::of_gateway(key, gateway, ir, &of_object),
            Object::ListenerSet(set) => gateways::of_listener_set(key, set, ir, &of_object),
            Object::HttpRoute(route) => {
                let rules = route.spec.rules.len();
                Some(routes::of_route(
                    key,
                    &route.spec.parent_refs,
                    rules,
                    &of_object,
                ))
            }
            Object::GrpcRoute(route) => {
                let rules = route.spec.rules.len();
                Some(routes::of_route(
                    key,
                    &route.spec.parent_refs,
                    rules,
                    &of_object,
                ))
            }
            // Conditions of TLSRoutes, TCPRoutes and UDPRoutes are not computed in this version.
            // Other kinds have none.
            _ => None,
        }
    });
    let mut all: Vec<ObjectConditions> = of_documents.collect();
    all.sort_by(|a, b| a.object.cmp(&b.object));
    all
}

/// What is reported of one object.
struct ObjectDiagnostics<'a> {
    document: &'a Document,
    own: &'a [&'a Diagnostic],
}

/// Returns whether a field is `outer` or inside it.
fn is_within(field: &str, outer: &str) -> bool {
    field
        .strip_prefix(outer)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
}

impl fmt::Display for StatusCondition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let status = if self.is_true { "True" } else { "False" };
        write!(f, "{}={status} ({}", self.kind, self.reason)?;
        if !self.message.is_empty() {
            write!(f, ": {}", self.message)?;
        }
        f.write_str(")")
    }
}

impl fmt::Display for ObjectConditions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.object)?;
        for condition in &self.conditions {
            writeln!(f, "  {condition}")?;
        }
        for listener in &self.listeners {
            let kinds = listener.supported_kinds.iter().map(|kind| kind.as_str());
            let kinds: Vec<&str> = kinds.collect();
            writeln!(
                f,
                "  listener {}: attachedRoutes={} supportedKinds={}",
                listener.name,
                listener.attached_routes,
                kinds.join(",")
            )?;
            for condition in &listener.conditions {
                writeln!(f, "    {condition}")?;
            }
        }
        for parent in &self.parents {
            writeln!(f, "  parent {}:", parent.parent)?;
            for condition in &parent.conditions {
                writeln!(f, "    {condition}")?;
            }
        }
        Ok(())
    }
}
