//! Folders that change: keys come and go, and who is refused is refused at once.

use canal_kit::testing::{TestCa, identity};

use super::*;

struct Rig {
    dir: tempfile::TempDir,
    ca: TestCa,
    files: Files,
    registry: Registry,
}

fn caller(requester: &str) -> Caller {
    let (kind, name) = requester.split_once('/').unwrap();
    let requester = match kind {
        "gateway" => Requester::Gateway(name.parse().unwrap()),
        _ => Requester::Node(name.parse().unwrap()),
    };
    Caller { requester, tenant: None }
}

impl Rig {
    fn new() -> Self {
        let (dir, registry) = (tempfile::tempdir().unwrap(), Registry::new());
        let vault = Arc::new(Vault::new().unwrap());
        let files = Files::open(dir.path().into(), "alpha".parse().unwrap(), vault, &registry).unwrap();
        Self { dir, ca: TestCa::new("alpha"), files, registry }
    }
    fn write(&self, name: &str, text: &str) {
        // As an editor or a secret's mount does it: whole or not at all.
        let temporary = self.dir.path().join("_new");
        std::fs::write(&temporary, text).unwrap();
        std::fs::rename(temporary, self.dir.path().join(name)).unwrap();
    }
    fn pair(&self, name: &str) {
        let issued = self.ca.issue_with(&identity("spiffe://alpha.example/ns/a/sa/b"), |_| {});
        self.write(&format!("{name}.crt"), &issued.chain);
        self.write(&format!("{name}.key"), &issued.key);
        self.files.look();
    }
    fn find(&self, name: &str, by: &str) -> Result<Arc<Certified>, Refusal> {
        self.files.find(&name.parse().unwrap(), &caller(by))
    }
    fn broken(&self) -> u64 {
        let text = self.registry.render();
        let line = text.lines().find(|l| l.starts_with("canal_key_files_broken_total")).unwrap();
        line.rsplit_once(' ').unwrap().1.parse().unwrap()
    }
}

#[test]
fn who_is_listed_may_and_who_is_taken_off_may_not_at_once() {
    let rig = Rig::new();
    rig.pair("a.shop");
    rig.pair("a.shop.example");
    assert_eq!(rig.find("alpha/a/shop", "gateway/g1").unwrap_err(), Refusal::NotAllowed);
    let cases: [(&str, &str, &str, Result<(), Refusal>); 11] = [
        ("allow: {a/shop: [gateway/g1]}", "alpha/a/shop", "gateway/g1", Ok(())),
        ("allow: {a/shop: [gateway/g1]}", "alpha/a/shop", "gateway/g2", Err(Refusal::NotAllowed)),
        ("allow: {a/shop: [gateway/g1]}", "alpha/a/shop.example", "gateway/g1", Err(Refusal::NotAllowed)),
        ("allow: {a/shop.example: ['gateway/*']}", "alpha/a/shop.example", "gateway/g2", Ok(())),
        ("allow: {a/shop.example: ['gateway/*']}", "alpha/a/shop.example", "node/g2", Err(Refusal::NotAllowed)),
        ("allow: {a/none: [gateway/g1]}", "alpha/a/none", "gateway/g1", Err(Refusal::UnknownKey)),
        ("allow: {}", "alpha/a/shop", "gateway/g1", Err(Refusal::NotAllowed)),
        ("allow: [broken", "alpha/a/shop", "gateway/g1", Err(Refusal::NotAllowed)),
        ("allowed: {a/shop: [gateway/g1]}", "alpha/a/shop", "gateway/g1", Err(Refusal::NotAllowed)),
        // One of them is not of a service: nobody knows what was meant.
        ("allow: {a/shop: [gateway/g1], shop: [gateway/g1]}", "alpha/a/shop", "gateway/g1", Err(Refusal::NotAllowed)),
        ("allow: {b/a/shop: [gateway/g1]}", "alpha/a/shop", "gateway/g1", Err(Refusal::NotAllowed)),
    ];
    for (list, key, by, want) in cases {
        rig.write(ALLOW, list);
        // Without any pause, and without another look at the folder.
        assert_eq!(rig.find(key, by).map(drop), want, "{list}: {key} by {by}");
    }
    rig.write(ALLOW, "allow: {shop: [gateway/g1]}");
    assert!(rig.files.status().last().unwrap().error.contains("write namespace/name"), "{:?}", rig.files.status());
    rig.write(ALLOW, "allow: {a/shop: [gateway/g1]}");
    rig.find("alpha/a/shop", "gateway/g1").unwrap();
    std::fs::remove_file(rig.dir.path().join(ALLOW)).unwrap();
    assert_eq!(rig.find("alpha/a/shop", "gateway/g1").unwrap_err(), Refusal::NotAllowed);
    assert!(rig.files.status().last().unwrap().error.contains("no allow list"));
    assert!(rig.broken() >= 3);
}

