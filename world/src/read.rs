//! Reads a YAML tree into a topology, field by field, and reports every mistake. It does no
//! cross-checks; `check` does. A missing or wrong value drops only the item that contains it. Start
//! at [`topology`].

use std::path::{Path, PathBuf};

use canal_yaml::tree::YamlNode;
use ipnet::IpNet;

use crate::impairment::{Delay, Impairment, LossRate};
use crate::problem::{FilePosition, TopologyProblem, TopologyProblems};
use crate::topology::{
    Az, Check, Component, ImpairedLinks, LinkRate, Links, NodeTopology, OutsideTraffic,
    PodTemplate, ProcessTemplate, Readiness, Restart, TenantKeysTopology, TenantPositions,
    TenantTopology, Topology, TopologyKeyAlgorithm, TopologyKeyFallback, TopologyKeyLocation,
    Vswitch,
};
use crate::tree::MappingReader;

const RATE: &str = "a rate such as 100mbit or 1gbit (64kbit to 400gbit)";
const DELAY: &str = "a time such as 500us, 0.5ms or 1s (at most 10s)";
const COUNT: &str = "a whole number from 1 to 1000";

/// Kind of an underlay host. Kinds differ in a few fields.
#[derive(Clone, Copy, PartialEq, Eq)]
enum UnderlayHostKind {
    Controller,
    Edge,
    Gateway,
    KeyServer,
    Host,
}

impl UnderlayHostKind {
    fn owner(self) -> &'static str {
        match self {
            UnderlayHostKind::Controller => "the controller",
            UnderlayHostKind::Edge => "an edge",
            UnderlayHostKind::Gateway => "a gateway",
            UnderlayHostKind::KeyServer => "a key server",
            UnderlayHostKind::Host => "a host",
        }
    }

    /// Returns whether the component has a built-in command line. Plain hosts name their own
    /// command.
    fn is_built_in(self) -> bool {
        !matches!(self, UnderlayHostKind::Host)
    }
}

pub(crate) fn topology(
    tree: &YamlNode,
    file: &Path,
    findings: &mut TopologyProblems,
) -> Option<Topology> {
    let mut fields = MappingReader::open(tree, "the world", findings)?;
    let name = fields.must_text("world", findings);
    if let Some(name) = &name
        && let Err((what, fix)) = crate::check::world_name(name)
    {
        findings.add(fields.spot_of("world"), what, fix);
    }
    // A field that is not written, or is reported as wrong, has its default.
    let vswitch = fields
        .parsed("vswitch", "Checked or Open", findings)
        // Only tests of the mesh's own refusals need an open one.
        .unwrap_or(Vswitch::Checked);
    let azs = collect(fields.list("azs", findings), findings, az);
    if azs.is_empty() {
        fields.report_missing("azs", findings);
    }
    let links = fields
        .tree("links")
        .and_then(|tree| links(tree, findings))
        .unwrap_or_default();
    let controller = fields
        .tree("controller")
        .and_then(|tree| component(tree, UnderlayHostKind::Controller, file, findings));
    // What is missing is reported already; the rest is read to report its mistakes too.
    let topology = Topology {
        name: name.unwrap_or_default(),
        file: file.into(),
        vswitch,
        azs,
        links,
        controller,
        edges: components(
            fields.list("edges", findings),
            UnderlayHostKind::Edge,
            file,
            findings,
        ),
        gateways: components(
            fields.list("gateways", findings),
            UnderlayHostKind::Gateway,
            file,
            findings,
        ),
        key_servers: components(
            fields.list("keyServers", findings),
            UnderlayHostKind::KeyServer,
            file,
            findings,
        ),
        hosts: components(
            fields.list("hosts", findings),
            UnderlayHostKind::Host,
            file,
            findings,
        ),
        tenants: collect(
            fields.list("tenants", findings),
            findings,
            |tree, findings| tenant(tree, file, findings),
        ),
    };
    fields.close(findings);
    Some(topology)
}

