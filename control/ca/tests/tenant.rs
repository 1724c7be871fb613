//! Tests of the content of workload certificates, and of the requests that are refused. rustls
//! verifies the chains.

use std::sync::Arc;
use std::time::Duration;

use canal_ca::{
    CSR_BYTES_MAX, CertificateRequest, CsrError, IssuedLeaf, LIFETIME_SECONDS_MAX,
    ROOT_LIFETIME_SECONDS, TenantAuthority,
};
use canal_model::identity::Identity;
use canal_model::ids::TrustDomain;
use rcgen::{
    BasicConstraints, CertificateParams, CustomExtension, DistinguishedName,
    ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256,
    PKCS_ECDSA_P384_SHA384, PKCS_ED25519, PKCS_RSA_SHA256, RsaKeySize, SanType,
};
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, ParsedExtension, X509Certificate};

/// A moment in January 2027, in seconds since 1970.
const NOW: u64 = 1_800_000_000;

fn domain(s: &str) -> TrustDomain {
    TrustDomain::new(s).unwrap()
}
fn identity() -> Identity {
    "spiffe://alpha.example/ns/bookinfo/sa/reviews"
        .parse()
        .unwrap()
}
fn authority() -> TenantAuthority {
    TenantAuthority::generate(&domain("alpha.example"), NOW).unwrap()
}
fn uri(s: &str) -> SanType {
    SanType::URI(s.to_string().try_into().unwrap())
}

fn csr(key: &KeyPair, change: impl FnOnce(&mut CertificateParams)) -> String {
    let mut p = CertificateParams::default();
    p.distinguished_name = DistinguishedName::new();
    change(&mut p);
    p.serialize_request(key).unwrap().pem().unwrap()
}
fn p256() -> KeyPair {
    KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap()
}

fn issue(
    authority: &TenantAuthority,
    csr: &str,
    identity: &Identity,
    lifetime_seconds: u64,
    now: u64,
) -> Result<IssuedLeaf, CsrError> {
    authority.issue(
        &CertificateRequest {
            csr,
            identity,
            names: &[],
            rsa: true,
            lifetime_seconds,
        },
        now,
    )
}

fn der(pem: &str) -> CertificateDer<'static> {
    CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()
}

/// Verifies a certificate by rustls at `at` seconds since 1970, with only the bundle as roots.
fn verify(issued: &IssuedLeaf, bundle: &str, at: u64) -> Result<(), String> {
    let mut roots = RootCertStore::empty();
    roots.add(der(bundle)).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
        .build()
        .unwrap();
    let time = UnixTime::since_unix_epoch(Duration::from_secs(at));
    verifier
        .verify_client_cert(&der(&issued.chain[0]), &[], time)
        .map(|_| ())
        .map_err(|e| e.to_string())
}

#[test]
fn a_certificate_has_exactly_the_fields_that_spiffe_requires() {
    let authority = authority();
    let request = identity().to_string();
    // The request contains far more than the certificate may.
    let greedy = csr(&p256(), |p| {
        p.subject_alt_names = vec![
            uri(&request),
            SanType::DnsName("canal-controller".try_into().unwrap()),
        ];
        p.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        p.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        p.extended_key_usages = vec![ExtendedKeyUsagePurpose::CodeSigning];
        p.distinguished_name
            .push(rcgen::DnType::CommonName, "admin");
    });
    let issued = issue(&authority, &greedy, &identity(), 3600, NOW).unwrap();
    assert_eq!(
        (issued.chain.len(), issued.root.as_str()),
        (1, authority.fingerprint())
    );

    let leaf = der(&issued.chain[0]);
    let (_, leaf) = X509Certificate::from_der(&leaf).unwrap();
    let root = der(authority.certificate());
    let (_, root) = X509Certificate::from_der(&root).unwrap();
    assert_eq!(leaf.subject().iter().count(), 0, "no subject");
    // It is valid from SKEW_SECONDS (60) before the request, for peers with slow clocks.
    assert_eq!(
        (
            leaf.validity().not_before.timestamp(),
            leaf.validity().not_after.timestamp()
        ),
        (NOW as i64 - 60, NOW as i64 + 3600)
    );
    // Serials have a constant length of 16 bytes, of which `issued.serial` is the hexadecimal form.
    assert_eq!(leaf.raw_serial().len(), 16);
    assert_eq!(
        issued.serial,
        leaf.raw_serial()
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect::<String>()
    );

    let san = leaf.subject_alternative_name().unwrap().unwrap();
    assert!(
        san.critical,
        "RFC 5280 §4.2.1.6: critical where the subject is empty"
    );
    assert_eq!(san.value.general_names, [GeneralName::URI(&request)]);
    let usage = leaf.key_usage().unwrap().unwrap().value;
    assert!(usage.digital_signature() && !usage.key_cert_sign() && !usage.key_encipherment());
    let extended = leaf.extended_key_usage().unwrap().unwrap().value;
    assert!(
        extended.server_auth && extended.client_auth && !extended.code_signing && !extended.any
    );
    assert!(!leaf.basic_constraints().unwrap().unwrap().value.ca);

    let find = |c: &X509Certificate<'_>, own: bool| {
        c.extensions()
            .iter()
            .find_map(|e| match e.parsed_extension() {
                ParsedExtension::SubjectKeyIdentifier(id) if own => Some(id.0.to_vec()),
                ParsedExtension::AuthorityKeyIdentifier(id) if !own => {
                    id.key_identifier.as_ref().map(|k| k.0.to_vec())
                }
                _ => None,
            })
    };
    assert!(find(&leaf, true).is_some());
    assert_eq!(find(&leaf, false).unwrap(), find(&root, true).unwrap());
    let root_constraints = root.basic_constraints().unwrap().unwrap().value;
    // A tenant's root signs leaves only.
    assert_eq!(
        (root_constraints.ca, root_constraints.path_len_constraint),
        (true, Some(0))
    );
}

