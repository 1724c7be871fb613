//! `canal compile`: compiles YAML to data-plane resources without a controller, to check a
//! configuration. It needs neither network nor root.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use canal_compiler::{CompileInput, CompileOutput, claims, compile, service_keys};
use canal_model::diagnostic::{Diagnostic, Severity};
use canal_model::ids::{Generation, ServiceId, ServiceKey, TenantName};
use canal_model::policy::Document;
use canal_model::program::{Resource, ResourceKind};
use canal_wire::southbound::state_file;
use clap::Args;
use serde_json::{Value, json};

use crate::exit::{ExitStatus, VerbError, VerbResult};
use crate::files::yaml_files;
use crate::output::{self, OutputArgs, TextTable};

/// Compiles YAML offline: checks a configuration, shows what data planes would get
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  canal compile my-tenants/                            # one directory per tenant
  canal compile my-tenants/alpha --tenant alpha
  canal compile /run/canal/worlds/demo/config          # what a world's controller compiles
  canal compile my-tenants/ --snapshot /tmp/compiled   # for `canal-gateway --snapshot`")]
pub(crate) struct CompileArgs {
    /// Directory with one tenant's YAML files, or with a directory per tenant
    dir: PathBuf,
    /// Name of the tenant that owns the files [default: the directory's name]
    #[arg(short, long)]
    tenant: Option<String>,
    /// Also write the file with which a gateway can start; only if there is no error
    #[arg(long, value_name = "FILE")]
    snapshot: Option<PathBuf>,
    #[command(flatten)]
    output: OutputArgs,
}

/// One compiled tenant with its diagnostics.
struct CompiledPrograms {
    tenant: TenantName,
    output: CompileOutput,
    /// Diagnostics of reading, then of compiling.
    diagnostics: Vec<Diagnostic>,
}

pub(crate) fn run(args: CompileArgs) -> VerbResult {
    let mut next_id = 1;
    let mut all = Vec::new();
    for (name, dir) in tenants(&args)? {
        all.push(compile_tenant(&name, &dir, &mut next_id)?);
    }
    // Conflicts between tenants are visible only after all are compiled.
    let collisions = claims::collisions(all.iter().map(|c| &c.output.claims));
    let between = collisions
        .diagnostics
        .iter()
        .map(|(_, diagnostic)| diagnostic);
    let diagnostics: Vec<&Diagnostic> = all
        .iter()
        .flat_map(|c| &c.diagnostics)
        .chain(between)
        .collect();
    diagnostics
        .iter()
        .for_each(|diagnostic| eprintln!("{diagnostic}"));
    output::print(args.output.format, &value(&all, &diagnostics), || {
        table(&all)
    })?;
    let broken = diagnostics.iter().any(|d| d.severity == Severity::Error);
    match &args.snapshot {
        _ if broken => Err(VerbError::already_printed(ExitStatus::Failed)),
        Some(file) => write_snapshot(file, &all),
        None => Ok(()),
    }
}

fn write_snapshot(file: &Path, all: &[CompiledPrograms]) -> VerbResult {
    let resources: Vec<&Resource> = all.iter().flat_map(|c| &c.output.resources).collect();
    let versions: Vec<String> = resources.iter().map(|r| state_file::version(r)).collect();
    let bytes = state_file::encode(
        state_file::Head {
            generation: Generation(1),
            store: None,
        },
        versions.iter().map(String::as_str).zip(resources),
    );
    write_for_owner(file, &bytes).map_err(|problem| {
        VerbError::failed(
            file.display().to_string(),
            problem,
            "name a file that can be written",
        )
    })
}

/// Writes a file that only its owner may read: a snapshot has the private keys of listeners.
fn write_for_owner(file: &Path, bytes: &[u8]) -> std::io::Result<()> {
    use std::io::Write;
    use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    let mut file = options.open(file)?;
    // The mode above is only that of a new file.
    file.set_permissions(std::fs::Permissions::from_mode(0o600))?;
    file.write_all(bytes)
}

