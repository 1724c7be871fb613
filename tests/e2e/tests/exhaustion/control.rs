//! Alpha exhausts the controller's connections, memory, disk and writer: through its network, with
//! its node's token, and with its operator's.

use std::time::{Duration, Instant};

use canal_e2e::controller::Caller;
use canal_e2e::credential::request;
use canal_e2e::flood::{ConnectionFlood, Hold};
use canal_model::program::ResourceKind;

use super::ExhaustionCase;
use super::exhaustion_world::{ALPHA_NODE, ExhaustionWorld};

/// An identity of alpha's node, whose certificate it requests repeatedly.
const OWN: &str = "spiffe://alpha.example/ns/default/sa/client";
pub(super) const COMPONENT: &str = "spiffe://components.canal/ns/alpha/sa/node.alpha-n1";

fn open_connections(
    name: &'static str,
    connections: usize,
    hold: fn() -> Hold<'static>,
) -> ExhaustionCase {
    ExhaustionCase::new(name, connections as u64 / 4, move |setup, lasts| {
        let flood = ConnectionFlood {
            host: ALPHA_NODE,
            to: setup.controller(),
            connections,
            hold: hold(),
            lasts,
        };
        let report = flood.run(&setup.mesh.world);
        report.connections_opened + report.refused
    })
}

/// Calls repeatedly from several threads until the time is over, and returns the number of calls.
fn call_repeatedly(lasts: Duration, threads: usize, call: impl Fn() + Sync) -> u64 {
    let ends = Instant::now() + lasts;
    let caller = || {
        let mut calls = 0;
        while Instant::now() < ends {
            call();
            calls += 1;
        }
        calls
    };
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(caller)).collect();
        all.into_iter()
            .map(|one| one.join().expect("a caller ends"))
            .sum()
    })
}

fn calls(
    name: &'static str,
    tries_min: u64,
    threads: usize,
    call: impl Fn(&ExhaustionWorld) + Send + Sync + 'static,
) -> ExhaustionCase {
    ExhaustionCase::new(name, tries_min, move |setup, lasts| {
        call_repeatedly(lasts, threads, || call(setup))
    })
}

fn node(setup: &ExhaustionWorld) -> Caller<'_> {
    Caller::as_itself(&setup.mesh.world, ALPHA_NODE)
}

/// Services with an annotation of this size each.
pub(super) fn padded(count: usize, bytes: usize) -> String {
    let padding = "x".repeat(bytes);
    (0..count)
        .map(|n| {
            format!(
                "---\napiVersion: v1\nkind: Service\nmetadata: {{name: pad-{n}, namespace: default, annotations: {{note: {padding}}}}}\nspec: \
                 {{selector: {{app: none}}, ports: [{{name: http, port: 80}}]}}\n"
            )
        })
        .collect()
}

/// Returns routes with this many matches each.
fn routes(count: usize, matches: usize) -> String {
    let list: Vec<_> = (0..matches)
        .map(|n| {
            format!(
                "{{path: {{type: PathPrefix, value: /p/{n}/{}}}}}",
                "y".repeat(100)
            )
        })
        .collect();
    let list = list.join(", ");
    (0..count)
        .map(|n| {
            format!(
                "---\napiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {{name: many-{n}, namespace: default}}\nspec:\n  \
                 parentRefs: [{{group: \"\", kind: Service, name: web-dry}}]\n  rules:\n  - matches: [{list}]\n    backendRefs: [{{name: web-dry, \
                 port: 80}}]\n"
            )
        })
        .collect()
}

/// Policies that do not apply to anything that the victim uses.
fn policies(count: usize, values: usize) -> String {
    let list: Vec<_> = (0..values).map(|n| format!("/a/{n}")).collect();
    let list = list.join(", ");
    (0..count)
        .map(|n| {
            format!(
                "---\napiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {{name: many-{n}, namespace: default}}\nspec: \
                 {{action: DENY, selector: {{matchLabels: {{app: none}}}}, rules: [{{to: [{{operation: {{paths: [{list}], notPaths: [{list}]}}}}]}}]}}\n"
            )
        })
        .collect()
}