#[test]
fn chains_hold_within_their_time_and_domain_only() {
    let (ours, theirs) = (
        authority(),
        TenantAuthority::generate(&domain("beta.example"), NOW).unwrap(),
    );
    let issued = issue(&ours, &csr(&p256(), |_| {}), &identity(), 3600, NOW).unwrap();
    for (what, bundle, at, ok) in [
        ("now", ours.certificate(), NOW, true),
        (
            "a receiver with a slow clock",
            ours.certificate(),
            NOW - 59,
            true,
        ),
        ("before its time", ours.certificate(), NOW - 61, false),
        ("its last second", ours.certificate(), NOW + 3600, true),
        ("after its time", ours.certificate(), NOW + 3601, false),
        ("another tenant's bundle", theirs.certificate(), NOW, false),
    ] {
        let got = verify(&issued, bundle, at);
        assert_eq!(got.is_ok(), ok, "{what}: {got:?}");
    }
}

/// A case's name, a request for a certificate, and the reason of its refusal if it is refused.
type RequestCase = (&'static str, String, Option<&'static str>);

fn cases_of_names(plain: &str) -> Vec<RequestCase> {
    let request = identity().to_string();
    let rsa = |bits| KeyPair::generate_rsa_for(&PKCS_RSA_SHA256, bits).unwrap();
    let unreadable_name = |p: &mut CertificateParams| {
        p.custom_extensions = vec![CustomExtension::from_oid_content(
            // The id-ce-subjectAltName extension: its URI claims 16 bytes, and only one follows.
            &[2, 5, 29, 17],
            vec![0x30, 0x05, 0x86, 0x10, 0x41],
        )];
    };
    let foreign_extension = |p: &mut CertificateParams| {
        // The content `5, 0` is NULL in DER.
        let mut e = CustomExtension::from_oid_content(&[1, 2, 3, 4], vec![5, 0]);
        e.set_criticality(true);
        p.custom_extensions = vec![e];
    };
    vec![
        ("no name", plain.into(), None),
        (
            "the requested name",
            csr(&p256(), |p| p.subject_alt_names = vec![uri(&request)]),
            None,
        ),
        (
            "P-384",
            csr(
                &KeyPair::generate_for(&PKCS_ECDSA_P384_SHA384).unwrap(),
                |_| {},
            ),
            None,
        ),
        ("RSA 2048", csr(&rsa(RsaKeySize::_2048), |_| {}), None),
        (
            "an unknown critical extension is ignored",
            csr(&p256(), foreign_extension),
            None,
        ),
        (
            "another name",
            csr(&p256(), |p| {
                p.subject_alt_names = vec![uri("spiffe://alpha.example/ns/x/sa/y")]
            }),
            Some("name"),
        ),
        (
            "a second name",
            csr(&p256(), |p| {
                p.subject_alt_names = vec![uri(&request), uri("spiffe://b/ns/x/sa/y")]
            }),
            Some("name"),
        ),
        (
            // SPIFFE IDs are compared byte by byte.
            "the name in capitals",
            csr(&p256(), |p| {
                p.subject_alt_names = vec![uri(&request.to_uppercase())]
            }),
            Some("name"),
        ),
        (
            "a name that cannot be read",
            csr(&p256(), unreadable_name),
            Some("form"),
        ),
    ]
}

