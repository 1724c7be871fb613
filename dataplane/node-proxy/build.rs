//! Generates the Rust side of the SPIFFE Workload API; `protoc` comes from Debian's
//! protobuf-compiler.
fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    tonic_prost_build::configure()
        .btree_map(".")
        .compile_protos(&["proto/workload.proto"], &["proto"])?;
    Ok(())
}
