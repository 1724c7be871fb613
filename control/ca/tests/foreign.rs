//! Tests of CAs from files, CRLs and responses of external CAs: which are accepted, and the error
//! name of each problem.

use std::sync::Arc;
use std::time::Duration;

use canal_ca::{
    AuthorityFiles, CRL_LIFETIME_SECONDS, CertificateRequest, ControllerCa, IssuedLeaf,
    RevokedSerial, TenantAuthority, check_answer,
};
use canal_model::identity::Identity;
use canal_model::ids::TrustDomain;
use rcgen::{
    BasicConstraints, CertificateParams, CustomExtension, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, GeneralSubtree, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    NameConstraints, PKCS_ECDSA_P384_SHA384, PKCS_RSA_SHA256, RsaKeySize, SanType, date_time_ymd,
};
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use x509_parser::prelude::FromDer;
use x509_parser::revocation_list::CertificateRevocationList;

/// A moment in January 2027, in seconds since 1970.
const NOW: u64 = 1_800_000_000;

fn domain() -> TrustDomain {
    "alpha.example".parse().unwrap()
}
fn identity() -> Identity {
    "spiffe://alpha.example/ns/bookinfo/sa/reviews"
        .parse()
        .unwrap()
}

/// A CA built by the test, not by Canal.
struct ForeignAuthority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

type CertificateEditFn = fn(&mut CertificateParams);

impl ForeignAuthority {
    fn params(name: &str, change: CertificateEditFn) -> CertificateParams {
        let mut p = CertificateParams::default();
        p.distinguished_name = DistinguishedName::new();
        p.distinguished_name.push(DnType::CommonName, name);
        p.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        p.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        (p.not_before, p.not_after) = (date_time_ymd(2020, 1, 1), date_time_ymd(2040, 1, 1));
        change(&mut p);
        p
    }
    fn root(name: &str) -> Self {
        Self::with(name, KeyPair::generate().unwrap(), |_| {}, None)
    }
    fn below(&self, name: &str, change: CertificateEditFn) -> Self {
        Self::with(name, KeyPair::generate().unwrap(), change, Some(self))
    }
    fn with(
        name: &str,
        key: KeyPair,
        change: CertificateEditFn,
        above: Option<&ForeignAuthority>,
    ) -> Self {
        let mut params = Self::params(name, change);
        params.use_authority_key_identifier_extension = true;
        let certificate = match above {
            Some(above) => params.signed_by(&key, &above.issuer),
            None => params.self_signed(&key),
        };
        let pem = certificate.unwrap().pem();
        Self {
            issuer: Issuer::from_ca_cert_pem(&pem, key).unwrap(),
            pem,
        }
    }
    fn files(&self, above: &[&ForeignAuthority], root: &ForeignAuthority) -> AuthorityFiles {
        let chain = std::iter::once(self)
            .chain(above.iter().copied())
            .map(|a| a.pem.as_str())
            .collect();
        AuthorityFiles {
            chain,
            key: self.issuer.key().serialize_pem(),
            root: root.pem.clone(),
            crl: None,
        }
    }
    /// Returns a CRL that revokes `serials`.
    fn crl(&self, serials: &[u64]) -> String {
        let revoked = |s: &u64| rcgen::RevokedCertParams {
            serial_number: (*s).into(),
            revocation_time: date_time_ymd(2026, 1, 1),
            reason_code: None,
            invalidity_date: None,
        };
        let list = rcgen::CertificateRevocationListParams {
            this_update: date_time_ymd(2026, 1, 1),
            next_update: date_time_ymd(2030, 1, 1),
            crl_number: 5.into(),
            issuing_distribution_point: None,
            revoked_certs: serials.iter().map(revoked).collect(),
            key_identifier_method: rcgen::KeyIdMethod::Sha256,
        };
        list.signed_by(&self.issuer).unwrap().pem().unwrap()
    }
}

