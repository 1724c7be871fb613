//! Table of requesters, keys and the expected decisions.

use canal_model::ids::Vni;
use canal_model::program;
use canal_model::trust::{Entitlement, KeyPolicy};

use super::*;

fn identity(text: &str) -> Identity {
    text.parse().unwrap()
}

fn tenant(name: &str, place: KeyLocation) -> Arc<Resource> {
    Arc::new(Resource::Tenant(program::Tenant {
        name: name.parse().unwrap(),
        vni: Vni::new(7).unwrap(),
        trust_domain: format!("{name}.example").parse().unwrap(),
        pod_cidrs: vec![],
        gateway_cidrs: vec![],
        outbound_traffic_policy: program::OutboundTrafficPolicy::Deny,
        resolvers: Vec::new(),
        keys: KeyPolicy {
            location: place,
            ..KeyPolicy::default()
        },
        shares: Default::default(),
    }))
}

fn entitlement(tenant: &str, requester: KeyRequester, identities: &[&str]) -> Arc<Resource> {
    let mut identities: Vec<_> = identities.iter().map(|i| identity(i)).collect();
    identities.sort();
    Arc::new(Resource::Entitlement(Entitlement {
        tenant: tenant.parse().unwrap(),
        requester,
        identities,
    }))
}

fn node(name: &str) -> KeyRequester {
    KeyRequester::Node(name.parse().unwrap())
}

fn gateway(name: &str) -> KeyRequester {
    KeyRequester::Gateway(name.parse().unwrap())
}

const WEB: &str = "spiffe://alpha.example/ns/shop/sa/web";
const API: &str = "spiffe://alpha.example/ns/shop/sa/api";
const GATE: &str = "spiffe://alpha.example/ns/canal-system/sa/gateway";

fn rights() -> EntitlementIndex {
    EntitlementIndex::of(&[
        tenant("alpha", KeyLocation::KeyServer),
        tenant("beta", KeyLocation::KeyServer),
        tenant("local", KeyLocation::Local),
        entitlement("alpha", node("n1"), &[WEB, API]),
        entitlement("alpha", gateway("g1"), &[GATE]),
        entitlement("beta", node("n1"), &["spiffe://beta.example/ns/x/sa/y"]),
        // Only a faulty controller could send this entitlement.
        entitlement("beta", node("n9"), &[WEB]),
        entitlement("local", node("n1"), &["spiffe://local.example/ns/x/sa/y"]),
        entitlement("local", gateway("g1"), &[]),
        entitlement("gone", node("n1"), &["spiffe://gone.example/ns/x/sa/y"]),
    ])
}

#[test]
fn a_caller_is_read_from_its_certificate() {
    for (text, want) in [
        (
            "spiffe://components.canal/ns/alpha/sa/node.n1",
            Some((node("n1"), Some("alpha"))),
        ),
        (
            "spiffe://components.canal/ns/alpha/sa/node.n1.rack2",
            Some((node("n1.rack2"), Some("alpha"))),
        ),
        (
            "spiffe://components.canal/ns/canal-system/sa/gateway.g1",
            Some((gateway("g1"), None)),
        ),
        ("spiffe://components.canal/ns/alpha/sa/gateway.g1", None),
        (
            "spiffe://components.canal/ns/canal-system/sa/keyserver.k1",
            None,
        ),
        ("spiffe://components.canal/ns/alpha/sa/n1", None),
        ("spiffe://alpha.example/ns/alpha/sa/node.n1", None),
        ("spiffe://alpha.example/ns/canal-system/sa/gateway.g1", None),
    ] {
        let want = want.map(|(requester, tenant)| ChannelPeer {
            requester,
            tenant: tenant.map(|t| t.parse().unwrap()),
        });
        assert_eq!(ChannelPeer::of(&identity(text)), want, "{text}");
    }
}

/// A case's name, the requester, the key that it requests, and the tenant of the key.
type KeyCase = (
    &'static str,
    ChannelPeer,
    KeyName,
    Result<&'static str, KeyRefusal>,
);

fn on(requester: KeyRequester, tenant: Option<&str>) -> ChannelPeer {
    ChannelPeer {
        requester,
        tenant: tenant.map(|t| t.parse().unwrap()),
    }
}

fn n1() -> ChannelPeer {
    on(node("n1"), Some("alpha"))
}

fn g1() -> ChannelPeer {
    on(gateway("g1"), None)
}

