//! Wire form of a rule's timeouts and retries. What a newer controller may have added is left out:
//! it is about quality of service.

use std::time::Duration;

use canal_model::route_attempts as m;

use super::ResourceDecodeError;
use super::decode::DecodeContext;
use crate::program as w;

impl From<&m::AttemptPolicy> for w::AttemptPolicy {
    fn from(policy: &m::AttemptPolicy) -> Self {
        let m::RouteTimeouts {
            request,
            attempt,
            span,
        } = policy.timeouts;
        let span = match span {
            m::TimeoutSpan::Whole => w::TimeoutSpan::Whole,
            m::TimeoutSpan::AfterRequest => w::TimeoutSpan::AfterRequest,
        };
        Self {
            request_timeout_ms: request.map_or(0, millis),
            attempt_timeout_ms: attempt.map_or(0, millis),
            span: span.into(),
            retries: policy.retries.as_ref().map(|retries| w::RetryPolicy {
                max: retries.max,
                on: retries.on.iter().map(|it| it as i32).collect(),
                statuses: retries.statuses.iter().copied().map(u32::from).collect(),
                backoff_base_ms: millis(retries.backoff.base),
                backoff_max_ms: millis(retries.backoff.max),
                backoff_above_base: retries.backoff.jitter == m::BackoffJitter::AboveBase,
            }),
        }
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

pub(super) fn decode(
    at: &DecodeContext<'_>,
    received: w::AttemptPolicy,
) -> Result<m::AttemptPolicy, ResourceDecodeError> {
    let span = match received.span() {
        w::TimeoutSpan::Whole => m::TimeoutSpan::Whole,
        w::TimeoutSpan::AfterRequest => m::TimeoutSpan::AfterRequest,
    };
    let time = |millis: u64| (millis > 0).then(|| Duration::from_millis(millis));
    let timeouts = m::RouteTimeouts {
        request: time(received.request_timeout_ms),
        attempt: time(received.attempt_timeout_ms),
        span,
    };
    let retries = received.retries.map(|retries| retry_policy(at, retries));
    Ok(m::AttemptPolicy {
        timeouts,
        retries: retries.transpose()?,
    })
}

// Conditions have the same numbers in both enums.
const _: () =
    assert!(w::RetryCondition::Unavailable as i32 == m::RetryCondition::Unavailable as i32);

fn retry_policy(
    at: &DecodeContext<'_>,
    received: w::RetryPolicy,
) -> Result<m::RetryPolicy, ResourceDecodeError> {
    if received.max > m::RETRIES_MAX {
        let problem = format!("{} is more than {}", received.max, m::RETRIES_MAX);
        return at.err("attempts.retries.max", problem);
    }
    let mut statuses = received
        .statuses
        .into_iter()
        .map(|status| match u16::try_from(status) {
            // Statuses have three digits, and the first is 1 to 5 (RFC 9110 §15).
            Ok(status @ 100..600) => Ok(status),
            _ => at.err(
                "attempts.retries.statuses",
                format!("{status} is no status"),
            ),
        })
        .collect::<Result<Vec<_>, _>>()?;
    statuses.sort_unstable();
    statuses.dedup();
    // A condition that this version does not know never holds here.
    let known = |number: &i32| {
        let mut all = m::RetryCondition::ALL.into_iter();
        all.find(|condition| *condition as i32 == *number)
    };
    let backoff = m::RetryBackoff {
        base: Duration::from_millis(received.backoff_base_ms),
        max: Duration::from_millis(received.backoff_max_ms),
        jitter: if received.backoff_above_base {
            m::BackoffJitter::AboveBase
        } else {
            m::BackoffJitter::Full
        },
    };
    // Times grow from the base to the maximum.
    if backoff.max < backoff.base {
        return at.err("attempts.retries.backoff_max_ms", "is less than the base");
    }
    Ok(m::RetryPolicy {
        max: received.max,
        on: received.on.iter().filter_map(known).collect(),
        statuses,
        backoff,
    })
}

/// Returns policies with every field set, for the tests of all resources.
#[cfg(test)]
pub(super) fn samples() -> Vec<m::AttemptPolicy> {
    let second = Duration::from_secs(1);
    let timeouts = m::RouteTimeouts {
        request: Some(second),
        attempt: Some(second / 4),
        span: m::TimeoutSpan::AfterRequest,
    };
    let policy = |jitter| m::RetryPolicy {
        max: 3,
        on: m::RetryCondition::ALL.into_iter().collect(),
        statuses: vec![404, 503],
        backoff: m::RetryBackoff::from_base(second / 40, jitter),
    };
    vec![
        m::AttemptPolicy {
            timeouts,
            retries: Some(policy(m::BackoffJitter::Full)),
        },
        m::AttemptPolicy {
            timeouts: m::RouteTimeouts::default(),
            retries: Some(policy(m::BackoffJitter::AboveBase)),
        },
        m::AttemptPolicy {
            timeouts,
            retries: None,
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> (w::AttemptPolicy, m::RetryPolicy) {
        let sample = &samples()[0];
        let Some(retries) = sample.retries.clone() else {
            unreachable!("the first sample has retries");
        };
        (sample.into(), retries)
    }

    #[test]
    fn what_a_newer_controller_adds_is_left_out() {
        let (mut received, known) = sample();
        received.span = 99;
        if let Some(retries) = &mut received.retries {
            retries.on.push(99);
        }
        let read = decode(&DecodeContext("r"), received).unwrap();
        assert_eq!(read.retries, Some(known));
    }

    #[test]
    fn retries_without_bounds_are_refused() {
        type Change = fn(&mut w::RetryPolicy);
        let cases: [(Change, &str); 3] = [
            (|r| r.max = m::RETRIES_MAX + 1, "attempts.retries.max"),
            (|r| r.statuses.push(70), "attempts.retries.statuses"),
            (|r| r.backoff_max_ms = 1, "is less than the base"),
        ];
        for (change, want) in cases {
            let (mut received, _) = sample();
            received.retries.as_mut().map(change);
            let text = decode(&DecodeContext("r"), received)
                .unwrap_err()
                .to_string();
            assert!(text.contains(want), "{want}: {text}");
        }
    }
}
