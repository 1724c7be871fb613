//! The links of a running world that have a relay: reads what the relays do to frames, and changes
//! it while the world runs. `relay` carries the frames. Start at [`World::impair`].

use std::path::PathBuf;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::impairment::Impairment;
use crate::plan::relay_name;
use crate::relay::{self, LinkReport};
use crate::world::World;

impl World {
    /// Returns the counters and the current impairment of a host's link. A link between AZs has the
    /// name of its relay, such as `relay-az1-az2`.
    ///
    /// # Errors
    ///
    /// The link has no relay.
    pub fn link_report(&self, host: &str) -> Result<LinkReport> {
        relay::link_report(&self.relay_dir(host)?)
    }

    /// Impairs a host's link until the result is dropped. The impairment applies in both directions
    /// to every frame that enters the link from now on. Open connections continue.
    ///
    /// # Errors
    ///
    /// The link has no relay; in the topology it needs a `delay`, which may be `0ms`.
    pub fn impair(&self, host: &str, impairment: Impairment) -> Result<ImpairedLink> {
        let dir = self.relay_dir(host)?;
        let before = relay::link_report(&dir)?.impairment;
        relay::impair(&dir, impairment)?;
        Ok(ImpairedLink { dir, before })
    }

    /// Delays a host's link by this time in each direction, until the result is dropped.
    ///
    /// # Errors
    ///
    /// See [`World::impair`].
    pub fn delay(&self, host: &str, delay: Duration) -> Result<ImpairedLink> {
        self.impair(host, Impairment::delay(delay))
    }

    fn relay_dir(&self, host: &str) -> Result<PathBuf> {
        let found = self.host(host)?;
        if found.environment.kind == "relay" {
            return Ok(found.environment.data);
        }
        let relay = relay_name(&found.environment.name);
        let relay = self
            .hosts()?
            .into_iter()
            .find(|other| other.environment.name == relay);
        relay.map(|relay| relay.environment.data).ok_or_else(|| Error::Supervisor {
            world: self.name().into(),
            message: format!("the link of {host:?} has no relay; fix: write `delay: 0ms` or more on it in the topology"),
        })
    }
}

/// A link that is impaired as long as this value exists.
#[derive(Debug)]
pub struct ImpairedLink {
    dir: PathBuf,
    before: Impairment,
}

impl Drop for ImpairedLink {
    fn drop(&mut self) {
        // The world may be gone already, and the relay with it.
        let _ = relay::impair(&self.dir, self.before);
    }
}
