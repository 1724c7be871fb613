//! Resolves timeouts and retries of a rule. They are about quality of service: what cannot be
//! honoured is reported, and requests are served without it. What the API itself refuses breaks the
//! rule.

use std::time::Duration;

use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::policy::attempts::{HttpRetry, HttpRouteRetry, HttpRouteTimeouts};
use canal_model::policy::gateway_api::HttpRule;
use canal_model::policy::istio::VirtualServiceRoute;
use canal_model::program::RouteAction;
use canal_model::route_attempts::{
    AttemptPolicy, BackoffJitter, RETRIES_MAX, RetryBackoff, RetryCondition, RetryConditions,
    RetryPolicy, RouteTimeouts, TimeoutSpan,
};

use super::route_fields::{FieldIssue, RuleContext};

/// Retries of a rule that does not write their number (Istio's default; GEP-1731 has none).
const RETRIES_DEFAULT: u32 = 2;
/// Base of the times before retries of a rule that writes none (Envoy's and Istio's default).
const BACKOFF_BASE_DEFAULT: Duration = Duration::from_millis(25);
/// Conditions of Istio's default policy. Since Istio 1.24 it has no status: a 503 of the application
/// may come from a request that was carried out.
const ISTIO_CONDITIONS: [RetryCondition; 4] = [
    RetryCondition::ConnectFailure,
    RetryCondition::RefusedStream,
    RetryCondition::Unavailable,
    RetryCondition::Cancelled,
];
/// GEP-1731: a rule with `retry` retries connection errors (disconnect, reset, timeout, no
/// connection) whatever its codes are.
const GATEWAY_API_CONDITIONS: [RetryCondition; 3] = [
    RetryCondition::ConnectFailure,
    RetryCondition::RefusedStream,
    RetryCondition::Reset,
];
/// Conditions that Istio accepts and that never hold in Canal.
const CONDITIONS_WITHOUT_EFFECT: [&str; 3] = [
    "retriable-headers",
    "envoy-ratelimited",
    "http3-post-connect-failure",
];

/// Resolves `timeouts` and `retry` of an HTTPRoute's rule. `None` if it asks for nothing.
pub(super) fn of_http_route(
    written: &HttpRule,
    rule: &mut RuleContext<'_>,
) -> Option<Box<AttemptPolicy>> {
    let timeouts = written.timeouts.map_or_else(RouteTimeouts::default, |it| {
        of_http_route_timeouts(it, rule)
    });
    let retries = written.retry.as_ref();
    let retries = retries.map(|retry| of_http_route_retry(retry, rule));
    boxed(AttemptPolicy { timeouts, retries })
}

fn of_http_route_timeouts(written: HttpRouteTimeouts, rule: &mut RuleContext<'_>) -> RouteTimeouts {
    let time = |written: Option<canal_model::policy::canal::Timeout>| {
        written.map(|time| time.0).filter(|time| !time.is_zero())
    };
    let (request, attempt) = (time(written.request), time(written.backend_request));
    if let (Some(request), Some(attempt)) = (request, attempt)
        && attempt > request
    {
        let problem = format!("{attempt:?} is longer than timeouts.request, {request:?}");
        let issue = FieldIssue::new("", problem, "write a time that is not longer")
            .with_code(Code::ConflictingFields);
        rule.broken("timeouts.backendRequest", issue);
    }
    RouteTimeouts {
        request,
        attempt,
        span: TimeoutSpan::Whole,
    }
}

fn of_http_route_retry(written: &HttpRouteRetry, rule: &mut RuleContext<'_>) -> RetryPolicy {
    let HttpRouteRetry {
        codes,
        attempts,
        backoff,
    } = written;
    for (at, code) in codes.iter().enumerate() {
        if !(400..600).contains(code) {
            let problem = format!("{code} is not a status from 400 to 599");
            let issue = FieldIssue::new("", problem, "write a status such as 503");
            rule.broken(&format!("retry.codes[{at}]"), issue);
        }
    }
    let max = match attempts {
        None => RETRIES_DEFAULT,
        Some(attempts) => retries_max(*attempts, "retry.attempts", rule),
    };
    let backoff = match backoff {
        None => RetryBackoff::from_base(BACKOFF_BASE_DEFAULT, BackoffJitter::Full),
        Some(base) => RetryBackoff::from_base(base.0, BackoffJitter::AboveBase),
    };
    RetryPolicy {
        max,
        on: GATEWAY_API_CONDITIONS.into_iter().collect(),
        statuses: sorted(codes.clone()),
        backoff,
    }
}

/// Resolves `timeout` and `retries` of a VirtualService's rule. A rule without `retries` has Istio's
/// default policy.
pub(super) fn of_virtual_service(
    written: &VirtualServiceRoute,
    rule: &mut RuleContext<'_>,
) -> Option<Box<AttemptPolicy>> {
    let retries = written.retries.as_ref();
    let attempt = retries.and_then(|retries| retries.per_try_timeout);
    let timeouts = RouteTimeouts {
        request: written.timeout.map(|time| time.0),
        attempt: attempt.map(|time| time.0),
        span: TimeoutSpan::AfterRequest,
    };
    let retries = match retries {
        None => istio_default(),
        Some(written) => of_http_retry(written, rule),
    };
    boxed(AttemptPolicy {
        timeouts: if timeouts.is_empty() {
            RouteTimeouts::default()
        } else {
            timeouts
        },
        retries: Some(retries),
    })
}

