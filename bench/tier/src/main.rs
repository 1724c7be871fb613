//! Cost of the cloud tier, measured in a world on real traffic: CPU of edge and redirector per
//! packet and per request beside the gateway's own; latency beside a load balancer hop. Sessions at
//! the underlay with and without aggregation; CPU with and without disaggregation. It prints
//! figures and does not assess them.

#![forbid(unsafe_code)]

mod cost;
mod disaggregation;
mod frames;
mod hop;
mod load_rounds;
mod looks;
mod one_node;
mod programs;
mod redirected;
mod relay;
mod sessions;

use std::process::ExitCode;

use canal_bench_tier::{record, scene, spread};
use clap::{Parser, Subcommand};

use crate::record::FigureFile;

/// Needs root, because the world consists of network namespaces. No part of it is ever outside
/// them.
#[derive(Parser)]
#[command(after_help = "Example: canal-bench-tier cost --rounds 5 --seconds 3")]
struct Flags {
    #[command(subcommand)]
    what: TierExperiment,
    /// Keep the figures in this file, for `canal-bench-figures cost --measured FILE`; each part has
    /// its own section there
    #[arg(long, global = true, value_name = "FILE")]
    json: Option<std::path::PathBuf>,
}

#[derive(Subcommand)]
enum TierExperiment {
    /// CPU per packet and per request: redirector, edge and tunnel beside the gateway's Layer-7
    /// work
    Cost(load_rounds::LoadRounds),
    /// Latency and CPU through edge and redirector beside a HAProxy load balancer hop (TCP mode) in
    /// the same world
    Hop(load_rounds::LoadRounds),
    /// Sessions that are open at once, and the session tables of the servers under the replicas,
    /// with and without aggregation
    Sessions(sessions::SessionLoad),
    /// CPU per packet that reaches a replica in an aggregated tunnel, compared with one without a
    /// tunnel
    Disaggregation(disaggregation::MeasureTime),
    /// Packets redirected once and twice beside those that are not, by tables that differ: CPU and
    /// latency, without and with delayed links
    Redirected(redirected::RedirectedSize),
    /// Two pods of one node through the gateway beside pod to pod: latency and CPU, without and
    /// with a delayed link
    OneNode(one_node::OneNodeSize),
    /// Precision of the relay of a world's delayed link, its highest rate, and its CPU per frame
    Relay {
        /// Seconds of each rate
        #[arg(long, default_value_t = 3)]
        seconds: u64,
    },
    /// Time of a scan of the kernel's sockets for owned sessions
    Looks {
        /// Sessions; each has two sockets
        #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(1..=500_000))]
        sessions: u32,
    },
}

/// Exits with 2 if the figures could not be measured, as the other benches do.
fn main() -> ExitCode {
    let flags = Flags::parse();
    let record = FigureFile { file: flags.json };
    let measured = match flags.what {
        TierExperiment::Cost(size) => cost::run(&size, &record),
        TierExperiment::Hop(size) => hop::run(&size, &record),
        TierExperiment::Sessions(size) => sessions::run(&size, &record),
        TierExperiment::Disaggregation(size) => disaggregation::run(&size, &record),
        TierExperiment::Redirected(size) => redirected::run(&size, &record),
        TierExperiment::OneNode(size) => one_node::run(&size, &record),
        TierExperiment::Relay { seconds } => relay::run(seconds, &record),
        TierExperiment::Looks { sessions } => looks::run(sessions),
    };
    match measured {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("canal-bench-tier: not measured: {e:#}");
            ExitCode::from(2)
        }
    }
}
