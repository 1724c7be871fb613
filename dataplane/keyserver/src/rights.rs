//! Who may use which key, by what the controller said last: tenants' key policies and entitlements. Pure; keys and channels are elsewhere.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use canal_model::identity::{COMPONENTS, Identity, gateway_identity};
use canal_model::ids::{NodeName, ReplicaName, TenantName, TrustDomain};
use canal_model::program::{Kind, Resource};
use canal_model::trust::{KeyAlgorithm, KeyPlace, Requester};
use canal_wire::keyrpc::{KeyName, Refusal};

/// Who is at the other end of a channel, as its certificate proved.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Caller {
    pub requester: Requester,
    /// The tenant of a node; gateways are the provider's.
    pub tenant: Option<TenantName>,
}

impl Caller {
    /// Reads a component's identity as `canal_model::identity::component_identity` writes it; `None`: not of those who may ask.
    pub fn of(identity: &Identity) -> Option<Self> {
        if identity.trust_domain.as_str() != COMPONENTS {
            return None;
        }
        let (namespace, account) = (identity.namespace.as_str(), identity.service_account.as_str());
        if let Some(name) = account.strip_prefix("node.") {
            let requester = Requester::Node(NodeName::new(name).ok()?);
            return Some(Self { requester, tenant: Some(TenantName::new(namespace).ok()?) });
        }
        let name = account.strip_prefix("gateway.").filter(|_| namespace == "canal-system")?;
        Some(Self { requester: Requester::Gateway(ReplicaName::new(name).ok()?), tenant: None })
    }
}

#[derive(Debug)]
struct Tenant {
    name: TenantName,
    trust_domain: TrustDomain,
    place: KeyPlace,
    algorithm: KeyAlgorithm,
    /// The resources as they were told: each is an Entitlement of this tenant.
    entitlements: HashMap<Requester, Arc<Resource>>,
}

/// The newest state, arranged for questions.
#[derive(Debug, Default)]
pub struct Rights {
    domains: HashMap<TrustDomain, Arc<Tenant>>,
    names: HashMap<TenantName, Arc<Tenant>>,
}

/// What a key server may have keys for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    pub tenant: TenantName,
    pub trust_domain: TrustDomain,
    pub algorithm: KeyAlgorithm,
}

impl Tenant {
    fn entitles(&self, requester: &Requester, identity: &Identity) -> bool {
        match self.entitlements.get(requester).map(|r| &**r) {
            Some(Resource::Entitlement(e)) => e.identities.binary_search(identity).is_ok(),
            _ => false,
        }
    }

    fn claim(&self) -> Claim {
        Claim { tenant: self.name.clone(), trust_domain: self.trust_domain.clone(), algorithm: self.algorithm }
    }
}

impl Rights {
    /// The kinds that a key server is told.
    pub const KINDS: [Kind; 4] = [Kind::Tenant, Kind::Bundle, Kind::Entitlement, Kind::Manifest];

