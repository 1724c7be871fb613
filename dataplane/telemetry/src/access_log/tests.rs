//! Tests of the lines that are written, and of those that are dropped.

use super::*;
use tokio::task::LocalSet;

fn with_worker(sink: LogSink, registry: &Registry, work: impl AsyncFnOnce(WorkerLog)) {
    let log = AccessLog::start(sink, registry).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    LocalSet::new().block_on(&runtime, async {
        let worker = log.worker(&registry.shard());
        work(worker).await;
    });
    log.finish();
}

fn metric(r: &Registry, start: &str) -> u64 {
    let text = r.render();
    text.lines()
        .find(|l| l.starts_with(start))
        .and_then(|l| l.rsplit(' ').next())
        .map_or(0, |v| v.parse().unwrap())
}

#[test]
fn lines_are_json_with_typed_fields_and_nested_lines_do_no_harm() {
    let (dir, r) = (tempfile::tempdir().unwrap(), Registry::new());
    let path = dir.path().join("access.json");
    with_worker(LogSink::File(path.clone()), &r, async |log| {
        log.line()
            .str("path", "/a\"b")
            .some("empty", "")
            .display(
                "peer",
                "10.1.1.2:80".parse::<std::net::SocketAddr>().unwrap(),
            )
            .u64("bytes", u64::MAX)
            .millis("took", Duration::from_micros(1_234_567))
            .bool("ok", true)
            .end();
        let outer = log.line().str("n", "outer");
        log.line().str("n", "inner").end();
        outer.end();
    });
    let text = std::fs::read_to_string(path).unwrap();
    let mut lines: Vec<serde_json::Value> = text
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    let time = lines[0].as_object_mut().unwrap().remove("time").unwrap();
    assert!(time.as_str().unwrap().ends_with('Z'));
    let want = serde_json::json!({"path": "/a\"b", "peer": "10.1.1.2:80", "bytes": u64::MAX, "took": 1234.567, "ok": true});
    assert_eq!(lines[0], want);
    assert_eq!(
        (lines[1]["n"].as_str(), lines[2]["n"].as_str()),
        (Some("outer"), Some("inner"))
    );
    assert_eq!(metric(&r, "canal_access_log_lines_total"), 3);
}

#[test]
fn a_line_appears_without_another_to_push_it() {
    let (dir, r) = (tempfile::tempdir().unwrap(), Registry::new());
    let path = dir.path().join("access.json");
    with_worker(LogSink::File(path.clone()), &r, async |log| {
        log.line().str("n", "alone").end();
        let written = async {
            while !std::fs::read_to_string(&path).unwrap().contains("alone") {
                tokio::time::sleep(FLUSH / 4).await;
            }
        };
        tokio::time::timeout(canal_timing::deadline(FLUSH * 3), written)
            .await
            .expect("the line appears");
        drop(log);
    });
}

#[test]
fn a_log_file_is_not_world_readable() {
    use std::os::unix::fs::PermissionsExt;
    let (dir, r) = (tempfile::tempdir().unwrap(), Registry::new());
    let (new, old) = (dir.path().join("new.json"), dir.path().join("old.json"));
    std::fs::write(&old, "").unwrap();
    std::fs::set_permissions(&old, std::fs::Permissions::from_mode(0o644)).unwrap();
    for path in [new, old] {
        with_worker(LogSink::File(path.clone()), &r, async |log| {
            log.line().str("n", "1").end()
        });
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o007, 0, "{}: {mode:o}", path.display());
    }
}

#[test]
fn a_renamed_file_is_reopened() {
    let (dir, r) = (tempfile::tempdir().unwrap(), Registry::new());
    let path = dir.path().join("access.json");
    with_worker(LogSink::File(path.clone()), &r, async |log| {
        log.line().str("n", "old").end();
        log.flush();
        tokio::time::sleep(Duration::from_millis(1100)).await;
        std::fs::rename(&path, dir.path().join("access.json.1")).unwrap();
        log.line().str("n", "new").end();
    });
    assert!(std::fs::read_to_string(&path).unwrap().contains("new"));
    assert!(
        std::fs::read_to_string(dir.path().join("access.json.1"))
            .unwrap()
            .contains("old")
    );
}

