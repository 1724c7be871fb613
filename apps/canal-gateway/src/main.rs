//! `canal-gateway`: the shipped program. What it does is this crate's library.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> anyhow::Result<ExitCode> {
    canal_gateway::run(canal_gateway::GatewayFlags::parse(), None)
}
