//! Defines which faults a request gets, and what the client of an aborted request sees. The texts
//! are those of Envoy's fault filter, which Istio configures. A gateway may leave out a delay if
//! too many requests are delayed; that is not part of the meaning.

use std::time::Duration;

use canal_model::request_fraction::RequestFraction;
use canal_model::route_faults::{AbortStatus, FaultPolicy};

/// The response to an aborted request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OracleAbort {
    pub status: u16,
    /// `None` for a client that does not speak gRPC.
    pub grpc_status: Option<u8>,
    /// The body; the `grpc-message` for a gRPC client.
    pub text: &'static str,
}

/// Returns the delay and the response of one request. The random number decides: its upper half
/// about the delay, its lower half about the abort.
pub fn injected(
    policy: &FaultPolicy,
    random: u64,
    is_grpc: bool,
) -> (Option<Duration>, Option<OracleAbort>) {
    let delay = policy.delay.filter(|it| is_in(it.fraction, random >> 32));
    let abort = policy
        .abort
        .filter(|it| is_in(it.fraction, random % (1 << 32)));
    (
        delay.map(|it| it.time),
        abort.map(|it| response(it.status, is_grpc)),
    )
}

/// Returns whether a number below 2^32 is in this part of all of them.
fn is_in(fraction: RequestFraction, number: u64) -> bool {
    u128::from(number) * 1_000_000 < u128::from(fraction.millionths()) << 32
}

fn response(status: AbortStatus, is_grpc: bool) -> OracleAbort {
    let (http, grpc) = match status {
        // The status is only for gRPC clients; others get a response that looks like success.
        AbortStatus::Grpc(status) => (200, status),
        AbortStatus::Http(status) => {
            // gRPC's own mapping of HTTP statuses (grpc/doc/http-grpc-status-mapping.md).
            let grpc = match status {
                400 => 13,
                401 => 16,
                403 => 7,
                404 => 12,
                429 | 502 | 503 | 504 => 14,
                _ => 2,
            };
            (status, grpc)
        }
    };
    OracleAbort {
        // The status of a gRPC response is in its trailers.
        status: if is_grpc { 200 } else { http },
        grpc_status: is_grpc.then_some(grpc),
        text: "fault filter abort",
    }
}
