//! Tests of a directory of YAML per tenant: which files are read, which objects stay when a file
//! breaks, and which paths are refused.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use canal_model::diagnostic::Severity;
use canal_sources::{Directory, ScanResult, TenantFiles, limits};
use tempfile::TempDir;

fn service(name: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\nspec: {{clusterIP: None, ports: [{{port: 80}}]}}\n"
    )
}

fn put(root: &Path, file: &str, text: &str) {
    let path = root.join(file);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    // Editors replace a file the same way: they write a new one and rename it.
    let fresh = root.join(format!(".fresh-{}", file.replace('/', "-")));
    fs::write(&fresh, text).unwrap();
    fs::rename(&fresh, &path).unwrap();
}

/// Returns `tenant: object object …` for each changed tenant, then the problems.
fn show(scan: &ScanResult) -> String {
    let mut lines: Vec<String> = scan.changed.iter().flat_map(lines).collect();
    lines.extend(scan.diagnostics.iter().map(|d| format!("! {}", d.problem)));
    lines.join("\n")
}

fn lines(files: &TenantFiles) -> Vec<String> {
    let names: Vec<String> = files
        .documents
        .iter()
        .map(|d| d.object.metadata().name.to_string())
        .collect();
    let mut lines = vec![format!("{}: {}", files.tenant, names.join(" "))];
    lines.extend(files.diagnostics.iter().map(|d| {
        format!(
            "{}! {}",
            if d.severity == Severity::Error {
                ""
            } else {
                "?"
            },
            d.problem
        )
    }));
    lines
}

#[track_caller]
fn check(directory: &mut Directory, expected: &str) {
    assert_eq!(show(&directory.scan()), expected);
}

#[test]
fn only_changes_are_reported() {
    let root = TempDir::new().unwrap();
    put(root.path(), "alpha/a.yaml", &service("a"));
    put(
        root.path(),
        "alpha/b.yml",
        &format!("{}---\n{}", service("b1"), service("b2")),
    );
    put(root.path(), "alpha/notes.txt", "not yaml");
    put(root.path(), "alpha/.hidden.yaml", &service("hidden"));
    put(root.path(), "beta/a.yaml", &service("a"));
    let mut directory = Directory::new(root.path());
    check(&mut directory, "alpha: a b1 b2\nbeta: a");
    check(&mut directory, "");
    put(root.path(), "beta/c.yaml", &service("c"));
    check(&mut directory, "beta: a c");
    // A new file with the same content is not a change.
    put(root.path(), "beta/c.yaml", &service("c"));
    check(&mut directory, "");
    fs::remove_file(root.path().join("alpha/b.yml")).unwrap();
    check(&mut directory, "alpha: a");
    fs::remove_dir_all(root.path().join("beta")).unwrap();
    check(&mut directory, "beta: ");
    fs::create_dir(root.path().join("gamma")).unwrap();
    check(&mut directory, "gamma: ");
}

#[test]
fn a_broken_file_keeps_its_last_good_objects() {
    let root = TempDir::new().unwrap();
    put(
        root.path(),
        "alpha/a.yaml",
        &format!("{}---\n{}", service("a1"), service("a2")),
    );
    put(root.path(), "alpha/b.yaml", &service("b"));
    let mut directory = Directory::new(root.path());
    check(&mut directory, "alpha: a1 a2 b");
    put(
        root.path(),
        "alpha/a.yaml",
        &format!("{}---\nkind: [\n", service("a1")),
    );
    let kept = "?! the file is broken, so its last good 2 objects stay in force";
    check(
        &mut directory,
        &format!("alpha: a1 a2 b\n! this is not YAML: unclosed bracket '['\n{kept}"),
    );
    // Other files are still updated.
    put(root.path(), "alpha/b.yaml", &service("bb"));
    check(
        &mut directory,
        &format!("alpha: a1 a2 bb\n! this is not YAML: unclosed bracket '['\n{kept}"),
    );
    put(
        root.path(),
        "alpha/a.yaml",
        "kind: Service\napiVersion: v1\nmetadata: {name: a1}\nspec: {oops: 1}\n",
    );
    check(
        &mut directory,
        &format!("alpha: a1 a2 bb\n! there is no such field\n{kept}"),
    );
    put(root.path(), "alpha/a.yaml", &service("a3"));
    check(&mut directory, "alpha: a3 bb");
    // Deleting a file removes its objects; it does not count as breaking the file.
    fs::remove_file(root.path().join("alpha/a.yaml")).unwrap();
    check(&mut directory, "alpha: bb");
}

