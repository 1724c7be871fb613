//! What the key server takes off a node proxy, measured in a world on real sessions: the paper's figures 12, 23, 25, 27 and 28. It prints figures
//! and judges none.

#![forbid(unsafe_code)]

mod exchange;
mod figures;
mod limits;
mod load;
mod one;
mod scene;

use clap::{Parser, Subcommand};

/// Needs root: the world is made of network namespaces, and nothing of it is ever outside them.
#[derive(Parser)]
#[command(after_help = "Example: canal-bench-keys figures --rounds 3")]
struct Flags {
    #[command(subcommand)]
    what: What,
    /// Keep idle cores from halting, so that what a hypervisor does for each wake-up is not measured with the rest
    #[arg(long, global = true)]
    awake: bool,
}

#[derive(Subcommand)]
enum What {
    /// All figures, RSA-2048 and ECDSA P-256, without the key server and with it
    Figures(figures::Flags),
    /// One case, for a closer look
    One(one::Flags),
    /// What one bare exchange with another core costs who asks: the kernel's part of a key server
    Exchange(exchange::Flags),
    /// The load alone; run by `figures` inside the world
    Load(load::Flags),
}

fn main() -> anyhow::Result<()> {
    let flags = Flags::parse();
    let _awake = if flags.awake { Some(limits::awake()?) } else { None };
    match flags.what {
        What::Figures(flags) => figures::run(&flags),
        What::One(flags) => one::run(&flags),
        What::Exchange(flags) => exchange::run(&flags),
        What::Load(flags) => load::run(&flags),
    }
}