    /// Of Tenants and Entitlements; others are passed over. An entitlement of a tenant that was not told is of no use.
    pub fn of<'a>(all: impl IntoIterator<Item = &'a Arc<Resource>>) -> Self {
        let mut tenants: BTreeMap<TenantName, Tenant> = BTreeMap::new();
        let mut entitlements = Vec::new();
        for resource in all {
            match &**resource {
                Resource::Tenant(t) => {
                    let tenant = Tenant {
                        name: t.name.clone(),
                        trust_domain: t.trust_domain.clone(),
                        place: t.keys.place,
                        algorithm: t.keys.algorithm,
                        entitlements: HashMap::new(),
                    };
                    tenants.insert(t.name.clone(), tenant);
                }
                Resource::Entitlement(e) => entitlements.push((e, resource)),
                _ => {}
            }
        }
        for (e, resource) in entitlements {
            if let Some(tenant) = tenants.get_mut(&e.tenant) {
                tenant.entitlements.insert(e.requester.clone(), resource.clone());
            }
        }
        let mut rights = Self::default();
        for tenant in tenants.into_values().map(Arc::new) {
            rights.domains.insert(tenant.trust_domain.clone(), tenant.clone());
            rights.names.insert(tenant.name.clone(), tenant);
        }
        rights
    }

    /// Decides whether `caller` may use a key that this key server makes.
    pub fn decide(&self, caller: &Caller, key: &KeyName) -> Result<Claim, Refusal> {
        match key {
            KeyName::Identity(identity) => {
                let tenant = self.keeper(self.domains.get(&identity.trust_domain))?;
                let own = caller.tenant.as_ref().is_none_or(|t| *t == tenant.name);
                if own && tenant.entitles(&caller.requester, identity) { Ok(tenant.claim()) } else { Err(Refusal::NotEntitled) }
            }
            KeyName::Service(service) => {
                let tenant = self.keeper(self.names.get(&service.tenant))?;
                let gateway = matches!(caller.requester, Requester::Gateway(_));
                let identity = gateway_identity(tenant.trust_domain.clone());
                if gateway && tenant.entitles(&caller.requester, &identity) { Ok(tenant.claim()) } else { Err(Refusal::NotEntitled) }
            }
            KeyName::File(_) => Err(Refusal::UnknownKey),
        }
    }

    fn keeper<'a>(&self, tenant: Option<&'a Arc<Tenant>>) -> Result<&'a Tenant, Refusal> {
        tenant.filter(|t| t.place == KeyPlace::KeyServer).map(|t| &**t).ok_or(Refusal::UnknownTenant)
    }

    /// Whether `caller` is a gateway that the controller says serves `tenant`: the condition for keyless keys.
    pub fn serves(&self, caller: &Caller, tenant: &TenantName) -> bool {
        let gateway = matches!(caller.requester, Requester::Gateway(_));
        gateway && self.names.get(tenant).is_some_and(|t| t.entitlements.contains_key(&caller.requester))
    }

    /// Every identity that some requester is entitled to, where keys are kept in key servers.
    pub fn identities(&self) -> BTreeMap<Identity, Claim> {
        let mut all = BTreeMap::new();
        for tenant in self.names.values().filter(|t| t.place == KeyPlace::KeyServer) {
            let of = |r: &Arc<Resource>| if let Resource::Entitlement(e) = &**r { e.identities.clone() } else { Vec::new() };
            let identities: BTreeSet<Identity> = tenant.entitlements.values().flat_map(of).collect();
            let own = identities.into_iter().filter(|i| i.trust_domain == tenant.trust_domain);
            all.extend(own.map(|i| (i, tenant.claim())));
        }
        all
    }

    /// Whether some gateway is entitled to the gateway identity of `tenant`, and so to certificates of its services.
    pub fn terminates(&self, tenant: &TenantName) -> Option<Claim> {
        let tenant = self.keeper(self.names.get(tenant)).ok()?;
        let identity = gateway_identity(tenant.trust_domain.clone());
        tenant.entitlements.keys().any(|r| tenant.entitles(r, &identity)).then(|| tenant.claim())
    }

    /// For `/config_dump`.
    pub fn dump(&self) -> serde_json::Value {
        let entitlements = |t: &Arc<Tenant>| -> BTreeMap<String, Vec<String>> {
            let one = |(r, e): (&Requester, &Arc<Resource>)| match &**e {
                Resource::Entitlement(e) => (r.to_string(), e.identities.iter().map(Identity::to_string).collect()),
                _ => (r.to_string(), Vec::new()),
            };
            t.entitlements.iter().map(one).collect()
        };
        let tenants: BTreeMap<String, serde_json::Value> = self
            .names
            .values()
            .map(|t| {
                let shown = serde_json::json!({
                    "trust_domain": t.trust_domain.to_string(),
                    "keys": format!("{:?}", t.place),
                    "algorithm": format!("{:?}", t.algorithm),
                    "entitlements": entitlements(t),
                });
                (t.name.to_string(), shown)
            })
            .collect();
        serde_json::json!(tenants)
    }
}

#[cfg(test)]
mod tests;