/// Returns names and directories of the tenants.
fn tenants(args: &CompileArgs) -> VerbResult<Vec<(String, PathBuf)>> {
    let place = args.dir.display().to_string();
    let unreadable = |problem: std::io::Error| {
        VerbError::new(
            ExitStatus::Missing,
            place.clone(),
            problem.to_string(),
            "name a directory of YAML files",
        )
    };
    // The root directory has no name. The caller refuses an empty one, as no tenant has it.
    let named = |dir: &Path| {
        dir.canonicalize()
            .ok()
            .and_then(|d| d.file_name().map(|n| n.to_string_lossy().into_owned()))
            .unwrap_or_default()
    };
    // Files in the directory itself are one tenant's; otherwise each directory is a tenant.
    if !yaml_files(&args.dir).map_err(unreadable)?.is_empty() {
        return Ok(vec![(
            args.tenant.clone().unwrap_or_else(|| named(&args.dir)),
            args.dir.clone(),
        )]);
    }
    let mut dirs = Vec::new();
    for entry in std::fs::read_dir(&args.dir).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        if path.is_dir() {
            dirs.push((named(&path), path));
        }
    }
    // The file system's order is arbitrary, and outputs must not depend on it.
    dirs.sort();
    dirs.retain(|(name, _)| args.tenant.as_ref().is_none_or(|tenant| tenant == name));
    match dirs.is_empty() {
        true => Err(VerbError::new(
            ExitStatus::Missing,
            place,
            "contains no YAML file and no tenant's directory",
            "name a directory of YAML files",
        )),
        false => Ok(dirs),
    }
}

fn compile_tenant(name: &str, dir: &Path, next_id: &mut u32) -> VerbResult<CompiledPrograms> {
    let tenant = TenantName::new(name).map_err(|problem| {
        VerbError::new(ExitStatus::Usage, "--tenant", problem.to_string(), "")
    })?;
    let (documents, mut diagnostics) = read(dir)?;
    let service_ids = ids(&tenant, &documents, next_id)?;
    let mut output = compile(&CompileInput {
        tenant: &tenant,
        documents: &documents,
        service_ids: &service_ids,
        jwks: &BTreeMap::new(),
    });
    let jwks = key_sets(dir, &output);
    // The first pass names the key sets; the second one uses those that are files.
    if !jwks.is_empty() {
        output = compile(&CompileInput {
            tenant: &tenant,
            documents: &documents,
            service_ids: &service_ids,
            jwks: &jwks,
        });
    }
    diagnostics.extend(output.diagnostics.iter().cloned());
    Ok(CompiledPrograms {
        tenant,
        output,
        diagnostics,
    })
}

/// Returns the key sets that are files of the tenant. The controller fetches the others. An
/// unreadable file is left out, and the compiler reports it as missing.
fn key_sets(dir: &Path, output: &CompileOutput) -> BTreeMap<String, String> {
    let files = output
        .jwks
        .iter()
        .filter_map(|uri| Some((uri, uri.strip_prefix("file:")?)));
    files
        .filter_map(|(uri, path)| {
            Some((uri.clone(), std::fs::read_to_string(dir.join(path)).ok()?))
        })
        .collect()
}

fn read(dir: &Path) -> VerbResult<(Vec<Arc<Document>>, Vec<Diagnostic>)> {
    let failed = |path: &Path, problem: std::io::Error| {
        VerbError::failed(path.display().to_string(), problem, "make it readable")
    };
    let (mut documents, mut diagnostics) = (Vec::new(), Vec::new());
    for path in yaml_files(dir).map_err(|problem| failed(dir, problem))? {
        let text = std::fs::read_to_string(&path).map_err(|problem| failed(&path, problem))?;
        let parsed = canal_sources::parse(&path.display().to_string(), &text);
        documents.extend(parsed.documents.into_iter().map(Arc::new));
        diagnostics.extend(parsed.diagnostics);
    }
    Ok((documents, diagnostics))
}

