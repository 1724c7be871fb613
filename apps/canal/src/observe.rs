//! Observation of data planes through the controller: begins an observation, reads its events, and
//! reports missing data on stderr. The verbs print the data. Start at [`begin`].

use std::collections::BTreeMap;

use canal_wire::api::observe_request::Subject;
use canal_wire::api::{ObserveEvent, ObserveRequest};
use tonic::Streaming;

use crate::admin::{self, Admin};
use crate::exit::{ExitStatus, VerbError, VerbResult};
use crate::signals::StopSignal;

/// Maximum bytes of complete answers, over all data planes.
/// A data plane's has at most 32 MiB, so eight of the largest fit (docs/operations/limits.md).
const ANSWERS_BYTES_MAX: usize = 256 << 20;

/// An observation that is in progress.
#[derive(Debug)]
pub(crate) struct OperatorObservation {
    events: Streaming<ObserveEvent>,
    /// Names of the observed data planes.
    pub(crate) sources: Vec<String>,
    failed: Vec<String>,
    /// Some of the failed data planes are connected.
    is_refused: bool,
}

/// Begins an observation at the controller. It fails if a named data plane does not exist, or if
/// the operator may not see it.
pub(crate) async fn begin(
    admin: &mut Admin,
    request: ObserveRequest,
) -> VerbResult<OperatorObservation> {
    let mut events = admin
        .observe(request)
        .await
        .map_err(|status| admin::refused(&status))?
        .into_inner();
    let first = events
        .message()
        .await
        .map_err(|status| admin::refused(&status))?;
    let sources = first.map(|event| event.listening).unwrap_or_default();
    Ok(OperatorObservation {
        events,
        sources,
        failed: Vec::new(),
        is_refused: false,
    })
}

/// Returns a request about `subject`, for one tenant or for all that the operator may see.
pub(crate) fn request(
    subject: Subject,
    tenant: Option<&str>,
    data_planes: &[String],
) -> ObserveRequest {
    let tenant = tenant.unwrap_or_default().to_owned();
    ObserveRequest {
        subject: subject.into(),
        tenant,
        data_planes: data_planes.to_vec(),
        ..ObserveRequest::default()
    }
}

impl OperatorObservation {
    /// Returns the next data with its source, or `None` at the end. Dropped lines and data planes
    /// that are gone are reported on stderr.
    async fn next(&mut self) -> VerbResult<Option<(String, Vec<u8>)>> {
        loop {
            let Some(event) = self
                .events
                .message()
                .await
                .map_err(|status| admin::refused(&status))?
            else {
                return Ok(None);
            };
            if event.dropped > 0 {
                eprintln!(
                    "canal: {}: {} lines dropped: they arrived faster than this command read them",
                    event.source, event.dropped
                );
            }
            if let Some(ended) = event.ended.filter(|ended| !ended.reason.is_empty()) {
                eprintln!("canal: {}: {}: {}", event.source, ended.reason, ended.why);
                self.is_refused |= ended.reason != "disconnected";
                self.failed.push(event.source.clone());
            }
            if !event.data.is_empty() {
                return Ok(Some((event.source, event.data)));
            }
        }
    }

    /// Returns the result of a verb after all its data planes have ended.
    fn outcome(&self) -> VerbResult {
        match self.failed.len() {
            0 => Ok(()),
            n if n < self.sources.len() => Err(VerbError::already_printed(ExitStatus::Partial)),
            _ if self.is_refused => Err(VerbError::already_printed(ExitStatus::Failed)),
            _ => Err(VerbError::already_printed(ExitStatus::Unreachable)),
        }
    }

    /// Calls `each` with every line until it returns false, all data planes have ended, or a signal
    /// arrives.
    pub(crate) async fn lines(
        mut self,
        stop: &mut StopSignal,
        mut each: impl FnMut(&str) -> VerbResult<bool>,
    ) -> VerbResult {
        loop {
            let next = tokio::select! {
                () = stop.wait() => return Err(VerbError::already_printed(ExitStatus::Interrupted)),
                next = self.next() => next?,
            };
            let Some((_, data)) = next else {
                return self.outcome();
            };
            for line in String::from_utf8_lossy(&data).lines() {
                if !each(line)? {
                    return Ok(());
                }
            }
        }
    }

    /// Returns complete answers by source. It fails if one of them is not complete.
    pub(crate) async fn collect(mut self) -> VerbResult<BTreeMap<String, String>> {
        let mut answers: BTreeMap<String, Vec<u8>> = BTreeMap::new();
        let mut bytes = 0;
        while let Some((source, data)) = self.next().await? {
            bytes += data.len();
            if bytes > ANSWERS_BYTES_MAX {
                let what = format!("the answers have more than {} MiB", ANSWERS_BYTES_MAX >> 20);
                return Err(VerbError::failed(
                    source,
                    what,
                    "query fewer data planes at once",
                ));
            }
            answers.entry(source).or_default().extend_from_slice(&data);
        }
        self.outcome()?;
        Ok(answers
            .into_iter()
            .map(|(source, data)| (source, String::from_utf8_lossy(&data).into_owned()))
            .collect())
    }
}

/// Returns a line that is safe for a terminal: control characters of a data plane must not control
/// it.
pub(crate) fn printable(line: &str) -> String {
    line.chars()
        .map(|c| {
            if c.is_control() && c != '\t' {
                '\u{fffd}'
            } else {
                c
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_steers_no_terminal() {
        assert_eq!(printable("a\tb\u{1b}[2Jc"), "a\tb\u{fffd}[2Jc");
    }
}
