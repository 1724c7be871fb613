//! The demo: steps that each make promises and show what was seen. The steps know the demo's own world (`demo/*.yaml`), nothing else does.

pub(crate) mod canary;
pub(crate) mod fleet;
pub(crate) mod hops;
pub(crate) mod isolation;
pub(crate) mod live;
pub(crate) mod loss;
pub(crate) mod proxyless;
pub(crate) mod screen;
pub(crate) mod stage;
pub(crate) mod traffic;
pub(crate) mod trust;

use screen::Screen;
use stage::Stage;

/// Plays all steps in order. A step that fails counts as a broken promise; the others go on.
pub(crate) async fn play(stage: &Stage, screen: &mut Screen) {
    let step = screen.begin("Traffic flows: HTTP, gRPC, WebSocket and TCP through two node proxies, edges and a gateway, IPv4 and IPv6");
    let seen = traffic::run(stage).await;
    screen.end(step, seen);

    let step = screen.begin("A canary: 90 % of reviews to v1, 10 % to v2 (alpha by HTTPRoute, beta by VirtualService)");
    let seen = canary::run(stage).await;
    screen.end(step, seen);

    let step = screen.begin("A header route: requests with `end-user: tester` see v3");
    let seen = canary::header_route(stage).await;
    screen.end(step, seen);

    let step = screen.begin("The canary is moved step by step to v2, live, under load");
    let seen = live::run(stage).await;
    screen.end(step, seen);

    let step = screen.begin("Tenants with the same addresses and names are apart");
    let seen = isolation::run(stage).await;
    screen.end(step, seen);

    let step = screen.begin("Zero trust: a policy decides, `canal explain` says why, and beta's private keys are in key servers alone");
    let seen = trust::run(stage, screen).await;
    screen.end(step, seen);

    let step = screen.begin("A tenant without node proxies: by DNS alone");
    let seen = proxyless::run(stage).await;
    screen.end(step, seen);

    let step = screen.begin("The gateway fleet changes under load: drain, undrain, replace");
    let seen = fleet::run(stage, screen).await;
    screen.end(step, seen);

    let step = screen.begin("A gateway replica is killed under load");
    let seen = loss::run(stage).await;
    screen.end(step, seen);

    let step = screen.begin("What each hop costs");
    let seen = hops::run(stage, screen).await;
    screen.end(step, seen);
}
