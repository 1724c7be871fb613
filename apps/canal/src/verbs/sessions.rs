//! `canal sessions`: where one client's sessions are in the cloud tier, as the data planes report
//! them now. Many sessions share a tunnel, so nothing on the underlay shows a single one of them
//! (Canal, appendix A).

use canal_json_api::v1::SessionListView;
use canal_wire::api::{EdgePath, SessionsRequest, SessionsResponse};
use clap::Args;

use crate::admin::{self, MeshArgs};
use crate::exit::{ExitStatus, VerbError, VerbResult};
use crate::output::{self, OutputArgs, TextTable};

/// Finds a client's sessions in the cloud tier: edge, bucket, tunnel, replica and owner
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  canal sessions alpha 10.1.0.3:40312
  canal sessions alpha '[fd00:101::3]:40312' -o json")]
pub(crate) struct SessionsArgs {
    /// The tenant of the session
    tenant: String,
    /// The client's address as the service sees it; an IPv6 address in brackets
    #[arg(value_name = "CLIENT:PORT")]
    client: String,
    #[command(flatten)]
    mesh: MeshArgs,
    #[command(flatten)]
    output: OutputArgs,
}

pub(crate) async fn run(args: SessionsArgs) -> VerbResult {
    let mut admin = admin::connect(&args.mesh).await?;
    let request = SessionsRequest {
        tenant: args.tenant,
        client: args.client.clone(),
    };
    let found = admin
        .find_sessions(request)
        .await
        .map_err(|status| admin::refused(&status))?
        .into_inner();
    if found.sessions.is_empty() {
        let what = match found.silent.is_empty() {
            true => "no replica has a session of this client".to_owned(),
            false => format!(
                "no replica that answered has a session of this client; no answer from: {}",
                found.silent.join(", ")
            ),
        };
        return Err(VerbError::new(
            ExitStatus::Missing,
            &args.client,
            what,
            "name the address and port of the client's socket",
        ));
    }
    output::print_view(args.output.format, SessionListView::from(&found), || {
        lines(&found)
    })
}

fn lines(found: &SessionsResponse) -> Vec<String> {
    let mut table = TextTable::new(&[
        "SERVICE", "PORT", "BUCKET", "AZ", "EDGE", "TUNNEL", "REPLICA", "OWNER", "CHAIN",
    ]);
    for session in &found.sessions {
        // No edge has answered, so the session is shown without its path.
        let unknown = [EdgePath {
            edge: "?".into(),
            ..EdgePath::default()
        }];
        let paths = if session.paths.is_empty() {
            &unknown[..]
        } else {
            &session.paths
        };
        for path in paths {
            // An edge without aggregation reports 0: each flow has a port of its own.
            let tunnel = if path.tunnel_port == 0 {
                "-".to_owned()
            } else {
                path.tunnel_port.to_string()
            };
            // No replica of the chain is up.
            let replica = if path.replica.is_empty() {
                "none"
            } else {
                &path.replica
            };
            table.row([
                session.service.clone(),
                session.port.to_string(),
                session.bucket.to_string(),
                session.az.clone(),
                path.edge.clone(),
                tunnel,
                replica.to_owned(),
                session.owner.clone(),
                path.chain.join(","),
            ]);
        }
    }
    let mut lines = table.lines();
    if !found.silent.is_empty() {
        lines.push(format!("did not answer: {}", found.silent.join(", ")));
    }
    lines
}

#[cfg(test)]
mod tests {
    use canal_wire::api::ClientSession;

    use super::*;

    #[test]
    fn each_edge_that_may_carry_a_session_has_a_line() {
        let path = |edge: &str, replica: &str| EdgePath {
            edge: edge.into(),
            replica: replica.into(),
            tunnel_port: 40_003,
            chain: vec!["gw-2".into(), "gw-1".into()],
            ..EdgePath::default()
        };
        let session = ClientSession {
            service: "alpha/shop/web".into(),
            port: 80,
            bucket: 93,
            az: "az1".into(),
            owner: "gw-1".into(),
            paths: vec![path("edge-1", "gw-2"), path("edge-2", "")],
        };
        let found = SessionsResponse {
            sessions: vec![session],
            silent: vec!["gw-9".into()],
        };
        let shown = lines(&found);
        assert_eq!(shown.len(), 4);
        assert!(
            shown[1].contains("edge-1") && shown[1].contains("40003") && shown[1].contains("gw-2 "),
            "{}",
            shown[1]
        );
        assert!(
            shown[2].contains("edge-2") && shown[2].contains("none") && shown[3].contains("gw-9"),
            "{shown:?}"
        );
    }
}
