//! The fields of a finished request or relayed connection: one row each, read by the access log,
//! the tap and the metrics.
//!
//! A row says under which name each output shows the field and how its value is read; a new field
//! is one row. How a value is written is the output's affair. Start with [`FIELDS`].

use std::borrow::Cow;
use std::net::SocketAddr;
use std::time::Duration;

use canal_gateway_config::{Endpoint, ServiceNames, WorkloadLabels};
use canal_gateway_http::proxy_error::ResponseFlag;
use canal_gateway_limits::tenant_usage::TenantUsage;

use crate::endpoints::EndpointSetState;
use crate::source_workload::SourceWorkload;

/// Parts of a request that logs show. They are copied only if a log or a tap reads them.
#[derive(Debug, Default)]
pub(crate) struct LogFields {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) authority: String,
    pub(crate) user_agent: String,
    pub(crate) request_id: String,
    pub(crate) forwarded_for: String,
    pub(crate) route: String,
    pub(crate) authorization: AuthzRecord,
}

/// Effect of the policies on a request or connection, for logs.
#[derive(Debug, Default)]
pub(crate) struct AuthzRecord {
    /// `namespace/name` of the policy that denied it.
    pub(crate) policy: String,
    /// Audits and dry runs that matched: their kind and the policy.
    pub(crate) hits: Vec<String>,
}

/// A request or relayed connection that is over, or a relay that begins.
#[derive(Clone, Copy)]
pub(crate) struct FinishedTraffic<'a> {
    pub(crate) account: &'a TenantUsage,
    pub(crate) source: &'a SourceWorkload,
    /// Pod of the source; empty if it is not known.
    pub(crate) pod: &'a str,
    pub(crate) client: SocketAddr,
    /// True if the source proved its identity.
    pub(crate) secured: bool,
    /// The endpoint set, and the position of the endpoint in it once one is selected.
    pub(crate) target: Option<(&'a EndpointSetState, Option<usize>)>,
    pub(crate) flag: ResponseFlag,
    pub(crate) detail: &'a str,
    /// Effect of the policies; `None` if no log reads it.
    pub(crate) authorization: Option<&'a AuthzRecord>,
    /// Payload bytes from the client.
    pub(crate) bytes_in: u64,
    /// Payload bytes to the client.
    pub(crate) bytes_out: u64,
    pub(crate) took: Duration,
    /// `None` for a relayed connection.
    pub(crate) request: Option<FinishedRequest<'a>>,
}

/// The part that only requests have, and relayed connections do not.
#[derive(Clone, Copy)]
pub(crate) struct FinishedRequest<'a> {
    /// Name of the client protocol.
    pub(crate) protocol: &'static str,
    pub(crate) status: u16,
    pub(crate) grpc: bool,
    pub(crate) grpc_status: Option<u8>,
    /// Time until the endpoint's response began; a local reply has none.
    pub(crate) answered: Option<Duration>,
    /// `None` if no log and no tap reads them.
    pub(crate) texts: Option<&'a LogFields>,
}

/// The value of one field of finished traffic.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum FieldValue<'a> {
    /// The traffic has no such field.
    Absent,
    /// A text that may be empty.
    Text(Cow<'a, str>),
    /// A text that is empty if it is not known.
    Known(Cow<'a, str>),
    Number(u64),
    /// An HTTP status.
    Status(u16),
    /// A gRPC status; `None` if the response has none.
    GrpcStatus(Option<u8>),
    Duration(Duration),
    Address(SocketAddr),
}

use FieldValue::{Absent, Address, Number};

fn text(text: &str) -> FieldValue<'_> {
    FieldValue::Text(Cow::Borrowed(text))
}

fn known_text(text: &str) -> FieldValue<'_> {
    FieldValue::Known(Cow::Borrowed(text))
}

fn known_if<'a>(text: Option<String>) -> FieldValue<'a> {
    FieldValue::Known(Cow::Owned(text.unwrap_or_default()))
}

/// Function that reads the value of a field.
type ReadField = for<'a> fn(&FinishedTraffic<'a>) -> FieldValue<'a>;

/// One field. A name is empty where the output does not show it.
pub(crate) struct RequestField {
    /// Name in the access log.
    pub(crate) log: &'static str,
    /// Name of the field in the tap.
    pub(crate) tap: &'static str,
    /// Name of the field as a metric's label.
    pub(crate) label: &'static str,
    /// True if only requests have the field.
    pub(crate) is_of_request: bool,
    pub(crate) read: ReadField,
}

