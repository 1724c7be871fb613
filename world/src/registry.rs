//! What the mesh reads about a world: Kubernetes-like YAML for the controller, JSON pod files for
//! nodes, tokens and principals. Turns plan and readiness into files; decides nothing.

use std::path::Path;

use rand::TryRngCore;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::error::{Error, Result, Tried};
use crate::plan::{HostKind, Plan, PodPlan, TenantPlan};
use crate::state::{Paths, make_dir, write_whole};
use crate::topology::{Pod, Tenant};

/// A pod as the registry shows it.
#[derive(Clone, Debug)]
pub(crate) struct PodRecord {
    pub(crate) plan: PodPlan,
    pub(crate) pod: Pod,
    pub(crate) az: String,
    /// Its node takes HBONE for it.
    pub(crate) has_proxy: bool,
    pub(crate) ready: bool,
}

/// YAML documents in one text.
fn documents(objects: &[Value]) -> Result<String> {
    let mut text = String::from("# Written by the world. Edits are lost.\n");
    for object in objects {
        let document = serde_saphyr::to_string(object).map_err(|error| Error::Machine {
            what: format!("a YAML form of {object}: {error}"),
            mend: "report this, it is a defect".into(),
        })?;
        text.push_str("---\n");
        text.push_str(&document);
        if !document.ends_with('\n') {
            text.push('\n');
        }
    }
    Ok(text)
}

/// The tenant's own YAML, its Tenant object and its gateways.
pub(crate) fn write_tenant(paths: &Paths, tenant: &Tenant, plan: &TenantPlan, whole: &Plan) -> Result<()> {
    let dir = paths.tenant_config(&tenant.name);
    make_dir(&dir)?;
    for file in &tenant.config {
        // Files of `config` exist since the topology was checked, and have names.
        let name = file.file_name().unwrap_or_default();
        std::fs::copy(file, dir.join(name)).tried("cannot copy", file)?;
    }
    let object = json!({
        "apiVersion": "canal.mesh/v1",
        "kind": "Tenant",
        "metadata": {"name": tenant.name},
        "spec": {
            "vni": tenant.vni,
            "trustDomain": tenant.trust_domain,
            "podCidrs": [tenant.pods4.to_string(), tenant.pods6.to_string()],
            "serviceCidrs": tenant.service_cidrs.iter().map(ToString::to_string).collect::<Vec<_>>(),
            "outside": tenant.outside.to_string(),
        },
    });
    write_whole(&dir.join("_tenant.yaml"), &documents(&[object])?, 0o644)?;
    let gateways: Vec<Value> = plan
        .gateways
        .iter()
        .map(|vtep| {
            let az = whole.host(&vtep.host).map(|host| whole.routers[host.az].az.clone());
            json!({
                "apiVersion": "canal.mesh/v1",
                "kind": "Gateway",
                "metadata": {"name": vtep.host},
                "spec": {"az": az, "addresses": [vtep.ip4.to_string(), vtep.ip6.to_string()]},
            })
        })
        .collect();
    write_whole(&dir.join("_gateways.yaml"), &documents(&gateways)?, 0o644)
}

/// A tenant's pods with their readiness.
pub(crate) fn write_pods(paths: &Paths, tenant: &str, pods: &[PodRecord]) -> Result<()> {
    let objects: Vec<Value> = pods.iter().map(pod_object).collect();
    let path = paths.tenant_config(tenant).join("_pods.yaml");
    write_whole(&path, &documents(&objects)?, 0o644)
}

fn pod_object(record: &PodRecord) -> Value {
    let PodRecord { plan, pod, az, has_proxy, ready } = record;
    let mut annotations = json!({"canal.mesh/az": az});
    if !has_proxy {
        annotations["canal.mesh/tunnel"] = "none".into();
    }
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": plan.name, "namespace": plan.namespace, "labels": pod.labels, "annotations": annotations},
        "spec": {"nodeName": plan.node_name, "serviceAccountName": pod.service_account},
        "status": {
            "phase": if *ready { "Running" } else { "Pending" },
            "podIP": plan.ip4.to_string(),
            "podIPs": [{"ip": plan.ip4.to_string()}, {"ip": plan.ip6.to_string()}],
            "conditions": [{"type": "Ready", "status": if *ready { "True" } else { "False" }}],
        },
    })
}

/// The file by which a node learns of its pod, as a CNI plugin would tell it.
pub(crate) fn write_pod_file(paths: &Paths, record: &PodRecord, netns: &Path, cgroup: &Path) -> Result<()> {
    let PodRecord { plan, pod, .. } = record;
    let text = json!({
        "uid": plan.uid,
        "namespace": plan.namespace,
        "name": plan.name,
        "serviceAccount": pod.service_account,
        "netns": netns,
        "cgroup": cgroup,
        "ips": [plan.ip4.to_string(), plan.ip6.to_string()],
        "labels": pod.labels,
    });
    write_whole(&pod_file(paths, plan), &format!("{text:#}\n"), 0o644)
}

/// Tells the node that a pod is gone.
pub(crate) fn remove_pod_file(paths: &Paths, plan: &PodPlan) -> Result<()> {
    let path = pod_file(paths, plan);
    std::fs::remove_file(&path).tried("cannot remove", &path)
}

fn pod_file(paths: &Paths, plan: &PodPlan) -> std::path::PathBuf {
    paths.node_pods(&plan.node_name).join(format!("{}.json", crate::state::file_name(&plan.uid)))
}

/// Fresh tokens for everyone who talks to the controller, and the controller's list of them.
pub(crate) fn write_principals(paths: &Paths, plan: &Plan) -> Result<()> {
    let mut list = Vec::new();
    let token = fresh_token()?;
    write_whole(&paths.operator_token(), &token, 0o600)?;
    list.push(json!({"tokenSha256": digest(&token), "kind": "operator", "name": "operator"}));
    for host in &plan.hosts {
        let az = &plan.routers[host.az].az;
        let mut principal = match host.kind {
            HostKind::Node { tenant, .. } => json!({"kind": "node", "name": host.name, "tenant": plan.tenants[tenant].name, "az": az}),
            HostKind::Gateway(_) => json!({"kind": "gateway", "name": host.name, "az": az}),
            HostKind::Controller | HostKind::KeyServer | HostKind::Host { .. } => continue,
        };
        let token = fresh_token()?;
        let path = paths.token(&host.name);
        make_dir(path.parent().unwrap_or(paths.dir()))?;
        write_whole(&path, &token, 0o600)?;
        principal["tokenSha256"] = digest(&token).into();
        list.push(principal);
    }
    let text = serde_saphyr::to_string(&list).map_err(|error| Error::Machine {
        what: format!("a YAML form of the principals: {error}"),
        mend: "report this, it is a defect".into(),
    })?;
    write_whole(&paths.principals(), &text, 0o600)
}

/// 32 random bytes in hex.
fn fresh_token() -> Result<String> {
    let mut bytes = [0_u8; 32];
    rand::rngs::OsRng.try_fill_bytes(&mut bytes).map_err(std::io::Error::other).tried("cannot read random bytes from", "/dev/urandom")?;
    Ok(hex(&bytes))
}

fn digest(token: &str) -> String {
    hex(&Sha256::digest(token.as_bytes()))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
