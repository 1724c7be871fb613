//! Temporary namespaces, cgroups and client processes for the kernel tests. Everything is removed
//! on drop; what a killed run left behind is removed by the next run. They need root.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its part")]

pub mod client;
pub mod packets;

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

static NEXT: AtomicU32 = AtomicU32::new(0);
/// Environment variable with the case that a child process runs.
const CASE: &str = "CANAL_LAB_CASE";
const CGROUP: &str = "CANAL_LAB_CGROUP";

fn run(program: &str, args: &[&str]) {
    let o = Command::new(program)
        .args(args)
        .output()
        .unwrap_or_else(|e| panic!("{program}: {e}; these tests need root and iproute2"));
    assert!(
        o.status.success(),
        "{program} {args:?}: {}; these tests need root",
        String::from_utf8_lossy(&o.stderr)
    );
}

fn alive(pid: &str) -> bool {
    Path::new("/proc").join(pid).exists()
}

/// Returns the mount point of cgroup v2.
fn cgroup2() -> PathBuf {
    let mounts = fs::read_to_string("/proc/mounts").unwrap();
    let line = mounts
        .lines()
        .find(|l| l.split(' ').nth(2) == Some("cgroup2"))
        .expect("a cgroup2 mount");
    PathBuf::from(line.split(' ').nth(1).unwrap())
}

