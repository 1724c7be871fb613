//! Writes the files from which the mesh's programs read the world: Kubernetes-like YAML for the
//! controller, JSON pod files for nodes, tokens, and the list of principals. It turns plan and
//! readiness into files and decides nothing. Start at [`write_tenant`].

use std::path::Path;

use rand::TryRngCore;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::error::{Error, IoContext, Result};
use crate::host_environment::KEYS_PORT;
use crate::plan::{HostKind, HostPlan, PodPlan, TenantPlan, Vtep, WorldPlan};
use crate::state::{WorldPaths, make_dir, write_whole};
use crate::topology::{Check, PodTemplate, TenantTopology};

/// A pod in the form in which the registry shows it.
#[derive(Clone, Debug)]
pub(crate) struct PodRecord {
    pub(crate) plan: PodPlan,
    pub(crate) pod: PodTemplate,
    pub(crate) az: String,
    /// The pod's node accepts HBONE for it.
    pub(crate) has_proxy: bool,
    pub(crate) ready: bool,
}

/// Writes objects as YAML documents of one text.
fn documents(objects: &[Value]) -> Result<String> {
    let mut text = String::from("# Written by the world. Edits are lost.\n");
    for object in objects {
        let document = serde_saphyr::to_string(object).map_err(|error| Error::Machine {
            what: format!("a YAML form of {object}: {error}"),
            fix: "report this defect".into(),
        })?;
        text.push_str("---\n");
        text.push_str(&document);
        if !document.ends_with('\n') {
            text.push('\n');
        }
    }
    Ok(text)
}

/// Writes the tenant's own YAML, its Tenant object, its key servers, and its GatewayReplica objects,
/// or in a tier world its Node objects instead.
pub(crate) fn write_tenant(
    paths: &WorldPaths,
    tenant: &TenantTopology,
    plan: &TenantPlan,
    world: &WorldPlan,
) -> Result<()> {
    let dir = paths.tenant_config(&tenant.name);
    make_dir(&dir)?;
    for file in &tenant.config {
        // The files of `config` exist since the topology was checked, and they have names.
        let name = file.file_name().unwrap_or_default();
        std::fs::copy(file, dir.join(name)).tried("cannot copy", file)?;
    }
    write_whole(
        &dir.join("_tenant.yaml"),
        &documents(&[tenant_object(tenant)])?,
        0o644,
    )?;
    // In a tier world replicas register themselves, and the controller needs the nodes' tunnel
    // ends.
    let (name, objects): (&str, Vec<Value>) = if world.is_tier() {
        (
            "_nodes.yaml",
            plan.nodes
                .iter()
                .map(|vtep| node_object(vtep, world))
                .collect(),
        )
    } else {
        (
            "_gateways.yaml",
            plan.gateways
                .iter()
                .map(|vtep| gateway_object(vtep, world))
                .collect(),
        )
    };
    write_whole(&dir.join(name), &documents(&objects)?, 0o644)?;
    let key_servers: Vec<Value> = world
        .key_servers_of(&tenant.name)
        .map(key_server_object)
        .collect();
    // A tenant without key servers has no file of them.
    if key_servers.is_empty() {
        return Ok(());
    }
    write_whole(
        &dir.join("_keyservers.yaml"),
        &documents(&key_servers)?,
        0o644,
    )
}

/// Returns a tenant's own key server in the form in which the tenant's operator would write it.
fn key_server_object(host: &HostPlan) -> Value {
    json!({
        "apiVersion": "canal.mesh/v1",
        "kind": "KeyServer",
        "metadata": {"name": host.name},
        "spec": {"addresses": [format!("{}:{KEYS_PORT}", host.ip4)]},
    })
}

fn tenant_object(tenant: &TenantTopology) -> Value {
    let mut object = json!({
        "apiVersion": "canal.mesh/v1",
        "kind": "Tenant",
        "metadata": {"name": tenant.name},
        "spec": {
            "vni": tenant.vni,
            "trustDomain": tenant.trust_domain,
            "podCidrs": [tenant.pods4.to_string(), tenant.pods6.to_string()],
            "serviceCidrs": tenant.service_cidrs.iter().map(ToString::to_string).collect::<Vec<_>>(),
            "outboundTrafficPolicy": tenant.outside.to_string(),
        },
    });
    if let Some((four, six)) = tenant.gateway_cidrs {
        object["spec"]["gatewayCidrs"] = json!([four.to_string(), six.to_string()]);
    }
    if tenant.ingress_network {
        object["spec"]["ingressNetwork"] = json!(true);
    }
    if let Some(az) = &tenant.home_az {
        object["spec"]["homeAz"] = json!(az);
    }
    if let Some(keys) = tenant.keys {
        object["spec"]["keys"] = json!({"location": keys.location, "algorithm": keys.algorithm, "fallback": keys.fallback});
    }
    object
}

fn az_of(vtep: &Vtep, plan: &WorldPlan) -> Option<String> {
    plan.host(&vtep.host)
        .map(|host| plan.routers[host.az].az.clone())
}