#[test]
fn a_file_that_was_never_valid_contributes_its_valid_objects() {
    let root = TempDir::new().unwrap();
    put(
        root.path(),
        "alpha/a.yaml",
        &format!("{}---\nkind: [\n", service("a1")),
    );
    let mut directory = Directory::new(root.path());
    check(
        &mut directory,
        "alpha: a1\n! this is not YAML: unclosed bracket '['",
    );
    put(
        root.path(),
        "alpha/a.yaml",
        &format!("{}---\nkind: [\n", service("a2")),
    );
    check(
        &mut directory,
        "alpha: a2\n! this is not YAML: unclosed bracket '['",
    );
}

#[test]
fn links_may_not_lead_out_of_the_tenant() {
    let root = TempDir::new().unwrap();
    let outside = TempDir::new().unwrap();
    fs::write(outside.path().join("x.yaml"), service("outside")).unwrap();
    put(root.path(), "alpha/a.yaml", &service("a"));
    put(root.path(), "beta/secret.yaml", &service("secret"));
    // Kubernetes mounts a ConfigMap by links like these; links inside the tenant's directory are
    // valid.
    put(root.path(), "alpha/..v1/inner.yaml", &service("inner"));
    symlink("..v1", root.path().join("alpha/..data")).unwrap();
    symlink("..data/inner.yaml", root.path().join("alpha/inner.yaml")).unwrap();
    symlink("../beta/secret.yaml", root.path().join("alpha/steal.yaml")).unwrap();
    symlink(
        outside.path().join("x.yaml"),
        root.path().join("alpha/leave.yaml"),
    )
    .unwrap();
    let mut directory = Directory::new(root.path());
    let leaves = "! the symbolic link points outside the tenant's directory";
    check(
        &mut directory,
        &format!("alpha: a inner\n{leaves}\n{leaves}\nbeta: secret"),
    );
    // Kubernetes updates the mount by swapping the link.
    put(root.path(), "alpha/..v2/inner.yaml", &service("newer"));
    symlink("..v2", root.path().join("alpha/..fresh")).unwrap();
    fs::rename(
        root.path().join("alpha/..fresh"),
        root.path().join("alpha/..data"),
    )
    .unwrap();
    check(
        &mut directory,
        &format!("alpha: a newer\n{leaves}\n{leaves}"),
    );
}

#[test]
fn non_files_are_refused() {
    let root = TempDir::new().unwrap();
    put(root.path(), "alpha/a.yaml", &service("a"));
    fs::create_dir(root.path().join("alpha/folder.yaml")).unwrap();
    let pipe = root.path().join("alpha/pipe.yaml");
    assert!(
        std::process::Command::new("mkfifo")
            .arg(&pipe)
            .status()
            .unwrap()
            .success()
    );
    fs::write(root.path().join("alpha/bytes.yaml"), b"a: 1\nb: \xff\n").unwrap();
    fs::write(root.path().join("stray.yaml"), "").unwrap();
    fs::create_dir(root.path().join("Not_A_Tenant")).unwrap();
    let mut directory = Directory::new(root.path());
    let regular = "! this is not a regular file";
    let expected = format!(
        "alpha: a\n! line 2 is not UTF-8 text\n{regular}\n{regular}\n! tenant name \"Not_A_Tenant\" is not valid\n! only directories of tenants are read here"
    );
    check(&mut directory, &expected);
}

#[test]
fn a_lost_directory_removes_no_object() {
    let root = TempDir::new().unwrap();
    let mount = root.path().join("mount");
    put(&mount, "alpha/a.yaml", &service("a"));
    let mut directory = Directory::new(&mount);
    check(&mut directory, "alpha: a");
    fs::rename(&mount, root.path().join("away")).unwrap();
    let scan = directory.scan();
    assert!(scan.changed.is_empty());
    assert!(
        scan.diagnostics[0].problem.contains("stays in force"),
        "{:?}",
        scan.diagnostics
    );
    fs::rename(root.path().join("away"), &mount).unwrap();
    check(&mut directory, "");
    // Root can read every directory, so this branch is only exercised as another user.
    let tenant = mount.join("alpha");
    fs::set_permissions(&tenant, fs::Permissions::from_mode(0o0)).unwrap();
    let scan = directory.scan();
    fs::set_permissions(&tenant, fs::Permissions::from_mode(0o755)).unwrap();
    assert!(
        scan.changed
            .iter()
            .all(|tenant| tenant.documents.len() == 1),
        "{:?}",
        scan.changed
    );
}