fn cases_of_keys_and_forms(authority: &TenantAuthority, plain: &str) -> Vec<RequestCase> {
    vec![
        (
            "a changed bit in the signature",
            tampered(plain),
            Some("signature"),
        ),
        (
            "Ed25519",
            csr(&KeyPair::generate_for(&PKCS_ED25519).unwrap(), |_| {}),
            Some("key"),
        ),
        (
            "RSA 1024",
            include_str!("requests/rsa-1024.pem").into(),
            Some("key"),
        ),
        (
            "P-521",
            include_str!("requests/p-521.pem").into(),
            Some("key"),
        ),
        (
            "RSA 2048 signed with SHA-1",
            include_str!("requests/rsa-2048-sha1.pem").into(),
            Some("key"),
        ),
        ("empty", String::new(), Some("form")),
        (
            "a certificate",
            authority.certificate().into(),
            Some("form"),
        ),
        (
            "no DER inside",
            "-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n".into(),
            Some("form"),
        ),
        ("cut off", plain[..plain.len() / 2].into(), Some("form")),
        (
            "larger than the limit",
            format!("{plain}{}", " ".repeat(CSR_BYTES_MAX)),
            Some("too_large"),
        ),
    ]
}

#[test]
fn requests_and_their_fate() {
    let authority = authority();
    let plain = csr(&p256(), |_| {});
    let cases = [
        cases_of_names(&plain),
        cases_of_keys_and_forms(&authority, &plain),
    ]
    .concat();
    for (what, csr, refusal) in cases {
        match (issue(&authority, &csr, &identity(), 3600, NOW), refusal) {
            (Ok(issued), None) => verify(&issued, authority.certificate(), NOW)
                .unwrap_or_else(|e| panic!("{what}: {e}")),
            (Err(e), Some(name)) => assert_eq!(e.name(), name, "{what}: {e}"),
            (got, want) => panic!("{what}: got {got:?}, wanted {want:?}"),
        }
    }
}

/// Returns the request with one bit changed in its last byte, which belongs to the signature.
fn tampered(pem: &str) -> String {
    use rustls::pki_types::CertificateSigningRequestDer;
    let mut der = CertificateSigningRequestDer::from_pem_slice(pem.as_bytes())
        .unwrap()
        .to_vec();
    let last = der.len() - 1;
    der[last] ^= 1;
    let text: Vec<String> = base64(&der)
        .as_bytes()
        .chunks(64)
        .map(|c| String::from_utf8_lossy(c).into_owned())
        .collect();
    format!(
        "-----BEGIN CERTIFICATE REQUEST-----\n{}\n-----END CERTIFICATE REQUEST-----\n",
        text.join("\n")
    )
}

fn base64(bytes: &[u8]) -> String {
    const WORDS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::new();
    for chunk in bytes.chunks(3) {
        let n = (u32::from(chunk[0]) << 16)
            | (u32::from(*chunk.get(1).unwrap_or(&0)) << 8)
            | u32::from(*chunk.get(2).unwrap_or(&0));
        for i in 0..4 {
            out.push(if i <= chunk.len() {
                char::from(WORDS[(n >> (18 - 6 * i)) as usize & 63])
            } else {
                '='
            });
        }
    }
    out
}

#[test]
fn an_identity_of_another_domain_is_never_signed() {
    let other: Identity = "spiffe://beta.example/ns/bookinfo/sa/reviews"
        .parse()
        .unwrap();
    let e = issue(&authority(), &csr(&p256(), |_| {}), &other, 3600, NOW).unwrap_err();
    assert_eq!(e.name(), "name", "{e}");
}

#[test]
fn the_root_bounds_its_leaves() {
    let authority = authority();
    let end = NOW + ROOT_LIFETIME_SECONDS;
    let issued = issue(
        &authority,
        &csr(&p256(), |_| {}),
        &identity(),
        LIFETIME_SECONDS_MAX,
        end - 100,
    )
    .unwrap();
    assert_eq!(issued.not_after, end);
    let e = issue(
        &authority,
        &csr(&p256(), |_| {}),
        &identity(),
        LIFETIME_SECONDS_MAX,
        end,
    )
    .unwrap_err();
    assert_eq!(e.name(), "root_ended", "{e}");
}

#[test]
fn an_authority_reads_back_and_refuses_a_foreign_pair() {
    let (a, b) = (authority(), authority());
    let again = TenantAuthority::load(&domain("alpha.example"), &a.key(), a.certificate()).unwrap();
    let issued = issue(&again, &csr(&p256(), |_| {}), &identity(), 3600, NOW).unwrap();
    verify(&issued, a.certificate(), NOW).unwrap();
    for (what, key, certificate) in [
        ("another root's certificate", a.key(), b.certificate()),
        ("no key", Vec::new().into(), a.certificate()),
        ("no certificate", a.key(), ""),
    ] {
        assert!(
            TenantAuthority::load(&domain("alpha.example"), &key, certificate).is_err(),
            "{what}"
        );
    }
}