fn collect<T>(
    items: &[YamlNode],
    findings: &mut TopologyProblems,
    mut read: impl FnMut(&YamlNode, &mut TopologyProblems) -> Option<T>,
) -> Vec<T> {
    items
        .iter()
        .filter_map(|item| read(item, findings))
        .collect()
}

fn components(
    items: &[YamlNode],
    kind: UnderlayHostKind,
    file: &Path,
    findings: &mut TopologyProblems,
) -> Vec<Component> {
    collect(items, findings, |tree, findings| {
        component(tree, kind, file, findings)
    })
}

fn az(tree: &YamlNode, findings: &mut TopologyProblems) -> Option<Az> {
    if let Some(name) = tree.scalar_text() {
        return Some(Az {
            name: name.to_owned(),
            spot: tree.spot.into(),
        });
    }
    let mut fields = MappingReader::open(tree, "an AZ", findings)?;
    let name = fields.must_text("name", findings);
    let spot = fields.spot;
    fields.close(findings);
    Some(Az { name: name?, spot })
}

fn links(tree: &YamlNode, findings: &mut TopologyProblems) -> Option<Links> {
    let mut fields = MappingReader::open(tree, "links", findings)?;
    let mtu = link_mtu(&mut fields, findings).unwrap_or(Links::MTU_DEFAULT);
    let seed = fields
        .parsed("seed", "a whole number", findings)
        .unwrap_or(Links::SEED_DEFAULT);
    let (inter_az, impaired_az) = link(&mut fields, "interAz", true, findings);
    let (node, impaired_node) = link(&mut fields, "node", true, findings);
    let (pod, _) = link(&mut fields, "pod", false, findings);
    let (gateway, impaired_gateway) = link(&mut fields, "gateway", true, findings);
    let (host, impaired_host) = link(&mut fields, "host", true, findings);
    let impaired = ImpairedLinks {
        inter_az: impaired_az,
        node: impaired_node,
        gateway: impaired_gateway,
        host: impaired_host,
    };
    let links = Links {
        mtu,
        inter_az,
        node,
        pod,
        gateway,
        host,
        impaired,
        seed,
    };
    fields.close(findings);
    Some(links)
}

/// Reads the MTU of a link. The minimum is that of IPv6 (RFC 8200 §5).
fn link_mtu(fields: &mut MappingReader<'_>, findings: &mut TopologyProblems) -> Option<u32> {
    let expected = "a number of bytes from 1280 to 9000";
    let mtu: u32 = fields.parsed("mtu", expected, findings)?;
    // 9,000 is the usual MTU of jumbo frames; the relay's buffers have room for 9,100.
    if !(1280..=9000).contains(&mtu) {
        findings.add(
            fields.spot_of("mtu"),
            format!("mtu: {mtu} is not {expected}"),
            format!("write {expected}"),
        );
    }
    Some(mtu)
}

/// Reads the rate of one kind of link, and its impairment if the kind can have one.
fn link(
    fields: &mut MappingReader<'_>,
    name: &'static str,
    has_relay: bool,
    findings: &mut TopologyProblems,
) -> (Option<LinkRate>, Option<Impairment>) {
    let Some(mut link) = fields
        .tree(name)
        .and_then(|tree| MappingReader::open(tree, name, findings))
    else {
        return (None, None);
    };
    let rate = link.parsed("rate", RATE, findings);
    let impairment = if has_relay {
        impairment(&mut link, findings)
    } else {
        None
    };
    link.close(findings);
    (rate, impairment)
}

