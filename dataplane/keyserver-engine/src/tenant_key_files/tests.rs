//! Directories that change: keys come and go, and a requester that is removed from the list is
//! refused at once.

use canal_testing::{TestCa, identity};

use super::*;

struct KeyFilesFixture {
    dir: tempfile::TempDir,
    ca: TestCa,
    files: TenantKeyFiles,
    registry: Registry,
}

fn caller(requester: &str) -> ChannelPeer {
    let (kind, name) = requester.split_once('/').unwrap();
    let requester = match kind {
        "gateway" => KeyRequester::Gateway(name.parse().unwrap()),
        _ => KeyRequester::Node(name.parse().unwrap()),
    };
    ChannelPeer {
        requester,
        tenant: None,
    }
}

impl KeyFilesFixture {
    fn new() -> Self {
        let (dir, registry) = (tempfile::tempdir().unwrap(), Registry::new());
        let vault = Arc::new(Vault::new().unwrap());
        let files = TenantKeyFiles::open(
            dir.path().into(),
            "alpha".parse().unwrap(),
            vault,
            &registry,
        )
        .unwrap();
        Self {
            dir,
            ca: TestCa::new("alpha"),
            files,
            registry,
        }
    }
    fn write(&self, name: &str, text: &str) {
        // Files are replaced as editors and secret mounts do it: atomically.
        let temporary = self.dir.path().join("_new");
        std::fs::write(&temporary, text).unwrap();
        std::fs::rename(temporary, self.dir.path().join(name)).unwrap();
    }
    fn pair(&self, name: &str) {
        let issued = self
            .ca
            .issue_with(&identity("spiffe://alpha.example/ns/a/sa/b"), |_| {});
        self.write(&format!("{name}.crt"), &issued.chain);
        self.write(&format!("{name}.key"), &issued.key);
        self.files.poll();
    }
    fn find(&self, name: &str, by: &str) -> Result<Arc<CertifiedPrivateKey>, KeyRefusal> {
        self.files.find(&name.parse().unwrap(), &caller(by))
    }
    fn broken(&self) -> u64 {
        let text = self.registry.render();
        let line = text
            .lines()
            .find(|l| l.starts_with("canal_key_file_errors_total"))
            .unwrap();
        line.rsplit_once(' ').unwrap().1.parse().unwrap()
    }
}

/// An allow list, a service's key, its requester, and whether the list lets the requester use the
/// key.
type AllowCase = (
    &'static str,
    &'static str,
    &'static str,
    Result<(), KeyRefusal>,
);

const ALLOW_CASES: [AllowCase; 11] = [
    (
        "allow: {a/shop: [gateway/g1]}",
        "alpha/a/shop",
        "gateway/g1",
        Ok(()),
    ),
    (
        "allow: {a/shop: [gateway/g1]}",
        "alpha/a/shop",
        "gateway/g2",
        Err(KeyRefusal::NotAllowed),
    ),
    (
        "allow: {a/shop: [gateway/g1]}",
        "alpha/a/shop.example",
        "gateway/g1",
        Err(KeyRefusal::NotAllowed),
    ),
    (
        "allow: {a/shop.example: ['gateway/*']}",
        "alpha/a/shop.example",
        "gateway/g2",
        Ok(()),
    ),
    (
        "allow: {a/shop.example: ['gateway/*']}",
        "alpha/a/shop.example",
        "node/g2",
        Err(KeyRefusal::NotAllowed),
    ),
    (
        "allow: {a/none: [gateway/g1]}",
        "alpha/a/none",
        "gateway/g1",
        Err(KeyRefusal::UnknownKey),
    ),
    (
        "allow: {}",
        "alpha/a/shop",
        "gateway/g1",
        Err(KeyRefusal::NotAllowed),
    ),
    (
        "allow: [broken",
        "alpha/a/shop",
        "gateway/g1",
        Err(KeyRefusal::NotAllowed),
    ),
    (
        "allowed: {a/shop: [gateway/g1]}",
        "alpha/a/shop",
        "gateway/g1",
        Err(KeyRefusal::NotAllowed),
    ),
    // One key of the list is not a service, so its meaning is unknown.
    (
        "allow: {a/shop: [gateway/g1], shop: [gateway/g1]}",
        "alpha/a/shop",
        "gateway/g1",
        Err(KeyRefusal::NotAllowed),
    ),
    (
        "allow: {b/a/shop: [gateway/g1]}",
        "alpha/a/shop",
        "gateway/g1",
        Err(KeyRefusal::NotAllowed),
    ),
];

