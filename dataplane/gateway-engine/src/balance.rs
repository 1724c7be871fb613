//! Phase *balance*: selects the endpoint of a set that gets the request.
//!
//! Without a load balancer of its own, a set has the default: the less busy of two random endpoints
//! (Mitzenmacher, "The Power of Two Choices"). Recently failed endpoints are skipped. Near ones are
//! preferred if configured, except by hashes, for which all replicas must agree. The decision
//! depends only on the arguments, which include the random numbers. Start with [`endpoint`].

use std::net::IpAddr;
use std::rc::Rc;

use canal_gateway_config::{HashBalancer, LoadBalancing};
use canal_gateway_http::proxy_error::ProxyError;
use canal_model::load_balancing::HashKey;
use smallvec::SmallVec;
use tokio::time::Instant;

use crate::endpoints::{EndpointSetState, SelectedEndpoint};

/// Positions of the endpoints that a request has already tried.
pub(crate) type TriedEndpoints = SmallVec<[usize; 3]>;

/// Most entries of a hash table that are looked at for one request. It bounds the CPU of a request
/// while most endpoints are ejected; beyond it, the hash selects among the endpoints that can be
/// used.
const HASH_ENTRIES_MAX: usize = 64;

/// Selects an endpoint for a client with this address; `None` stands for the gateway itself. `hash`
/// returns the hash of the part of the request that a key names. Counts the endpoint as busy until
/// the selection is dropped.
pub(crate) fn endpoint(
    view: &Rc<EndpointSetState>,
    tried: &TriedEndpoints,
    client: Option<IpAddr>,
    now: Instant,
    mut random: impl FnMut() -> u64,
    hash: impl FnOnce(&HashKey) -> Option<u64>,
) -> Result<SelectedEndpoint, ProxyError> {
    if !view.set.exists {
        return Err(ProxyError::NoService);
    }
    let at = match &view.set.load_balancing {
        LoadBalancing::LeastRequest => decide(view, tried, now, &mut random),
        LoadBalancing::RoundRobin => in_turn(view, tried, now, &mut random),
        LoadBalancing::Random => any(view, tried, now, &mut random),
        LoadBalancing::ConsistentHash(balancer) => {
            // As in Envoy, a request without a hash goes to a random endpoint.
            let hash = hash(&balancer.key).unwrap_or_else(random);
            hashed(view, tried, now, balancer, hash)
        }
    };
    at.map(|at| SelectedEndpoint::new(view, at, client))
        .ok_or(ProxyError::NoEndpoint)
}

fn decide(
    view: &EndpointSetState,
    tried: &TriedEndpoints,
    now: Instant,
    random: &mut impl FnMut() -> u64,
) -> Option<usize> {
    match view.states.len() {
        0 => return None,
        1 => return Some(0),
        _ => {}
    }
    // The preferred AZ comes first; other AZs serve only if no endpoint in it is usable.
    if !view.near.is_empty()
        && let Some(at) = among(view, tried, now, random, view.near.len(), |n| {
            view.near[n] as usize
        })
    {
        return Some(at);
    }
    let all = view.states.len();
    // If all endpoints are ejected or were tried, a random one is better than none.
    among(view, tried, now, random, all, |n| n).or_else(|| Some(below(random(), all)))
}

/// The less busy of two random usable endpoints. If neither is usable, the least busy of all usable
/// ones.
fn among(
    view: &EndpointSetState,
    tried: &TriedEndpoints,
    now: Instant,
    random: &mut impl FnMut() -> u64,
    len: usize,
    place: impl Fn(usize) -> usize,
) -> Option<usize> {
    let usable = |at: &usize| !tried.contains(at) && !view.states[*at].is_ejected(now);
    let busy = |at: &usize| view.states[*at].in_flight.get();
    let first = below(random(), len);
    let second = if len > 1 {
        (first + 1 + below(random(), len - 1)) % len
    } else {
        first
    };
    let two = [place(first), place(second)];
    two.into_iter()
        .filter(usable)
        .min_by_key(busy)
        .or_else(|| (0..len).map(&place).filter(usable).min_by_key(busy))
}

