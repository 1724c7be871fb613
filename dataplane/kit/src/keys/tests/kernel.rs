//! A key server's handshake over TCP where the kernel has TLS: both ends are handed over. Run inside such a kernel by the tests of the
//! record layer, never by itself.

use http::HeaderMap;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{LocalSet, spawn_local};

use super::*;
use crate::drain;
use crate::hbone::{Asked, HboneCounters, Incoming, Pool, PoolConfig, ServerConfig, Target, serve};

/// Both ends by key servers, each to the kernel; a client with its own key in between.
pub(crate) async fn both_ends_are_the_kernels(pair: (TcpStream, TcpStream), again: (TcpStream, TcpStream)) {
    let rig = Rig::new().await;
    let (server, _) = rig.pair(BOB, KeyPlace::KeyServer, false);
    let (_, remote) = rig.pair(ALICE, KeyPlace::KeyServer, false);
    let (_, local) = rig.pair(ALICE, KeyPlace::Local, false);
    let expected = bob();
    for (client, is_kernel, (near, far)) in [(remote, true, pair), (local, false, again)] {
        let (c, s) = tokio::join!(client.connect(near, &expected), server.accept(far));
        let (c, s) = (c.unwrap().0, s.unwrap().0);
        assert!(s.is_kernel() && s.is_remote() && c.is_kernel() == is_kernel);
        converse(c, s).await;
    }
    assert_eq!(rig.metric("canal_tls_kernel_connections_total{result=\"kernel\"}"), 3);
    assert_eq!(rig.metric("canal_tls_kernel_available"), 1);
}

/// Tunnels of a pool over connections whose keys are soon worn: none of them fails.
pub(crate) async fn worn_connections_are_followed_by_others(wear: bool) {
    let rig = Rig::new().await;
    let (server, _) = rig.pair(BOB, KeyPlace::KeyServer, false);
    let (_, source) = rig.pair(ALICE, KeyPlace::KeyServer, false);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let counters = HboneCounters::new(&rig.registry, &rig.registry.shard());
    let (_trigger, drain) = drain::tree();
    let (at_server, all) = (counters.clone(), LocalSet::new());
    all.spawn_local(async move {
        loop {
            let tcp = listener.accept().await.unwrap().0;
            let (server, counters, drain) = (server.clone(), at_server.clone(), drain.clone());
            spawn_local(async move {
                let (io, peer) = server.accept(tcp).await.unwrap();
                assert!(io.is_kernel());
                let each = |asked: Asked| drop(spawn_local(echo(asked.unwrap())));
                serve(io, peer, &ServerConfig::default(), &counters, drain, each).await.unwrap();
            });
        }
    });
    let pool = Pool::new(PoolConfig::default(), counters);
    let target = Target { source, expected: bob(), address, netns: None, mark: None };
    let tunnels = async {
        for n in 0..600u32 {
            let mut tunnel = pool.open(&target, &"10.1.1.2:80".parse().unwrap(), HeaderMap::new()).await.unwrap().stream;
            tunnel.write_all(&n.to_be_bytes()).await.unwrap();
            tunnel.shutdown().await.unwrap();
            let mut got = Vec::new();
            tunnel.read_to_end(&mut got).await.unwrap();
            assert_eq!(got, n.to_be_bytes());
        }
    };
    all.run_until(tunnels).await;
    let retired = rig.metric("canal_hbone_closed_total{side=\"client\",reason=\"retired\"}");
    assert_eq!(retired > 1, wear, "{}", rig.registry.render());
    assert_eq!(rig.metric("canal_hbone_closed_total{side=\"client\",reason=\"error\"}"), 0);
    assert_eq!(rig.metric("canal_hbone_closed_total{side=\"server\",reason=\"error\"}"), 0);
}

async fn echo(incoming: Incoming) {
    let (mut r, mut w) = tokio::io::split(incoming.accept(HeaderMap::new()).unwrap());
    tokio::io::copy(&mut r, &mut w).await.unwrap();
    w.shutdown().await.unwrap();
}