#[test]
fn excess_lines_are_dropped_and_counted_without_waiting() {
    // /dev/full fails every write; a pipe without a reader blocks it.
    let r = Registry::new();
    with_worker(LogSink::File("/dev/full".into()), &r, async |log| {
        log.line().str("n", "lost").end();
    });
    assert_eq!(
        metric(
            &r,
            "canal_access_log_dropped_total{reason=\"write_failed\",tenant=\"\"}"
        ),
        1
    );

    let (dir, r) = (tempfile::tempdir().unwrap(), Registry::new());
    let (log, reader) = blocked_log(dir.path(), &r);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    // More than all the writer's blocks hold.
    let sent = 20_000u64;
    LocalSet::new().block_on(&runtime, async {
        let worker = log.worker(&r.shard());
        for _ in 0..sent {
            // The length of an ordinary line.
            worker.line().str("filler", &"x".repeat(200)).end();
        }
    });
    let behind = metric(
        &r,
        "canal_access_log_dropped_total{reason=\"writer_behind\",tenant=\"\"}",
    );
    assert!(behind > 0 && behind < sent, "{behind}");
    // The pipe must be read, or the writer would block at the end.
    let drain = std::thread::spawn(move || {
        let (mut reader, mut buffer) = (reader, vec![0; 1 << 20]);
        let mut lines = 0;
        while lines < sent - behind {
            let n = std::io::Read::read(&mut reader, &mut buffer).unwrap();
            lines += buffer[..n].iter().filter(|b| **b == b'\n').count() as u64;
        }
        lines
    });
    log.finish();
    assert_eq!(drain.join().unwrap() + behind, sent);
}

#[test]
fn a_line_that_is_too_long_is_dropped_and_the_next_is_whole() {
    let (dir, r) = (tempfile::tempdir().unwrap(), Registry::new());
    let path = dir.path().join("access.json");
    with_worker(LogSink::File(path.clone()), &r, async |log| {
        log.line().str("n", "before").end();
        log.line()
            .str("path", &"y".repeat(LINE_MAX))
            .str("more", "z")
            .end();
        log.line().str("n", "after").end();
    });
    let text = std::fs::read_to_string(path).unwrap();
    assert_eq!(text.lines().count(), 2);
    assert!(
        text.lines()
            .all(|l| serde_json::from_str::<serde_json::Value>(l).is_ok())
    );
    assert_eq!(
        metric(
            &r,
            "canal_access_log_dropped_total{reason=\"too_long\",tenant=\"\"}"
        ),
        1
    );
}

/// Starts a log into a pipe that is not read yet, and returns the other end of the pipe.
fn blocked_log(dir: &std::path::Path, registry: &Registry) -> (AccessLog, std::fs::File) {
    let fifo = dir.join("pipe");
    assert!(
        std::process::Command::new("mkfifo")
            .arg(&fifo)
            .status()
            .unwrap()
            .success()
    );
    let reader = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(&fifo)
        .unwrap();
    (
        AccessLog::start(LogSink::File(fifo), registry).unwrap(),
        reader,
    )
}

#[test]
fn flood_of_one_tenant_drops_its_own_lines_and_no_other_tenants() {
    let (dir, r) = (tempfile::tempdir().unwrap(), Registry::new());
    let (log, reader) = blocked_log(dir.path(), &r);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let dropped = |reason: &str, tenant: &str| {
        metric(
            &r,
            &format!("canal_access_log_dropped_total{{reason=\"{reason}\",tenant=\"{tenant}\"}}"),
        )
    };
    // The flood is more than all the writer's blocks hold.
    let (flood, few) = (20_000u64, 500u64);
    LocalSet::new().block_on(&runtime, async {
        let worker = log.worker(&r.shard());
        let queue =
            |tenant: &str| TenantLogQueue::new(&tenant.parse().unwrap(), &Shares::default());
        let (alpha, beta) = (queue("alpha"), queue("beta"));
        for n in 0..flood {
            worker
                .line_of(&alpha)
                .str("tenant", "alpha")
                // The length of an ordinary line.
                .str("filler", &"x".repeat(200))
                .end();
            // Beta's lines are spread evenly over the flood.
            if n % (flood / few) == 0 {
                worker.line_of(&beta).str("tenant", "beta").end();
            }
        }
        // The provider may configure a larger share for a tenant.
        let mut shares = Shares::default();
        shares.set(
            ShareKind::AccessLogBytes,
            canal_model::share::Share::Percent(50),
        );
        let before = dropped("tenant_share", "alpha");
        alpha.set_shares(&shares);
        worker.line_of(&alpha).str("tenant", "alpha").end();
        assert_eq!(dropped("tenant_share", "alpha"), before);
    });
    assert!(dropped("tenant_share", "alpha") > 0);
    assert_eq!(
        dropped("writer_behind", "alpha"),
        0,
        "a tenant's share is used up before the blocks are"
    );
    assert_eq!(
        dropped("tenant_share", "beta") + dropped("writer_behind", "beta"),
        0
    );
    // Beside its flood, alpha wrote one line after the change of its share.
    let written = flood + 1 - dropped("tenant_share", "alpha") + few;
    let reading = std::thread::spawn(move || {
        use std::io::BufRead;
        let lines = std::io::BufReader::new(reader)
            .lines()
            .take(written as usize)
            .map(Result::unwrap);
        lines.filter(|line| line.contains("\"beta\"")).count() as u64
    });
    log.finish();
    assert_eq!(
        reading.join().unwrap(),
        few,
        "every line of beta is written"
    );
}

