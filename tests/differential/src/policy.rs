//! Policy files with questions in comments: `#with NAME` inserts `_NAME.yaml` before the file, `#?
//! QUESTION` is a request to evaluate. This module does not check the results; the tests do.
//!
//! A question is `METHOD NAMESPACE/SERVICE:PORT HOST TARGET [header:value …] [:attribute=value …] [=> EXPECTED]`; `""`
//! is an empty host.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use canal_compiler::oracle::{OracleClient, OracleRequest};
use canal_compiler::{CompileInput, service_keys};
use canal_model::client_attributes::ClientAttribute;
use canal_model::ids::{ServiceId, ServiceKey, TenantName};
use canal_model::policy::Document;

/// A tenant's documents, and requests to its services.
pub struct Policy {
    pub tenant: TenantName,
    pub documents: Vec<Arc<Document>>,
    pub service_ids: BTreeMap<ServiceKey, ServiceId>,
    /// Key sets, each by the URI that it is fetched from.
    pub jwks: BTreeMap<String, String>,
    pub questions: Vec<PolicyRequest>,
}

/// One request as written, and its expected result if that is written too.
pub struct PolicyRequest {
    pub text: String,
    pub request: OracleRequest,
    pub expected: Option<String>,
}

/// Returns the policy files of a folder, sorted, without those that other files include.
pub fn files(folder: &Path) -> Vec<PathBuf> {
    let entries =
        fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut files: Vec<PathBuf> = entries
        .map(|entry| entry.expect("a folder's entry").path())
        .collect();
    files.retain(|path| {
        path.extension().is_some_and(|e| e == "yaml") && !name_of(path).starts_with('_')
    });
    files.sort();
    files
}

/// Returns the name of the file without its folder.
pub fn name_of(path: &Path) -> String {
    path.file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default()
}

impl Policy {
    /// Reads a file and the files that it includes.
    pub fn read(path: &Path) -> Self {
        let (mut policy, own) = Self::texts(path);
        let questions: Vec<&str> = own
            .lines()
            .filter_map(|line| line.strip_prefix("#? "))
            .collect();
        policy.questions = questions
            .iter()
            .map(|text| question(&policy.tenant, text))
            .collect();
        policy
    }

    /// Reads a file without its questions.
    pub fn read_only(path: &Path) -> Self {
        Self::texts(path).0
    }

    fn texts(path: &Path) -> (Self, String) {
        let read = |path: &Path| {
            fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
        };
        let own = read(path);
        let mut texts: Vec<(String, String)> = Vec::new();
        for name in own.lines().filter_map(|line| line.strip_prefix("#with ")) {
            let file = format!("_{}.yaml", name.trim());
            texts.push((file.clone(), read(&path.with_file_name(file))));
        }
        texts.push((name_of(path), own.clone()));
        (Self::of(&texts), own)
    }

    /// Creates a policy of the tenant `alpha` from files by name and content.
    pub fn of(texts: &[(String, String)]) -> Self {
        let tenant = TenantName::new("alpha").expect("a name");
        let parse = |(file, text): &(String, String)| canal_sources::parse(file, text).documents;
        let documents: Vec<Arc<Document>> = texts.iter().flat_map(parse).map(Arc::new).collect();
        let keys = service_keys(&tenant, &documents);
        let service_ids = keys
            .into_iter()
            .zip(1..)
            .map(|(key, id)| (key, ServiceId::new(id).expect("few services")))
            .collect();
        Self {
            tenant,
            documents,
            service_ids,
            jwks: BTreeMap::new(),
            questions: Vec::new(),
        }
    }

    /// Returns the input of the compiler.
    pub fn input(&self) -> CompileInput<'_> {
        CompileInput {
            tenant: &self.tenant,
            documents: &self.documents,
            service_ids: &self.service_ids,
            jwks: &self.jwks,
        }
    }
}

fn question(tenant: &TenantName, text: &str) -> PolicyRequest {
    let (asked, expected) = match text.split_once("=>") {
        Some((asked, expected)) => (asked, Some(expected.trim().to_owned())),
        None => (text, None),
    };
    let words: Vec<&str> = asked.split_whitespace().collect();
    let [method, destination, host, target, headers @ ..] = words.as_slice() else {
        panic!("{text:?} is not a question")
    };
    let (service, port) = destination
        .rsplit_once(':')
        .unwrap_or_else(|| panic!("{text:?}: SERVICE:PORT"));
    let header = |word: &&str| {
        let (name, value) = word
            .split_once(':')
            .unwrap_or_else(|| panic!("{text:?}: header:value"));
        (name.to_owned(), value.to_owned())
    };
    let (attributes, of_headers): (Vec<&str>, Vec<&str>) =
        headers.iter().partition(|word| word.starts_with(':'));
    let mut client = OracleClient::default();
    for attribute in attributes {
        let (name, value) = attribute
            .split_once('=')
            .unwrap_or_else(|| panic!("{text:?}: :attribute=value"));
        match ClientAttribute::of_name(name) {
            Some(ClientAttribute::Scheme) => client.is_tls = value == "https",
            Some(ClientAttribute::SourceNamespace) => {
                client.namespace = Some(value.parse().expect("a namespace"));
            }
            Some(ClientAttribute::SourceLabel(key)) => {
                client.labels.insert(key.to_owned(), value.to_owned());
            }
            None => panic!("{text:?}: {attribute:?} is no attribute"),
        }
    }
    let request = OracleRequest {
        service: format!("{tenant}/{service}")
            .parse()
            .unwrap_or_else(|error| panic!("{text:?}: {error}")),
        port: port
            .parse()
            .unwrap_or_else(|error| panic!("{text:?}: {error}")),
        host: if *host == "\"\"" {
            String::new()
        } else {
            (*host).to_owned()
        },
        method: (*method).to_owned(),
        target: (*target).to_owned(),
        headers: of_headers.iter().map(header).collect(),
        client,
    };
    PolicyRequest {
        text: text.to_owned(),
        request,
        expected,
    }
}
