//! The relay of a world's link as a process. The world's supervisor starts it with `carry`; `show`
//! prints the link's state as JSON. The work is done by `canal_world::relay_link`.
#![forbid(unsafe_code)]

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use canal_world::{Impairment, link_report, relay_link};

const USAGE: &str = "usage: canal-world-relay carry DELAY_US JITTER_US LOSS_PPM SEED | show
Both run in a relay's host: canal world exec relay-gw-1 -- canal-world-relay show";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    match run(&words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}

fn run(words: &[&str]) -> Result<(), String> {
    match words {
        ["carry", delay, jitter, loss, seed] => {
            let microseconds = |text: &str| {
                text.parse()
                    .map(Duration::from_micros)
                    .map_err(|_| USAGE.to_owned())
            };
            let loss_ppm = loss.parse().map_err(|_| USAGE)?;
            let impairment = Impairment {
                delay: microseconds(delay)?,
                jitter: microseconds(jitter)?,
                loss_ppm,
            };
            relay_link(impairment, seed.parse().map_err(|_| USAGE)?)
                .map_err(|error| error.to_string())
        }
        ["show"] => {
            let report = link_report(Path::new(".")).map_err(|error| error.to_string())?;
            println!(
                "{}",
                serde_json::to_string_pretty(&report).map_err(|error| error.to_string())?
            );
            Ok(())
        }
        _ => Err(USAGE.into()),
    }
}
