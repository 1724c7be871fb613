//! A worker's counters of events other than completed requests: refusals, timeouts, retries,
//! connects, ejections. The metrics of requests are in `request_metrics`.

use canal_gateway_http::proxy_error::ProxyError;
use canal_gateway_io::clock::TimeoutKind;
use canal_runtime::metrics::{Counter, CounterFamily, Gauge, MetricFamily, MetricsShard, Registry};

use canal_model::ids::TenantName;

/// Counters of one worker, in the worker's own metrics shard.
#[derive(Debug)]
pub struct WorkerCounters {
    shard: MetricsShard,
    refused_requests: CounterFamily,
    refused_connections: CounterFamily,
    refused_connects: CounterFamily,
    retries: CounterFamily,
    retries_refused: CounterFamily,
    fault_delays: CounterFamily,
    mirrored: CounterFamily,
    shortages: CounterFamily,
    timeouts: Vec<Counter>,
    http2_errors: CounterFamily,
    authorizations: CounterFamily,
    tokens: CounterFamily,
    verifications: CounterFamily,
    authorizers: CounterFamily,
    reopened: CounterFamily,
    cpu: CounterFamily,
    pub connections: Gauge,
    pub accepted: Counter,
    pub false_sources: Counter,
    pub connects_ok: Counter,
    pub connects_failed: Counter,
    pub reused: Counter,
    pub not_kept: Counter,
    pub ejections: Counter,
    pub rebalanced: Counter,
    pub sniffed_server_first: Counter,
}

/// Returns the metric family of CPU time by tenant.
fn cpu_seconds(registry: &Registry) -> CounterFamily {
    let help = "Time that workers spent on a tenant's connections, handshakes included.";
    registry.seconds(MetricFamily::new(
        "canal_gateway_cpu_seconds_total",
        help,
        &["tenant"],
    ))
}

/// Returns a counter for each kind of timeout.
fn timeouts(registry: &Registry, shard: &MetricsShard) -> Vec<Counter> {
    let family = registry.counters(MetricFamily::new(
        "canal_gateway_timeouts_total",
        "Connections and exchanges that ended because a timeout expired.",
        &["what"],
    ));
    TimeoutKind::ALL
        .iter()
        .map(|late| shard.counter(&family, &[late.name()]))
        .collect()
}

/// Returns the metric family of connects to endpoints, by result.
fn upstream_connects(registry: &Registry) -> CounterFamily {
    registry.counters(MetricFamily::new(
        "canal_gateway_upstream_connects_total",
        "Connections opened to endpoints.",
        &["result"],
    ))
}

/// Returns the metric family of HTTP/2 connections that failed, by side and reason.
fn http2_errors(registry: &Registry) -> CounterFamily {
    registry.counters(MetricFamily::new(
        "canal_gateway_http2_errors_total",
        "HTTP/2 connections that ended with an error.",
        &["side", "reason"],
    ))
}

/// Returns the metric family of retries, by reason.
fn retries(registry: &Registry) -> CounterFamily {
    registry.counters(MetricFamily::new(
        "canal_gateway_retries_total",
        "Requests sent again to another endpoint or connection, by reason.",
        &["reason"],
    ))
}

/// Returns the metric family of retries that were not made, by reason.
fn retries_refused(registry: &Registry) -> CounterFamily {
    registry.counters(MetricFamily::new(
        "canal_gateway_retries_refused_total",
        "Retries that a rule asked for and that were not made, by reason.",
        &["reason"],
    ))
}

/// Returns the metric family of delays that rules inject, by result.
fn fault_delays(registry: &Registry) -> CounterFamily {
    registry.counters(MetricFamily::new(
        "canal_gateway_fault_delays_total",
        "Delays of requests that rules inject as faults, and those left out because too many requests wait.",
        &["result"],
    ))
}

