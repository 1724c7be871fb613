//! Compiles `bpf/*.bpf.c` with clang into objects that the crate embeds. Stops the build with clang's own words where it fails.

use std::path::PathBuf;
use std::process::Command;

/// cpu v3 (32-bit compares and jumps) is what clang 14 knows and every kernel since 5.1 takes.
const FLAGS: [&str; 8] = ["-O2", "-g", "-Wall", "-Wextra", "-Werror", "-target", "bpf", "-mcpu=v3"];

fn main() {
    let env = |k: &str| std::env::var(k).unwrap_or_else(|_| panic!("cargo did not set {k}"));
    let bpf = PathBuf::from(env("CARGO_MANIFEST_DIR")).join("../../bpf");
    let out = PathBuf::from(env("OUT_DIR")).join("capture.bpf.o");
    for watched in ["capture.bpf.c", "abi/capture.h", "lib/address.h", "lib/count.h"] {
        println!("cargo:rerun-if-changed={}", bpf.join(watched).display());
    }
    println!("cargo:rerun-if-env-changed=CLANG");
    let clang = std::env::var("CLANG").unwrap_or_else(|_| "clang".into());
    let run = Command::new(&clang)
        .args(FLAGS)
        .arg(format!("-I{}", bpf.display()))
        // libbpf's headers as libbpf-sys ships them, so that headers and loader are of one version.
        .arg(format!("-I{}", env("DEP_BPF_INCLUDE")))
        // Where Debian keeps <asm/types.h>; clang for bpf has no multiarch path of its own.
        .arg(format!("-I/usr/include/{}-linux-gnu", env("CARGO_CFG_TARGET_ARCH")))
        .arg("-c")
        .arg(bpf.join("capture.bpf.c"))
        .arg("-o")
        .arg(&out)
        .output();
    match run {
        Ok(o) if o.status.success() => {}
        Ok(o) => panic!("{clang} refused bpf/capture.bpf.c:\n{}", String::from_utf8_lossy(&o.stderr)),
        Err(e) => panic!("cannot run {clang}: {e}; install clang (Debian: apt-get install clang) or set CLANG"),
    }
}
