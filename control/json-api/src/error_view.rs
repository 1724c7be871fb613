//! The body of a response that refuses a request, and the HTTP status that belongs to it.

use http::StatusCode;
use serde::Serialize;
use tonic::{Code, Status};

/// The JSON body of a refused request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ErrorView {
    pub error: ErrorDetailView,
}

/// The reason of a refusal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ErrorDetailView {
    /// Name of the reason, which programs may compare: the gRPC code in snake_case.
    pub code: &'static str,
    pub message: String,
    /// Step that solves the problem; empty if there is none.
    pub fix: String,
}

impl From<&Status> for ErrorView {
    fn from(status: &Status) -> Self {
        let (message, fix) = status
            .message()
            .split_once("; fix: ")
            .unwrap_or((status.message(), ""));
        Self {
            error: ErrorDetailView {
                code: code_name(status.code()),
                message: message.to_owned(),
                fix: fix.to_owned(),
            },
        }
    }
}

fn code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "ok",
        Code::Cancelled => "cancelled",
        Code::InvalidArgument => "invalid_argument",
        Code::DeadlineExceeded => "deadline_exceeded",
        Code::NotFound => "not_found",
        Code::AlreadyExists => "already_exists",
        Code::PermissionDenied => "permission_denied",
        Code::ResourceExhausted => "resource_exhausted",
        Code::FailedPrecondition => "failed_precondition",
        Code::Aborted => "aborted",
        Code::OutOfRange => "out_of_range",
        Code::Unimplemented => "unimplemented",
        Code::Internal => "internal",
        Code::Unavailable => "unavailable",
        Code::DataLoss => "data_loss",
        Code::Unauthenticated => "unauthenticated",
        Code::Unknown => "unknown",
    }
}

/// Returns the HTTP status of a refusal by its gRPC code.
pub(crate) fn http_status(code: Code) -> StatusCode {
    match code {
        Code::Ok => StatusCode::OK,
        Code::InvalidArgument | Code::OutOfRange => StatusCode::BAD_REQUEST,
        Code::Unauthenticated => StatusCode::UNAUTHORIZED,
        Code::PermissionDenied => StatusCode::FORBIDDEN,
        Code::NotFound => StatusCode::NOT_FOUND,
        Code::AlreadyExists | Code::Aborted | Code::FailedPrecondition => StatusCode::CONFLICT,
        Code::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
        Code::Unimplemented => StatusCode::NOT_IMPLEMENTED,
        Code::Unavailable | Code::Cancelled => StatusCode::SERVICE_UNAVAILABLE,
        Code::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
        Code::Internal | Code::Unknown | Code::DataLoss => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fix_of_a_message_is_a_field_of_its_own() {
        let view = ErrorView::from(&Status::invalid_argument(
            "the request names objects and also requests all; fix: send only one of them",
        ));
        assert_eq!(
            (view.error.code, view.error.fix.as_str()),
            ("invalid_argument", "send only one of them")
        );
        assert_eq!(
            ErrorView::from(&Status::not_found("there is no tenant alpha"))
                .error
                .fix,
            ""
        );
    }
}
