//! `canal analyze`: checks files of configuration without a controller and reports everything that
//! is wrong or probably not meant. It compiles the objects as a controller would, and then looks for
//! what compiling does not need. Start at [`run`].

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use canal_compiler::claims::{TenantClaims, collisions};
use canal_compiler::ir::Ir;
use canal_compiler::{CompileInput, build_ir};
use canal_model::diagnostic::{Diagnostic, Severity};
use canal_model::diagnostic_code::DiagnosticCode;
use canal_model::ids::TenantName;
use canal_model::policy::{Document, Object, ObjectKind};
use canal_sources::add_positions;
use canal_wire::api::File;
use clap::{Args, ValueEnum};

use crate::analysis_report::AnalysisReport;
use crate::exit::{ExitStatus, VerbError, VerbResult};
use crate::files::{read, yaml_files};
use crate::output;
use crate::verbs::compile::ids;

/// Analyzes files of configuration: reports errors, and what is probably not meant as written
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  canal analyze routes.yaml policies.yaml
  canal analyze my-tenant/                       # all YAML files of the directory
  canal analyze my-tenants/ --strict             # one directory per tenant; warnings fail too
  canal analyze my-tenant/ -o sarif > canal.sarif
  canal analyze --explain CANAL0430

No controller, network or root is needed. The files are compiled as one tenant; a directory that has
directories of YAML files, and no YAML file itself, has one tenant in each. Files without a Tenant
object are analyzed as those of a tenant with private address ranges.

Each diagnostic has a stable code, the position, the problem, why it matters, and the fix.
docs/diagnostics.md lists all codes.

Exit codes:
  0  no errors (with --strict, no warnings either)
  1  errors were found (with --strict, or warnings)
  2  a file could not be read, or the command line is wrong")]
pub(crate) struct AnalyzeArgs {
    /// Files or directories of YAML; `-` is stdin
    #[arg(required_unless_present = "explain", value_name = "FILE|DIR")]
    paths: Vec<PathBuf>,
    /// Name of the tenant that owns the files [default: that of their Tenant object]
    #[arg(short, long)]
    tenant: Option<String>,
    /// Fail if there are warnings
    #[arg(long)]
    strict: bool,
    /// How to print the diagnostics
    #[arg(short, long, value_enum, default_value = "text", value_name = "FORMAT")]
    output: AnalysisFormat,
    /// Explain a code instead
    #[arg(long, value_name = "CODE", conflicts_with = "paths")]
    explain: Option<DiagnosticCode>,
}

/// Format of the diagnostics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum AnalysisFormat {
    Text,
    Json,
    Sarif,
}

/// The files of one tenant.
struct TenantFileGroup {
    /// Name of the tenant, unless a Tenant object names it.
    name: String,
    files: Vec<File>,
    /// Directories to which the paths of key sets are relative.
    directories: Vec<PathBuf>,
}

/// What was found in the files of one tenant.
struct AnalyzedTenant {
    diagnostics: Vec<Diagnostic>,
    objects: usize,
    /// What the tenant claims of what all tenants share; `None` if it has no Tenant object.
    claims: Option<TenantClaims>,
}

pub(crate) fn run(args: AnalyzeArgs) -> VerbResult {
    if let Some(code) = args.explain {
        return output::line(&explanation(code));
    }
    let groups = groups(&args).map_err(|error| VerbError {
        exit: ExitStatus::Usage,
        ..error
    })?;
    let mut next_id = 1;
    let mut all = Vec::new();
    for group in &groups {
        all.push(analyze_tenant(group, args.tenant.as_deref(), &mut next_id)?);
    }
    let claimed: Vec<_> = all.iter().filter_map(|it| it.claims.clone()).collect();
    let collisions = collisions(&claimed);
    let between = collisions.diagnostics.into_iter().map(|(_, found)| found);
    let objects: usize = all.iter().map(|it| it.objects).sum();
    let found = all.into_iter().flat_map(|it| it.diagnostics);
    let report = AnalysisReport::new(found.chain(between).collect(), objects);
    let text = match args.output {
        AnalysisFormat::Text => report.lines().join("\n"),
        AnalysisFormat::Json => format!("{:#}", report.json()),
        AnalysisFormat::Sarif => format!("{:#}", report.sarif()),
    };
    output::line(&text)?;
    let is_failed =
        report.count(Severity::Error) > 0 || (args.strict && report.count(Severity::Warning) > 0);
    match is_failed {
        true => Err(VerbError::already_printed(ExitStatus::Failed)),
        false => Ok(()),
    }
}

