//! Tests of the real process beside the real controller: an edge starts first, a replica registers,
//! and the plan reaches the maps. When the replica fails, the edge reports it to the controller.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use crate::fixture::{EdgeMachine, EdgeNetns, ReplicaPage};
use crate::frames::{OuterHeaders, SYN, read, tcp};
use canal_controller_core::{
    Controller, ControllerConfig, ControllerLimits, JwksOptions, TrustOptions,
};
use canal_model::program::ResourceKind;
use canal_offload::edge::{EdgeProgram as Loaded, EdgeProgramSettings};
use canal_runtime::drain;
use canal_runtime::metrics::Registry;
use canal_southbound_client::controller_client::ControllerEndpoint;
use canal_southbound_client::{Subscriber, SubscriberConfig};
use canal_wire::fleet::ReplicaReportRequest;
use canal_wire::fleet::fleet_client::FleetClient;
use sha2::{Digest, Sha256};
use tokio::runtime::{Builder, Runtime};

const CONFIG: &str = r#"
apiVersion: canal.mesh/v1
kind: Tenant
metadata: {name: alpha}
spec: {vni: 101, trustDomain: alpha.example, podCidrs: [10.1.0.0/17], gatewayCidrs: [10.1.192.0/18]}
---
apiVersion: v1
kind: Node
metadata: {name: n1, labels: {topology.kubernetes.io/zone: az1}, annotations: {canal.mesh/vtep-mac: '02:00:00:00:00:01'}}
spec: {podCIDR: 10.1.1.0/24}
status: {addresses: [{type: InternalIP, address: 172.16.0.1}]}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {clusterIP: 10.1.100.1, selector: {app: web}, ports: [{name: http, port: 80}]}
"#;

/// Starts the controller. Each principal's token is its name.
fn start(runtime: &Runtime, ns: &EdgeNetns, folder: &Path) -> (Controller, SocketAddr) {
    let at = |name: &str| folder.join(name);
    fs::create_dir_all(at("config/alpha")).unwrap();
    fs::write(at("config/alpha/all.yaml"), CONFIG).unwrap();
    let mut principals = String::new();
    for (token, kind) in [
        ("edge-1", "kind: edge, name: edge-1, az: az1"),
        ("r1", "kind: gateway, name: r1, az: az1, backend: b1"),
    ] {
        let hash: String = Sha256::digest(token)
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect();
        principals.push_str(&format!("- {{tokenSha256: {hash}, {kind}}}\n"));
    }
    fs::write(at("principals.yaml"), principals).unwrap();
    fs::write(at("token"), "edge-1").unwrap();
    fs::write(at("token-r1"), "r1").unwrap();
    let config = ControllerConfig {
        listen: "127.0.0.1:0".parse().unwrap(),
        admin: None,
        metrics: None,
        data_dir: at("controller"),
        config_dir: Some(at("config")),
        principals: at("principals.yaml"),
        infra_dir: at("infra"),
        svid_seconds: 3600,
        trust: TrustOptions::default(),
        jwks: JwksOptions::default(),
        limits: ControllerLimits::default(),
    };
    // A socket belongs to the namespace of the thread that creates it.
    let real_controller = ns.within(|| runtime.block_on(Controller::start(config)).unwrap());
    fs::copy(at("infra/root.pem"), at("root.pem")).unwrap();
    let address = real_controller.address();
    (real_controller, address)
}

/// Registers like a gateway, and reports until `end`.
fn live(folder: &Path, address: SocketAddr, end: &AtomicBool) {
    let controller = ControllerEndpoint {
        addresses: vec![address.to_string()],
        root: folder.join("root.pem"),
        token: folder.join("token-r1"),
    };
    // A runtime with one thread, so that its sockets are in this thread's namespace.
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let (_trigger, drain) = drain::tree();
        let settings = SubscriberConfig {
            controller: controller.clone(),
            node: "gateway~r1".into(),
            version: "1".into(),
            kinds: ResourceKind::ALL.to_vec(),
            snapshot: folder.join("r1-snapshot"),
        };
        let south = Subscriber::start(
            settings,
            &Registry::new(),
            drain,
            // Every resource is accepted.
            Box::new(|_, _| Ok(Vec::new())),
        );
        let connection = controller.connect(0).await.unwrap(); // The only address.
        let mut fleet = FleetClient::new(connection.channel.clone());
        while !end.load(Relaxed) {
            let state = ReplicaReportRequest {
                backend: "b1".into(),
                az: "az1".into(),
                underlay: "250.1.0.11".into(),
                // A replica reports the generation that it has received.
                generation: south.status().generation,
                ..ReplicaReportRequest::default()
            };
            // The orders in the answer are ignored: this replica has no maps to which they apply.
            let _ = fleet
                .replica_report(connection.request(state))
                .await
                .unwrap();
            // Ten times as often as a real replica at rest reports (`REPORT_MS`), so that the plan
            // is soon in force.
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    });
}

#[test]
fn the_controllers_plan_reaches_the_maps_and_the_edges_findings_the_controller() {
    let runtime = Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let mut real_controller = None;
    let m = EdgeMachine::beside(|ns, folder| {
        let (h, address) = start(&runtime, ns, folder);
        real_controller = Some(h);
        address
    });
    let real_controller = real_controller.unwrap();
    let page = ReplicaPage::open(&m.ns, [250, 1, 0, 11]);
    let edge = m.edge();
    edge.ready();
    let (end, address) = (AtomicBool::new(false), real_controller.address());
    std::thread::scope(|s| {
        s.spawn(|| m.ns.within(|| live(m.dir.path(), address, &end)));
        m.until("a plan in the maps", || {
            let dump = m.dump();
            let some = |what: &str| dump[what].as_array().is_some_and(|l| !l.is_empty());
            some("tables")
                && some("addresses")
                && some("prefixes")
                && dump["replicas"][0]["up"] == true
        });
        let dump = m.dump();
        let gateway = dump["addresses"][0]["address"]
            .as_str()
            .unwrap()
            .to_string();
        // A second copy of the program uses the agent's pinned maps. The check below depends on its
        // address alone.
        let settings = EdgeProgramSettings {
            address: [250, 1, 0, 1].into(),
            tunnels: 1,
            aggregate: true,
            tunnel_port: 40_000,
            mtu: 1450,
        };
        let loaded = Loaded::load(&settings, Some(&m.pins())).unwrap();
        let service_port = format!("{gateway}:80");
        m.until("the replica is a head", || {
            // The first packet of a session, as the client's node sends it.
            let frame = OuterHeaders::new("172.16.0.1", "250.1.0.1", 101).frame(&tcp(
                "10.1.1.5:4711",
                &service_port,
                SYN,
                b"",
            ));
            let sent = loaded.test_run(&frame).unwrap();
            // Verdict 7 is TC_ACT_REDIRECT, and 0xca0a1 the tier's VNI.
            sent.verdict == 7
                && read(&sent.frame).starts_with("250.1.0.1 > 250.1.0.11 vni 0xca0a1 ")
        });
        assert_eq!(dump["omittedCount"], 0, "{dump}");
        assert!(
            m.fetch("GET", 15020, "/metrics")
                .1
                .contains("canal_edge_reports_total{result=\"ok\"}")
        );

        // The edge's probe results come back from the controller as its decision.
        page.close(&m.ns);
        m.until("down at the controller", || {
            m.dump()["replicas"][0]["controllerUp"] == false
        });
        end.store(true, Relaxed);
    });
    assert_eq!(edge.terminate(), Some(0));
    runtime.block_on(real_controller.stop());
}
