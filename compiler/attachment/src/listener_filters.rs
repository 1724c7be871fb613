//! Checks the filters that listeners write. What is wrong with one closes its listener: requests must
//! not pass without it. The compiler finds the servers of those that are right.

use std::sync::Arc;

use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ingress::{ListenerFault, ListenerFaultReason, ListenerProtocol};
use canal_model::listener_filters::LISTENER_FILTERS_MAX;
use canal_model::policy::listeners::{GatewayListenerFilter, GatewayListenerFilters};

use crate::faults::fault;
use crate::{DocumentReport, shorten};

/// A filter that closes its listener: why, what is wrong, and the fix.
type FilterProblem = (Code, ListenerFaultReason, String, &'static str);

/// Checks the filters of a listener, which is written at `field`.
pub(crate) fn check(
    written: &GatewayListenerFilters,
    protocol: &ListenerProtocol,
    field: &str,
    closed: &mut Option<Arc<ListenerFault>>,
    report: &mut DocumentReport<'_>,
) {
    let requests = &written.requests;
    let mut add = |field: String, name: String, (code, reason, problem, fix): FilterProblem| {
        report.error(code, field, problem.clone(), fix);
        closed.get_or_insert_with(|| fault(reason, format!("{name}: {problem}")));
    };
    let invalid = ListenerFaultReason::InvalidFilter;
    let of_list = if requests.len() > LISTENER_FILTERS_MAX {
        let problem = format!("there are more than {LISTENER_FILTERS_MAX} filters");
        Some((Code::LimitExceeded, invalid, problem, "write fewer"))
    } else if !requests.is_empty()
        && !matches!(protocol, ListenerProtocol::Http | ListenerProtocol::Https)
    {
        let problem = format!("a listener of protocol {protocol} has no requests to filter");
        let fix = "use protocol: HTTP or HTTPS, or remove the filters";
        Some((Code::InvalidListener, invalid, problem, fix))
    } else {
        None
    };
    if let Some(problem) = of_list {
        let name = "filters.requests".to_owned();
        add(format!("{field}.{name}"), name, problem);
    }
    for (at, filter) in requests.iter().enumerate() {
        if let Some((inner, problem)) = problem_of(filter) {
            let name = format!("filters.requests[{at}]");
            add(format!("{field}.{name}{inner}"), name, problem);
        }
    }
}

/// Returns what is wrong with a filter, if it cannot run, and the field below the filter.
fn problem_of(filter: &GatewayListenerFilter) -> Option<(&'static str, FilterProblem)> {
    let GatewayListenerFilter {
        kind,
        external_auth,
        extension_ref,
    } = filter;
    let unsupported = |problem: String| {
        let reason = ListenerFaultReason::UnsupportedFilter;
        let fix = "use a filter of type ExternalAuth, or remove the filter";
        (Code::UnsupportedFilter, reason, problem, fix)
    };
    let invalid = |problem: &str, fix| {
        let reason = ListenerFaultReason::InvalidFilter;
        (Code::InvalidListener, reason, problem.to_owned(), fix)
    };
    match (kind.as_str(), external_auth, extension_ref) {
        ("ExternalAuth", Some(_), None) => None,
        ("ExternalAuth", None, _) => Some((
            "",
            invalid(
                "a filter of type ExternalAuth needs the field externalAuth",
                "write externalAuth",
            ),
        )),
        ("ExternalAuth", Some(_), Some(_)) | ("ExtensionRef", Some(_), _) => Some((
            "",
            invalid(
                "the filter has the field of another type",
                "write the field of its type only",
            ),
        )),
        // Ignoring what another implementation would do could let requests through.
        ("ExtensionRef", None, reference) => {
            let kind = reference.as_ref().map_or("", |it| it.kind.as_str());
            let short = shorten(kind);
            let problem =
                format!("a filter of type ExtensionRef ({short}) is not supported in this version");
            Some((".extensionRef", unsupported(problem)))
        }
        (other, ..) => {
            let short = shorten(other);
            let problem = format!("{short:?} is not a type of listeners' filters");
            Some((".type", unsupported(problem)))
        }
    }
}
