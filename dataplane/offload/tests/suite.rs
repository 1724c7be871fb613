//! The integration tests of every BPF program in the kernel: packets, maps, sizes, and what its verifier counts.
//! `make test` runs each module in a process of its own (`suite MODULE::`).

mod capture;
mod edge;
mod edge_maps;
mod edge_road;
mod frames;
mod inbound;
mod interface_guard;
mod lab;
mod nft;
mod nft_guard;
mod object;
mod pod_guard;
mod redirector;
mod replicas;
mod sessions;
mod tier_object;
mod tier_road;
