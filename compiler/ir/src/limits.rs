//! Limits of one tenant's objects. Limits that data planes check too are in
//! [`canal_model::limits`]. Input beyond a limit fails closed with a diagnostic. A test reaches
//! each limit.

pub use canal_model::limits::{
    DIRECT_PORTS_PER_WORKLOAD_MAX, UDP_PORTS_PER_WORKLOAD_MAX, WEIGHT_MAX,
};

/// Maximum number of objects of one tenant, from all sources together.
/// These are about 10,000 services with ten objects each. The store has capacity for twice as many
/// (`canal_store::OBJECTS_PER_TENANT_MAX`).
pub const OBJECTS_PER_TENANT_MAX: usize = 100_000;
/// Maximum number of errors of one tenant that are reported one by one, and of warnings.
/// An answer to `canal apply` has 4 MiB for them (`DIAGNOSTICS_BYTES_MAX`), 400 bytes each.
pub const DIAGNOSTICS_OF_SEVERITY_MAX: usize = 10_000;
/// Maximum number of rules of one route object (Gateway API allows 16).
/// It is larger because Istio sets no limit on a VirtualService. `routeTableBytes` bounds what all
/// rules of a tenant take.
pub const RULES_PER_ROUTE_MAX: usize = 1024;
/// Maximum number of matches of one rule (Gateway API allows 64).
/// It is larger for the reason of [`RULES_PER_ROUTE_MAX`].
pub const MATCHES_PER_RULE_MAX: usize = 1024;
/// Maximum number of conditions on headers, and on query parameters, of one match (Gateway API
/// allows 16).
/// It is larger for the reason of [`RULES_PER_ROUTE_MAX`].
pub const CONDITIONS_PER_MATCH_MAX: usize = 64;
/// Maximum number of headers that one filter of a rule sets, adds and removes together (Gateway API
/// allows 16 of each).
/// It is larger than the sum of these for the reason of [`RULES_PER_ROUTE_MAX`].
pub const HEADER_CHANGES_PER_RULE_MAX: usize = 64;
/// Maximum length of the body of a direct response, in bytes (as Envoy's default).
pub const DIRECT_RESPONSE_BODY_BYTES_MAX: usize = 4096;
/// Maximum number of backends of one rule (Gateway API allows 16).
/// It is larger for the reason of [`RULES_PER_ROUTE_MAX`]. With the largest weights, the sum fits
/// into 32 bits (asserted below).
pub const BACKENDS_PER_RULE_MAX: usize = 256;
/// Maximum number of mirrors of one rule and its backends together. Further ones get no requests.
/// Each request costs one more for each of them. Nobody measured this value.
pub const MIRRORS_PER_RULE_MAX: usize = 8;
/// Maximum number of hosts of one route object (Gateway API allows 16).
/// It is larger for the reason of [`RULES_PER_ROUTE_MAX`].
pub const HOSTS_PER_ROUTE_MAX: usize = 256;
/// Maximum number of matches that gateways compile for the hosts of a tenant's listeners: those of
/// each distinct set of routes that is on a host of a Gateway.
/// Nobody measured this value. The tables of all of them have 32 MiB beside paths
/// (`HOST_ENTRY_BYTES`), a quarter of the default share `routeTableBytes`.
pub const HOST_MATCHES_PER_TENANT_MAX: usize = 262_144;
/// Maximum number of gateway ranges of a tenant.
/// A range in use stays as it is, so a tenant appends one when all are full. Nobody measured this
/// value.
pub const GATEWAY_RANGES_MAX: usize = 16;
/// Maximum number of name servers that a tenant's pods may query: the capacity of the pod's BPF
/// map.
pub const RESOLVERS_MAX: usize = 64;
/// Maximum number of ready endpoints of one direct service; a service with more uses gateways.
/// A node receives all of them, so that a change of a large service costs many nodes much. Nobody
/// measured this value.
pub const DIRECT_ENDPOINTS_PER_SERVICE_MAX: usize = 256;
/// Maximum number of ready workloads of one tenant to which its nodes connect directly. Services
/// are taken in order of their keys, and the rest use gateways.
/// These are 16 services of the largest size ([`DIRECT_ENDPOINTS_PER_SERVICE_MAX`]).
pub const DIRECT_ENDPOINTS_PER_TENANT_MAX: usize = 4096;
/// Maximum number of evaluations (of a source at a port) that determine which nodes receive direct
/// endpoints. No node receives the remaining endpoints, and gateways carry their connections.
/// It bounds the time that they add to a compilation. Nobody measured this value.
pub const DIRECT_EVALUATIONS_PER_TENANT_MAX: usize = 250_000;
/// Maximum number of nodes of one tenant that the edges receive (Kubernetes' own limit is 5,000).
/// With [`RANGES_PER_NODE_MAX`] of each, they would fill the edges' map of pod ranges
/// (`CANAL_PREFIXES_MAX`, 65,536).
pub const NODES_PER_TENANT_MAX: usize = 8192;
/// Maximum number of pod ranges of one node (Kubernetes has two, one of each family).
/// Nobody measured this value; see [`NODES_PER_TENANT_MAX`].
pub const RANGES_PER_NODE_MAX: usize = 8;
/// Maximum number of throttles of one tenant; a replica's map holds 32,768 in total.
/// So one tenant takes an eighth of it at most.
pub const THROTTLES_PER_TENANT_MAX: usize = 4096;
/// Maximum number of OffloadPreferences of one tenant.
/// Nobody measured this value; [`OFFLOAD_COMPARISONS_PER_TENANT_MAX`] bounds the time that they
/// cost.
pub const OFFLOAD_PREFERENCES_PER_TENANT_MAX: usize = 1024;
/// Maximum number of comparisons of OffloadPreferences' selectors with workloads of one tenant; a
/// preference beyond it is left out.
/// All 1,024 preferences can be compared with about 1,000 workloads, as many as one full node has.
pub const OFFLOAD_COMPARISONS_PER_TENANT_MAX: usize = 1_000_000;
/// Maximum number of comparisons that merging the delegates of one tenant's VirtualServices may
/// cost: matches and conditions of the rule that delegates times those of the delegate's rule, and the
/// copies of both rules, for each host and Gateway. One takes about 160 ns, so that all take less than
/// a second.
pub const DELEGATION_COMPARISONS_PER_TENANT_MAX: usize = 4_000_000;
/// Maximum number of TrafficPriorities of one tenant.
/// Nobody measured this value.
pub const TRAFFIC_PRIORITIES_PER_TENANT_MAX: usize = 64;
/// Maximum number of rules of one TrafficPriority.
/// Nobody measured this value.
pub const RULES_PER_PRIORITY_MAX: usize = 64;
/// Maximum number of matches of all TrafficPriorities of one tenant.
/// These are one match for each of 64 rules of 64 TrafficPriorities.
pub const PRIORITY_MATCHES_PER_TENANT_MAX: usize = 4096;
/// Maximum number of principals that one TrafficPriority lets name a class.
/// Each is compared with the client of a request. Nobody measured this value.
pub const ASSERTING_PRINCIPALS_MAX: usize = 64;
/// Maximum number of Services that one policy may target.
/// Istio's CRDs allow as many `targetRefs`.
pub const TARGETS_PER_POLICY_MAX: usize = 16;
/// Maximum number of URIs of JWT key sets of one tenant; the controller fetches each.
/// With sets of the largest size, they take 16 MiB (`JWKS_BYTES_MAX`).
pub const JWKS_URIS_PER_TENANT_MAX: usize = 64;
/// Maximum length of the URI of a key set, in bytes.
/// Istio's CRD of RequestAuthentication has the same limit.
pub const JWKS_URI_BYTES_MAX: usize = 2048;
/// Maximum number of other tenants with which one tenant federates.
/// Data planes of the tenant receive the trust bundle of each. Nobody measured this value.
pub const FEDERATIONS_PER_TENANT_MAX: usize = 64;
/// Maximum number of a tenant's own key servers.
/// Nobody measured this value.
pub const KEY_SERVERS_PER_TENANT_MAX: usize = 64;
/// Maximum number of ports of one service.
/// Kubernetes sets no limit. Nobody measured this value.
pub const PORTS_PER_SERVICE_MAX: usize = 256;
/// Maximum number of addresses of one EndpointSlice or Endpoints (as in Kubernetes).
pub const ENDPOINT_ADDRESSES_MAX: usize = 1000;
/// Maximum number of ports of one EndpointSlice or Endpoints (as in Kubernetes).
pub const ENDPOINT_PORTS_MAX: usize = 100;
/// Maximum length of a path, header value or other text that is compared with a request, in bytes.
/// Gateway API allows as many for the value of a header.
pub const TEXT_BYTES_MAX: usize = 4096;
/// Maximum length of a regular expression, in bytes.
/// Gateway API allows as many for a path. A gateway allows 4 KiB, so that it never refuses what was
/// compiled.
pub const REGEX_BYTES_MAX: usize = 1024;
/// Maximum depth of groups, classes and repetitions in a regular expression; less than a gateway
/// allows.
/// A gateway's limit is 100 (`dataplane/router/src/regexes.rs`), and it nests some expressions in
/// groups of its own.
pub const REGEX_NESTING_MAX: u32 = 90;
/// Maximum memory of a regular expression's automaton, in bytes: `(a{500}){500}` is short and has a
/// quarter of a million states.
pub const REGEX_AUTOMATON_BYTES_MAX: usize = 256 << 10;
/// Maximum memory of all regular expressions of one service's rules, in bytes; less than a gateway
/// allows.
pub const REGEXES_PER_SERVICE_BYTES_MAX: usize = 3 << 20;

// The largest allowed regular expression must fit into the budget of its service.
const _: () = assert!(REGEX_AUTOMATON_BYTES_MAX <= REGEXES_PER_SERVICE_BYTES_MAX);
// The sum of all weights of a rule must fit into 32 bits.
const _: () = assert!((BACKENDS_PER_RULE_MAX as u64) * (WEIGHT_MAX as u64) <= u32::MAX as u64);
