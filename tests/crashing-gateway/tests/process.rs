//! The test program has the flag that the shipped one must not have
//! (`apps/canal-gateway/tests/shipped.rs`); otherwise that test would prove nothing.

const PROGRAM: &str = env!("CARGO_BIN_EXE_crashing-gateway");

#[test]
fn crash_hook_is_in_the_test_program() {
    let program = std::fs::read(PROGRAM).unwrap();
    let word = b"crash-on-path";
    assert!(program.windows(word.len()).any(|bytes| bytes == word));
    let help = std::process::Command::new(PROGRAM)
        .arg("--help")
        .output()
        .unwrap();
    assert!(String::from_utf8_lossy(&help.stdout).contains("--crash-on-path"));
}