fn csr(key: &KeyPair) -> String {
    let mut p = CertificateParams::default();
    p.distinguished_name = DistinguishedName::new();
    p.serialize_request(key).unwrap().pem().unwrap()
}

fn issue(authority: &TenantAuthority, names: &[&str]) -> IssuedLeaf {
    let names: Vec<String> = names.iter().map(ToString::to_string).collect();
    let csr = csr(&KeyPair::generate().unwrap());
    authority
        .issue(
            &CertificateRequest {
                csr: &csr,
                identity: &identity(),
                names: &names,
                rsa: false,
                lifetime_seconds: 3600,
            },
            NOW,
        )
        .unwrap()
}

fn der(pem: &str) -> CertificateDer<'static> {
    CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()
}

/// Verifies a certificate by rustls with these roots and CRLs.
fn verify(issued: &IssuedLeaf, roots: &[String], crls: &[String]) -> Result<(), String> {
    let mut store = RootCertStore::empty();
    roots.iter().for_each(|r| store.add(der(r)).unwrap());
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let lists = crls
        .iter()
        .map(|c| CertificateRevocationListDer::from_pem_slice(c.as_bytes()).unwrap());
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(store), provider)
        .with_crls(lists)
        .allow_unknown_revocation_status()
        .build()
        .unwrap();
    let chain: Vec<_> = issued.chain.iter().map(|c| der(c)).collect();
    let time = UnixTime::since_unix_epoch(Duration::from_secs(NOW));
    verifier
        .verify_client_cert(&chain[0], &chain[1..], time)
        .map(|_| ())
        .map_err(|e| e.to_string())
}

/// A case's name, the files of an authority, and the number of links or the reason of the refusal.
type FilesCase = (&'static str, AuthorityFiles, Result<usize, &'static str>);

/// Returns the files with one change.
fn changed(mut files: AuthorityFiles, change: &dyn Fn(&mut AuthorityFiles)) -> AuthorityFiles {
    change(&mut files);
    files
}

/// Returns files of authorities that can be used.
fn good_files(root: &ForeignAuthority, plain: &ForeignAuthority) -> Vec<FilesCase> {
    // The path lengths are the smallest that allow this chain, so a miscount refuses it.
    let upper = root.below("upper", |p| {
        p.is_ca = IsCa::Ca(BasicConstraints::Constrained(1))
    });
    let lower = upper.below("lower", |p| {
        p.is_ca = IsCa::Ca(BasicConstraints::Constrained(0))
    });
    // Names of other types than URI do not restrict a SPIFFE ID.
    let constrained = root.below("constrained", |p| {
        let permitted_subtrees = vec![
            GeneralSubtree::Rfc822Name("x".into()),
            GeneralSubtree::DnsName("other.example".into()),
        ];
        p.name_constraints = Some(NameConstraints {
            permitted_subtrees,
            excluded_subtrees: vec![],
        });
    });
    let rsa = KeyPair::generate_rsa_for(&PKCS_RSA_SHA256, RsaKeySize::_2048).unwrap();
    let rsa = ForeignAuthority::with("rsa", rsa, |_| {}, Some(root));
    let p384 = ForeignAuthority::with(
        "p384",
        KeyPair::generate_for(&PKCS_ECDSA_P384_SHA384).unwrap(),
        |_| {},
        Some(root),
    );
    vec![
        ("an intermediate", plain.files(&[], root), Ok(2)),
        ("two of them", lower.files(&[&upper], root), Ok(3)),
        (
            "with the root at the end",
            lower.files(&[&upper, root], root),
            Ok(3),
        ),
        ("a root itself", root.files(&[], root), Ok(1)),
        ("an RSA intermediate", rsa.files(&[], root), Ok(2)),
        ("a P-384 intermediate", p384.files(&[], root), Ok(2)),
        (
            "a list of its own",
            changed(plain.files(&[], root), &|f| f.crl = Some(plain.crl(&[7]))), // Any serial.
            Ok(2),
        ),
        (
            "constrained to other names",
            constrained.files(&[], root),
            Ok(2),
        ),
    ]
}

