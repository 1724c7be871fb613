//! Rebalance: after the head of a bucket moved to another replica, asks the connections of that
//! bucket to reconnect, a limited number at a time.
//!
//! HTTP/2 and HBONE clients get GOAWAY; HTTP/1.1 clients get `Connection: close` on the next
//! response. The clients then reach the new head. No stream or relay is ended. The redirector's
//! agent decides which buckets moved. Start with [`Rebalance::turn`].

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use canal_model::ids::ServiceId;
use canal_wire::tier;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

/// Interval between two batches of connections that begin a soft drain. A client's reconnect and
/// its handshake take far less on a quiet machine, so one batch is done before the next.
const ASK_INTERVAL: Duration = Duration::from_millis(100);
/// Time within which all of a service's connections on one worker begin their soft drain, if there
/// are not too many. That is 30 batches, which spreads the handshakes at the new head. Nobody
/// measured this value.
const ASK_WITHIN: Duration = Duration::from_secs(3);
/// Most connections of one service that one worker drains at once, because each reconnects with a
/// handshake. That makes 250 handshakes a second; a core makes more, so other connections are
/// served meanwhile.
const ASKED_AT_ONCE_MAX: usize = 25;
/// Connections accepted at least this long after the move are not drained: they were steered here
/// deliberately, because the new head did not accept them. By then the edges have the new table,
/// which the controller pushes to them. Nobody measured this value.
const SETTLE_WITHIN: Duration = Duration::from_secs(1);
/// Time after which a move ends, even if connections are left. A connection without a request for
/// as long is closed as idle. At 250 a second, 15,000 busy ones of a service have had their turn.
const MOVE_LASTS: Duration = Duration::from_secs(60);

/// Buckets of one service whose head recently moved to another replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MovedBuckets {
    /// Moved buckets, one bit per bucket.
    buckets: u128,
    since: Instant,
}

impl MovedBuckets {
    fn is_over(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.since) >= MOVE_LASTS
    }
}

/// Recently moved buckets by service ID.
pub(crate) type Moves = Arc<BTreeMap<u32, MovedBuckets>>;

/// Returns the moves after `left` left this replica and `returned` came back to it.
pub(crate) fn decide_moves(
    before: &Moves,
    service: ServiceId,
    left: u128,
    returned: u128,
    now: Instant,
) -> Moves {
    let mut moves: BTreeMap<u32, MovedBuckets> = before
        .iter()
        .filter(|(_, m)| !m.is_over(now))
        .map(|(id, m)| (*id, *m))
        .collect();
    let moved = moves.entry(service.get()).or_insert(MovedBuckets {
        buckets: 0,
        since: now,
    });
    moved.buckets = moved.buckets & !returned | left;
    if left != 0 {
        moved.since = now;
    }
    moves.retain(|_, moved| moved.buckets != 0);
    Arc::new(moves)
}

/// Soft drain of one client connection.
pub(crate) struct ConnectionDrain {
    is_draining: Cell<bool>,
    begun: Notify,
    accepted: Instant,
}

impl ConnectionDrain {
    pub(crate) fn new() -> Rc<Self> {
        Rc::new(Self {
            is_draining: Cell::new(false),
            begun: Notify::new(),
            accepted: Instant::now(),
        })
    }

    /// True while responses should announce that the connection closes.
    #[inline]
    pub(crate) fn is_draining(&self) -> bool {
        self.is_draining.get()
    }

    fn begin(&self) {
        self.is_draining.set(true);
        self.begun.notify_waiters();
    }

    /// Resolves when the soft drain of the connection begins; immediately if it has begun.
    pub(crate) async fn draining(&self) {
        let mut begun = std::pin::pin!(self.begun.notified());
        begun.as_mut().enable();
        if !self.is_draining.get() {
            begun.await;
        }
    }
}

/// A service ID and a bucket of its table.
type BucketKey = (u32, u8);

/// One worker's client connections, by the bucket that steered them here.
#[derive(Default)]
pub(crate) struct Rebalance {
    connections: RefCell<HashMap<BucketKey, Vec<Rc<ConnectionDrain>>>>,
}

/// Keeps a connection registered under its bucket until dropped.
pub(crate) struct BucketMembership {
    rebalance: Rc<Rebalance>,
    key: BucketKey,
    drain: Rc<ConnectionDrain>,
}

