//! Generates the message types of Envoy's external authorization API from `proto/ext_authz.proto`.
//! `protoc` comes from Debian's package protobuf-compiler.
fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    tonic_prost_build::configure()
        .build_client(false)
        .build_server(false)
        .compile_protos(&["proto/ext_authz.proto"], &["proto"])?;
    Ok(())
}
