//! Thousands of handshakes and signatures, good and bad, leave nothing behind: memory, files, requests.

mod rig;

use std::fs;

use canal_kit::testing::identity;
use canal_wire::keyrpc::{KeyName, Request, Role};
use rig::*;

fn resident() -> f64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<f64>().unwrap() / 1024.0
}

fn files() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Handshakes of both roles, signatures, handshakes that are given up, and a channel that comes and goes.
async fn round(rig: &Rig, channel: &Channel, peers: &Peers, handshakes: usize) {
    let input = verify_input();
    for n in 0..handshakes {
        let mut peer = if n % 2 == 0 { peers.client() } else { peers.server() };
        assert!(matches!(channel.shake(WEB, &mut peer).await, Said::Done { .. }));
        let key = KeyName::Identity(identity(WEB));
        let mut call = channel.ask(&Request::Sign { key, shown: None, scheme: 0x0403, deadline_ms: 0, input: &input });
        assert!(matches!(call.next().await, Said::Signature(_)));
        channel.forget(&call);
        let mut call = channel.begin(WEB, Role::Client, &[PEER], 0);
        assert!(matches!(call.next().await, Said::Send(_)));
        if n % 2 == 0 {
            channel.say(call.id, &Request::Abandon);
        } else {
            channel.say(call.id, &Request::More { bytes: b"garbage, not TLS" });
            call.refusal().await;
        }
        channel.forget(&call);
        if n % 100 == 0 {
            assert!(rig.channel(NODE).await.lives().await);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_left_behind() {
    let rig = Rig::start(Setting::default()).await;
    rig.tell(&rig.usual());
    rig.provisioned().await;
    let channel = rig.channel(NODE).await;
    let peers = Peers::new(rig.ca("alpha"), &rig.ca("alpha").issue_with(&identity(PEER), |_| {}), "alpha.example", &[WEB]);
    round(&rig, &channel, &peers, 500).await;
    let (memory, open) = (resident(), files());
    let begun = std::time::Instant::now();
    round(&rig, &channel, &peers, 5000).await;
    println!("10,000 handshakes, 5,000 signatures: {:?}, {memory:.1} MiB before, {:.1} after", begun.elapsed(), resident());
    assert!(resident() < memory + 8.0, "{memory} MiB before, {} after", resident());
    until("files are closed", || files() <= open + 2).await;
    until("nothing is under way", || rig.value("canal_key_under_way") == 0.0).await;
    assert_eq!(rig.value("canal_key_handshakes_under_way"), 0.0);
}
