//! Searches for the sessions that operators query: which queries are open, which sessions this
//! replica's kernel has for them, and when a search that failed is repeated. It decides nothing
//! about sessions. Start at [`SessionSearches::run`].

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use canal_wire::fleet::{FoundSession, FoundSessions, SessionQuery};
use canal_wire::tier::SESSION_QUERIES_MAX;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::counts::RedirectorCounters;
use crate::session_scan::{SessionScanError, SessionScanner};

/// Timeout of one search. Half of the 4 s that the controller waits for replicas, so that a late
/// result still arrives.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(2);
/// Wait before a failed search is repeated, as a multiple of its duration: repeated searches use a
/// tenth of a core, at most.
const RETRY_REST_FACTOR: u32 = 9;
/// Minimum wait before a failed search is repeated, for searches that fail at once.
/// It limits an open query to two searches per second.
const RETRY_WAIT_MIN: Duration = Duration::from_millis(500);

/// The operators' open queries, with the results of the searches.
#[derive(Default)]
pub(crate) struct SessionSearches {
    queries: Mutex<BTreeMap<u64, OpenQuery>>,
    changed: Notify,
}

struct OpenQuery {
    client: SocketAddr,
    state: SearchState,
}

enum SearchState {
    /// The query is to be searched for from this time on.
    Due(Instant),
    Found(FoundSessions),
}

/// Returns the wait before a search that failed after `took` is repeated.
fn decide_retry_wait(took: Duration) -> Duration {
    (took * RETRY_REST_FACTOR).max(RETRY_WAIT_MIN)
}

impl SessionSearches {
    fn queries(&self) -> MutexGuard<'_, BTreeMap<u64, OpenQuery>> {
        self.queries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the list of open queries. Those that were open already keep their result.
    pub(crate) fn set_queries(&self, queries: &[SessionQuery]) {
        let mut open = self.queries();
        open.retain(|id, _| queries.iter().any(|query| query.id == *id));
        for query in queries.iter().take(SESSION_QUERIES_MAX) {
            // A query whose client is not an address stays unanswered.
            if let Ok(client) = query.client.parse() {
                open.entry(query.id).or_insert(OpenQuery {
                    client,
                    state: SearchState::Due(Instant::now()),
                });
            }
        }
        drop(open);
        self.changed.notify_one();
    }

    /// Searches for one query after the other as they become due, and calls `found` after each
    /// result. Never returns.
    pub(crate) async fn run(
        &self,
        sockets: &SessionScanner,
        counts: &RedirectorCounters,
        found: impl Fn(),
    ) {
        loop {
            let Some((due, id, client)) = self.next() else {
                // `notify_one` stores a notice that came since `next`, so none is lost.
                self.changed.notified().await;
                continue;
            };
            // A new query may be due earlier, and this one may be withdrawn while it waits.
            if due > Instant::now() {
                tokio::select! {
                    () = tokio::time::sleep_until(due) => {}
                    () = self.changed.notified() => {}
                }
                continue;
            }
            let begun = Instant::now();
            let state = match search(sockets.clone(), client).await {
                Ok(sessions) => {
                    counts.search("ok");
                    SearchState::Found(FoundSessions {
                        query: id,
                        sessions,
                    })
                }
                Err(error) => {
                    counts.search(if matches!(error, SessionScanError::Late) {
                        "late"
                    } else {
                        "failed"
                    });
                    let wait = decide_retry_wait(begun.elapsed());
                    tracing::warn!(%client, %error, ?wait, "redirector: search for an operator's session failed; retrying after a pause");
                    SearchState::Due(Instant::now() + wait)
                }
            };
            if self.record(id, state) {
                found();
            }
        }
    }

    /// Returns the unanswered query that is due first: its time, ID and client.
    fn next(&self) -> Option<(Instant, u64, SocketAddr)> {
        let due = |(id, query): (&u64, &OpenQuery)| match query.state {
            SearchState::Due(at) => Some((at, *id, query.client)),
            SearchState::Found(_) => None,
        };
        self.queries().iter().filter_map(due).min()
    }

    /// Records the outcome of a search. Returns whether there is a result to report: a query may
    /// have been withdrawn meanwhile.
    fn record(&self, id: u64, state: SearchState) -> bool {
        let is_result = matches!(state, SearchState::Found(_));
        match self.queries().get_mut(&id) {
            Some(query) => {
                query.state = state;
                is_result
            }
            None => false,
        }
    }

    /// Returns the answers of all open queries.
    pub(crate) fn answers(&self) -> Vec<FoundSessions> {
        let answer = |query: &OpenQuery| match &query.state {
            SearchState::Found(sessions) => Some(sessions.clone()),
            SearchState::Due(_) => None,
        };
        self.queries().values().filter_map(answer).collect()
    }
}

async fn search(
    sockets: SessionScanner,
    client: SocketAddr,
) -> Result<Vec<FoundSession>, SessionScanError> {
    let until = std::time::Instant::now() + SEARCH_TIMEOUT;
    let found = tokio::task::spawn_blocking(move || sockets.find(client, until)).await;
    let sessions =
        found.unwrap_or_else(|panic| Err(SessionScanError::Io(std::io::Error::other(panic))))?;
    Ok(sessions
        .iter()
        .map(|(service, port)| FoundSession {
            service: service.get(),
            port: u32::from(*port),
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_search_rests_nine_times_its_duration_and_half_a_second_at_least() {
        let ms = Duration::from_millis;
        for (took, wait) in [(0, 500), (10, 500), (100, 900), (2000, 18_000)] {
            assert_eq!(
                decide_retry_wait(ms(took)),
                ms(wait),
                "a search of {took} ms"
            );
        }
    }

    #[tokio::test]
    async fn failed_search_is_repeated_after_its_wait_and_a_withdrawn_query_is_not() {
        let calls = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let counted = calls.clone();
        let scanner = SessionScanner::of(
            |_| Ok(crate::session_scan::OwnedSessions::new()),
            // The first search fails, and so does each one for port 1.
            move |client, _| match (
                client.port(),
                counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed),
            ) {
                (1, _) | (_, 0) => Err(SessionScanError::Late),
                _ => Ok(vec![(
                    canal_model::ids::ServiceId::new(7).unwrap(),
                    client.port(),
                )]),
            },
        );
        let searches = SessionSearches::default();
        let counts = RedirectorCounters::new(&canal_runtime::metrics::Registry::new());
        let query = |id, client: &str| SessionQuery {
            id,
            client: client.into(),
            ..SessionQuery::default()
        };
        searches.set_queries(&[query(1, "10.1.1.9:4000")]);
        let begun = Instant::now();
        let (reported, mut news) = tokio::sync::mpsc::unbounded_channel();
        let run = searches.run(&scanner, &counts, || reported.send(()).unwrap());
        tokio::select! {
            () = run => {}
            _ = news.recv() => {}
        }
        let waited = begun.elapsed();
        assert!(waited >= RETRY_WAIT_MIN, "repeated after {waited:?}");
        assert_eq!(
            searches
                .answers()
                .iter()
                .map(|answer| answer.query)
                .collect::<Vec<_>>(),
            [1]
        );
        searches.set_queries(&[query(2, "10.1.1.9:1")]);
        assert!(
            searches.answers().is_empty(),
            "the first query is withdrawn"
        );
        assert!(!searches.record(1, SearchState::Due(begun)));
        assert_eq!(searches.next().map(|(_, id, _)| id), Some(2));
    }
}