/// Waits until `holds` returns true.
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while !holds() {
        let waited = started.elapsed();
        assert!(
            waited < canal_timing::deadline(Duration::from_secs(5)),
            "never: {what}"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// States of a TCP socket (net/tcp_states.h).
pub const TIME_WAIT: u8 = 6;
pub const LISTEN: u8 = 10;

/// A TCP socket of a namespace.
#[derive(Debug, PartialEq, Eq)]
pub struct TcpSocket {
    pub state: u8,
    pub remote_port: u16,
}

/// Runs `f` on a thread in the namespace at `path`.
pub fn within<T: Send>(path: &Path, f: impl FnOnce() -> T + Send) -> T {
    let ns = fs::File::open(path).unwrap();
    std::thread::scope(|s| {
        s.spawn(|| {
            move_into_link_name_space(ns.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
            f()
        })
        .join()
        .unwrap()
    })
}

/// Named network namespace with loopback up, the pod addresses 10.77.0.2 and fd77::2, and an
/// interface `pod0` whose peer is down.
pub struct LabNetns {
    name: String,
}

impl LabNetns {
    pub fn new() -> Self {
        let n = Self::bare();
        n.ip("link add pod0 type veth peer name nowhere");
        n.ip("link set pod0 up");
        n.ip("addr add 10.77.0.2/32 dev pod0");
        n.ip("addr add fd77::2/128 dev pod0 nodad");
        n
    }

    /// Creates a namespace with loopback only.
    pub fn bare() -> Self {
        let mine = std::process::id();
        for e in fs::read_dir("/run/netns").into_iter().flatten().flatten() {
            let name = e.file_name().to_string_lossy().into_owned();
            if let Some(pid) = name
                .strip_prefix("canal-offload-")
                .and_then(|n| n.split('-').next())
                && !alive(pid)
            {
                let _ = Command::new("ip").args(["netns", "del", &name]).output();
            }
        }
        let name = format!(
            "canal-offload-{mine}-{}",
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        run("ip", &["netns", "add", &name]);
        let n = Self { name };
        n.ip("link set lo up");
        n
    }

    /// Returns the name under /run/netns.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn ip(&self, args: &str) {
        let all: Vec<&str> = ["-n", &self.name]
            .into_iter()
            .chain(args.split(' '))
            .collect();
        run("ip", &all);
    }

    pub fn path(&self) -> PathBuf {
        Path::new("/run/netns").join(&self.name)
    }

    /// Runs `f` on a thread in the namespace.
    pub fn within<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        within(&self.path(), f)
    }

    /// Returns the namespace's TCP sockets of both families (proc_net_tcp.rst).
    pub fn tcp_sockets(&self) -> Vec<TcpSocket> {
        let text = self.within(|| {
            ["tcp", "tcp6"].map(|family| {
                fs::read_to_string(format!("/proc/thread-self/net/{family}")).unwrap()
            })
        });
        let row = |line: &str| {
            let columns: Vec<&str> = line.split_whitespace().collect();
            let (_, port) = columns.get(2)?.rsplit_once(':')?;
            Some(TcpSocket {
                state: u8::from_str_radix(columns.get(3)?, 16).ok()?,
                remote_port: u16::from_str_radix(port, 16).ok()?,
            })
        };
        text.iter()
            .flat_map(|text| text.lines().skip(1))
            .filter_map(row)
            .collect()
    }

    /// Creates a listener in the namespace.
    pub fn listen(&self, at: &str) -> TcpListener {
        let at: SocketAddr = at.parse().unwrap();
        self.within(|| TcpListener::bind(at).unwrap())
    }

    /// Creates a TUN device and returns the file at its other end (linux/if_tun.h). Each read and
    /// each write is one IP packet, and no read blocks.
    pub fn tun(&self, device: &str) -> fs::File {
        // IFF_TUN with IFF_NO_PI, and the ioctl's number (linux/if_tun.h).
        const IFF_TUN_NO_PI: u16 = 0x1001;
        const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
        #[repr(C)]
        struct Request {
            name: [u8; 16],
            flags: u16,
            rest: [u8; 22],
        }
        self.within(|| {
            let tun = fs::OpenOptions::new()
                .read(true)
                .write(true)
                .custom_flags(libc::O_NONBLOCK)
                .open("/dev/net/tun")
                .unwrap();
            let mut request = Request {
                name: [0; 16],
                flags: IFF_TUN_NO_PI,
                rest: [0; 22],
            };
            request.name[..device.len()].copy_from_slice(device.as_bytes());
            // SAFETY: `request` is as large as struct ifreq.
            let rc = unsafe { libc::ioctl(tun.as_raw_fd(), TUNSETIFF, &mut request) };
            assert_eq!(rc, 0, "{device}: {}", std::io::Error::last_os_error());
            tun
        })
    }

    /// Disables the transmit checksum offload of a device (SIOCETHTOOL, ETHTOOL_STXCSUM): packets
    /// that leave it have complete checksums, which receivers verify.
    pub fn without_offload(&self, device: &str) {
        #[repr(C)]
        struct Request {
            name: [u8; 16],
            value: *mut [u32; 2],
            rest: [u64; 2],
        }
        self.within(|| {
            let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
            let mut value = [0x17u32, 0];
            let mut request = Request {
                name: [0; 16],
                value: &mut value,
                rest: [0; 2],
            };
            request.name[..device.len()].copy_from_slice(device.as_bytes());
            // SAFETY: `request` is as large as struct ifreq, and its pointer is to a struct
            // ethtool_value.
            let rc = unsafe { libc::ioctl(socket.as_raw_fd(), 0x8946, &mut request) };
            assert_eq!(rc, 0, "{device}: {}", std::io::Error::last_os_error());
        });
    }
}

impl Drop for LabNetns {
    fn drop(&mut self) {
        let _ = Command::new("ip")
            .args(["netns", "del", &self.name])
            .output();
    }
}

/// Closes a listener. Dropping it is not enough: a child of another test that has been forked but
/// has not called exec yet still has it.
pub fn close(l: TcpListener) {
    socket2::SockRef::from(&l)
        .shutdown(std::net::Shutdown::Both)
        .unwrap();
}

/// Pin directory that is unmounted even if the test fails.
pub struct LabPins(tempfile::TempDir);

impl LabPins {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for LabPins {
    fn drop(&mut self) {
        if self.path().exists() {
            let _ = Command::new("umount")
                .args(["-l", "-q"])
                .arg(self.path())
                .output();
        }
    }
}

/// Cgroup under `<cgroup2>/canal-test-<pid>/`, the only cgroups to which these tests attach
/// programs.
pub struct Cgroup {
    pub dir: PathBuf,
}

impl Cgroup {
    pub fn new() -> Self {
        for e in fs::read_dir(cgroup2()).unwrap().flatten() {
            let name = e.file_name().to_string_lossy().into_owned();
            if let Some(pid) = name.strip_prefix("canal-test-")
                && !alive(pid)
            {
                for inner in fs::read_dir(e.path()).into_iter().flatten().flatten() {
                    let _ = fs::remove_dir(inner.path());
                }
                let _ = fs::remove_dir(e.path());
            }
        }
        let dir = cgroup2()
            .join(format!("canal-test-{}", std::process::id()))
            .join(format!("pod{}", NEXT.fetch_add(1, Ordering::Relaxed)));
        fs::create_dir_all(&dir).expect("these tests need root and a writable cgroup2 mount");
        Self { dir }
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A child that has been waited for can remain in its cgroup for a moment.
        for _ in 0..100 {
            if fs::remove_dir(&self.dir).is_ok() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.dir.parent().map(fs::remove_dir);
    }
}

/// Returns the name of the test `the_client` in a module of a suite, from the module's file:
/// `…/tests/capture.rs` has `capture::the_client`, and `…/tests/fixture/mod.rs` has
/// `fixture::the_client`. The only file of a test program has `the_client` itself.
fn the_client(file: &str) -> String {
    let module = file
        .rsplit_once("tests/")
        .map_or(file, |(_, module)| module)
        .trim_end_matches(".rs")
        .trim_end_matches("/mod");
    format!("{}::the_client", module.replace('/', "::"))
}

/// Child process: this test binary, which runs one case in the namespace and, from before its first
/// socket on, in the cgroup.
pub struct CaseProcess {
    child: Child,
    out: BufReader<std::process::ChildStdout>,
}

impl CaseProcess {
    /// Starts a child that runs the test `the_client` of the calling file.
    #[track_caller]
    pub fn start(netns: &LabNetns, cgroup: Option<&Cgroup>, name: &str, args: &[&str]) -> Self {
        let test = the_client(std::panic::Location::caller().file());
        let case = [name]
            .iter()
            .chain(args)
            .copied()
            .collect::<Vec<_>>()
            .join("\n");
        let mut child = netns.within(|| {
            let mut c = Command::new(std::env::current_exe().unwrap());
            c.args([
                "the_client",
                &test,
                "--exact",
                "--nocapture",
                "--test-threads=1",
            ])
            .env(CASE, case);
            if let Some(g) = cgroup {
                c.env(CGROUP, &g.dir);
            }
            c.stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap()
        });
        let out = BufReader::new(child.stdout.take().unwrap());
        Self { child, out }
    }

    /// Returns the next line that the case has printed.
    pub fn line(&mut self) -> String {
        loop {
            let mut line = String::new();
            if self.out.read_line(&mut line).unwrap() == 0 {
                return "(ended)".into();
            }
            if let Some((_, said)) = line.trim_end().split_once("lab: ") {
                return said.to_string();
            }
        }
    }

    /// Lets a case continue that waits in [`pause`].
    pub fn go_on(&mut self) {
        use std::io::Write;
        self.child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    }

    /// Kills the child with SIGKILL.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for CaseProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Prints a line for the test.
pub fn print_line(text: impl std::fmt::Display) {
    println!("lab: {text}");
}

/// Waits until the parent calls [`CaseProcess::go_on`].
pub fn pause() {
    let _ = std::io::stdin().read_line(&mut String::new());
}

/// Enters the cgroup and returns the case's name and arguments in the child. Returns `None` in the
/// parent's own run of the test.
pub fn case() -> Option<Vec<String>> {
    let case = std::env::var(CASE).ok()?;
    if let Ok(dir) = std::env::var(CGROUP) {
        fs::write(
            Path::new(&dir).join("cgroup.procs"),
            std::process::id().to_string(),
        )
        .unwrap();
    }
    Some(case.split('\n').map(str::to_string).collect())
}
