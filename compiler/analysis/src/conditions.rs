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
use canal_model::policy::gateway_api::ParentRef;
use canal_model::policy::{Document, Object, ObjectKey, ObjectKind};

/// Maximum bytes of a message; the rest is cut off.
/// A problem may repeat a text of the tenant, of megabytes, and a route has it at each parent.
/// Kubernetes allows 32 KiB. Nobody measured this value.
pub const MESSAGE_BYTES_MAX: usize = 4096;
/// Maximum number of parents of a route that have conditions (Gateway API allows 32).
/// Each is compared with everything that is reported of the route. Nobody measured this value.
pub const PARENTS_MAX: usize = 256;

fn shortened(message: &str) -> Arc<str> {
    message[..message.floor_char_boundary(MESSAGE_BYTES_MAX)].into()
}

/// One condition of an object, of a listener or of a route at a parent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatusCondition {
    /// Type of the condition, such as `Accepted`.
    pub kind: &'static str,
    pub is_true: bool,
    pub reason: &'static str,
    /// Description of the problem, shortened to [`MESSAGE_BYTES_MAX`]; empty if there is none. The
    /// parents of a route share it.
    pub message: Arc<str>,
}

impl StatusCondition {
    fn positive(kind: &'static str, reason: &'static str) -> Self {
        Self {
            kind,
            is_true: true,
            reason,
            message: Arc::default(),
        }
    }

    /// Returns the condition of an object that is not in force yet.
    fn pending(kind: &'static str) -> Self {
        let message = "the tenant's newest configuration is withheld";
        Self::negative(kind, "Pending", message)
    }

    fn negative(kind: &'static str, reason: &'static str, message: impl AsRef<str>) -> Self {
        Self {
            kind,
            is_true: false,
            reason,
            message: shortened(message.as_ref()),
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
    /// Index of the parent in the route's `spec.parentRefs`.
    pub index: usize,
    /// Kind, namespace and name of the parent, with the section and port that the route names.
    pub parent: String,
    pub conditions: Vec<StatusCondition>,
}

/// The status of one object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectConditions {
    pub object: ObjectKey,
    pub conditions: Vec<StatusCondition>,
    /// Number of accepted ListenerSets of a Gateway; 0 for any other object.
    pub attached_listener_sets: usize,
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
    let reported = by_object(diagnostics);
    let of_documents = documents.iter().filter_map(|document| {
        let key = document.object.key();
        let own = reported.get(&key).map_or(&[][..], Vec::as_slice);
        let of_object = ObjectDiagnostics { document, own };
        match &document.object {
            Object::GatewayClass(_) => gateways::of_class(key, &of_object),
            Object::Gateway(gateway) => gateways::of_gateway(key, gateway, ir, &of_object),
            Object::ListenerSet(set) => gateways::of_listener_set(key, set, ir, &of_object),
            object => {
                let (parents, rules) = parents_and_rules(object)?;
                Some(routes::of_route(key, parents, rules, &of_object))
            }
        }
    });
    let mut all: Vec<ObjectConditions> = of_documents.collect();
    count_listener_sets(documents, &mut all);
    all.sort_by(|a, b| a.object.cmp(&b.object));
    all
}

/// Returns the conditions of objects of Gateway API of which no text is in force, because the newest
/// state of the tenant is withheld. `diagnostics` are those of that state.
pub fn pending(documents: &[Arc<Document>], diagnostics: &[Diagnostic]) -> Vec<ObjectConditions> {
    let reported = by_object(diagnostics);
    let of_documents = documents.iter().filter_map(|document| {
        let key = document.object.key();
        let own = reported.get(&key).map_or(&[][..], Vec::as_slice);
        let of_object = ObjectDiagnostics { document, own };
        match &document.object {
            Object::GatewayClass(_) => gateways::pending(key, &["Accepted"], &of_object),
            Object::Gateway(_) | Object::ListenerSet(_) => {
                gateways::pending(key, &["Accepted", "Programmed"], &of_object)
            }
            object => Some(routes::pending(
                key,
                parents_and_rules(object)?.0,
                &of_object,
            )),
        }
    });
    of_documents.collect()
}

fn by_object(diagnostics: &[Diagnostic]) -> BTreeMap<&ObjectKey, Vec<&Diagnostic>> {
    let mut reported: BTreeMap<&ObjectKey, Vec<&Diagnostic>> = BTreeMap::new();
    for diagnostic in diagnostics {
        if let Some(object) = &diagnostic.object {
            reported.entry(object).or_default().push(diagnostic);
        }
    }
    reported
}

/// Sets the number of accepted ListenerSets of each Gateway.
fn count_listener_sets(documents: &[Arc<Document>], all: &mut [ObjectConditions]) {
    let mut gateways: BTreeMap<ObjectKey, ObjectKey> = BTreeMap::new();
    for document in documents {
        if let Object::ListenerSet(set) = &document.object {
            let key = document.object.key();
            let parent = &set.spec.parent_ref;
            let gateway = ObjectKey {
                kind: ObjectKind::Gateway,
                namespace: parent.namespace.clone().unwrap_or(key.namespace.clone()),
                name: parent.name.clone(),
            };
            gateways.insert(key, gateway);
        }
    }
    let mut attached: BTreeMap<&ObjectKey, usize> = BTreeMap::new();
    for object in &*all {
        let mut conditions = object.conditions.iter();
        if let Some(gateway) = gateways.get(&object.object)
            && conditions.any(|it| it.kind == "Accepted" && it.is_true)
        {
            *attached.entry(gateway).or_default() += 1;
        }
    }
    for object in all {
        object.attached_listener_sets = attached.get(&object.object).copied().unwrap_or_default();
    }
}

/// Returns the parents and the number of rules of a route that attaches to listeners; `None` for any
/// other object.
fn parents_and_rules(object: &Object) -> Option<(&[ParentRef], usize)> {
    let (parents, rules) = match object {
        Object::HttpRoute(it) => (&it.spec.parent_refs, it.spec.rules.len()),
        Object::GrpcRoute(it) => (&it.spec.parent_refs, it.spec.rules.len()),
        Object::TlsRoute(it) => (&it.spec.parent_refs, it.spec.rules.len()),
        Object::TcpRoute(it) => (&it.spec.parent_refs, it.spec.rules.len()),
        _ => return None,
    };
    Some((parents, rules))
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
        if self.attached_listener_sets > 0 {
            writeln!(f, "  attachedListenerSets={}", self.attached_listener_sets)?;
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
