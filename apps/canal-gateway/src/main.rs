//! `canal-gateway`: the shipped program. This crate's library implements it.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> anyhow::Result<ExitCode> {
    canal_allocator::return_memory_soon();
    canal_gateway::run(canal_gateway::GatewayFlags::parse())
}