impl Drop for BucketMembership {
    fn drop(&mut self) {
        let mut connections = self.rebalance.connections.borrow_mut();
        let Some(members) = connections.get_mut(&self.key) else {
            return;
        };
        if let Some(at) = members
            .iter()
            .position(|member| Rc::ptr_eq(member, &self.drain))
        {
            members.swap_remove(at);
        }
        if members.is_empty() {
            connections.remove(&self.key);
        }
    }
}

impl Rebalance {
    /// Registers a connection that the tier steered here; `None` if its local address belongs to no
    /// service.
    pub(crate) fn enter(
        self: &Rc<Self>,
        client: SocketAddr,
        local: SocketAddr,
        drain: &Rc<ConnectionDrain>,
    ) -> Option<BucketMembership> {
        let service = tier::service_of(local.ip())?;
        let bucket = tier::bucket(client, local.port(), service);
        let key = (service.get(), u8::try_from(bucket).ok()?);
        self.connections
            .borrow_mut()
            .entry(key)
            .or_default()
            .push(drain.clone());
        Some(BucketMembership {
            rebalance: self.clone(),
            key,
            drain: drain.clone(),
        })
    }

    /// Begins the soft drain of the next connections of moved buckets. Returns their number, and
    /// whether more work remains.
    pub(crate) fn turn(&self, moves: &Moves, now: Instant) -> (usize, bool) {
        let (mut clients, mut is_busy) = (0, false);
        for (service, moved) in moves.iter().filter(|(_, moved)| !moved.is_over(now)) {
            let connections = self.connections.borrow();
            let buckets = (0..u128::BITS as u8).filter(|bucket| moved.buckets >> bucket & 1 == 1);
            let members = buckets
                .filter_map(|bucket| connections.get(&(*service, bucket)))
                .flatten();
            let staying = |member: &&Rc<ConnectionDrain>| {
                !member.is_draining() && member.accepted < moved.since + SETTLE_WITHIN
            };
            let mut staying: Vec<&Rc<ConnectionDrain>> = members.filter(staying).collect();
            staying.sort_by_key(|member| member.accepted);
            let count = decide_count(staying.len(), now.saturating_duration_since(moved.since));
            staying.iter().take(count).for_each(|member| member.begin());
            clients += count;
            // Connections that are not accepted yet may still belong to the bucket.
            is_busy |= staying.len() > count || now < moved.since + SETTLE_WITHIN;
        }
        (clients, is_busy)
    }
}

/// Returns how many of the remaining connections begin their soft drain now, so that all have begun
/// it within [`ASK_WITHIN`] of the move.
fn decide_count(staying: usize, since: Duration) -> usize {
    let turns = ASK_WITHIN
        .saturating_sub(since)
        .as_millis()
        .div_ceil(ASK_INTERVAL.as_millis())
        .max(1);
    staying
        .div_ceil(usize::try_from(turns).unwrap_or(1))
        .min(ASKED_AT_ONCE_MAX)
}

