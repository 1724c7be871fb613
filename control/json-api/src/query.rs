//! Parameters in the query of a URL. A parameter that a request does not have is refused by name,
//! as an unknown field of a body is.

use tonic::Status;

/// Parses a query into the values of the parameters `names`, in their order. A parameter that is
/// absent has the empty value.
///
/// # Errors
/// Returns `INVALID_ARGUMENT` for an unknown parameter and for one that is given twice.
pub(crate) fn parameters<const N: usize>(
    query: &str,
    names: [&str; N],
) -> Result<[String; N], Status> {
    let mut values = [const { String::new() }; N];
    let mut is_given = [false; N];
    for (name, value) in form_urlencoded::parse(query.as_bytes()) {
        let Some(at) = names.iter().position(|known| *known == name) else {
            let known = if N == 0 {
                "none".to_owned()
            } else {
                names.join(", ")
            };
            // The client chose this text; the error stays one line.
            let short: String = name.chars().take(80).collect();
            return Err(Status::invalid_argument(format!(
                "the parameter {short:?} is unknown; valid parameters: {known}; fix: remove it"
            )));
        };
        if std::mem::replace(&mut is_given[at], true) {
            return Err(Status::invalid_argument(format!(
                "the parameter {name} is given twice; fix: keep one of them"
            )));
        }
        values[at] = value.into_owned();
    }
    Ok(values)
}

/// Parses a parameter that is `true`, `false` or absent.
///
/// # Errors
/// Returns `INVALID_ARGUMENT` for another value.
pub(crate) fn flag(name: &str, value: &str) -> Result<bool, Status> {
    match value {
        "" | "false" => Ok(false),
        "true" => Ok(true),
        _ => Err(Status::invalid_argument(format!(
            "the parameter {name} is neither true nor false; fix: write {name}=true"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_decoded_and_unknown_ones_are_refused() {
        let [tenant, client] = parameters(
            "client=%5Bfd00%3A%3A9%5D%3A4000&tenant=alpha",
            ["tenant", "client"],
        )
        .unwrap();
        assert_eq!(
            (tenant.as_str(), client.as_str()),
            ("alpha", "[fd00::9]:4000")
        );
        assert_eq!(parameters("", ["tenant"]).unwrap(), [String::new()]);
        for bad in ["tenat=alpha", "tenant=alpha&tenant=beta"] {
            assert!(
                parameters(bad, ["tenant"])
                    .unwrap_err()
                    .message()
                    .contains("fix: "),
                "{bad}"
            );
        }
        assert!(
            flag("certificates", "true").unwrap()
                && !flag("certificates", "").unwrap()
                && flag("certificates", "1").is_err()
        );
    }
}
