//! Formats the explanation of an arrival at a Gateway for people. No program parses the text.

use std::fmt;

use super::arrival::{ArrivalExplanation, ArrivalOutcome, describe_outcome};
use super::route_trace::{MatchStanding, MatchTrace};
use super::{HopDecision, write_hops};

/// Maximum number of hosts that the text lists of those that are not the request's. Nobody measured
/// this value; a person reads the first few.
const OTHER_HOSTS_MAX: usize = 16;
/// Maximum number of matches that the text lists beside the one that decides. Nobody measured this
/// value.
const MATCHES_MAX: usize = 64;

impl fmt::Display for ArrivalExplanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let addresses: Vec<String> = self.addresses.iter().map(ToString::to_string).collect();
        let addresses = match addresses.as_slice() {
            // A Gateway that requests no address gets one of the tenant's pool.
            [] => "an address of the pool".to_owned(),
            some => some.join(", "),
        };
        writeln!(f, "gateway: {} at {addresses}", self.gateway)?;
        let of_port = self.listeners.iter().filter(|it| it.is_of_port);
        for listener in of_port {
            let mark = if listener.is_chosen { "=>" } else { "  " };
            writeln!(
                f,
                "{mark} listener {} ({} {} for {}): {}",
                listener.name, listener.protocol, listener.port, listener.host, listener.why
            )?;
        }
        let others = self.listeners.iter().filter(|it| !it.is_of_port);
        let others: Vec<String> = others
            .map(|it| format!("{} {}", it.name, it.port))
            .collect();
        if !others.is_empty() {
            writeln!(f, "   listeners of other ports: {}", others.join(", "))?;
        }
        writeln!(f, "tls: {}", self.tls)?;
        for (number, filter) in (1..).zip(&self.filters) {
            writeln!(f, "filter {number}, before the route: {filter}")?;
        }
        if !self.filters.is_empty() {
            writeln!(
                f,
                "   the route is that of the request as the filters leave it"
            )?;
        }
        writeln!(f, "route: {}", self.route)?;
        write_matches(f, &self.matches)?;
        for (host, count) in self.other_hosts.iter().take(OTHER_HOSTS_MAX) {
            writeln!(f, "   host {host}: {count} matches, for another host")?;
        }
        if self.other_hosts.len() > OTHER_HOSTS_MAX {
            let rest = self.other_hosts.len() - OTHER_HOSTS_MAX;
            writeln!(f, "   and {rest} other hosts")?;
        }
        for backend in &self.backends {
            let (weight, share, target) = (backend.weight, backend.share, &backend.target);
            writeln!(f, "backend {target}, weight {weight} ({share:.1} %)")?;
            for change in &backend.changes {
                writeln!(f, "  {change}")?;
            }
            if backend.endpoints.is_empty() {
                writeln!(f, "  no endpoint is ready")?;
            }
            for endpoint in &backend.endpoints {
                writeln!(f, "  endpoint {endpoint}")?;
            }
        }
        write_hops(f, &self.steps)?;
        writeln!(f, "=> {}", self.result())
    }
}

impl ArrivalExplanation {
    /// Returns what the client gets, as text.
    pub fn result(&self) -> String {
        let denied = self.steps.iter().find_map(|step| match &step.outcome {
            HopDecision::Denies(why) => Some(why),
            _ => None,
        });
        match (&self.outcome, denied) {
            (ArrivalOutcome::Answered(_) | ArrivalOutcome::Forwarded, Some(why))
                if !self.passes() =>
            {
                format!("denied: {why}")
            }
            (ArrivalOutcome::Forwarded, _) => "passes".to_owned(),
            (ArrivalOutcome::Answered(answer), _) => {
                format!("passes: the gateway answers {}", answer.status)
            }
            (ArrivalOutcome::LocalReply { .. }, _) => {
                format!("refused: {}", describe_outcome(&self.outcome))
            }
            (ArrivalOutcome::Closed(why), _) => format!("closed: {why}"),
        }
    }
}

/// Writes the matches that apply to a request, in match order.
pub(super) fn write_matches(f: &mut fmt::Formatter<'_>, matches: &[MatchTrace]) -> fmt::Result {
    let listed = matches.iter().enumerate().filter(|(at, trace)| {
        // The match that decides is listed in any case.
        *at < MATCHES_MAX || trace.standing == MatchStanding::Decides
    });
    for (_, trace) in listed {
        let (conditions, rule) = (&trace.conditions, &trace.rule);
        match &trace.standing {
            MatchStanding::Decides => writeln!(f, "=> {conditions} [{rule}]: decides")?,
            MatchStanding::Unmet(why) => writeln!(f, "   {conditions} [{rule}]: {why}")?,
            MatchStanding::Later(why) => {
                writeln!(f, "   {conditions} [{rule}]: holds too, but later: {why}")?;
            }
        }
    }
    if matches.len() > MATCHES_MAX {
        let rest = matches.len() - MATCHES_MAX;
        // One of them may be the match that decides.
        writeln!(f, "   {rest} more matches: -o json lists them")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use canal_model::program::RouteKey;

    use super::*;

    /// Formats only the matches.
    struct MatchList(Vec<MatchTrace>);

    impl fmt::Display for MatchList {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write_matches(f, &self.0)
        }
    }

    #[test]
    fn the_match_that_decides_is_listed_beyond_the_limit() {
        let trace = |n: usize| MatchTrace {
            rule: RouteKey {
                tenant: "alpha".parse().unwrap(),
                kind: "HTTPRoute".to_owned(),
                namespace: "shop".parse().unwrap(),
                name: format!("r{n}").parse().unwrap(),
                rule: "0".to_owned(),
            },
            conditions: "path under \"/\"".to_owned(),
            standing: match n {
                99 => MatchStanding::Decides,
                _ => MatchStanding::Unmet("not so".to_owned()),
            },
        };
        let text = MatchList((0..100).map(trace).collect()).to_string();
        assert_eq!(text.lines().count(), MATCHES_MAX + 2, "{text}");
        assert!(text.contains("/r99/0]: decides"), "{text}");
        assert!(text.contains("36 more matches"), "{text}");
        let all = MatchList((0..MATCHES_MAX).map(trace).collect()).to_string();
        assert!(!all.contains("more matches"), "{all}");
    }
}
