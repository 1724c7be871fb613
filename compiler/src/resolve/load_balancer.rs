//! Resolves the load balancers of DestinationRules, for each port and subset of a service. They are
//! about quality of service: what cannot be honoured is reported, and the port has the default.

use std::collections::{BTreeMap, BTreeSet};

use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::{ServiceKey, TenantName};
use canal_model::load_balancing::{
    ConsistentHash, HASH_ENTRIES_PER_SERVICE_MAX, HashCookie, HashKey, HashTableKind,
    LOAD_BALANCERS_PER_SERVICE_MAX, LoadBalancer, MAGLEV_SIZE_DEFAULT, PortLoadBalancer,
    RING_SIZE_DEFAULT,
};
use canal_model::policy::istio::DestinationRule;
use canal_model::policy::load_balancing::{
    ConsistentHashLb, HttpCookie, LoadBalancerSettings, TrafficPolicy,
};
use canal_model::program::{Labels, Service};

use super::route_fields::FieldIssue;
use super::tenant_objects::Sourced;
use crate::diagnostic_collector::DiagnosticCollector;
use crate::names;
use crate::resource_budget::ResourceBudget;

/// Bytes that a load balancer takes in a gateway beside its hash table. Nobody measured this value.
const LOAD_BALANCER_BYTES: u64 = 1024;
/// Bytes of an entry of a ring: a hash of 8 bytes and the number of an endpoint.
const RING_ENTRY_BYTES: u64 = 10;
/// Bytes of an entry of a Maglev table: the number of an endpoint.
const MAGLEV_ENTRY_BYTES: u64 = 2;

/// Sets the load balancers of all services. Route rules must have taken their bytes of the budget
/// before: a change whose rules do not fit is refused, and without hash tables requests are served.
pub(crate) fn resolve(
    tenant: &TenantName,
    declared: &[Sourced<'_, DestinationRule>],
    services: &mut BTreeMap<ServiceKey, Service>,
    budget: &mut ResourceBudget,
    report: &mut DiagnosticCollector,
) {
    let mut by_service: BTreeMap<ServiceKey, Vec<&Sourced<'_, DestinationRule>>> = BTreeMap::new();
    for rule in declared {
        let namespace = &rule.object.metadata.namespace;
        // Rules for other hosts have an error already, of their subsets.
        let service = names::service(tenant, namespace, &rule.object.spec.host)
            .filter(|key| key.namespace == *namespace && services.contains_key(key));
        if let Some(service) = service {
            by_service.entry(service).or_default().push(rule);
        }
    }
    for (key, rules) in by_service {
        let Some(service) = services.get_mut(&key) else {
            continue;
        };
        let policies = ServicePolicies::of(&rules, report);
        policies.check_ports(service, report);
        service.load_balancers = policies.load_balancers(service, budget, report);
    }
}

/// A traffic policy, with the place where it is written.
#[derive(Clone, Copy)]
struct WrittenPolicy<'a> {
    rule: &'a Sourced<'a, DestinationRule>,
    /// Position of the subset that has the policy; `None` for the policy of the host.
    subset: Option<usize>,
    policy: &'a TrafficPolicy,
}

impl<'a> WrittenPolicy<'a> {
    fn field(&self) -> String {
        match self.subset {
            None => "spec.trafficPolicy".to_owned(),
            Some(at) => format!("spec.subsets[{at}].trafficPolicy"),
        }
    }

    /// Returns the settings for a port. The inner `None` is the default: settings of a port take the
    /// place of all others, as in Istio.
    fn settings(&self, port: u16) -> Option<Option<WrittenSettings<'a>>> {
        let written = |port_at, settings| WrittenSettings {
            policy: *self,
            port_at,
            settings,
        };
        match self.policy.of_port(port) {
            Some((at, of_port)) => {
                let settings = of_port.load_balancer.as_ref();
                Some(settings.map(|settings| written(Some(at), settings)))
            }
            None => {
                let settings = self.policy.load_balancer.as_ref()?;
                Some(Some(written(None, settings)))
            }
        }
    }
}

/// Settings of a load balancer, with the place where they are written.
#[derive(Clone, Copy)]
struct WrittenSettings<'a> {
    policy: WrittenPolicy<'a>,
    /// Position of the port among those with settings of their own.
    port_at: Option<usize>,
    settings: &'a LoadBalancerSettings,
}

