//! Generates Rust from `bpf/abi/*.h`. Fails the build, with the header's name, where libclang refuses one.

use std::path::PathBuf;

fn main() {
    let root = PathBuf::from(std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("../../bpf");
    let out = PathBuf::from(std::env::var("OUT_DIR").expect("cargo sets it"));
    let header = root.join("abi/capture.h");
    println!("cargo:rerun-if-changed={}", header.display());
    bindgen::Builder::default()
        .header(header.to_string_lossy())
        .allowlist_type("canal_.*")
        .allowlist_var("CANAL_.*")
        .rustified_enum("canal_.*")
        .derive_default(true)
        .derive_eq(true)
        .derive_hash(true)
        .use_core()
        .rust_edition(bindgen::RustEdition::Edition2024)
        .generate()
        .unwrap_or_else(|e| panic!("{}: libclang refused it: {e}; is linux-libc-dev installed?", header.display()))
        .write_to_file(out.join("capture.rs"))
        .unwrap_or_else(|e| panic!("cannot write the bindings into {}: {e}", out.display()));
}