#[test]
fn the_allow_list_takes_effect_at_once() {
    let fixture = KeyFilesFixture::new();
    fixture.pair("a.shop");
    fixture.pair("a.shop.example");
    assert_eq!(
        fixture.find("alpha/a/shop", "gateway/g1").unwrap_err(),
        KeyRefusal::NotAllowed
    );
    for (list, key, by, want) in ALLOW_CASES {
        fixture.write(ALLOW, list);
        // Without a pause, and without another scan of the directory.
        assert_eq!(
            fixture.find(key, by).map(drop),
            want,
            "{list}: {key} by {by}"
        );
    }
    fixture.write(ALLOW, "allow: {shop: [gateway/g1]}");
    assert!(
        fixture
            .files
            .status()
            .last()
            .unwrap()
            .error
            .contains("write namespace/name"),
        "{:?}",
        fixture.files.status()
    );
    fixture.write(ALLOW, "allow: {a/shop: [gateway/g1]}");
    fixture.find("alpha/a/shop", "gateway/g1").unwrap();
    std::fs::remove_file(fixture.dir.path().join(ALLOW)).unwrap();
    assert_eq!(
        fixture.find("alpha/a/shop", "gateway/g1").unwrap_err(),
        KeyRefusal::NotAllowed
    );
    assert!(
        fixture
            .files
            .status()
            .last()
            .unwrap()
            .error
            .contains("no allow list")
    );
    // The list was missing at first, then malformed, and then removed; cases may add to that.
    assert!(fixture.broken() >= 3);
}

/// Two namespaces may have a service of the same name; each has access to its own key only.
#[test]
fn a_key_is_of_one_service_and_no_other_of_its_name() {
    let fixture = KeyFilesFixture::new();
    fixture.pair("a.shop");
    fixture.write(ALLOW, "allow: {a/shop: ['gateway/*'], b/shop: ['gateway/*'], shop/a: ['gateway/*'], a/sho: ['gateway/*']}");
    fixture.find("alpha/a/shop", "gateway/g1").unwrap();
    for other in ["alpha/b/shop", "alpha/shop/a", "alpha/a/sho", "beta/a/shop"] {
        let want = if other.starts_with("beta") {
            KeyRefusal::NotAllowed
        } else {
            KeyRefusal::UnknownKey
        };
        assert_eq!(
            fixture.find(other, "gateway/g1").unwrap_err(),
            want,
            "{other}"
        );
    }
    fixture.pair("b.shop");
    let chain = |key: &str| fixture.find(key, "gateway/g1").unwrap().chain.clone();
    assert_ne!(chain("alpha/a/shop"), chain("alpha/b/shop"));
    // Misnamed files are reported once, and belong to no service.
    let before = fixture.broken();
    fixture.pair("shop");
    fixture.pair("Shop.shop");
    fixture.files.poll();
    assert_eq!((fixture.files.count(), fixture.broken() - before), (2, 2));
    let misnamed: Vec<_> = fixture
        .files
        .status()
        .into_iter()
        .filter(|s| s.error.contains("NAMESPACE.NAME.crt"))
        .map(|s| s.name)
        .collect();
    assert_eq!(misnamed, ["Shop.shop.crt", "shop.crt"]);
    assert_eq!(
        expected_files(&"alpha/b/shop".parse().unwrap()),
        "b.shop.crt and b.shop.key"
    );
}

