//! What the mesh reads about a world: Kubernetes-like YAML for the controller, JSON pod files for
//! nodes, tokens and principals. Turns plan and readiness into files; decides nothing.

use std::path::Path;

use rand::TryRngCore;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::error::{Error, Result, Tried};
use crate::plan::{HostKind, HostPlan, Plan, PodPlan, TenantPlan, Vtep};
use crate::seat::KEYS_PORT;
use crate::state::{Paths, make_dir, write_whole};
use crate::topology::{Check, Pod, Tenant};

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

/// The tenant's own YAML, its Tenant object, and how it meets gateways: where they are, or in a tier world where its nodes are.
pub(crate) fn write_tenant(paths: &Paths, tenant: &Tenant, plan: &TenantPlan, whole: &Plan) -> Result<()> {
    let dir = paths.tenant_config(&tenant.name);
    make_dir(&dir)?;
    for file in &tenant.config {
        // Files of `config` exist since the topology was checked, and have names.
        let name = file.file_name().unwrap_or_default();
        std::fs::copy(file, dir.join(name)).tried("cannot copy", file)?;
    }
    write_whole(&dir.join("_tenant.yaml"), &documents(&[tenant_object(tenant)])?, 0o644)?;
    let (name, objects): (&str, Vec<Value>) = if whole.is_tier() {
        ("_nodes.yaml", plan.nodes.iter().map(|vtep| node_object(vtep, whole)).collect())
    } else {
        ("_gateways.yaml", plan.gateways.iter().map(|vtep| gateway_object(vtep, whole)).collect())
    };
    write_whole(&dir.join(name), &documents(&objects)?, 0o644)?;
    let key_servers: Vec<Value> = whole.key_servers_of(&tenant.name).map(key_server_object).collect();
    if key_servers.is_empty() {
        return Ok(());
    }
    write_whole(&dir.join("_keyservers.yaml"), &documents(&key_servers)?, 0o644)
}

/// A tenant's own key server, as its operator would write it.
fn key_server_object(host: &HostPlan) -> Value {
    json!({
        "apiVersion": "canal.mesh/v1",
        "kind": "KeyServer",
        "metadata": {"name": host.name},
        "spec": {"addresses": [format!("{}:{KEYS_PORT}", host.ip4)]},
    })
}

fn tenant_object(tenant: &Tenant) -> Value {
    let mut object = json!({
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
    if let Some((four, six)) = tenant.gateway_cidrs {
        object["spec"]["gatewayCidrs"] = json!([four.to_string(), six.to_string()]);
    }
    if let Some(az) = &tenant.home_az {
        object["spec"]["homeAz"] = json!(az);
    }
    if let Some(keys) = tenant.keys {
        object["spec"]["keys"] = json!({"place": keys.place, "algorithm": keys.algorithm, "fallback": keys.fallback});
    }
    object
}

fn az_of(vtep: &Vtep, plan: &Plan) -> Option<String> {
    plan.host(&vtep.host).map(|host| plan.routers[host.az].az.clone())
}

fn gateway_object(vtep: &Vtep, plan: &Plan) -> Value {
    json!({
        "apiVersion": "canal.mesh/v1",
        "kind": "Gateway",
        "metadata": {"name": vtep.host},
        "spec": {"az": az_of(vtep, plan), "addresses": [vtep.ip4.to_string(), vtep.ip6.to_string()]},
    })
}

/// As Kubernetes shows a node; the annotation is the network plugin's.
fn node_object(vtep: &Vtep, plan: &Plan) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": vtep.host,
            "labels": {"topology.kubernetes.io/zone": az_of(vtep, plan)},
            "annotations": {"canal.mesh/vtep-mac": vtep.mac.to_string()},
        },
        "spec": {"podCIDRs": [vtep.net4.to_string(), vtep.net6.to_string()]},
        "status": {"addresses": [{"type": "InternalIP", "address": vtep.underlay.to_string()}]},
    })
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
    let mut text = json!({
        "uid": plan.uid,
        "namespace": plan.namespace,
        "name": plan.name,
        "serviceAccount": pod.service_account,
        "netns": netns,
        "cgroup": cgroup,
        "ips": [plan.ip4.to_string(), plan.ip6.to_string()],
        "labels": pod.labels,
    });
    if pod.workload_api {
        text["workloadApi"] = true.into();
    }
    if let Some(Check::Http { port, .. } | Check::Tcp { port }) = pod.process.readiness.as_ref().map(|r| &r.check) {
        text["probePorts"] = json!([port]);
    }
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

/// Who may talk to the controller: the list it reads. Everybody's token is in a file of its own.
#[derive(Debug, Default)]
pub(crate) struct Principals {
    /// By the names of hosts, in the order of admission.
    list: Vec<(String, Value)>,
}

impl Principals {
    /// Fresh tokens for the operator and every host that talks to the controller.
    pub(crate) fn of(paths: &Paths, plan: &Plan) -> Result<Self> {
        let mut principals = Self::default();
        let token = fresh_token()?;
        write_whole(&paths.operator_token(), &token, 0o600)?;
        let operator = json!({"tokenSha256": digest(&token), "kind": "operator", "name": "operator"});
        principals.list.push((String::new(), operator));
        for host in &plan.hosts {
            principals.admit(paths, plan, host)?;
        }
        principals.write(paths)?;
        Ok(principals)
    }

    /// Gives a host a token, if it is one that talks to the controller.
    pub(crate) fn admit(&mut self, paths: &Paths, plan: &Plan, host: &HostPlan) -> Result<()> {
        let az = &plan.routers[host.az].az;
        let mut principal = match host.kind {
            HostKind::Node { tenant, .. } => json!({"kind": "node", "name": host.name, "tenant": plan.tenants[tenant].name, "az": az}),
            HostKind::Edge => json!({"kind": "edge", "name": host.name, "az": az}),
            HostKind::Gateway(_) => json!({"kind": "gateway", "name": host.name, "az": az}),
            HostKind::KeyServer { .. } => json!({"kind": "keyserver", "name": host.name, "az": az}),
            HostKind::Controller | HostKind::Host { .. } => return Ok(()),
        };
        if let HostKind::KeyServer { tenant: Some(tenant) } = host.kind {
            principal["tenant"] = plan.tenants[tenant].name.as_str().into();
        }
        if let Some(backend) = &host.backend {
            principal["backend"] = backend.as_str().into();
        }
        let token = fresh_token()?;
        let path = paths.token(&host.name);
        make_dir(path.parent().unwrap_or(paths.dir()))?;
        write_whole(&path, &token, 0o600)?;
        principal["tokenSha256"] = digest(&token).into();
        self.list.push((host.name.clone(), principal));
        Ok(())
    }

    /// Takes a host's token from it.
    pub(crate) fn dismiss(&mut self, paths: &Paths, host: &str) {
        self.list.retain(|(name, _)| name != host);
        // A file that is gone already is what is wanted.
        let _ = std::fs::remove_file(paths.token(host));
    }

    /// Writes the controller's list.
    pub(crate) fn write(&self, paths: &Paths) -> Result<()> {
        let list: Vec<&Value> = self.list.iter().map(|(_, principal)| principal).collect();
        let text = serde_saphyr::to_string(&list).map_err(|error| Error::Machine {
            what: format!("a YAML form of the principals: {error}"),
            mend: "report this, it is a defect".into(),
        })?;
        write_whole(&paths.principals(), &text, 0o600)
    }
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
