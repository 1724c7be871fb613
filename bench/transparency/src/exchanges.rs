//! Losses of POSTs that meet a close, and of uploads that are refused unread: through the mesh,
//! through other proxies, and without a mesh.

use anyhow::{Context, ensure};
use canal_e2e::exchanges::{BATCH, ExchangeWorld, RaceClient, least_failed};

use crate::bars::{Bar, Bound};

/// Uploads that may fail through the mesh in addition to those that fail without it, of 100.
/// Without a mesh some fail too, by chance; the target is in docs/performance.md.
const POINTS: f64 = 2.0;

/// Number of POSTs that the measurement sends.
#[derive(clap::Args)]
pub(crate) struct RaceSize {
    /// POSTs through each proxy, a multiple of 300
    #[arg(long, default_value_t = 3_000)]
    posts: u64,
}

/// Number of uploads that the measurement sends.
#[derive(clap::Args)]
pub(crate) struct UploadsSize {
    /// Uploads of each client with and without the mesh, a multiple of 10
    #[arg(long, default_value_t = 1_000)]
    uploads: u64,
}

pub(crate) fn race(size: &RaceSize) -> anyhow::Result<Vec<Bar>> {
    ensure!(
        size.posts > 0 && size.posts.is_multiple_of(BATCH),
        "--posts {} is not valid; fix: give a multiple of {BATCH}",
        size.posts
    );
    let world = ExchangeWorld::up("bench-race");
    let mut bars = Vec::new();
    for (client, words) in [
        (RaceClient::NewConnections, "on new connections"),
        (RaceClient::KeptConnection, "on one connection"),
    ] {
        let before = world.sent_again();
        let canal = world.race(client, size.posts);
        println!(
            "canal, {words}: of {} POSTs {canal:?}, {} sent again",
            size.posts,
            world.sent_again() - before
        );
        // Without a close during a POST the figures would prove nothing.
        ensure!(canal.closes > 0, "no POST met a close");
        // The comparison is with the best proxy that, like Canal, sends no POST twice.
        let best = least_failed(&world.race_beside(client, size.posts))
            .context("no other proxy that sends no POST twice; fix: `setup/install bench` installs nginx, HAProxy and Envoy")?;
        let bar = |what: &str, figure: u64, most: u64| {
            Bar::new(
                format!("{words}: {what}"),
                figure as f64,
                Bound::AtMost(most as f64),
            )
        };
        bars.extend([
            bar(
                "POSTs lost whose first byte came after the close",
                canal.failed_after_close,
                0,
            ),
            bar("POSTs that the application read twice", canal.twice, 0),
            bar("POSTs answered and not read", canal.lost, 0),
            bar(
                "POSTs lost, beside the best other proxy",
                canal.failed,
                best,
            ),
        ]);
    }
    Ok(bars)
}

pub(crate) fn uploads(size: &UploadsSize) -> anyhow::Result<Vec<Bar>> {
    ensure!(
        size.uploads >= 10 && size.uploads.is_multiple_of(10),
        "--uploads {} is not valid; fix: give a multiple of 10",
        size.uploads
    );
    let world = ExchangeWorld::up("bench-uploads");
    let percent = |failed: u64| 100.0 * failed as f64 / size.uploads as f64;
    let bar = |client: &str| {
        let failures = world.uploads(client, size.uploads);
        println!(
            "{client}: of {} uploads refused unread: {failures:?}",
            size.uploads
        );
        let bound = Bound::AtMost(percent(failures.unmeshed) + POINTS);
        Bar::new(
            format!("{client}: % of uploads without an answer, beside those without a mesh + 2"),
            percent(failures.meshed),
            bound,
        )
    };
    Ok(["curl", "python"].map(bar).into())
}