#[test]
fn keys_come_go_and_are_replaced_whole_or_not_at_all() {
    let fixture = KeyFilesFixture::new();
    fixture.write(ALLOW, "allow: {a/shop: ['gateway/*']}");
    let chain = || {
        fixture
            .find("alpha/a/shop", "gateway/g1")
            .map(|c| c.chain.clone())
    };
    assert_eq!(chain(), Err(KeyRefusal::UnknownKey));
    fixture.pair("a.shop");
    let first = chain().unwrap();
    // A new certificate does not match the old key, which is still there.
    let issued = fixture
        .ca
        .issue_with(&identity("spiffe://alpha.example/ns/a/sa/b"), |_| {});
    fixture.write("a.shop.crt", &issued.chain);
    fixture.files.poll();
    assert_eq!(chain().unwrap(), first);
    assert!(
        fixture.files.status()[0].error.contains("for another key"),
        "{:?}",
        fixture.files.status()
    );
    fixture.write("a.shop.key", &issued.key);
    fixture.files.poll();
    assert!(chain().unwrap() != first && fixture.files.status()[0].error.is_empty());
    for (file, text) in [
        ("a.shop.key", "nothing"),
        ("a.shop.crt", ""),
        // Beyond the 1 MiB of `FILE_BYTES_MAX`.
        ("a.shop.key", &"x".repeat(2 << 20)),
    ] {
        fixture.write(file, text);
        fixture.files.poll();
        assert!(
            chain().is_ok() && !fixture.files.status()[0].error.is_empty(),
            "{file}"
        );
    }
    std::fs::remove_file(fixture.dir.path().join("a.shop.key")).unwrap();
    fixture.files.poll();
    assert_eq!(
        (chain().unwrap_err(), fixture.files.count()),
        (KeyRefusal::UnknownKey, 0)
    );
}

#[test]
fn a_folder_has_its_limit() {
    let fixture = KeyFilesFixture::new();
    let issued = fixture
        .ca
        .issue_with(&identity("spiffe://alpha.example/ns/a/sa/b"), |_| {});
    for n in 0..=FILES_MAX {
        std::fs::write(
            fixture.dir.path().join(format!("a.k{n}.crt")),
            &issued.chain,
        )
        .unwrap();
        std::fs::write(fixture.dir.path().join(format!("a.k{n}.key")), &issued.key).unwrap();
    }
    let before = fixture.broken();
    fixture.files.poll();
    fixture.files.poll();
    assert_eq!(
        (fixture.files.count(), fixture.broken() - before),
        (FILES_MAX, 1)
    );
}

#[test]
fn new_keys_displace_none_that_is_in_use() {
    let fixture = KeyFilesFixture::new();
    fixture.pair("a.shop");
    let issued = fixture
        .ca
        .issue_with(&identity("spiffe://alpha.example/ns/a/sa/b"), |_| {});
    for n in 0..FILES_MAX {
        fixture.write(&format!("a.k{n}.crt"), &issued.chain);
        fixture.write(&format!("a.k{n}.key"), &issued.key);
    }
    fixture.files.poll();
    let status = fixture.files.status();
    assert_eq!(fixture.files.count(), FILES_MAX);
    assert!(
        status.iter().any(|file| file.name == "a.shop"),
        "{status:?}"
    );
}

#[test]
fn errors_of_the_file_system_take_no_key_away() {
    let fixture = KeyFilesFixture::new();
    fixture.pair("a.shop");
    let folder = fixture.dir.path();
    // A link to itself: the file cannot be examined, and is not gone either.
    std::fs::remove_file(folder.join("a.shop.key")).unwrap();
    std::os::unix::fs::symlink("a.shop.key", folder.join("a.shop.key")).unwrap();
    fixture.files.poll();
    assert_eq!(fixture.files.count(), 1);
    // A folder that cannot be scanned, because a file has its name.
    std::fs::remove_dir_all(folder).unwrap();
    std::fs::write(folder, "").unwrap();
    let before = fixture.broken();
    fixture.files.poll();
    assert_eq!(fixture.files.count(), 1);
    assert!(fixture.broken() > before);
    // The owner has removed the folder with all keys.
    std::fs::remove_file(folder).unwrap();
    fixture.files.poll();
    assert_eq!(fixture.files.count(), 0);
}
