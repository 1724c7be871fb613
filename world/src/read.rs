//! From YAML tree to topology: field by field, every mistake reported, nothing cross-checked
//! (that is `check`). A value that is missing or wrong drops only the item that holds it.

use std::path::{Path, PathBuf};

use ipnet::IpNet;

use crate::problem::{Findings, Problem, Spot};
use crate::topology::{
    Az, Check, Component, KeyAlgorithm, KeyFallback, KeyPlace, Keys, Links, Node, Outside, Pod, Process, Rate, Readiness, Restart, Tenant,
    TenantSpots, Topology, Vswitch,
};
use crate::tree::{Fields, Tree, Value};

const RATE: &str = "a rate such as 100mbit or 1gbit (64kbit to 400gbit)";
const COUNT: &str = "a whole number from 1 to 1000";

/// The kinds of underlay hosts, which differ in a few fields.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Controller,
    Edge,
    Gateway,
    KeyServer,
    Host,
}

impl Kind {
    fn owner(self) -> &'static str {
        match self {
            Kind::Controller => "the controller",
            Kind::Edge => "an edge",
            Kind::Gateway => "a gateway",
            Kind::KeyServer => "a key server",
            Kind::Host => "a host",
        }
    }

    /// The mesh's own components have a built-in command line; others name theirs.
    fn is_built_in(self) -> bool {
        !matches!(self, Kind::Host)
    }
}

pub(crate) fn topology(tree: &Tree, file: &Path, findings: &mut Findings) -> Option<Topology> {
    let mut fields = Fields::open(tree, "the world", findings)?;
    let name = fields.must_text("world", findings);
    if let Some(name) = &name
        && let Err((what, mend)) = crate::check::world_name(name)
    {
        findings.add(fields.spot_of("world"), what, mend);
    }
    let vswitch = fields.parsed("vswitch", "Checked or Open", findings).unwrap_or(Vswitch::Checked);
    let azs = collect(fields.list("azs", findings), findings, az);
    if azs.is_empty() {
        fields.report_missing("azs", findings);
    }
    let links = fields.tree("links").and_then(|tree| links(tree, findings)).unwrap_or_default();
    let controller = fields.tree("controller").and_then(|tree| component(tree, Kind::Controller, file, findings));
    let topology = Topology {
        name: name.unwrap_or_default(),
        file: file.into(),
        vswitch,
        azs,
        links,
        controller,
        edges: components(fields.list("edges", findings), Kind::Edge, file, findings),
        gateways: components(fields.list("gateways", findings), Kind::Gateway, file, findings),
        key_servers: components(fields.list("keyServers", findings), Kind::KeyServer, file, findings),
        hosts: components(fields.list("hosts", findings), Kind::Host, file, findings),
        tenants: collect(fields.list("tenants", findings), findings, |tree, findings| tenant(tree, file, findings)),
    };
    fields.close(findings);
    Some(topology)
}

fn collect<T>(items: &[Tree], findings: &mut Findings, mut read: impl FnMut(&Tree, &mut Findings) -> Option<T>) -> Vec<T> {
    items.iter().filter_map(|item| read(item, findings)).collect()
}

fn components(items: &[Tree], kind: Kind, file: &Path, findings: &mut Findings) -> Vec<Component> {
    collect(items, findings, |tree, findings| component(tree, kind, file, findings))
}

fn az(tree: &Tree, findings: &mut Findings) -> Option<Az> {
    if let Value::Scalar(name) = &tree.value {
        return Some(Az { name: name.clone(), spot: tree.spot });
    }
    let mut fields = Fields::open(tree, "an AZ", findings)?;
    let name = fields.must_text("name", findings);
    let spot = fields.spot;
    fields.close(findings);
    Some(Az { name: name?, spot })
}

fn links(tree: &Tree, findings: &mut Findings) -> Option<Links> {
    let mut fields = Fields::open(tree, "links", findings)?;
    let links = Links {
        mtu: link_mtu(&mut fields, findings).unwrap_or(Links::MTU_DEFAULT),
        inter_az: link_rate(&mut fields, "interAz", findings),
        node: link_rate(&mut fields, "node", findings),
        pod: link_rate(&mut fields, "pod", findings),
        gateway: link_rate(&mut fields, "gateway", findings),
        host: link_rate(&mut fields, "host", findings),
    };
    fields.close(findings);
    Some(links)
}

