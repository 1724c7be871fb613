//! The paths of the API: which operation a method and a path name. The operations are carried out
//! in `server`.

use http::Method;

use crate::v1;

/// An operation of the API, with the names in its path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Operation {
    Read(ReadOperation),
    Write(WriteOperation),
    /// A command for the replica of this name.
    Replica(ReplicaOperation, String),
}

/// An operation that changes nothing. Its arguments are in the path and the query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ReadOperation {
    Status,
    Objects,
    Fleet,
    /// Placement of the service `tenant/namespace/name`.
    Placement(String),
    Sessions,
    TrustDomains,
}

/// An operation whose arguments are in the body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WriteOperation {
    Apply,
    Diff,
    Delete,
    RotateRoot,
    Revoke,
    Restore,
}

/// A command for one gateway replica. The path contains all its arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReplicaOperation {
    Drain,
    Undrain,
    Forget,
}

impl Operation {
    /// Returns the only method by which the operation can be called.
    fn method(&self) -> &'static str {
        match self {
            Operation::Read(_) => GET,
            Operation::Write(_) | Operation::Replica(..) => POST,
        }
    }
}

/// The reason that a path names no operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RouteRefusal {
    Path,
    /// The path exists for this method only.
    Method(&'static str),
}

const GET: &str = "GET";
const POST: &str = "POST";

/// Returns the operation that `method` and `path` name.
pub(crate) fn decide_operation(method: &Method, path: &str) -> Result<Operation, RouteRefusal> {
    let segments: Vec<&str> = path.split('/').skip(1).collect();
    let ["api", v1::VERSION, rest @ ..] = segments.as_slice() else {
        return Err(RouteRefusal::Path);
    };
    let operation = match rest {
        ["status"] => Operation::Read(ReadOperation::Status),
        ["objects"] => Operation::Read(ReadOperation::Objects),
        ["fleet"] => Operation::Read(ReadOperation::Fleet),
        ["fleet", "services", tenant, namespace, name] => Operation::Read(
            ReadOperation::Placement(format!("{tenant}/{namespace}/{name}")),
        ),
        ["sessions"] => Operation::Read(ReadOperation::Sessions),
        ["trust"] => Operation::Read(ReadOperation::TrustDomains),
        ["apply"] => Operation::Write(WriteOperation::Apply),
        ["diff"] => Operation::Write(WriteOperation::Diff),
        ["delete"] => Operation::Write(WriteOperation::Delete),
        ["trust", "rotate"] => Operation::Write(WriteOperation::RotateRoot),
        ["trust", "revoke"] => Operation::Write(WriteOperation::Revoke),
        ["trust", "restore"] => Operation::Write(WriteOperation::Restore),
        ["fleet", "replicas", name, command] => {
            let command = match *command {
                "drain" => ReplicaOperation::Drain,
                "undrain" => ReplicaOperation::Undrain,
                "forget" => ReplicaOperation::Forget,
                _ => return Err(RouteRefusal::Path),
            };
            Operation::Replica(command, (*name).to_owned())
        }
        _ => return Err(RouteRefusal::Path),
    };
    if method.as_str() == operation.method() {
        Ok(operation)
    } else {
        Err(RouteRefusal::Method(operation.method()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn method_and_path_name_one_operation_or_are_refused() {
        let read = |operation| Ok(Operation::Read(operation));
        let write = |operation| Ok(Operation::Write(operation));
        let replica = |operation| Ok(Operation::Replica(operation, "gw-1".into()));
        for (method, path, expected) in [
            (Method::GET, "/api/v1/status", read(ReadOperation::Status)),
            (Method::GET, "/api/v1/objects", read(ReadOperation::Objects)),
            (Method::GET, "/api/v1/fleet", read(ReadOperation::Fleet)),
            (
                Method::GET,
                "/api/v1/sessions",
                read(ReadOperation::Sessions),
            ),
            (
                Method::GET,
                "/api/v1/trust",
                read(ReadOperation::TrustDomains),
            ),
            (Method::POST, "/api/v1/apply", write(WriteOperation::Apply)),
            (Method::POST, "/api/v1/diff", write(WriteOperation::Diff)),
            (
                Method::POST,
                "/api/v1/delete",
                write(WriteOperation::Delete),
            ),
            (
                Method::POST,
                "/api/v1/trust/rotate",
                write(WriteOperation::RotateRoot),
            ),
            (
                Method::POST,
                "/api/v1/trust/revoke",
                write(WriteOperation::Revoke),
            ),
            (
                Method::POST,
                "/api/v1/trust/restore",
                write(WriteOperation::Restore),
            ),
            (
                Method::POST,
                "/api/v1/status",
                Err(RouteRefusal::Method("GET")),
            ),
            (
                Method::GET,
                "/api/v1/apply",
                Err(RouteRefusal::Method("POST")),
            ),
            (
                Method::GET,
                "/api/v1/fleet/services/alpha/bookinfo/reviews",
                read(ReadOperation::Placement("alpha/bookinfo/reviews".into())),
            ),
            (
                Method::POST,
                "/api/v1/fleet/replicas/gw-1/drain",
                replica(ReplicaOperation::Drain),
            ),
            (
                Method::POST,
                "/api/v1/fleet/replicas/gw-1/undrain",
                replica(ReplicaOperation::Undrain),
            ),
            (
                Method::POST,
                "/api/v1/fleet/replicas/gw-1/forget",
                replica(ReplicaOperation::Forget),
            ),
            (
                Method::GET,
                "/api/v1/fleet/replicas/gw-1/drain",
                Err(RouteRefusal::Method("POST")),
            ),
            (
                Method::POST,
                "/api/v1/fleet/replicas/gw-1/stop",
                Err(RouteRefusal::Path),
            ),
            (Method::GET, "/api/v1/status/", Err(RouteRefusal::Path)),
            (Method::GET, "/api/v2/status", Err(RouteRefusal::Path)),
            (Method::GET, "/api/v1", Err(RouteRefusal::Path)),
            (Method::GET, "", Err(RouteRefusal::Path)),
        ] {
            assert_eq!(decide_operation(&method, path), expected, "{method} {path}");
        }
    }
}