/// Removes the objects that the cases created, one by one.
fn remove(setup: &ExhaustionWorld) {
    let operator = setup.operator();
    for n in 0..60 {
        for (kind, name) in [
            ("Service", format!("pad-{n}")),
            ("HTTPRoute", format!("many-{n}")),
            ("AuthorizationPolicy", format!("many-{n}")),
        ] {
            // An object that was refused does not exist.
            let _ = operator.delete("alpha", kind, &name);
        }
    }
}

pub(super) fn cases() -> Vec<ExhaustionCase> {
    // The calls may be refused, so their results are ignored: the load is what counts.
    let unknown = "type.googleapis.com/canal.program.v1.Nobody";
    // The first number is the minimum of calls for an attack to count, the second that of callers.
    // Nobody derived the numbers.
    vec![
        // Numbers of connections fall with their cost to the attacker: a socket, bytes, a
        // handshake.
        open_connections("connections to the controller without a byte", 3000, || {
            Hold::Silent
        }),
        // The beginning of a ClientHello of 512 bytes, of which the rest never comes.
        open_connections(
            "connections to the controller with half a TLS hello",
            1500,
            || Hold::Bytes(vec![0x16, 0x03, 0x01, 0x02, 0x00, 0x01, 0x00, 0x01, 0xfc]),
        ),
        open_connections("TLS to the controller and no request", 300, || {
            Hold::Tls(None)
        }),
        calls("calls with an unknown token", 20, 4, |setup| {
            let unauthenticated =
                // A token has 64 characters; the controller has none of zeros.
                Caller::with_token(&setup.mesh.world, ALPHA_NODE, &"0".repeat(64));
            // The call is expected to be refused.
            let _ = unauthenticated.get("alpha");
        }),
        calls("certificates of one pod, again and again", 20, 4, |setup| {
            let _ = node(setup).certificate(OWN, &request(&[OWN]), None);
        }),
        calls(
            "certificates of the node itself, again and again",
            20,
            4,
            |setup| {
                let _ = node(setup).certificate(COMPONENT, &request(&[COMPONENT]), None);
            },
        ),
        calls("subscriptions to long unknown names", 2, 2, |setup| {
            // 300 names of 60,000 bytes: 18 MB that a subscriber could make the controller keep.
            let names: Vec<String> = (0..300)
                .map(|n| format!("alpha/default/{n}-{}", "n".repeat(60_000)))
                .collect();
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            let _ =
                node(setup).subscribe("node~alpha-n1", ResourceKind::Service.type_url(), &names);
        }),
        calls("subscriptions to unknown types", 2, 4, move |setup| {
            let _ = node(setup).subscribe("node~alpha-n1", unknown, &[]);
        }),
        calls("objects with large annotations", 1, 2, |setup| {
            // 12 objects of 500,000 bytes are 6 MB, within the 8 MiB of a tenant
            // (`configurationBytes`).
            let _ = setup.operator().apply("alpha", &padded(12, 500_000));
        })
        .restored_by(remove),
        calls("routes with many matches", 1, 2, |setup| {
            // 10,000 matches in all. Nobody derived the number.
            let _ = setup.operator().apply("alpha", &routes(20, 500));
        })
        .restored_by(remove),
        calls("large diffs", 1, 3, |setup| {
            let _ = setup.operator().diff("alpha", &padded(12, 500_000));
        }),
        calls(
            "policies with more values than data planes take",
            1,
            1,
            |setup| {
                // Two lists of 600 values are more than the 1,024 that a policy may have.
                let _ = setup.operator().apply("alpha", &policies(50, 600));
            },
        )
        .restored_by(remove),
        calls(
            "small changes as fast as they are accepted",
            5,
            // One small object, applied by four callers at once: the rate of changes is the load.
            4,
            |setup| {
                let _ = setup.operator().apply("alpha", &padded(1, 10));
            },
        )
        .restored_by(remove),
    ]
}