/// Returns the metric family of copies of requests, by result.
fn mirrored(registry: &Registry) -> CounterFamily {
    registry.counters(MetricFamily::new(
        "canal_gateway_mirrored_requests_total",
        "Copies of requests to mirrors, by result: `sent`, or the reason for which there is none.",
        &["result"],
    ))
}

/// Returns the gauge of open connections from clients.
fn connections(registry: &Registry, shard: &MetricsShard) -> Gauge {
    let family = registry.gauges(MetricFamily::new(
        "canal_gateway_connections",
        "Open connections from clients, tunnels included.",
        &[],
    ));
    shard.gauge(&family, &[])
}

/// Returns the metric family of evaluated policies, by tenant, action and policy.
fn authorizations(registry: &Registry) -> CounterFamily {
    registry.counters(MetricFamily::new(
        "canal_authorization_total",
        "Requests and connections that policies evaluated, by result; and audits and dry runs that matched.",
        &["tenant", "action", "policy"],
    ))
}

impl WorkerCounters {
    pub fn new(registry: &Registry, shard: &MetricsShard) -> Self {
        let family = |name, help, labels| registry.counters(MetricFamily::new(name, help, labels));
        let plain = |name, help| shard.counter(&family(name, help, &[]), &[]);
        let connects = upstream_connects(registry);
        Self {
            refused_requests: family(
                "canal_gateway_refused_requests_total",
                "Requests that the gateway ended with an error, by reason and by responsible side.",
                &["reason", "side"],
            ),
            refused_connections: family(
                "canal_gateway_refused_connections_total",
                "Connections closed before a request was read, by reason.",
                &["reason"],
            ),
            refused_connects: family(
                "canal_gateway_refused_connects_total",
                "HBONE CONNECTs that were refused, by reason.",
                &["reason"],
            ),
            retries: retries(registry),
            retries_refused: retries_refused(registry),
            fault_delays: fault_delays(registry),
            mirrored: mirrored(registry),
            shortages: family(
                "canal_gateway_local_exhaustion_total",
                "Connections to endpoints that were not opened because a resource of this machine is exhausted.",
                &["what"],
            ),
            timeouts: timeouts(registry, shard),
            http2_errors: http2_errors(registry),
            authorizations: authorizations(registry),
            tokens: family(
                "canal_gateway_tokens_total",
                "JSON Web Tokens that were checked, by result.",
                &["result"],
            ),
            verifications: family(
                "canal_gateway_token_verifications_total",
                "Signatures of JSON Web Tokens that were verified, by result.",
                &["result"],
            ),
            authorizers: family(
                "canal_authorizer_requests_total",
                "Checks sent to external authorizers.",
                &["tenant", "authorizer", "result"],
            ),
            reopened: family(
                "canal_gateway_reauthorized_total",
                "Open requests and connections reauthorized after a change.",
                &["result"],
            ),
            cpu: cpu_seconds(registry),
            connections: connections(registry, shard),
            false_sources: plain(
                "canal_gateway_false_sources_total",
                "Tunnels whose client named a source address that is not its own.",
            ),
            accepted: plain(
                "canal_gateway_accepted_connections_total",
                "Connections accepted, tunnels included.",
            ),
            connects_ok: shard.counter(&connects, &["ok"]),
            connects_failed: shard.counter(&connects, &["failed"]),
            reused: plain(
                "canal_gateway_upstream_reused_total",
                "Requests sent on an idle or shared connection.",
            ),
            not_kept: plain(
                "canal_gateway_upstream_not_pooled_total",
                "Connections to endpoints closed because the pool is full.",
            ),
            ejections: plain(
                "canal_gateway_endpoint_ejections_total",
                "Ejections of an endpoint because connecting to it failed.",
            ),
            rebalanced: plain(
                "canal_gateway_rebalanced_connections_total",
                "Connections whose client was asked to reconnect because the head of its bucket moved.",
            ),
            sniffed_server_first: plain(
                "canal_gateway_sniffed_server_first_total",
                "Connections of undeclared protocol relayed as TCP because the client sent nothing in time.",
            ),
            shard: shard.clone(),
        }
    }

