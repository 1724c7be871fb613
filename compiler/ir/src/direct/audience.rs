//! Determines which nodes receive a direct endpoint: those with a workload that the endpoint's
//! policies admit at one of its ports. Pure. [`canal_oracle::authorization`] evaluates the
//! policies. This module does not decide which ports are direct.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use canal_model::authorization::{Attribute, Authorization};
use canal_model::identity::Identity;
use canal_model::ids::{Namespace, NodeName, ServiceAccount, ServiceKey};
use canal_model::program::{DirectAudience, TunnelProtocol, Workload};

use crate::ir::Ir;
use crate::limits::DIRECT_EVALUATIONS_PER_TENANT_MAX;
use canal_oracle::authorization::{
    OracleDecision, OracleDestination, OracleFacts, OracleValue, decide, is_for,
};

/// Workloads that no policy distinguishes, and their nodes.
struct Source<'a> {
    namespace: &'a Namespace,
    service_account: &'a ServiceAccount,
    /// Address of the workload; `None` if no policy depends on the source address.
    address: Option<IpAddr>,
    nodes: BTreeSet<&'a NodeName>,
}

/// The input that determines an audience. It has the policies by index, and the port that they
/// apply to, for each path to the workload. It also has the destination's addresses if a policy
/// depends on them. Equal inputs share one cached audience.
type AudienceKey = (BTreeSet<(Vec<usize>, u16)>, Vec<IpAddr>);

/// The audiences of one tenant's workloads.
pub(super) struct Audiences<'a> {
    ir: &'a Ir,
    policies: Vec<&'a Authorization>,
    sources: Vec<Source<'a>>,
    /// True if a policy depends on the destination's address.
    by_destination: bool,
    cache: HashMap<AudienceKey, DirectAudience>,
    evaluations: usize,
}

impl<'a> Audiences<'a> {
    pub(super) fn new(ir: &'a Ir) -> Self {
        let policies: Vec<&Authorization> = ir
            .security
            .authorizations
            .iter()
            .filter(|policy| !policy.dry_run)
            .collect();
        let observes =
            |attribute: Attribute| policies.iter().any(|policy| observes(policy, &attribute));
        let (by_source, by_destination) = (
            observes(Attribute::SourceAddress),
            observes(Attribute::DestinationAddress),
        );
        let sources = sources(ir, by_source);
        Self {
            ir,
            policies,
            sources,
            by_destination,
            cache: HashMap::new(),
            evaluations: 0,
        }
    }

    /// Returns the nodes that receive the endpoint of `workload`. `access_paths` are the workload's
    /// own ports, each reached through a service or by the workload's address.
    ///
    /// After [`DIRECT_EVALUATIONS_PER_TENANT_MAX`] evaluations no node receives the remaining
    /// endpoints, so gateways carry their connections.
    pub(super) fn of(
        &mut self,
        workload: &Workload,
        access_paths: &[(Option<&ServiceKey>, u16)],
    ) -> DirectAudience {
        let policies_by_port = access_paths
            .iter()
            .map(|(service, port)| (self.policies_for(workload, *service), *port))
            .collect::<BTreeSet<_>>();
        // A port without policies admits every client, so all nodes of the tenant receive the
        // endpoint.
        if policies_by_port
            .iter()
            .any(|(policies, _)| policies.is_empty())
        {
            return DirectAudience::Tenant;
        }
        let key: AudienceKey = (
            policies_by_port,
            // Endpoints share a result unless a policy distinguishes their addresses.
            if self.by_destination {
                workload.addresses.clone()
            } else {
                Vec::new()
            },
        );
        if let Some(known) = self.cache.get(&key) {
            return known.clone();
        }
        // Each source is evaluated against each distinct list of policies.
        self.evaluations = self
            .evaluations
            .saturating_add(self.sources.len() * key.0.len());
        // No node gets the endpoint then, so gateways carry its connections.
        if self.evaluations > DIRECT_EVALUATIONS_PER_TENANT_MAX {
            return DirectAudience::Nodes(Arc::default());
        }
        let admitted = self
            .sources
            .iter()
            .filter(|source| self.admits(&key, source));
        let audience = DirectAudience::Nodes(Arc::new(
            admitted
                .flat_map(|source| source.nodes.iter().copied().cloned())
                .collect(),
        ));
        self.cache.insert(key, audience.clone());
        audience
    }

