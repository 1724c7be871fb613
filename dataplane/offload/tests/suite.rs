//! Integration tests of every BPF program in the kernel: packets, maps, sizes, and the verifier's
//! count of instructions. `make test` runs each module in a process of its own (`suite MODULE::`).

mod capture;
mod connect_tables;
mod edge;
mod edge_forwarding;
mod edge_maps;
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
mod tier_forwarding;
mod tier_object;