/// Two namespaces may have a service of one name; who has the one has nothing of the other's.
#[test]
fn a_key_is_of_one_service_and_no_other_of_its_name() {
    let rig = Rig::new();
    rig.pair("a.shop");
    rig.write(ALLOW, "allow: {a/shop: ['gateway/*'], b/shop: ['gateway/*'], shop/a: ['gateway/*'], a/sho: ['gateway/*']}");
    rig.find("alpha/a/shop", "gateway/g1").unwrap();
    for other in ["alpha/b/shop", "alpha/shop/a", "alpha/a/sho", "beta/a/shop"] {
        let want = if other.starts_with("beta") { Refusal::NotAllowed } else { Refusal::UnknownKey };
        assert_eq!(rig.find(other, "gateway/g1").unwrap_err(), want, "{other}");
    }
    rig.pair("b.shop");
    let chain = |key: &str| rig.find(key, "gateway/g1").unwrap().chain.clone();
    assert_ne!(chain("alpha/a/shop"), chain("alpha/b/shop"));
    // Names of no service are told, once, and are nobody's.
    let before = rig.broken();
    rig.pair("shop");
    rig.pair("Shop.shop");
    rig.files.look();
    assert_eq!((rig.files.count(), rig.broken() - before), (2, 2));
    let told: Vec<_> = rig.files.status().into_iter().filter(|s| s.error.contains("NAMESPACE.NAME.crt")).map(|s| s.name).collect();
    assert_eq!(told, ["Shop.shop.crt", "shop.crt"]);
    assert_eq!(looked_for(&"alpha/b/shop".parse().unwrap()), "b.shop.crt and b.shop.key");
}

#[test]
fn keys_come_go_and_are_replaced_whole_or_not_at_all() {
    let rig = Rig::new();
    rig.write(ALLOW, "allow: {a/shop: ['gateway/*']}");
    let chain = || rig.find("alpha/a/shop", "gateway/g1").map(|c| c.chain.clone());
    assert_eq!(chain(), Err(Refusal::UnknownKey));
    rig.pair("a.shop");
    let first = chain().unwrap();
    // A certificate without its key is not for the key that is there.
    let issued = rig.ca.issue_with(&identity("spiffe://alpha.example/ns/a/sa/b"), |_| {});
    rig.write("a.shop.crt", &issued.chain);
    rig.files.look();
    assert_eq!(chain().unwrap(), first);
    assert!(rig.files.status()[0].error.contains("for another key"), "{:?}", rig.files.status());
    rig.write("a.shop.key", &issued.key);
    rig.files.look();
    assert!(chain().unwrap() != first && rig.files.status()[0].error.is_empty());
    for (file, text) in [("a.shop.key", "nothing"), ("a.shop.crt", ""), ("a.shop.key", &"x".repeat(2 << 20))] {
        rig.write(file, text);
        rig.files.look();
        assert!(chain().is_ok() && !rig.files.status()[0].error.is_empty(), "{file}");
    }
    std::fs::remove_file(rig.dir.path().join("a.shop.key")).unwrap();
    rig.files.look();
    assert_eq!((chain().unwrap_err(), rig.files.count()), (Refusal::UnknownKey, 0));
}

#[test]
fn a_folder_has_its_limit() {
    let rig = Rig::new();
    let issued = rig.ca.issue_with(&identity("spiffe://alpha.example/ns/a/sa/b"), |_| {});
    for n in 0..=FILES_MAX {
        std::fs::write(rig.dir.path().join(format!("a.k{n}.crt")), &issued.chain).unwrap();
        std::fs::write(rig.dir.path().join(format!("a.k{n}.key")), &issued.key).unwrap();
    }
    let before = rig.broken();
    rig.files.look();
    rig.files.look();
    assert_eq!((rig.files.count(), rig.broken() - before), (FILES_MAX, 1));
}