/// Returns what a user should know about a code.
fn explanation(code: DiagnosticCode) -> String {
    let description = code.description();
    let mut lines = vec![
        format!("{code} {}: {}", description.name, description.title),
        format!("  why: {}", description.why),
        format!("  fix: {}", description.fix),
    ];
    if let Some((condition, reason)) = description.condition {
        lines.push(format!(
            "  condition of Gateway API: {condition}, reason {reason}"
        ));
    }
    lines.join("\n")
}

/// Reads the files, and divides them among tenants.
fn groups(args: &AnalyzeArgs) -> VerbResult<Vec<TenantFileGroup>> {
    let mut groups = Vec::new();
    let mut together = Vec::new();
    for path in &args.paths {
        let tenants = tenant_directories(path);
        if tenants.is_empty() {
            together.push(path.clone());
        }
        for directory in tenants {
            groups.push(group(name_of(&directory), vec![directory])?);
        }
    }
    if !together.is_empty() {
        let name = together.first().map(|path| name_of(path));
        groups.push(group(name.unwrap_or_default(), together)?);
    }
    Ok(groups)
}

fn group(name: String, paths: Vec<PathBuf>) -> VerbResult<TenantFileGroup> {
    let directory_of = |path: &PathBuf| match path.is_dir() {
        true => path.clone(),
        false => path.parent().unwrap_or(Path::new(".")).to_owned(),
    };
    Ok(TenantFileGroup {
        name,
        files: read(&paths)?,
        directories: paths.iter().map(directory_of).collect(),
    })
}

/// Returns the directories of tenants in a directory that has no YAML file itself.
fn tenant_directories(path: &Path) -> Vec<PathBuf> {
    let has_yaml = |path: &Path| yaml_files(path).is_ok_and(|files| !files.is_empty());
    if !path.is_dir() || has_yaml(path) {
        return Vec::new();
    }
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    let mut directories: Vec<PathBuf> = entries
        .map(|entry| entry.path())
        .filter(|path| path.is_dir() && has_yaml(path))
        .collect();
    directories.sort();
    directories
}

/// Returns the last part of a path, without the ending of a file.
fn name_of(path: &Path) -> String {
    let full = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let name = match full.is_dir() {
        true => full.file_name(),
        false => full.file_stem(),
    };
    name.map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default()
}

fn analyze_tenant(
    group: &TenantFileGroup,
    named: Option<&str>,
    next_id: &mut u32,
) -> VerbResult<AnalyzedTenant> {
    let (mut documents, mut diagnostics) = (Vec::new(), Vec::new());
    for file in &group.files {
        let parsed = canal_sources::parse(&file.path, &file.yaml);
        documents.extend(parsed.documents.into_iter().map(Arc::new));
        diagnostics.extend(parsed.diagnostics);
    }
    let objects = documents.len();
    let (tenant, is_implied) = tenant_of(group, named, &mut documents)?;
    let service_ids = ids(&tenant, &documents, next_id)?;
    let compiled = |jwks: &BTreeMap<String, String>| {
        build_ir(&CompileInput {
            tenant: &tenant,
            documents: &documents,
            service_ids: &service_ids,
            jwks,
        })
    };
    // The first pass finds the key sets that policies name.
    let (first, _) = compiled(&BTreeMap::new());
    let jwks = first
        .map(|ir| key_sets(&ir, &group.directories))
        .unwrap_or_default();
    let (ir, found) = compiled(&jwks);
    let analyzed = canal_analysis::analyze(&documents, ir.as_ref());
    let mut placed: Vec<Diagnostic> = found.into_iter().chain(analyzed).collect();
    add_positions(&mut placed, &documents);
    diagnostics.extend(placed);
    Ok(AnalyzedTenant {
        diagnostics,
        objects,
        claims: ir.map(|ir| ir.claims()).filter(|_| !is_implied),
    })
}