impl WrittenSettings<'_> {
    fn field(&self) -> String {
        let around = self.policy.field();
        match self.port_at {
            None => format!("{around}.loadBalancer"),
            Some(at) => format!("{around}.portLevelSettings[{at}].loadBalancer"),
        }
    }

    fn warn(
        &self,
        code: Code,
        field: &str,
        problem: impl Into<String>,
        fix: &str,
        report: &mut DiagnosticCollector,
    ) {
        let field = format!("{}{field}", self.field());
        report.warning(code, self.policy.rule.document, field, problem, fix);
    }

    /// Returns the load balancer. Settings that Istio refuses are an error, and mean the default.
    fn load_balancer(&self, report: &mut DiagnosticCollector) -> LoadBalancer {
        // The fault has been reported.
        if self.policy.rule.fault(&self.field()).is_some() {
            return LoadBalancer::default();
        }
        let resolved = match (&self.settings.simple, &self.settings.consistent_hash) {
            (Some(name), None) => self.simple(name, report),
            (None, Some(hash)) => {
                consistent_hash(hash).map(|hash| LoadBalancer::ConsistentHash(Box::new(hash)))
            }
            (None, None) => Ok(LoadBalancer::default()),
            (Some(_), Some(_)) => Err(FieldIssue::new(
                "",
                "simple and consistentHash exclude each other",
                "remove one of them",
            )
            .with_code(Code::ConflictingFields)),
        };
        resolved.unwrap_or_else(|issue| {
            let field = match issue.field.as_str() {
                "" => self.field(),
                below => format!("{}.{below}", self.field()),
            };
            let problem = format!("{}; the default is used, LEAST_REQUEST", issue.problem);
            report.error(
                issue.code,
                self.policy.rule.document,
                field,
                problem,
                issue.fix,
            );
            LoadBalancer::default()
        })
    }

    fn simple(
        &self,
        name: &str,
        report: &mut DiagnosticCollector,
    ) -> Result<LoadBalancer, FieldIssue> {
        match name {
            "ROUND_ROBIN" => Ok(LoadBalancer::RoundRobin),
            "RANDOM" => Ok(LoadBalancer::Random),
            "" | "UNSPECIFIED" | "LEAST_REQUEST" | "LEAST_CONN" => Ok(LoadBalancer::LeastRequest),
            "PASSTHROUGH" => {
                self.warn(
                    Code::IgnoredField,
                    ".simple",
                    "going to the address that the client dialled is not supported in this version; LEAST_REQUEST is used",
                    "write another load balancer, or let clients dial the pods",
                    report,
                );
                Ok(LoadBalancer::LeastRequest)
            }
            other => Err(FieldIssue::new(
                "simple",
                format!("{other:?} is not a load balancer"),
                "write LEAST_REQUEST, ROUND_ROBIN or RANDOM",
            )),
        }
    }
}

/// The subset of a service, with its policy if it has one.
struct PolicySubset<'a> {
    name: &'a str,
    policy: Option<WrittenPolicy<'a>>,
}

/// Traffic policies of one service.
struct ServicePolicies<'a> {
    host: Option<WrittenPolicy<'a>>,
    /// Subsets by their labels, because endpoints are in sets of the same labels.
    subsets: BTreeMap<&'a Labels, PolicySubset<'a>>,
}

impl<'a> ServicePolicies<'a> {
    /// Merges the rules for a service as Istio does: of each policy, the first counts.
    fn of(rules: &[&'a Sourced<'a, DestinationRule>], report: &mut DiagnosticCollector) -> Self {
        let mut merged = Self {
            host: None,
            subsets: BTreeMap::new(),
        };
        let mut names = BTreeSet::new();
        for rule in rules {
            let spec = &rule.object.spec;
            let policy = |subset, policy| WrittenPolicy {
                rule,
                subset,
                policy,
            };
            match (&spec.traffic_policy, &merged.host) {
                (Some(written), None) => merged.host = Some(policy(None, written)),
                (Some(_), Some(older)) => {
                    let problem = format!(
                        "the traffic policy of {} is written in DestinationRule {} too, which is older and counts",
                        spec.host, older.rule.object.metadata.name
                    );
                    report.warning(
                        Code::ConflictingFields,
                        rule.document,
                        "spec.trafficPolicy",
                        problem,
                        "write it in one DestinationRule",
                    );
                }
                // A rule without a policy leaves it to the others.
                (None, _) => {}
            }
            for (at, subset) in spec.subsets.iter().enumerate() {
                // A name that is defined before has an error already, and so has a broken subset,
                // whose requests fail.
                let is_broken = rule.fault(&format!("spec.subsets[{at}]")).is_some();
                if !names.insert(&subset.name) || is_broken {
                    continue;
                }
                let own = PolicySubset {
                    name: &subset.name,
                    policy: subset
                        .traffic_policy
                        .as_ref()
                        .map(|written| policy(Some(at), written)),
                };
                merged.add_subset(&subset.labels, own, report);
            }
        }
        merged
    }

