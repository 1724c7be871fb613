//! Fig. 19: which backends services share. It plans and counts, over all pairs of services.

use std::fmt::Write;

use crate::tier::{TierSize, overlap};

/// Number of services in the picture.
/// The number was chosen; the figures beside the picture are of all services.
const SHOWN: usize = 12;

pub(crate) fn figure(size: &TierSize) -> anyhow::Result<String> {
    let tier = size.tier()?;
    let took = tier.took;
    let mut text = String::new();
    writeln!(
        text,
        "{} services on {} backends in {} AZs, {} at home and {} away; planned in {took:.1?}",
        size.services, size.backends, size.azs, size.home, size.away
    )?;

    // Two services cannot share more backends than one has.
    let most = size.home + size.away;
    let mut pairs = vec![0_u64; most + 1];
    for (at, one) in tier.services.iter().enumerate() {
        // A larger overlap would be a fault of the planner, which the linter reports; here the
        // index must stay valid.
        for other in &tier.services[at + 1..] {
            pairs[overlap(one, other).min(most)] += 1;
        }
    }
    let all: u64 = pairs.iter().sum();
    writeln!(text, "\nbackends shared   pairs of services")?;
    for (shared, count) in pairs.iter().enumerate() {
        writeln!(
            text,
            "{shared:>15}   {count:>8}  {:>7.3} %",
            // With fewer than two services there are no pairs to divide by.
            100.0 * *count as f64 / all.max(1) as f64
        )?;
    }
    let unique = if tier.shared == 0 {
        "yes: no service's backends are all another's".to_owned()
    } else {
        format!("no: {} share all", tier.shared)
    };
    writeln!(
        text,
        "all unique: {unique}\nservices with fewer backends than asked for: {}\nfindings of the linter: {}",
        tier.few, tier.findings
    )?;

    let mut load = vec![(0_u64, 0_u64); size.backends as usize];
    for (backends, weight) in tier.services.iter().zip(&tier.weights) {
        for backend in backends {
            load[*backend].0 += u64::from(*weight);
            load[*backend].1 += 1;
        }
    }
    writeln!(text, "\nper backend   least    mean    most")?;
    let by_load: Vec<u64> = load.iter().map(|load| load.0).collect();
    let by_count: Vec<u64> = load.iter().map(|load| load.1).collect();
    for (name, values) in [("load", by_load), ("services", by_count)] {
        let sum: u64 = values.iter().sum();
        // `size.tier` has checked that there is a backend.
        let (least, most) = (
            values.iter().min().unwrap_or(&0),
            values.iter().max().unwrap_or(&0),
        );
        writeln!(
            text,
            "{name:<11} {least:>7} {:>7.1} {most:>7}",
            sum as f64 / values.len() as f64
        )?;
    }

    writeln!(
        text,
        "\nthe heaviest services (rows) and their backends (columns, in the order of AZs)"
    )?;
    let mut columns: Vec<usize> = (0..size.backends as usize).collect();
    // Backends of one AZ are side by side, so that home and away are visible as blocks.
    columns.sort_by_key(|backend| (tier.azs[*backend], *backend));
    let mut rows: Vec<usize> = (0..tier.services.len()).collect();
    // Ties are ordered by number, so that the picture is the same in each run.
    rows.sort_by_key(|service| (std::cmp::Reverse(tier.weights[*service]), *service));
    for service in rows.into_iter().take(SHOWN) {
        let cells: String = columns
            .iter()
            .map(|backend| {
                if tier.services[service].contains(backend) {
                    '#'
                } else {
                    '.'
                }
            })
            .collect();
        writeln!(text, "service {:>5}  {cells}", service + 1)?;
    }
    Ok(text)
}
