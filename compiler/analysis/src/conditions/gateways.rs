//! Conditions of GatewayClasses, Gateways, ListenerSets and their listeners.

use std::collections::BTreeSet;

use canal_ir::ir::Ir;
use canal_ir::ir_ingress::{GatewayIr, ListenerIr};
use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::{Namespace, ObjectName};
use canal_model::ingress::{ListenerFault, ListenerFaultReason, ListenerProtocol, gateway_service};
use canal_model::policy::listeners::{Gateway, GatewayListener, ListenerSet};
use canal_model::policy::{ObjectKey, ObjectKind};

use super::{ListenerConditions, ObjectConditions, ObjectDiagnostics, StatusCondition, shortened};

/// Group of the objects of Gateway API.
const GROUP: &str = "gateway.networking.k8s.io";
/// Kinds of routes that can attach to a listener for HTTP or HTTPS.
const HTTP_KINDS: [ObjectKind; 2] = [ObjectKind::HttpRoute, ObjectKind::GrpcRoute];

/// Returns whether an object belongs to another controller.
fn is_foreign(found: &ObjectDiagnostics<'_>) -> bool {
    let mut own = found.own.iter();
    own.any(|it| {
        matches!(
            it.code,
            Code::ForeignGatewayClass | Code::UnresolvedGatewayClass
        )
    })
}

/// Returns the first problem of the whole object as a condition `Accepted`, if it has one.
fn rejection(found: &ObjectDiagnostics<'_>) -> Option<StatusCondition> {
    let reason = |code| match code {
        Code::UnsupportedParameters => Some("InvalidParameters"),
        Code::UnsupportedAddress => Some("UnsupportedAddress"),
        Code::UnsupportedParent => Some("Invalid"),
        Code::UnresolvedGateway => Some("ParentNotAccepted"),
        Code::ListenerSetNotAllowed => Some("NotAllowed"),
        _ => None,
    };
    let mut own = found.own.iter();
    let reported = own.find_map(|it| Some((reason(it.code)?, it.problem.clone())));
    let outside = || {
        let mut faults = found.document.faults.iter();
        let fault = faults.find(|fault| !fault.field.starts_with("spec.listeners["))?;
        Some(("Invalid", format!("{}: {}", fault.field, fault.problem)))
    };
    let (reason, message) = reported.or_else(outside)?;
    Some(StatusCondition::negative("Accepted", reason, message))
}

pub(super) fn of_class(
    object: ObjectKey,
    found: &ObjectDiagnostics<'_>,
) -> Option<ObjectConditions> {
    if is_foreign(found) {
        return None;
    }
    let accepted = match rejection(found) {
        // Gateway API has no other reason for a class.
        Some(rejected) => StatusCondition {
            reason: "InvalidParameters",
            ..rejected
        },
        None => StatusCondition::positive("Accepted", "Accepted"),
    };
    Some(ObjectConditions {
        object,
        conditions: vec![accepted],
        attached_listener_sets: 0,
        listeners: Vec::new(),
        parents: Vec::new(),
    })
}

