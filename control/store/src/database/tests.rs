//! Tests of what a failed commit leaves behind.

use super::*;

fn put(name: &str, yaml: &str) -> ObjectEdit {
    let key = StoredObjectKey {
        tenant: TenantName::new("alpha").unwrap(),
        kind: "Service".into(),
        namespace: "shop".into(),
        name: name.into(),
    };
    ObjectEdit::Put {
        key,
        yaml: yaml.into(),
    }
}

#[test]
fn a_restart_undoes_a_commit_that_was_refused_and_landed() {
    for is_newest in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let open = || Store::open(dir.path(), StoreLimits::default()).unwrap();
        let store = open();
        store.apply(&[put("a", "old")], Generation(1), 0).unwrap();
        let key = put("a", "").key().clone();
        let before = store.objects().unwrap().remove(0);
        let row = ObjectRow {
            yaml: before.yaml,
            created: before.created,
            generation: before.generation.0,
        };
        store
            .apply(
                &[put("a", "refused"), put("b", "refused")],
                Generation(2),
                0,
            )
            .unwrap();
        // A commit's record names the sequence number that the commit had.
        let sequence = store.lock().sequence;
        // The state of a process whose commit failed, though it is on disk, and that could not read
        // the file again.
        let before = vec![
            (key, Some(serde_json::to_vec(&row).unwrap())),
            (put("b", "").key().clone(), None),
        ];
        UnconfirmedCommit { sequence, before }
            .save(dir.path())
            .unwrap();
        // A later commit proves that the process went on, so the record is out of date.
        if !is_newest {
            store.apply(&[put("c", "later")], Generation(3), 0).unwrap();
        }
        // Only one handle may have the file open.
        drop(store);
        let store = open();
        let texts: Vec<String> = store
            .objects()
            .unwrap()
            .into_iter()
            .map(|object| object.yaml)
            .collect();
        let want: &[&str] = if is_newest {
            &["old"]
        } else {
            &["refused", "refused", "later"]
        };
        assert_eq!(texts, want, "a record is about one commit only");
        assert!(UnconfirmedCommit::load(dir.path()).unwrap().is_none());
        store.apply(&[put("d", "new")], Generation(4), 0).unwrap();
        drop(store);
        assert_eq!(open().objects().unwrap().len(), want.len() + 1);
    }
}
