//! Attachment of routes to the listeners of Gateways (Gateway API, Istio): which listeners a tenant's
//! Gateways and ListenerSets make, which of them a route's parents name and allow, and for which
//! hosts. Pure: it resolves no backends and orders no rules; the compiler does.
//!
//! Broken input closes its own listener, or attaches its own route to nothing, and is a diagnostic.
//! Start at [`resolve`], then [`TenantListeners::attach`] and, for VirtualServices,
//! [`TenantListeners::bind`].

#![forbid(unsafe_code)]

mod allowed;
mod annotations;
mod bindings;
mod certificates;
mod faults;
mod frontend_validation;
pub mod hostname;
mod kinds;
mod listener_filters;
mod listeners;
mod open_listeners;
pub mod precedence;
mod routes;
mod servers;

use canal_model::diagnostic::{Diagnostic, Severity};
use canal_model::diagnostic_code::DiagnosticCode;
use canal_model::policy::Document;

use certificates::ReferenceProblem;

pub use allowed::SELECTOR_PARTS_MAX;
pub use bindings::{BindingProblem, BoundRules, MESH, gateway_name};
pub use canal_model::limits::{CERTIFICATES_PER_LISTENER_MAX, LISTENERS_PER_GATEWAY_MAX};
pub use certificates::{CERTIFICATE_BYTES_PER_TENANT_MAX, CERTIFICATES_PER_TENANT_MAX};
pub use frontend_validation::CLIENT_CA_BYTES_PER_TENANT_MAX;
pub use listeners::{
    COMPARISONS_PER_TENANT_MAX, CONTROLLER_NAME, DEFAULT_CLASS, GatewayListeners,
    LISTENERS_PER_TENANT_MAX, ListenerObjects, PlacedListener, TenantListeners,
};
pub use routes::{
    ATTACHED_HOSTS_PER_ROUTE_MAX, AttachedRoute, Attachment, LISTENER_PARENTS_PER_ROUTE_MAX,
    RouteParents, is_listener_parent,
};
pub use servers::resolve;

/// Group of the objects of Gateway API.
const GROUP: &str = "gateway.networking.k8s.io";

/// An object with the document that it comes from.
#[derive(Debug)]
pub struct Written<'a, T> {
    pub document: &'a Document,
    pub object: &'a T,
}

impl<T> Clone for Written<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Written<'_, T> {}

/// Returns the beginning of a text of any length, for a problem that quotes it.
fn shorten(text: &str) -> String {
    // A diagnostic stays one line, however long the text is.
    text.chars().take(80).collect()
}

/// Reports the diagnostics about one document.
struct DocumentReport<'a> {
    document: &'a Document,
    sink: &'a mut dyn FnMut(Diagnostic),
}

impl DocumentReport<'_> {
    /// Reports that a part of the object does not work as written.
    fn error(
        &mut self,
        code: DiagnosticCode,
        field: impl Into<String>,
        problem: impl Into<String>,
        fix: &str,
    ) {
        self.add((Severity::Error, code), field.into(), problem.into(), fix);
    }

    /// Reports what Gateway API wants an implementation to say of an object that is as it should
    /// be: it takes no other object down.
    fn warning(
        &mut self,
        code: DiagnosticCode,
        field: impl Into<String>,
        problem: impl Into<String>,
        fix: &str,
    ) {
        self.add((Severity::Warning, code), field.into(), problem.into(), fix);
    }

    /// Reports a reference that leads to nothing usable. What is only missing may come later.
    fn reference(&mut self, field: String, found: &ReferenceProblem) {
        if found.is_pending {
            self.warning(found.code, field, found.problem.clone(), &found.fix);
        } else {
            self.error(found.code, field, found.problem.clone(), &found.fix);
        }
    }

    fn add(
        &mut self,
        (severity, code): (Severity, DiagnosticCode),
        field: String,
        problem: String,
        fix: &str,
    ) {
        (self.sink)(Diagnostic {
            severity,
            code,
            origin: Some(self.document.origin.clone()),
            object: Some(self.document.object.key()),
            field,
            problem,
            fix: fix.to_owned(),
        });
    }
}
