//! What the cloud tier costs, measured in a world on real traffic: CPU of edge and redirector per packet and per request beside the gateway's
//! own, latency beside a load balancer hop, sessions at the underlay with and without aggregation,
//! CPU with and without disaggregation. It prints figures and judges none.

#![forbid(unsafe_code)]

mod cost;
mod disaggregation;
mod frames;
mod hop;
mod looks;
mod programs;
mod record;
mod scene;
mod sessions;

use clap::{Parser, Subcommand};

use crate::record::Record;

/// Needs root: the world is made of network namespaces, and nothing of it is ever outside them.
#[derive(Parser)]
#[command(after_help = "Example: canal-bench-tier cost --seconds 8")]
struct Flags {
    #[command(subcommand)]
    what: What,
    /// Keep the figures in this file, for `canal-figures cost --measured FILE`; each part has its own section there
    #[arg(long, global = true, value_name = "FILE")]
    json: Option<std::path::PathBuf>,
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
    /// Sessions that are open at once, and the session tables of the servers under the replicas, with and without aggregation
    Sessions(sessions::Size),
    /// CPU per packet that comes to a replica in an aggregated tunnel, beside one that comes bare
    Disaggregation(disaggregation::Size),
    /// Time of a look at the kernel's sockets for owned sessions
    Looks {
        /// Sessions; each has two sockets
        #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(1..=500_000))]
        sessions: u32,
    },
}

fn main() -> anyhow::Result<()> {
    let flags = Flags::parse();
    let record = Record { file: flags.json };
    match flags.what {
        What::Cost { seconds } => cost::run(seconds, &record),
        What::Hop { rate, seconds } => hop::run(rate, seconds, &record),
        What::Sessions(size) => sessions::run(&size, &record),
        What::Disaggregation(size) => disaggregation::run(&size, &record),
        What::Looks { sessions } => looks::run(sessions),
    }
}
