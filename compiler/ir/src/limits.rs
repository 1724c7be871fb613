//! Limits of one tenant's objects. Limits that data planes check too are in
//! [`canal_model::limits`]. Input beyond a limit fails closed with a diagnostic. A test reaches
//! each limit.

pub use canal_model::limits::{
    DIRECT_PORTS_PER_WORKLOAD_MAX, UDP_PORTS_PER_WORKLOAD_MAX, WEIGHT_MAX,
};

/// Maximum number of objects of one tenant, from all sources together.
pub const OBJECTS_PER_TENANT_MAX: usize = 100_000;
/// Maximum number of errors of one tenant that are reported one by one, and of warnings.
pub const DIAGNOSTICS_OF_SEVERITY_MAX: usize = 10_000;
/// Maximum number of rules of one route object (Gateway API allows 16).
pub const RULES_PER_ROUTE_MAX: usize = 1024;
/// Maximum number of matches of one rule (Gateway API allows 64).
pub const MATCHES_PER_RULE_MAX: usize = 1024;
/// Maximum number of conditions on headers, and on query parameters, of one match (Gateway API
/// allows 16).
pub const CONDITIONS_PER_MATCH_MAX: usize = 64;
/// Maximum number of headers that one filter of a rule sets, adds and removes together (Gateway API
/// allows 16 of each).
pub const HEADER_CHANGES_PER_RULE_MAX: usize = 64;
/// Maximum length of the body of a direct response, in bytes (as Envoy's default).
pub const DIRECT_RESPONSE_BODY_BYTES_MAX: usize = 4096;
/// Maximum number of backends of one rule (Gateway API allows 16).
pub const BACKENDS_PER_RULE_MAX: usize = 256;
/// Maximum number of mirrors of one rule. Further ones get no requests.
pub const MIRRORS_PER_RULE_MAX: usize = 8;
/// Maximum number of hosts of one route object (Gateway API allows 16).
pub const HOSTS_PER_ROUTE_MAX: usize = 256;
/// Maximum number of matches that gateways compile for the hosts of a tenant's listeners: those of
/// each distinct set of routes that is on a host of a Gateway.
pub const HOST_MATCHES_PER_TENANT_MAX: usize = 262_144;
/// Maximum number of gateway ranges of a tenant.
pub const GATEWAY_RANGES_MAX: usize = 16;
/// Maximum number of name servers that a tenant's pods may query: the capacity of the pod's BPF
/// map.
pub const RESOLVERS_MAX: usize = 64;
/// Maximum number of ready endpoints of one direct service; a service with more uses gateways.
pub const DIRECT_ENDPOINTS_PER_SERVICE_MAX: usize = 256;
/// Maximum number of ready workloads of one tenant to which its nodes connect directly. Services
/// are taken in order of their keys, and the rest use gateways.
pub const DIRECT_ENDPOINTS_PER_TENANT_MAX: usize = 4096;
/// Maximum number of evaluations (of a source at a port) that determine which nodes receive direct
/// endpoints. No node receives the remaining endpoints, and gateways carry their connections.
pub const DIRECT_EVALUATIONS_PER_TENANT_MAX: usize = 250_000;
/// Maximum number of nodes of one tenant that the edges receive (Kubernetes' own limit is 5,000).
pub const NODES_PER_TENANT_MAX: usize = 8192;
/// Maximum number of pod ranges of one node (Kubernetes has two, one of each family).
pub const RANGES_PER_NODE_MAX: usize = 8;
/// Maximum number of throttles of one tenant; a replica's map holds 32,768 in total.
pub const THROTTLES_PER_TENANT_MAX: usize = 4096;
/// Maximum number of OffloadPreferences of one tenant.
pub const OFFLOAD_PREFERENCES_PER_TENANT_MAX: usize = 1024;
/// Maximum number of comparisons of OffloadPreferences' selectors with workloads of one tenant; a
/// preference beyond it is left out.
pub const OFFLOAD_COMPARISONS_PER_TENANT_MAX: usize = 1_000_000;
/// Maximum number of comparisons that merging the delegates of one tenant's VirtualServices may
/// cost: matches of the rule that delegates times those of the delegate's rule, for each host and
/// Gateway. One takes about 160 ns, so that all take less than a second.
pub const DELEGATION_COMPARISONS_PER_TENANT_MAX: usize = 4_000_000;
/// Maximum number of TrafficPriorities of one tenant.
pub const TRAFFIC_PRIORITIES_PER_TENANT_MAX: usize = 64;
/// Maximum number of rules of one TrafficPriority.
pub const RULES_PER_PRIORITY_MAX: usize = 64;
/// Maximum number of matches of all TrafficPriorities of one tenant.
pub const PRIORITY_MATCHES_PER_TENANT_MAX: usize = 4096;
/// Maximum number of principals that one TrafficPriority lets name a class.
pub const ASSERTING_PRINCIPALS_MAX: usize = 64;
/// Maximum number of Services that one policy may target.
pub const TARGETS_PER_POLICY_MAX: usize = 16;
/// Maximum number of URIs of JWT key sets of one tenant; the controller fetches each.
pub const JWKS_URIS_PER_TENANT_MAX: usize = 64;
/// Maximum length of the URI of a key set, in bytes.
pub const JWKS_URI_BYTES_MAX: usize = 2048;
/// Maximum number of other tenants with which one tenant federates.
pub const FEDERATIONS_PER_TENANT_MAX: usize = 64;
/// Maximum number of a tenant's own key servers.
pub const KEY_SERVERS_PER_TENANT_MAX: usize = 64;
/// Maximum number of ports of one service.
pub const PORTS_PER_SERVICE_MAX: usize = 256;
/// Maximum number of addresses of one EndpointSlice or Endpoints (as in Kubernetes).
pub const ENDPOINT_ADDRESSES_MAX: usize = 1000;
/// Maximum number of ports of one EndpointSlice or Endpoints (as in Kubernetes).
pub const ENDPOINT_PORTS_MAX: usize = 100;
/// Maximum length of a path, header value or other text that is compared with a request, in bytes.
pub const TEXT_BYTES_MAX: usize = 4096;
/// Maximum length of a regular expression, in bytes.
pub const REGEX_BYTES_MAX: usize = 1024;
/// Maximum depth of groups, classes and repetitions in a regular expression; less than a gateway
/// allows.
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