/// Returns the name of the tenant, and whether its Tenant object is implied: without one it adds one,
/// so that the other objects can be compiled.
fn tenant_of(
    group: &TenantFileGroup,
    named: Option<&str>,
    documents: &mut Vec<Arc<Document>>,
) -> VerbResult<(TenantName, bool)> {
    let mut tenants = documents
        .iter()
        .filter_map(|document| match &document.object {
            Object::Tenant(tenant) => Some(tenant.metadata.name.to_string()),
            _ => None,
        });
    let own = match named {
        Some(named) => tenants.find(|name| name == named),
        None => tenants.next(),
    };
    let is_implied = own.is_none();
    let name = own.or_else(|| named.map(str::to_owned));
    let name = match name {
        Some(name) => TenantName::new(&name).map_err(|problem| {
            VerbError::new(ExitStatus::Usage, "--tenant", problem.to_string(), "")
        })?,
        None => TenantName::new(&group.name)
            .or_else(|_| TenantName::new("tenant"))
            .map_err(|problem| VerbError::failed("analyze", problem.to_string(), ""))?,
    };
    if is_implied {
        let has_gateways = documents
            .iter()
            .any(|document| document.object.kind() == ObjectKind::Gateway);
        let yaml = implied_tenant(&name, has_gateways);
        let parsed = canal_sources::parse("implied Tenant", &yaml);
        documents.extend(parsed.documents.into_iter().map(Arc::new));
    }
    Ok((name, is_implied))
}

/// Returns the Tenant object of files that have none: all private ranges are its pods', and its
/// Gateways are on the cloud tier.
fn implied_tenant(name: &TenantName, has_gateways: bool) -> String {
    let gateways = match has_gateways {
        true => ", gatewayCidrs: [198.18.0.0/16]",
        false => "",
    };
    format!(
        "apiVersion: canal.mesh/v1\nkind: Tenant\nmetadata: {{name: {name}}}\nspec: {{vni: 1000, trustDomain: {name}.example, \
         podCidrs: [10.0.0.0/8, 172.16.0.0/12, 192.168.0.0/16, 100.64.0.0/10, \"fd00::/9\"]{gateways}}}\n"
    )
}

/// Returns the key sets of a tenant. Those that are fetched over the network are assumed to be
/// reachable.
fn key_sets(ir: &Ir, directories: &[PathBuf]) -> BTreeMap<String, String> {
    const FETCHED: &str = r#"{"keys":[{"kty":"EC"}]}"#;
    let sets = ir.security.jwks.iter().filter_map(|uri| {
        let text = match uri.strip_prefix("file:") {
            None => FETCHED.to_owned(),
            Some(path) => directories
                .iter()
                .find_map(|directory| std::fs::read_to_string(directory.join(path)).ok())?,
        };
        Some((uri.clone(), text))
    });
    sets.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn analyzed(yaml: &str) -> AnalyzedTenant {
        let group = TenantFileGroup {
            name: "Not a tenant's name".to_owned(),
            files: vec![File {
                path: "a.yaml".to_owned(),
                yaml: yaml.to_owned(),
            }],
            directories: Vec::new(),
        };
        analyze_tenant(&group, None, &mut 1).unwrap()
    }

    #[test]
    fn files_without_a_tenant_have_an_implied_one_that_is_valid() {
        for kind in ["Gateway", "Namespace"] {
            let yaml = format!(
                "apiVersion: {}\nkind: {kind}\nmetadata: {{name: a}}\n{}",
                match kind {
                    "Gateway" => "gateway.networking.k8s.io/v1",
                    _ => "v1",
                },
                match kind {
                    "Gateway" =>
                        "spec: {gatewayClassName: canal, listeners: [{name: a, port: 80, protocol: HTTP}]}\n",
                    _ => "",
                }
            );
            let found = analyzed(&yaml);
            assert!(found.diagnostics.is_empty(), "{:?}", found.diagnostics);
            assert_eq!(found.claims, None);
            assert_eq!(found.objects, 1);
        }
    }

    #[test]
    fn tenants_are_the_directories_of_a_directory_without_files() {
        let root = tempfile::tempdir().unwrap();
        for name in ["b", "a", "empty"] {
            std::fs::create_dir(root.path().join(name)).unwrap();
        }
        for name in ["a", "b"] {
            std::fs::write(root.path().join(name).join("x.yaml"), "").unwrap();
        }
        let found = tenant_directories(root.path());
        let names: Vec<String> = found.iter().map(|path| name_of(path)).collect();
        assert_eq!(names, ["a", "b"]);
        assert!(tenant_directories(&root.path().join("a")).is_empty());
    }
}
