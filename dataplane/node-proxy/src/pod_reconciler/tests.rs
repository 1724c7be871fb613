//! Tests of the comparison between the served pods and the directory.

use super::*;

const NETNS: Inode = (4, 100);

fn pod(name: &str) -> LocalPod {
    let text = format!(
        r#"{{"uid":"alpha/b/{name}","namespace":"b","name":"{name}","serviceAccount":"c","netns":"/n/{name}","cgroup":"/c","ips":["10.0.0.1"]}}"#
    );
    LocalPod::parse("f", text.as_bytes()).unwrap()
}

fn served(names: &[&str]) -> HashMap<String, ServedPod> {
    names
        .iter()
        .map(|n| {
            (
                format!("alpha/b/{n}"),
                ServedPod {
                    file: format!("{n}.json"),
                    pod: Arc::new(pod(n)),
                    netns: NETNS,
                },
            )
        })
        .collect()
}

fn pod_scan(pods: Vec<(&str, LocalPod, Option<Inode>)>) -> PodScan {
    PodScan {
        pods: pods
            .into_iter()
            .map(|(f, p, i)| (format!("{f}.json"), p, i))
            .collect(),
        broken: Vec::new(),
    }
}

type PodNames<'a> = &'a [&'a str];

fn check(
    case: &str,
    served_names: PodNames<'_>,
    found: PodScan,
    want: (PodNames<'_>, PodNames<'_>, PodNames<'_>, PodNames<'_>),
) {
    let c = decide_changes(&served(served_names), found);
    let short = |uid: &str| uid.rsplit('/').next().unwrap_or(uid).to_string();
    let got = (
        c.remove.iter().map(|u| short(u)).collect::<Vec<_>>(),
        c.relabel.iter().map(|p| short(&p.uid)).collect::<Vec<_>>(),
        c.add.iter().map(|(_, p)| short(&p.uid)).collect::<Vec<_>>(),
        c.refused.iter().map(|(u, _)| short(u)).collect::<Vec<_>>(),
    );
    let own = |v: &[&str]| v.iter().map(|s| (*s).to_string()).collect::<Vec<_>>();
    assert_eq!(
        got,
        (own(want.0), own(want.1), own(want.2), own(want.3)),
        "{case}: removed, relabelled, added, refused"
    );
}

#[test]
fn only_what_changed_is_touched() {
    let same = |n| (n, pod(n), Some(NETNS));
    // The expected lists: pods removed, relabelled and added, and files refused.
    check("nothing", &[], pod_scan(vec![]), (&[], &[], &[], &[]));
    check(
        "a new pod",
        &["a"],
        pod_scan(vec![same("a"), same("b")]),
        (&[], &[], &["b"], &[]),
    );
    check(
        "a pod gone",
        &["a", "b"],
        pod_scan(vec![same("a")]),
        (&["b"], &[], &[], &[]),
    );
    check(
        "the same",
        &["a"],
        pod_scan(vec![same("a")]),
        (&[], &[], &[], &[]),
    );
    let mut labelled = pod("a");
    labelled.labels.insert("app".into(), "x".into());
    check(
        "labels only",
        &["a"],
        pod_scan(vec![("a", labelled, Some(NETNS))]),
        (&[], &["a"], &[], &[]),
    );
    let mut moved = pod("a");
    moved.ips = vec!["10.0.0.2".parse().unwrap()];
    check(
        "another address",
        &["a"],
        pod_scan(vec![("a", moved, Some(NETNS))]),
        (&["a"], &[], &["a"], &[]),
    );
    check(
        "made again under its name",
        &["a"],
        // Another inode is another network namespace, hence another pod.
        pod_scan(vec![("a", pod("a"), Some((4, 101)))]),
        (&["a"], &[], &["a"], &[]),
    );
    check(
        "its namespace is gone before its file",
        &["a"],
        pod_scan(vec![("a", pod("a"), None)]),
        (&[], &[], &[], &[]),
    );
    check(
        "two files, one pod",
        &[],
        pod_scan(vec![same("a"), ("z", pod("a"), Some(NETNS))]),
        (&[], &[], &["a"], &["z.json"]),
    );
    // A file that is being written must not end its pod.
    let torn = PodScan {
        pods: vec![],
        broken: vec![("a.json".into(), "torn".into())],
    };
    check(
        "its file cannot be read",
        &["a", "b"],
        torn,
        (&["b"], &[], &[], &["a.json"]),
    );
}

#[test]
fn a_node_holds_no_more_pods_than_its_limit() {
    let names: Vec<String> = (0..=PODS_MAX).map(|n| format!("p{n:04}")).collect();
    let all = pod_scan(
        names
            .iter()
            .map(|n| (n.as_str(), pod(n), Some(NETNS)))
            .collect(),
    );
    let c = decide_changes(&HashMap::new(), all);
    assert_eq!((c.add.len() as u64, c.refused.len()), (PODS_MAX, 1));
    assert!(c.refused[0].1.contains("its limit"), "{:?}", c.refused);
}

#[test]
fn files_that_are_not_pods_are_skipped() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
    write(
        "a.json",
        r#"{"uid":"alpha/b/a","namespace":"b","name":"a","serviceAccount":"c","netns":"/none","cgroup":"/c","ips":["10.0.0.1"]}"#,
    );
    write("torn.json", "{");
    write(".a.json", "being written");
    write("notes.txt", "not a pod");
    let s = scan(dir.path()).unwrap();
    assert_eq!((s.pods.len(), s.broken.len()), (1, 1));
    assert_eq!(
        (s.pods[0].0.as_str(), s.pods[0].2, s.broken[0].0.as_str()),
        ("a.json", None, "torn.json")
    );
    assert!(scan(&dir.path().join("none")).is_err());
}
