//! Resolves OffloadPreferences: what each is about, and which of them disagree. It decides about no
//! traffic, because no target reads them yet.

use std::collections::BTreeMap;

use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::{Namespace, ServiceKey};
use canal_model::ingress::gateway_service;
use canal_model::policy::Document;
use canal_model::policy::preferences::{
    ListenerRef, OffloadPermission, OffloadPreference, OffloadPreferenceSpec,
};
use canal_model::program::{Labels, Service, Tenant, Workload};

use canal_attachment::TenantListeners;
use canal_ir::preferences::{ListenerSelector, OffloadIr, OffloadSubject};

use super::tenant_objects::Sourced;
use crate::diagnostic_collector::DiagnosticCollector;
use crate::limits::{OFFLOAD_COMPARISONS_PER_TENANT_MAX, OFFLOAD_PREFERENCES_PER_TENANT_MAX};

/// The objects of the tenant that preferences may name.
#[derive(Clone, Copy)]
pub(super) struct PreferenceReferences<'a> {
    pub(super) tenant: &'a Tenant,
    pub(super) services: &'a BTreeMap<ServiceKey, Service>,
    pub(super) workloads: &'a [Workload],
    pub(super) listeners: &'a TenantListeners,
}

/// Returns the preferences, the oldest first. One that is broken is left out, so its traffic takes
/// the usual path.
pub(super) fn resolve(
    known: PreferenceReferences<'_>,
    declared: &[Sourced<'_, OffloadPreference>],
    report: &mut DiagnosticCollector,
) -> Vec<OffloadIr> {
    let limit = OFFLOAD_PREFERENCES_PER_TENANT_MAX;
    if let Some(first) = declared.get(limit) {
        let count = declared.len();
        let problem = format!(
            "the tenant has {count} OffloadPreferences, more than {limit}; from this one on they are left out"
        );
        report.refuse_excess(first.document, "", problem, "use wider selectors");
    }
    let mut resolved: Vec<(&Document, OffloadIr)> = Vec::new();
    let mut disagreements = Disagreements::new(known.workloads);
    for sourced in declared.iter().take(limit) {
        let document = sourced.document;
        // The fault itself is reported where the document was read.
        if document
            .faults
            .iter()
            .any(|it| it.field.starts_with("spec"))
        {
            continue;
        }
        let Some(subject) = subject(known, sourced, report) else {
            continue;
        };
        let OffloadPreference { metadata, spec } = sourced.object;
        let preference = OffloadIr {
            namespace: metadata.namespace.clone(),
            name: metadata.name.clone(),
            subject,
            targets: spec.targets,
            is_per_connection: spec.per_connection,
            expected_sessions: spec.expected_sessions.map(Into::into),
            expected_rate: spec.expected_rate.map(Into::into),
        };
        if !disagreements.add(resolved.len(), &preference) {
            let problem = format!(
                "with this selector the tenant's preferences need more than {OFFLOAD_COMPARISONS_PER_TENANT_MAX} comparisons with workloads, so it is left out"
            );
            report.refuse_excess(document, "spec.selector", problem, "use fewer preferences");
            continue;
        }
        warn_of_missing_effect(document, spec, report);
        resolved.push((document, preference));
    }
    disagreements.report(&resolved, report);
    resolved.into_iter().map(|(_, it)| it).collect()
}

fn warn_of_missing_effect(
    document: &Document,
    spec: &OffloadPreferenceSpec,
    report: &mut DiagnosticCollector,
) {
    if spec.targets.named().iter().all(|(_, it)| it.is_none()) {
        let fix = "write a target, as in targets: {kernelPath: Allowed}";
        let problem = "the preference names no target, so it allows nothing";
        report.warning(
            Code::IneffectiveField,
            document,
            "spec.targets",
            problem,
            fix,
        );
    }
    let problem = "OffloadPreference is not acted on yet: traffic takes the usual path";
    let fix = "keep it for a later version, or remove it";
    report.warning(Code::NotActedOn, document, "", problem, fix);
}

/// Returns what the preference is about, and reports what is wrong with it.
fn subject(
    known: PreferenceReferences<'_>,
    sourced: &Sourced<'_, OffloadPreference>,
    report: &mut DiagnosticCollector,
) -> Option<OffloadSubject> {
    let OffloadPreference { metadata, spec } = sourced.object;
    let mut unresolved = |field: &str, problem: String| {
        let fix = "create it, or correct the name";
        report.error(
            Code::UnresolvedTarget,
            sourced.document,
            field,
            problem,
            fix,
        );
        None
    };
    match (&spec.selector, &spec.service_port, &spec.listener) {
        (Some(selector), None, None) => {
            let labels = selector.match_labels.clone();
            let mut workloads = known.workloads.iter();
            // This is no error, since the pods may come later.
            if !workloads.any(|it| is_selected(it, &metadata.namespace, &labels)) {
                let problem = format!(
                    "no pod of namespace {} has these labels",
                    metadata.namespace
                );
                let fix = "correct the labels, or create the pods";
                let field = "spec.selector.matchLabels";
                report.warning(
                    Code::PolicyMatchesNoPod,
                    sourced.document,
                    field,
                    problem,
                    fix,
                );
            }
            Some(OffloadSubject::Workloads(labels))
        }
        (None, Some(written), None) => {
            let key = ServiceKey {
                tenant: known.tenant.name.clone(),
                namespace: metadata.namespace.clone(),
                name: written.name.clone(),
            };
            let port = written.port.get();
            let Some(service) = known.services.get(&key) else {
                let problem = format!("there is no Service {}/{}", key.namespace, key.name);
                return unresolved("spec.servicePort.name", problem);
            };
            if !service.ports.iter().any(|it| it.port == port) {
                let problem = format!("Service {}/{} has no port {port}", key.namespace, key.name);
                return unresolved("spec.servicePort.port", problem);
            }
            Some(OffloadSubject::ServicePort(key, port))
        }
        (None, None, Some(written)) => match listeners(known, &metadata.namespace, written) {
            Ok(listeners) => Some(OffloadSubject::Listeners(listeners)),
            Err(problem) => unresolved("spec.listener", problem),
        },
        _ => {
            let problem = "exactly one of selector, servicePort and listener must be set";
            let fix = "write one of them, and a further OffloadPreference for another";
            report.error(
                Code::ConflictingFields,
                sourced.document,
                "spec",
                problem,
                fix,
            );
            None
        }
    }
}

/// Returns the listeners that a reference in the namespace `own` names. The error is the problem,
/// without a full stop.
pub(super) fn listeners(
    known: PreferenceReferences<'_>,
    own: &Namespace,
    written: &ListenerRef,
) -> Result<ListenerSelector, String> {
    let section = written.section_name.as_deref();
    let gateway = gateway_service(&known.tenant.name, own, &written.gateway);
    let found = gateway.filter(|_| known.listeners.has_listener(own, &written.gateway, section));
    let Some(gateway) = found else {
        let problem = match section {
            None => format!("there is no Gateway {own}/{} of Canal's", written.gateway),
            Some(section) => format!(
                "Gateway {own}/{} of Canal's has no listener {:?}",
                written.gateway,
                super::route_fields::short(section)
            ),
        };
        return Err(problem);
    };
    Ok(ListenerSelector {
        gateway,
        section_name: written.section_name.clone(),
    })
}

fn is_selected(workload: &Workload, namespace: &Namespace, labels: &Labels) -> bool {
    workload.namespace == *namespace
        && labels
            .iter()
            .all(|(k, v)| workload.labels.get(k) == Some(v))
}

/// Traffic that preferences are compared about.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum TrafficPart {
    /// A workload by its index.
    Workload(usize),
    ServicePort(ServiceKey, u16),
    WholeGateway(ServiceKey),
    Listener(ServiceKey, String),
    /// Any single listener of the Gateway: what a preference about the whole Gateway overlaps.
    SomeListener(ServiceKey),
}

