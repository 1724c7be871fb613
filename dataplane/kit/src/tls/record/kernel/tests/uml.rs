//! User-mode Linux: this test binary again, as the first process of a kernel that has TLS. It sees the machine's files, read-only, has a
//! loopback of its own and nothing else, and is killed when its time is over.

use std::ffi::CString;
use std::fs;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::mount::MountFlags;
use rustix::process::{Pid, Signal, kill_process_group};
use rustix::system::{RebootCommand, finit_module, reboot};

/// The folder of the kernel's modules, told to the first process.
const MODULES: &str = "CANAL_UML_MODULES";
pub(super) const TLS: [&str; 1] = ["net/tls/tls"];
/// AES-GCM, in the order of its needs.
pub(super) const CIPHER: [&str; 4] = ["crypto/gf128mul", "crypto/ghash-generic", "crypto/ctr", "crypto/gcm"];
const LIMIT: Duration = Duration::from_secs(120);

/// Where the kernel is, and its modules.
fn found() -> Result<(PathBuf, PathBuf), String> {
    let mend = "install Debian's user-mode-linux (setup/install test does)";
    let path = std::env::var_os("PATH").unwrap_or_default();
    let kernel = std::env::split_paths(&path).map(|dir| dir.join("linux.uml")).find(|p| p.is_file());
    let kernel = kernel.ok_or_else(|| format!("linux.uml is not in PATH; {mend}"))?;
    let all = kernel.with_file_name("../lib/uml/modules");
    let mut versions = fs::read_dir(&all).into_iter().flatten().flatten().map(|e| e.path().join("kernel"));
    let modules = versions.find(|dir| dir.join("net/tls/tls.ko").is_file());
    Ok((kernel, modules.ok_or_else(|| format!("{} has no tls.ko; {mend}", all.display()))?))
}

/// Builds what is preloaded into it, in `folder`.
fn preloaded(folder: &Path) -> PathBuf {
    let library = folder.join("xstate.so");
    let mut cc = Command::new("cc")
        .args(["-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-x", "c", "-", "-o"])
        .arg(&library)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap_or_else(|e| panic!("cc: {e}; install Debian's gcc (setup/install build does)"));
    cc.stdin.take().unwrap().write_all(include_bytes!("xstate.c")).unwrap();
    assert!(cc.wait().unwrap().success(), "xstate.c does not compile");
    library
}

/// Boots, runs the test `case` alone, and returns what was said on the console.
pub(super) fn run(case: &str) -> String {
    let (kernel, modules) = found().unwrap_or_else(|e| panic!("{e}"));
    let folder = tempfile::tempdir().unwrap();
    let console = folder.path().join("console");
    let out = fs::File::create(&console).unwrap();
    let mut child = Command::new(kernel)
        .args(["mem=256M", "rootfstype=hostfs", "rootflags=/", "ro", "con=null", "con0=null,fd:1", "panic=-1", "quiet"])
        .arg(format!("uml_dir={}", folder.path().display()))
        .arg(format!("init={}", std::env::current_exe().unwrap().display()))
        .arg(format!("{MODULES}={}", modules.canonicalize().unwrap().display()))
        .args(["--", "--exact", case, "--nocapture", "--test-threads=1"])
        // Its memory is a file.
        .env("TMPDIR", folder.path())
        .env("HOME", folder.path())
        .env("LD_PRELOAD", preloaded(folder.path()))
        .stdin(Stdio::null())
        .stderr(out.try_clone().unwrap())
        .stdout(out)
        .process_group(0)
        .spawn()
        .unwrap();
    let end = Instant::now() + LIMIT;
    let ended = loop {
        match child.try_wait().unwrap() {
            Some(_) => break true,
            None if Instant::now() > end => break false,
            None => std::thread::sleep(Duration::from_millis(50)),
        }
    };
    // Its processes are the machine's as well.
    let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
    let _ = child.wait();
    let said = String::from_utf8_lossy(&fs::read(&console).unwrap()).replace('\r', "");
    assert!(ended, "user-mode Linux did not end in {LIMIT:?}\n{said}");
    said
}

/// On the console, so that [`run`] hears it.
pub(super) fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "lab: {text}");
    let _ = out.flush();
}

/// Inside, runs `work` and switches off; elsewhere does nothing.
pub(super) fn first_process(work: impl FnOnce(&Modules) + std::panic::UnwindSafe) {
    let Ok(modules) = std::env::var(MODULES) else { return };
    assert_eq!(std::process::id(), 1, "{MODULES} is for the first process");
    // Also when nobody is left to kill it.
    std::thread::spawn(|| {
        std::thread::sleep(LIMIT);
        say("its time is over");
        let _ = reboot(RebootCommand::PowerOff);
    });
    let done = std::panic::catch_unwind(|| {
        settle_in();
        work(&Modules(modules.into()));
    });
    say(if done.is_ok() { "all done" } else { "failed" });
    let _ = reboot(RebootCommand::PowerOff);
}

fn settle_in() {
    rustix::mount::mount("proc", "/proc", "proc", MountFlags::empty(), None).unwrap();
    let up = Command::new("ip").args(["link", "set", "lo", "up"]).env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").status().unwrap();
    assert!(up.success());
}

/// The kernel's, in their folder.
pub(super) struct Modules(PathBuf);

impl Modules {
    /// Those that are not loaded yet.
    pub(super) fn load(&self, names: &[&str]) {
        for name in names {
            let file = rustix::fs::open(self.0.join(format!("{name}.ko")), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).unwrap();
            match finit_module(&file, &CString::default(), 0) {
                Ok(()) | Err(rustix::io::Errno::EXIST) => {}
                Err(e) => panic!("{name}: {e}"),
            }
        }
    }
}
