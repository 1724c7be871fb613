//! Compiles every `bpf/*.bpf.c` with clang into objects that the crate embeds. If clang fails, the
//! build stops with clang's own messages.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Flags for clang. CPU version 3 (32-bit compares and jumps) is known to clang 14 and accepted by
/// every kernel since 5.1.
const FLAGS: [&str; 8] = [
    "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-target", "bpf", "-mcpu=v3",
];

fn env(k: &str) -> String {
    std::env::var(k).unwrap_or_else(|_| panic!("cargo did not set {k}"))
}

fn main() {
    let bpf = PathBuf::from(env("CARGO_MANIFEST_DIR")).join("../../bpf");
    let out = PathBuf::from(env("OUT_DIR"));
    for dir in ["", "abi", "lib"] {
        println!("cargo:rerun-if-changed={}", bpf.join(dir).display());
    }
    println!("cargo:rerun-if-env-changed=CLANG");
    for source in sources(&bpf) {
        // capture.bpf.c becomes capture.bpf.o.
        let object = out.join(
            source
                .with_extension("o")
                .file_name()
                .unwrap_or_else(|| panic!("{} has no name", source.display())),
        );
        compile(&bpf, &source, &object);
    }
}

fn sources(bpf: &Path) -> Vec<PathBuf> {
    let entries =
        std::fs::read_dir(bpf).unwrap_or_else(|e| panic!("cannot list {}: {e}", bpf.display()));
    let mut found: Vec<PathBuf> = entries
        .flatten()
        .map(|e| e.path())
        .filter(|p| p.to_string_lossy().ends_with(".bpf.c"))
        .collect();
    found.sort();
    found
}

fn compile(bpf: &Path, source: &Path, object: &Path) {
    let clang = std::env::var("CLANG").unwrap_or_else(|_| "clang".into());
    let run = Command::new(&clang)
        .args(FLAGS)
        .arg(format!("-I{}", bpf.display()))
        // libbpf-sys ships these headers of libbpf, so that headers and loader have the same
        // version.
        .arg(format!("-I{}", env("DEP_BPF_INCLUDE")))
        // Debian has <asm/types.h> in this directory; clang for bpf has no multiarch path of its
        // own.
        .arg(format!(
            "-I/usr/include/{}-linux-gnu",
            env("CARGO_CFG_TARGET_ARCH")
        ))
        .arg("-c")
        .arg(source)
        .arg("-o")
        .arg(object)
        .output();
    match run {
        Ok(o) if o.status.success() => {}
        Ok(o) => panic!(
            "{clang} refused {}:\n{}",
            source.display(),
            String::from_utf8_lossy(&o.stderr)
        ),
        Err(e) => panic!(
            "cannot run {clang}: {e}; fix: install clang (Debian: apt-get install clang) or set CLANG"
        ),
    }
}
