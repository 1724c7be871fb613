//! Prints the measurements of `figures` as Markdown. It does not assess them.

use crate::figure_spread::{FigureSpread, LoadFigures};
use crate::figures::{ByMode, CONCURRENCY, FigureRow, Flags, LOADS, RATES, SHARES};
use crate::scene::{AsymmetricMode, CertificateAlgorithm};

/// The cells of one algorithm, for lookups.
struct Book<'a>(&'a ByMode);

impl Book<'_> {
    fn of(
        &self,
        mode: AsymmetricMode,
        row: FigureRow,
        figure: impl Fn(&LoadFigures) -> f64,
    ) -> FigureSpread {
        match self.0[mode.name()].rows.get(&row) {
            Some(rounds) => rounds.of(figure),
            None => FigureSpread::of(Vec::new()),
        }
    }

    fn sum(&self, mode: AsymmetricMode, figure: impl Fn(&LoadFigures) -> f64) -> f64 {
        self.0[mode.name()]
            .rows
            .values()
            .map(|rounds| rounds.sum(&figure))
            .sum()
    }

    /// Prints p50 / p90 of each mode.
    fn latencies(&self, row: FigureRow) -> String {
        let cell = |mode| {
            format!(
                "{:.2} / {:#.2}",
                self.of(mode, row, |m| m.p50_ms),
                self.of(mode, row, |m| m.p90_ms)
            )
        };
        AsymmetricMode::ALL.map(cell).join(" | ")
    }

    /// Prints flows per second, and their ratio to `none`.
    fn throughputs(&self, row: FigureRow) -> String {
        let of = |mode| self.of(mode, row, |m| m.per_second);
        let base = of(AsymmetricMode::None).median;
        AsymmetricMode::ALL
            .map(|mode| format!("{:#.0}, {:.2} x", of(mode), of(mode).median / base))
            .join(" | ")
    }

    /// Prints the CPU time of the node proxy, of the key server, and of both together.
    fn processors(&self, what: &str, row: FigureRow) {
        let node = |mode| self.of(mode, row, |m| m.node_us);
        let (none, local, remote) = (
            node(AsymmetricMode::None),
            node(AsymmetricMode::Local),
            node(AsymmetricMode::Remote),
        );
        let (keys, all) = (
            self.of(AsymmetricMode::Remote, row, |m| m.keys_us),
            self.of(AsymmetricMode::Remote, row, |m| m.node_us + m.keys_us),
        );
        let user = self.of(AsymmetricMode::Remote, row, |m| m.user_us).median;
        let percent =
            |now: FigureSpread, was: FigureSpread| 100.0 * (now.median / was.median - 1.0);
        println!(
            "| {what} | {none:#.0} | {local:#.0} | {remote:#.0} | {user:.0} + {:.0} | {:+.0} % | {:+.0} % | {keys:#.0} | {all:.0} | {:.2} x | {:.2} x |",
            remote.median - user,
            percent(remote, none),
            percent(remote, local),
            all.median / none.median,
            all.median / local.median,
        );
    }
}

pub(crate) fn print(algorithm: CertificateAlgorithm, flags: &Flags, cells: &ByMode) {
    let (book, share) = (Book(cells), format!("{:.0} %", flags.share * 100.0));
    println!(
        "\n### {}\n\nEach figure is the median of the rounds (least–most).",
        algorithm.name()
    );
    // Numbers are those of the paper's figures.
    if flags.wants(12) {
        print_processors(&book, &share);
    }
    if flags.wants(23) {
        println!("\nFig. 23: completion of a short flow, p50 / p90 ms, nothing capped.\n");
        table("flows per second", &RATES.map(|r| r.to_string()), |at| {
            book.latencies(FigureRow::Rate(at))
        });
    }
    if flags.wants(25) {
        println!("\nFig. 25: short flows per second by concurrency, share {share}.\n");
        table("concurrency", &CONCURRENCY.map(|c| c.to_string()), |at| {
            book.throughputs(FigureRow::Flows(at))
        });
        println!("\nThe same of sessions alone.\n");
        table("concurrency", &CONCURRENCY.map(|c| c.to_string()), |at| {
            book.throughputs(FigureRow::Sessions(at))
        });
    }
    if flags.wants(27) {
        println!(
            "\nFig. 27: short flows per second by the node proxy's share of a core, concurrency 32.\n"
        );
        table(
            "share",
            &SHARES.map(|s| format!("{:.0} %", s * 100.0)),
            |at| book.throughputs(FigureRow::Share(at)),
        );
    }
    if flags.wants(28) {
        println!("\nFig. 28: p50 / p90 ms by load, in parts of what none can do, share {share}.\n");
        table("load", &LOADS.map(|l| l.to_string()), |at| {
            book.latencies(FigureRow::Load(at))
        });
    }
    print_totals(&book);
}

fn print_processors(book: &Book<'_>, share: &str) {
    println!(
        "\nFig. 12: CPU of the node proxy for each new mTLS session, µs (share of a core: {share}), and the key server's beside it.\n"
    );
    println!(
        "| concurrency | none | local | remote | of it user + system | remote beside none | beside local | key server | both together | beside none | beside local |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|");
    for (at, concurrency) in CONCURRENCY.iter().enumerate() {
        book.processors(
            &format!("session alone, {concurrency}"),
            FigureRow::Sessions(at),
        );
    }
    for (at, concurrency) in CONCURRENCY.iter().enumerate() {
        book.processors(&format!("short flow, {concurrency}"), FigureRow::Flows(at));
    }
}

fn print_totals(book: &Book<'_>) {
    let remote = &book.0[AsymmetricMode::Remote.name()];
    let mean = remote.batches.0 / remote.batches.1;
    println!(
        "\nRequests that waited in a batch at concurrency 1: {}; mean batch over all: {mean:.1}.",
        remote.waited
    );
    for mode in AsymmetricMode::ALL {
        let why = book.0[mode.name()]
            .why
            .as_ref()
            .map_or(String::new(), |why| format!(" ({why})"));
        println!(
            "{}: {} flows, {} failed{why}.",
            mode.name(),
            book.sum(mode, |m| m.completed),
            book.sum(mode, |m| m.failed)
        );
    }
}

fn table(what: &str, rows: &[String], cells: impl Fn(usize) -> String) {
    println!("| {what} | none | local | remote |\n|---|---|---|---|");
    for (at, row) in rows.iter().enumerate() {
        println!("| {row} | {} |", cells(at));
    }
}