/// What preferences say of one target for one part of the traffic: the first that allows it, and
/// the first that does not.
#[derive(Default, Clone, Copy)]
struct Opinions {
    allowed: Option<usize>,
    never: Option<usize>,
}

/// Finds preferences that say different things of a target for the same traffic.
struct Disagreements<'a> {
    workloads: &'a [Workload],
    comparisons_left: usize,
    opinions: BTreeMap<(TrafficPart, &'static str), Opinions>,
    /// For each preference, the parts whose opinions its own are compared with.
    overlaps: Vec<Vec<TrafficPart>>,
}

impl<'a> Disagreements<'a> {
    fn new(workloads: &'a [Workload]) -> Self {
        Self {
            workloads,
            comparisons_left: OFFLOAD_COMPARISONS_PER_TENANT_MAX,
            opinions: BTreeMap::new(),
            overlaps: Vec::new(),
        }
    }

    /// Adds the preference with the index `at`, which is the number of those added before. Returns
    /// false if that would take more comparisons than the tenant may use.
    fn add(&mut self, at: usize, preference: &OffloadIr) -> bool {
        let Some((covered, overlapping)) = self.parts(preference) else {
            return false;
        };
        let named = preference.targets.named().into_iter();
        for (target, permission) in named.filter_map(|(name, it)| Some((name, it?))) {
            for part in &covered {
                let opinions = self.opinions.entry((part.clone(), target)).or_default();
                let side = match permission {
                    OffloadPermission::Allowed => &mut opinions.allowed,
                    OffloadPermission::Never => &mut opinions.never,
                };
                side.get_or_insert(at);
            }
        }
        self.overlaps.push(overlapping);
        true
    }

