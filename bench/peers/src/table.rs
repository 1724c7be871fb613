//! The tables of results, as Markdown: medians, spreads, and the gateway's cost relative to each
//! proxy at the same load. It measures nothing.

use canal_bench_peers::spread::Spread;

use crate::case::ProxyCase;
use crate::load::LoadSample;
use crate::peers::PeerProxy;

pub(crate) struct ResultRow {
    pub(crate) peer: &'static PeerProxy,
    pub(crate) case: ProxyCase,
    /// Requests per second of the stated load.
    pub(crate) rate: f64,
    pub(crate) saturated: Vec<LoadSample>,
    pub(crate) stated: Vec<LoadSample>,
}

impl ResultRow {
    pub(crate) fn new(peer: &'static PeerProxy, case: ProxyCase) -> Self {
        Self {
            peer,
            case,
            rate: 0.0,
            saturated: Vec::new(),
            stated: Vec::new(),
        }
    }
}

fn spread(runs: &[LoadSample], of: impl Fn(&LoadSample) -> f64) -> Spread {
    Spread::of(runs.iter().map(of))
}

/// Compares the gateway's CPU per request with another's: they are equal if each median lies in the
/// other's range.
fn verdict(canal: &Spread, other: &Spread) -> &'static str {
    match (canal.is_equal_within(other), canal.median < other.median) {
        (true, _) => "equal",
        (false, true) => "canal less",
        (false, false) => "canal **more**",
    }
}

pub(crate) fn render(rows: &[ResultRow], versions: &str, runs: usize, seconds: u32) -> String {
    let mut out = format!(
        "{versions}. One worker each on core 0; origins (23 bytes) and load on core 1; {runs} rounds x {seconds} s of each load, proxies in turn; \
         medians (least–most). Ratio and verdict are of CPU µs/request; equal: each median lies between the other's least and most.\n\n\
         | case | load | proxy | requests/s | core | CPU µs/request | user | system | canal / this | verdict | RSS MiB | failed |\n\
         |---|---|---|---|---|---|---|---|---|---|---|---|\n"
    );
    for case in ProxyCase::ALL {
        let rows: Vec<&ResultRow> = rows.iter().filter(|r| r.case == case).collect();
        for is_stated in [false, true] {
            let runs = |row: &ResultRow| {
                if is_stated {
                    row.stated.clone()
                } else {
                    row.saturated.clone()
                }
            };
            let canal = rows
                .iter()
                .find(|r| r.peer.name == "canal")
                .map(|r| spread(&runs(r), LoadSample::cpu));
            for row in &rows {
                let load = if is_stated {
                    format!("{:.0}/s", row.rate)
                } else {
                    "saturated".into()
                };
                let beside = canal.as_ref().filter(|_| row.peer.name != "canal");
                out.push_str(&line(row, &load, &runs(row), beside));
            }
        }
    }
    out
}

fn line(row: &ResultRow, load: &str, runs: &[LoadSample], canal: Option<&Spread>) -> String {
    let (cpu, rate) = (
        spread(runs, LoadSample::cpu),
        spread(runs, |r| r.per_second),
    );
    let median = |of: fn(&LoadSample) -> f64| spread(runs, of).median;
    let beside = canal.map_or("| ".into(), |canal| {
        format!(
            "{:.2} | {}",
            canal.median / cpu.median,
            verdict(canal, &cpu)
        )
    });
    format!(
        "| {} | {load} | {} | {:.0} ({:.0}–{:.0}) | {:.0} % | **{:.1}** ({:.1}–{:.1}) | {:.1} | {:.1} | {beside} | {:.0} | {} of {} |\n",
        row.case.name(),
        row.peer.name,
        rate.median,
        rate.min,
        rate.max,
        median(|r| r.busy) * 100.0,
        cpu.median,
        cpu.min,
        cpu.max,
        median(|r| r.user_us),
        median(|r| r.sys_us),
        median(|r| r.rss_mib),
        runs.iter().map(|r| r.failed).sum::<u64>(),
        runs.iter().map(|r| r.requests + r.failed).sum::<u64>(),
    )
}

/// Compares the gateway with another build of it: the spread of the saturated runs of each, and
/// whether the two differ by more than that.
pub(crate) fn compare(rows: &[ResultRow], seconds: u32) -> String {
    let runs = rows
        .iter()
        .map(|row| row.saturated.len())
        .max()
        // Without rows nothing is compared below, and the heading names no runs.
        .unwrap_or(0);
    let mut out = format!(
        "CPU µs per request (user + system), {runs} runs x {seconds} s of each, in turns; equal: each median lies between the other's least and most.\n\n\
         | case | build | least | quarter | median | three quarters | most | after / before, median of rounds | verdict |\n|---|---|---|---|---|---|---|---|---|\n"
    );
    for case in ProxyCase::ALL {
        let row = |name| rows.iter().find(|r| r.case == case && r.peer.name == name);
        // Without `--before` only one build has rows.
        let Some((before, after)) = row("canal-before").zip(row("canal")) else {
            continue;
        };
        let [before, after] = [before, after].map(|row| &row.saturated);
        // Both builds of a round ran under the same conditions, so rounds are compared.
        let ratio = Spread::of(
            after
                .iter()
                .zip(before)
                .map(|(after, before)| after.cpu() / before.cpu()),
        )
        .median;
        // If each median lies within the other's spread, the difference is noise. Only otherwise
        // does the median of rounds decide.
        let verdict = match (
            spread(after, LoadSample::cpu).is_equal_within(&spread(before, LoadSample::cpu)),
            ratio < 1.0,
        ) {
            (true, _) => "equal within the spread",
            (false, true) => "less",
            (false, false) => "**more**",
        };
        for (name, runs, comparison) in [
            ("before", before, String::from(" | ")),
            ("after", after, format!("{ratio:.3} | {verdict}")),
        ] {
            let s = spread(runs, LoadSample::cpu);
            let cells = [s.min, s.lower, s.median, s.upper, s.max]
                .map(|v| format!("{v:.2}"))
                .join(" | ");
            out.push_str(&format!(
                "| {} | {name} | {cells} | {comparison} |\n",
                case.name()
            ));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use canal_bench_peers::spread::Spread;

    #[test]
    fn a_difference_within_the_runs_is_none() {
        let (low, near, high) = (
            Spread::of([1.0, 2.0, 3.0]),
            Spread::of([2.0, 2.5, 9.0]),
            Spread::of([4.0, 5.0, 6.0]),
        );
        assert_eq!(super::verdict(&low, &near), "equal");
        assert_eq!(super::verdict(&low, &high), "canal less");
        assert_eq!(super::verdict(&high, &low), "canal **more**");
    }
}
