//! `canal tap`: live requests through the gateways, filtered at the gateways and merged here. It
//! uses the controller. In a world whose controller does not answer, it uses the gateways' own
//! sockets.

use canal_wire::api::ObserveRequest;
use canal_wire::api::observe_request::Subject;
use clap::Args;
use futures::StreamExt;
use futures::stream::{self, BoxStream};
use http_body_util::{BodyExt, BodyStream};
use serde_json::Value;

use crate::admin::{self, MeshArgs};
use crate::dataplane::{self, AdminPage};
use crate::exit::{ExitStatus, VerbError, VerbResult};
use crate::output::{self, Format};
use crate::running_world::{HostKindFilter, RunningWorld};
use crate::{observe, signals};

/// Maximum length of a line from a gateway.
/// It only bounds the memory that a broken answer can take: a line describes one request.
const LINE_BYTES_MAX: usize = 1 << 20;

/// Shows live requests through the gateways
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  canal tap
  canal tap --tenant alpha --service bookinfo/reviews-v2 --status 5xx
  canal tap --path /productpage --limit 100 -o json | jq .duration_ms

A tenant's operator sees its tenant's requests. Stderr names the data planes and the number of lines that were left out.")]
pub(crate) struct TapArgs {
    /// Only requests of this tenant
    #[arg(short, long, env = "CANAL_TENANT")]
    tenant: Option<String>,
    /// Only requests answered by this service, NAMESPACE/NAME: the route's destination, not the
    /// requested one
    #[arg(short, long)]
    service: Option<String>,
    /// Only paths with this prefix
    #[arg(short, long)]
    path: Option<String>,
    /// Only this status, or class of statuses: 503, 5xx
    #[arg(long)]
    status: Option<String>,
    /// Only through these gateway replicas [default: all]
    #[arg(short, long)]
    gateway: Vec<String>,
    /// Stop after this many requests
    #[arg(short = 'n', long, value_name = "REQUESTS")]
    limit: Option<u64>,
    /// How to print each request; json is one object per line
    #[arg(
        short = 'o',
        long = "output",
        value_enum,
        default_value = "table",
        value_name = "FORMAT"
    )]
    format: Format,
    #[command(flatten)]
    mesh: MeshArgs,
}

/// Lines of one gateway, and the error that ended them.
type TapLines = BoxStream<'static, Result<String, VerbError>>;

pub(crate) async fn run(args: TapArgs) -> VerbResult {
    let begun = match admin::connect(&args.mesh).await {
        Ok(mut admin) => observe::begin(&mut admin, request(&args)).await,
        Err(failure) => Err(failure),
    };
    match begun {
        Ok(observation) => {
            let mut stop = signals::watch()?;
            eprintln!("canal: listening on {}", observation.sources.join(", "));
            let mut left = args.limit.unwrap_or(u64::MAX);
            let each = |line: &str| {
                output::line(&show(line, args.format)?)?;
                left -= 1;
                Ok(left > 0)
            };
            if args.limit == Some(0) {
                Ok(())
            } else {
                observation.lines(&mut stop, each).await
            }
        }
        // The gateways' own sockets have no operators: opening them gives access to all tenants.
        Err(failure) if args.mesh.server.is_none() && failure.exit == ExitStatus::Unreachable => {
            locally(&args).await
        }
        Err(failure) => Err(failure),
    }
}

fn request(args: &TapArgs) -> ObserveRequest {
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    let (service, path, status) = (text(&args.service), text(&args.path), text(&args.status));
    ObserveRequest {
        service,
        path,
        status,
        ..observe::request(Subject::Tap, args.tenant.as_deref(), &args.gateway)
    }
}

/// Reads the tap of each gateway of the world directly.
async fn locally(args: &TapArgs) -> VerbResult {
    let running = RunningWorld::open(args.mesh.world.as_deref())?;
    // Without a name, all gateways are read: any of them may serve the request.
    let gateways = if args.gateway.is_empty() {
        running.names_of(HostKindFilter::Gateway)?
    } else {
        args.gateway.clone()
    };
    if gateways.is_empty() {
        return Err(VerbError::new(
            ExitStatus::Missing,
            format!("world {}", running.name()),
            "has no gateway",
            "add one to its topology",
        ));
    }
    let mut stop = signals::watch()?;
    let target = format!("/tap{}", query(args));
    let mut all = stream::SelectAll::new();
    for gateway in &gateways {
        // A gateway that cannot be reached now fails the tap: its requests would be missing
        // unnoticed.
        all.push(lines(&running, gateway, &target).await?);
    }
    eprintln!(
        "canal: the controller does not answer; listening on {}",
        gateways.join(", ")
    );
    // Without -n the tap ends only by a signal, or when all gateways close it.
    let mut left = args.limit.unwrap_or(u64::MAX);
    let mut failed = 0;
    while left > 0 {
        let next = tokio::select! {
            () = stop.wait() => return Err(VerbError::already_printed(ExitStatus::Interrupted)),
            next = all.next() => next,
        };
        match next {
            Some(Ok(line)) => {
                output::line(&show(&line, args.format)?)?;
                left -= 1;
            }
            // One failed gateway does not end the tap of the others.
            Some(Err(failure)) => {
                eprintln!("canal: {failure}");
                failed += 1;
            }
            None => break,
        }
    }
    // The failures are printed already; the exit status tells scripts whether all gateways failed.
    match failed {
        0 => Ok(()),
        n if n == gateways.len() => Err(VerbError::already_printed(ExitStatus::Unreachable)),
        _ => Err(VerbError::already_printed(ExitStatus::Partial)),
    }
}