/// The usable endpoint that is next in turn.
#[inline(never)]
fn in_turn(
    view: &EndpointSetState,
    tried: &TriedEndpoints,
    now: Instant,
    random: &mut impl FnMut() -> u64,
) -> Option<usize> {
    let all = view.states.len();
    let is_usable = |at: &usize| !tried.contains(at) && !view.states[*at].is_ejected(now);
    // Workers that all began at the first endpoint would meet there.
    let turn = view.turn.get().unwrap_or_else(|| below(random(), all));
    let turn = if turn < all { turn } else { 0 };
    let (before, from) = view
        .near
        .split_at(view.near.partition_point(|at| (*at as usize) < turn));
    let mut near = from.iter().chain(before).map(|at| *at as usize);
    let at = near
        .find(is_usable)
        .or_else(|| (turn..all).chain(0..turn).find(is_usable))
        .or((all > 0).then_some(turn))?;
    view.turn.set(Some(at + 1));
    Some(at)
}

/// A random usable endpoint.
#[inline(never)]
fn any(
    view: &EndpointSetState,
    tried: &TriedEndpoints,
    now: Instant,
    random: &mut impl FnMut() -> u64,
) -> Option<usize> {
    let all = view.states.len();
    let is_usable = |at: &usize| !tried.contains(at) && !view.states[*at].is_ejected(now);
    let mut select = |len: usize, place: &dyn Fn(usize) -> usize| {
        if len == 0 {
            return None;
        }
        let at = place(below(random(), len));
        Some(at).filter(is_usable).or_else(|| {
            let usable: Vec<usize> = (0..len).map(place).filter(is_usable).collect();
            usable.get(below(random(), usable.len())).copied()
        })
    };
    select(view.near.len(), &|n| view.near[n] as usize)
        .or_else(|| select(all, &|n| n))
        .or_else(|| (all > 0).then(|| below(random(), all)))
}

/// The first usable endpoint in the table's order for the hash. If none is usable, the first one,
/// because other replicas select it too.
#[inline(never)]
fn hashed(
    view: &EndpointSetState,
    tried: &TriedEndpoints,
    now: Instant,
    balancer: &HashBalancer,
    hash: u64,
) -> Option<usize> {
    let is_usable = |at: &usize| !tried.contains(at) && !view.states[*at].is_ejected(now);
    let mut found = balancer.positions(hash, HASH_ENTRIES_MAX);
    found.find(is_usable).or_else(|| {
        // Nearly all endpoints are ejected. Each worker for which the same ones are selects the same.
        let all = view.states.len();
        let usable: Vec<usize> = (0..all).filter(is_usable).collect();
        let at = usable.get(below(hash, usable.len())).copied();
        at.or_else(|| balancer.positions(hash, HASH_ENTRIES_MAX).next())
            // A table that is not built anew yet may have only endpoints that are gone.
            .or_else(|| (all > 0).then(|| below(hash, all)))
    })
}

