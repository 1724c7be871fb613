//! Tests of the controller's own CA: the files in its directory, verification of the server by
//! clients, and the errors for a damaged directory.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use canal_ca::{ControllerCa, ControllerCaError, ROOT_LIFETIME_SECONDS, SERVER_LIFETIME_SECONDS};
use rustls::RootCertStore;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};

/// A moment in January 2027, in seconds since 1970.
const NOW: u64 = 1_800_000_000;

fn verify(infra: &ControllerCa, root_pem: &str, name: &str, at: u64) -> Result<(), String> {
    let server = infra.server_certificate("canal-controller", NOW).unwrap();
    let mut roots = RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_slice(root_pem.as_bytes()).unwrap())
        .unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider)
        .build()
        .unwrap();
    let name = ServerName::try_from(name.to_string()).unwrap();
    let time = UnixTime::since_unix_epoch(Duration::from_secs(at));
    verifier
        .verify_server_cert(&server.chain[0], &[], &name, &[], time)
        .map(|_| ())
        .map_err(|e| e.to_string())
}

#[test]
fn clients_verify_the_server_by_the_root_file_across_restarts() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("infra");
    let first = ControllerCa::open(&dir, NOW).unwrap();
    let root = fs::read_to_string(dir.join("root.pem")).unwrap();
    assert_eq!(first.certificate(), root);
    let mode = |n: &str| fs::metadata(dir.join(n)).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode("root.pem"), mode("root.key")), (0o644, 0o600));
    assert_eq!(
        fs::read_dir(&dir).unwrap().count(),
        2,
        "nothing is left beside"
    );
    let second = ControllerCa::open(&dir, NOW + 1).unwrap();
    for infra in [&first, &second] {
        verify(infra, &root, "canal-controller", NOW).unwrap();
        assert!(verify(infra, &root, "other", NOW).is_err());
        assert!(
            verify(
                infra,
                &root,
                "canal-controller",
                NOW + SERVER_LIFETIME_SECONDS + 1
            )
            .is_err()
        );
    }
}

#[test]
fn a_damaged_folder_is_an_error_and_never_replaced() {
    type Damage = fn(&Path);
    let cases: [(&str, Damage, Option<&str>); 5] = [
        (
            "the key was removed",
            |d| fs::remove_file(d.join("root.key")).unwrap(),
            Some("pair"),
        ),
        (
            "the key is another's",
            |d| {
                let other = d.join("other");
                ControllerCa::open(&other, NOW).unwrap();
                fs::copy(other.join("root.key"), d.join("root.key")).unwrap();
            },
            Some("pair"),
        ),
        (
            "the key is torn",
            |d| fs::write(d.join("root.key"), "-----BEGIN").unwrap(),
            Some("pair"),
        ),
        // The certificate is written last, so no client trusts a key without one.
        (
            "a start ended between the two writes",
            |d| fs::remove_file(d.join("root.pem")).unwrap(),
            None,
        ),
        (
            "nothing is left",
            |d| {
                fs::remove_file(d.join("root.pem")).unwrap();
                fs::remove_file(d.join("root.key")).unwrap();
            },
            None,
        ),
    ];
    for (what, damage, refused) in cases {
        let dir = tempfile::tempdir().unwrap();
        ControllerCa::open(dir.path(), NOW).unwrap();
        let before = fs::read(dir.path().join("root.pem")).unwrap();
        damage(dir.path());
        match (ControllerCa::open(dir.path(), NOW), refused) {
            (Err(ControllerCaError::Pair { .. }), Some("pair")) => {
                assert_eq!(
                    fs::read(dir.path().join("root.pem")).unwrap(),
                    before,
                    "{what}"
                );
            }
            (Ok(infra), None) => {
                verify(&infra, infra.certificate(), "canal-controller", NOW).unwrap()
            }
            (got, want) => panic!(
                "{what}: got {:?}, wanted {want:?}",
                got.err().map(|e| e.to_string())
            ),
        }
    }
}

#[test]
fn an_ended_root_and_a_bad_folder_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    ControllerCa::open(dir.path(), NOW).unwrap();
    assert!(matches!(
        ControllerCa::open(dir.path(), NOW + ROOT_LIFETIME_SECONDS),
        Err(ControllerCaError::Ended { .. })
    ));
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let Err(e) = ControllerCa::open(&file, NOW) else {
        panic!("opened")
    };
    assert!(e.to_string().contains("--infra-dir"), "{e}");
}

/// A sealer that inverts every bit, which is enough to detect a key that is stored unsealed.
struct Flip;

impl canal_ca::KeySealer for Flip {
    fn seal(&self, plain: &[u8]) -> Result<Vec<u8>, String> {
        Ok(plain.iter().map(|b| !b).collect())
    }
    fn unseal(&self, sealed: &[u8]) -> Result<zeroize::Zeroizing<Vec<u8>>, String> {
        Ok(sealed.iter().map(|b| !b).collect::<Vec<u8>>().into())
    }
}

#[test]
fn the_roots_key_is_sealed_on_disk_where_there_is_something_to_seal_with() {
    let dir = tempfile::tempdir().unwrap();
    let is_plain = || {
        std::fs::read(dir.path().join("root.key"))
            .unwrap()
            .starts_with(b"-----BEGIN")
    };
    let plain = ControllerCa::open(dir.path(), NOW).unwrap();
    assert!(is_plain());
    // An unsealed key is sealed at the next start and stays the same key.
    let sealed = ControllerCa::open_sealed(dir.path(), NOW, Some(&Flip)).unwrap();
    assert!(!is_plain());
    assert_eq!(plain.certificate(), sealed.certificate());
    ControllerCa::open_sealed(dir.path(), NOW, Some(&Flip))
        .unwrap()
        .server_certificate("canal", NOW)
        .unwrap();
    let Err(error) = ControllerCa::open(dir.path(), NOW) else {
        panic!("a sealed CA was opened without its sealing key")
    };
    assert!(error.to_string().contains("--store-key-file"), "{error}");
    let fresh = tempfile::tempdir().unwrap();
    ControllerCa::open_sealed(fresh.path(), NOW, Some(&Flip)).unwrap();
    assert!(
        !std::fs::read(fresh.path().join("root.key"))
            .unwrap()
            .starts_with(b"-----BEGIN")
    );
}
