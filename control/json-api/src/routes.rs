//! The paths of the API: which operation a method and a path name. The operations are carried out
//! in `server`.

use http::Method;

use crate::v1;

/// An operation of the API, with the names in its path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Operation {
    Status,
    Objects,
    Apply,
    Diff,
    Delete,
    Fleet,
    /// Placement of the service `tenant/namespace/name`.
    Placement(String),
    DrainReplica(String),
    UndrainReplica(String),
    ForgetReplica(String),
    Sessions,
    Trust,
    RotateRoot,
    Revoke,
    Restore,
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
    let (only, operation) = match rest {
        ["status"] => (GET, Operation::Status),
        ["objects"] => (GET, Operation::Objects),
        ["apply"] => (POST, Operation::Apply),
        ["diff"] => (POST, Operation::Diff),
        ["delete"] => (POST, Operation::Delete),
        ["fleet"] => (GET, Operation::Fleet),
        ["fleet", "services", tenant, namespace, name] => (
            GET,
            Operation::Placement(format!("{tenant}/{namespace}/{name}")),
        ),
        ["fleet", "replicas", name, "drain"] => (POST, Operation::DrainReplica((*name).to_owned())),
        ["fleet", "replicas", name, "undrain"] => {
            (POST, Operation::UndrainReplica((*name).to_owned()))
        }
        ["fleet", "replicas", name, "forget"] => {
            (POST, Operation::ForgetReplica((*name).to_owned()))
        }
        ["sessions"] => (GET, Operation::Sessions),
        ["trust"] => (GET, Operation::Trust),
        ["trust", "rotate"] => (POST, Operation::RotateRoot),
        ["trust", "revoke"] => (POST, Operation::Revoke),
        ["trust", "restore"] => (POST, Operation::Restore),
        _ => return Err(RouteRefusal::Path),
    };
    if method.as_str() == only {
        Ok(operation)
    } else {
        Err(RouteRefusal::Method(only))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn method_and_path_name_one_operation_or_are_refused() {
        for (method, path, expected) in [
            (Method::GET, "/api/v1/status", Ok(Operation::Status)),
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
                Ok(Operation::Placement("alpha/bookinfo/reviews".into())),
            ),
            (
                Method::POST,
                "/api/v1/fleet/replicas/gw-1/drain",
                Ok(Operation::DrainReplica("gw-1".into())),
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
