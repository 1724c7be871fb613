//! Tests of stored certificate authorities: roots with their keys, sealed or not, issued
//! certificates, and JWKS.

use std::path::Path;

use canal_store::{
    DomainName, Store, StoreError, StoreKey, StoreLimits, StoredAuthority, StoredCertificate,
    StoredTrust,
};

fn open(dir: &Path, key: Option<u8>) -> Result<Store, StoreError> {
    Store::open_with(
        dir,
        StoreLimits::default(),
        key.map(|k| StoreKey::new(&[k; 32]).unwrap()),
    )
}

fn domain(tenant: &str, domain: &str) -> DomainName {
    (tenant.parse().unwrap(), domain.parse().unwrap())
}

fn authority(secret: &str) -> Option<StoredAuthority> {
    Some(StoredAuthority {
        key: secret.as_bytes().to_vec().into(),
        certificate: format!("certificate of {}", secret.len()),
    })
}

fn trust(first: &str, second: Option<&str>, state: &str) -> StoredTrust {
    StoredTrust {
        first: authority(first),
        second: second.and_then(authority),
        state: state.into(),
    }
}

#[test]
fn cas_are_stored_per_tenant_and_domain_and_replaced_atomically() {
    let dir = tempfile::tempdir().unwrap();
    let s = open(dir.path(), None).unwrap();
    assert_eq!(s.trusts().unwrap(), []);
    let (a, b) = (
        domain("alpha", "one.example"),
        domain("beta", "one.example"),
    );
    s.put_trusts(&[
        (a.clone(), trust("a1", Some("a2"), "announced")),
        (b.clone(), trust("b1", None, "")),
    ])
    .unwrap();
    s.put_trusts(&[(a.clone(), trust("a2", None, "steady"))])
        .unwrap();
    drop(s);
    let s = open(dir.path(), None).unwrap();
    assert_eq!(
        s.trusts().unwrap(),
        [(a, trust("a2", None, "steady")), (b, trust("b1", None, ""))]
    );
    assert!(
        !format!("{:?}", authority("a1").unwrap()).contains("97, 49"),
        "the key is never printed"
    );
}

#[test]
fn keys_are_sealed_once_a_key_is_given_and_open_with_it_only() {
    let dir = tempfile::tempdir().unwrap();
    let a = (
        domain("alpha", "one.example"),
        trust("very-secret-one", Some("very-secret-two"), ""),
    );
    let is_in_file = |text: &str| {
        let file = std::fs::read(dir.path().join("controller.redb")).unwrap();
        file.windows(text.len()).any(|w| w == text.as_bytes())
    };
    let s = open(dir.path(), None).unwrap();
    s.put_trusts(std::slice::from_ref(&a)).unwrap();
    // Only one handle may have the file open.
    drop(s);
    assert!(
        is_in_file("very-secret-one"),
        "without a sealing key, the file contains the private key"
    );
    // The first start with a key seals what is in the file already.
    let s = open(dir.path(), Some(1)).unwrap();
    assert_eq!(s.trusts().unwrap(), std::slice::from_ref(&a));
    drop(s);
    assert!(
        // A certificate is public and stays readable: it proves that the search works. 15 is the
        // length of the secret.
        is_in_file("certificate of 15")
            && !is_in_file("very-secret-one")
            && !is_in_file("very-secret-two"),
        "no unsealed private key is left in the file"
    );
    for key in [None, Some(2)] {
        let refused = open(dir.path(), key).err().unwrap();
        assert!(
            refused.name() == "key" && refused.to_string().contains("--store-key-file"),
            "{refused}"
        );
    }
    let s = open(dir.path(), Some(1)).unwrap();
    s.put_trusts(&[(a.0.clone(), trust("very-secret-three", None, ""))])
        .unwrap();
    assert_eq!(
        s.trusts().unwrap()[0].1.first,
        authority("very-secret-three")
    );
}

#[test]
fn issued_certificates_are_recorded_until_they_expire() {
    let dir = tempfile::tempdir().unwrap();
    let s = open(dir.path(), None).unwrap();
    let certificate = |serial: &str, until| StoredCertificate {
        serial: serial.into(),
        identity: "spiffe://one.example/ns/a/sa/b".into(),
        names: vec!["a.b".into()],
        holder: "node alpha/n1".into(),
        root: "00".into(),
        issued: 1,
        until,
    };
    let (a, b) = (
        domain("alpha", "one.example"),
        domain("beta", "two.example"),
    );
    s.add_issued(&[
        (a.clone(), certificate("01", 10)),
        (a.clone(), certificate("02", 20)),
        (b.clone(), certificate("01", 30)),
    ])
    .unwrap();
    drop(s);
    let s = open(dir.path(), None).unwrap();
    assert_eq!(s.issued().unwrap().len(), 3);
    assert_eq!(
        (s.prune_issued(10).unwrap(), s.prune_issued(11).unwrap()),
        (0, 1)
    );
    assert_eq!(
        s.issued().unwrap(),
        [(a, certificate("02", 20)), (b, certificate("01", 30))]
    );
}

#[test]
fn key_sets_are_stored_per_tenant_and_uri() {
    let dir = tempfile::tempdir().unwrap();
    let s = open(dir.path(), None).unwrap();
    let (alpha, beta) = ("alpha".parse().unwrap(), "beta".parse().unwrap());
    s.put_jwks(&alpha, "https://a/keys", Some("{}")).unwrap();
    s.put_jwks(&beta, "https://a/keys", Some("{1}")).unwrap();
    s.put_jwks(&alpha, "file:keys", Some("{2}")).unwrap();
    s.put_jwks(&alpha, "https://a/keys", None).unwrap();
    drop(s);
    let s = open(dir.path(), None).unwrap();
    assert_eq!(
        s.jwks().unwrap(),
        [
            (alpha, "file:keys".into(), "{2}".into()),
            (beta, "https://a/keys".into(), "{1}".into())
        ]
    );
}
