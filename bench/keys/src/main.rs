//! The work that the key server saves a node proxy, measured in a world on real sessions: the
//! paper's figures 12, 23, 24, 25, 27 and 28. It prints figures and does not assess them.

#![forbid(unsafe_code)]

mod batched;
mod exchange;
mod figure_spread;
mod figures;
mod lanes;
mod limits;
mod load;
mod one;
mod profile;
mod scene;
mod share;
mod tables;

use clap::{Parser, Subcommand};

/// Needs root, because the world consists of network namespaces. No part of it is ever outside
/// them.
#[derive(Parser)]
#[command(after_help = "Example: canal-bench-keys figures --rounds 3")]
struct Flags {
    #[command(subcommand)]
    what: Experiment,
    /// Keep idle cores from halting, so that what a hypervisor does for each wake-up is not
    /// measured with the rest
    #[arg(long, global = true)]
    awake: bool,
}

#[derive(Subcommand)]
enum Experiment {
    /// All figures, RSA-2048 and ECDSA P-256, without the key server and with it
    Figures(figures::Flags),
    /// One case alone, for profilers
    One(one::Flags),
    /// The node proxy's CPU time for a session by activity, and the lower bound for any key server
    Profile(profile::ProfileFlags),
    /// Figure 24: the fraction of a request's time that the key server and the path through the
    /// gateway take
    Share(share::ShareFlags),
    /// Figure 25's slowdown below eight concurrent sessions: a local key whose operations run in
    /// batches of eight, or after 1 ms
    Batched(batched::BatchedFlags),
    /// The CPU time that an exchange with another core costs its sender: the kernel's part of a key
    /// server's cost
    Exchange(exchange::Flags),
    /// The load alone; run by `figures` inside the world
    Load(load::Flags),
    /// The server alone that `batched` measures
    Lanes(lanes::LanesFlags),
}

fn main() -> anyhow::Result<()> {
    let flags = Flags::parse();
    let _awake = if flags.awake {
        Some(limits::awake()?)
    } else {
        None
    };
    match flags.what {
        Experiment::Figures(flags) => figures::run(&flags),
        Experiment::One(flags) => one::run(&flags),
        Experiment::Exchange(flags) => exchange::run(&flags),
        Experiment::Profile(flags) => profile::run(&flags),
        Experiment::Share(flags) => share::run(&flags),
        Experiment::Batched(flags) => batched::run(&flags),
        Experiment::Load(flags) => load::run(&flags),
        Experiment::Lanes(flags) => lanes::run(&flags),
    }
}