/// Maps a random number to a uniform number below `n`, without division.
fn below(random: u64, n: usize) -> usize {
    ((u128::from(random) * n as u128) >> 64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoints::Upstreams;
    use canal_gateway_config::hash_of;
    use canal_gateway_config::testing::{hashing_set_of, set_of};
    use std::time::Duration;

    fn view(endpoints: usize) -> Rc<EndpointSetState> {
        Upstreams::default().direct(set_of(endpoints), 0)
    }

    fn numbers() -> impl FnMut() -> u64 {
        let mut n = 0u64;
        move || {
            n += 1;
            hash_of(&n.to_le_bytes())
        }
    }

    #[test]
    fn no_endpoint_is_an_error_and_a_single_one_is_always_selected() {
        let now = Instant::now();
        assert_eq!(
            endpoint(
                &view(0),
                &TriedEndpoints::new(),
                None,
                now,
                numbers(),
                |_| None
            )
            .unwrap_err(),
            ProxyError::NoEndpoint
        );
        let one = view(1);
        one.states[0].failed(now, Duration::from_secs(1));
        assert_eq!(
            endpoint(&one, &TriedEndpoints::new(), None, now, numbers(), |_| None)
                .unwrap()
                .at,
            0
        );
    }

    #[test]
    fn load_spreads_and_stays_even() {
        let (view, now, mut random) = (view(5), Instant::now(), numbers());
        let held: Vec<SelectedEndpoint> = (0..1000)
            .map(|_| {
                endpoint(
                    &view,
                    &TriedEndpoints::new(),
                    None,
                    now,
                    &mut random,
                    |_| None,
                )
                .unwrap()
            })
            .collect();
        for state in &view.states {
            assert!(
                (190..=210).contains(&state.in_flight.get()),
                "{}",
                state.in_flight.get()
            );
        }
        drop(held);
        assert!(view.states.iter().all(|s| s.in_flight.get() == 0));
    }

    #[test]
    fn failed_and_tried_endpoints_are_left_out_while_there_are_others() {
        let (view, now, mut random) = (view(3), Instant::now(), numbers());
        view.states[0].failed(now, Duration::from_secs(1));
        let tried: TriedEndpoints = [1].into_iter().collect();
        for _ in 0..100 {
            assert_eq!(
                endpoint(&view, &tried, None, now, &mut random, |_| None)
                    .unwrap()
                    .at,
                2
            );
        }
        let all: TriedEndpoints = [1, 2].into_iter().collect();
        assert!(endpoint(&view, &all, None, now, &mut random, |_| None).is_ok());
        let later = now + Duration::from_secs(2);
        assert!((0..100).any(|_| {
            endpoint(
                &view,
                &TriedEndpoints::new(),
                None,
                later,
                &mut random,
                |_| None,
            )
            .unwrap()
            .at == 0
        }));
    }

    #[test]
    fn near_endpoints_come_first_and_others_when_those_failed() {
        let set = set_of(4);
        let states = view(4).states.clone();
        let view = Rc::new(EndpointSetState {
            set: std::sync::Arc::new(set),
            states,
            near: vec![1, 2],
            budget: Rc::default(),
            turn: Default::default(),
        });
        // 50 draws would meet each of four endpoints if all took part.
        let (now, mut random) = (Instant::now(), numbers());
        for _ in 0..50 {
            assert!(
                [1, 2].contains(
                    &endpoint(
                        &view,
                        &TriedEndpoints::new(),
                        None,
                        now,
                        &mut random,
                        |_| None
                    )
                    .unwrap()
                    .at
                )
            );
        }
        // Any time would do: `now` does not advance, so both stay out for all draws.
        view.states[1].failed(now, Duration::from_secs(1));
        view.states[2].failed(now, Duration::from_secs(1));
        // 50 draws would meet each of the four here too.
        for _ in 0..50 {
            assert!(
                [0, 3].contains(
                    &endpoint(
                        &view,
                        &TriedEndpoints::new(),
                        None,
                        now,
                        &mut random,
                        |_| None
                    )
                    .unwrap()
                    .at
                )
            );
        }
    }

    fn view_with(endpoints: usize, load_balancing: LoadBalancing) -> Rc<EndpointSetState> {
        let mut set = set_of(endpoints);
        set.load_balancing = load_balancing;
        Upstreams::default().direct(set, 0)
    }

    /// Selects endpoints for this number of requests that do not overlap.
    fn selected(
        view: &Rc<EndpointSetState>,
        requests: usize,
        tried: &TriedEndpoints,
        now: Instant,
    ) -> Vec<usize> {
        let mut random = numbers();
        (0..requests)
            .map(|_| {
                let selected = endpoint(view, tried, None, now, &mut random, |_| None);
                selected.unwrap().at
            })
            .collect()
    }

    #[test]
    fn endpoints_in_turn_get_the_same_number_and_skip_those_that_failed() {
        let (view, now) = (view_with(5, LoadBalancing::RoundRobin), Instant::now());
        let all = selected(&view, 50, &TriedEndpoints::new(), now);
        for pair in all.windows(2) {
            assert_eq!((pair[0] + 1) % 5, pair[1], "{all:?}");
        }
        view.states[2].failed(now, Duration::from_secs(1));
        let without = selected(&view, 40, &TriedEndpoints::new(), now);
        for at in [0, 1, 3, 4] {
            assert_eq!(without.iter().filter(|it| **it == at).count(), 10);
        }
        let tried: TriedEndpoints = [0, 1, 3].into_iter().collect();
        assert_eq!(selected(&view, 3, &tried, now), [4, 4, 4]);
        view.states[4].failed(now, Duration::from_secs(1));
        let any = selected(&view, 5, &tried, now);
        assert_eq!(
            any.len(),
            5,
            "all failed or were tried, and one is better than none"
        );
    }

    #[test]
    fn near_endpoints_take_turns_before_others() {
        let base = view_with(4, LoadBalancing::RoundRobin);
        let near = |near: Vec<u32>| {
            Rc::new(EndpointSetState {
                set: base.set.clone(),
                states: base.states.clone(),
                near,
                budget: Rc::default(),
                turn: Default::default(),
            })
        };
        let (view, now) = (near(vec![1, 3]), Instant::now());
        let all = selected(&view, 20, &TriedEndpoints::new(), now);
        assert_eq!(all.iter().filter(|at| **at == 1).count(), 10);
        assert_eq!(all.iter().filter(|at| **at == 3).count(), 10);
        view.states[1].failed(now, Duration::from_secs(1));
        view.states[3].failed(now, Duration::from_secs(1));
        let far = selected(&view, 20, &TriedEndpoints::new(), now);
        assert_eq!(far.iter().filter(|at| **at == 0).count(), 10);
    }

    #[test]
    fn random_endpoints_ignore_load_and_skip_those_that_failed() {
        let (view, now) = (view_with(4, LoadBalancing::Random), Instant::now());
        view.states[0].in_flight.set(1000);
        view.states[3].failed(now, Duration::from_secs(1));
        let all = selected(&view, 3000, &TriedEndpoints::new(), now);
        for at in [0, 1, 2] {
            let count = all.iter().filter(|it| **it == at).count();
            assert!((800..=1200).contains(&count), "{at}: {count}");
        }
        view.states[0].in_flight.set(0);
        let empty = view_with(0, LoadBalancing::Random);
        let none = endpoint(&empty, &TriedEndpoints::new(), None, now, numbers(), |_| {
            None
        });
        assert_eq!(none.unwrap_err(), ProxyError::NoEndpoint);
    }

    #[test]
    fn hashes_keep_their_endpoint_and_move_only_if_it_failed() {
        let now = Instant::now();
        let workers = [(); 2].map(|()| hashing(10));
        let select = |view: &Rc<EndpointSetState>, hash: u64, now| {
            let tried = TriedEndpoints::new();
            let selected = endpoint(view, &tried, None, now, numbers(), |_| Some(hash));
            selected.unwrap().at
        };
        let hashes: Vec<u64> = (0..500u64).map(|n| hash_of(&n.to_le_bytes())).collect();
        let owners = |view, now| hashes.iter().map(|hash| select(view, *hash, now)).collect();
        let before: Vec<usize> = owners(&workers[0], now);
        let other: Vec<usize> = owners(&workers[1], now);
        assert_eq!(before, other, "workers agree");
        workers[0].states[4].failed(now, Duration::from_secs(1));
        let during: Vec<usize> = owners(&workers[0], now);
        for (before, during) in before.iter().zip(&during) {
            assert!(*during != 4 && (before == during || *before == 4));
        }
        let later: Vec<usize> = owners(&workers[0], now + Duration::from_secs(2));
        assert_eq!(later, before);
        // If every endpoint failed, each hash stays where other replicas send it.
        workers[0].states.iter().for_each(|state| {
            state.failed(now, Duration::from_secs(1));
        });
        let all_failed: Vec<usize> = owners(&workers[0], now);
        assert_eq!(all_failed, before);
        workers[0].states[7].succeeded();
        let one_left: Vec<usize> = owners(&workers[0], now);
        assert!(one_left.iter().all(|at| *at == 7));
    }

    #[test]
    fn requests_without_a_hash_go_to_random_endpoints() {
        let (view, now) = (hashing(4), Instant::now());
        let all = selected(&view, 2000, &TriedEndpoints::new(), now);
        for at in 0..4 {
            assert!(all.iter().filter(|it| **it == at).count() > 200, "{at}");
        }
    }

    /// Returns the view of a set of endpoints whose load balancer hashes.
    fn hashing(endpoints: usize) -> Rc<EndpointSetState> {
        Upstreams::default().direct(hashing_set_of(endpoints), 0)
    }
}