/// Returns the conditions of an object that is not in force, all of them false.
pub(super) fn pending(
    object: ObjectKey,
    kinds: &[&'static str],
    found: &ObjectDiagnostics<'_>,
) -> Option<ObjectConditions> {
    let conditions = kinds.iter().map(|kind| StatusCondition::pending(kind));
    (!is_foreign(found)).then(|| ObjectConditions {
        object,
        conditions: conditions.collect(),
        attached_listener_sets: 0,
        listeners: Vec::new(),
        parents: Vec::new(),
    })
}

pub(super) fn of_gateway(
    object: ObjectKey,
    gateway: &Gateway,
    ir: &Ir,
    found: &ObjectDiagnostics<'_>,
) -> Option<ObjectConditions> {
    // The controller of another class writes the conditions of its Gateways.
    if is_foreign(found) {
        return None;
    }
    let compiled = compiled(ir, &object.namespace, &object.name);
    let own = compiled.map_or(&[][..], |it| it.listeners.as_slice());
    // Names of listeners of ListenerSets have slashes.
    let of_gateway = own.iter().filter(|it| !it.listener.name.contains('/'));
    let listeners = of_listeners(&gateway.spec.listeners, of_gateway, found);
    let accepted = accepted(&listeners, "Accepted", found);
    let has_id = compiled.is_some_and(|it| it.id.is_some());
    let is_accepted = accepted.is_true;
    // A Gateway that serves nothing is `Invalid`, whether or not it has an address.
    let programmed = match (is_accepted && is_any_open(&listeners), has_id) {
        (true, true) => StatusCondition::positive("Programmed", "Programmed"),
        (true, false) => {
            let mut own = found.own.iter();
            let problem = own.find(|it| it.code == Code::NotOnCloudTier);
            // A Gateway on the cloud tier has no such diagnostic, and waits for its id.
            let message = problem.map_or("the Gateway has no address", |it| it.problem.as_str());
            StatusCondition::negative("Programmed", "AddressNotAssigned", message)
        }
        (false, _) => StatusCondition::negative("Programmed", "Invalid", "no listener is open"),
    };
    let mut conditions = vec![accepted, programmed];
    let mut own = found.own.iter();
    // Gateway API asks for this condition only while clients without valid certificates are served.
    if let Some(insecure) = own.find(|it| it.code == Code::InsecureClientValidation) {
        conditions.push(StatusCondition {
            message: shortened(&insecure.problem),
            ..StatusCondition::positive("InsecureFrontendValidationMode", "ConfigurationChanged")
        });
    }
    Some(ObjectConditions {
        object,
        conditions,
        // The caller counts the ListenerSets once it has the conditions of all objects.
        attached_listener_sets: 0,
        listeners,
        parents: Vec::new(),
    })
}

pub(super) fn of_listener_set(
    object: ObjectKey,
    set: &ListenerSet,
    ir: &Ir,
    found: &ObjectDiagnostics<'_>,
) -> Option<ObjectConditions> {
    if is_foreign(found) {
        return None;
    }
    let parent = &set.spec.parent_ref;
    let namespace = parent.namespace.as_ref().unwrap_or(&object.namespace);
    let prefix = format!("{}/{}/", object.namespace, object.name);
    let compiled = compiled(ir, namespace, &parent.name);
    let own = compiled.map_or(&[][..], |it| it.listeners.as_slice());
    let own = own
        .iter()
        .filter(|it| it.listener.name.starts_with(&prefix));
    let listeners = of_listeners(&set.spec.listeners, own, found);
    let accepted = accepted(&listeners, "Programmed", found);
    let programmed = match (accepted.is_true, is_any_open(&listeners)) {
        (true, true) => StatusCondition::positive("Programmed", "Programmed"),
        (true, false) => StatusCondition::negative("Programmed", "Invalid", "no listener is open"),
        (false, _) => StatusCondition {
            kind: "Programmed",
            ..accepted.clone()
        },
    };
    Some(ObjectConditions {
        object,
        conditions: vec![accepted, programmed],
        attached_listener_sets: 0,
        listeners,
        parents: Vec::new(),
    })
}

fn compiled<'a>(ir: &'a Ir, namespace: &Namespace, name: &ObjectName) -> Option<&'a GatewayIr> {
    let service = gateway_service(&ir.tenant.name, namespace, name)?;
    ir.ingress.iter().find(|gateway| gateway.service == service)
}

fn is_any_open(listeners: &[ListenerConditions]) -> bool {
    listeners.iter().any(|listener| {
        let mut conditions = listener.conditions.iter();
        conditions.any(|it| it.kind == "Programmed" && it.is_true)
    })
}

