//! A peer whose certificate is revoked or expires while its connection is open, seen from both
//! sides.

use std::time::Duration;

use canal_identity::ServerIdentity;
use canal_runtime::drain;
use canal_testing::identity;
use canal_tls::{Certificate, Credential};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::time::Instant;

use super::fixture::{ALICE, BOB, HboneFixture, echo, hold, ms, run, until};
use crate::{ConnectResult, HboneError, PoolConfig, ServerConfig, serve};

#[test]
fn a_revoked_client_is_cut_off_at_once_and_cannot_come_back() {
    run(async {
        let (fixture, _t) =
            HboneFixture::new(PoolConfig::default(), ServerConfig::default(), hold).await;
        fixture.revoke(&[]);
        fixture.renew.replace(fixture.numbered(ALICE, 7));
        let mut s = fixture.open().await.unwrap().stream;
        let start = Instant::now();
        fixture.revoke(&[7]);
        assert!(s.read_u8().await.is_err());
        canal_timing::assert_time(
            "time until a revoked client's stream ends",
            start.elapsed(),
            ms(1000),
        );
        until("the server says why", || {
            fixture.metric("canal_hbone_closed_total{side=\"server\",reason=\"revoked\"}") == 1
        })
        .await;
        assert!(
            fixture.served.borrow()[0]
                .clone()
                .unwrap_err()
                .contains("not trusted any more: revoked")
        );
        drop(s);
        assert!(matches!(
            fixture.open().await,
            Err(HboneError::RefusedByPeer { .. })
        ));
        // After renewal the identity is accepted as before.
        fixture.renew.replace(fixture.numbered(ALICE, 8));
        assert!(fixture.open().await.is_ok());
    });
}

#[test]
fn an_unrevoked_client_never_notices() {
    run(async {
        let (fixture, _t) =
            HboneFixture::new(PoolConfig::default(), ServerConfig::default(), echo).await;
        fixture.renew.replace(fixture.numbered(ALICE, 7));
        let mut s = fixture.open().await.unwrap().stream;
        fixture.revoke(&[8, 9]);
        fixture.revoke(&[]);
        s.write_all(b"still here").await.unwrap();
        s.shutdown().await.unwrap();
        let mut got = String::new();
        s.read_to_string(&mut got).await.unwrap();
        assert_eq!(got, "still here");
    });
}

#[test]
fn pooled_connections_to_a_revoked_server_are_cut() {
    run(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let fixture = HboneFixture::towards(listener.local_addr().unwrap(), PoolConfig::default());
        // This server has not received its own revocation.
        let server = ServerIdentity::new(
            // 12 is the certificate's serial number.
            "alpha".parse().unwrap(),
            Credential::fixed(fixture.numbered(BOB, 12)),
        );
        let (counters, (_trigger, drain)) = (fixture.counters.clone(), drain::tree());
        tokio::task::spawn_local(async move {
            let (tls, peer) = server
                .accept(listener.accept().await.unwrap().0)
                .await
                .unwrap();
            let connect =
                |asked: ConnectResult| drop(tokio::task::spawn_local(hold(asked.unwrap())));
            // The client's side is what the test checks.
            let _ = serve(
                tls,
                peer,
                &ServerConfig::default(),
                &counters,
                drain,
                connect,
            )
            .await;
        });
        let mut s = fixture.open().await.unwrap().stream;
        let start = Instant::now();
        fixture.revoke(&[12]);
        assert_eq!(
            s.read_u8().await.unwrap_err().kind(),
            std::io::ErrorKind::ConnectionReset
        );
        canal_timing::assert_time(
            "time until a stream to a revoked server ends",
            start.elapsed(),
            // A peer is revoked within a second (`docs/timing.md`).
            ms(1000),
        );
        until("it leaves the pool", || fixture.pool.size().0 == 0).await;
        assert_eq!(
            fixture.metric("canal_hbone_closed_total{side=\"client\",reason=\"revoked\"}"),
            1
        );
    });
}

/// Time that open streams have here after the peer's certificate has expired. The waits of 1.5 s
/// and 3 s for a refused stream have to end before.
const EXPIRED_PEER_TIMEOUT: Duration = Duration::from_secs(6);

