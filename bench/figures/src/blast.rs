//! The blast radius of simultaneous backend failures. Random failures have the same mean however
//! services share backends. Shuffle sharding helps against failures with a cause: a service that
//! kills the backends on which it runs. Both kinds are therefore shown. It reads no clock, and
//! samples are seeded.

use std::fmt::Write;

use crate::tier::{PlannedTier, SeededRng, TierSize, overlap};

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct BlastArgs {
    #[command(flatten)]
    size: TierSize,
    /// Maximum number of simultaneous failures.
    #[arg(long, default_value_t = 8)]
    failures: usize,
    /// Number of random sets of failed backends for the worst case.
    #[arg(long, default_value_t = 2_000)]
    samples: u32,
}

/// Backends of each service under one kind of sharding.
struct Sharding {
    name: &'static str,
    services: Vec<Vec<usize>>,
    backends: usize,
}

pub(crate) fn figure(arguments: &BlastArgs) -> anyhow::Result<String> {
    let tier = arguments.size.tier()?;
    let backends = arguments.size.backends as usize;
    let plain = plain(&tier, &arguments.size);
    let shardings = [
        Sharding {
            name: "shuffle",
            services: tier.services.clone(),
            backends,
        },
        Sharding {
            name: "plain",
            services: plain,
            backends,
        },
    ];
    let mut text = String::new();
    let size = &arguments.size;
    writeln!(
        text,
        "{} services, {} backends, {} + {} for each service; plain: fixed groups of as many",
        size.services, backends, size.home, size.away
    )?;
    random(&mut text, &shardings, arguments)?;
    poison(&mut text, &shardings, arguments.failures)?;
    Ok(text)
}

/// Plain sharding: each AZ's backends are cut into fixed groups; a home group and an away group
/// belong together.
fn plain(tier: &PlannedTier, size: &TierSize) -> Vec<Vec<usize>> {
    let of_az = |az: usize| (0..tier.azs.len()).filter(move |backend| tier.azs[*backend] == az);
    let zones = size.azs as usize;
    let mut free: Vec<Vec<usize>> = (0..zones).map(|az| of_az(az).collect()).collect();
    let mut groups = Vec::new();
    // Services are assigned to home groups in turn. Groups end when an AZ has too few backends
    // left.
    for turn in 0.. {
        let (home, away) = (turn % zones, (turn + 1) % zones);
        let (need_home, need_away) = if zones == 1 {
            (size.home + size.away, 0)
        } else {
            (size.home, size.away)
        };
        if free[home].len() < need_home || free[away].len() < need_away {
            break;
        }
        let mut group: Vec<usize> = free[home].drain(..need_home).collect();
        group.extend(free[away].drain(..need_away));
        group.sort_unstable();
        groups.push(group);
    }
    if groups.is_empty() {
        groups.push((0..tier.azs.len()).collect());
    }
    (0..tier.services.len())
        .map(|service| groups[service % groups.len()].clone())
        .collect()
}

/// Returns `of choose k` as a float, because only ratios are used.
fn choose(of: usize, k: usize) -> f64 {
    if k > of {
        0.0
    } else {
        (0..k).map(|i| (of - i) as f64 / (i + 1) as f64).product()
    }
}

/// Returns the probability that all of `all` given backends are among `failed` random ones out of
/// `backends`.
fn chance_all(backends: usize, failed: usize, all: usize) -> f64 {
    if failed < all || all > backends {
        0.0
    } else {
        choose(backends - all, failed - all) / choose(backends, failed)
    }
}

/// Returns the probability that none of `all` given backends is among `failed` random ones.
fn chance_none(backends: usize, failed: usize, all: usize) -> f64 {
    if all + failed > backends {
        0.0
    } else {
        choose(backends - all, failed) / choose(backends, failed)
    }
}

fn random(text: &mut String, shardings: &[Sharding], arguments: &BlastArgs) -> anyhow::Result<()> {
    writeln!(
        text,
        "\nrandom failures: share of services in the mean over all sets of failed backends (exact), and the worst of {} seeded sets and a greedy one",
        arguments.samples
    )?;
    writeln!(
        text,
        "failures  sharding   all down  degraded  worst all down"
    )?;
    for failed in 1..=arguments.failures {
        for sharding in shardings {
            let count = sharding.services.len() as f64;
            let sum = |chance: fn(usize, usize, usize) -> f64| -> f64 {
                sharding
                    .services
                    .iter()
                    .map(|own| chance(sharding.backends, failed, own.len()))
                    .sum::<f64>()
                    / count
            };
            let (down, none) = (sum(chance_all), sum(chance_none));
            let worst = worst(sharding, failed, arguments) as f64 / count;
            writeln!(
                text,
                "{failed:>8}  {:<8} {:>8.3} % {:>7.2} % {:>13.2} %",
                sharding.name,
                100.0 * down,
                100.0 * (1.0 - none - down),
                100.0 * worst
            )?;
        }
    }
    Ok(())
}