fn gateway_object(vtep: &Vtep, plan: &WorldPlan) -> Value {
    json!({
        "apiVersion": "canal.mesh/v1",
        "kind": "GatewayReplica",
        "metadata": {"name": vtep.host},
        "spec": {"az": az_of(vtep, plan), "addresses": [vtep.ip4.to_string(), vtep.ip6.to_string()]},
    })
}

/// Returns a node in the form of Kubernetes. The annotation is that of the network plugin.
fn node_object(vtep: &Vtep, plan: &WorldPlan) -> Value {
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

/// Writes a tenant's pods with their readiness.
pub(crate) fn write_pods(paths: &WorldPaths, tenant: &str, pods: &[PodRecord]) -> Result<()> {
    let objects: Vec<Value> = pods.iter().map(pod_object).collect();
    let path = paths.tenant_config(tenant).join("_pods.yaml");
    write_whole(&path, &documents(&objects)?, 0o644)
}

fn pod_object(record: &PodRecord) -> Value {
    let PodRecord {
        plan,
        pod,
        az,
        has_proxy,
        ready,
    } = record;
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

/// Writes the file from which a node reads one of its pods, like the one that a CNI plugin writes.
pub(crate) fn write_pod_file(
    paths: &WorldPaths,
    record: &PodRecord,
    netns: &Path,
    cgroup: &Path,
) -> Result<()> {
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
    if let Some(Check::Http { port, .. } | Check::Tcp { port }) =
        pod.process.readiness.as_ref().map(|r| &r.check)
    {
        text["probePorts"] = json!([port]);
    }
    write_whole(&pod_file(paths, plan), &format!("{text:#}\n"), 0o644)
}

/// Removes the file of a pod, so that its node releases the pod.
pub(crate) fn remove_pod_file(paths: &WorldPaths, plan: &PodPlan) -> Result<()> {
    let path = pod_file(paths, plan);
    std::fs::remove_file(&path).tried("cannot remove", &path)
}

fn pod_file(paths: &WorldPaths, plan: &PodPlan) -> std::path::PathBuf {
    paths
        .node_pods(&plan.node_name)
        .join(format!("{}.json", crate::state::file_name(&plan.uid)))
}

/// The list of principals that may use the controller's API. Each principal's token is in a file of
/// its own.
#[derive(Debug, Default)]
pub(crate) struct PrincipalFiles {
    /// Host name and principal, in the order of their addition. The operator's host name is empty.
    list: Vec<(String, Value)>,
}

impl PrincipalFiles {
    /// Creates new tokens for the operator and for every host that connects to the controller.
    pub(crate) fn of(paths: &WorldPaths, plan: &WorldPlan) -> Result<Self> {
        let mut principals = Self::default();
        let token = fresh_token()?;
        write_whole(&paths.operator_token(), &token, 0o600)?;
        let operator =
            json!({"tokenSha256": digest(&token), "kind": "operator", "name": "operator"});
        principals.list.push((String::new(), operator));
        for host in &plan.hosts {
            principals.admit(paths, plan, host)?;
        }
        principals.write(paths)?;
        Ok(principals)
    }

    /// Creates a token for a host, if it is of a kind that connects to the controller.
    pub(crate) fn admit(
        &mut self,
        paths: &WorldPaths,
        plan: &WorldPlan,
        host: &HostPlan,
    ) -> Result<()> {
        let az = &plan.routers[host.az].az;
        let mut principal = match host.kind {
            HostKind::Node { tenant, .. } => {
                json!({"kind": "node", "name": host.name, "tenant": plan.tenants[tenant].name, "az": az})
            }
            HostKind::Edge => json!({"kind": "edge", "name": host.name, "az": az}),
            HostKind::Gateway(_) => json!({"kind": "gateway", "name": host.name, "az": az}),
            HostKind::KeyServer { .. } => json!({"kind": "keyserver", "name": host.name, "az": az}),
            HostKind::Controller | HostKind::Host { .. } => return Ok(()),
        };
        if let HostKind::KeyServer {
            tenant: Some(tenant),
        } = host.kind
        {
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

    /// Removes a host's principal and its token file.
    pub(crate) fn dismiss(&mut self, paths: &WorldPaths, host: &str) {
        self.list.retain(|(name, _)| name != host);
        // The file may already be gone, which is the desired result.
        let _ = std::fs::remove_file(paths.token(host));
    }

    /// Writes the list that the controller reads.
    pub(crate) fn write(&self, paths: &WorldPaths) -> Result<()> {
        let list: Vec<&Value> = self.list.iter().map(|(_, principal)| principal).collect();
        let text = serde_saphyr::to_string(&list).map_err(|error| Error::Machine {
            what: format!("a YAML form of the principals: {error}"),
            fix: "report this defect".into(),
        })?;
        write_whole(&paths.principals(), &text, 0o600)
    }
}

/// Returns 32 random bytes in hexadecimal.
fn fresh_token() -> Result<String> {
    let mut bytes = [0_u8; 32];
    rand::rngs::OsRng
        .try_fill_bytes(&mut bytes)
        .map_err(std::io::Error::other)
        .tried("cannot read random bytes from", "/dev/urandom")?;
    Ok(hex(&bytes))
}

fn digest(token: &str) -> String {
    hex(&Sha256::digest(token.as_bytes()))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