/// No link is narrower than IPv6 allows (RFC 8200 §5).
fn link_mtu(fields: &mut Fields<'_>, findings: &mut Findings) -> Option<u32> {
    let expected = "a number of bytes from 1280 to 9000";
    let mtu: u32 = fields.parsed("mtu", expected, findings)?;
    if !(1280..=9000).contains(&mtu) {
        findings.add(fields.spot_of("mtu"), format!("mtu: {mtu} is not {expected}"), format!("write {expected}"));
    }
    Some(mtu)
}

fn link_rate(fields: &mut Fields<'_>, name: &'static str, findings: &mut Findings) -> Option<Rate> {
    let mut link = Fields::open(fields.tree(name)?, name, findings)?;
    let rate = link.parsed("rate", RATE, findings);
    link.close(findings);
    rate
}

fn component(tree: &Tree, kind: Kind, file: &Path, findings: &mut Findings) -> Option<Component> {
    let mut fields = Fields::open(tree, kind.owner(), findings)?;
    let spot = fields.spot;
    let name = match kind {
        Kind::Controller => Some("controller".to_owned()),
        Kind::Edge | Kind::Gateway | Kind::KeyServer | Kind::Host => fields.must_text("name", findings),
    };
    let az = fields.must_text("az", findings);
    let workers = match kind {
        Kind::Gateway => fields.parsed("workers", COUNT, findings).unwrap_or(1),
        Kind::Controller | Kind::Edge | Kind::KeyServer | Kind::Host => 1,
    };
    let backend = if kind == Kind::Gateway { fields.text("backend", findings) } else { None };
    let mtu = if matches!(kind, Kind::Edge | Kind::Gateway) { link_mtu(&mut fields, findings) } else { None };
    let outside = kind == Kind::Host && fields.flag("outside", false, findings);
    let tenant = if kind == Kind::KeyServer { fields.text("tenant", findings) } else { None };
    let tls_dir = if kind == Kind::KeyServer { tls_dir(&mut fields, file, findings) } else { None };
    let rate = fields.parsed("rate", RATE, findings);
    let default = if kind == Kind::Host { Restart::Never } else { Restart::Always };
    let process = process(&mut fields, default, findings);
    fields.close(findings);
    let process = (kind.is_built_in() || !process.command.is_empty()).then_some(process);
    Some(Component { name: name?, az: az?, process, rate, mtu, workers, backend, outside, tenant, tls_dir, spot })
}

/// A directory relative to the topology's file.
fn tls_dir(fields: &mut Fields<'_>, file: &Path, findings: &mut Findings) -> Option<PathBuf> {
    let text = fields.text("tlsDir", findings)?;
    let path = file.parent().unwrap_or(Path::new("/")).join(&text);
    if !path.is_dir() {
        findings.add(fields.spot_of("tlsDir"), format!("tlsDir: {text} is not a directory"), "name an existing directory");
    }
    Some(path)
}

/// The fields that every process has; `command` may be empty here.
fn process(fields: &mut Fields<'_>, default: Restart, findings: &mut Findings) -> Process {
    Process {
        command: fields.texts("command", findings),
        args: fields.texts("args", findings),
        env: fields.table("env", findings),
        restart: fields.parsed("restart", "never or always", findings).unwrap_or(default),
        readiness: fields.tree("readiness").and_then(|tree| readiness(tree, findings)),
        spot: fields.spot_of("command"),
    }
}

fn readiness(tree: &Tree, findings: &mut Findings) -> Option<Readiness> {
    let mut fields = Fields::open(tree, "readiness", findings)?;
    let spot = fields.spot;
    let period = fields.parsed("periodMs", "a number of milliseconds", findings);
    let http = fields.tree("http").map(|tree| http_check(tree, findings));
    let tcp = fields.tree("tcp").map(|tree| tcp_check(tree, findings));
    let exec = fields.texts("exec", findings);
    let exec = (!exec.is_empty()).then_some(Some(Check::Exec(exec)));
    fields.close(findings);
    let mut checks: Vec<Option<Check>> = [http, tcp, exec].into_iter().flatten().collect();
    if checks.len() != 1 {
        findings.add(spot, "readiness needs exactly one of http, tcp, exec", "write e.g. `readiness: {tcp: {port: 9080}}`");
        return None;
    }
    let period_ms = period.unwrap_or(Readiness::PERIOD_MS_DEFAULT);
    if !(10..=60_000).contains(&period_ms) {
        findings.add(spot, format!("periodMs: {period_ms} is out of range"), "write 10 to 60000");
    }
    Some(Readiness { check: checks.remove(0)?, period_ms })
}