fn down(sharding: &Sharding, failed: &[bool]) -> usize {
    sharding
        .services
        .iter()
        .filter(|own| own.iter().all(|backend| failed[*backend]))
        .count()
}

/// Returns the largest number of services that a set of failures takes down, among seeded sets and
/// one that grows by the cheapest service.
fn worst(sharding: &Sharding, failures: usize, arguments: &BlastArgs) -> usize {
    let mut draw = SeededRng::new(arguments.size.seed);
    let mut order: Vec<usize> = (0..sharding.backends).collect();
    let mut worst = 0;
    for _ in 0..arguments.samples {
        for at in 0..failures.min(order.len()) {
            let other = at + draw.below((order.len() - at) as u64) as usize;
            order.swap(at, other);
        }
        let mut failed = vec![false; sharding.backends];
        order
            .iter()
            .take(failures)
            .for_each(|backend| failed[*backend] = true);
        worst = worst.max(down(sharding, &failed));
    }
    let mut failed = vec![false; sharding.backends];
    let mut left = failures;
    loop {
        let missing = |own: &Vec<usize>| own.iter().filter(|backend| !failed[**backend]).count();
        let next = sharding
            .services
            .iter()
            .filter(|own| (1..=left).contains(&missing(own)))
            .min_by_key(|own| missing(own));
        let Some(next) = next else { break };
        left -= missing(next);
        next.iter().for_each(|backend| failed[*backend] = true);
    }
    worst.max(down(sharding, &failed))
}

/// A query of death kills all backends of one service, and more fail at random; prints the effect
/// on the other services.
fn poison(text: &mut String, shardings: &[Sharding], failures: usize) -> anyhow::Result<()> {
    writeln!(
        text,
        "\na query of death: all backends of one service, the rest of the failures at random; share of other services in the mean over all services (exact)"
    )?;
    writeln!(text, "failures  sharding   all down  degraded")?;
    // Fewer failures cannot include all backends of every service.
    // The default is for a tier without services, of which each row is zero.
    let least = shardings
        .iter()
        .flat_map(|sharding| &sharding.services)
        .map(Vec::len)
        .max()
        .unwrap_or(1);
    for failed in least..=failures {
        for sharding in shardings {
            let (mut down, mut degraded, mut count) = (0.0, 0.0, 0.0);
            for (at, poisoned) in sharding.services.iter().enumerate() {
                // The backends of the poisoned service have failed; the others fail at random.
                let (rest, more) = (sharding.backends - poisoned.len(), failed - poisoned.len());
                for (_, other) in sharding
                    .services
                    .iter()
                    .enumerate()
                    .filter(|(place, _)| *place != at)
                {
                    let alive = other.len() - overlap(poisoned, other);
                    // The other service is down if all of its backends that are alive after the
                    // poison fail too.
                    let all = chance_all(rest, more, alive);
                    // A service that shares a poisoned backend is degraded in any case.
                    let untouched = if alive == other.len() {
                        chance_none(rest, more, alive)
                    } else {
                        0.0
                    };
                    down += all;
                    degraded += 1.0 - all - untouched;
                    count += 1.0;
                }
            }
            // One service has no other, and a division by zero must not print NaN.
            let count: f64 = f64::max(count, 1.0);
            writeln!(
                text,
                "{failed:>8}  {:<8} {:>8.3} % {:>7.2} %",
                sharding.name,
                100.0 * down / count,
                100.0 * degraded / count
            )?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chances_are_those_of_all_sets() {
        // 5 backends, 3 failed: there are 10 sets; 3 of them contain a given pair, and only 1
        // misses it completely.
        assert!((chance_all(5, 3, 2) - 0.3).abs() < 1e-12);
        assert!((chance_none(5, 3, 2) - 0.1).abs() < 1e-12);
        assert_eq!(chance_all(5, 1, 2), 0.0);
        assert!((chance_all(40, 0, 0) - 1.0).abs() < 1e-12);
    }
}
