//! Network namespaces for tests, each held by a process that ends with the test. It leads no thread
//! into them: `canal_net::sys::Netns` does.

use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// A network namespace without a name. It ends with the process that holds it. The kernel ends that
/// process with the thread that created it, so a killed test leaves no namespace behind. Its
/// loopback device is up.
pub struct ProcessNetns(Child);

impl ProcessNetns {
    /// Creates a namespace. This needs root.
    #[expect(clippy::new_without_default, reason = "it starts a process")]
    pub fn new() -> Self {
        let script = "ip link set lo up && echo up && exec sleep infinity";
        let mut command = Command::new("setpriv");
        command
            .args([
                "--pdeathsig",
                "KILL",
                "unshare",
                "--net",
                "sh",
                "-c",
                script,
            ])
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let mut holder = command.spawn().expect("setpriv of util-linux is installed");
        let mut line = [0; 3];
        let read = holder
            .stdout
            .as_mut()
            .expect("the output is piped")
            .read_exact(&mut line);
        assert!(
            read.is_ok() && line == *b"up\n",
            "these tests need root, unshare and iproute2"
        );
        Self(holder)
    }

    /// Returns the number of the process, which `ip link … netns` takes for the namespace.
    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Returns the path from which the namespace is opened.
    pub fn path(&self) -> PathBuf {
        format!("/proc/{}/ns/net", self.pid()).into()
    }

    /// Returns a command that runs a program in the namespace.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--net", "--target", &self.pid().to_string(), "--", program]);
        command
    }

    /// Runs `ip` with these arguments in the namespace.
    pub fn ip(&self, args: &str) {
        let ran = self
            .command("ip")
            .args(args.split(' '))
            .output()
            .expect("nsenter of util-linux is installed");
        assert!(
            ran.status.success(),
            "ip {args}: {}",
            String::from_utf8_lossy(&ran.stderr)
        );
    }
}

impl Drop for ProcessNetns {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
