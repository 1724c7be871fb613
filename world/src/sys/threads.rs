//! [`StoppedThreads`]: stops single threads of running processes by ptrace, which SIGSTOP cannot do. A process that answers on some threads
//! and hangs on others is a gray failure. This module chooses neither hosts nor thread names. Start
//! at [`StoppedThreads::stop`].

use std::fs;
use std::io;
use std::ptr::null_mut;
use std::sync::mpsc;
use std::thread::JoinHandle;

/// Threads that are stopped as long as this value exists. They continue when it is dropped, and
/// when this process ends.
#[derive(Debug)]
pub struct StoppedThreads {
    threads: Vec<u32>,
    /// Dropping the sender lets the threads continue.
    release: Option<mpsc::Sender<()>>,
    /// The thread that stopped the threads, because no other one can release them.
    tracer: Option<JoinHandle<()>>,
}

impl StoppedThreads {
    /// Stops every thread of these processes whose name begins with `prefix`, and returns when all
    /// of them are stopped.
    ///
    /// # Errors
    ///
    /// No thread has such a name, or the kernel refuses (CAP_SYS_PTRACE is missing). Then no thread
    /// is stopped.
    pub(crate) fn stop(processes: &[u32], prefix: &str) -> io::Result<Self> {
        let threads: Vec<u32> = processes
            .iter()
            .flat_map(|process| threads_named(*process, prefix))
            .collect();
        if threads.is_empty() {
            return Err(io::Error::new(
                io::ErrorKind::NotFound,
                format!("no thread is named {prefix}…"),
            ));
        }
        let (release, released) = mpsc::channel::<()>();
        let (stopped, all_stopped) = mpsc::channel();
        let of_tracer = threads.clone();
        let tracer = std::thread::Builder::new()
            .name("tracer".into())
            .spawn(move || {
                let result = of_tracer.iter().try_for_each(|thread| seize(*thread));
                let is_held = result.is_ok();
                let _ = stopped.send(result);
                if is_held {
                    let _ = released.recv();
                }
                of_tracer.iter().for_each(|thread| detach(*thread));
            })?;
        let result = all_stopped
            .recv()
            .unwrap_or_else(|e| Err(io::Error::other(e)));
        let stopped = Self {
            threads,
            release: Some(release),
            tracer: Some(tracer),
        };
        result.map(|()| stopped)
    }

    /// Returns the kernel's ids of the threads.
    pub fn threads(&self) -> &[u32] {
        &self.threads
    }
}

impl Drop for StoppedThreads {
    fn drop(&mut self) {
        self.release.take();
        if let Some(tracer) = self.tracer.take() {
            // A tracer that panicked has ended, and its end releases the threads as well.
            let _ = tracer.join();
        }
    }
}

fn threads_named(process: u32, prefix: &str) -> Vec<u32> {
    let Ok(tasks) = fs::read_dir(format!("/proc/{process}/task")) else {
        return Vec::new();
    };
    let is_named = |task: &fs::DirEntry| {
        fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.starts_with(prefix))
    };
    tasks
        .flatten()
        .filter(is_named)
        .filter_map(|task| task.file_name().to_str()?.parse().ok())
        .collect()
}

fn pid(thread: u32) -> io::Result<libc::pid_t> {
    libc::pid_t::try_from(thread).map_err(io::Error::other)
}

fn trace(request: libc::c_uint, thread: libc::pid_t) -> io::Result<()> {
    // SAFETY: these requests (PTRACE_SEIZE, PTRACE_INTERRUPT, PTRACE_DETACH) take no memory of this
    // process: both pointers are null.
    let result = unsafe {
        libc::ptrace(
            request,
            thread,
            null_mut::<libc::c_void>(),
            null_mut::<libc::c_void>(),
        )
    };
    if result == -1 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Attaches to a thread and waits until it is stopped.
fn seize(thread: u32) -> io::Result<()> {
    let thread = pid(thread)?;
    trace(libc::PTRACE_SEIZE, thread)?;
    trace(libc::PTRACE_INTERRUPT, thread)?;
    let mut status = 0;
    // SAFETY: `status` is valid for writing while the call lasts.
    let waited = unsafe { libc::waitpid(thread, &raw mut status, libc::__WALL) };
    if waited == -1 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Lets a thread continue. An error means that the thread was never attached or is gone, so nothing
/// remains to be done.
fn detach(thread: u32) {
    let _ = pid(thread).and_then(|thread| trace(libc::PTRACE_DETACH, thread));
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Returns the state letter of a thread (proc_pid_stat(5)).
    fn state(process: u32, thread: u32) -> Option<char> {
        let stat = fs::read_to_string(format!("/proc/{process}/task/{thread}/stat")).ok()?;
        stat.rsplit_once(") ")?.1.chars().next()
    }

    #[test]
    fn named_threads_stand_still_until_the_guard_is_dropped() {
        // The test needs another process, because no process can trace its own threads.
        let mut sleeper = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let process = sleeper.id();
        assert!(StoppedThreads::stop(&[process], "no-such-name").is_err());
        let named = || {
            fs::read_to_string(format!("/proc/{process}/comm"))
                .is_ok_and(|name| name.starts_with("sleep"))
        };
        while !named() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let stopped = StoppedThreads::stop(&[process], "sleep").unwrap();
        assert_eq!(
            (stopped.threads(), state(process, process)),
            ([process].as_slice(), Some('t')),
            "stopped by a tracer"
        );
        drop(stopped);
        assert_ne!(state(process, process), Some('t'), "it runs on");
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
    }
}