/// Returns files of which one is missing, damaged or another authority's.
fn broken_files(
    root: &ForeignAuthority,
    plain: &ForeignAuthority,
    other: &ForeignAuthority,
) -> Vec<FilesCase> {
    let good = || plain.files(&[], root);
    vec![
        (
            "no certificate",
            changed(good(), &|f| f.chain.clear()),
            Err("certificates"),
        ),
        (
            "a torn certificate",
            // The PEM of a certificate is longer than 200 bytes, so the cut is inside it.
            changed(good(), &|f| f.chain.truncate(200)),
            Err("certificates"),
        ),
        (
            "no root",
            changed(good(), &|f| f.root.clear()),
            Err("certificates"),
        ),
        (
            "too many",
            // Nine certificates are one more than FILE_CERTIFICATES_MAX.
            changed(good(), &|f| f.root = f.root.repeat(9)),
            Err("certificates"),
        ),
        ("no key", changed(good(), &|f| f.key.clear()), Err("key")),
        (
            "another's key",
            changed(good(), &|f| f.key = other.issuer.key().serialize_pem()),
            Err("key_match"),
        ),
        ("another root", plain.files(&[], other), Err("chain")),
        (
            "a revocation list of an unknown issuer",
            changed(good(), &|f| f.crl = Some(other.crl(&[7]))),
            Err("crl"),
        ),
        (
            "no list",
            changed(good(), &|f| f.crl = Some("x".into())),
            Err("crl"),
        ),
    ]
}

/// Returns files of certificates that are no authority, or not for this use or time.
fn wrong_authorities(root: &ForeignAuthority) -> Vec<FilesCase> {
    let lower = root
        .below("upper", |p| {
            p.is_ca = IsCa::Ca(BasicConstraints::Constrained(1))
        })
        .below("lower", |p| {
            p.is_ca = IsCa::Ca(BasicConstraints::Constrained(0))
        });
    let leaf = root.below("leaf", |p| p.is_ca = IsCa::ExplicitNoCa);
    let no_usage = root.below("no usage", |p| {
        p.key_usages = vec![KeyUsagePurpose::DigitalSignature]
    });
    let short = root.below("short", |p| {
        p.is_ca = IsCa::Ca(BasicConstraints::Constrained(0))
    });
    let below_short = short.below("below", |_| {});
    let ended = root.below("ended", |p| p.not_after = date_time_ymd(2021, 1, 1));
    let early = root.below("early", |p| p.not_before = date_time_ymd(2035, 1, 1));
    let mail_only = root.below("mail", |p| {
        p.extended_key_usages = vec![ExtendedKeyUsagePurpose::EmailProtection]
    });
    vec![
        ("a leaf", leaf.files(&[], root), Err("not_authority")),
        (
            "may not sign certificates",
            no_usage.files(&[], root),
            Err("not_authority"),
        ),
        (
            "above it none is allowed",
            below_short.files(&[&short], root),
            Err("path_length"),
        ),
        ("ended", ended.files(&[], root), Err("validity")),
        ("not yet", early.files(&[], root), Err("validity")),
        ("a gap in the chain", lower.files(&[], root), Err("chain")),
        ("for mail only", mail_only.files(&[], root), Err("trial")),
    ]
}

