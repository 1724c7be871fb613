//! One case of the figures alone: its world, one run of the load, its cost. It is for profilers,
//! and for a check of one number.

use crate::load::{ConnectPace, LoadRun};
use crate::scene::{AsymmetricMode, CertificateAlgorithm, KeyBenchWorld, Network};

#[derive(clap::Args)]
pub(crate) struct Flags {
    #[arg(long, value_enum, default_value_t = CertificateAlgorithm::Ecdsa)]
    algorithm: CertificateAlgorithm,
    #[arg(long, value_enum, default_value_t = AsymmetricMode::Remote)]
    mode: AsymmetricMode,
    // As many as the lanes of a batch, where batches wait for nothing.
    #[arg(long, default_value_t = 8)]
    concurrency: usize,
    // The default of the load itself.
    #[arg(long, default_value_t = 4.0)]
    seconds: f64,
    /// Share of a core for the node proxy; a whole core by default
    #[arg(long)]
    share: Option<f64>,
    #[arg(long, value_enum, default_value_t = Network::Apart)]
    network: Network,
    /// Sessions without a request
    #[arg(long)]
    handshakes: bool,
}

pub(crate) fn run(flags: &Flags) -> anyhow::Result<()> {
    let scene = KeyBenchWorld::up(flags.algorithm, flags.mode, flags.network)?;
    let Flags {
        concurrency,
        seconds,
        share,
        handshakes,
        ..
    } = *flags;
    println!("node proxy: process {}", scene.node());
    let m = scene.run(&LoadRun {
        pace: ConnectPace::Concurrency(concurrency),
        seconds,
        share,
        handshakes,
    })?;
    println!(
        "{} {}: {:.0} per second, p50 {:.2} ms, p90 {:.2} ms; node {:.0} µs (user {:.0}, system {:.0}), key server {:.0} µs; {} done, {} failed",
        flags.algorithm.name(),
        flags.mode.name(),
        m.per_second,
        m.p50_ms,
        m.p90_ms,
        m.node_us,
        m.user_us,
        m.node_us - m.user_us,
        m.keys_us,
        m.completed,
        m.failed
    );
    if let Some(why) = scene.why() {
        println!("first failure: {why}");
    }
    Ok(())
}
