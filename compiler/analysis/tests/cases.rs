//! One case for each code that only the analysis reports, with the diagnostics that it finds; and
//! cases of objects of Gateway API with their conditions. `CANAL_BLESS=1` writes both anew.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use canal_analysis::conditions::conditions;
use canal_analysis::{CODES, analyze};
use canal_compiler::ir::Ir;
use canal_compiler::{CompileInput, build_ir, service_keys};
use canal_model::diagnostic::Diagnostic;
use canal_model::ids::{ServiceId, TenantName};
use canal_model::policy::Document;

fn folder_of(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests")
        .join(name)
}

/// A compiled case, with the tenant that all cases have.
struct CompiledCase {
    documents: Vec<Arc<Document>>,
    ir: Ir,
    diagnostics: Vec<Diagnostic>,
}

impl CompiledCase {
    fn new(yaml: &str) -> Self {
        let head = "apiVersion: canal.mesh/v1\nkind: Tenant\nmetadata: {name: demo}\n\
            spec: {vni: 100, trustDomain: demo.example, podCidrs: [10.1.0.0/16], gatewayCidrs: [10.101.0.0/16]}\n";
        let mut documents: Vec<Arc<Document>> = Vec::new();
        for (file, text) in [("tenant.yaml", head), ("case.yaml", yaml)] {
            let parsed = canal_sources::parse(file, text);
            documents.extend(parsed.documents.into_iter().map(Arc::new));
        }
        let tenant = TenantName::new("demo").unwrap();
        let service_ids = service_keys(&tenant, &documents)
            .into_iter()
            .zip((1..).map_while(|id| ServiceId::new(id).ok()))
            .collect();
        let (ir, diagnostics) = build_ir(&CompileInput {
            tenant: &tenant,
            documents: &documents,
            service_ids: &service_ids,
            jwks: &BTreeMap::new(),
        });
        Self {
            documents,
            ir: ir.expect("the case has a tenant"),
            diagnostics,
        }
    }

    /// Returns the diagnostics of the analysis, one in each line.
    fn analyzed(&self) -> String {
        let mut text = String::new();
        for mut found in analyze(&self.documents, Some(&self.ir)) {
            let mut documents = self.documents.iter();
            let document = documents.find(|it| Some(&it.origin) == found.origin.as_ref());
            if let Some(document) = document {
                let (text, origin) = (&document.text, &document.origin);
                found.origin = Some(canal_sources::pinpoint(text, origin, &found.field));
            }
            text.push_str(&format!("{found}\n"));
        }
        text
    }

    /// Returns the conditions of the objects.
    fn status(&self) -> String {
        let all = conditions(&self.documents, &self.ir, &self.diagnostics);
        all.iter().map(ToString::to_string).collect()
    }
}

/// Compares the texts of all cases of a folder with the blessed ones.
fn check(folder: &str, extension: &str, text_of: fn(&CompiledCase) -> String) {
    let mut differing = Vec::new();
    for entry in fs::read_dir(folder_of(folder)).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "yaml") {
            continue;
        }
        let found = text_of(&CompiledCase::new(&fs::read_to_string(&path).unwrap()));
        let blessed = path.with_extension(extension);
        if std::env::var_os("CANAL_BLESS").is_some() {
            fs::write(&blessed, &found).unwrap();
        } else if fs::read_to_string(&blessed).unwrap_or_default() != found {
            differing.push(format!("{}:\n{found}", path.display()));
        }
    }
    assert!(differing.is_empty(), "{}", differing.join("\n"));
}

#[test]
fn the_analysis_finds_what_the_cases_say() {
    check("cases", "diagnostics", CompiledCase::analyzed);
}

#[test]
fn conditions_are_those_that_gateway_api_specifies() {
    check("conditions", "status", CompiledCase::status);
}

#[test]
fn each_code_has_a_case_of_its_name() {
    for code in CODES {
        let name = format!("{}.diagnostics", code.description().name);
        let text = fs::read_to_string(folder_of("cases").join(&name)).unwrap_or_default();
        assert!(text.contains(&format!("[{code}]")), "{name} lacks {code}");
    }
}