fn http_check(tree: &Tree, findings: &mut Findings) -> Option<Check> {
    let mut fields = Fields::open(tree, "http", findings)?;
    let port = port(&mut fields, findings);
    let path = fields.text("path", findings).unwrap_or_else(|| "/".to_owned());
    if !path.starts_with('/') || path.contains(char::is_whitespace) {
        findings.add(fields.spot_of("path"), format!("path: {path:?} is not a path"), "write `path: /…` without blanks");
    }
    fields.close(findings);
    Some(Check::Http { port: port?, path })
}

fn tcp_check(tree: &Tree, findings: &mut Findings) -> Option<Check> {
    let mut fields = Fields::open(tree, "tcp", findings)?;
    let port = port(&mut fields, findings);
    fields.close(findings);
    Some(Check::Tcp { port: port? })
}

fn port(fields: &mut Fields<'_>, findings: &mut Findings) -> Option<u16> {
    if fields.tree("port").is_none() {
        fields.report_missing("port", findings);
        return None;
    }
    fields.parsed::<std::num::NonZeroU16>("port", "a port from 1 to 65535", findings).map(std::num::NonZeroU16::get)
}

fn tenant(tree: &Tree, file: &Path, findings: &mut Findings) -> Option<Tenant> {
    let mut fields = Fields::open(tree, "a tenant", findings)?;
    let spots = TenantSpots {
        whole: fields.spot,
        vni: fields.spot_of("vni"),
        trust_domain: fields.spot_of("trustDomain"),
        pods: fields.spot_of("podCidrs"),
        services: fields.spot_of("serviceCidrs"),
        gateways: fields.spot_of("gatewayCidrs"),
        home_az: fields.spot_of("homeAz"),
        dns: fields.spot_of("dns"),
        keys: fields.spot_of("keys"),
    };
    let name = fields.must_text("name", findings);
    let vni = vni(&mut fields, findings);
    let trust_domain = fields.must_text("trustDomain", findings);
    let outside = fields.parsed("outside", "Deny or Passthrough", findings).unwrap_or(Outside::Deny);
    let pods = pod_cidrs(&mut fields, findings);
    let gateway_cidrs = gateway_cidrs(&mut fields, findings);
    let home_az = fields.text("homeAz", findings);
    let dns = fields.flag("dns", false, findings);
    let keys = fields.tree("keys").and_then(|tree| keys(tree, findings));
    let service_cidrs = cidrs(&mut fields, "serviceCidrs", findings).into_iter().map(|(_, cidr)| cidr).collect();
    let config = config_files(&mut fields, file, findings);
    let nodes = collect(fields.list("nodes", findings), findings, node);
    let pods_list = collect(fields.list("pods", findings), findings, pod);
    fields.close(findings);
    let (pods4, pods6) = pods?;
    Some(Tenant {
        name: name?,
        vni: vni?,
        trust_domain: trust_domain?,
        outside,
        pods4,
        pods6,
        service_cidrs,
        gateway_cidrs: gateway_cidrs?,
        home_az,
        dns,
        keys,
        config,
        nodes,
        pods: pods_list,
        spots,
    })
}

/// As a Tenant object has them; what is not written is as the mesh does by itself.
fn keys(tree: &Tree, findings: &mut Findings) -> Option<Keys> {
    let mut fields = Fields::open(tree, "keys", findings)?;
    let keys = Keys {
        place: fields.parsed("place", "Local or KeyServer", findings).unwrap_or(KeyPlace::Local),
        algorithm: fields.parsed("algorithm", "EcdsaP256 or Rsa2048", findings).unwrap_or(KeyAlgorithm::EcdsaP256),
        fallback: fields.parsed("fallback", "Refuse or Local", findings).unwrap_or(KeyFallback::Refuse),
    };
    fields.close(findings);
    Some(keys)
}