#[test]
fn files_and_their_faults() {
    let root = ForeignAuthority::root("root");
    let other = ForeignAuthority::root("other");
    let plain = root.below("plain", |_| {});
    let good = || plain.files(&[], &root);
    let cases = good_files(&root, &plain)
        .into_iter()
        .chain(broken_files(&root, &plain, &other))
        .chain(wrong_authorities(&root));
    for (what, files, want) in cases {
        match (TenantAuthority::from_files(&domain(), &files, NOW), want) {
            (Ok((authority, _)), Ok(links)) => {
                let issued = issue(&authority, &[]);
                assert_eq!(issued.chain.len(), links, "{what}");
                verify(&issued, authority.roots(), &[]).unwrap_or_else(|e| panic!("{what}: {e}"));
            }
            (Err(e), Err(name)) => assert_eq!(e.name(), name, "{what}: {e}"),
            (got, want) => panic!(
                "{what}: got {:?}, wanted {want:?}",
                got.err().map(|e| e.to_string())
            ),
        }
    }
    assert!(
        !format!("{:?}", good()).contains("PRIVATE"),
        "the key is never printed"
    );
    let two = changed(good(), &|f| f.root = other.pem.clone() + &root.pem);
    let (authority, _) = TenantAuthority::from_files(&domain(), &two, NOW).unwrap();
    let published: Vec<_> = authority.roots().iter().map(|r| der(r)).collect();
    assert_eq!(
        published,
        [der(&root.pem), der(&other.pem)],
        "the root that it chains to is first"
    );
}

#[test]
fn uri_constraints_on_an_intermediate_are_found_before_data_planes_find_them() {
    let root = ForeignAuthority::root("root");
    // Content of the extension: permittedSubtrees with URI other.example.
    let constraint = [0x30, 0x13, 0xa0, 0x11, 0x30, 0x0f, 0x86, 0x0d]
        .into_iter()
        .chain(*b"other.example")
        .collect::<Vec<u8>>();
    let mut params = ForeignAuthority::params("uri", |_| {});
    let mut extension = CustomExtension::from_oid_content(&[2, 5, 29, 30], constraint);
    extension.set_criticality(true);
    params.custom_extensions = vec![extension];
    let key = KeyPair::generate().unwrap();
    let pem = params.signed_by(&key, &root.issuer).unwrap().pem();
    let files = AuthorityFiles {
        chain: pem,
        key: key.serialize_pem(),
        root: root.pem.clone(),
        crl: None,
    };
    let fault = TenantAuthority::from_files(&domain(), &files, NOW)
        .err()
        .unwrap();
    assert_eq!(fault.name(), "trial", "{fault}");
}

fn serial(issued: &IssuedLeaf) -> RevokedSerial {
    let byte = |at: usize| u8::from_str_radix(&issued.serial[at..at + 2], 16).unwrap();
    RevokedSerial {
        serial: (0..issued.serial.len()).step_by(2).map(byte).collect(),
        at: NOW - 10,
    }
}

#[test]
fn a_crl_revokes_only_the_listed_serials() {
    let own = TenantAuthority::generate(&domain(), NOW).unwrap();
    let root = ForeignAuthority::root("root");
    let (below, _) = TenantAuthority::from_files(
        &domain(),
        &root.below("below", |_| {}).files(&[], &root),
        NOW,
    )
    .unwrap();
    for (what, authority) in [("a root", own), ("an intermediate", below)] {
        assert_eq!(
            authority.crls(&[], &[], 1, NOW).unwrap(),
            Vec::<String>::new(),
            "{what}"
        );
        let (bad, good) = (issue(&authority, &[]), issue(&authority, &[]));
        let lists = authority.crls(&[serial(&bad)], &[], 7, NOW).unwrap();
        let refused = verify(&bad, authority.roots(), &lists).unwrap_err();
        assert!(refused.contains("Revoked"), "{what}: {refused}");
        verify(&good, authority.roots(), &lists).unwrap_or_else(|e| panic!("{what}: {e}"));
        let list = CertificateRevocationListDer::from_pem_slice(lists[0].as_bytes()).unwrap();
        let (_, list) = CertificateRevocationList::from_der(&list).unwrap();
        assert_eq!(
            list.crl_number().map(ToString::to_string).as_deref(),
            Some("7"),
            "{what}"
        );
        let until = list.next_update().unwrap().timestamp();
        assert_eq!(
            (list.last_update().timestamp(), until),
            (NOW as i64 - 60, (NOW + CRL_LIFETIME_SECONDS) as i64),
            "{what}"
        );
    }
}

