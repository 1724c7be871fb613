//! Throwaway namespaces, cgroups and client processes for the kernel tests. Everything is removed on drop; what a killed run left
//! behind is removed by the next one. Needs root.
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

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

static NEXT: AtomicU32 = AtomicU32::new(0);
/// Names this process's test into the child that runs a case of it.
const CASE: &str = "CANAL_LAB_CASE";
const CGROUP: &str = "CANAL_LAB_CGROUP";

fn run(program: &str, args: &[&str]) {
    let o = Command::new(program).args(args).output().unwrap_or_else(|e| panic!("{program}: {e}; these tests need root and iproute2"));
    assert!(o.status.success(), "{program} {args:?}: {}; these tests need root", String::from_utf8_lossy(&o.stderr));
}

fn alive(pid: &str) -> bool {
    Path::new("/proc").join(pid).exists()
}

/// The mount point of cgroup v2.
fn cgroup2() -> PathBuf {
    let mounts = fs::read_to_string("/proc/mounts").unwrap();
    let line = mounts.lines().find(|l| l.split(' ').nth(2) == Some("cgroup2")).expect("a cgroup2 mount");
    PathBuf::from(line.split(' ').nth(1).unwrap())
}

/// Runs `f` on a thread inside the namespace at `path`.
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

/// A named network namespace with loopback up, the pod addresses 10.77.0.2 and fd77::2, and an interface `pod0` that leads nowhere.
pub struct Netns {
    name: String,
}

impl Netns {
    pub fn new() -> Self {
        let n = Self::bare();
        n.ip("link add pod0 type veth peer name nowhere");
        n.ip("link set pod0 up");
        n.ip("addr add 10.77.0.2/32 dev pod0");
        n.ip("addr add fd77::2/128 dev pod0 nodad");
        n
    }

    /// A namespace with loopback only.
    pub fn bare() -> Self {
        let mine = std::process::id();
        for e in fs::read_dir("/run/netns").into_iter().flatten().flatten() {
            let name = e.file_name().to_string_lossy().into_owned();
            if let Some(pid) = name.strip_prefix("canal-offload-").and_then(|n| n.split('-').next())
                && !alive(pid)
            {
                let _ = Command::new("ip").args(["netns", "del", &name]).output();
            }
        }
        let name = format!("canal-offload-{mine}-{}", NEXT.fetch_add(1, Ordering::Relaxed));
        run("ip", &["netns", "add", &name]);
        let n = Self { name };
        n.ip("link set lo up");
        n
    }

    /// The name under /run/netns.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn ip(&self, args: &str) {
        let all: Vec<&str> = ["-n", &self.name].into_iter().chain(args.split(' ')).collect();
        run("ip", &all);
    }

    pub fn path(&self) -> PathBuf {
        Path::new("/run/netns").join(&self.name)
    }

    /// Runs `f` on a thread inside the namespace.
    pub fn within<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        within(&self.path(), f)
    }

    /// A listener inside the namespace.
    pub fn listen(&self, at: &str) -> TcpListener {
        let at: SocketAddr = at.parse().unwrap();
        self.within(|| TcpListener::bind(at).unwrap())
    }

    /// Makes a TUN device, whose other end is the file (linux/if_tun.h): each read and each write is one IP packet, and no read waits.
    pub fn tun(&self, device: &str) -> fs::File {
        const IFF_TUN_NO_PI: u16 = 0x1001;
        const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
        #[repr(C)]
        struct Request {
            name: [u8; 16],
            flags: u16,
            rest: [u8; 22],
        }
        self.within(|| {
            let tun = fs::OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/net/tun").unwrap();
            let mut request = Request { name: [0; 16], flags: IFF_TUN_NO_PI, rest: [0; 22] };
            request.name[..device.len()].copy_from_slice(device.as_bytes());
            // SAFETY: `request` is as large as struct ifreq.
            let rc = unsafe { libc::ioctl(tun.as_raw_fd(), TUNSETIFF, &mut request) };
            assert_eq!(rc, 0, "{device}: {}", std::io::Error::last_os_error());
            tun
        })
    }

    /// Switches a device's transmit checksums off (SIOCETHTOOL, ETHTOOL_STXCSUM), so that what leaves it has whole ones, and receivers check.
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
            let mut request = Request { name: [0; 16], value: &mut value, rest: [0; 2] };
            request.name[..device.len()].copy_from_slice(device.as_bytes());
            // SAFETY: `request` is as large as struct ifreq, and its pointer is to a struct ethtool_value.
            let rc = unsafe { libc::ioctl(socket.as_raw_fd(), 0x8946, &mut request) };
            assert_eq!(rc, 0, "{device}: {}", std::io::Error::last_os_error());
        });
    }
}

