//! The table of results, as Markdown, with medians and the ratio to the slowest known peer. No measuring here.

use std::path::Path;

use anyhow::Context;

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

    fn cpu(&self) -> f64 {
        self.median(|r| r.user_us + r.sys_us)
    }
}

pub(crate) fn render(rows: &[Row], runs: &usize, seconds: u32) -> String {
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

const BEGIN: &str = "<!-- bench-peers begin -->";
const END: &str = "<!-- bench-peers end -->";

/// Replaces what stands between the two marks.
pub(crate) fn replace_in(path: &Path, text: &str) -> anyhow::Result<()> {
    let old = std::fs::read_to_string(path)?;
    let (head, rest) = old.split_once(BEGIN).with_context(|| format!("{}: no {BEGIN} mark", path.display()))?;
    let (_, tail) = rest.split_once(END).with_context(|| format!("{}: no {END} mark", path.display()))?;
    std::fs::write(path, format!("{head}{BEGIN}\n{text}{END}{tail}"))?;
    Ok(())
}