    fn add_subset(
        &mut self,
        labels: &'a Labels,
        own: PolicySubset<'a>,
        report: &mut DiagnosticCollector,
    ) {
        // A subset without labels is the whole service.
        let other = match self.subsets.get(labels) {
            Some(other) => format!("subset {:?}", other.name),
            None if labels.is_empty() => "the service".to_owned(),
            None => {
                self.subsets.insert(labels, own);
                return;
            }
        };
        let sets_load_balancer = |written: &WrittenPolicy<'_>| {
            let policy = written.policy;
            let mut of_ports = policy.port_level_settings.iter();
            policy.load_balancer.is_some() || of_ports.any(|it| it.load_balancer.is_some())
        };
        let Some(policy) = own.policy.filter(sets_load_balancer) else {
            return;
        };
        let problem = format!(
            "subset {:?} has the endpoints of {other}, whose load balancer is used",
            own.name
        );
        report.warning(
            Code::ConflictingFields,
            policy.rule.document,
            policy.field(),
            problem,
            "write the load balancer there",
        );
    }

    /// Reports settings for ports that the service does not have.
    fn check_ports(&self, service: &Service, report: &mut DiagnosticCollector) {
        let of_subsets = self.subsets.values().filter_map(|subset| subset.policy);
        for written in self.host.into_iter().chain(of_subsets) {
            for (at, settings) in written.policy.port_level_settings.iter().enumerate() {
                let number = settings.port.as_ref().map(|port| port.number.get());
                if number.is_some_and(|number| service.ports.iter().any(|it| it.port == number)) {
                    continue;
                }
                let (document, field) = (written.rule.document, written.field());
                let field = format!("{field}.portLevelSettings[{at}]");
                // A port that could not be parsed has a diagnostic already.
                if written.rule.fault(&field).is_some() {
                    continue;
                }
                let problem = match number {
                    Some(number) => format!("the service has no TCP port {number}"),
                    None => "the settings name no port".to_owned(),
                };
                report.warning(
                    Code::IneffectiveField,
                    document,
                    field,
                    problem,
                    "write port.number, one of the service's",
                );
            }
        }
    }

    /// Returns the load balancers that differ from the default, and count within the limits.
    fn load_balancers(
        &self,
        service: &Service,
        budget: &mut ResourceBudget,
        report: &mut DiagnosticCollector,
    ) -> Vec<PortLoadBalancer> {
        let all = Labels::new();
        let whole = (&all, None);
        let subsets = self.subsets.iter();
        let subsets: Vec<_> = std::iter::once(whole)
            .chain(subsets.map(|(labels, subset)| (*labels, subset.policy)))
            .collect();
        let mut limits = ServiceLimits {
            policies: 0,
            entries: 0,
            budget,
        };
        let mut resolved = Vec::new();
        for port in &service.ports {
            // A tenant may write thousands of subsets, and settings of as many ports: the settings of the
            // host are found once for all subsets.
            let of_host = self.host.and_then(|host| host.settings(port.port));
            for (labels, policy) in &subsets {
                let of_subset = policy.and_then(|policy| policy.settings(port.port));
                // No policy is written for this port, so it has the default.
                let Some(written) = of_subset.or(of_host).flatten() else {
                    continue;
                };
                // The limit is reported once, and what follows would exceed it too.
                if !limits.admits_another(&written, report) {
                    return resolved;
                }
                let load_balancer = written.load_balancer(report);
                if load_balancer != LoadBalancer::default()
                    && limits.admits(&load_balancer, &written, report)
                {
                    resolved.push(PortLoadBalancer {
                        port: port.port,
                        subset: (*labels).clone(),
                        load_balancer,
                    });
                }
            }
        }
        resolved
    }
}

/// What the load balancers of one service take so far.
struct ServiceLimits<'b> {
    /// Ports and subsets with settings.
    policies: usize,
    /// Entries of hash tables.
    entries: u32,
    budget: &'b mut ResourceBudget,
}

