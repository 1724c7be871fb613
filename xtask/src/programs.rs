//! Runs the programs of the end-to-end tests, several at once because most of them mostly wait, and keeps together what each says. It decides
//! nothing about a test.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::time::Instant;

use anyhow::Context;
use serde_json::Value;

use crate::failures::Failures;
use crate::suites::{Count, read_line};

/// Parts of the machine: for two cores.
const ROOM: usize = 4;
/// Parts that a program needs which mostly waits: for certificates to end, for loads of a few requests a second.
const WAITS: usize = 1;
/// For one that keeps a core busy.
const WORKS: usize = 2;
/// For one that bounds what a fault or a planned change may cost, within a second or to no request: beside one that waits, and no other.
const BOUNDS: usize = 3;
/// For one that takes the whole machine: it floods, does all that can be done in a minute, or looks at who is faster, as h2spec does where it
/// breaks a rule and an answer is under way already.
const ALONE: usize = ROOM;

/// What is known of the programs: the one that needs the quietest machine first, then the longest. One that is not known runs alone.
const KNOWN: [(&str, usize); 20] = [
    ("http2", ALONE),
    ("tier", BOUNDS),
    ("drain", BOUNDS),
    ("failure", WAITS),
    ("attacks", WAITS),
    ("identity", WAITS),
    ("protocols", WORKS),
    ("external_ca", WAITS),
    ("keys_at_rest", WORKS),
    ("proxyless", WORKS),
    ("mtu", WORKS),
    ("zerotrust", WAITS),
    ("adversary", WAITS),
    ("underlay", WORKS),
    ("icmp", WAITS),
    ("dns", WAITS),
    ("canal_e2e", WAITS),
    ("throttle", BOUNDS),
    ("config", ALONE),
    ("keyserver", ALONE),
];

#[derive(Debug, PartialEq, Eq)]
struct Program {
    name: String,
    path: PathBuf,
}

/// What a program said, and how it ended.
struct Ended {
    name: String,
    lines: Vec<String>,
    status: std::io::Result<bool>,
    seconds: u64,
}

/// Builds by `build`, which tells in JSON what came of it, and runs the test programs of one package in its folder.
pub(crate) fn run(root: &Path, build: &[&str], package: &str, failures: &mut Failures) -> anyhow::Result<(bool, Count)> {
    let Some(programs) = built(root, build, &root.join(package).join("Cargo.toml"))? else {
        return Ok((false, Count { failed: 1, ..Count::default() }));
    };
    anyhow::ensure!(!programs.is_empty(), "cargo told of no test program of {package}");
    side_by_side(&root.join(package), programs, failures)
}

/// The test programs of the package, in the order in which they shall begin; none if the build failed.
fn built(root: &Path, build: &[&str], manifest: &Path) -> anyhow::Result<Option<Vec<Program>>> {
    let mut cargo = Command::new(build[0]).args(&build[1..]).current_dir(root).stdout(Stdio::piped()).spawn()?;
    let mut programs = Vec::new();
    for line in BufReader::new(cargo.stdout.take().context("cargo has no output")?).lines() {
        programs.extend(program(&line?, manifest));
    }
    programs.sort_by_key(|program| place(&program.name));
    Ok(cargo.wait()?.success().then_some(programs))
}

/// The test program that a line of cargo's tells of (<https://doc.rust-lang.org/cargo/reference/external-tools.html#json-messages>).
fn program(line: &str, manifest: &Path) -> Option<Program> {
    let message: Value = serde_json::from_str(line).ok()?;
    let is_ours = message["profile"]["test"] == true && Path::new(message["manifest_path"].as_str()?) == manifest;
    let path = message["executable"].as_str().filter(|_| is_ours)?.into();
    Some(Program { name: message["target"]["name"].as_str()?.replace('-', "_"), path })
}

fn place(name: &str) -> usize {
    KNOWN.iter().position(|(known, _)| *known == name).unwrap_or(KNOWN.len())
}

fn parts(name: &str) -> usize {
    KNOWN.get(place(name)).map_or(ALONE, |(_, parts)| *parts)
}

/// Which of those that wait begins next: the first for which there is room.
fn decide_next(waiting: &[Program], free: usize) -> Option<usize> {
    waiting.iter().position(|program| parts(&program.name) <= free)
}

fn side_by_side(folder: &Path, mut waiting: Vec<Program>, failures: &mut Failures) -> anyhow::Result<(bool, Count)> {
    let (sender, receiver) = channel();
    let (mut free, mut running, mut total, mut all_ended_well) = (ROOM, 0, Count::default(), true);
    loop {
        while let Some(next) = decide_next(&waiting, free) {
            let program = waiting.remove(next);
            println!("== {} begins", program.name);
            (free, running) = (free - parts(&program.name), running + 1);
            begin(folder, program, &sender);
        }
        if running == 0 {
            return Ok((all_ended_well, total));
        }
        let ended: Ended = receiver.recv().context("a program's end is not heard of")?;
        (free, running) = (free + parts(&ended.name), running - 1);
        tell(&ended);
        ended.lines.iter().for_each(|line| failures.hear(line));
        let (is_well, count) = decide_count(&ended);
        all_ended_well &= is_well;
        total.add(count);
    }
}

