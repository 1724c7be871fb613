//! The shipped program cannot be ended by a request. Its executable does not contain the name of
//! the crash flag; `tests/crashing-gateway` checks that the executable with the flag does.

use std::process::Command;

const PROGRAM: &str = env!("CARGO_BIN_EXE_canal-gateway");

#[test]
fn crash_hook_is_refused_by_name_and_not_in_the_program() {
    let snapshot = [
        "--replica",
        "gw-1",
        "--az",
        "az1",
        "--snapshot",
        "none",
        "--data-dir",
        "none",
    ];
    let out = Command::new(PROGRAM)
        .args(snapshot)
        .args(["--crash-on-path", "/death"])
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(2), "{stderr}");
    assert!(
        stderr.contains("unexpected argument '--crash-on-path'"),
        "{stderr}"
    );
    let program = std::fs::read(PROGRAM).unwrap();
    for word in ["crash-on-path", "crash_on_path"] {
        assert!(
            !program
                .windows(word.len())
                .any(|bytes| bytes == word.as_bytes()),
            "{word}"
        );
    }
}
