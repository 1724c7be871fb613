//! The differences that applications observe between the mesh and a plain network, measured in
//! worlds on real traffic. It prints each figure beside its bar. Exit status 0: all bars hold; 1: a
//! bar is missed; 2: a figure could not be measured.

#![forbid(unsafe_code)]

mod address;
mod bars;
mod direct;
mod exchanges;
mod scaleout;

use std::path::PathBuf;
use std::process::ExitCode;

use canal_bench_tier::record::FigureFile;
use clap::{Parser, Subcommand};

use crate::bars::Bar;

/// Needs root, because the world consists of network namespaces. No part of it is ever outside
/// them.
#[derive(Parser)]
#[command(
    after_help = "Example: canal-bench-transparency address --parts 6 --seconds 10\nExit status: 0 all bars hold, 1 one is missed, 2 not measured"
)]
struct TransparencyFlags {
    #[command(subcommand)]
    what: TransparencyExperiment,
    /// Keep the figures in this file; each experiment has its own section there
    #[arg(long, global = true, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Subcommand)]
enum TransparencyExperiment {
    /// New connections from 16 pods to one pod's port, dialled from the client's address: rate,
    /// losses, and CPU over time
    Address(address::ConnectionsSize),
    /// POSTs that are sent at about the time when the application closes, through the mesh and
    /// through other proxies
    Race(exchanges::RaceSize),
    /// Uploads that the application refuses before it has read them, with and without the mesh
    Uploads(exchanges::UploadsSize),
    /// Two replicas become six under load: the share of each new one, the requests lost, and the
    /// reach of one client
    Scaleout,
    /// CPU of both nodes on the direct path beside a pair of HAProxy with mTLS, and bulk beside no
    /// mesh
    Direct(direct::DirectSize),
}

fn main() -> ExitCode {
    let flags = TransparencyFlags::parse();
    let record = FigureFile { file: flags.json };
    // The library of the end-to-end tests panics when a world does not work.
    let measured = std::panic::catch_unwind(|| match &flags.what {
        TransparencyExperiment::Address(size) => address::run(size, &record),
        TransparencyExperiment::Race(size) => exchanges::race(size),
        TransparencyExperiment::Uploads(size) => exchanges::uploads(size),
        TransparencyExperiment::Scaleout => Ok(scaleout::run()),
        TransparencyExperiment::Direct(size) => direct::run(size, &record),
    });
    let bars: Vec<Bar> = match measured {
        Ok(Ok(bars)) => bars,
        Ok(Err(e)) => {
            eprintln!("canal-bench-transparency: not measured: {e:#}");
            return ExitCode::from(2);
        }
        Err(_) => {
            eprintln!("canal-bench-transparency: not measured; the reason is above");
            return ExitCode::from(2);
        }
    };
    let (text, is_well) = bars::table(&bars);
    print!("\n{text}");
    if is_well {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