fn cases_of_identities() -> Vec<KeyCase> {
    let key = |text: &str| KeyName::Identity(identity(text));
    vec![
        ("its own pod's", n1(), key(WEB), Ok("alpha")),
        (
            "a pod's of another node",
            on(node("n2"), Some("alpha")),
            key(WEB),
            Err(KeyRefusal::NotEntitled),
        ),
        (
            "a node of another tenant with the same name",
            on(node("n1"), Some("beta")),
            key(WEB),
            Err(KeyRefusal::NotEntitled),
        ),
        (
            "an identity entitled under the wrong tenant",
            on(node("n9"), Some("beta")),
            key(WEB),
            Err(KeyRefusal::NotEntitled),
        ),
        (
            "the gateway's, by a node",
            n1(),
            key(GATE),
            Err(KeyRefusal::NotEntitled),
        ),
        ("the gateway's, by a gateway", g1(), key(GATE), Ok("alpha")),
        (
            "the gateway's, by a gateway that does not serve",
            on(gateway("g2"), None),
            key(GATE),
            Err(KeyRefusal::NotEntitled),
        ),
        (
            "a pod's, by a gateway",
            g1(),
            key(WEB),
            Err(KeyRefusal::NotEntitled),
        ),
        (
            "an identity without a pod",
            n1(),
            key("spiffe://alpha.example/ns/shop/sa/none"),
            Err(KeyRefusal::NotEntitled),
        ),
        (
            "keys that are stored elsewhere",
            n1(),
            key("spiffe://local.example/ns/x/sa/y"),
            Err(KeyRefusal::UnknownTenant),
        ),
        (
            "a removed tenant",
            n1(),
            key("spiffe://gone.example/ns/x/sa/y"),
            Err(KeyRefusal::UnknownTenant),
        ),
        (
            "the key server's own",
            n1(),
            key("spiffe://components.canal/ns/canal-system/sa/keyserver.k"),
            Err(KeyRefusal::UnknownTenant),
        ),
    ]
}

fn cases_of_services_and_files() -> Vec<KeyCase> {
    let service = |text: &str| KeyName::Service(text.parse().unwrap());
    vec![
        (
            "a service, by a gateway",
            g1(),
            service("alpha/shop/web"),
            Ok("alpha"),
        ),
        (
            "a service, by a node",
            n1(),
            service("alpha/shop/web"),
            Err(KeyRefusal::NotEntitled),
        ),
        (
            "a service of a tenant not served",
            g1(),
            service("beta/shop/web"),
            Err(KeyRefusal::NotEntitled),
        ),
        (
            "a service of a tenant with keys elsewhere",
            g1(),
            service("local/shop/web"),
            Err(KeyRefusal::UnknownTenant),
        ),
        (
            "a file",
            g1(),
            KeyName::File("alpha/shop/web".parse().unwrap()),
            Err(KeyRefusal::UnknownKey),
        ),
    ]
}

#[test]
fn a_key_is_for_those_that_the_controller_names() {
    let rights = rights();
    for (what, caller, key, want) in [cases_of_identities(), cases_of_services_and_files()].concat()
    {
        let got = rights.decide(&caller, &key).map(|c| c.tenant.to_string());
        assert_eq!(got, want.map(str::to_string), "{what}");
    }
}

#[test]
fn keyless_keys_are_for_gateways_that_serve() {
    let rights = rights();
    let caller = |requester| ChannelPeer {
        requester,
        tenant: None,
    };
    let name = |n: &str| -> TenantName { n.parse().unwrap() };
    assert!(rights.serves(&caller(gateway("g1")), &name("alpha")));
    // A tenant whose workloads' keys are on its nodes may use keyless keys nevertheless.
    assert!(rights.serves(&caller(gateway("g1")), &name("local")));
    assert!(!rights.serves(&caller(gateway("g1")), &name("beta")));
    assert!(!rights.serves(&caller(gateway("g2")), &name("alpha")));
    assert!(!rights.serves(&caller(node("n1")), &name("alpha")));
}

#[test]
fn keys_are_made_for_entitled_names_of_their_tenant() {
    let all: Vec<String> = rights()
        .identities()
        .keys()
        .map(Identity::to_string)
        .collect();
    assert_eq!(all, [GATE, API, WEB, "spiffe://beta.example/ns/x/sa/y"]);
    assert!(rights().terminates(&"alpha".parse().unwrap()).is_some());
    assert!(rights().terminates(&"beta".parse().unwrap()).is_none());
    assert!(
        rights().dump()["alpha"]["entitlements"]["node/n1"][0]
            .as_str()
            .is_some_and(|s| s == API)
    );
}