    /// Returns the parts that the preference is about, and those that share traffic with it. `None`
    /// means that the tenant has used up its comparisons.
    fn parts(&mut self, preference: &OffloadIr) -> Option<(Vec<TrafficPart>, Vec<TrafficPart>)> {
        match &preference.subject {
            OffloadSubject::Workloads(labels) => {
                let left = self.comparisons_left.checked_sub(self.workloads.len())?;
                self.comparisons_left = left;
                let workloads = self.workloads.iter().enumerate();
                let selected = workloads
                    .filter(|(_, it)| is_selected(it, &preference.namespace, labels))
                    .map(|(index, _)| TrafficPart::Workload(index));
                let parts: Vec<TrafficPart> = selected.collect();
                Some((parts.clone(), parts))
            }
            OffloadSubject::ServicePort(service, port) => {
                let parts = vec![TrafficPart::ServicePort(service.clone(), *port)];
                Some((parts.clone(), parts))
            }
            OffloadSubject::Listeners(listeners) => Some(listener_parts(listeners)),
        }
    }

    /// Reports each disagreement at the objects of both sides.
    fn report(self, resolved: &[(&Document, OffloadIr)], report: &mut DiagnosticCollector) {
        for ((document, preference), overlaps) in resolved.iter().zip(&self.overlaps) {
            let named = preference.targets.named().into_iter();
            for (target, permission) in named.filter_map(|(name, it)| Some((name, it?))) {
                let mut others = overlaps.iter().filter_map(|part| {
                    let opinions = self.opinions.get(&(part.clone(), target))?;
                    match permission {
                        OffloadPermission::Allowed => opinions.never,
                        OffloadPermission::Never => opinions.allowed,
                    }
                });
                let Some(other) = others.next() else {
                    continue;
                };
                let other = &resolved[other].1;
                let problem = format!(
                    "OffloadPreference {}/{} says otherwise for a part of the same traffic, for which {target} is never used",
                    other.namespace, other.name
                );
                let fix = "write the same value in both, or let only one of them name the target";
                let field = format!("spec.targets.{target}");
                report.error(Code::PreferencesDisagree, document, field, problem, fix);
            }
        }
    }
}

/// Returns the parts that a preference about listeners covers, and those that share traffic with it:
/// a whole Gateway overlaps each of its listeners.
fn listener_parts(listeners: &ListenerSelector) -> (Vec<TrafficPart>, Vec<TrafficPart>) {
    let gateway = || listeners.gateway.clone();
    let whole = TrafficPart::WholeGateway(gateway());
    let some = TrafficPart::SomeListener(gateway());
    match &listeners.section_name {
        None => (vec![whole.clone()], vec![whole, some]),
        Some(section) => {
            let one = TrafficPart::Listener(gateway(), section.clone());
            (vec![one.clone(), some], vec![one, whole])
        }
    }
}
