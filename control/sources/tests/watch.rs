//! Tests of the watcher on a real directory: it reports a change soon and once, and never a
//! half-written file.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use canal_sources::{DirectoryWatch, ScanResult, WatchError};
use canal_timing::{deadline, timed};
use tempfile::TempDir;
use tokio::time::{Instant, timeout};

/// Maximum time of a wait for the watcher on a quiet machine.
/// It is 40 times the longest delay of a scan after events (`DELAY_MAX`).
const SOON: Duration = Duration::from_secs(20);

fn service(name: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\nspec: {{clusterIP: None, ports: [{{port: 80}}]}}\n"
    )
}

fn put(root: &Path, file: &str, text: &str) {
    fs::create_dir_all(root.join(file).parent().unwrap()).unwrap();
    fs::write(root.join(".fresh"), text).unwrap();
    fs::rename(root.join(".fresh"), root.join(file)).unwrap();
}

async fn next(watch: &mut DirectoryWatch) -> ScanResult {
    timeout(deadline(SOON), watch.next())
        .await
        .expect("a scan in time")
        .expect("the watcher lives")
}

/// Waits until the tenant has exactly the objects `expected`.
async fn until(watch: &mut DirectoryWatch, tenant: &str, expected: &[&str]) {
    let end = Instant::now() + deadline(SOON);
    loop {
        assert!(Instant::now() < end, "{tenant} never had {expected:?}");
        let scan = next(watch).await;
        let names = scan
            .changed
            .iter()
            .find(|files| files.tenant.as_str() == tenant)
            .map(|files| {
                files
                    .documents
                    .iter()
                    .map(|document| document.object.metadata().name.to_string())
                    .collect::<Vec<_>>()
            });
        if names.is_some_and(|names| names == expected) {
            return;
        }
    }
}

#[tokio::test]
async fn changes_are_reported() {
    let root = TempDir::new().unwrap();
    put(root.path(), "alpha/a.yaml", &service("a"));
    let mut watch = DirectoryWatch::open(root.path()).unwrap();
    until(&mut watch, "alpha", &["a"]).await;
    put(root.path(), "alpha/a.yaml", &service("b"));
    until(&mut watch, "alpha", &["b"]).await;
    // The file has the same length and is written within one clock tick, so only the event shows
    // the change.
    fs::write(root.path().join("alpha/a.yaml"), service("c")).unwrap();
    until(&mut watch, "alpha", &["c"]).await;
    // A tenant that appears later, with one file present at once and one added afterwards.
    put(root.path(), "beta/x.yaml", &service("x"));
    until(&mut watch, "beta", &["x"]).await;
    put(root.path(), "beta/y.yaml", &service("y"));
    until(&mut watch, "beta", &["x", "y"]).await;
    fs::remove_file(root.path().join("beta/x.yaml")).unwrap();
    until(&mut watch, "beta", &["y"]).await;
    fs::remove_dir_all(root.path().join("beta")).unwrap();
    until(&mut watch, "beta", &[]).await;
    put(root.path(), "beta/z.yaml", &service("z"));
    until(&mut watch, "beta", &["z"]).await;
}

#[tokio::test]
async fn a_file_is_not_read_while_it_is_written() {
    let root = TempDir::new().unwrap();
    put(
        root.path(),
        "alpha/a.yaml",
        &format!("{}---\n{}", service("a"), service("b")),
    );
    let mut watch = DirectoryWatch::open(root.path()).unwrap();
    until(&mut watch, "alpha", &["a", "b"]).await;
    // The file is written in place, with a pause at a point where the text so far is valid YAML.
    let mut file = File::create(root.path().join("alpha/a.yaml")).unwrap();
    file.write_all(service("c").as_bytes()).unwrap();
    assert!(
        timeout(Duration::from_millis(1200), watch.next())
            .await
            .is_err(),
        "a half-written file was read"
    );
    file.write_all(format!("---\n{}", service("d")).as_bytes())
        .unwrap();
    drop(file);
    let scan = next(&mut watch).await;
    assert_eq!(scan.changed[0].documents.len(), 2);
}

#[tokio::test]
async fn a_file_kept_open_for_writing_is_read_eventually() {
    let root = TempDir::new().unwrap();
    fs::create_dir(root.path().join("alpha")).unwrap();
    let mut watch = DirectoryWatch::open(root.path()).unwrap();
    until(&mut watch, "alpha", &[]).await;
    let mut file = File::create(root.path().join("alpha/a.yaml")).unwrap();
    file.write_all(service("a").as_bytes()).unwrap();
    file.flush().unwrap();
    until(&mut watch, "alpha", &["a"]).await;
    drop(file);
}

#[tokio::test]
async fn a_burst_is_reported_in_few_scans() {
    let root = TempDir::new().unwrap();
    fs::create_dir(root.path().join("alpha")).unwrap();
    let mut watch = DirectoryWatch::open(root.path()).unwrap();
    until(&mut watch, "alpha", &[]).await;
    let begin = Instant::now();
    for number in 0..200 {
        put(
            root.path(),
            &format!("alpha/{number:03}.yaml"),
            &service(&format!("s{number}")),
        );
    }
    let mut scans = 0;
    loop {
        scans += 1;
        let scan = next(&mut watch).await;
        if scan.changed[0].documents.len() == 200 {
            break;
        }
    }
    // At most one scan per quiet period that fits, and never one per file.
    let took = begin.elapsed();
    let spans = took.as_millis() / 50 + 1;
    assert!(scans <= spans, "{scans} scans in {took:?}");
    timed!(
        scans <= 100,
        "a burst of 200 files is reported in at most 100 scans"
    );
}

#[tokio::test]
async fn a_directory_that_is_not_there_is_refused() {
    let root = TempDir::new().unwrap();
    let WatchError::Inotify { path, .. } =
        DirectoryWatch::open(&root.path().join("nowhere")).unwrap_err();
    assert!(path.ends_with("nowhere"));
}