/// Returns the condition `Accepted` of an object with listeners. An object of which some listeners
/// are valid is accepted with the reason that others are not. A listener is valid if its condition
/// `validity` is true: a Gateway counts listeners that wait for what they refer to, and a ListenerSet
/// does not.
fn accepted(
    listeners: &[ListenerConditions],
    validity: &str,
    found: &ObjectDiagnostics<'_>,
) -> StatusCondition {
    if let Some(rejected) = rejection(found) {
        return rejected;
    }
    let is_valid = |listener: &&ListenerConditions| {
        let mut conditions = listener.conditions.iter();
        conditions.any(|it| it.kind == validity && it.is_true)
    };
    let valid = listeners.iter().filter(is_valid).count();
    let invalid = listeners.iter().find(|it| !is_valid(it));
    match invalid {
        None => StatusCondition::positive("Accepted", "Accepted"),
        Some(listener) => StatusCondition {
            is_true: valid > 0,
            ..StatusCondition::negative(
                "Accepted",
                "ListenersNotValid",
                format!("listener {} is not valid", listener.name),
            )
        },
    }
}

/// Returns the status of the listeners of one object. `compiled` are those of the object, in the
/// order as written; listeners beyond a limit are not among them.
fn of_listeners<'a>(
    written: &[GatewayListener],
    mut compiled: impl Iterator<Item = &'a ListenerIr>,
    found: &ObjectDiagnostics<'_>,
) -> Vec<ListenerConditions> {
    let listeners = written.iter().enumerate().map(|(at, written)| {
        let compiled = compiled.next();
        let closed = compiled.and_then(|it| it.listener.closed.as_deref());
        let missing = ListenerFault {
            reason: ListenerFaultReason::Invalid,
            problem: "the listener is left out".to_owned(),
        };
        let fault = match compiled {
            Some(_) => closed,
            None => Some(&missing),
        };
        let hosts = compiled.iter().flat_map(|it| &it.virtual_hosts);
        let routes: BTreeSet<_> = hosts.flat_map(|host| &host.routes).collect();
        let protocol = compiled.map(|it| &it.listener.protocol);
        ListenerConditions {
            name: written.name.to_string(),
            attached_routes: routes.len() + compiled.map_or(0, |it| it.closed_routes),
            // Of a protocol in a mode that Canal does not serve, no route can attach.
            supported_kinds: match fault.map(|it| it.reason) {
                Some(ListenerFaultReason::UnsupportedValue) => Vec::new(),
                _ => supported_kinds(written, protocol),
            },
            conditions: of_listener(at, fault, found),
        }
    });
    listeners.collect()
}

/// Returns the kinds that a listener allows and that can attach to it.
fn supported_kinds(
    written: &GatewayListener,
    protocol: Option<&ListenerProtocol>,
) -> Vec<ObjectKind> {
    let kinds = &written.allowed_routes.kinds;
    let all = match protocol {
        // Canal serves no listener of another protocol.
        None | Some(ListenerProtocol::Other(_)) => return Vec::new(),
        Some(ListenerProtocol::Http | ListenerProtocol::Https) => HTTP_KINDS.as_slice(),
        Some(ListenerProtocol::Tls | ListenerProtocol::TerminatedTls) => &[ObjectKind::TlsRoute],
        Some(ListenerProtocol::Tcp) => &[ObjectKind::TcpRoute],
    };
    let is_allowed = |kind: &ObjectKind| {
        let mut kinds = kinds.iter();
        kinds.any(|it| it.group == GROUP && it.kind == kind.as_str())
    };
    all.iter()
        .filter(|kind| kinds.is_empty() || is_allowed(kind))
        .copied()
        .collect()
}