#[test]
fn two_roots_of_a_domain_have_names_of_their_own_so_that_a_list_of_one_spoils_nothing_of_the_other()
{
    let (old, new) = (
        TenantAuthority::generate(&domain(), NOW).unwrap(),
        TenantAuthority::generate(&domain(), NOW).unwrap(),
    );
    let roots: Vec<String> = old.roots().iter().chain(new.roots()).cloned().collect();
    let (bad, fine) = (issue(&old, &[]), issue(&new, &[]));
    let lists = old.crls(&[serial(&bad)], &[], 1, NOW).unwrap();
    assert!(verify(&bad, &roots, &lists).is_err());
    verify(&fine, &roots, &lists).unwrap();
}

#[test]
fn a_foreign_crl_of_the_same_issuer_is_merged_and_others_stay() {
    let root = ForeignAuthority::root("root");
    let below = root.below("below", |_| {});
    let mut files = below.files(&[], &root);
    // The second list is of the root, which does not issue the leaves.
    files.crl = Some(below.crl(&[0x1234]) + &root.crl(&[0x99]));
    let (authority, foreign) = TenantAuthority::from_files(&domain(), &files, NOW).unwrap();
    assert_eq!(foreign.len(), 2);
    assert_eq!(
        authority.crls(&[], &foreign, 1, NOW).unwrap().len(),
        2,
        "the CA has nothing to add: both lists stay"
    );
    let bad = issue(&authority, &[]);
    let lists = authority.crls(&[serial(&bad)], &foreign, 1, NOW).unwrap();
    assert_eq!(
        lists
            .iter()
            .map(|l| authority.is_issuer_of(l))
            .collect::<Vec<_>>(),
        [true, false]
    );
    let list = CertificateRevocationListDer::from_pem_slice(lists[0].as_bytes()).unwrap();
    let (_, list) = CertificateRevocationList::from_der(&list).unwrap();
    let serials: Vec<usize> = list
        .iter_revoked_certificates()
        .map(|r| r.raw_serial().len())
        .collect();
    // 0x1234 has 2 bytes, and a serial of Canal's CA has 16.
    assert_eq!(serials, [2, 16]);
    assert_eq!(
        list.crl_number().map(ToString::to_string).as_deref(),
        Some("6"),
        "the number is above 5, that of the foreign list"
    );
    // The usage for signing CRLs is missing.
    let mute = root.below("mute", |p| {
        p.key_usages = vec![KeyUsagePurpose::KeyCertSign]
    });
    let (mute, _) = TenantAuthority::from_files(&domain(), &mute.files(&[], &root), NOW).unwrap();
    assert_eq!(
        mute.crls(&[serial(&issue(&mute, &[]))], &[], 1, NOW)
            .unwrap_err()
            .name(),
        "crl_signer"
    );
}

/// Returns a leaf as an external CA might issue it.
fn answer(
    ca: &ForeignAuthority,
    key: &KeyPair,
    names: &[SanType],
    change: CertificateEditFn,
) -> String {
    let mut p = CertificateParams::default();
    p.distinguished_name = DistinguishedName::new();
    p.subject_alt_names = names.to_vec();
    p.is_ca = IsCa::ExplicitNoCa;
    p.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    p.extended_key_usages = vec![
        ExtendedKeyUsagePurpose::ServerAuth,
        ExtendedKeyUsagePurpose::ClientAuth,
    ];
    // These dates enclose NOW, which is in January 2027.
    (p.not_before, p.not_after) = (date_time_ymd(2027, 1, 14), date_time_ymd(2027, 1, 16));
    change(&mut p);
    p.signed_by(key, &ca.issuer).unwrap().pem()
}

