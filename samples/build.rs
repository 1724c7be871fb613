//! Compiles the proto files of the services that samples serve or call.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    tonic_prost_build::configure().compile_protos(
        &[
            "proto/echo.proto",
            "proto/ext_authz.proto",
            "proto/workload.proto",
        ],
        &["proto"],
    )?;
    Ok(())
}