    fn policies_for(&self, workload: &Workload, service: Option<&ServiceKey>) -> Vec<usize> {
        let place = OracleDestination {
            workload: Some((&workload.namespace, &workload.labels)),
            service,
        };
        let applies =
            |(at, policy): (usize, &&Authorization)| is_for(&policy.target, &place).then_some(at);
        self.policies
            .iter()
            .enumerate()
            .filter_map(applies)
            .collect()
    }

    fn admits(&self, (access_paths, addresses): &AudienceKey, source: &Source<'_>) -> bool {
        access_paths.iter().any(|(numbers, port)| {
            let policies: Vec<&Authorization> = numbers
                .iter()
                .filter_map(|at| self.policies.get(*at).copied())
                .collect();
            let verdict = decide(
                &policies,
                &self.facts(source, *port, addresses),
                &BTreeSet::new(),
            );
            !matches!(verdict, OracleDecision::Deny { .. })
        })
    }

    /// Returns the facts that the destination's node would observe about a connection.
    fn facts(&self, source: &Source<'_>, port: u16, addresses: &[IpAddr]) -> OracleFacts {
        let identity = Identity {
            trust_domain: self.ir.tenant.trust_domain.clone(),
            namespace: source.namespace.clone(),
            service_account: source.service_account.clone(),
        };
        let mut facts = OracleFacts::default();
        let mut see = |attribute, values| drop(facts.values.insert(attribute, values));
        // Istio writes principals without the scheme.
        see(
            Attribute::SourcePrincipal,
            vec![OracleValue::Text(identity.to_string().replacen(
                "spiffe://",
                "",
                1,
            ))],
        );
        see(
            Attribute::SourceNamespace,
            vec![OracleValue::Text(source.namespace.to_string())],
        );
        see(
            Attribute::SourceServiceAccount,
            vec![OracleValue::Text(format!(
                "{}/{}",
                source.namespace, source.service_account
            ))],
        );
        see(
            Attribute::SourceAddress,
            source
                .address
                .into_iter()
                .map(OracleValue::Address)
                .collect(),
        );
        see(Attribute::DestinationPort, vec![OracleValue::Port(port)]);
        see(
            Attribute::DestinationAddress,
            addresses
                .iter()
                .copied()
                .map(OracleValue::Address)
                .collect(),
        );
        facts
    }
}

fn observes(policy: &Authorization, attribute: &Attribute) -> bool {
    let lists = policy
        .rules
        .iter()
        .flat_map(|rule| rule.from.iter().chain(&rule.to).chain([&rule.when]));
    lists.flatten().any(|clause| clause.attribute == *attribute)
}

/// Returns all workloads that can open direct connections, grouped by address only if policies
/// depend on it. Workloads on nodes without a proxy cannot open direct connections.
fn sources(ir: &Ir, by_address: bool) -> Vec<Source<'_>> {
    let mut all: BTreeMap<(&Namespace, &ServiceAccount, Option<IpAddr>), BTreeSet<&NodeName>> =
        BTreeMap::new();
    for workload in ir
        .workloads
        .iter()
        .filter(|workload| workload.tunnel == TunnelProtocol::Hbone)
    {
        let told_apart: Vec<Option<IpAddr>> = match by_address {
            true => workload.addresses.iter().copied().map(Some).collect(),
            false => vec![None],
        };
        for address in told_apart {
            all.entry((&workload.namespace, &workload.service_account, address))
                .or_default()
                .insert(&workload.node);
        }
    }
    all.into_iter()
        .map(|((namespace, service_account, address), nodes)| Source {
            namespace,
            service_account,
            address,
            nodes,
        })
        .collect()
}