/// Prints all that a program said, in one piece.
fn tell(ended: &Ended) {
    println!("== {}, {} s", ended.name, ended.seconds);
    for line in &ended.lines {
        println!("{line}");
    }
    if !matches!(ended.status, Ok(true)) {
        println!("== {} did not end well: {:?}", ended.name, ended.status);
    }
}

/// Whether a program ended well, and what it counted. One that died without counting its failure must not look green.
fn decide_count(ended: &Ended) -> (bool, Count) {
    let is_well = matches!(ended.status, Ok(true));
    let mut count = Count::default();
    ended.lines.iter().for_each(|line| count.add(read_line(line)));
    if !is_well {
        count.failed = count.failed.max(1);
    }
    (is_well, count)
}

fn begin(folder: &Path, program: Program, ended: &Sender<Ended>) {
    let (folder, ended) = (folder.to_owned(), ended.clone());
    std::thread::spawn(move || {
        let (started, mut lines) = (Instant::now(), Vec::new());
        let status = listen(&folder, &program.path, &mut lines);
        let seconds = started.elapsed().as_secs();
        // Who does not listen any more has failed already.
        let _ = ended.send(Ended { name: program.name, lines, status, seconds });
    });
}

/// Runs a program to its end; whether that was a good one.
fn listen(folder: &Path, program: &Path, lines: &mut Vec<String>) -> std::io::Result<bool> {
    let (said, pipe) = std::io::pipe()?;
    let mut command = Command::new(program);
    // Its tests share a world, so they go one by one.
    command.args(["--test-threads=1", "--nocapture"]).current_dir(folder).stdin(Stdio::null());
    let mut child = command.stdout(pipe.try_clone()?).stderr(pipe).spawn()?;
    // The command holds the pipe's other end, which would never end.
    drop(command);
    for line in BufReader::new(said).split(b'\n') {
        lines.push(String::from_utf8_lossy(&line?).into_owned());
    }
    Ok(child.wait()?.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(names: &[&str]) -> Vec<Program> {
        names.iter().map(|name| Program { name: (*name).to_owned(), path: PathBuf::new() }).collect()
    }

    #[test]
    fn the_first_that_fits_is_next() {
        let waiting = named(&["keyserver", "tier", "protocols", "identity", "nobody_knows_it"]);
        for (free, expected) in [(ROOM, Some(0)), (BOUNDS, Some(1)), (WORKS, Some(2)), (WAITS, Some(3)), (0, None)] {
            assert_eq!(decide_next(&waiting, free), expected, "{free} free");
        }
        assert_eq!(decide_next(&waiting[4..], ROOM - 1), None, "what is not known runs alone");
        assert_eq!(decide_next(&[], ROOM), None);
    }

    #[test]
    fn cargo_s_words_are_read() {
        let manifest = Path::new("/repo/tests/e2e/Cargo.toml");
        let line = |manifest: &str, test: bool| {
            format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"{manifest}","target":{{"name":"canal-e2e"}},"profile":{{"test":{test}}},"executable":"/x"}}"#
            )
        };
        let expected = Program { name: "canal_e2e".into(), path: "/x".into() };
        assert_eq!(program(&line("/repo/tests/e2e/Cargo.toml", true), manifest), Some(expected));
        assert_eq!(program(&line("/repo/world/Cargo.toml", true), manifest), None);
        assert_eq!(program(&line("/repo/tests/e2e/Cargo.toml", false), manifest), None);
        assert_eq!(program("no JSON", manifest), None);
    }

    #[test]
    fn who_dies_silently_has_failed() {
        let ended = |lines: &[&str], status| Ended {
            name: "x".into(),
            lines: lines.iter().map(|line| (*line).to_owned()).collect(),
            status,
            seconds: 0,
        };
        let good = "test result: ok. 2 passed; 0 failed; 1 ignored;";
        for (what, lines, status, expected) in [
            ("well", &[good][..], Ok(true), (true, 2, 0, 1)),
            ("killed at its end", &[good][..], Ok(false), (false, 2, 1, 1)),
            ("killed at once", &[][..], Ok(false), (false, 0, 1, 0)),
            ("never started", &[][..], Err(std::io::ErrorKind::NotFound.into()), (false, 0, 1, 0)),
        ] {
            let (is_well, count) = decide_count(&ended(lines, status));
            assert_eq!((is_well, count.passed, count.failed, count.skipped), expected, "{what}");
        }
    }
}