impl<'a> FinishedTraffic<'a> {
    fn of_request(
        &self,
        read: impl FnOnce(&FinishedRequest<'a>) -> FieldValue<'a>,
    ) -> FieldValue<'a> {
        self.request.as_ref().map_or(Absent, read)
    }

    fn of_texts(&self, read: impl FnOnce(&'a LogFields) -> FieldValue<'a>) -> FieldValue<'a> {
        self.request
            .and_then(|request| request.texts)
            .map_or(Absent, read)
    }

    fn of_endpoint(&self, read: impl FnOnce(&'a Endpoint) -> FieldValue<'a>) -> FieldValue<'a> {
        self.target
            .and_then(|(view, at)| view.set.endpoints.get(at?))
            .map_or(Absent, read)
    }

    fn of_destination(
        &self,
        read: impl FnOnce(&'a WorkloadLabels) -> FieldValue<'a>,
    ) -> FieldValue<'a> {
        self.of_endpoint(|endpoint| read(&endpoint.workload.party))
    }

    fn service(&self) -> Option<&'a ServiceNames> {
        self.target
            .and_then(|(view, _)| view.set.service.as_deref())
    }

    fn of_service(&self, read: impl FnOnce(&'a ServiceNames) -> &'a str) -> FieldValue<'a> {
        self.service().map_or(Absent, |names| text(read(names)))
    }

    /// Returns `namespace/name` of the service; empty if there is none.
    pub(crate) fn service_name(&self) -> String {
        self.service()
            .map(|names| format!("{}/{}", names.key.namespace, names.key.name))
            .unwrap_or_default()
    }

    /// Returns the service's hostname, for requests with the port.
    fn service_host(&self) -> Option<String> {
        let (view, _) = self.target?;
        let hostname = &view.set.service.as_ref()?.hostname;
        Some(if self.request.is_some() {
            format!("{hostname}:{}", view.set.port)
        } else {
            hostname.clone()
        })
    }

    /// Returns the source as the tap shows it: its namespace, and its pod or workload.
    fn source_name(&self) -> String {
        let source = &self.source.party;
        format!(
            "{}/{}",
            source.namespace,
            if self.pod.is_empty() {
                &source.workload
            } else {
                self.pod
            }
        )
    }
}

/// Defines a field of requests and of relayed connections.
const fn field(
    log: &'static str,
    tap: &'static str,
    label: &'static str,
    read: ReadField,
) -> RequestField {
    RequestField {
        log,
        tap,
        label,
        is_of_request: false,
        read,
    }
}

/// Defines a field that only requests have.
const fn http_field(
    log: &'static str,
    tap: &'static str,
    label: &'static str,
    read: ReadField,
) -> RequestField {
    RequestField {
        log,
        tap,
        label,
        is_of_request: true,
        read,
    }
}

