//! User-mode Linux: runs this test binary again as the first process of a kernel with TLS. It sees
//! the host's files read-only, has its own loopback and nothing else, and is killed after a time
//! limit.

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

/// Environment variable with the folder of the kernel's modules, for the first process.
const MODULES: &str = "CANAL_UML_MODULES";
/// The kernel module that implements TLS.
pub const TLS: [&str; 1] = ["net/tls/tls"];
/// Modules of AES-GCM, in the order of their dependencies.
pub const CIPHER: [&str; 4] = [
    "crypto/gf128mul",
    "crypto/ghash-generic",
    "crypto/ctr",
    "crypto/gcm",
];
/// Time after which a kernel that still runs is killed. It only ends a hang.
const LIMIT: Duration = Duration::from_secs(120);

/// Finds the kernel and the folder of its modules.
fn find_kernel() -> Result<(PathBuf, PathBuf), String> {
    let fix = "install Debian's user-mode-linux (setup/install test does)";
    let path = std::env::var_os("PATH").unwrap_or_default();
    let kernel = std::env::split_paths(&path)
        .map(|dir| dir.join("linux.uml"))
        .find(|p| p.is_file());
    let kernel = kernel.ok_or_else(|| format!("linux.uml is not in PATH; {fix}"))?;
    let all = kernel.with_file_name("../lib/uml/modules");
    let mut versions = fs::read_dir(&all)
        .into_iter()
        .flatten()
        .flatten()
        .map(|e| e.path().join("kernel"));
    let modules = versions.find(|dir| dir.join("net/tls/tls.ko").is_file());
    Ok((
        kernel,
        modules.ok_or_else(|| format!("{} has no tls.ko; {fix}", all.display()))?,
    ))
}

/// Compiles the library that is preloaded into user-mode Linux, in `folder`.
fn preloaded(folder: &Path) -> PathBuf {
    let library = folder.join("xstate.so");
    let mut cc = Command::new("cc")
        .args([
            "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-x", "c", "-", "-o",
        ])
        .arg(&library)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap_or_else(|e| {
            panic!("cc: {e}; fix: install Debian's gcc (setup/install build does)")
        });
    cc.stdin
        .take()
        .unwrap()
        .write_all(include_bytes!("xstate.c"))
        .unwrap();
    assert!(cc.wait().unwrap().success(), "xstate.c does not compile");
    library
}

/// Boots the kernel, runs only the test `case`, and returns the console output.
pub fn run(case: &str) -> String {
    let (kernel, modules) = find_kernel().unwrap_or_else(|e| panic!("{e}"));
    let folder = tempfile::tempdir().unwrap();
    let console = folder.path().join("console");
    let out = fs::File::create(&console).unwrap();
    let mut child = Command::new(kernel)
        // The kernel uses the host's files read-only, and ends at once at a panic. Nobody measured
        // how much memory a test needs.
        .args([
            "mem=256M",
            "rootfstype=hostfs",
            "rootflags=/",
            "ro",
            "con=null",
            "con0=null,fd:1",
            "panic=-1",
            "quiet",
        ])
        .arg(format!("uml_dir={}", folder.path().display()))
        .arg(format!(
            "init={}",
            std::env::current_exe().unwrap().display()
        ))
        .arg(format!(
            "{MODULES}={}",
            modules.canonicalize().unwrap().display()
        ))
        .args(["--", "--exact", case, "--nocapture", "--test-threads=1"])
        // User-mode Linux keeps its memory in a file there.
        .env("TMPDIR", folder.path())
        .env("HOME", folder.path())
        .env("LD_PRELOAD", preloaded(folder.path()))
        .stdin(Stdio::null())
        .stderr(out.try_clone().unwrap())
        .stdout(out)
        // The process group is killed below, because the kernel starts processes of its own.
        .process_group(0)
        .spawn()
        .unwrap();
    let end = Instant::now() + LIMIT;
    let ended = loop {
        match child.try_wait().unwrap() {
            Some(_) => break true,
            None if Instant::now() > end => break false,
            // Short beside `LIMIT`.
            None => std::thread::sleep(Duration::from_millis(50)),
        }
    };
    // Its processes are also processes of the host.
    // After an orderly end the group has no process left, and the call fails.
    let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
    let _ = child.wait();
    // The console ends its lines with CR and LF.
    let said = String::from_utf8_lossy(&fs::read(&console).unwrap()).replace('\r', "");
    assert!(ended, "user-mode Linux did not end in {LIMIT:?}\n{said}");
    said
}

/// Prints to the console, which [`run`] returns.
pub fn print_line(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "lab: {text}");
    let _ = out.flush();
}

/// Runs `work` inside user-mode Linux and powers off. It does nothing elsewhere.
pub fn first_process(work: impl FnOnce(&Modules) + std::panic::UnwindSafe) {
    let Ok(modules) = std::env::var(MODULES) else {
        return;
    };
    assert_eq!(std::process::id(), 1, "{MODULES} is for the first process");
    // The time limit also applies if no other process is left to kill it.
    std::thread::spawn(|| {
        std::thread::sleep(LIMIT);
        print_line("its time is over");
        let _ = reboot(RebootCommand::PowerOff);
    });
    let done = std::panic::catch_unwind(|| {
        settle_in();
        work(&Modules(modules.into()));
    });
    print_line(if done.is_ok() { "all done" } else { "failed" });
    let _ = reboot(RebootCommand::PowerOff);
}

fn settle_in() {
    rustix::mount::mount("proc", "/proc", "proc", MountFlags::empty(), None).unwrap();
    let up = Command::new("ip")
        .args(["link", "set", "lo", "up"])
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .status()
        .unwrap();
    assert!(up.success());
}

/// Folder of the kernel's modules.
pub struct Modules(PathBuf);

impl Modules {
    /// Loads the modules that are not loaded yet.
    pub fn load(&self, names: &[&str]) {
        for name in names {
            let file = rustix::fs::open(
                self.0.join(format!("{name}.ko")),
                OFlags::RDONLY | OFlags::CLOEXEC,
                Mode::empty(),
            )
            .unwrap();
            match finit_module(&file, &CString::default(), 0) {
                Ok(()) | Err(rustix::io::Errno::EXIST) => {}
                Err(e) => panic!("{name}: {e}"),
            }
        }
    }
}