/// Assigns ids in the order of the services' names. In a controller the store preserves the ids.
pub(crate) fn ids(
    tenant: &TenantName,
    documents: &[Arc<Document>],
    next: &mut u32,
) -> VerbResult<BTreeMap<ServiceKey, ServiceId>> {
    let mut ids = BTreeMap::new();
    for key in service_keys(tenant, documents) {
        let id = ServiceId::new(*next).map_err(|problem| {
            VerbError::failed("compile", problem, "compile fewer services at once")
        })?;
        ids.insert(key, id);
        *next += 1;
    }
    Ok(ids)
}

fn count(compiled: &CompiledPrograms, kind: ResourceKind) -> usize {
    compiled
        .output
        .resources
        .iter()
        .filter(|resource| resource.kind() == kind)
        .count()
}

fn policies(compiled: &CompiledPrograms) -> usize {
    [
        ResourceKind::Authorization,
        ResourceKind::Authentication,
        ResourceKind::PeerAuthentication,
    ]
    .iter()
    .map(|kind| count(compiled, *kind))
    .sum()
}

fn count_diagnostics(compiled: &CompiledPrograms, severity: Severity) -> usize {
    compiled
        .diagnostics
        .iter()
        .filter(|d| d.severity == severity)
        .count()
}

fn value(all: &[CompiledPrograms], diagnostics: &[&Diagnostic]) -> Value {
    let tenants = all.iter().map(|c| {
        let names: Vec<Value> = c.output.resources.iter().map(|r| json!({ "kind": r.kind().label(), "name": r.name() })).collect();
        json!({
            "tenant": c.tenant.as_str(), "services": count(c, ResourceKind::Service), "workloads": count(c, ResourceKind::Workload),
            "routes": count(c, ResourceKind::Route), "policies": policies(c), "gateways": count(c, ResourceKind::GatewayReplica), "resources": names,
            "errors": count_diagnostics(c, Severity::Error), "warnings": count_diagnostics(c, Severity::Warning),
        })
    });
    let texts: Vec<String> = diagnostics.iter().map(ToString::to_string).collect();
    json!({ "tenants": tenants.collect::<Vec<_>>(), "diagnostics": texts })
}

fn table(all: &[CompiledPrograms]) -> Vec<String> {
    let mut table = TextTable::new(&[
        "TENANT",
        "SERVICES",
        "WORKLOADS",
        "ROUTES",
        "POLICIES",
        "GATEWAYS",
        "ERRORS",
        "WARNINGS",
    ]);
    for c in all {
        table.row([
            c.tenant.to_string(),
            count(c, ResourceKind::Service).to_string(),
            count(c, ResourceKind::Workload).to_string(),
            count(c, ResourceKind::Route).to_string(),
            policies(c).to_string(),
            count(c, ResourceKind::GatewayReplica).to_string(),
            count_diagnostics(c, Severity::Error).to_string(),
            count_diagnostics(c, Severity::Warning).to_string(),
        ]);
    }
    table.lines()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn only_its_owner_may_read_a_snapshot() {
        let folder = tempfile::tempdir().unwrap();
        let mode = |file: &Path| std::fs::metadata(file).unwrap().permissions().mode() & 0o777;
        let (new, old) = (folder.path().join("new"), folder.path().join("old"));
        std::fs::write(&old, "text that is longer than the snapshot").unwrap();
        std::fs::set_permissions(&old, std::fs::Permissions::from_mode(0o644)).unwrap();
        for file in [&new, &old] {
            write_for_owner(file, b"snapshot").unwrap();
            assert_eq!(mode(file), 0o600, "{}", file.display());
            assert_eq!(std::fs::read(file).unwrap(), b"snapshot");
        }
    }
}
