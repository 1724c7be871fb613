//! Compares what streams send with the programs that `canal_compiler::lower` returns, over all
//! golden policies. Goldens and `tests/differential` test those programs. This test shows that data
//! planes receive the same programs.

use std::fs;
use std::path::{Path, PathBuf};

use canal_compiler::ir::Ir;
use canal_compiler::{CompileInput, CompileOutput, build_ir, compile, lower, service_keys};
use canal_model::ids::{AzName, NodeName, ReplicaName, ServiceId};
use canal_model::policy::Document;

use super::*;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/compiler")
}

/// Returns the documents of a golden policy, with those of the files that it names after `#with`.
fn documents(path: &Path) -> Vec<Arc<Document>> {
    let own = fs::read_to_string(path).unwrap();
    let common = own.lines().filter_map(|line| line.strip_prefix("#with "));
    let texts: Vec<String> = common
        .map(|name| fs::read_to_string(folder().join(format!("_{}.yaml", name.trim()))).unwrap())
        .collect();
    let parsed = texts
        .iter()
        .chain([&own])
        .enumerate()
        .map(|(number, text)| canal_sources::parse(&format!("{number}.yaml"), text));
    parsed
        .flat_map(|parsed| parsed.documents)
        .map(Arc::new)
        .collect()
}

/// Returns the world of one tenant whose services are all on the backend of `replica`.
fn world_of(ir: &Ir, output: CompileOutput, replica: &ReplicaName) -> StreamWorld {
    let mut w = StreamWorld::default();
    let generation = Generation(1);
    let compiled = CompiledTenant {
        resources: output.resources.into_iter().map(Arc::new).collect(),
        ..CompiledTenant::nothing(output.claims)
    };
    w.catalog.tenants.insert(
        ir.tenant.name.clone(),
        Arc::new(TenantCatalog::next(None, compiled, generation)),
    );
    w.catalog.placement = Arc::new(lower::placement_on(ir, replica, &"b1".parse().unwrap()));
    w.catalog.generation = generation;
    w
}

/// Checks that a stream of `principal` sends exactly `program`, and returns the number of
/// resources.
fn check(w: &StreamWorld, principal: Principal, program: &[Resource]) -> usize {
    let what = principal.to_string();
    let mut c = TestSubscriber::new(principal);
    c.settle(w);
    let sent: Vec<&Resource> = c.resources.values().map(|(_, resource)| resource).collect();
    let names = |resources: &[&Resource]| {
        resources
            .iter()
            .map(|r| format!("{} {}", r.kind().label(), r.name()))
            .collect::<Vec<_>>()
    };
    // A subscriber sorts by name; the compiler sorts ports by number.
    let mut own: Vec<&Resource> = program.iter().collect();
    own.sort_by_key(|resource| (resource.kind(), resource.name()));
    assert_eq!(names(&sent), names(&own), "{what}");
    assert!(
        own.iter().zip(&sent).all(|(own, read)| own.reads_as(read)),
        "{what}"
    );
    sent.len()
}

#[test]
fn streams_send_the_same_programs_as_the_goldens() {
    let az: AzName = "az1".parse().unwrap();
    let replica: ReplicaName = "gw-all".parse().unwrap();
    let alpha = tenant("alpha");
    let mut compared = 0;
    for entry in fs::read_dir(folder()).unwrap() {
        let path = entry.unwrap().path();
        // A file `_NAME.yaml` is no policy of its own; `#with NAME` includes it in others.
        if path.extension().is_none_or(|e| e != "yaml")
            || path.file_name().unwrap().to_string_lossy().starts_with('_')
        {
            continue;
        }
        let documents = documents(&path);
        let service_ids = service_keys(&alpha, &documents)
            .into_iter()
            .zip(1..)
            .map(|(key, id)| (key, ServiceId::new(id).unwrap()))
            .collect();
        let input = CompileInput {
            tenant: &alpha,
            documents: &documents,
            service_ids: &service_ids,
            jwks: &BTreeMap::new(),
        };
        // A golden without a valid Tenant object has no program to compare.
        let Some(ir) = build_ir(&input).0 else {
            continue;
        };
        let w = world_of(&ir, compile(&input), &replica);
        let placement = w.catalog.placement.clone();
        let program = lower::gateway(&ir, &replica, &az, &placement);
        compared += check(&w, gateway(replica.as_str()), &program);
        let names: BTreeSet<&NodeName> =
            ir.workloads.iter().map(|workload| &workload.node).collect();
        for name in names {
            compared += check(
                &w,
                node("alpha", name.as_str()),
                &lower::node(&ir, name, &az, &placement),
            );
        }
        let edge = lower::edge(&ir, &"e1".parse().unwrap(), &az, &placement);
        compared += check(
            &w,
            Principal::Edge {
                name: "e1".parse().unwrap(),
                az: az.clone(),
            },
            &edge,
        );
        let key_server = lower::key_server(&ir, &"k1".parse().unwrap(), &az, &placement);
        compared += check(
            &w,
            Principal::KeyServer {
                name: "k1".parse().unwrap(),
                az: az.clone(),
                tenant: None,
            },
            &key_server,
        );
    }
    // The goldens have far more resources; a wrong folder would compare none.
    assert!(compared > 500, "{compared} resources were compared");
}