fn vni(fields: &mut Fields<'_>, findings: &mut Findings) -> Option<u32> {
    const EXPECTED: &str = "a VXLAN network identifier from 1 to 16777215";
    if fields.tree("vni").is_none() {
        fields.report_missing("vni", findings);
        return None;
    }
    let vni: u32 = fields.parsed("vni", EXPECTED, findings)?;
    if !(1..1 << 24).contains(&vni) {
        findings.add(fields.spot_of("vni"), format!("vni: {vni} is not {EXPECTED}"), "choose a smaller one");
        return None;
    }
    Some(vni)
}

fn cidrs(fields: &mut Fields<'_>, name: &'static str, findings: &mut Findings) -> Vec<(Spot, IpNet)> {
    let items = fields.list(name, findings);
    collect(items, findings, |tree, findings| {
        let Value::Scalar(text) = &tree.value else {
            findings.add(tree.spot, format!("an entry of {name} is not a CIDR"), "write e.g. 10.1.0.0/16");
            return None;
        };
        match text.parse::<IpNet>() {
            Ok(cidr) if cidr.addr() == cidr.network() => Some((tree.spot, cidr)),
            Ok(cidr) => {
                findings.add(tree.spot, format!("{name}: {text} has bits below its prefix"), format!("write {}", cidr.trunc()));
                None
            }
            Err(_) => {
                findings.add(tree.spot, format!("{name}: {text:?} is not a CIDR"), "write e.g. 10.1.0.0/16");
                None
            }
        }
    })
}

/// One range of each family, where each is written.
type Pair = ((Spot, ipnet::Ipv4Net), (Spot, ipnet::Ipv6Net));

/// Exactly one IPv4 and one IPv6 range.
fn pair(fields: &mut Fields<'_>, name: &'static str, example: &str, findings: &mut Findings) -> Option<Pair> {
    let spot = fields.spot_of(name);
    let list = cidrs(fields, name, findings);
    if list.len() < fields.list(name, findings).len() {
        // An entry was refused, and has been reported.
        return None;
    }
    let (mut four, mut six) = (Vec::new(), Vec::new());
    for (spot, cidr) in list {
        match cidr {
            IpNet::V4(cidr) => four.push((spot, cidr)),
            IpNet::V6(cidr) => six.push((spot, cidr)),
        }
    }
    let ([four], [six]) = (four.as_slice(), six.as_slice()) else {
        findings.add(spot, format!("{name} needs exactly one IPv4 and one IPv6 range"), format!("write e.g. {example}"));
        return None;
    };
    Some((*four, *six))
}

/// Large enough for the plan's slots.
fn pod_cidrs(fields: &mut Fields<'_>, findings: &mut Findings) -> Option<(ipnet::Ipv4Net, ipnet::Ipv6Net)> {
    let ((spot4, pods4), (spot6, pods6)) = pair(fields, "podCidrs", "[10.1.0.0/16, \"fd00:101::/64\"]", findings)?;
    let mut large_enough = true;
    if !(8..=22).contains(&pods4.prefix_len()) {
        findings.add(
            spot4,
            format!("podCidrs: {pods4} cannot be split"),
            "write a prefix length from 8 to 22: a /24 for each node, and one for gateways",
        );
        large_enough = false;
    }
    if !(16..=96).contains(&pods6.prefix_len()) {
        findings.add(spot6, format!("podCidrs: {pods6} cannot be split"), "write a prefix length from 16 to 96: a /112 for each node");
        large_enough = false;
    }
    large_enough.then_some((pods4, pods6))
}

/// Large enough that an AZ's eighth has some addresses. Only tier worlds have them.
fn gateway_cidrs(fields: &mut Fields<'_>, findings: &mut Findings) -> Option<Option<(ipnet::Ipv4Net, ipnet::Ipv6Net)>> {
    if fields.tree("gatewayCidrs").is_none() {
        return Some(None);
    }
    let ((spot4, four), (spot6, six)) = pair(fields, "gatewayCidrs", "[10.1.192.0/18, \"fd00:101:0:c::/64\"]", findings)?;
    let mut large_enough = true;
    for (spot, shown, length, range) in
        [(spot4, four.to_string(), four.prefix_len(), 8..=26), (spot6, six.to_string(), six.prefix_len(), 16..=112)]
    {
        if !range.contains(&length) {
            let mend = format!("write a prefix length from {} to {}: each AZ has an eighth", range.start(), range.end());
            findings.add(spot, format!("gatewayCidrs: {shown} cannot be split"), mend);
            large_enough = false;
        }
    }
    large_enough.then_some(Some((four, six)))
}