/// All fields, in the order in which the access log and the metrics show them. A row is: name in
/// the access log, name in the tap, metric label, value.
pub(crate) static FIELDS: &[RequestField] = &[
    field("tenant", "tenant", "tenant", |f| {
        text(f.account.tenant.as_str())
    }),
    // Istio's value for a proxy between the two nodes; dashboards of ambient meshes expect it.
    field("", "", "reporter", |_| text("waypoint")),
    http_field("method", "method", "", |f| f.of_texts(|t| text(&t.method))),
    http_field("path", "path", "", |f| f.of_texts(|t| text(&t.path))),
    field("protocol", "protocol", "", |f| {
        text(f.request.map_or("TCP", |r| r.protocol))
    }),
    http_field("authority", "authority", "", |f| {
        f.of_texts(|t| text(&t.authority))
    }),
    http_field("response_code", "status", "response_code", |f| {
        f.of_request(|r| FieldValue::Status(r.status))
    }),
    http_field("grpc_status", "grpc_status", "", |f| {
        f.of_request(|r| FieldValue::GrpcStatus(r.grpc_status))
    }),
    // Applications other than gRPC could make series with a status of their choice.
    http_field("", "", "grpc_response_status", |f| {
        f.of_request(|r| FieldValue::GrpcStatus(r.grpc_status.filter(|_| r.grpc)))
    }),
    field("response_flags", "flags", "response_flags", |f| {
        text(f.flag.text())
    }),
    field("response_code_details", "", "", |f| known_text(f.detail)),
    field("bytes_received", "bytes_received", "", |f| {
        Number(f.bytes_in)
    }),
    field("bytes_sent", "bytes_sent", "", |f| Number(f.bytes_out)),
    field("duration_ms", "duration_ms", "", |f| {
        FieldValue::Duration(f.took)
    }),
    http_field("upstream_service_time_ms", "", "", |f| {
        f.of_request(|r| r.answered.map_or(Absent, FieldValue::Duration))
    }),
    http_field("x_forwarded_for", "", "", |f| {
        f.of_texts(|t| known_text(&t.forwarded_for))
    }),
    http_field("user_agent", "", "", |f| {
        f.of_texts(|t| known_text(&t.user_agent))
    }),
    http_field("request_id", "request_id", "", |f| {
        f.of_texts(|t| known_text(&t.request_id))
    }),
    field("service", "service", "", |f| {
        known_if(Some(f.service_name()))
    }),
    field("service_host", "", "", |f| known_if(f.service_host())),
    field("", "", "destination_service", |f| {
        f.of_service(|names| &names.hostname)
    }),
    field("", "", "destination_service_name", |f| {
        f.of_service(|names| names.key.name.as_str())
    }),
    field("", "", "destination_service_namespace", |f| {
        f.of_service(|names| names.key.namespace.as_str())
    }),
    http_field("route_name", "route", "", |f| {
        f.of_texts(|t| known_text(&t.route))
    }),
    field("authorization_policy", "", "", |f| {
        f.authorization
            .map_or(Absent, |record| known_text(&record.policy))
    }),
    field("authorization_hits", "", "", |f| {
        known_if(f.authorization.map(|record| record.hits.join(", ")))
    }),
    field("downstream_remote_address", "", "", |f| Address(f.client)),
    field("", "source", "", |f| known_if(Some(f.source_name()))),
    field("source_workload", "", "source_workload", |f| {
        text(&f.source.party.workload)
    }),
    field("source_namespace", "", "source_workload_namespace", |f| {
        text(&f.source.party.namespace)
    }),
    field("source_pod", "", "", |f| known_text(f.pod)),
    field("source_principal", "", "source_principal", |f| {
        known_text(&f.source.party.principal)
    }),
    field("", "", "source_app", |f| text(&f.source.party.app)),
    field("", "", "source_version", |f| text(&f.source.party.version)),
    field("", "", "source_cluster", |f| text(&f.source.party.cluster)),
    field("", "", "source_canonical_service", |f| {
        text(&f.source.party.service)
    }),
    field("", "", "source_canonical_revision", |f| {
        text(&f.source.party.revision)
    }),
    field("", "upstream", "", |f| {
        f.of_endpoint(|e| known_if(Some(format!("{} ({})", e.workload.party.pod, e.address))))
    }),
    field("upstream_host", "", "", |f| {
        f.of_endpoint(|e| Address(e.address_towards(f.client.ip())))
    }),
    field("upstream_pod", "", "", |f| {
        f.of_destination(|w| text(&w.pod))
    }),
    field("upstream_workload", "", "destination_workload", |f| {
        f.of_destination(|w| text(&w.workload))
    }),
    field("", "", "destination_workload_namespace", |f| {
        f.of_destination(|w| text(&w.namespace))
    }),
    field("", "", "destination_principal", |f| {
        f.of_destination(|w| known_text(&w.principal))
    }),
    field("", "", "destination_app", |f| {
        f.of_destination(|w| text(&w.app))
    }),
    field("", "", "destination_version", |f| {
        f.of_destination(|w| text(&w.version))
    }),
    field("", "", "destination_cluster", |f| {
        f.of_destination(|w| text(&w.cluster))
    }),
    field("", "", "destination_canonical_service", |f| {
        f.of_destination(|w| text(&w.service))
    }),
    // Istio's value for an unknown revision.
    field("", "", "destination_canonical_revision", |f| {
        match f.of_destination(|w| text(&w.revision)) {
            Absent => text("latest"),
            revision => revision,
        }
    }),
    field("", "", "connection_security_policy", |f| {
        text(if f.secured { "mutual_tls" } else { "none" })
    }),
    field("", "", "request_protocol", |f| {
        text(
            f.request
                .map_or("tcp", |r| if r.grpc { "grpc" } else { "http" }),
        )
    }),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_output_shows_a_name_once() {
        let names: [fn(&RequestField) -> &'static str; 3] = [|f| f.log, |f| f.tap, |f| f.label];
        for name in names {
            let mut all: Vec<_> = FIELDS
                .iter()
                .map(name)
                .filter(|name| !name.is_empty())
                .collect();
            let shown = all.len();
            all.sort_unstable();
            all.dedup();
            assert_eq!(all.len(), shown, "{all:?}");
        }
        assert!(
            FIELDS
                .iter()
                .all(|f| !(f.log.is_empty() && f.tap.is_empty() && f.label.is_empty()))
        );
    }
}