#[test]
fn the_size_and_number_of_files_are_limited() {
    let root = TempDir::new().unwrap();
    let padded = |bytes: usize| {
        format!(
            "{}{}",
            service("big"),
            "#".repeat(bytes - service("big").len())
        )
    };
    put(
        root.path(),
        "alpha/big.yaml",
        &padded(limits::FILE_BYTES_MAX),
    );
    let mut directory = Directory::new(root.path());
    check(&mut directory, "alpha: big");
    put(
        root.path(),
        "alpha/big.yaml",
        &padded(limits::FILE_BYTES_MAX + 1),
    );
    let too_big = format!("! the file has more than {} bytes", limits::FILE_BYTES_MAX);
    check(
        &mut directory,
        &format!(
            "alpha: big\n{too_big}\n?! the file is broken, so its last good 1 objects stay in force"
        ),
    );
    // All files of a tenant together exceed the limit, so the last one is refused.
    // One file more than the bytes of a tenant allow.
    let fitting = limits::TENANT_BYTES_MAX / limits::FILE_BYTES_MAX;
    for number in 0..=fitting {
        put(
            root.path(),
            &format!("beta/{number}.yaml"),
            &format!("#{}", "x".repeat(limits::FILE_BYTES_MAX - 1)),
        );
    }
    let too_much = format!(
        "! with this file the tenant's files have more than {} bytes",
        limits::TENANT_BYTES_MAX
    );
    check(&mut directory, &format!("beta: \n{too_much}"));
    // Once another file is gone, the refused one fits and is read, although nobody touched it.
    fs::remove_file(root.path().join("beta/0.yaml")).unwrap();
    check(&mut directory, "beta: ");
    // Beyond the number of files, those that were read before stay.
    put(root.path(), "gamma/z.yaml", &service("z"));
    directory.scan();
    for number in 0..limits::FILES_PER_TENANT_MAX {
        fs::write(
            root.path().join(format!("gamma/{number:05}.yaml")),
            service(&format!("s{number}")),
        )
        .unwrap();
    }
    // Folder `gamma` has one file more than the limit, and z.yaml was read before.
    let scan = directory.scan();
    assert_eq!(
        scan.changed[0].documents.len(),
        limits::FILES_PER_TENANT_MAX
    );
    assert!(
        scan.changed[0]
            .documents
            .iter()
            .any(|d| d.object.metadata().name.as_str() == "z")
    );
    assert!(
        scan.changed[0].diagnostics[0]
            .problem
            .contains("1 are left out, 04095.yaml first"),
        "{:?}",
        scan.changed[0].diagnostics
    );
}

#[test]
fn the_number_of_tenants_is_limited() {
    let root = TempDir::new().unwrap();
    fs::create_dir(root.path().join("zz-known")).unwrap();
    let mut directory = Directory::new(root.path());
    check(&mut directory, "zz-known: ");
    for number in 0..limits::TENANTS_MAX {
        fs::create_dir(root.path().join(format!("t{number}"))).unwrap();
    }
    let scan = directory.scan();
    assert_eq!(scan.changed.len(), limits::TENANTS_MAX - 1);
    assert!(
        scan.diagnostics[0].problem.contains("1 are left out"),
        "{:?}",
        scan.diagnostics
    );
}

#[test]
fn the_number_of_documents_and_findings_is_limited() {
    let many = "a: 1\n---\n".repeat(limits::DOCUMENTS_PER_FILE_MAX + 1);
    let parsed = canal_sources::parse("f.yaml", &many);
    assert!(
        parsed.documents.is_empty()
            && parsed.diagnostics[0]
                .problem
                .contains("documents, more than"),
        "{:?}",
        parsed.diagnostics
    );
    // Beyond the limit on a document's errors, the whole field becomes one fault of the object.
    // Twice the limit on diagnostics, so that the count in the result is the limit's.
    let ports = "{port: x}, ".repeat(limits::FINDINGS_PER_DOCUMENT_MAX * 2);
    let service = |spec: &str| {
        format!("apiVersion: v1\nkind: Service\nmetadata: {{name: a}}\nspec: {{{spec}}}\n")
    };
    let parsed = canal_sources::parse("f.yaml", &service(&format!("ports: [{ports}]")));
    assert_eq!(
        parsed.diagnostics.len(),
        // The last diagnostic says that more are left out.
        limits::FINDINGS_PER_DOCUMENT_MAX + 1
    );
    assert_eq!(
        parsed.documents[0]
            .faults
            .iter()
            .filter(|fault| fault.field == "spec.ports")
            .count(),
        1
    );
    // Far more than FINDINGS_PER_DOCUMENT_MAX, in a file that stays below FILE_BYTES_MAX.
    let unknown: String = (0..20_000)
        .map(|number| format!("x{number}: 1, "))
        .collect();
    let parsed = canal_sources::parse("f.yaml", &service(&unknown));
    assert_eq!(
        parsed.diagnostics.len(),
        limits::FINDINGS_PER_DOCUMENT_MAX + 1
    );
    assert_eq!(
        parsed.documents[0]
            .faults
            .iter()
            .filter(|fault| fault.field == "spec")
            .count(),
        1
    );
    let parsed = canal_sources::parse("f.yaml", &"#".repeat(limits::FILE_BYTES_MAX + 1));
    assert!(
        parsed.diagnostics[0].problem.contains("bytes, more than"),
        "{:?}",
        parsed.diagnostics
    );
}

