//! One case of the figures alone: its world, one run of the load, what it cost. For profilers, and for a second look at one number.

use crate::scene::{Algorithm, Mode, Pace, Run, Scene};

#[derive(clap::Args)]
pub(crate) struct Flags {
    #[arg(long, value_enum, default_value_t = Algorithm::Ecdsa)]
    algorithm: Algorithm,
    #[arg(long, value_enum, default_value_t = Mode::Remote)]
    mode: Mode,
    #[arg(long, default_value_t = 8)]
    concurrency: usize,
    #[arg(long, default_value_t = 4.0)]
    seconds: f64,
    /// Of a core, for the node proxy; without it: a whole one
    #[arg(long)]
    share: Option<f64>,
    /// Sessions without a request
    #[arg(long)]
    handshakes: bool,
}

pub(crate) fn run(flags: &Flags) -> anyhow::Result<()> {
    let scene = Scene::up(flags.algorithm, flags.mode)?;
    let Flags { concurrency, seconds, share, handshakes, .. } = *flags;
    println!("node proxy: process {}", scene.node());
    let m = scene.run(&Run { pace: Pace::Concurrency(concurrency), seconds, share, handshakes })?;
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
        m.done,
        m.failed
    );
    if let Some(why) = scene.why() {
        println!("first failure: {why}");
    }
    Ok(())
}