/// Reads delay, jitter and loss. Returns `None` if none of them is written.
fn impairment(
    fields: &mut MappingReader<'_>,
    findings: &mut TopologyProblems,
) -> Option<Impairment> {
    let is_written = ["delay", "jitter", "loss"]
        .iter()
        .any(|name| fields.tree(name).is_some());
    let delay = fields
        .parsed("delay", DELAY, findings)
        .map_or(std::time::Duration::ZERO, |delay: Delay| delay.0);
    let jitter = fields
        .parsed("jitter", DELAY, findings)
        .map_or(std::time::Duration::ZERO, |jitter: Delay| jitter.0);
    let loss = fields
        .parsed("loss", "a share of frames such as 1% or 0.05%", findings)
        .map_or(0, |loss: LossRate| loss.parts_per_million);
    if jitter > delay {
        findings.add(
            fields.spot_of("jitter"),
            format!("jitter: {jitter:?} is more than the delay, {delay:?}"),
            "write at most the delay",
        );
    }
    is_written.then_some(Impairment {
        delay,
        jitter,
        loss_ppm: loss,
    })
}

fn component(
    tree: &YamlNode,
    kind: UnderlayHostKind,
    file: &Path,
    findings: &mut TopologyProblems,
) -> Option<Component> {
    let mut fields = MappingReader::open(tree, kind.owner(), findings)?;
    let spot = fields.spot;
    let name = match kind {
        // The controller has a fixed name, because other hosts are configured with it.
        UnderlayHostKind::Controller => Some("controller".to_owned()),
        UnderlayHostKind::Edge
        | UnderlayHostKind::Gateway
        | UnderlayHostKind::KeyServer
        | UnderlayHostKind::Host => fields.must_text("name", findings),
    };
    let az = fields.must_text("az", findings);
    // A field is read only for kinds that have it; `close` reports it as unknown for others.
    let workers = match kind {
        UnderlayHostKind::Gateway => fields.parsed("workers", COUNT, findings).unwrap_or(1),
        UnderlayHostKind::Controller
        | UnderlayHostKind::Edge
        | UnderlayHostKind::KeyServer
        | UnderlayHostKind::Host => 1,
    };
    let receive_cores = match kind {
        // 0 leaves receive packet steering off, as it is on a host by default.
        UnderlayHostKind::Gateway => fields.parsed("receiveCores", COUNT, findings).unwrap_or(0),
        UnderlayHostKind::Controller
        | UnderlayHostKind::Edge
        | UnderlayHostKind::KeyServer
        | UnderlayHostKind::Host => 0,
    };
    let backend = if kind == UnderlayHostKind::Gateway {
        fields.text("backend", findings)
    } else {
        None
    };
    let mtu = if matches!(kind, UnderlayHostKind::Edge | UnderlayHostKind::Gateway) {
        link_mtu(&mut fields, findings)
    } else {
        None
    };
    let outside = kind == UnderlayHostKind::Host && fields.flag("outside", false, findings);
    let tenant = if kind == UnderlayHostKind::KeyServer {
        fields.text("tenant", findings)
    } else {
        None
    };
    let tls_dir = if kind == UnderlayHostKind::KeyServer {
        tls_dir(&mut fields, file, findings)
    } else {
        None
    };
    let rate = fields.parsed("rate", RATE, findings);
    let impairment = impairment(&mut fields, findings);
    // Programs of the mesh restart like services; a plain host may run a job that ends.
    let default = if kind == UnderlayHostKind::Host {
        Restart::Never
    } else {
        Restart::Always
    };
    let process = process(&mut fields, default, findings);
    fields.close(findings);
    // A plain host without a command has no process and only waits for `exec`.
    let process = (kind.is_built_in() || !process.command.is_empty()).then_some(process);
    Some(Component {
        name: name?,
        az: az?,
        process,
        rate,
        impairment,
        mtu,
        workers,
        receive_cores,
        backend,
        outside,
        tenant,
        tls_dir,
        spot,
    })
}

/// Reads a directory whose path is relative to the topology's file.
fn tls_dir(
    fields: &mut MappingReader<'_>,
    file: &Path,
    findings: &mut TopologyProblems,
) -> Option<PathBuf> {
    let text = fields.text("tlsDir", findings)?;
    let path = file.parent().unwrap_or(Path::new("/")).join(&text);
    if !path.is_dir() {
        findings.add(
            fields.spot_of("tlsDir"),
            format!("tlsDir: {text} is not a directory"),
            "name an existing directory",
        );
    }
    Some(path)
}

