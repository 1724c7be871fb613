//! The newest lines of the access log in memory, by tenant, for operators who read them remotely.
//! The writer's thread appends to it and never waits: old lines are evicted, and a slow reader
//! loses lines.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use canal_model::ids::TenantName;

use super::lines::{LineSender, Lines, count_lines, line_queue};

/// Bytes of retained lines of all tenants. The tenant with the most bytes loses its oldest lines.
/// Sixteen tenants have their whole part (`TAIL_BYTES_PER_TENANT_MAX`) at a time.
pub const TAIL_BYTES_MAX: usize = 8 << 20;
/// Bytes of retained lines of one tenant. Some thousand lines of ordinary length. Nobody measured
/// what operators need.
pub const TAIL_BYTES_PER_TENANT_MAX: usize = 512 << 10;
/// Maximum size in bytes of the pieces in which lines are retained and passed on. Only a single
/// longer line exceeds it. As long as the longest line (`LINE_MAX`), so that a piece is no larger
/// than one line may be.
const PIECE_BYTES_MAX: usize = 16 << 10;
/// Cost of a piece in addition to its bytes. About what the list's own entry takes.
const PIECE_BYTES: usize = 64;

/// The newest lines of one process. Clones share the same lines.
#[derive(Debug, Clone, Default)]
pub struct LogTails {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Debug, Default)]
struct Inner {
    /// Number of the newest piece.
    number: u64,
    bytes: usize,
    tails: BTreeMap<Option<TenantName>, Tail>,
    followers: Vec<Follower>,
}

/// The newest lines of one tenant, or those without a tenant.
#[derive(Debug, Default)]
struct Tail {
    bytes: usize,
    pieces: VecDeque<(u64, Bytes)>,
}

#[derive(Debug)]
struct Follower {
    /// `None` follows the lines of all tenants.
    tenant: Option<TenantName>,
    lines: LineSender,
}

impl Tail {
    fn pop(&mut self) -> usize {
        let bytes = self
            .pieces
            .pop_front()
            .map_or(0, |(_, lines)| lines.len() + PIECE_BYTES);
        self.bytes -= bytes;
        bytes
    }
}

impl LogTails {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panic cannot leave the tables inconsistent, so a poisoned lock is used as it is.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends whole lines of one tenant, or lines without a tenant.
    pub(crate) fn push(&self, tenant: Option<&TenantName>, lines: &[u8]) {
        let mut inner = self.lock();
        for piece in pieces(lines) {
            inner.push(tenant, Bytes::copy_from_slice(piece));
        }
    }

    /// Returns the newest `count` retained lines, of one tenant or of all, and with `follow` a
    /// queue of the lines to come.
    pub fn read(
        &self,
        tenant: Option<&TenantName>,
        count: usize,
        follow: bool,
    ) -> (Vec<Bytes>, Option<Lines>) {
        let mut inner = self.lock();
        let of = inner
            .tails
            .iter()
            .filter(|(owner, _)| tenant.is_none() || owner.as_ref() == tenant);
        let mut pieces: Vec<&(u64, Bytes)> = of.flat_map(|(_, tail)| &tail.pieces).collect();
        // The numbers restore the order across tenants.
        pieces.sort_by_key(|(number, _)| *number);
        let mut lines_back = VecDeque::new();
        let mut left = count;
        for (_, lines) in pieces.into_iter().rev() {
            if left == 0 {
                break;
            }
            let lines = last_lines(lines, left);
            left -= usize::try_from(count_lines(&lines))
                .unwrap_or(left)
                .min(left);
            lines_back.push_front(lines);
        }
        let lines = follow.then(|| {
            let (sender, lines) = line_queue();
            inner
                .followers
                .retain(|follower| !follower.lines.is_closed());
            inner.followers.push(Follower {
                tenant: tenant.cloned(),
                lines: sender,
            });
            lines
        });
        (lines_back.into(), lines)
    }
}

impl Inner {
    fn push(&mut self, tenant: Option<&TenantName>, lines: Bytes) {
        let mut is_gone = false;
        for follower in self
            .followers
            .iter()
            .filter(|f| f.tenant.is_none() || f.tenant.as_ref() == tenant)
        {
            is_gone |= !follower.lines.send(lines.clone()) && follower.lines.is_closed();
        }
        if is_gone {
            self.followers
                .retain(|follower| !follower.lines.is_closed());
        }
        self.number += 1;
        let number = self.number;
        let cost = lines.len() + PIECE_BYTES;
        let tail = self.tails.entry(tenant.cloned()).or_default();
        tail.pieces.push_back((number, lines));
        tail.bytes += cost;
        self.bytes += cost;
        while tail.bytes > TAIL_BYTES_PER_TENANT_MAX {
            self.bytes -= tail.pop();
        }
        if self.bytes > TAIL_BYTES_MAX {
            self.make_room();
        }
    }

