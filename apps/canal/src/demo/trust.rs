//! Step: zero trust on real traffic. A policy lets the page ask for details and nobody else; `canal explain` says so beforehand; beta's private
//! keys are in key servers, and nowhere on its nodes.

use std::time::Duration;

use crate::demo::screen::{Promise, Screen};
use crate::demo::stage::{Stage, client};
use crate::demo::traffic::{DETAILS, PAGE, at};
use crate::exit::Outcome;

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

pub(crate) async fn run(stage: &Stage, screen: &mut Screen) -> Outcome<Vec<Promise>> {
    let mut promises = vec![asked(stage, "200", "before: alpha's client is answered by details").await?];
    let took = stage.apply("alpha", "details-readers.yaml", POLICY.to_owned()).await?;
    promises.push(
        asked(stage, "403", &format!("a policy for the page alone, applied in {} ms: the client is refused", took.as_millis())).await?,
    );
    promises.push(page(stage).await?);
    for (who, says) in [("bookinfo/client", "denies"), ("bookinfo/productpage", "passes")] {
        let lines = stage.canal(&explain(who)).await?;
        let held = lines.iter().any(|line| line.contains(says));
        promises.push(Promise::new(held, format!("`canal explain` says of {who}: {says}"), lines.last().cloned().unwrap_or_default()));
        if says == "denies" {
            screen.note(lines);
        }
    }
    stage.canal(&["delete", "--tenant", "alpha", "authorizationpolicy", "details-readers", "-n", "bookinfo"]).await?;
    promises.push(asked(stage, "200", "after its removal the client is answered again").await?);
    promises.extend(keys(stage).await?);
    Ok(promises)
}

fn explain(who: &str) -> [&str; 9] {
    ["explain", "--tenant", "alpha", "--from", who, "--to", "bookinfo/details:9080", "--path", "/details/0"]
}

/// The status that alpha's client gets of details. A change may still be on its way to the last data plane.
async fn asked(stage: &Stage, expected: &str, what: &str) -> Outcome<Promise> {
    let url = format!("http://{}/details/0", at(false, DETAILS, 9080));
    let argv = ["curl", "-sS", "--max-time", "5", "-o", "/dev/null", "-w", "%{http_code}", &url];
    let mut said = stage.run(&client("alpha"), &argv).await?;
    for _ in 0..20 {
        if said.stdout.trim() == expected {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        said = stage.run(&client("alpha"), &argv).await?;
    }
    Ok(Promise::new(said.stdout.trim() == expected, format!("{what} ({expected})"), said.brief()))
}

/// The page asks for details under its own identity.
async fn page(stage: &Stage) -> Outcome<Promise> {
    let url = format!("http://{}/productpage", at(false, PAGE, 9080));
    let said = stage.run(&client("alpha"), &["curl", "-sS", "--fail-with-body", "--max-time", "10", &url]).await?;
    let page: serde_json::Value = serde_json::from_str(&said.stdout).unwrap_or_default();
    let held = said.code == Some(0) && page["details"]["title"].is_string();
    Ok(Promise::new(held, "the page, which may, still has its details", format!("details by {}", page["details"]["pod"])))
}

/// Beta keeps its keys in key servers.
async fn keys(stage: &Stage) -> Outcome<Vec<Promise>> {
    let mut promises = Vec::new();
    for node in ["beta-n1", "beta-n2"] {
        let files = stage.run(node, &["sh", "-c", "grep -rl 'PRIVATE KEY' --exclude-dir=bpffs . | wc -l"]).await?;
        let metrics = stage.run(node, &["curl", "-sS", "--max-time", "5", "http://127.0.0.1:15020/metrics"]).await?;
        let answers = metrics.stdout.lines().filter(|line| line.starts_with("canal_keys_answers_total"));
        let count: f64 = answers.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum();
        promises.push(Promise::new(
            files.stdout.trim() == "0" && count > 0.0,
            format!("{node} shakes hands without a private key: a key server does it"),
            format!("{} files with private keys, {count} handshakes by key servers", files.stdout.trim()),
        ));
    }
    Ok(promises)
}
