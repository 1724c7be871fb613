//! The paper's figures that are computed, not measured: the services that share backends (Fig. 19),
//! the blast radius of failures, and the cost of the cloud resources (Table 5). It uses the
//! controller's own planner, and measures nothing but that planner.

#![forbid(unsafe_code)]

mod blast;
mod cost;
mod scale;
mod shards;
mod tier;

use clap::{Parser, Subcommand};

/// Computes figures of the Canal paper with Canal's planner.
#[derive(Parser)]
#[command(version, about)]
struct FiguresArgs {
    #[command(subcommand)]
    figure: Figure,
}

#[derive(Subcommand)]
enum Figure {
    /// Fig. 19: which backends services share, and how even the load is.
    Shards(tier::TierSize),
    /// The blast radius of 1 to 8 failures at once: shuffle sharding beside plain sharding.
    Blast(blast::BlastArgs),
    /// The cost of planning a large tier.
    Scale(scale::ScaleArgs),
    /// Table 5: the cost that redirectors and tunnels save, from measured costs.
    Cost(cost::Flags),
}

fn main() -> anyhow::Result<()> {
    match FiguresArgs::parse().figure {
        Figure::Shards(size) => print!("{}", shards::figure(&size)?),
        Figure::Blast(arguments) => print!("{}", blast::figure(&arguments)?),
        Figure::Scale(arguments) => print!("{}", scale::figure(&arguments)?),
        Figure::Cost(costs) => print!("{}", cost::figure(&costs)?),
    }
    Ok(())
}