/// Reads the fields that every process has. `command` may be empty here.
fn process(
    fields: &mut MappingReader<'_>,
    default: Restart,
    findings: &mut TopologyProblems,
) -> ProcessTemplate {
    ProcessTemplate {
        command: fields.texts("command", findings),
        args: fields.texts("args", findings),
        env: fields.table("env", findings),
        restart: fields
            .parsed("restart", "never or always", findings)
            .unwrap_or(default),
        readiness: fields
            .tree("readiness")
            .and_then(|tree| readiness(tree, findings)),
        spot: fields.spot_of("command"),
    }
}

fn readiness(tree: &YamlNode, findings: &mut TopologyProblems) -> Option<Readiness> {
    let mut fields = MappingReader::open(tree, "readiness", findings)?;
    let spot = fields.spot;
    let period = fields.parsed("periodMs", "a number of milliseconds", findings);
    let http = fields.tree("http").map(|tree| http_check(tree, findings));
    let tcp = fields.tree("tcp").map(|tree| tcp_check(tree, findings));
    let exec = fields.texts("exec", findings);
    let exec = (!exec.is_empty()).then_some(Some(Check::Exec(exec)));
    fields.close(findings);
    let mut checks: Vec<Option<Check>> = [http, tcp, exec].into_iter().flatten().collect();
    if checks.len() != 1 {
        findings.add(
            spot,
            "readiness needs exactly one of http, tcp, exec",
            "write e.g. `readiness: {tcp: {port: 9080}}`",
        );
        return None;
    }
    let period_ms = period.unwrap_or(Readiness::PERIOD_MS_DEFAULT);
    // A shorter period would be only load, a longer one a mistyped number.
    if !(10..=60_000).contains(&period_ms) {
        findings.add(
            spot,
            format!("periodMs: {period_ms} is out of range"),
            "write 10 to 60000",
        );
    }
    Some(Readiness {
        check: checks.remove(0)?,
        period_ms,
    })
}

fn http_check(tree: &YamlNode, findings: &mut TopologyProblems) -> Option<Check> {
    let mut fields = MappingReader::open(tree, "http", findings)?;
    let port = port(&mut fields, findings);
    let path = fields
        .text("path", findings)
        .unwrap_or_else(|| "/".to_owned());
    if !path.starts_with('/') || path.contains(char::is_whitespace) {
        findings.add(
            fields.spot_of("path"),
            format!("path: {path:?} is not a path"),
            "write `path: /…` without blanks",
        );
    }
    fields.close(findings);
    Some(Check::Http { port: port?, path })
}

fn tcp_check(tree: &YamlNode, findings: &mut TopologyProblems) -> Option<Check> {
    let mut fields = MappingReader::open(tree, "tcp", findings)?;
    let port = port(&mut fields, findings);
    fields.close(findings);
    Some(Check::Tcp { port: port? })
}

fn port(fields: &mut MappingReader<'_>, findings: &mut TopologyProblems) -> Option<u16> {
    if fields.tree("port").is_none() {
        fields.report_missing("port", findings);
        return None;
    }
    fields
        .parsed::<std::num::NonZeroU16>("port", "a port from 1 to 65535", findings)
        .map(std::num::NonZeroU16::get)
}