/// The authorities, keys and name of the cases.
struct AnswerFixture {
    root: ForeignAuthority,
    other: ForeignAuthority,
    /// An intermediate of `root`.
    below: ForeignAuthority,
    key: KeyPair,
    /// The key of another request.
    foreign: KeyPair,
    id: SanType,
}

/// A case's name, the PEM of the answer, the DNS names that were requested, and the number of links
/// or the reason of the refusal.
type AnswerCase = (
    &'static str,
    String,
    Vec<String>,
    Result<usize, &'static str>,
);

fn uri(s: &str) -> SanType {
    SanType::URI(s.try_into().unwrap())
}

fn dns(s: &str) -> SanType {
    SanType::DnsName(s.try_into().unwrap())
}

fn names() -> Vec<String> {
    vec!["a.b".to_string()]
}

impl AnswerFixture {
    fn new() -> Self {
        let root = ForeignAuthority::root("root");
        Self {
            below: root.below("below", |_| {}),
            root,
            other: ForeignAuthority::root("other"),
            key: KeyPair::generate().unwrap(),
            foreign: KeyPair::generate().unwrap(),
            id: uri("spiffe://alpha.example/ns/bookinfo/sa/reviews"),
        }
    }

    /// Returns answers with the requested names, and answers with others or without any.
    fn cases_of_names(&self) -> Vec<AnswerCase> {
        let Self {
            root,
            below,
            key,
            id,
            ..
        } = self;
        let mine = std::slice::from_ref(id);
        vec![
            ("as asked", answer(root, key, mine, |_| {}), vec![], Ok(1)),
            (
                "with a requested DNS name",
                answer(root, key, &[id.clone(), dns("a.b")], |_| {}),
                names(),
                Ok(1),
            ),
            (
                "by an intermediate that it sends along",
                answer(below, key, mine, |_| {}) + &below.pem,
                vec![],
                Ok(2),
            ),
            // A root that is sent along is no link.
            (
                "with its root",
                answer(root, key, mine, |_| {}) + &root.pem,
                vec![],
                Ok(1),
            ),
            ("nothing", String::new(), vec![], Err("external_answer")),
            (
                "no certificate",
                "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n".into(),
                vec![],
                Err("external_answer"),
            ),
            (
                "no name",
                answer(root, key, &[], |_| {}),
                vec![],
                Err("external_identity"),
            ),
            (
                "another name",
                answer(
                    root,
                    key,
                    &[uri("spiffe://alpha.example/ns/x/sa/y")],
                    |_| {},
                ),
                vec![],
                Err("external_identity"),
            ),
            (
                "one more name",
                answer(
                    root,
                    key,
                    &[id.clone(), uri("spiffe://beta/ns/x/sa/y")],
                    |_| {},
                ),
                vec![],
                Err("external_identity"),
            ),
            (
                "a DNS name that was not requested",
                answer(root, key, &[id.clone(), dns("a.b")], |_| {}),
                vec![],
                Err("external_identity"),
            ),
            (
                "the DNS name is missing",
                answer(root, key, mine, |_| {}),
                names(),
                Err("external_identity"),
            ),
        ]
    }