/// Runs `turn` at each change, and repeatedly while it reports more work, until it returns `None`
/// because the worker is gone.
pub(crate) async fn run(mut moves: watch::Receiver<Moves>, turn: impl Fn(&Moves) -> Option<bool>) {
    loop {
        let now = moves.borrow_and_update().clone();
        let Some(is_busy) = turn(&now) else { return };
        let changed = async {
            match is_busy {
                true => tokio::time::timeout(ASK_INTERVAL, moves.changed())
                    .await
                    .unwrap_or(Ok(())),
                false => moves.changed().await,
            }
        };
        if changed.await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WEB: &str = "240.0.0.7:15008";

    fn id(id: u32) -> ServiceId {
        ServiceId::new(id).unwrap()
    }

    struct RebalanceFixture {
        rebalance: Rc<Rebalance>,
        members: Vec<(u128, Rc<ConnectionDrain>, BucketMembership)>,
    }

    impl RebalanceFixture {
        /// Creates connections to a service from `count` ports.
        fn new(count: u16, local: &str) -> Self {
            let rebalance = Rc::new(Rebalance::default());
            let local: SocketAddr = local.parse().unwrap();
            let enter = |n| {
                let (client, drain) = (
                    SocketAddr::new("10.1.0.9".parse().unwrap(), 40_000 + n),
                    ConnectionDrain::new(),
                );
                let bit =
                    1 << tier::bucket(client, local.port(), tier::service_of(local.ip()).unwrap());
                (
                    bit,
                    drain.clone(),
                    rebalance.enter(client, local, &drain).unwrap(),
                )
            };
            Self {
                members: (0..count).map(enter).collect(),
                rebalance,
            }
        }

        fn draining(&self) -> usize {
            self.members
                .iter()
                .filter(|(_, drain, _)| drain.is_draining())
                .count()
        }
    }

    #[tokio::test]
    async fn only_connections_of_moved_buckets_leave_within_three_seconds() {
        let (web, other) = (
            RebalanceFixture::new(200, WEB),
            RebalanceFixture::new(50, "240.0.0.8:15008"),
        );
        let moved = u128::MAX / 3;
        let begun = Instant::now();
        let moves = decide_moves(&Moves::default(), id(7), moved, 0, begun);
        let concerned = web
            .members
            .iter()
            .filter(|(bit, ..)| moved & bit != 0)
            .count();
        assert!((60..140).contains(&concerned), "{concerned}");
        let mut turns = Vec::new();
        for turn in 0..30 {
            let (clients, is_busy) = web.rebalance.turn(&moves, begun + ASK_INTERVAL * turn);
            assert_eq!(other.rebalance.turn(&moves, begun).0, 0);
            turns.push(clients);
            if !is_busy {
                break;
            }
        }
        assert_eq!((web.draining(), other.draining()), (concerned, 0));
        assert!(
            web.members
                .iter()
                .all(|(bit, drain, _)| drain.is_draining() == (moved & bit != 0))
        );
        assert!(
            turns.len() > 20 && turns.iter().all(|clients| *clients <= 6),
            "{turns:?}"
        );
    }

    #[tokio::test]
    async fn many_connections_leave_at_a_bounded_pace_and_are_forgotten_as_they_close() {
        let mut web = RebalanceFixture::new(5000, WEB);
        let begun = Instant::now();
        let moves = decide_moves(&Moves::default(), id(7), u128::MAX, 0, begun);
        for turn in 0..40 {
            let (clients, is_busy) = web.rebalance.turn(&moves, begun + ASK_INTERVAL * turn);
            assert!(clients == ASKED_AT_ONCE_MAX && is_busy, "{clients}");
        }
        assert_eq!(
            web.rebalance.turn(&moves, begun + MOVE_LASTS),
            (0, false),
            "a move is over some time"
        );
        web.members.clear();
        assert!(web.rebalance.connections.borrow().is_empty());
    }

    #[tokio::test]
    async fn newer_connections_and_those_of_returned_buckets_stay() {
        let web = RebalanceFixture::new(100, WEB);
        let now = Instant::now();
        let before = now.checked_sub(SETTLE_WITHIN * 2).unwrap();
        let moves = decide_moves(&Moves::default(), id(7), u128::MAX, 0, before);
        assert_eq!(web.rebalance.turn(&moves, now), (0, false));
        let half = u128::MAX << 64;
        let moves = decide_moves(&moves, id(7), u128::MAX, 0, now);
        let moves = decide_moves(&moves, id(7), 0, half, now);
        assert!(web.rebalance.turn(&moves, now + ASK_WITHIN).0 > 0);
        for _ in 0..20 {
            web.rebalance.turn(&moves, now + ASK_WITHIN);
        }
        assert!(
            web.members
                .iter()
                .all(|(bit, drain, _)| drain.is_draining() == (half & bit == 0))
        );
        assert!(decide_moves(&moves, id(7), 0, u128::MAX, now).is_empty());
        let drain = ConnectionDrain::new();
        assert!(
            web.rebalance
                .enter(
                    "10.1.0.9:4711".parse().unwrap(),
                    "10.9.0.1:15008".parse().unwrap(),
                    &drain
                )
                .is_none()
        );
    }

    #[tokio::test]
    async fn a_connection_is_notified_before_and_after_the_move() {
        let drain = ConnectionDrain::new();
        let waits = drain.draining();
        let (_, ()) = tokio::join!(waits, async { drain.begin() });
        drain.draining().await;
    }
}
