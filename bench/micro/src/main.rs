//! `canal-bench-micro`: one table of nanoseconds per operation and bytes per route; or instructions
//! per operation under valgrind, which do not depend on how busy the machine is. The operations are
//! in the library.

#![forbid(unsafe_code)]

use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use canal_bench_micro::{BenchOperation, CompileBench, ControllerBench, SETS, operations};
use canal_model::route_table::RouteTable;
use canal_router::{Router, RouterLimits};

const USAGE: &str = "usage: canal-bench-micro [time | compile | instructions | once NAME COUNT]
  time          ns per operation (best of several rounds) and bytes per route; the default
  compile       a tenant of 10,000 Services and 100,000 route rules: the first compile, one after
                a change of one route, and all that the controller does for such a change;
                exits with 1 if a bar is missed
  instructions  instructions per operation, counted by valgrind
  once          run one operation COUNT times, for profilers";

/// Approximate duration of a round. The best round counts, because other load only slows rounds
/// down.
/// Some scheduler periods long, and short enough that many rounds meet no other load. Nobody
/// measured another value.
const ROUND: Duration = Duration::from_millis(60);
/// Number of rounds of each operation. Nobody measured fewer.
const ROUNDS: usize = 5;
/// Number of operations counted under valgrind.
/// Instructions repeat exactly, so that few operations are enough; valgrind is about fifty times
/// slower.
const COUNTED: u64 = 200;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        [] | ["time"] => time_all(),
        ["compile"] => return compile(),
        ["instructions"] => return count_all(),
        ["once", name, count] => return once(name, count),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}

/// Number of first compiles, and of changes, that are timed; the bar is for their median.
/// A first compile takes seconds, and a change milliseconds, so their numbers differ.
const COMPILES: usize = 5;
const CHANGES: usize = 100;

fn compile() -> ExitCode {
    eprintln!("reading the tenant's objects ...");
    let mut bench = CompileBench::new();
    println!("{:<44} {:>10} {:>10}", "one core, median", "ms", "bar ms");
    let mut is_missed = false;
    let mut row = |name: &str, mut times: Vec<Duration>, bar: Option<Duration>| {
        times.sort();
        let median = times[times.len() / 2];
        let in_ms = |it: Duration| format!("{:.1}", it.as_secs_f64() * 1e3);
        let is_above = bar.is_some_and(|bar| median >= bar);
        is_missed |= is_above;
        let missed = if is_above { "  MISSED" } else { "" };
        let bar = bar.map_or_else(|| "-".to_owned(), in_ms);
        println!("{name:<44} {:>10} {bar:>10}{missed}", in_ms(median));
    };
    let first = (0..COMPILES).map(|_| bench.compile()).collect();
    // Both bars are targets of docs/performance.md.
    row(
        "compile of all objects",
        first,
        Some(Duration::from_secs(5)),
    );
    eprintln!("changing {CHANGES} routes, one at a time ...");
    let changes = (0..CHANGES).map(|at| bench.change(at)).collect();
    let name = "compile after a change of one route";
    row(name, changes, Some(Duration::from_millis(5)));
    eprintln!("comparing the result with a compile of the whole tenant ...");
    bench.check();
    drop(bench);
    eprintln!("changing {CHANGES} routes of a controller, one at a time ...");
    let mut bench = ControllerBench::new();
    let changes = (0..CHANGES).map(|at| bench.change(at)).collect();
    row("controller's work for such a change", changes, None);
    ExitCode::from(u8::from(is_missed))
}

fn time_all() {
    println!("{:<34} {:>12} {:>10}", "operation", "ns", "target ns");
    for operation in operations() {
        let target = operation
            .target_ns
            .map_or(String::new(), |ns| format!("{ns:.0}"));
        println!(
            "{:<34} {:>12.1} {:>10}",
            operation.name,
            time(&operation),
            target
        );
    }
    println!(
        "\n{:<34} {:>12} {:>10}",
        "router memory, without the rules", "bytes/route", "target"
    );
    for set in SETS {
        let (router, _) = Router::build(&RouteTable::new(set.rules()), &RouterLimits::DEFAULT);
        println!(
            "{:<34} {:>12.1} {:>10}",
            set.name,
            router.memory_bytes() as f64 / router.rule_count() as f64,
            300
        );
    }
}

/// Returns the nanoseconds of one operation in the best round.
fn time(operation: &BenchOperation) -> f64 {
    let mut run = (operation.make)();
    let start = Instant::now();
    run();
    let first = start.elapsed().max(Duration::from_nanos(20));
    let count = (ROUND.as_nanos() / first.as_nanos()).clamp(1, 2_000_000) as u32;
    let round = |run: &mut Box<dyn FnMut()>| {
        let start = Instant::now();
        (0..count).for_each(|_| run());
        start.elapsed().as_nanos() as f64 / f64::from(count)
    };
    round(&mut run);
    (0..ROUNDS)
        .map(|_| round(&mut run))
        .fold(f64::INFINITY, f64::min)
}

fn once(name: &str, count: &str) -> ExitCode {
    let Some((operation, count)) = operations()
        .into_iter()
        .find(|o| o.name == name)
        .zip(count.parse::<u64>().ok())
    else {
        eprintln!("{USAGE}\noperations:");
        operations()
            .iter()
            .for_each(|operation| eprintln!("  {}", operation.name));
        return ExitCode::from(2);
    };
    let mut run = (operation.make)();
    (0..count).for_each(|_| run());
    ExitCode::SUCCESS
}

/// Counts the instructions of one operation: the difference of two runs under valgrind, so that
/// making the inputs does not count.
fn count_all() -> ExitCode {
    println!("{:<34} {:>12}", "operation", "instructions");
    for operation in operations()
        .iter()
        .filter(|operation| !operation.name.contains("100k") && !operation.name.contains("10k"))
    {
        match (
            instructions(operation, 1),
            instructions(operation, 1 + COUNTED),
        ) {
            (Ok(one), Ok(many)) => {
                println!("{:<34} {:>12}", operation.name, (many - one) / COUNTED)
            }
            (Err(why), _) | (_, Err(why)) => {
                eprintln!("canal-bench-micro: {why}");
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}

fn instructions(operation: &BenchOperation, count: u64) -> Result<u64, String> {
    let this =
        std::env::current_exe().map_err(|error| format!("cannot find this program: {error}"))?;
    let out = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(this)
        .args(["once", operation.name, &count.to_string()])
        .output()
        .map_err(|error| {
            format!(
                "cannot run valgrind ({error}); fix: install it with `apt-get install valgrind`"
            )
        })?;
    // The last lines contain `==PID== Collected : N`.
    let text = String::from_utf8_lossy(&out.stderr);
    let collected = text
        .lines()
        .find_map(|line| line.split("Collected : ").nth(1))
        .and_then(|n| n.trim().parse().ok());
    collected.ok_or_else(|| format!("valgrind counted nothing for {:?}: {text}", operation.name))
}
