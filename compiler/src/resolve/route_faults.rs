//! Resolves the faults that a VirtualService's rule injects. A fault that cannot be injected as
//! written breaks its rule: an abort that is left out would let requests through.

use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::policy::faults::{HttpFaultAbort, HttpFaultDelay, HttpFaultInjection, Percent};
use canal_model::policy::istio::VirtualServiceRoute;
use canal_model::program::RouteAction;
use canal_model::request_fraction::RequestFraction;
use canal_model::route_faults::{AbortStatus, FaultAbort, FaultDelay, FaultPolicy};

use super::route_fields::{FieldIssue, RuleContext};

/// Names of the gRPC statuses, by number (google.golang.org/grpc/codes).
const GRPC_STATUSES: [&str; 17] = [
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
];

/// Resolves `fault` of a VirtualService's rule. `None` if it injects nothing.
pub(super) fn of_virtual_service(
    written: &VirtualServiceRoute,
    rule: &mut RuleContext<'_>,
) -> Option<FaultPolicy> {
    let HttpFaultInjection { delay, abort } = written.fault.as_ref()?;
    if written.redirect.is_some() || written.direct_response.is_some() {
        let problem = "the rule answers requests itself, so it cannot have a fault too";
        rule.broken(
            "fault",
            FieldIssue::new("", problem, "remove one of them").with_code(Code::ConflictingActions),
        );
    }
    let delay = delay.as_ref();
    let abort = abort.as_ref();
    let policy = FaultPolicy {
        delay: delay.and_then(|delay| of_delay(delay, rule)),
        abort: abort.and_then(|abort| of_abort(abort, rule)),
    };
    (!policy.is_empty()).then_some(policy)
}

fn of_delay(written: &HttpFaultDelay, rule: &mut RuleContext<'_>) -> Option<FaultDelay> {
    let HttpFaultDelay {
        fixed_delay,
        percentage,
        percent,
    } = written;
    let Some(time) = fixed_delay else {
        // A fault without a time delays nothing, so the rule is not broken.
        let problem = "without fixedDelay no request is delayed";
        let issue = FieldIssue::new("", problem, "write a time, as in fixedDelay: 5s")
            .with_code(Code::IneffectiveField);
        rule.warning("fault.delay", issue);
        return None;
    };
    if let Some(percent) = percent {
        let fix = "write percentage.value";
        let fraction = u32::try_from(*percent).ok();
        let fraction = fraction.and_then(|percent| RequestFraction::of_percent(percent.into()));
        match fraction {
            None => {
                // An unusable percent breaks the rule even beside a `percentage`: the author's intent
                // is not certain. A broken rule refuses its requests and injects no fault, so what
                // follows has no effect.
                let problem = format!("{percent} is not a percentage from 0 to 100");
                rule.broken("fault.delay.percent", FieldIssue::new("", problem, fix));
                // Without `percentage` no part is reported as missing: `percent` was written.
                percentage.as_ref()?;
            }
            Some(fraction) => {
                let problem = "the field is deprecated; it holds where percentage is not written";
                rule.warning(
                    "fault.delay.percent",
                    FieldIssue::new("", problem, fix).with_code(Code::DeprecatedField),
                );
                // If both are written, `percentage` counts, as in Istio.
                if percentage.is_none() {
                    return drawn(fraction).map(|fraction| FaultDelay {
                        time: time.0,
                        fraction,
                    });
                }
            }
        }
    }
    let fraction = part_of_requests(*percentage, "fault.delay", "delayed", rule)?;
    Some(FaultDelay {
        time: time.0,
        fraction,
    })
}

fn of_abort(written: &HttpFaultAbort, rule: &mut RuleContext<'_>) -> Option<FaultAbort> {
    let HttpFaultAbort {
        http_status,
        grpc_status,
        percentage,
    } = written;
    let status = match (http_status, grpc_status) {
        (None, None) => {
            // A fault without a status aborts nothing, so the rule is not broken.
            let problem = "without a status no request is aborted";
            let issue = FieldIssue::new("", problem, "write httpStatus or grpcStatus")
                .with_code(Code::IneffectiveField);
            rule.warning("fault.abort", issue);
            return None;
        }
        (Some(status), None) => match u16::try_from(*status) {
            // Envoy allows the same range.
            Ok(status @ 200..600) => AbortStatus::Http(status),
            _ => {
                let problem = format!("{status} is not a status from 200 to 599");
                let issue = FieldIssue::new("httpStatus", problem, "write a status such as 503");
                rule.broken("fault.abort", issue);
                return None;
            }
        },
        (None, Some(name)) => match GRPC_STATUSES.iter().position(|known| known == name) {
            // The table has 17 rows.
            Some(status) => AbortStatus::Grpc(status as u8),
            None => {
                let problem = format!("{name:?} is not the name of a gRPC status");
                let issue = FieldIssue::new("grpcStatus", problem, "write a name as UNAVAILABLE");
                rule.broken("fault.abort", issue);
                return None;
            }
        },
        (Some(_), Some(_)) => {
            let problem = "httpStatus and grpcStatus exclude each other";
            let issue = FieldIssue::new("", problem, "write one of them")
                .with_code(Code::ConflictingFields);
            rule.broken("fault.abort", issue);
            return None;
        }
    };
    let fraction = part_of_requests(*percentage, "fault.abort", "aborted", rule)?;
    Some(FaultAbort { status, fraction })
}

/// Returns the part of the requests that the percentage names; `None` if there are none.
fn part_of_requests(
    percentage: Option<Percent>,
    field: &str,
    effect: &str,
    rule: &mut RuleContext<'_>,
) -> Option<RequestFraction> {
    let Some(percentage) = percentage else {
        let problem = format!("without percentage no request is {effect}");
        let issue = FieldIssue::new(
            "",
            problem,
            "write percentage, as in percentage: {value: 100}",
        )
        .with_code(Code::IneffectiveField);
        rule.warning(field, issue);
        return None;
    };
    drawn(percentage.value.0)
}

/// Returns the fraction, unless it contains no request.
fn drawn(fraction: RequestFraction) -> Option<RequestFraction> {
    (fraction != RequestFraction::NONE).then_some(fraction)
}

/// Returns the faults of a rule with this action. A rule that refuses its requests injects none.
pub(super) fn of_action(
    policy: Option<FaultPolicy>,
    action: &RouteAction,
) -> Option<Box<FaultPolicy>> {
    match action {
        RouteAction::Split(_) => policy.map(Box::new),
        RouteAction::Answer(_) | RouteAction::Refuse { .. } => None,
    }
}
