//! [`EntitlementIndex`]: decides which requester may use which key, by the tenants' key policies and entitlements in the newest state.
//! Pure.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use canal_model::identity::{COMPONENTS, Identity, gateway_identity};
use canal_model::ids::{NodeName, ReplicaName, TenantName, TrustDomain};
use canal_model::program::{Resource, ResourceKind};
use canal_model::trust::{KeyAlgorithm, KeyLocation, KeyRequester};
use canal_wire::keyrpc::{KeyName, KeyRefusal};

/// Requester at the other end of a channel, as its certificate proved.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ChannelPeer {
    pub requester: KeyRequester,
    /// Tenant of a node; `None` for gateways, which are the provider's.
    pub tenant: Option<TenantName>,
}

impl ChannelPeer {
    /// Parses a component's identity as `canal_model::identity::component_identity` writes it;
    /// `None`: the component may not use a key server.
    pub fn of(identity: &Identity) -> Option<Self> {
        if identity.trust_domain.as_str() != COMPONENTS {
            return None;
        }
        let (namespace, account) = (
            identity.namespace.as_str(),
            identity.service_account.as_str(),
        );
        if let Some(name) = account.strip_prefix("node.") {
            let requester = KeyRequester::Node(NodeName::new(name).ok()?);
            return Some(Self {
                requester,
                tenant: Some(TenantName::new(namespace).ok()?),
            });
        }
        let name = account
            .strip_prefix("gateway.")
            .filter(|_| namespace == "canal-system")?;
        Some(Self {
            requester: KeyRequester::Gateway(ReplicaName::new(name).ok()?),
            tenant: None,
        })
    }
}

#[derive(Debug)]
struct TenantEntitlements {
    name: TenantName,
    trust_domain: TrustDomain,
    key_location: KeyLocation,
    algorithm: KeyAlgorithm,
    /// Entitlements of this tenant as the controller sent them, by requester.
    entitlements: HashMap<KeyRequester, Arc<Resource>>,
}

/// Tenants and entitlements of the newest state, indexed for decisions.
#[derive(Debug, Default)]
pub struct EntitlementIndex {
    domains: HashMap<TrustDomain, Arc<TenantEntitlements>>,
    names: HashMap<TenantName, Arc<TenantEntitlements>>,
}

/// Tenant, trust domain and algorithm of a key that a key server may have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyClaim {
    pub tenant: TenantName,
    pub trust_domain: TrustDomain,
    pub algorithm: KeyAlgorithm,
}

impl TenantEntitlements {
    fn entitles(&self, requester: &KeyRequester, identity: &Identity) -> bool {
        match self.entitlements.get(requester).map(|r| &**r) {
            Some(Resource::Entitlement(e)) => e.identities.binary_search(identity).is_ok(),
            _ => false,
        }
    }

    fn claim(&self) -> KeyClaim {
        KeyClaim {
            tenant: self.name.clone(),
            trust_domain: self.trust_domain.clone(),
            algorithm: self.algorithm,
        }
    }
}

impl EntitlementIndex {
    /// Resource kinds to which a key server subscribes.
    pub const KINDS: [ResourceKind; 4] = [
        ResourceKind::Tenant,
        ResourceKind::Bundle,
        ResourceKind::Entitlement,
        ResourceKind::Manifest,
    ];

