//! Weighted split: distributes a rule's requests among its backends. The caller provides the random
//! number.

use canal_model::program::{Backend, BackendTarget};

/// Status when all weights are zero, so that no backend may receive the request. It is no error of
/// the server: an operator drained the route.
pub const NO_WEIGHT_STATUS: u16 = 503;

/// The backend that a weighted split selects for one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackendChoice<'a> {
    /// Send the request to this backend. `index` is its position in the split, for state per
    /// backend.
    Backend { index: usize, backend: &'a Backend },
    /// Refuse the request: the chosen backend is broken, which fails its share of requests, or no
    /// backend has a weight.
    Refuse { status: u16, reason: &'a str },
}

/// Chooses a backend by weight. `random` must be uniform over all values.
pub fn pick(split: &[Backend], random: u64) -> BackendChoice<'_> {
    let total: u64 = split.iter().map(|backend| u64::from(backend.weight)).sum();
    // The high half of the product is uniform in 0..total and needs no division.
    let mut left = ((u128::from(random) * u128::from(total)) >> 64) as u64;
    for (place, backend) in split.iter().enumerate() {
        let weight = u64::from(backend.weight);
        if left < weight {
            return match &backend.target {
                BackendTarget::Service { .. } => BackendChoice::Backend {
                    index: place,
                    backend,
                },
                BackendTarget::Refuse { status, reason } => BackendChoice::Refuse {
                    status: *status,
                    reason,
                },
            };
        }
        left -= weight;
    }
    BackendChoice::Refuse {
        status: NO_WEIGHT_STATUS,
        reason: "no backend has a weight above 0",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(weights: &[u32]) -> Vec<Backend> {
        weights
            .iter()
            .map(|&weight| Backend {
                weight,
                filters: None,
                target: BackendTarget::Service {
                    service: "t/ns/svc".parse().expect("valid"),
                    port: 80,
                    subset: Default::default(),
                },
            })
            .collect()
    }

    #[test]
    fn shares_follow_weights() {
        for weights in [&[1][..], &[90, 10], &[0, 1, 0], &[1, 1, 1], &[1_000_000, 1]] {
            let split = split(weights);
            let total: u32 = weights.iter().sum();
            let mut counts = vec![0u64; weights.len()];
            let draws = 1_000_000u64;
            for i in 0..draws {
                match pick(&split, i * (u64::MAX / draws)) {
                    BackendChoice::Backend { index: place, .. } => counts[place] += 1,
                    BackendChoice::Refuse { .. } => panic!("{weights:?}"),
                }
            }
            for (weight, count) in weights.iter().zip(counts) {
                let want = draws as f64 * f64::from(*weight) / f64::from(total);
                assert!(
                    (count as f64 - want).abs() <= 2.0,
                    "{weights:?}: {count} for {weight}, want {want}"
                );
            }
        }
    }

    #[test]
    fn a_choice_without_weight_or_target_refuses() {
        for weights in [&[][..], &[0], &[0, 0]] {
            assert!(matches!(
                pick(&split(weights), 7),
                BackendChoice::Refuse {
                    status: NO_WEIGHT_STATUS,
                    ..
                }
            ));
        }
        let broken = [Backend {
            weight: 1,
            filters: None,
            target: BackendTarget::Refuse {
                status: 503,
                reason: "gone".into(),
            },
        }];
        assert_eq!(
            pick(&broken, 7),
            BackendChoice::Refuse {
                status: 503,
                reason: "gone"
            }
        );
    }
}
