//! Generates the messages of the external authorization API; `protoc` comes from Debian's protobuf-compiler.
fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    tonic_prost_build::configure().build_client(false).build_server(false).compile_protos(&["proto/ext_authz.proto"], &["proto"])?;
    Ok(())
}
