//! Locations of private keys: alpha's are local, beta's in key servers, in one world. Alpha proves
//! that the search finds an existing key. Beta's keys are nowhere except in key servers, and
//! readable nowhere.

use std::time::Duration;

use canal_e2e::credential::{PemCredential, request_with_key};
use canal_e2e::keys::{KeyServerReply, Requester};
use canal_e2e::memory::{self, FoundKey, Publics};
use canal_e2e::{Mesh, controller::Caller, until};
use canal_timing::deadline;
use canal_wire::keyrpc::KeyName;
use canal_world::topology::{
    TenantKeysTopology, TopologyKeyAlgorithm, TopologyKeyFallback, TopologyKeyLocation,
};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use serde_json::Value;

/// A client's first request is answered within this time: its identity and the gateways' may still
/// be on their way. It only has to exceed what a quiet machine needs: in the gate, `deadline` waits
/// a minute or more.
const SERVED_WITHIN: Duration = Duration::from_secs(5);
const GATEWAY: &str = "spiffe://beta.example/ns/canal-system/sa/gateway";

fn up() -> Mesh {
    let mesh = Mesh::up_with("trust.yaml", "e2e-at-rest", |topology| {
        topology.tenants[1].keys = Some(TenantKeysTopology {
            location: TopologyKeyLocation::KeyServer,
            algorithm: TopologyKeyAlgorithm::EcdsaP256,
            fallback: TopologyKeyFallback::Refuse,
        });
    });
    for (tenant, far) in [
        ("alpha", "alpha/default/client-far-0"),
        ("beta", "beta/default/client-far-0"),
    ] {
        for client in [format!("{tenant}/default/client-0"), far.to_owned()] {
            let code = || mesh.code(&client, "http://10.101.0.10/headers", &[]);
            until(
                deadline(SERVED_WITHIN),
                &format!("{client} is served"),
                || code() == 200,
            );
            for n in 0..20 {
                assert_eq!(code(), 200, "{client}, request {n}\n{}", mesh.logs());
            }
        }
    }
    mesh
}

