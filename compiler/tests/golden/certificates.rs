//! Makes the certificates that the YAML files of goldens name: a fresh one for each host.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair};

/// Returns the text with a certificate and a key in place of each `$CERTIFICATE(NAME)` and
/// `$KEY(NAME)`, in base64. The certificate of an authority in place of `$AUTHORITY(NAME)` is PEM with
/// `\\n` for ends of lines.
pub(crate) fn fill_in(text: &str) -> String {
    let mut pairs: BTreeMap<String, [String; 3]> = BTreeMap::new();
    let mut filled = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('$') {
        filled += before;
        let found = [("CERTIFICATE(", 0), ("KEY(", 1), ("AUTHORITY(", 2)]
            .into_iter()
            .find_map(|(word, at)| {
                let (name, behind) = after.strip_prefix(word)?.split_once(')')?;
                Some((name, at, behind))
            });
        let Some((name, at, behind)) = found else {
            filled.push('$');
            rest = after;
            continue;
        };
        let pair = pairs.entry(name.to_owned()).or_insert_with(|| pair(name));
        filled += &pair[at];
        rest = behind;
    }
    filled + rest
}

/// Returns a certificate for a host and its key, and one of an authority.
fn pair(name: &str) -> [String; 3] {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
    let pem = params.self_signed(&key).unwrap().pem();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = params.self_signed(&key).unwrap().pem();
    [
        STANDARD.encode(pem),
        STANDARD.encode(key.serialize_pem()),
        authority.replace('\n', "\\n"),
    ]
}
