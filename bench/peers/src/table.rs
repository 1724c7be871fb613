//! The table of results, as Markdown, with medians and the ratio to the slowest known peer. No measuring here.

use canal_bench_peers::spread::Spread;

use crate::Run;
use crate::load::Case;
use crate::peers::Peer;

pub(crate) struct Row {
    pub(crate) peer: &'static Peer,
    pub(crate) case: Case,
    pub(crate) runs: Vec<Run>,
}

impl Row {
    pub(crate) fn new(peer: &'static Peer, case: Case) -> Self {
        Self { peer, case, runs: Vec::new() }
    }

    fn median(&self, of: impl Fn(&Run) -> f64) -> f64 {
        let mut v: Vec<f64> = self.runs.iter().map(of).collect();
        v.sort_by(f64::total_cmp);
        v.get(v.len() / 2).copied().unwrap_or(f64::NAN)
    }

    fn spread(&self) -> Spread {
        Spread::of(self.runs.iter().map(|r| r.user_us + r.sys_us))
    }

    fn cpu(&self) -> f64 {
        self.median(|r| r.user_us + r.sys_us)
    }
}

pub(crate) fn render(rows: &[Row], runs: usize, seconds: u32) -> String {
    let mut out = format!(
        "One worker each on core 0; origin (nginx, 23 bytes) and load on core 1; {runs} runs x {seconds} s, proxies in turn; medians.\n\n\
         | case | proxy | CPU µs/request | user | system | all runs | × HAProxy | RSS MiB | failed |\n|---|---|---|---|---|---|---|---|---|\n"
    );
    for case in Case::ALL {
        let haproxy = rows.iter().find(|r| r.case == case && r.peer.name == "haproxy").map(Row::cpu);
        for r in rows.iter().filter(|r| r.case == case) {
            let all: Vec<String> = r.runs.iter().map(|x| format!("{:.1}", x.user_us + x.sys_us)).collect();
            let ratio = haproxy.map_or("-".to_string(), |h| format!("{:.2}", r.cpu() / h));
            out.push_str(&format!(
                "| {} | {} | **{:.1}** | {:.1} | {:.1} | {} | {ratio} | {:.0} | {} of {} |\n",
                case.name(),
                r.peer.name,
                r.cpu(),
                r.median(|x| x.user_us),
                r.median(|x| x.sys_us),
                all.join(" / "),
                r.median(|x| x.rss_mib),
                r.runs.iter().map(|x| x.failed).sum::<u64>(),
                r.runs.iter().map(|x| x.requests + x.failed).sum::<u64>(),
            ));
        }
    }
    out
}

/// The gateway beside another build of it: where the runs of each lie, and whether the two differ by more than that.
pub(crate) fn compare(rows: &[Row], seconds: u32) -> String {
    let runs = rows.iter().map(|row| row.runs.len()).max().unwrap_or(0);
    let mut out = format!(
        "CPU µs per request (user + system), {runs} runs x {seconds} s of each, in turns; equal: each median lies between the other's least and most.\n\n\
         | case | build | least | quarter | median | three quarters | most | after / before, median of rounds | verdict |\n|---|---|---|---|---|---|---|---|---|\n"
    );
    for case in Case::ALL {
        let row = |name| rows.iter().find(|r| r.case == case && r.peer.name == name);
        let Some((before, after)) = row("canal-before").zip(row("canal")) else { continue };
        let cpu = |run: &Run| run.user_us + run.sys_us;
        let ratio = Spread::of(after.runs.iter().zip(&before.runs).map(|(after, before)| cpu(after) / cpu(before))).median;
        let verdict = match (after.spread().is_equal_within(&before.spread()), ratio < 1.0) {
            (true, _) => "equal within the spread",
            (false, true) => "less",
            (false, false) => "**more**",
        };
        for (name, row, says) in [("before", before, String::from(" | ")), ("after", after, format!("{ratio:.3} | {verdict}"))] {
            let s = row.spread();
            let cells = [s.min, s.lower, s.median, s.upper, s.max].map(|v| format!("{v:.2}")).join(" | ");
            out.push_str(&format!("| {} | {name} | {cells} | {says} |\n", case.name()));
        }
    }
    out
}