    /// Returns answers whose key, usage, issuer or lifetime is wrong.
    fn cases_of_certificates(&self) -> Vec<AnswerCase> {
        let Self {
            root,
            other,
            key,
            foreign,
            id,
            ..
        } = self;
        let mine = std::slice::from_ref(id);
        vec![
            (
                "another key",
                answer(root, foreign, mine, |_| {}),
                vec![],
                Err("external_key"),
            ),
            (
                "an authority",
                answer(root, key, mine, |p| {
                    p.is_ca = IsCa::Ca(BasicConstraints::Unconstrained)
                }),
                vec![],
                Err("external_usage"),
            ),
            (
                "may sign",
                answer(root, key, mine, |p| {
                    p.key_usages.push(KeyUsagePurpose::KeyCertSign)
                }),
                vec![],
                Err("external_usage"),
            ),
            (
                "for servers only",
                answer(root, key, mine, |p| p.extended_key_usages.truncate(1)),
                vec![],
                Err("external_usage"),
            ),
            (
                "another root",
                answer(other, key, mine, |_| {}),
                vec![],
                Err("external_chain"),
            ),
            (
                "another root, which it sends along",
                answer(other, key, mine, |_| {}) + &other.pem,
                vec![],
                Err("external_chain"),
            ),
            (
                "ended",
                answer(root, key, mine, |p| {
                    // NOW is 08:00 of this day, so the certificate ended eight hours ago.
                    p.not_after = date_time_ymd(2027, 1, 15)
                }),
                vec![],
                Err("external_chain"),
            ),
            (
                "lives long",
                answer(root, key, mine, |p| {
                    // More than 31 days are left; at most LIFETIME_SECONDS_MAX, one day, is
                    // accepted.
                    p.not_after = date_time_ymd(2027, 2, 16)
                }),
                vec![],
                Err("external_lifetime"),
            ),
        ]
    }
}

#[test]
fn answers_of_another_authority() {
    let fixture = AnswerFixture::new();
    let csr = csr(&fixture.key);
    let cases = [fixture.cases_of_names(), fixture.cases_of_certificates()].concat();
    for (what, pem, names, want) in cases {
        let request = CertificateRequest {
            csr: &csr,
            identity: &identity(),
            names: &names,
            rsa: false,
            lifetime_seconds: 3600,
        };
        match (
            check_answer(&pem, &request, std::slice::from_ref(&fixture.root.pem), NOW),
            want,
        ) {
            (Ok(issued), Ok(links)) => assert_eq!(issued.chain.len(), links, "{what}"),
            (Err(e), Err(name)) => assert_eq!(e.name(), name, "{what}: {e}"),
            (got, want) => panic!("{what}: got {got:?}, wanted {want:?}"),
        }
    }
}

#[test]
fn parts_of_canal_get_certificates_of_the_controllers_own_authority() {
    let dir = tempfile::tempdir().unwrap();
    let infra = ControllerCa::open(dir.path(), NOW).unwrap();
    let identity: Identity = "spiffe://components.canal/ns/alpha/sa/node.n1"
        .parse()
        .unwrap();
    let parts = infra.of_components().unwrap();
    let issue = |key: &KeyPair, identity: &Identity| {
        parts.issue(
            &CertificateRequest {
                csr: &csr(key),
                identity,
                names: &[],
                rsa: false,
                lifetime_seconds: 3600,
            },
            NOW,
        )
    };
    let issued = issue(&KeyPair::generate().unwrap(), &identity).unwrap();
    verify(&issued, &[infra.certificate().into()], &[]).unwrap();
    let rsa = KeyPair::generate_rsa_for(&PKCS_RSA_SHA256, RsaKeySize::_2048).unwrap();
    assert_eq!(issue(&rsa, &identity).unwrap_err().name(), "key_algorithm");
    assert_eq!(
        issue(&KeyPair::generate().unwrap(), &self::identity())
            .unwrap_err()
            .name(),
        "name",
        "an identity outside of Canal's own trust domain is refused"
    );
    // The key is RSA: a tenant's CA accepts it only where the request says so.
    let tenant = TenantAuthority::generate(&domain(), NOW).unwrap();
    let csr = csr(&rsa);
    for (rsa, want) in [(false, Some("key_algorithm")), (true, None)] {
        let identity = self::identity();
        let got = tenant.issue(
            &CertificateRequest {
                csr: &csr,
                identity: &identity,
                names: &[],
                rsa,
                lifetime_seconds: 60,
            },
            NOW,
        );
        assert_eq!(got.as_ref().err().map(canal_ca::CsrError::name), want);
    }
}