impl ServiceLimits<'_> {
    fn admits_another(
        &mut self,
        written: &WrittenSettings<'_>,
        report: &mut DiagnosticCollector,
    ) -> bool {
        self.policies += 1;
        let is_within = self.policies <= LOAD_BALANCERS_PER_SERVICE_MAX;
        if !is_within {
            let problem = format!(
                "the service has more than {LOAD_BALANCERS_PER_SERVICE_MAX} load balancers, one for each port and subset; the rest have the default, LEAST_REQUEST"
            );
            written.warn(
                Code::LimitExceeded,
                "",
                problem,
                "write fewer subsets, or split the service",
                report,
            );
        }
        is_within
    }

    /// Counts the load balancer. What exceeds a limit is reported, and not counted.
    fn admits(
        &mut self,
        load_balancer: &LoadBalancer,
        written: &WrittenSettings<'_>,
        report: &mut DiagnosticCollector,
    ) -> bool {
        let LoadBalancer::ConsistentHash(hash) = load_balancer else {
            return true;
        };
        let entries = self.entries.saturating_add(hash.table.entries());
        if entries > HASH_ENTRIES_PER_SERVICE_MAX {
            let problem = format!(
                "the hash tables of the service have more than {HASH_ENTRIES_PER_SERVICE_MAX} entries; the default is used, LEAST_REQUEST"
            );
            written.warn(
                Code::LimitExceeded,
                ".consistentHash",
                problem,
                "write a smaller ring or table, or hash for fewer ports and subsets",
                report,
            );
            return false;
        }
        if !self.budget.take_route_table(bytes(hash.table)) {
            written.warn(
                Code::LimitExceeded,
                ".consistentHash",
                "the hash table exceeds the tenant's share routeTableBytes; the default is used, LEAST_REQUEST",
                "write a smaller ring or table, or ask the provider for a larger share",
                report,
            );
            return false;
        }
        self.entries = entries;
        true
    }
}

/// Returns the bytes that a load balancer with this table takes in a gateway.
fn bytes(table: HashTableKind) -> u64 {
    let of_entry = match table {
        HashTableKind::Ring { .. } => RING_ENTRY_BYTES,
        HashTableKind::Maglev { .. } => MAGLEV_ENTRY_BYTES,
    };
    LOAD_BALANCER_BYTES + of_entry * u64::from(table.entries())
}

/// Resolves a load balancer that hashes.
///
/// # Errors
/// Istio refuses the settings.
fn consistent_hash(written: &ConsistentHashLb) -> Result<ConsistentHash, FieldIssue> {
    Ok(ConsistentHash {
        key: hash_key(written)?,
        table: hash_table(written)?,
    })
}

fn hash_key(written: &ConsistentHashLb) -> Result<HashKey, FieldIssue> {
    let header = written.http_header_name.as_ref();
    let query = written.http_query_parameter_name.as_ref();
    let keys = [
        header.map(|name| HashKey::Header(name.to_ascii_lowercase())),
        written.http_cookie.as_ref().map(cookie),
        written.use_source_ip.then_some(HashKey::SourceIp),
        query.map(|name| HashKey::QueryParameter(name.clone())),
    ];
    let mut keys = keys.into_iter().flatten();
    let (Some(key), None) = (keys.next(), keys.next()) else {
        return Err(FieldIssue::new(
            "consistentHash",
            "exactly one part of the request can be hashed",
            "write one of httpHeaderName, httpCookie, useSourceIp, httpQueryParameterName",
        ));
    };
    if !key.is_valid() {
        return Err(FieldIssue::new(
            "consistentHash",
            "the name or path is empty, or has characters that it cannot have",
            "write the name of a header, cookie or query parameter, and a cookie's path without ;",
        ));
    }
    Ok(key)
}

fn cookie(written: &HttpCookie) -> HashKey {
    HashKey::Cookie(HashCookie {
        name: written.name.clone(),
        path: written.path.clone(),
        // Envoy uses whole seconds.
        ttl_seconds: written.ttl.map(|ttl| ttl.0.as_secs()),
    })
}

fn hash_table(written: &ConsistentHashLb) -> Result<HashTableKind, FieldIssue> {
    let size = |size: u64, unset: u32| match size {
        0 => unset,
        // What is too large is reported by its limit.
        size => u32::try_from(size).unwrap_or(u32::MAX),
    };
    let table = match (&written.ring_hash, &written.maglev) {
        (Some(_), Some(_)) => {
            return Err(FieldIssue::new(
                "consistentHash",
                "ringHash and maglev exclude each other",
                "remove one of them",
            )
            .with_code(Code::ConflictingFields));
        }
        (None, Some(maglev)) => HashTableKind::Maglev {
            size: size(maglev.table_size, MAGLEV_SIZE_DEFAULT),
        },
        (Some(ring), None) => HashTableKind::Ring {
            size_min: size(ring.minimum_ring_size, RING_SIZE_DEFAULT),
        },
        (None, None) => HashTableKind::Ring {
            size_min: size(written.minimum_ring_size, RING_SIZE_DEFAULT),
        },
    };
    // Tables within the limit are invalid only if their size is no prime.
    if table.entries() <= HASH_ENTRIES_PER_SERVICE_MAX && !table.is_valid() {
        return Err(FieldIssue::new(
            "consistentHash.maglev.tableSize",
            format!("{} is not a prime", table.entries()),
            "write a prime, such as 65537",
        ));
    }
    Ok(table)
}