fn tenant(tree: &YamlNode, file: &Path, findings: &mut TopologyProblems) -> Option<TenantTopology> {
    let mut fields = MappingReader::open(tree, "a tenant", findings)?;
    let spots = TenantPositions {
        tenant: fields.spot,
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
    // Deny is the default of Tenant objects, too.
    let outside = fields
        .parsed_renamed(
            ("outboundTrafficPolicy", "outside"),
            "Deny or Passthrough",
            findings,
        )
        .unwrap_or(OutsideTraffic::Deny);
    let pods = pod_cidrs(&mut fields, findings);
    let gateway_cidrs = gateway_cidrs(&mut fields, findings);
    let ingress_network = fields.flag("ingressNetwork", false, findings);
    let home_az = fields.text("homeAz", findings);
    let dns = fields.flag("dns", false, findings);
    let keys = fields.tree("keys").and_then(|tree| keys(tree, findings));
    let service_cidrs = cidrs(&mut fields, "serviceCidrs", findings)
        .into_iter()
        .map(|(_, cidr)| cidr)
        .collect();
    let config = config_files(&mut fields, file, findings);
    let nodes = collect(fields.list("nodes", findings), findings, node);
    let pods_list = collect(fields.list("pods", findings), findings, pod);
    fields.close(findings);
    // Only the end of the function returns early, so that all mistakes of the tenant are reported.
    let (pods4, pods6) = pods?;
    Some(TenantTopology {
        name: name?,
        vni: vni?,
        trust_domain: trust_domain?,
        outside,
        pods4,
        pods6,
        service_cidrs,
        gateway_cidrs: gateway_cidrs?,
        ingress_network,
        home_az,
        dns,
        keys,
        config,
        nodes,
        pods: pods_list,
        spots,
    })
}

/// Reads `keys`, whose fields are those of a Tenant object. Missing fields get the mesh's own
/// defaults.
fn keys(tree: &YamlNode, findings: &mut TopologyProblems) -> Option<TenantKeysTopology> {
    let mut fields = MappingReader::open(tree, "keys", findings)?;
    let keys = TenantKeysTopology {
        location: fields
            .parsed_renamed(("location", "place"), "Local or KeyServer", findings)
            .unwrap_or(TopologyKeyLocation::Local),
        algorithm: fields
            .parsed("algorithm", "EcdsaP256 or Rsa2048", findings)
            .unwrap_or(TopologyKeyAlgorithm::EcdsaP256),
        fallback: fields
            .parsed("fallback", "Refuse or Local", findings)
            .unwrap_or(TopologyKeyFallback::Refuse),
    };
    fields.close(findings);
    Some(keys)
}

fn vni(fields: &mut MappingReader<'_>, findings: &mut TopologyProblems) -> Option<u32> {
    const EXPECTED: &str = "a VXLAN network identifier from 1 to 16777215";
    if fields.tree("vni").is_none() {
        fields.report_missing("vni", findings);
        return None;
    }
    let vni: u32 = fields.parsed("vni", EXPECTED, findings)?;
    if !(1..1 << 24).contains(&vni) {
        findings.add(
            fields.spot_of("vni"),
            format!("vni: {vni} is not {EXPECTED}"),
            "choose a smaller one",
        );
        return None;
    }
    Some(vni)
}

fn cidrs(
    fields: &mut MappingReader<'_>,
    name: &'static str,
    findings: &mut TopologyProblems,
) -> Vec<(FilePosition, IpNet)> {
    let items = fields.list(name, findings);
    collect(items, findings, |tree, findings| {
        let Some(text) = tree.scalar_text() else {
            findings.add(
                tree.spot,
                format!("an entry of {name} is not a CIDR"),
                "write e.g. 10.1.0.0/16",
            );
            return None;
        };
        match text.parse::<IpNet>() {
            Ok(cidr) if cidr.addr() == cidr.network() => Some((tree.spot.into(), cidr)),
            Ok(cidr) => {
                findings.add(
                    tree.spot,
                    format!("{name}: {text} has bits set beyond its prefix length"),
                    format!("write {}", cidr.trunc()),
                );
                None
            }
            Err(_) => {
                findings.add(
                    tree.spot,
                    format!("{name}: {text:?} is not a CIDR"),
                    "write e.g. 10.1.0.0/16",
                );
                None
            }
        }
    })
}

/// One IPv4 and one IPv6 range, each with its position in the file.
type CidrPair = (
    (FilePosition, ipnet::Ipv4Net),
    (FilePosition, ipnet::Ipv6Net),
);

/// Reads a list of exactly one IPv4 and one IPv6 range.
fn pair(
    fields: &mut MappingReader<'_>,
    name: &'static str,
    example: &str,
    findings: &mut TopologyProblems,
) -> Option<CidrPair> {
    let spot = fields.spot_of(name);
    let list = cidrs(fields, name, findings);
    if list.len() < fields.list(name, findings).len() {
        // An entry was refused and has been reported.
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
        findings.add(
            spot,
            format!("{name} needs exactly one IPv4 and one IPv6 range"),
            format!("write e.g. {example}"),
        );
        return None;
    };
    Some((*four, *six))
}

/// Reads the pod ranges, which must be large enough for the plan's slots.
fn pod_cidrs(
    fields: &mut MappingReader<'_>,
    findings: &mut TopologyProblems,
) -> Option<(ipnet::Ipv4Net, ipnet::Ipv6Net)> {
    let ((spot4, pods4), (spot6, pods6)) = pair(
        fields,
        "podCidrs",
        "[10.1.0.0/16, \"fd00:101::/64\"]",
        findings,
    )?;
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
        findings.add(
            spot6,
            format!("podCidrs: {pods6} cannot be split"),
            "write a prefix length from 16 to 96: a /112 for each node",
        );
        large_enough = false;
    }
    large_enough.then_some((pods4, pods6))
}

