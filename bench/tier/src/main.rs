//! What the cloud tier costs, measured in a world on real traffic: CPU of edge and redirector per packet and per request beside the gateway's
//! own, latency beside a load balancer hop, sessions at the underlay with and without aggregation. It prints figures and judges none.

#![forbid(unsafe_code)]

mod cost;
mod hop;
mod programs;
mod scene;
mod sessions;

use clap::{Parser, Subcommand};

/// Needs root: the world is made of network namespaces, and nothing of it is ever outside them.
#[derive(Parser)]
#[command(after_help = "Example: canal-bench-tier cost --seconds 8")]
struct Flags {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// CPU per packet and per request: redirector, edge and tunnel beside the gateway's Layer-7 work
    Cost {
        /// Seconds of load
        #[arg(long, default_value_t = 8)]
        seconds: u32,
    },
    /// Latency and CPU through edge and redirector beside a HAProxy load balancer hop (TCP mode) in the same world
    Hop {
        /// Requests per second (open loop)
        #[arg(long, default_value_t = 500)]
        rate: u32,
        /// Seconds of load for each path
        #[arg(long, default_value_t = 8)]
        seconds: u32,
    },
    /// Sessions at the underlay server's session table with and without aggregation
    Sessions {
        /// Sessions that clients hold
        #[arg(long, default_value_t = 100_000)]
        count: u32,
    },
}

fn main() -> anyhow::Result<()> {
    match Flags::parse().what {
        What::Cost { seconds } => cost::run(seconds),
        What::Hop { rate, seconds } => hop::run(rate, seconds),
        What::Sessions { count } => sessions::run(count),
    }
}