    /// Evicts the older half of the largest tails until an eighth is free. A search for the largest
    /// tail at every line would cost too much.
    fn make_room(&mut self) {
        while self.bytes > TAIL_BYTES_MAX / 8 * 7 {
            let Some(tail) = self.tails.values_mut().max_by_key(|tail| tail.bytes) else {
                return;
            };
            let half = tail.bytes / 2;
            while tail.bytes > half {
                self.bytes -= tail.pop();
            }
        }
        self.tails.retain(|_, tail| !tail.pieces.is_empty());
    }
}

/// Splits whole lines into pieces of whole lines.
fn pieces(mut lines: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        if lines.is_empty() {
            return None;
        }
        let within = &lines[..lines.len().min(PIECE_BYTES_MAX)];
        let end = within
            .iter()
            .rposition(|byte| *byte == b'\n')
            .or_else(|| lines.iter().position(|byte| *byte == b'\n'));
        let (piece, rest) = lines.split_at(end.map_or(lines.len(), |at| at + 1));
        lines = rest;
        Some(piece)
    })
}

/// Returns the last `count` of the lines.
fn last_lines(lines: &Bytes, count: usize) -> Bytes {
    let mut ends = lines
        .iter()
        .enumerate()
        .rev()
        .filter(|(_, byte)| **byte == b'\n')
        .map(|(at, _)| at);
    // The line before the first wanted one ends at `at`.
    ends.nth(count)
        .map_or_else(|| lines.clone(), |at| lines.slice(at + 1..))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(n: &str) -> TenantName {
        n.parse().unwrap()
    }

    fn text(lines_back: &[Bytes]) -> String {
        lines_back
            .iter()
            .map(|b| String::from_utf8_lossy(b).into_owned())
            .collect()
    }

    #[tokio::test]
    async fn a_tenant_reads_its_own_lines_and_the_provider_all_in_order() {
        let tails = LogTails::default();
        let (alpha, beta) = (name("alpha"), name("beta"));
        let (_, mut of_alpha) = tails.read(Some(&alpha), 0, true);
        tails.push(Some(&alpha), b"a1\na2\n");
        tails.push(Some(&beta), b"b1\n");
        tails.push(None, b"n1\n");
        tails.push(Some(&alpha), b"a3\n");
        for (tenant, count, want) in [
            (Some(&alpha), 9, "a1\na2\na3\n"),
            (Some(&alpha), 2, "a2\na3\n"),
            (Some(&alpha), 0, ""),
            (Some(&beta), 9, "b1\n"),
            (Some(&name("gamma")), 9, ""),
            (None, 9, "a1\na2\nb1\nn1\na3\n"),
            (None, 3, "b1\nn1\na3\n"),
        ] {
            assert_eq!(
                text(&tails.read(tenant, count, false).0),
                want,
                "{tenant:?} {count}"
            );
        }
        let of_alpha = of_alpha.as_mut().unwrap();
        assert_eq!(
            text(&[
                of_alpha.recv().await.unwrap(),
                of_alpha.recv().await.unwrap()
            ]),
            "a1\na2\na3\n"
        );
        assert!(of_alpha.try_recv().is_none(), "nothing of others");
    }

    #[test]
    fn a_loud_tenant_pushes_out_its_own_lines_only_and_the_whole_is_bounded() {
        let tails = LogTails::default();
        tails.push(Some(&name("quiet")), b"here\n");
        let line = [vec![b'x'; 999], vec![b'\n']].concat();
        for tenant in 0..40 {
            let loud = name(&format!("t{tenant}"));
            (0..2_000).for_each(|_| tails.push(Some(&loud), &line));
            assert!(tails.lock().bytes <= TAIL_BYTES_MAX);
        }
        let inner = tails.lock();
        assert!(
            inner
                .tails
                .values()
                .all(|tail| tail.bytes <= TAIL_BYTES_PER_TENANT_MAX)
        );
        assert_eq!(
            inner.bytes,
            inner.tails.values().map(|tail| tail.bytes).sum::<usize>()
        );
        drop(inner);
        assert_eq!(
            text(&tails.read(Some(&name("quiet")), 9, false).0),
            "here\n"
        );
    }

    #[test]
    fn long_blocks_are_cut_between_lines() {
        let line = [vec![b'x'; 5_999], vec![b'\n']].concat();
        let block: Vec<u8> = line.iter().copied().cycle().take(60_000).collect();
        let cut: Vec<_> = pieces(&block).collect();
        assert!(
            cut.iter()
                .all(|piece| piece.len() <= PIECE_BYTES_MAX && piece.ends_with(b"\n"))
        );
        assert_eq!(cut.concat(), block);
        let long = [vec![b'x'; 20_000], vec![b'\n']].concat();
        assert_eq!(pieces(&[long.clone(), line].concat()).next().unwrap(), long);
    }
}