fn query(args: &TapArgs) -> String {
    let filters = [
        ("tenant", &args.tenant),
        ("service", &args.service),
        ("path", &args.path),
        ("status", &args.status),
    ];
    let pairs = filters.into_iter().filter_map(|(name, value)| {
        value
            .as_ref()
            .map(|value| format!("{name}={}", encode(value)))
    });
    let text = pairs.collect::<Vec<_>>().join("&");
    if text.is_empty() {
        text
    } else {
        format!("?{text}")
    }
}

/// Percent-encodes all characters except unreserved ones and '/' (RFC 3986 §2.3).
fn encode(text: &str) -> String {
    let keep = |byte: &u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(byte);
    text.bytes()
        .map(|byte| {
            if keep(&byte) {
                char::from(byte).to_string()
            } else {
                format!("%{byte:02X}")
            }
        })
        .collect()
}

async fn lines(running: &RunningWorld, gateway: &str, target: &str) -> VerbResult<TapLines> {
    let response = dataplane::stream(running, gateway, AdminPage::Admin, target).await?;
    let body = BodyStream::new(response.into_body().map_err(|problem| problem.to_string()));
    let place = gateway.to_owned();
    let cut = stream::unfold(
        (body, Vec::new(), place),
        |(mut body, mut buffer, place)| async move {
            loop {
                if let Some(end) = buffer.iter().position(|byte| *byte == b'\n') {
                    let line: Vec<u8> = buffer.drain(..=end).collect();
                    return Some((
                        Ok(String::from_utf8_lossy(&line).trim_end().to_owned()),
                        (body, buffer, place),
                    ));
                }
                let problem = match body.next().await? {
                    Ok(frame) => {
                        buffer.extend_from_slice(&frame.into_data().unwrap_or_default());
                        (buffer.len() > LINE_BYTES_MAX)
                            .then(|| format!("a line is longer than {LINE_BYTES_MAX} bytes"))
                    }
                    Err(problem) => Some(problem),
                };
                if let Some(problem) = problem {
                    buffer.clear();
                    let failure = VerbError::new(
                        ExitStatus::Unreachable,
                        format!("tap at {place}"),
                        problem,
                        "start the tap again",
                    );
                    return Some((Err(failure), (body, buffer, place)));
                }
            }
        },
    );
    Ok(cut.boxed())
}

fn show(line: &str, format: Format) -> VerbResult<String> {
    let value: Value = serde_json::from_str(line).unwrap_or_else(|_| Value::from(line));
    match format {
        Format::Json => Ok(value.to_string()),
        Format::Yaml => Ok(format!("---\n{}", output::yaml(&value)?.trim_end())),
        Format::Table => Ok(observe::printable(&columns(&value))),
    }
}

/// Formats one request as one line. Fields that a gateway does not report are shown as '-'.
fn columns(request: &Value) -> String {
    let text = |names: &[&str]| {
        let found = names
            .iter()
            .map(|name| &request[*name])
            .find(|value| !value.is_null());
        match found {
            Some(Value::String(text)) => text.clone(),
            Some(other) => other.to_string(),
            None => "-".to_owned(),
        }
    };
    format!(
        "{}  {:8} {:24} {:3} {:>8} ms  {} {}  {} -> {}",
        text(&["time"]),
        text(&["tenant"]),
        text(&["service"]),
        text(&["status"]),
        text(&["duration_ms"]),
        text(&["method"]),
        text(&["path"]),
        text(&["source"]),
        text(&["upstream"]),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_become_an_encoded_query() {
        let args = TapArgs {
            tenant: Some("alpha".into()),
            service: Some("bookinfo/reviews".into()),
            path: Some("/a b?c".into()),
            status: None,
            gateway: vec![],
            limit: None,
            format: Format::Table,
            mesh: MeshArgs::default(),
        };
        assert_eq!(
            query(&args),
            "?tenant=alpha&service=bookinfo/reviews&path=/a%20b%3Fc"
        );
    }

    #[test]
    fn a_line_that_is_no_json_is_shown_as_it_is() {
        assert_eq!(show("oops", Format::Json).unwrap(), "\"oops\"");
        assert!(
            columns(&serde_json::json!({ "tenant": "alpha", "status": 200 })).contains("alpha")
        );
    }
}
