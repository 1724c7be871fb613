//! The library as a small program: up, down, list, check, exec. It is also the supervisor of the
//! worlds that this crate's tests build, because those tests must not depend on the CLI.

use std::process::ExitCode;
use std::time::Duration;

use canal_world::{Topology, World, WorldOptions, WorldPlan, supervise};

const USAGE: &str = "usage: canal-world check FILE | up FILE | hold FILE | down NAME | list | gc | hosts NAME | exec NAME HOST COMMAND… | supervise NAME";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    match run(&words) {
        Ok(code) => code,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}

fn run(words: &[&str]) -> Result<ExitCode, String> {
    match words {
        ["supervise", name] => supervise(name).map_err(text)?,
        ["check", file] => print!("{}", WorldPlan::of(&load(file)?)),
        ["up", file] => drop(up(file, false)?),
        ["hold", file] => {
            let world = up(file, true)?;
            println!("up {}", world.name());
            // A test kills this process, to see that the world disappears with its owner.
            // If the test itself dies, the world ends after this time.
            // It is thirty times the `STEP_TIMEOUT` of such a test.
            std::thread::sleep(Duration::from_secs(600));
        }
        ["down", name] => World::down_by_name(name).map_err(text)?,
        ["gc"] => println!("{}", World::gc().map_err(text)?.join("\n")),
        ["list"] => {
            for listed in World::list().map_err(text)? {
                println!(
                    "{} alive={} owner={:?}",
                    listed.name, listed.alive, listed.owner
                );
            }
        }
        ["hosts", name] => {
            for host in World::open(name)
                .and_then(|world| world.hosts())
                .map_err(text)?
            {
                println!(
                    "{:40} {:10} {:?} {:?}",
                    host.environment.name,
                    host.environment.kind,
                    host.environment.ip4,
                    host.process
                );
            }
        }
        ["exec", name, host, command @ ..] => {
            let mut command = World::open(name)
                .and_then(|world| world.exec(host, command))
                .map_err(text)?;
            let status = command.status().map_err(text)?;
            // A command that a signal ended has no code of its own.
            return Ok(ExitCode::from(
                u8::try_from(status.code().unwrap_or(1)).unwrap_or(1),
            ));
        }
        _ => return Err(USAGE.into()),
    }
    Ok(ExitCode::SUCCESS)
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn load(file: &str) -> Result<Topology, String> {
    Topology::load(file).map_err(|problems| {
        problems
            .iter()
            .map(|problem| format!("{problem}\n"))
            .collect()
    })
}

fn up(file: &str, ephemeral: bool) -> Result<World, String> {
    let own = std::env::current_exe().map_err(text)?.display().to_string();
    let options = WorldOptions {
        ephemeral,
        supervisor: vec![own, "supervise".into()],
        ..WorldOptions::default()
    };
    let world = World::up(&load(file)?, &options).map_err(text)?;
    // Nobody measured how long the largest world needs; `up` has built it by then.
    world.wait_ready(Duration::from_secs(60)).map_err(text)?;
    Ok(world)
}
