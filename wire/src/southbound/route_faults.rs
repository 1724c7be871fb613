//! Wire form of the faults that a rule injects. It validates what arrives.

use std::time::Duration;

use canal_model::request_fraction::RequestFraction;
use canal_model::route_faults as m;

use super::ResourceDecodeError;
use super::decode::DecodeContext;
use crate::program as w;

impl From<&m::FaultPolicy> for w::FaultPolicy {
    fn from(policy: &m::FaultPolicy) -> Self {
        use w::fault_abort::Status;
        let m::FaultPolicy { delay, abort } = policy;
        Self {
            delay: delay.map(|delay| w::FaultDelay {
                time_ms: u64::try_from(delay.time.as_millis()).unwrap_or(u64::MAX),
                millionths: delay.fraction.millionths(),
            }),
            abort: abort.map(|abort| w::FaultAbort {
                status: Some(match abort.status {
                    m::AbortStatus::Http(status) => Status::Http(status.into()),
                    m::AbortStatus::Grpc(status) => Status::Grpc(status.into()),
                }),
                millionths: abort.fraction.millionths(),
            }),
        }
    }
}

pub(super) fn decode(
    at: &DecodeContext<'_>,
    received: w::FaultPolicy,
) -> Result<m::FaultPolicy, ResourceDecodeError> {
    let delay = received.delay.map(|delay| {
        Ok(m::FaultDelay {
            time: Duration::from_millis(delay.time_ms),
            fraction: fraction(at, "faults.delay.millionths", delay.millionths)?,
        })
    });
    let abort = received.abort.map(|abort| {
        Ok(m::FaultAbort {
            status: abort_status(at, abort.status)?,
            fraction: fraction(at, "faults.abort.millionths", abort.millionths)?,
        })
    });
    Ok(m::FaultPolicy {
        delay: delay.transpose()?,
        abort: abort.transpose()?,
    })
}

fn abort_status(
    at: &DecodeContext<'_>,
    received: Option<w::fault_abort::Status>,
) -> Result<m::AbortStatus, ResourceDecodeError> {
    use w::fault_abort::Status;
    match at.need("faults.abort.status", received)? {
        Status::Http(status) => match u16::try_from(status) {
            Ok(status @ 200..600) => Ok(m::AbortStatus::Http(status)),
            _ => at.err("faults.abort.http", format!("{status} ends no request")),
        },
        Status::Grpc(status) => match u8::try_from(status) {
            Ok(status @ 0..=m::AbortStatus::GRPC_MAX) => Ok(m::AbortStatus::Grpc(status)),
            _ => at.err("faults.abort.grpc", format!("{status} is no gRPC status")),
        },
    }
}

/// Returns a part of the requests.
pub(super) fn fraction(
    at: &DecodeContext<'_>,
    field: &'static str,
    millionths: u32,
) -> Result<RequestFraction, ResourceDecodeError> {
    match RequestFraction::of_millionths(millionths) {
        Some(fraction) => Ok(fraction),
        None => at.err(field, format!("{millionths} is more than a million")),
    }
}

/// Returns policies with every field set, for the tests of all resources.
#[cfg(test)]
pub(super) fn samples() -> Vec<m::FaultPolicy> {
    let half = RequestFraction::of_millionths(500_000).unwrap_or(RequestFraction::ALL);
    let delay = m::FaultDelay {
        time: Duration::from_secs(1),
        fraction: half,
    };
    let abort = |status| m::FaultAbort {
        status,
        fraction: RequestFraction::ALL,
    };
    vec![
        m::FaultPolicy {
            delay: Some(delay),
            abort: Some(abort(m::AbortStatus::Http(503))),
        },
        m::FaultPolicy {
            delay: None,
            abort: Some(abort(m::AbortStatus::Grpc(0))),
        },
        m::FaultPolicy {
            delay: Some(delay),
            abort: None,
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_that_are_no_responses_or_parts_are_refused() {
        type Change = fn(&mut w::FaultPolicy);
        fn abort(policy: &mut w::FaultPolicy) -> &mut w::FaultAbort {
            policy.abort.as_mut().unwrap()
        }
        use w::fault_abort::Status;
        let cases: [(Change, &str); 5] = [
            (|f| abort(f).status = None, "faults.abort.status"),
            (|f| abort(f).status = Some(Status::Http(199)), "199"),
            (|f| abort(f).status = Some(Status::Grpc(17)), "17"),
            (|f| abort(f).millionths = 1_000_001, "more than a million"),
            (
                |f| f.delay.as_mut().unwrap().millionths = 1_000_001,
                "faults.delay.millionths",
            ),
        ];
        for (change, want) in cases {
            let mut received = w::FaultPolicy::from(&samples()[0]);
            change(&mut received);
            let text = decode(&DecodeContext("r"), received)
                .unwrap_err()
                .to_string();
            assert!(text.contains(want), "{want}: {text}");
        }
    }
}
