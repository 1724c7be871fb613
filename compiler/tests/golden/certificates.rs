//! Makes the certificates that the YAML files of goldens name: a fresh one for each host.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rcgen::{CertificateParams, KeyPair};

/// Returns the text with a certificate and a key in place of each `$CERTIFICATE(NAME)` and
/// `$KEY(NAME)`.
pub(crate) fn fill_in(text: &str) -> String {
    let mut pairs: BTreeMap<String, [String; 2]> = BTreeMap::new();
    let mut filled = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('$') {
        filled += before;
        let found = [("CERTIFICATE(", 0), ("KEY(", 1)]
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

/// Returns a certificate for a host and its key.
fn pair(name: &str) -> [String; 2] {
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::new(vec![name.to_owned()]).unwrap();
    let pem = certificate.self_signed(&key).unwrap().pem();
    [pem, key.serialize_pem()].map(|text| STANDARD.encode(text))
}