/// Returns the lifetime of a certificate that expires during the test. The gate has time to connect
/// before.
fn short_life() -> Duration {
    Duration::from_secs(if canal_timing::is_timed() { 3 } else { 8 })
}

/// Issues a certificate for `id` that expires after [`short_life`].
fn short(fixture: &HboneFixture, id: &str) -> Certificate {
    let end = std::time::SystemTime::now() + short_life();
    let i = fixture
        .ca
        .issue_with(&identity(id), |p| p.not_after = end.into());
    Certificate::from_pem(&i.key, &i.chain, &fixture.ca.root_pem()).unwrap()
}

#[test]
fn a_clients_connection_ends_with_its_certificate() {
    run(async {
        canal_tls::testing::set_expired_peer_timeout(EXPIRED_PEER_TIMEOUT);
        let (fixture, _t) =
            HboneFixture::new(PoolConfig::default(), ServerConfig::default(), hold).await;
        fixture.renew.replace(short(&fixture, ALICE));
        let mut old = fixture.open().await.unwrap().stream;
        // After GOAWAY the pool has to reconnect, and no peer accepts the expired certificate.
        tokio::time::sleep(short_life() + ms(1500)).await;
        assert!(fixture.open().await.is_err());
        // A peer that renewed its certificate continues. Open streams get only the expiry timeout.
        fixture.renew.replace(fixture.numbered(ALICE, 8));
        let mut renewed = fixture.open().await.unwrap().stream;
        assert_eq!(
            fixture.metric("canal_hbone_closed_total{side=\"server\",reason=\"expired\"}"),
            0
        );
        let cut = tokio::time::timeout(
            canal_timing::deadline(EXPIRED_PEER_TIMEOUT + ms(2000)),
            old.read_u8(),
        )
        .await;
        assert!(cut.unwrap().is_err());
        until("the server says why", || {
            fixture.metric("canal_hbone_closed_total{side=\"server\",reason=\"expired\"}") == 1
        })
        .await;
        assert!(
            tokio::time::timeout(ms(200), renewed.read_u8())
                .await
                .is_err(),
            "the new connection stays"
        );
    });
}

#[test]
fn pooled_connections_end_with_the_servers_certificate() {
    run(async {
        canal_tls::testing::set_expired_peer_timeout(EXPIRED_PEER_TIMEOUT);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let fixture = HboneFixture::towards(listener.local_addr().unwrap(), PoolConfig::default());
        let server = ServerIdentity::new(
            "alpha".parse().unwrap(),
            Credential::fixed(short(&fixture, BOB)),
        );
        let (counters, (_trigger, drain)) = (fixture.counters.clone(), drain::tree());
        tokio::task::spawn_local(async move {
            let (tls, peer) = server
                .accept(listener.accept().await.unwrap().0)
                .await
                .unwrap();
            let connect =
                |asked: ConnectResult| drop(tokio::task::spawn_local(hold(asked.unwrap())));
            // The client's side is what the test checks.
            let _ = serve(
                tls,
                peer,
                &ServerConfig::default(),
                &counters,
                drain,
                connect,
            )
            .await;
            // This is a handshake with an expired certificate.
            let _ = server.accept(listener.accept().await.unwrap().0).await;
        });
        let mut old = fixture.open().await.unwrap().stream;
        // By then the certificate has expired, and the pool takes no stream on its connection.
        // X.509 times are whole seconds, hence more than one second on top.
        tokio::time::sleep(short_life() + ms(1500)).await;
        // A handshake that does not end counts as a refusal too: the client opens no stream on it.
        assert!(
            tokio::time::timeout(ms(3000), fixture.open())
                .await
                .map_or(true, |opened| opened.is_err()),
            "no new stream"
        );
        let cut = tokio::time::timeout(
            canal_timing::deadline(EXPIRED_PEER_TIMEOUT + ms(2000)),
            old.read_u8(),
        )
        .await;
        assert!(cut.unwrap().is_err());
        until("the pool says why", || {
            fixture.metric("canal_hbone_closed_total{side=\"client\",reason=\"expired\"}") == 1
        })
        .await;
    });
}
