//! Removes entries that Canal does not read from Secrets and ConfigMaps, so that what is stored of
//! them contains no secrets of others, and no files of applications.

use canal_model::policy::config_map::CA_CERTIFICATE;
use canal_model::policy::secret::{TLS_CERTIFICATE, TLS_KEY, TLS_SECRET};
use canal_yaml::tree::{YamlNode, YamlValue};

/// Removes all entries but the certificate and the key of a Secret for TLS. Returns whether it
/// removed any.
pub(crate) fn remove_unread_entries(root: &mut YamlNode) -> bool {
    let is_tls = root.field("type").and_then(YamlNode::text) == Some(TLS_SECRET);
    let is_read = |name: &str| is_tls && (name == TLS_CERTIFICATE || name == TLS_KEY);
    remove_entries(root, &["data", "stringData"], is_read)
}

/// Removes all entries but the certificates of authorities of a ConfigMap. Returns whether it
/// removed any.
pub(crate) fn remove_unread_texts(root: &mut YamlNode) -> bool {
    remove_entries(root, &["data", "binaryData"], |name| name == CA_CERTIFICATE)
}

fn remove_entries(root: &mut YamlNode, lists: &[&str], is_read: impl Fn(&str) -> bool) -> bool {
    let YamlValue::Map(fields) = &mut root.value else {
        return false;
    };
    let mut is_changed = false;
    for (key, value) in fields {
        let YamlValue::Map(entries) = &mut value.value else {
            continue;
        };
        if lists.contains(&key.name.as_str()) {
            let before = entries.len();
            entries.retain(|(entry, _)| is_read(&entry.name));
            is_changed |= entries.len() < before;
        }
    }
    is_changed
}

#[cfg(test)]
mod tests {
    use canal_model::policy::Object;

    use crate::parse;

    #[test]
    fn a_secret_keeps_only_the_entries_that_are_read() {
        let head =
            "apiVersion: v1\nkind: Secret\nmetadata: {name: a, namespace: b}\nimmutable: true\n";
        for (rest, expected) in [
            ("type: Opaque\ndata: {password: c2VjcmV0}\n", [false, false]),
            ("stringData: {tls.crt: secret}\n", [false, false]),
            (
                "type: kubernetes.io/tls\ndata: {tls.crt: '', tls.key: '', ca.crt: c2VjcmV0}\n",
                [true, true],
            ),
        ] {
            let parsed = parse("a.yaml", &format!("{head}{rest}"));
            assert_eq!(parsed.diagnostics, [], "{rest}");
            let document = &parsed.documents[0];
            let has = |text: &str| document.text.contains(text);
            assert_eq!(
                [has("tls.crt"), has("tls.key")],
                expected,
                "{}",
                document.text
            );
            assert!(!has("c2VjcmV0") && !has("secret}"), "{}", document.text);
            assert!(!document.shown_text().contains("tls.key"));
            // What is stored reads back as the same object.
            let again = parse("a.yaml", &document.text);
            assert_eq!(again.documents[0].object, document.object);
            let Object::Secret(secret) = &document.object else {
                panic!("{:?}", document.object);
            };
            assert_eq!(secret.certificate.is_some(), expected[0]);
        }
    }

    #[test]
    fn a_config_map_keeps_only_the_certificates_of_authorities() {
        let head = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a, namespace: b}\n";
        for (rest, has_ca) in [
            ("immutable: true\ndata: {page.html: large}\n", false),
            (
                "data: {ca.crt: broken, page.html: large}\nbinaryData: {image: bGFyZ2U=}\n",
                true,
            ),
        ] {
            let parsed = parse("a.yaml", &format!("{head}{rest}"));
            assert_eq!(parsed.diagnostics, [], "{rest}");
            let document = &parsed.documents[0];
            let has = |text: &str| document.text.contains(text);
            assert!(!has("large") && !has("bGFyZ2U="), "{}", document.text);
            assert_eq!(has("ca.crt"), has_ca, "{}", document.text);
            let again = parse("a.yaml", &document.text);
            assert_eq!(again.documents[0].object, document.object);
            let Object::ConfigMap(map) = &document.object else {
                panic!("{:?}", document.object);
            };
            assert_eq!(map.ca.is_some(), has_ca);
            assert!(map.data.is_empty());
        }
    }
}
