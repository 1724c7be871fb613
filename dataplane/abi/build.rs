//! Generates Rust types from `bpf/abi/*.h` with bindgen. If libclang rejects a header, the build
//! fails and names that header.

use std::path::{Path, PathBuf};

fn main() {
    let root = PathBuf::from(std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets it"))
        .join("../../bpf/abi");
    let out = PathBuf::from(std::env::var("OUT_DIR").expect("cargo sets it"));
    for name in ["capture", "inbound", "interface_guard", "pod", "tier"] {
        generate(
            &root.join(name).with_extension("h"),
            &out.join(name).with_extension("rs"),
        );
    }
}

fn generate(header: &Path, out: &Path) {
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
        .unwrap_or_else(|e| {
            panic!(
                "{}: libclang refused it: {e}; fix: install linux-libc-dev",
                header.display()
            )
        })
        .write_to_file(out)
        .unwrap_or_else(|e| panic!("cannot write the bindings to {}: {e}", out.display()));
}