impl Drop for Netns {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.name]).output();
    }
}

/// Ends a listener. Dropping it is not enough: a process that another test starts at this moment has it, too, until it is its program.
pub fn close(l: TcpListener) {
    socket2::SockRef::from(&l).shutdown(std::net::Shutdown::Both).unwrap();
}

/// A pin directory; whatever became of the test, nothing stays mounted.
pub struct Pins(tempfile::TempDir);

impl Pins {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        if self.path().exists() {
            let _ = Command::new("umount").args(["-l", "-q"]).arg(self.path()).output();
        }
    }
}

/// A cgroup under `<cgroup2>/canal-test-<pid>/`: the only place where these tests attach programs.
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
        let dir = cgroup2().join(format!("canal-test-{}", std::process::id())).join(format!("pod{}", NEXT.fetch_add(1, Ordering::Relaxed)));
        fs::create_dir_all(&dir).expect("these tests need root and a writable cgroup2 mount");
        Self { dir }
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A child that has been waited for can hold its cgroup a moment longer.
        for _ in 0..100 {
            if fs::remove_dir(&self.dir).is_ok() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        let _ = self.dir.parent().map(fs::remove_dir);
    }
}

/// The test `the_client` of a module of a suite by its file: `…/tests/capture.rs` has `capture::the_client`, `…/tests/rig/mod.rs` has
/// `rig::the_client`. The only file of a test program has `the_client` itself.
fn the_client(file: &str) -> String {
    let module = file.rsplit_once("tests/").map_or(file, |(_, module)| module).trim_end_matches(".rs").trim_end_matches("/mod");
    format!("{}::the_client", module.replace('/', "::"))
}

/// This test binary again, running the case `name` inside the namespace and, before its first socket, inside the cgroup.
pub struct Client {
    child: Child,
    out: BufReader<std::process::ChildStdout>,
}

impl Client {
    /// The child runs the test `the_client` of the file that calls this.
    #[track_caller]
    pub fn start(netns: &Netns, cgroup: Option<&Cgroup>, name: &str, args: &[&str]) -> Self {
        let test = the_client(std::panic::Location::caller().file());
        let case = [name].iter().chain(args).copied().collect::<Vec<_>>().join("\n");
        let mut child = netns.within(|| {
            let mut c = Command::new(std::env::current_exe().unwrap());
            c.args(["the_client", &test, "--exact", "--nocapture", "--test-threads=1"]).env(CASE, case);
            if let Some(g) = cgroup {
                c.env(CGROUP, &g.dir);
            }
            c.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
        });
        let out = BufReader::new(child.stdout.take().unwrap());
        Self { child, out }
    }

    /// The next line that the case said.
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

    /// Lets a case that waits in [`pause`] go on.
    pub fn go_on(&mut self) {
        use std::io::Write;
        self.child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    }

    /// SIGKILL.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What a case says to the test.
pub fn say(text: impl std::fmt::Display) {
    println!("lab: {text}");
}

/// Waits for [`Client::go_on`].
pub fn pause() {
    let _ = std::io::stdin().read_line(&mut String::new());
}

/// In the child: enters the cgroup and returns the case's name and arguments. `None` in the parent's own run of the test.
pub fn case() -> Option<Vec<String>> {
    let case = std::env::var(CASE).ok()?;
    if let Ok(dir) = std::env::var(CGROUP) {
        fs::write(Path::new(&dir).join("cgroup.procs"), std::process::id().to_string()).unwrap();
    }
    Some(case.split('\n').map(str::to_string).collect())
}
