//! Alpha takes the controller's connections, memory, disk and writer: by its network, by its node's token, and by its operator's.

use std::time::{Duration, Instant};

use canal_e2e::controller::Caller;
use canal_e2e::credential::request;
use canal_e2e::flood::{Flood, Hold};
use canal_model::program::Kind;
use canal_wire::southbound::type_url;

use super::Case;
use super::stage::{ALPHA_NODE, Stage};

/// An identity that alpha's node has, and the certificate of which it asks again and again.
const OWN: &str = "spiffe://alpha.example/ns/default/sa/client";
const COMPONENT: &str = "spiffe://components.canal/ns/alpha/sa/node.alpha-n1";

fn held(name: &'static str, connections: usize, hold: fn() -> Hold<'static>) -> Case {
    Case::new(name, connections as u64 / 4, move |stage, lasts| {
        let flood = Flood { host: ALPHA_NODE, to: stage.controller(), connections, hold: hold(), lasts };
        let report = flood.run(&stage.mesh.world);
        report.opened + report.refused
    })
}

/// Calls again and again from several threads until the time is over; how often.
fn again(lasts: Duration, threads: usize, call: impl Fn() + Sync) -> u64 {
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
        all.into_iter().map(|one| one.join().expect("a caller ends")).sum()
    })
}

fn calls(name: &'static str, tries_min: u64, threads: usize, call: impl Fn(&Stage) + Send + Sync + 'static) -> Case {
    Case::new(name, tries_min, move |stage, lasts| again(lasts, threads, || call(stage)))
}

fn node(stage: &Stage) -> Caller<'_> {
    Caller::as_itself(&stage.mesh.world, ALPHA_NODE)
}

/// Services with this much annotation each.
fn padded(count: usize, bytes: usize) -> String {
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

/// Routes with so many matches in all.
fn routes(count: usize, matches: usize) -> String {
    let list: Vec<_> = (0..matches).map(|n| format!("{{path: {{type: PathPrefix, value: /p/{n}/{}}}}}", "y".repeat(100))).collect();
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

/// Policies that are for nothing which the victim uses.
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

/// Removes what the cases made, one kind and name after the other.
fn remove(stage: &Stage) {
    let operator = stage.operator();
    for n in 0..60 {
        for (kind, name) in
            [("Service", format!("pad-{n}")), ("HTTPRoute", format!("many-{n}")), ("AuthorizationPolicy", format!("many-{n}"))]
        {
            // What was refused is not there.
            let _ = operator.delete("alpha", kind, &name);
        }
    }
}

pub(super) fn cases() -> Vec<Case> {
    let unknown = "type.googleapis.com/canal.program.v1.Nobody";
    vec![
        held("connections to the controller without a byte", 3000, || Hold::Silent),
        held("connections to the controller with half a TLS hello", 1500, || {
            Hold::Bytes(vec![0x16, 0x03, 0x01, 0x02, 0x00, 0x01, 0x00, 0x01, 0xfc])
        }),
        held("TLS to the controller and no request", 300, || Hold::Tls(None)),
        calls("calls with a token that nobody has", 20, 4, |stage| {
            let stranger = Caller::with_token(&stage.mesh.world, ALPHA_NODE, &"0".repeat(64));
            // Refused is what it is meant to be.
            let _ = stranger.get("alpha");
        }),
        calls("certificates of one pod, again and again", 20, 4, |stage| {
            let _ = node(stage).certificate(OWN, &request(&[OWN]), None);
        }),
        calls("certificates of the node itself, again and again", 20, 4, |stage| {
            let _ = node(stage).certificate(COMPONENT, &request(&[COMPONENT]), None);
        }),
        calls("subscriptions to long names that nobody has", 2, 2, |stage| {
            let names: Vec<String> = (0..300).map(|n| format!("alpha/default/{n}-{}", "n".repeat(60_000))).collect();
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            let _ = node(stage).subscribe("node~alpha-n1", type_url(Kind::Service), &names);
        }),
        calls("subscriptions to types that nobody has", 2, 4, move |stage| {
            let _ = node(stage).subscribe("node~alpha-n1", unknown, &[]);
        }),
        calls("objects with large annotations", 1, 2, |stage| {
            let _ = stage.operator().apply("alpha", &padded(40, 500_000));
        })
        .restored_by(remove),
        calls("routes with many matches", 1, 2, |stage| {
            let _ = stage.operator().apply("alpha", &routes(20, 500));
        })
        .restored_by(remove),
        calls("large diffs", 1, 3, |stage| {
            let _ = stage.operator().diff("alpha", &padded(50, 500_000));
        }),
        calls("policies with more values than data planes take", 1, 1, |stage| {
            let _ = stage.operator().apply("alpha", &policies(50, 600));
        })
        .restored_by(remove),
        calls("small changes as fast as they are taken", 5, 4, |stage| {
            let _ = stage.operator().apply("alpha", &padded(1, 10));
        })
        .restored_by(remove),
    ]
}