/// Each item of a list is stored alone, and reads back as the same object with the same faults.
#[test]
fn the_items_of_a_list_are_documents() {
    let list = "apiVersion: v1\nkind: List\nitems:\n\
                - apiVersion: v1\n  kind: Service\n  metadata:\n    name: a\n    labels: {v: \"1.10\"}\n    annotations:\n      x: |\n        long\n      canal.mesh/upstream-pool: shared\n\
                \x20 spec:\n    ports:\n    - port: 80\n      speed: 1.10\n\
                - apiVersion: v1\n  kind: Deployment\n  metadata: {name: b}\n";
    let parsed = canal_sources::parse("l.yaml", list);
    let [document] = parsed.documents.as_slice() else {
        panic!("{:?}", parsed.documents);
    };
    assert_eq!((document.origin.line, document.origin.column), (4, 3));
    assert!(!document.text.contains("long"), "{}", document.text);
    let again = canal_sources::parse("again.yaml", &document.text);
    assert_eq!(again.documents[0].object, document.object);
    assert_eq!(again.documents[0].faults, document.faults);
    let found: Vec<String> = parsed.diagnostics.iter().map(ToString::to_string).collect();
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(
        found[0]
            .starts_with("l.yaml:16:7: error[CANAL0102]: Service default/a: spec.ports[0].speed"),
        "{found:?}"
    );
    assert!(
        found[1].starts_with("l.yaml:18:3: warning[CANAL0110]: kind: Deployment"),
        "{found:?}"
    );
    let many = format!(
        "apiVersion: v1\nkind: List\nitems: [{}]\n",
        "{}, ".repeat(limits::DOCUMENTS_PER_FILE_MAX + 1)
    );
    let parsed = canal_sources::parse("l.yaml", &many);
    assert!(parsed.diagnostics[0].problem.contains("items of this list"));
    assert_eq!(parsed.diagnostics.len(), 1);
}

/// A list that were read as empty would remove the objects that the file had before.
#[test]
fn a_list_without_items_is_an_error() {
    for (items, is_complete) in [
        ("items: []", true),
        ("itmes: []", false),
        ("items: {}", false),
        ("items:", false),
        ("metadata: {}", false),
    ] {
        let parsed =
            canal_sources::parse("l.yaml", &format!("apiVersion: v1\nkind: List\n{items}\n"));
        assert_eq!(parsed.is_complete(), is_complete, "{items}");
    }
}

/// The annotation `canal.mesh/policy-paths` has an effect however it is written.
#[test]
fn policy_paths_are_read_from_a_line_of_their_own() {
    let text = "apiVersion: v1\nkind: Service\nmetadata:\n  name: a\n  annotations:\n    x: y\n    canal.mesh/policy-paths: legacy\nspec: {ports: [{port: 80}]}\n";
    let parsed = canal_sources::parse("a.yaml", text);
    let annotations = &parsed.documents[0].object.metadata().annotations;
    let names: Vec<&str> = annotations.keys().map(String::as_str).collect();
    assert_eq!(names, ["canal.mesh/policy-paths"]);
}

/// A document that only another implementation reads is refused by name, and the objects beside it
/// follow the file as before.
#[test]
fn a_foreign_kind_takes_no_other_document_down() {
    let root = TempDir::new().unwrap();
    let tenant = root.path().join("alpha");
    fs::create_dir(&tenant).unwrap();
    let service = |name: &str| {
        format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\nspec: {{ports: [{{port: 80}}]}}\n"
        )
    };
    let file = tenant.join("a.yaml");
    fs::write(&file, service("old")).unwrap();
    let mut directory = Directory::new(root.path());
    directory.scan();
    let foreign =
        "---\napiVersion: networking.istio.io/v1alpha3\nkind: EnvoyFilter\nmetadata: {name: x}\n";
    fs::write(&file, format!("{}{foreign}", service("new"))).unwrap();
    let scan = directory.scan();
    let names: Vec<&str> = scan.changed[0]
        .documents
        .iter()
        .map(|document| document.object.metadata().name.as_str())
        .collect();
    assert_eq!(names, ["new"]);
    let [refusal] = scan.changed[0].diagnostics.as_slice() else {
        panic!("{:?}", scan.changed[0].diagnostics);
    };
    assert!(refusal.problem.contains("Canal runs no Envoy"), "{refusal}");
}