/// Reads the gateway ranges, which must be large enough that an AZ's eighth has some addresses.
/// Only tier worlds have them.
fn gateway_cidrs(
    fields: &mut MappingReader<'_>,
    findings: &mut TopologyProblems,
) -> Option<Option<(ipnet::Ipv4Net, ipnet::Ipv6Net)>> {
    if fields.tree("gatewayCidrs").is_none() {
        return Some(None);
    }
    let ((spot4, four), (spot6, six)) = pair(
        fields,
        "gatewayCidrs",
        "[10.1.192.0/18, \"fd00:101:0:c::/64\"]",
        findings,
    )?;
    let mut large_enough = true;
    for (spot, shown, length, range) in [
        (spot4, four.to_string(), four.prefix_len(), 8..=26),
        (spot6, six.to_string(), six.prefix_len(), 16..=112),
    ] {
        if !range.contains(&length) {
            let fix = format!(
                "write a prefix length from {} to {}: each AZ gets one eighth",
                range.start(),
                range.end()
            );
            findings.add(spot, format!("gatewayCidrs: {shown} cannot be split"), fix);
            large_enough = false;
        }
    }
    large_enough.then_some(Some((four, six)))
}

/// Returns the YAML files that `config` names, with directories expanded. Paths are relative to the
/// topology's file.
fn config_files(
    fields: &mut MappingReader<'_>,
    file: &Path,
    findings: &mut TopologyProblems,
) -> Vec<PathBuf> {
    let base = file.parent().unwrap_or(Path::new("/"));
    let mut files = Vec::new();
    for item in fields.list("config", findings) {
        let Some(text) = item.scalar_text() else {
            findings.add(
                item.spot,
                "an entry of config is not a path",
                "write the path of a YAML file or directory",
            );
            continue;
        };
        match yaml_files(&base.join(text)) {
            Ok(found) if found.is_empty() => {
                findings.add(
                    item.spot,
                    format!("config: {text} contains no .yaml file"),
                    "name a YAML file or a directory of them",
                );
            }
            Ok(found) => files.extend(found),
            Err(error) => {
                findings.add(
                    item.spot,
                    format!("config: {text}: {error}"),
                    "name an existing YAML file or directory",
                );
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
        if path
            .extension()
            .is_some_and(|extension| extension == "yaml" || extension == "yml")
        {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn node(tree: &YamlNode, findings: &mut TopologyProblems) -> Option<NodeTopology> {
    let mut fields = MappingReader::open(tree, "a node", findings)?;
    let spot = fields.spot;
    let name = fields.must_text("name", findings);
    let az = fields.must_text("az", findings);
    let proxy = fields.flag("proxy", true, findings);
    let rate = fields.parsed("rate", RATE, findings);
    let impairment = impairment(&mut fields, findings);
    let process = process(&mut fields, Restart::Always, findings);
    fields.close(findings);
    Some(NodeTopology {
        name: name?,
        az: az?,
        proxy: proxy.then_some(process),
        rate,
        impairment,
        spot,
    })
}

fn pod(tree: &YamlNode, findings: &mut TopologyProblems) -> Option<PodTemplate> {
    let mut fields = MappingReader::open(tree, "a pod", findings)?;
    let spot = fields.spot;
    let name = fields.must_text("name", findings);
    let nodes = pod_nodes(&mut fields, findings);
    // The position must be that of the field that the file has: `node` or `nodes`.
    let nodes_name = if fields.tree("node").is_some() {
        "node"
    } else {
        "nodes"
    };
    let nodes_spot = fields.spot_of(nodes_name);
    // As in Kubernetes, one replica is the default.
    let replicas = fields.parsed("replicas", COUNT, findings).unwrap_or(1);
    // Half of a world's hosts (`HOSTS_MAX`); it only refuses a mistyped number.
    if !(1..=1000).contains(&replicas) {
        findings.add(
            fields.spot_of("replicas"),
            format!("replicas: {replicas} is not {COUNT}"),
            format!("write {COUNT}"),
        );
    }
    // As in Kubernetes, both names are `default` unless they are written.
    let namespace = fields
        .text("namespace", findings)
        .unwrap_or_else(|| "default".to_owned());
    let service_account = fields
        .text("serviceAccount", findings)
        .unwrap_or_else(|| "default".to_owned());
    let labels = fields.table("labels", findings);
    let workload_api = fields.flag("workloadApi", false, findings);
    let rate = fields.parsed("rate", RATE, findings);
    let mtu = link_mtu(&mut fields, findings);
    let process = process(&mut fields, Restart::Always, findings);
    if process.command.is_empty() {
        fields.report_missing("command", findings);
    }
    fields.close(findings);
    // Only now, so that all problems of the pod are reported at once.
    let nodes = nodes?;
    Some(PodTemplate {
        name: name?,
        namespace,
        nodes,
        nodes_spot,
        replicas,
        service_account,
        labels,
        workload_api,
        process,
        rate,
        mtu,
        spot,
    })
}

/// Reads `node: a-n1` or `nodes: [a-n1, a-n2]`.
fn pod_nodes(
    fields: &mut MappingReader<'_>,
    findings: &mut TopologyProblems,
) -> Option<Vec<String>> {
    let one = fields.text("node", findings);
    let many = fields.texts("nodes", findings);
    match (one, many.is_empty()) {
        (Some(node), true) => Some(vec![node]),
        (None, false) => Some(many),
        (Some(_), false) => {
            findings.add(
                fields.spot_of("nodes"),
                "a pod has both `node` and `nodes`",
                "keep one of them",
            );
            None
        }
        (None, true) => {
            fields.report_missing("node", findings);
            None
        }
    }
}

/// Reads one pod outside a topology. It checks what the pod alone can show; the running world
/// checks the rest.
pub(crate) fn pod_alone(tree: &YamlNode, file: &Path) -> Result<PodTemplate, Vec<TopologyProblem>> {
    let mut findings = TopologyProblems::of(file.into());
    let pod = pod(tree, &mut findings);
    if let Some(pod) = &pod {
        crate::check::pod_names(pod, &mut findings);
    }
    match pod {
        Some(pod) if findings.is_empty() => Ok(pod),
        _ => Err(findings.into_sorted()),
    }
}