    /// Indexes Tenants and Entitlements, and ignores other resources. An entitlement of an unknown
    /// tenant has no effect.
    pub fn of<'a>(all: impl IntoIterator<Item = &'a Arc<Resource>>) -> Self {
        let mut tenants: BTreeMap<TenantName, TenantEntitlements> = BTreeMap::new();
        let mut entitlements = Vec::new();
        for resource in all {
            match &**resource {
                Resource::Tenant(t) => {
                    let tenant = TenantEntitlements {
                        name: t.name.clone(),
                        trust_domain: t.trust_domain.clone(),
                        key_location: t.keys.location,
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
                tenant
                    .entitlements
                    .insert(e.requester.clone(), resource.clone());
            }
        }
        let mut rights = Self::default();
        for tenant in tenants.into_values().map(Arc::new) {
            rights
                .domains
                .insert(tenant.trust_domain.clone(), tenant.clone());
            rights.names.insert(tenant.name.clone(), tenant);
        }
        rights
    }

    /// Decides whether `caller` may use a key that this key server generates.
    ///
    /// # Errors
    /// The key's tenant has no keys in key servers, the caller is not entitled, or the key is from
    /// a file.
    pub fn decide(&self, caller: &ChannelPeer, key: &KeyName) -> Result<KeyClaim, KeyRefusal> {
        match key {
            KeyName::Identity(identity) => {
                let tenant = self.with_remote_keys(self.domains.get(&identity.trust_domain))?;
                let own = caller.tenant.as_ref().is_none_or(|t| *t == tenant.name);
                if own && tenant.entitles(&caller.requester, identity) {
                    Ok(tenant.claim())
                } else {
                    Err(KeyRefusal::NotEntitled)
                }
            }
            KeyName::Service(service) => {
                let tenant = self.with_remote_keys(self.names.get(&service.tenant))?;
                let gateway = matches!(caller.requester, KeyRequester::Gateway(_));
                let identity = gateway_identity(tenant.trust_domain.clone());
                if gateway && tenant.entitles(&caller.requester, &identity) {
                    Ok(tenant.claim())
                } else {
                    Err(KeyRefusal::NotEntitled)
                }
            }
            KeyName::File(_) => Err(KeyRefusal::UnknownKey),
        }
    }

    fn with_remote_keys<'a>(
        &self,
        tenant: Option<&'a Arc<TenantEntitlements>>,
    ) -> Result<&'a TenantEntitlements, KeyRefusal> {
        tenant
            .filter(|t| t.key_location == KeyLocation::KeyServer)
            .map(|t| &**t)
            .ok_or(KeyRefusal::UnknownTenant)
    }

    /// Returns whether `caller` is a gateway that serves `tenant` according to the controller, as
    /// keyless keys require.
    pub fn serves(&self, caller: &ChannelPeer, tenant: &TenantName) -> bool {
        let gateway = matches!(caller.requester, KeyRequester::Gateway(_));
        gateway
            && self
                .names
                .get(tenant)
                .is_some_and(|t| t.entitlements.contains_key(&caller.requester))
    }

    /// Returns all identities to which a requester is entitled, of tenants whose keys are in key
    /// servers.
    pub fn identities(&self) -> BTreeMap<Identity, KeyClaim> {
        let mut all = BTreeMap::new();
        for tenant in self
            .names
            .values()
            .filter(|t| t.key_location == KeyLocation::KeyServer)
        {
            let of = |r: &Arc<Resource>| {
                if let Resource::Entitlement(e) = &**r {
                    e.identities.clone()
                } else {
                    Vec::new()
                }
            };
            let identities: BTreeSet<Identity> =
                tenant.entitlements.values().flat_map(of).collect();
            let own = identities
                .into_iter()
                .filter(|i| i.trust_domain == tenant.trust_domain);
            all.extend(own.map(|i| (i, tenant.claim())));
        }
        all
    }

    /// Returns the claim of `tenant` if a gateway is entitled to its gateway identity, and so to
    /// certificates of its services.
    pub fn terminates(&self, tenant: &TenantName) -> Option<KeyClaim> {
        let tenant = self.with_remote_keys(self.names.get(tenant)).ok()?;
        let identity = gateway_identity(tenant.trust_domain.clone());
        tenant
            .entitlements
            .keys()
            .any(|r| tenant.entitles(r, &identity))
            .then(|| tenant.claim())
    }

    /// Returns the tenants' part of `/config_dump`.
    pub fn dump(&self) -> serde_json::Value {
        let entitlements = |t: &Arc<TenantEntitlements>| -> BTreeMap<String, Vec<String>> {
            let one = |(r, e): (&KeyRequester, &Arc<Resource>)| match &**e {
                Resource::Entitlement(e) => (
                    r.to_string(),
                    e.identities.iter().map(Identity::to_string).collect(),
                ),
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
                    "keys": format!("{:?}", t.key_location),
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