fn istio_default() -> RetryPolicy {
    RetryPolicy {
        max: RETRIES_DEFAULT,
        on: ISTIO_CONDITIONS.into_iter().collect(),
        statuses: Vec::new(),
        backoff: RetryBackoff::from_base(BACKOFF_BASE_DEFAULT, BackoffJitter::Full),
    }
}

fn of_http_retry(written: &HttpRetry, rule: &mut RuleContext<'_>) -> RetryPolicy {
    let HttpRetry {
        attempts,
        per_try_timeout,
        retry_on,
        retry_remote_localities,
        retry_ignore_previous_hosts,
        backoff,
    } = written;
    // Istio refuses the same three fields beside `attempts: 0`.
    let has_more =
        per_try_timeout.is_some() || !retry_on.is_empty() || retry_remote_localities.is_some();
    if *attempts == 0 && has_more {
        let problem = "attempts is 0, which disables retries, and other fields configure them";
        let issue = FieldIssue::new("attempts", problem, "write attempts, or remove the others")
            .with_code(Code::ConflictingFields);
        rule.broken("retries", issue);
    }
    if *retry_remote_localities == Some(true) {
        let problem = "retries go to near endpoints first in this version";
        let fix = "keep it for a version that does it, or remove it";
        let issue =
            FieldIssue::new("retryRemoteLocalities", problem, fix).with_code(Code::IgnoredField);
        rule.warning("retries", issue);
    }
    if *retry_ignore_previous_hosts == Some(false) {
        let problem = "retries go to endpoints that were not tried first in this version";
        let fix = "keep it for a version that does it, or remove it";
        let issue =
            FieldIssue::new("retryIgnorePreviousHosts", problem, fix).with_code(Code::IgnoredField);
        rule.warning("retries", issue);
    }
    let default = istio_default();
    // Istio has the same default conditions for a rule without `retryOn` as without `retries`.
    let (on, statuses) = if retry_on.is_empty() {
        (default.on, default.statuses)
    } else {
        retry_conditions(retry_on, rule)
    };
    RetryPolicy {
        max: retries_max(i64::from(*attempts), "retries.attempts", rule),
        on,
        statuses,
        backoff: backoff.map_or(default.backoff, |base| {
            RetryBackoff::from_base(base.0, BackoffJitter::Full)
        }),
    }
}

/// Reads the conditions and statuses of `retryOn`.
fn retry_conditions(written: &str, rule: &mut RuleContext<'_>) -> (RetryConditions, Vec<u16>) {
    let (mut on, mut statuses) = (RetryConditions::default(), Vec::new());
    let mut names_statuses = false;
    let mut issues = Vec::new();
    for word in written.split(',').map(str::trim) {
        if let Some(condition) = RetryCondition::of(word) {
            on = on.with(condition);
        } else if word == "retriable-status-codes" {
            names_statuses = true;
        } else if let Some(status) = word.parse().ok().filter(|status| is_status(*status)) {
            statuses.push(status);
        } else if CONDITIONS_WITHOUT_EFFECT.contains(&word) {
            let problem = format!("{word} has no effect in this version");
            issues.push((false, problem, "remove it; the other conditions apply"));
        } else {
            let problem = format!("{word:?} is not a condition for retries");
            let fix = "write conditions such as 5xx,reset or statuses such as 503";
            issues.push((true, problem, fix));
        }
    }
    if names_statuses && statuses.is_empty() {
        let problem = "retriable-status-codes has no effect without statuses".to_owned();
        issues.push((false, problem, "write the statuses too, as in 503"));
    }
    for (is_broken, problem, fix) in issues {
        let issue = FieldIssue::new("retryOn", problem, fix);
        if is_broken {
            rule.broken("retries", issue);
        } else {
            rule.warning("retries", issue);
        }
    }
    (on, sorted(statuses))
}

/// Returns whether Istio accepts this number as a status: those that Go's `http.StatusText` names.
fn is_status(status: u16) -> bool {
    matches!(status,
        100..=103 | 200..=208 | 226 | 300..=305 | 307..=308 | 400..=418 | 421..=426 | 428 | 429
        | 431 | 451 | 500..=508 | 510 | 511)
}

fn retries_max(written: i64, field: &str, rule: &mut RuleContext<'_>) -> u32 {
    let known = u32::try_from(written);
    match known {
        Ok(max) if max <= RETRIES_MAX => max,
        _ if written < 0 => {
            let problem = format!("{written} is negative");
            let issue = FieldIssue::new("", problem, "write 0 to disable retries");
            rule.broken(field, issue);
            0
        }
        _ => {
            let problem =
                format!("{written} is more than {RETRIES_MAX}; a request has {RETRIES_MAX}");
            let issue = FieldIssue::new("", problem, "write a smaller number")
                .with_code(Code::LimitExceeded);
            rule.warning(field, issue);
            RETRIES_MAX
        }
    }
}

fn sorted(mut statuses: Vec<u16>) -> Vec<u16> {
    statuses.sort_unstable();
    statuses.dedup();
    statuses
}

fn boxed(policy: AttemptPolicy) -> Option<Box<AttemptPolicy>> {
    (!policy.is_empty()).then(|| Box::new(policy))
}

/// Returns the policy of a rule with this action. Only a split sends requests to endpoints.
pub(super) fn of_action(
    policy: Option<&AttemptPolicy>,
    action: &RouteAction,
) -> Option<Box<AttemptPolicy>> {
    match action {
        RouteAction::Split(_) => policy.cloned().map(Box::new),
        RouteAction::Answer(_) | RouteAction::Refuse { .. } => None,
    }
}
