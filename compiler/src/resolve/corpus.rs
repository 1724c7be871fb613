//! The tenant's documents sorted by kind, each object once, elders first.

use std::collections::BTreeMap;

use canal_model::policy::istio::{DestinationRule, VirtualService};
use canal_model::policy::kubernetes::{Node, Pod, Service};
use canal_model::policy::mesh::{ExternalAuthorizer, Federation, Gateway, KeyServer, Tenant, Termination, Throttle};
use canal_model::policy::route::{HttpRoute, ReferenceGrant, UdpRoute};
use canal_model::policy::security::{AuthorizationPolicy, PeerAuthentication, RequestAuthentication};
use canal_model::policy::{Document, Object, ObjectKey, ObjectKind};

use crate::Input;
use crate::limits::OBJECTS_PER_TENANT_MAX;
use crate::precedence::seniority;
use crate::report::Report;

/// An object with its document.
pub(crate) struct Said<'a, T> {
    pub(crate) document: &'a Document,
    pub(crate) object: &'a T,
}

impl<T> Said<'_, T> {
    /// The first fault in a field that begins with `prefix`, or in one around it.
    pub(crate) fn fault(&self, prefix: &str) -> Option<&str> {
        let is_around = |field: &str| prefix.strip_prefix(field).is_some_and(|rest| rest.starts_with(['.', '[']));
        let mut faults = self.document.faults.iter();
        faults.find(|fault| fault.field.starts_with(prefix) || is_around(&fault.field)).map(|fault| fault.problem.as_str())
    }
}

/// All objects of a tenant.
#[derive(Default)]
pub(crate) struct Corpus<'a> {
    pub(crate) tenants: Vec<Said<'a, Tenant>>,
    pub(crate) gateways: Vec<Said<'a, Gateway>>,
    pub(crate) nodes: Vec<Said<'a, Node>>,
    pub(crate) services: Vec<Said<'a, Service>>,
    pub(crate) pods: Vec<Said<'a, Pod>>,
    pub(crate) http_routes: Vec<Said<'a, HttpRoute>>,
    pub(crate) udp_routes: Vec<Said<'a, UdpRoute>>,
    pub(crate) grants: Vec<Said<'a, ReferenceGrant>>,
    pub(crate) virtual_services: Vec<Said<'a, VirtualService>>,
    pub(crate) destination_rules: Vec<Said<'a, DestinationRule>>,
    pub(crate) throttles: Vec<Said<'a, Throttle>>,
    pub(crate) authorization_policies: Vec<Said<'a, AuthorizationPolicy>>,
    pub(crate) request_authentications: Vec<Said<'a, RequestAuthentication>>,
    pub(crate) peer_authentications: Vec<Said<'a, PeerAuthentication>>,
    pub(crate) external_authorizers: Vec<Said<'a, ExternalAuthorizer>>,
    pub(crate) federations: Vec<Said<'a, Federation>>,
    pub(crate) key_servers: Vec<Said<'a, KeyServer>>,
    pub(crate) terminations: Vec<Said<'a, Termination>>,
}

impl<'a> Corpus<'a> {
    pub(crate) fn gather(input: &Input<'a>, report: &mut Report) -> Self {
        let mut unique: BTreeMap<ObjectKey, &Document> = BTreeMap::new();
        for document in input.documents.iter().map(AsRef::as_ref) {
            let key = document.object.key();
            let Some(other) = unique.get(&key).copied() else {
                unique.insert(key, document);
                continue;
            };
            let (first, second) = if other.origin <= document.origin { (other, document) } else { (document, other) };
            let problem = format!("this object stands in {} too; that one is used", first.origin);
            report.error(second, "metadata.name", problem, "remove one of them or rename it");
            unique.insert(key, first);
        }
        let mut documents: Vec<&Document> = unique.into_values().collect();
        documents.sort_by(|a, b| (rank(a.object.kind()), seniority(a)).cmp(&(rank(b.object.kind()), seniority(b))));
        if documents.len() > OBJECTS_PER_TENANT_MAX {
            let problem = format!("the tenant has {} objects, more than {OBJECTS_PER_TENANT_MAX}; the rest is left out", documents.len());
            report.general(problem, "remove objects or split the tenant");
            documents.truncate(OBJECTS_PER_TENANT_MAX);
        }
        let mut corpus = Corpus::default();
        documents.into_iter().for_each(|document| corpus.add(document));
        corpus
    }

    fn add(&mut self, document: &'a Document) {
        match &document.object {
            Object::Tenant(object) => self.tenants.push(Said { document, object }),
            Object::Gateway(object) => self.gateways.push(Said { document, object }),
            Object::Node(object) => self.nodes.push(Said { document, object }),
            Object::Service(object) => self.services.push(Said { document, object }),
            Object::Pod(object) => self.pods.push(Said { document, object }),
            Object::HttpRoute(object) => self.http_routes.push(Said { document, object }),
            Object::UdpRoute(object) => self.udp_routes.push(Said { document, object }),
            Object::ReferenceGrant(object) => self.grants.push(Said { document, object }),
            Object::VirtualService(object) => self.virtual_services.push(Said { document, object }),
            Object::DestinationRule(object) => self.destination_rules.push(Said { document, object }),
            Object::Throttle(object) => self.throttles.push(Said { document, object }),
            Object::AuthorizationPolicy(object) => self.authorization_policies.push(Said { document, object }),
            Object::RequestAuthentication(object) => self.request_authentications.push(Said { document, object }),
            Object::PeerAuthentication(object) => self.peer_authentications.push(Said { document, object }),
            Object::ExternalAuthorizer(object) => self.external_authorizers.push(Said { document, object }),
            Object::Federation(object) => self.federations.push(Said { document, object }),
            Object::KeyServer(object) => self.key_servers.push(Said { document, object }),
            Object::Termination(object) => self.terminations.push(Said { document, object }),
        }
    }
}

/// What is left out first when there is too much: pods, then services. A policy, a route or a throttle that is left out would open what it
/// is for.
fn rank(kind: ObjectKind) -> u8 {
    match kind {
        ObjectKind::Tenant => 0,
        ObjectKind::Gateway | ObjectKind::Node => 1,
        ObjectKind::AuthorizationPolicy | ObjectKind::RequestAuthentication | ObjectKind::PeerAuthentication | ObjectKind::Termination => 1,
        ObjectKind::ExternalAuthorizer | ObjectKind::KeyServer | ObjectKind::Federation => 1,
        ObjectKind::HttpRoute | ObjectKind::UdpRoute | ObjectKind::VirtualService | ObjectKind::Throttle => 2,
        ObjectKind::DestinationRule | ObjectKind::ReferenceGrant => 3,
        ObjectKind::Service => 4,
        ObjectKind::Pod => 5,
    }
}