    /// Counts a decision of a policy (`namespace/name`).
    pub fn authorized(&self, tenant: &TenantName, action: &str, policy: &str) {
        self.shard
            .counter(&self.authorizations, &[tenant.as_str(), action, policy])
            .inc();
    }
    /// Returns the counter of what a tenant's policies allowed.
    pub fn allowed(&self, tenant: &TenantName) -> Counter {
        self.shard
            .counter(&self.authorizations, &[tenant.as_str(), "allow", ""])
    }
    pub fn token(&self, result: &str) {
        self.shard.counter(&self.tokens, &[result]).inc();
    }
    pub fn verified(&self, result: &str) {
        self.shard.counter(&self.verifications, &[result]).inc();
    }
    pub fn count_ext_authz(&self, tenant: &TenantName, authorizer: &str, result: &str) {
        self.shard
            .counter(&self.authorizers, &[tenant.as_str(), authorizer, result])
            .inc();
    }
    /// Returns the counter of a tenant's CPU time.
    pub fn cpu(&self, tenant: &TenantName) -> Counter {
        self.shard.counter(&self.cpu, &[tenant.as_str()])
    }
    pub fn reauthorized(&self, result: &str) {
        self.shard.counter(&self.reopened, &[result]).inc();
    }
    pub fn refused_request(&self, fault: &ProxyError) {
        self.shard
            .counter(&self.refused_requests, &[fault.name(), fault.side().name()])
            .inc();
    }
    pub fn refused_connection(&self, reason: &str) {
        self.shard
            .counter(&self.refused_connections, &[reason])
            .inc();
    }
    pub fn refused_connect(&self, reason: &str) {
        self.shard.counter(&self.refused_connects, &[reason]).inc();
    }
    pub fn retried(&self, reason: &str) {
        self.shard.counter(&self.retries, &[reason]).inc();
    }
    pub fn retry_refused(&self, reason: &str) {
        self.shard.counter(&self.retries_refused, &[reason]).inc();
    }
    pub fn fault_delay(&self, result: &str) {
        self.shard.counter(&self.fault_delays, &[result]).inc();
    }
    pub fn mirrored(&self, result: &str) {
        self.shard.counter(&self.mirrored, &[result]).inc();
    }
    pub fn short_of(&self, what: &str) {
        self.shard.counter(&self.shortages, &[what]).inc();
    }
    pub fn late(&self, late: TimeoutKind) {
        self.timeouts[late as usize].inc();
    }

    /// Counts a connection error by its HTTP/2 error code, or as `io` if there is none.
    pub fn http2_error(&self, side: &str, e: &h2::Error) {
        let reason = match e.reason() {
            Some(h2::Reason::NO_ERROR) => return,
            Some(h2::Reason::PROTOCOL_ERROR) => "protocol_error",
            Some(h2::Reason::FLOW_CONTROL_ERROR) => "flow_control_error",
            Some(h2::Reason::SETTINGS_TIMEOUT) => "settings_timeout",
            Some(h2::Reason::FRAME_SIZE_ERROR) => "frame_size_error",
            Some(h2::Reason::COMPRESSION_ERROR) => "compression_error",
            Some(h2::Reason::ENHANCE_YOUR_CALM) => "enhance_your_calm",
            Some(_) => "other",
            None => "io",
        };
        self.shard
            .counter(&self.http2_errors, &[side, reason])
            .inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_timeout_has_its_own_counter() {
        let registry = Registry::new();
        let counts = WorkerCounters::new(&registry, &registry.shard());
        for late in TimeoutKind::ALL {
            counts.late(late);
        }
        let text = registry.render();
        for late in TimeoutKind::ALL {
            let line = format!("canal_gateway_timeouts_total{{what=\"{}\"}} 1", late.name());
            assert!(text.contains(&line), "{line} in\n{text}");
        }
    }
}