/// Returns the identities and public keys that a data plane of alpha's stores.
fn stored(mesh: &Mesh, host: &str) -> Publics {
    let dir = mesh.world.dir().join("data").join(host).join("certs");
    let entries = std::fs::read_dir(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    let stored = entries.filter_map(|entry| {
        serde_json::from_slice::<Value>(&std::fs::read(entry.ok()?.path()).ok()?).ok()
    });
    stored
        .filter_map(|stored| {
            let leaf = CertificateDer::from_pem_slice(stored["chain"].as_str()?.as_bytes()).ok()?;
            Some((
                memory::point(&leaf),
                stored["identity"].as_str()?.to_owned(),
            ))
        })
        .collect()
}

/// Returns the channel certificate of a component, obtained with its token, as a thief of the token
/// could.
fn component(mesh: &Mesh, host: &str, identity: &str) -> PemCredential {
    let (csr, key) = request_with_key(&[identity]);
    let chain = Caller::as_itself(&mesh.world, host)
        .certificate(identity, &csr, None)
        .unwrap_or_else(|e| panic!("{identity}: {e}"));
    // The last element is the bundle.
    PemCredential {
        chain: chain[..chain.len() - 1].concat(),
        key,
    }
}

/// Returns the public keys that key servers have for beta's identities on a host.
fn public_keys_of(
    mesh: &Mesh,
    host: &str,
    component_identity: &str,
    identities: &[&str],
) -> Publics {
    let credential = component(mesh, host, component_identity);
    let mut publics = Publics::new();
    for server in ["ks-1", "ks-2"] {
        let requester = Requester {
            world: &mesh.world,
            host,
            server,
            credential: Some(&credential),
        };
        for identity in identities {
            match requester.chain(KeyName::Identity(identity.parse().expect("an identity"))) {
                KeyServerReply::Certificates(chain) => {
                    drop(publics.insert(memory::point(&chain[0]), (*identity).to_owned()))
                }
                other => panic!("{server}, {identity}: {other:?}"),
            }
        }
    }
    publics
}

fn searched(mesh: &Mesh, host: &str, publics: &Publics) -> Vec<FoundKey> {
    let pid = mesh
        .world
        .host(host)
        .ok()
        .and_then(|host| host.pid())
        .unwrap_or_else(|| panic!("{host} does not run"));
    let files = memory::in_files(&mesh.world.dir().join("data").join(host), publics);
    memory::in_process(pid, publics)
        .into_iter()
        .chain(files)
        .collect()
}

/// Checks that neither swap nor a core dump can contain the memory of a key server.
fn assert_memory_is_confined(mesh: &Mesh, host: &str) {
    let pid = mesh.world.host(host).unwrap().pid().expect("it runs");
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let locked = status
        .lines()
        .find_map(|line| line.strip_prefix("VmLck:"))
        .unwrap_or_default()
        .trim();
    assert!(
        !locked.starts_with("0 "),
        "{host}: no memory is locked: {locked}"
    );
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let core = limits
        .lines()
        .find(|line| line.starts_with("Max core file size"))
        .unwrap_or_default();
    assert!(
        core.split_whitespace().nth(4) == Some("0"),
        "{host}: {core}"
    );
}

#[test]
fn private_keys_are_only_in_key_servers_and_there_sealed() {
    let mesh = up();
    let local = stored(&mesh, "alpha-n1");
    assert!(!local.is_empty(), "alpha's node keeps its keys");
    let found = searched(&mesh, "alpha-n1", &local);
    // The search must find alpha's keys, or finding none of beta's would prove nothing.
    for owner in local.values() {
        let places = |kind: &str| {
            found
                .iter()
                .filter(|found| found.owner == *owner && found.location.starts_with(kind))
                .count()
        };
        assert!(
            places("memory") > 0 && places("/") > 0,
            "the search finds {owner}, which is there: {found:?}"
        );
    }
    let at_gateway = stored(&mesh, "gw-1");
    assert!(
        !searched(&mesh, "gw-1", &at_gateway).is_empty(),
        "the search finds alpha's keys at a gateway"
    );
    let beta: Vec<String> = ["client", "intruder"]
        .iter()
        .map(|sa| format!("spiffe://beta.example/ns/default/sa/{sa}"))
        .collect();
    let beta: Vec<&str> = beta.iter().map(String::as_str).collect();
    let far: Vec<String> = ["web", "echo", "client-far"]
        .iter()
        .map(|sa| format!("spiffe://beta.example/ns/default/sa/{sa}"))
        .collect();
    let far: Vec<&str> = far.iter().map(String::as_str).collect();
    let mut all = public_keys_of(
        &mesh,
        "beta-n1",
        "spiffe://components.canal/ns/beta/sa/node.beta-n1",
        &beta,
    );
    all.extend(public_keys_of(
        &mesh,
        "beta-n2",
        "spiffe://components.canal/ns/beta/sa/node.beta-n2",
        &far,
    ));
    all.extend(public_keys_of(
        &mesh,
        "gw-1",
        "spiffe://components.canal/ns/canal-system/sa/gateway.gw-1",
        &[GATEWAY],
    ));
    // Beta has six identities on these hosts, and each has a key in a key server at least.
    assert!(all.len() >= 6, "{:?}", all.values());
    for host in [
        "beta-n1",
        "beta-n2",
        "gw-1",
        "gw-2",
        "gw-3",
        "controller",
        "edge-1",
    ] {
        let found = searched(&mesh, host, &all);
        assert!(found.is_empty(), "{host}: {found:?}");
    }
    // Not even root can read them in the key server: they are sealed except during an operation.
    for host in ["ks-1", "ks-2"] {
        let found = searched(&mesh, host, &all);
        assert!(found.is_empty(), "{host}: {found:?}");
        assert_memory_is_confined(&mesh, host);
    }
}
