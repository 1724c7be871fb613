//! Tests of a disk that refuses writes: the error is clear, reads still work, and the store
//! recovers later.
//!
//! A limit on the file size stands in for a full disk: the write fails with EFBIG where a full disk
//! returns ENOSPC.

use std::process::Command;

use canal_model::ids::{Generation, TenantName};
use canal_store::{ObjectEdit, Store, StoreLimits, StoredObjectKey};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const CHILD: &str = "CANAL_STORE_FULL_CHILD";

fn put(n: usize) -> ObjectEdit {
    let key = StoredObjectKey {
        tenant: TenantName::new("alpha").unwrap(),
        kind: "Service".into(),
        namespace: "shop".into(),
        name: format!("s{n}"),
    };
    ObjectEdit::Put {
        key,
        yaml: format!("{n} ").repeat(20_000),
    }
}

fn file_size_limit(bytes: Option<u64>) {
    let hard = getrlimit(Resource::Fsize).maximum;
    setrlimit(
        Resource::Fsize,
        Rlimit {
            current: bytes,
            maximum: hard,
        },
    )
    .unwrap();
}

/// Runs in its own process, because the file size limit applies to the whole process.
#[test]
fn writer_on_a_full_disk() {
    let Ok(dir) = std::env::var(CHILD) else {
        return;
    };
    let store = Store::open(dir.as_ref(), StoreLimits::default()).unwrap();
    store.apply(&[put(0)], Generation(1), 0).unwrap();
    let now = std::fs::metadata(store.path()).unwrap().len();
    // The file may grow by 256 KiB, which a few of the writes use up.
    file_size_limit(Some(now + (256 << 10)));
    let mut landed = 1;
    // Each write has two objects, because a refused one must leave neither.
    let refused = loop {
        // An object has at least 40 KB, so far fewer than 1,000 writes fit.
        assert!(landed < 1000, "the limit was never reached");
        // The two objects of a write have numbers that no other write uses.
        match store.apply(&[put(landed), put(landed + 10_000)], Generation(2), 0) {
            Ok(()) => landed += 1,
            Err(e) => break e,
        }
    };
    assert_eq!(refused.name(), "disk", "{refused}");
    assert!(
        refused
            .to_string()
            .contains("nothing was changed; fix: free some space"),
        "{refused}"
    );
    // The first write has one object, and each further one two.
    let expect = 1 + 2 * (landed - 1);
    assert_eq!(
        store.objects().unwrap().len(),
        expect,
        "reads go on, and show exactly what was acknowledged"
    );
    // This write is larger than the refused one, so it cannot fit either.
    let again = store
        .apply(
            &(0..4).map(|n| put(20_000 + n)).collect::<Vec<_>>(),
            Generation(3),
            0,
        )
        .unwrap_err();
    assert_eq!(again.name(), "disk", "{again}");
    assert_eq!(store.objects().unwrap().len(), expect);
    assert!(
        // Generations are reserved in advance, so giving out one writes nothing.
        store.next_generation().is_ok_and(|g| g > Generation(2)),
        "a full disk stops no generation that is reserved"
    );

    file_size_limit(None);
    store.apply(&[put(30_000)], Generation(4), 0).unwrap();
    assert_eq!(
        store.objects().unwrap().len(),
        expect + 1,
        "whole again without a restart"
    );
    // Only one handle may have the file open.
    drop(store);
    let store = Store::open(dir.as_ref(), StoreLimits::default()).unwrap();
    assert_eq!(store.objects().unwrap().len(), expect + 1);
    println!("done {landed}");
}

#[test]
fn a_full_disk_is_refused_and_recovered_from() {
    let dir = tempfile::tempdir().unwrap();
    // The shell ignores SIGXFSZ and its child inherits that, so the write fails instead of ending
    // the process.
    let out = Command::new("sh")
        .args([
            "-c",
            "trap '' XFSZ; exec \"$0\" --exact full::writer_on_a_full_disk --nocapture",
        ])
        .arg(std::env::current_exe().unwrap())
        .env(CHILD, dir.path())
        .output()
        .unwrap();
    let (stdout, stderr) = (
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr),
    );
    assert!(
        out.status.success() && stdout.contains("done "),
        "{stdout}\n{stderr}"
    );
}
