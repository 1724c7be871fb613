//! The tenant that a verb is about: `--tenant`, `$CANAL_TENANT`, or the only tenant.

use canal_wire::api::StatusRequest;
use clap::Args;

use crate::admin::{self, Admin};
use crate::exit::{ExitStatus, VerbError, VerbResult};

/// The option that all verbs about one tenant's objects share.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct TenantArgs {
    /// Tenant that the command works on [default: the only one]
    #[arg(short, long, env = "CANAL_TENANT", value_name = "NAME")]
    pub(crate) tenant: Option<String>,
}

/// Returns the name of the tenant.
pub(crate) async fn decide(args: &TenantArgs, admin: &mut Admin) -> VerbResult<String> {
    if let Some(tenant) = &args.tenant {
        return Ok(tenant.clone());
    }
    let status = admin
        .status(StatusRequest {})
        .await
        .map_err(|status| admin::refused(&status))?
        .into_inner();
    only(status.tenants.into_iter().map(|t| t.tenant).collect())
}

fn only(mut names: Vec<String>) -> VerbResult<String> {
    match (names.pop(), names.is_empty()) {
        (Some(name), true) => Ok(name),
        (Some(name), false) => {
            names.push(name);
            let what = format!("there are several tenants: {}", names.join(", "));
            Err(VerbError::new(
                ExitStatus::Usage,
                "--tenant",
                what,
                "name one with --tenant or $CANAL_TENANT",
            ))
        }
        (None, _) => Err(VerbError::new(
            ExitStatus::Missing,
            "--tenant",
            "the controller has no tenant",
            "add one to its sources",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_only_tenant_needs_no_name() {
        assert_eq!(only(vec!["alpha".into()]).unwrap(), "alpha");
        assert_eq!(
            only(vec!["alpha".into(), "beta".into()]).unwrap_err().exit,
            ExitStatus::Usage
        );
        assert_eq!(only(vec![]).unwrap_err().exit, ExitStatus::Missing);
    }
}
