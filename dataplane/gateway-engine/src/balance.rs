//! Phase *balance*: selects the endpoint of a set that gets the request.
//!
//! It takes the less busy of two random endpoints (Mitzenmacher, "The Power of Two Choices").
//! Recently failed endpoints are skipped, and near ones are preferred if configured. The decision
//! depends only on the arguments, which include the random numbers. Start with [`endpoint`].

use std::net::IpAddr;
use std::rc::Rc;

use canal_gateway_http::proxy_error::ProxyError;
use smallvec::SmallVec;
use tokio::time::Instant;

use crate::endpoints::{EndpointSetState, SelectedEndpoint};

/// Positions of the endpoints that a request has already tried.
pub(crate) type TriedEndpoints = SmallVec<[usize; 3]>;

/// Selects an endpoint for a client with this address; `None` stands for the gateway itself. Counts
/// the endpoint as busy until the selection is dropped.
pub(crate) fn endpoint(
    view: &Rc<EndpointSetState>,
    tried: &TriedEndpoints,
    client: Option<IpAddr>,
    now: Instant,
    mut random: impl FnMut() -> u64,
) -> Result<SelectedEndpoint, ProxyError> {
    if !view.set.exists {
        return Err(ProxyError::NoService);
    }
    decide(view, tried, now, &mut random)
        .map(|at| SelectedEndpoint::new(view, at, client))
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

/// Maps a random number to a uniform number below `n`, without division.
fn below(random: u64, n: usize) -> usize {
    ((u128::from(random) * n as u128) >> 64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoints::Upstreams;
    use canal_gateway_config::testing::set_of;
    use std::time::Duration;

    fn view(endpoints: usize) -> Rc<EndpointSetState> {
        Upstreams::default().direct(set_of(endpoints), 0)
    }

    fn numbers() -> impl FnMut() -> u64 {
        let mut n = 0u64;
        move || {
            n = n.wrapping_add(0x9e37_79b9_7f4a_7c15);
            n ^ (n >> 29)
        }
    }

    #[test]
    fn no_endpoint_is_an_error_and_a_single_one_is_always_selected() {
        let now = Instant::now();
        assert_eq!(
            endpoint(&view(0), &TriedEndpoints::new(), None, now, numbers()).unwrap_err(),
            ProxyError::NoEndpoint
        );
        let one = view(1);
        one.states[0].failed(now, Duration::from_secs(1));
        assert_eq!(
            endpoint(&one, &TriedEndpoints::new(), None, now, numbers())
                .unwrap()
                .at,
            0
        );
    }

    #[test]
    fn load_spreads_and_stays_even() {
        let (view, now, mut random) = (view(5), Instant::now(), numbers());
        let held: Vec<SelectedEndpoint> = (0..1000)
            .map(|_| endpoint(&view, &TriedEndpoints::new(), None, now, &mut random).unwrap())
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
                endpoint(&view, &tried, None, now, &mut random).unwrap().at,
                2
            );
        }
        let all: TriedEndpoints = [1, 2].into_iter().collect();
        assert!(endpoint(&view, &all, None, now, &mut random).is_ok());
        let later = now + Duration::from_secs(2);
        assert!((0..100).any(|_| {
            endpoint(&view, &TriedEndpoints::new(), None, later, &mut random)
                .unwrap()
                .at
                == 0
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
        });
        let (now, mut random) = (Instant::now(), numbers());
        for _ in 0..50 {
            assert!(
                [1, 2].contains(
                    &endpoint(&view, &TriedEndpoints::new(), None, now, &mut random)
                        .unwrap()
                        .at
                )
            );
        }
        view.states[1].failed(now, Duration::from_secs(1));
        view.states[2].failed(now, Duration::from_secs(1));
        for _ in 0..50 {
            assert!(
                [0, 3].contains(
                    &endpoint(&view, &TriedEndpoints::new(), None, now, &mut random)
                        .unwrap()
                        .at
                )
            );
        }
    }
}