/// Returns the four conditions of a listener.
fn of_listener(
    at: usize,
    fault: Option<&ListenerFault>,
    found: &ObjectDiagnostics<'_>,
) -> Vec<StatusCondition> {
    use ListenerFaultReason as Reason;
    let message = |fault: &ListenerFault| fault.problem.clone();
    let accepted = match fault {
        // First, because this is a fault of references too. Gateway API accepts no such listener.
        Some(fault) if is_about_authorities(fault.reason) => {
            StatusCondition::negative("Accepted", "NoValidCACertificate", message(fault))
        }
        Some(fault) if !is_about_references(fault.reason) => {
            StatusCondition::negative("Accepted", fault.reason.as_str(), message(fault))
        }
        // Gateway API reports other faults of references in ResolvedRefs alone.
        _ => StatusCondition::positive("Accepted", "Accepted"),
    };
    let is_conflict = |fault: &ListenerFault| {
        matches!(
            fault.reason,
            Reason::ProtocolConflict | Reason::HostnameConflict
        )
    };
    // Unlike the others, this condition is true if something is wrong.
    let conflicted = match fault {
        Some(fault) if is_conflict(fault) => StatusCondition {
            is_true: true,
            ..StatusCondition::negative("Conflicted", fault.reason.as_str(), message(fault))
        },
        _ => StatusCondition::negative("Conflicted", "NoConflicts", ""),
    };
    let field = format!("spec.listeners[{at}]");
    let of_listener = found
        .own
        .iter()
        .filter(|it| super::is_within(&it.field, &field));
    let mut unresolved = of_listener.filter_map(|it| {
        let reason = match it.code {
            Code::UnsupportedRouteKind => "InvalidRouteKinds",
            Code::InvalidCertificate => "InvalidCertificateRef",
            Code::CertificateNotPermitted | Code::BackendNotPermitted => "RefNotPermitted",
            // Only filters of a listener refer to Services.
            Code::UnresolvedBackend | Code::BackendPortNotFound | Code::UnsupportedBackend => {
                "InvalidListenerFilterRef"
            }
            // Others are no fault of a reference, or have closed the listener and are its `fault`.
            _ => return None,
        };
        // The list of filters has several references, so the message says which one it is about.
        let inner = it.field.strip_prefix(&field);
        let inner = inner.and_then(|inner| inner.strip_prefix(".filters."));
        let message = match inner {
            Some(inner) => format!("filters.{inner}: {}", it.problem),
            None => it.problem.clone(),
        };
        Some(StatusCondition::negative("ResolvedRefs", reason, message))
    });
    // The fault closes the listener, so it outranks diagnostics that leave it open.
    let of_fault = fault
        .filter(|fault| is_about_references(fault.reason))
        .map(|fault| {
            StatusCondition::negative("ResolvedRefs", fault.reason.as_str(), message(fault))
        });
    let resolved = of_fault
        .or_else(|| unresolved.next())
        .unwrap_or_else(|| StatusCondition::positive("ResolvedRefs", "ResolvedRefs"));
    let programmed = match fault {
        None => StatusCondition::positive("Programmed", "Programmed"),
        // The reason of a conflict says more than `Invalid`, the reason of all other faults.
        Some(fault) if is_conflict(fault) => {
            StatusCondition::negative("Programmed", fault.reason.as_str(), message(fault))
        }
        Some(fault) => StatusCondition::negative("Programmed", "Invalid", message(fault)),
    };
    vec![accepted, conflicted, resolved, programmed]
}

/// Returns whether a listener is closed only because of what it refers to.
fn is_about_references(reason: ListenerFaultReason) -> bool {
    is_about_authorities(reason)
        || matches!(
            reason,
            ListenerFaultReason::InvalidRouteKinds
                | ListenerFaultReason::InvalidCertificateRef
                | ListenerFaultReason::RefNotPermitted
        )
}

/// Returns whether a listener is closed because it has no authorities to validate clients with.
fn is_about_authorities(reason: ListenerFaultReason) -> bool {
    matches!(
        reason,
        ListenerFaultReason::InvalidCaCertificateRef
            | ListenerFaultReason::InvalidCaCertificateKind
            | ListenerFaultReason::CaRefNotPermitted
    )
}
