//! Generates the Rust types of the protos. It needs `protoc`, for example from Debian's
//! protobuf-compiler.
fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    tonic_prost_build::configure()
        .btree_map(".canal.program.v1")
        // It contains a private key.
        .skip_debug([".canal.program.v1.ListenerCertificate"])
        .compile_protos(
            &[
                "proto/discovery.proto",
                "proto/citadel.proto",
                "proto/program.proto",
                "proto/api.proto",
                "proto/fleet.proto",
                "proto/observe.proto",
            ],
            &["proto"],
        )?;
    Ok(())
}
