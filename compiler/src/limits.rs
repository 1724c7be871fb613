//! How much one tenant may say. What data planes check too stands in [`canal_model::limits`]. What goes beyond fails closed with a diagnostic; each limit is reached by a test.

pub use canal_model::limits::{UDP_PORTS_PER_WORKLOAD_MAX, WEIGHT_MAX};

/// Objects of one tenant, from all sources together.
pub const OBJECTS_PER_TENANT_MAX: usize = 100_000;
/// Rules of one route object (Gateway API allows 16).
pub const RULES_PER_ROUTE_MAX: usize = 1024;
/// Matches of one rule (Gateway API allows 64).
pub const MATCHES_PER_RULE_MAX: usize = 1024;
/// Conditions on headers, and on query parameters, of one match (Gateway API allows 16).
pub const CONDITIONS_PER_MATCH_MAX: usize = 64;
/// Backends of one rule (Gateway API allows 16).
pub const BACKENDS_PER_RULE_MAX: usize = 256;
/// Hosts of one route object (Gateway API allows 16).
pub const HOSTS_PER_ROUTE_MAX: usize = 256;
/// Ranges of a tenant's gateway addresses.
pub const GATEWAY_RANGES_MAX: usize = 16;
/// Name servers that a tenant's pods may ask; as many as a pod guard holds.
pub const RESOLVERS_MAX: usize = 64;
/// Nodes of one tenant that the edges know (Kubernetes' own limit is 5,000).
pub const NODES_PER_TENANT_MAX: usize = 8192;
/// Pod ranges of one node (Kubernetes has two, one of each family).
pub const RANGES_PER_NODE_MAX: usize = 8;
/// Throttles of one tenant; a replica has room for 32,768 in all.
pub const THROTTLES_PER_TENANT_MAX: usize = 4096;
/// Services that one policy names.
pub const TARGETS_PER_POLICY_MAX: usize = 16;
/// Addresses of JWT key sets of one tenant; each is fetched by the controller.
pub const JWKS_URIS_PER_TENANT_MAX: usize = 64;
/// Length of such an address, in bytes.
pub const JWKS_URI_BYTES_MAX: usize = 2048;
/// Other tenants with which one federates.
pub const FEDERATIONS_PER_TENANT_MAX: usize = 64;
/// A tenant's own key servers.
pub const KEY_SERVERS_PER_TENANT_MAX: usize = 64;
/// Ports of one service.
pub const PORTS_PER_SERVICE_MAX: usize = 256;
/// Length of a path, header value or other text that is compared with a request, in bytes.
pub const TEXT_BYTES_MAX: usize = 4096;
/// Length of a regular expression, in bytes.
pub const REGEX_BYTES_MAX: usize = 1024;
/// Depth of groups, classes and repetitions in a regular expression; less than a gateway grants.
pub const REGEX_NESTING_MAX: u32 = 90;
/// Memory of a regular expression's automaton, in bytes: `(a{500}){500}` is short and has a quarter of a million states.
pub const REGEX_AUTOMATON_BYTES_MAX: usize = 256 << 10;
/// Memory of all regular expressions of one service's rules, in bytes; less than a gateway grants.
pub const REGEXES_PER_SERVICE_BYTES_MAX: usize = 3 << 20;

// One regular expression must fit into its service.
const _: () = assert!(REGEX_AUTOMATON_BYTES_MAX <= REGEXES_PER_SERVICE_BYTES_MAX);
// All shares of a rule must add up in 32 bits, wherever they are added.
const _: () = assert!((BACKENDS_PER_RULE_MAX as u64) * (WEIGHT_MAX as u64) <= u32::MAX as u64);
