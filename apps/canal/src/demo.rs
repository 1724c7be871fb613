//! The demo: steps that each check expectations and show the observed results. Only these steps
//! depend on the demo's own world (`demo/*.yaml`). Start at [`play`].

pub(crate) mod canary;
pub(crate) mod demo_world;
pub(crate) mod fleet;
pub(crate) mod hops;
pub(crate) mod ingress;
pub(crate) mod isolation;
pub(crate) mod proxyless;
pub(crate) mod replica_loss;
pub(crate) mod retries;
pub(crate) mod screen;
pub(crate) mod traffic;
pub(crate) mod trust;
pub(crate) mod weight_changes;

use demo_world::DemoWorld;
use screen::DemoOutput;

/// Runs all steps in order. A step that fails counts as a failed expectation; the others continue.
pub(crate) async fn play(world: &DemoWorld, screen: &mut DemoOutput) {
    let step = screen.begin("Traffic flows: HTTP, gRPC, WebSocket and TCP through two node proxies, edges and a gateway, IPv4 and IPv6");
    let seen = traffic::run(world).await;
    screen.end(step, seen);

    let step = screen.begin(
        "A canary: 90 % of reviews to v1, 10 % to v2 (alpha by HTTPRoute, beta by VirtualService)",
    );
    let seen = canary::run(world).await;
    screen.end(step, seen);

    let step = screen.begin("A header route: requests with `end-user: tester` see v3");
    let seen = canary::header_route(world).await;
    screen.end(step, seen);

    // After the canary's steps, which check the weights that this step changes.
    let step = screen.begin("The canary is moved step by step to v2, live, under load");
    let seen = weight_changes::run(world).await;
    screen.end(step, seen);

    let step = screen.begin("A version that fails is hidden by retries");
    let seen = retries::run(world).await;
    screen.end(step, seen);

    let step = screen.begin("Tenants with the same addresses and names are isolated");
    let seen = isolation::run(world).await;
    screen.end(step, seen);

    let step = screen.begin("Zero trust: a policy decides, `canal explain` reports why, and beta's private keys are only in key servers");
    let seen = trust::run(world, screen).await;
    screen.end(step, seen);

    let step = screen.begin("A tenant without node proxies: by DNS alone");
    let seen = proxyless::run(world).await;
    screen.end(step, seen);

    let step = screen.begin("A Gateway with HTTPS, reached by curl from outside the tenants");
    let seen = ingress::run(world).await;
    screen.end(step, seen);

    let step = screen.begin("The gateway fleet changes under load: drain, undrain, replace");
    let seen = fleet::run(world, screen).await;
    screen.end(step, seen);

    let step = screen.begin("A gateway replica is killed under load");
    let seen = replica_loss::run(world).await;
    screen.end(step, seen);

    let step = screen.begin("What each hop costs");
    let seen = hops::run(world, screen).await;
    screen.end(step, seen);
}
