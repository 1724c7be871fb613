//! Step: zero trust on real traffic. A policy allows only the page to call details, and `canal
//! explain` reports that beforehand. Beta's private keys are in key servers, and nowhere on its
//! nodes.

use std::time::Duration;

use crate::demo::demo_world::{DemoWorld, client};
use crate::demo::screen::{DemoOutput, Expectation};
use crate::demo::traffic::{DETAILS, PAGE, at};
use crate::exit::VerbResult;

const POLICY: &str = "apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: details-readers, namespace: bookinfo}
spec:
  selector: {matchLabels: {app: details}}
  action: ALLOW
  rules:
  - from: [{source: {principals: [alpha.example/ns/bookinfo/sa/productpage]}}]
    to: [{operation: {methods: [GET], paths: [/details/*]}}]
";

pub(crate) async fn run(
    world: &DemoWorld,
    screen: &mut DemoOutput,
) -> VerbResult<Vec<Expectation>> {
    let mut expectations = vec![
        expect_status(
            world,
            "200",
            "before: alpha's client is answered by details",
        )
        .await?,
    ];
    let took = world
        .apply("alpha", "details-readers.yaml", POLICY.to_owned())
        .await?;
    expectations.push(
        expect_status(
            world,
            "403",
            &format!(
                "a policy for the page alone, applied in {} ms: the client is refused",
                took.as_millis()
            ),
        )
        .await?,
    );
    expectations.push(page(world).await?);
    for (source, outcome) in [
        ("bookinfo/client", "denies"),
        ("bookinfo/productpage", "passes"),
    ] {
        let lines = world.canal(&explain(source)).await?;
        let is_met = lines.iter().any(|line| line.contains(outcome));
        expectations.push(Expectation::new(
            is_met,
            format!("`canal explain` reports of {source}: {outcome}"),
            lines.last().cloned().unwrap_or_default(),
        ));
        // The audience sees the explanation of the refusal only; that of the other is checked.
        if outcome == "denies" {
            screen.note(lines);
        }
    }
    world
        .canal(&[
            "delete",
            "--tenant",
            "alpha",
            "authorizationpolicy",
            "details-readers",
            "-n",
            "bookinfo",
        ])
        .await?;
    expectations.push(
        expect_status(
            world,
            "200",
            "after its removal the client is answered again",
        )
        .await?,
    );
    expectations.extend(keys(world).await?);
    Ok(expectations)
}

fn explain(source: &str) -> [&str; 9] {
    [
        "explain",
        "--tenant",
        "alpha",
        "--from",
        source,
        "--to",
        "bookinfo/details:9080",
        "--path",
        "/details/0",
    ]
}

/// Checks the status that alpha's client gets from details. It retries, because a change may not
/// have reached the last data plane.
async fn expect_status(world: &DemoWorld, expected: &str, what: &str) -> VerbResult<Expectation> {
    let url = format!("http://{}/details/0", at(false, DETAILS, 9080));
    let argv = [
        "curl",
        "-sS",
        // It only ends a request that hangs.
        "--max-time",
        "5",
        "-o",
        "/dev/null",
        "-w",
        "%{http_code}",
        &url,
    ];
    let mut output = world.run(&client("alpha"), &argv).await?;
    for _ in 0..20 {
        if output.stdout.trim() == expected {
            break;
        }
        // 20 tries, two seconds together: twice the time in which a change must be in force.
        tokio::time::sleep(Duration::from_millis(100)).await;
        output = world.run(&client("alpha"), &argv).await?;
    }
    Ok(Expectation::new(
        output.stdout.trim() == expected,
        format!("{what} ({expected})"),
        output.brief(),
    ))
}

/// Checks that the page can call details with its own identity.
async fn page(world: &DemoWorld) -> VerbResult<Expectation> {
    let url = format!("http://{}/productpage", at(false, PAGE, 9080));
    let output = world
        .run(
            &client("alpha"),
            &["curl", "-sS", "--fail-with-body", "--max-time", "10", &url],
        )
        .await?;
    let page: serde_json::Value = serde_json::from_str(&output.stdout).unwrap_or_default();
    let is_met = output.code == Some(0) && page["details"]["title"].is_string();
    Ok(Expectation::new(
        is_met,
        "the page, which the policy admits, still gets its details",
        format!("details by {}", page["details"]["pod"]),
    ))
}

/// Checks that beta's private keys are only in key servers.
async fn keys(world: &DemoWorld) -> VerbResult<Vec<Expectation>> {
    let mut expectations = Vec::new();
    for node in ["beta-n1", "beta-n2"] {
        let files = world
            .run(
                node,
                &[
                    "sh",
                    "-c",
                    // A command on a host runs in the host's data directory. Pinned BPF objects in
                    // `bpffs` cannot be read.
                    "grep -rl 'PRIVATE KEY' --exclude-dir=bpffs . | wc -l",
                ],
            )
            .await?;
        let metrics = world
            .run(
                node,
                &[
                    "curl",
                    "-sS",
                    // It only ends a request that hangs.
                    "--max-time",
                    "5",
                    "http://127.0.0.1:15020/metrics",
                ],
            )
            .await?;
        let answers = metrics
            .stdout
            .lines()
            .filter(|line| line.starts_with("canal_keys_answers_total"));
        // A node that made no handshake at all would pass the search for key files alone.
        let count: f64 = answers
            .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
            .sum();
        expectations.push(Expectation::new(
            files.stdout.trim() == "0" && count > 0.0,
            format!("{node} performs TLS handshakes without a private key: a key server signs"),
            format!(
                "{} files with private keys, {count} handshakes by key servers",
                files.stdout.trim()
            ),
        ));
    }
    Ok(expectations)
}
