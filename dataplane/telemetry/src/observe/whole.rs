//! Answers that are built in memory before they are sent: the configuration and the metrics. Their
//! number, size and time are bounded.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use canal_model::ids::TenantName;
use canal_runtime::ShareHolder;
use canal_wire::OBSERVE_DATA_BYTES_MAX;
use canal_wire::observe::Subject;

use super::ObservationContext;
use super::session::{ObservationError, Outgoing};

/// Size limit of one config dump or one metrics answer, in bytes. With four of them in memory
/// (`WHOLE_ANSWERS_MAX`) a process needs 128 MiB. Nobody measured the largest answers.
pub const WHOLE_ANSWER_BYTES_MAX: usize = 32 << 20;
/// Complete answers in memory at once. A tenant may have one of them, and one is reserved for the
/// provider.
pub const WHOLE_ANSWERS_MAX: usize = 4;
/// Time within which the reader must have read an answer.
/// The largest answer then needs half a MiB per second, and its memory is free after this.
const SEND_TIMEOUT: Duration = Duration::from_secs(60);

/// Builds the answer and sends it.
pub(super) async fn send(
    observer: &Arc<ObservationContext>,
    subject: Subject,
    tenant: Option<TenantName>,
    out: &Outgoing,
) -> Result<(), ObservationError> {
    let holder = tenant
        .clone()
        .map_or(ShareHolder::Provider, ShareHolder::Tenant);
    let busy = |_| {
        ObservationError::refused(
            "busy",
            "the maximum number of dumps and metrics is being read; fix: try again in a moment",
        )
    };
    let permit = observer.whole.take_revocable(&holder, 1).map_err(busy)?;
    let maker = observer.clone();
    // Rendering takes long enough to delay other tasks of this runtime.
    // It cannot be cancelled, so a revocation meanwhile takes effect below.
    let made = tokio::task::spawn_blocking(move || match subject {
        Subject::ConfigDump => dump(&maker, tenant.as_ref()),
        // The caller sends only these two kinds here.
        _ => metrics(&maker, tenant.as_ref()),
    });
    let text = made.await.map_err(|_| {
        ObservationError::refused(
            "failed",
            "the answer could not be created; fix: check the process's log",
        )
    })??;
    let work = async {
        for piece in text.chunks(OBSERVE_DATA_BYTES_MAX) {
            out.send(piece.to_vec(), 0).await?;
        }
        Ok(())
    };
    tokio::select! {
        sent = work => sent,
        () = tokio::time::sleep(SEND_TIMEOUT) => {
            Err(ObservationError::refused("time", format!("the answer was not read within {} s; fix: read faster", SEND_TIMEOUT.as_secs())))
        }
        () = permit.revoked() => Err(ObservationError::refused("revoked", "the answer was discarded in favour of another one; fix: try again in a moment")),
    }
}

fn too_large() -> ObservationError {
    let max = WHOLE_ANSWER_BYTES_MAX >> 20;
    ObservationError::refused(
        "too_large",
        format!("the answer is larger than {max} MiB; fix: use the process's own admin socket"),
    )
}

fn dump(
    observer: &ObservationContext,
    tenant: Option<&TenantName>,
) -> Result<Vec<u8>, ObservationError> {
    let mut text = Bounded(Vec::new());
    match serde_json::to_writer_pretty(&mut text, &(observer.sources.dump)(tenant)) {
        Ok(()) => Ok(text.0),
        Err(_) => Err(too_large()),
    }
}

fn metrics(
    observer: &ObservationContext,
    tenant: Option<&TenantName>,
) -> Result<Vec<u8>, ObservationError> {
    let mut text = Bounded(Vec::new());
    let registry = &observer.sources.registry;
    let mut pieces = match tenant {
        Some(tenant) => registry.exposition_of(tenant.as_str()),
        None => registry.exposition(),
    };
    match pieces.try_for_each(|piece| io::Write::write_all(&mut text, piece.as_bytes())) {
        Ok(()) => Ok(text.0),
        Err(_) => Err(too_large()),
    }
}

/// A buffer that accepts at most [`WHOLE_ANSWER_BYTES_MAX`].
struct Bounded(Vec<u8>);

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > WHOLE_ANSWER_BYTES_MAX {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_has_a_largest_size() {
        let mut text = Bounded(Vec::new());
        let piece = vec![0; 1 << 20];
        let taken = (0..64)
            .take_while(|_| io::Write::write_all(&mut text, &piece).is_ok())
            .count();
        assert_eq!(taken, WHOLE_ANSWER_BYTES_MAX >> 20);
    }
}