/// The YAML files that `config` names, directories expanded, relative to the topology's file.
fn config_files(fields: &mut Fields<'_>, file: &Path, findings: &mut Findings) -> Vec<PathBuf> {
    let base = file.parent().unwrap_or(Path::new("/"));
    let mut files = Vec::new();
    for item in fields.list("config", findings) {
        let Value::Scalar(text) = &item.value else {
            findings.add(item.spot, "an entry of config is not a path", "write the path of a YAML file or directory");
            continue;
        };
        match yaml_files(&base.join(text)) {
            Ok(found) if found.is_empty() => {
                findings.add(item.spot, format!("config: {text} holds no .yaml file"), "name a YAML file or a directory of them");
            }
            Ok(found) => files.extend(found),
            Err(error) => {
                findings.add(item.spot, format!("config: {text}: {error}"), "name an existing YAML file or directory");
            }
        }
    }
    files
}

fn yaml_files(path: &Path) -> std::io::Result<Vec<PathBuf>> {
    if !std::fs::metadata(path)?.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut files = Vec::new();
    for entry in std::fs::read_dir(path)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "yaml" || extension == "yml") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn node(tree: &Tree, findings: &mut Findings) -> Option<Node> {
    let mut fields = Fields::open(tree, "a node", findings)?;
    let spot = fields.spot;
    let name = fields.must_text("name", findings);
    let az = fields.must_text("az", findings);
    let proxy = fields.flag("proxy", true, findings);
    let rate = fields.parsed("rate", RATE, findings);
    let process = process(&mut fields, Restart::Always, findings);
    fields.close(findings);
    Some(Node { name: name?, az: az?, proxy: proxy.then_some(process), rate, spot })
}

fn pod(tree: &Tree, findings: &mut Findings) -> Option<Pod> {
    let mut fields = Fields::open(tree, "a pod", findings)?;
    let spot = fields.spot;
    let name = fields.must_text("name", findings);
    let nodes = pod_nodes(&mut fields, findings);
    let nodes_name = if fields.tree("node").is_some() { "node" } else { "nodes" };
    let nodes_spot = fields.spot_of(nodes_name);
    let replicas = fields.parsed("replicas", COUNT, findings).unwrap_or(1);
    if !(1..=1000).contains(&replicas) {
        findings.add(fields.spot_of("replicas"), format!("replicas: {replicas} is not {COUNT}"), format!("write {COUNT}"));
    }
    let namespace = fields.text("namespace", findings).unwrap_or_else(|| "default".to_owned());
    let service_account = fields.text("serviceAccount", findings).unwrap_or_else(|| "default".to_owned());
    let labels = fields.table("labels", findings);
    let workload_api = fields.flag("workloadApi", false, findings);
    let rate = fields.parsed("rate", RATE, findings);
    let mtu = link_mtu(&mut fields, findings);
    let process = process(&mut fields, Restart::Always, findings);
    if process.command.is_empty() {
        fields.report_missing("command", findings);
    }
    fields.close(findings);
    let nodes = nodes?;
    Some(Pod { name: name?, namespace, nodes, nodes_spot, replicas, service_account, labels, workload_api, process, rate, mtu, spot })
}

/// `node: a-n1` or `nodes: [a-n1, a-n2]`.
fn pod_nodes(fields: &mut Fields<'_>, findings: &mut Findings) -> Option<Vec<String>> {
    let one = fields.text("node", findings);
    let many = fields.texts("nodes", findings);
    match (one, many.is_empty()) {
        (Some(node), true) => Some(vec![node]),
        (None, false) => Some(many),
        (Some(_), false) => {
            findings.add(fields.spot_of("nodes"), "a pod has both `node` and `nodes`", "keep one of them");
            None
        }
        (None, true) => {
            fields.report_missing("node", findings);
            None
        }
    }
}

/// One pod outside a topology: readable by itself; the live world checks the rest.
pub(crate) fn pod_alone(tree: &Tree, file: &Path) -> Result<Pod, Vec<Problem>> {
    let mut findings = Findings::of(file.into());
    let pod = pod(tree, &mut findings);
    if let Some(pod) = &pod {
        crate::check::pod_names(pod, &mut findings);
    }
    match pod {
        Some(pod) if findings.is_empty() => Ok(pod),
        _ => Err(findings.into_sorted()),
    }
}