#[test]
fn floods_of_ten_tenants_leave_blocks_to_an_eleventh() {
    let (dir, r) = (tempfile::tempdir().unwrap(), Registry::new());
    let (log, reader) = blocked_log(dir.path(), &r);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let dropped = |reason: &str, tenant: &str| {
        metric(
            &r,
            &format!("canal_access_log_dropped_total{{reason=\"{reason}\",tenant=\"{tenant}\"}}"),
        )
    };
    // The floods together are more than all the writer's blocks hold.
    let (flood, few) = (6_000u64, 20u64);
    LocalSet::new().block_on(&runtime, async {
        let worker = log.worker(&r.shard());
        let queue =
            |n: usize| TenantLogQueue::new(&format!("t{n}").parse().unwrap(), &Shares::default());
        for n in 0..10 {
            let greedy = queue(n);
            (0..flood).for_each(|_| {
                worker
                    .line_of(&greedy)
                    // The length of an ordinary line.
                    .str("filler", &"x".repeat(200))
                    .end()
            });
        }
        let eleventh = queue(10);
        (0..few).for_each(|_| worker.line_of(&eleventh).str("tenant", "eleventh").end());
    });
    let (share, behind): (Vec<_>, Vec<_>) = (0..11)
        .map(|n| format!("t{n}"))
        .map(|t| (dropped("tenant_share", &t), dropped("writer_behind", &t)))
        .unzip();
    assert!(
        share[..10].iter().all(|lost| (1..flood).contains(lost)) && share[10] == 0,
        "{share:?}"
    );
    assert_eq!(behind.iter().sum::<u64>(), 0, "{behind:?}");
    let written = 10 * flood + few - share.iter().sum::<u64>();
    let reading = std::thread::spawn(move || {
        use std::io::BufRead;
        let lines = std::io::BufReader::new(reader)
            .lines()
            .take(written as usize)
            .map(Result::unwrap);
        lines.filter(|line| line.contains("\"eleventh\"")).count() as u64
    });
    log.finish();
    assert_eq!(
        reading.join().unwrap(),
        few,
        "every line of the eleventh is written"
    );
}

#[test]
fn share_of_the_log_is_given_back_once_the_lines_are_written() {
    let (dir, r) = (tempfile::tempdir().unwrap(), Registry::new());
    let path = dir.path().join("access.json");
    with_worker(LogSink::File(path), &r, async |log| {
        let alpha = TenantLogQueue::new(&"alpha".parse().unwrap(), &Shares::default());
        // The test writes several times the tenant's share, with time for the writer.
        for _ in 0..40 {
            for _ in 0..100 {
                log.line_of(&alpha).str("filler", &"x".repeat(400)).end();
            }
            log.flush();
            let written = async {
                while alpha.waiting.bytes.load(Relaxed) > 0 {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            };
            tokio::time::timeout(canal_timing::deadline(Duration::from_secs(10)), written)
                .await
                .expect("the lines are written");
        }
    });
    assert_eq!(metric(&r, "canal_access_log_lines_total"), 4_000);
    assert!(!r.render().contains("tenant_share"));
}
