//! TCP segments of services, and the replica to which each must go.

use super::*;

/// Expected receiver of a segment.
pub(super) enum SegmentReceiver {
    /// The stack of this replica.
    Local,
    /// The replica with this number, with this hop in the forwarded frame.
    ForwardedTo(u8, u8),
}
use SegmentReceiver::{ForwardedTo, Local};

/// Case, service, hop of the received frame, TCP flags, expected receiver, counter.
///
/// Hop 0 leaves the choice of the head to this replica; above 0, the sender has chosen this
/// replica. An edge writes the index of its choice in the chain. A replica writes the hop that it
/// received, plus 1.
pub(super) type SegmentCase = (&'static str, u32, u8, u8, SegmentReceiver, &'static str);

/// Returns the SYNs for a gateway that listens. The service selects the chain (`CHAINS`), in which
/// this replica has number 1.
fn syns() -> Vec<SegmentCase> {
    vec![
        ("SYN at the head", 1, 0, SYN, Local, "new"),
        // 0xc0 are the flags ECE and CWR (RFC 3168).
        ("SYN with ECN", 1, 0, SYN | 0xc0, Local, "new"),
        (
            "SYN behind the head",
            2,
            0,
            SYN,
            ForwardedTo(2, 1),
            "forwarded_new",
        ),
        ("SYN that was sent here", 2, 1, SYN, Local, "new"),
        ("SYN that a replica sent here", 2, 2, SYN, Local, "new"),
        (
            "SYN of another's bucket",
            3,
            0,
            SYN,
            ForwardedTo(2, 1),
            "forwarded_new",
        ),
        (
            "SYN of another's bucket, but sent here",
            3,
            2,
            SYN,
            Local,
            "new",
        ),
        (
            "SYN, those before are down or unknown",
            5,
            0,
            SYN,
            Local,
            "new",
        ),
        ("SYN, no replica is up", 7, 0, SYN, Local, "new"),
        (
            "SYN and ACK begin nothing",
            2,
            0,
            SYN | ACK,
            ForwardedTo(2, 1),
            "forwarded",
        ),
    ]
}

/// Returns the segments of connections for a gateway that listens. The service selects the chain
/// (`CHAINS`), in which this replica has number 1.
fn later_segments() -> Vec<SegmentCase> {
    vec![
        (
            "from the head on",
            1,
            0,
            ACK,
            ForwardedTo(2, 1),
            "forwarded",
        ),
        (
            "behind the own position, at any hop count",
            1,
            2,
            ACK,
            ForwardedTo(2, 3),
            "forwarded",
        ),
        ("FIN", 1, 2, FIN | ACK, ForwardedTo(2, 3), "forwarded"),
        ("RST", 1, 2, RST, ForwardedTo(2, 3), "forwarded"),
        ("no flags", 1, 2, 0, ForwardedTo(2, 3), "forwarded"),
        ("the end of the chain", 8, 1, ACK, Local, "unowned"),
        (
            "sent here by a table that is not ours",
            3,
            2,
            ACK,
            ForwardedTo(2, 3),
            "forwarded",
        ),
        (
            "the last hop but one",
            3,
            7,
            ACK,
            ForwardedTo(2, 8),
            "forwarded",
        ),
        ("the last hop", 3, 8, ACK, Local, "unowned"),
        (
            "back to the head, if the edge chose another",
            2,
            0,
            ACK,
            ForwardedTo(2, 1),
            "forwarded",
        ),
        ("not to oneself", 2, 1, ACK, ForwardedTo(3, 2), "forwarded"),
        ("alone", 4, 0, ACK, Local, "unowned"),
        (
            "over one that is down, and over oneself",
            6,
            1,
            ACK,
            ForwardedTo(3, 2),
            "forwarded",
        ),
        ("no other replica is up", 7, 0, ACK, Local, "unowned"),
        (
            "the longest chain, its begin",
            8,
            0,
            ACK,
            ForwardedTo(2, 1),
            "forwarded",
        ),
        ("the longest chain, its end", 8, 7, ACK, Local, "unowned"),
        ("a hop behind all chains", 8, 255, ACK, Local, "unowned"),
    ]
}

/// Returns the cases for a gateway that listens.
pub(super) fn segments() -> Vec<SegmentCase> {
    let mut all = syns();
    all.extend(later_segments());
    all
}

/// Returns the cases for a gateway that has closed its socket. The service selects the chain
/// (`CHAINS`), in which this replica has number 1.
pub(super) fn segments_without() -> Vec<SegmentCase> {
    vec![
        (
            "SYN at the head",
            1,
            0,
            SYN,
            ForwardedTo(2, 1),
            "not_listening",
        ),
        (
            "SYN that was sent here",
            2,
            1,
            SYN,
            ForwardedTo(3, 2),
            "not_listening",
        ),
        (
            "SYN behind the head",
            2,
            0,
            SYN,
            ForwardedTo(2, 1),
            "forwarded_new",
        ),
        ("SYN at the end", 8, 3, SYN, Local, "unowned"),
        ("SYN, alone", 4, 0, SYN, Local, "unowned"),
        ("SYN, no replica is up", 7, 0, SYN, Local, "unowned"),
        ("other", 1, 0, ACK, ForwardedTo(2, 1), "forwarded"),
    ]
}

pub(super) fn check_segments(s: &RedirectorFixture, segments: &[SegmentCase]) {
    for (case, service, hop, flags, to, counter) in segments {
        for (from, at) in [
            ("10.1.1.2:4711", format!("{}:80", service4(*service))),
            ("[fd01::2]:4711", format!("[{}]:80", service6(*service))),
        ] {
            let frame = from_edge(*hop, &tcp(from, &at, *flags, b"some bytes"));
            let case = format!("{case}, to {at}");
            match to {
                Local => s.keeps(&case, &frame, counter),
                ForwardedTo(n, h) => s.sends(
                    &case,
                    &frame,
                    (*n, *h),
                    &format!("tcp {from} > {at}"),
                    counter,
                ),
            }
        }
    }
}

/// Case, service, sender (1 is the edge), hop, stamp; expected replica, hop and stamp; counter.
/// Replica 0 means that the packet stays here, dropped or delivered. A stamp is the version of the
/// sender's table with flags; hops are as in [`SegmentCase`].
pub(super) type SpreadCase = (&'static str, u32, u8, u8, u32, (u8, u8, u32), &'static str);

const NONE: (u8, u8, u32) = (0, 0, 0);

/// Returns cases of segments while tables spread. The service selects the chain (`CHAINS`), in
/// which this replica has number 1. Its tables have version 1.
fn spreading_tables() -> Vec<SpreadCase> {
    let (mixed, last) = (STAMP_MIXED, STAMP_LAST);
    vec![
        (
            "by another version",
            1,
            1,
            0,
            2,
            (2, 1, mixed | 1),
            "forwarded",
        ),
        (
            "a mix stays one",
            1,
            1,
            1,
            mixed | 1,
            (2, 2, mixed | 1),
            "forwarded",
        ),
        (
            "by the high bits of a version",
            1,
            1,
            0,
            STAMP_VERSION,
            (2, 1, mixed | 1),
            "forwarded",
        ),
        ("no stamp", 1, 1, 0, 0, (2, 1, mixed | 1), "forwarded"),
        (
            "the end of the chain by another version: from the front",
            8,
            1,
            1,
            2,
            (2, 2, last | mixed | 1),
            "forwarded",
        ),
        (
            "the end of the chain for the second time",
            8,
            1,
            7,
            last | mixed | 1,
            NONE,
            "ownership_unsettled",
        ),
        (
            "the end of the chain after a mix, alone",
            4,
            1,
            3,
            mixed | 1,
            NONE,
            "ownership_unsettled",
        ),
        (
            "sent by a member to a replica outside the chain: behind that member",
            3,
            2,
            1,
            2,
            (3, 2, mixed | 1),
            "forwarded",
        ),
        (
            "sent by the last member to a replica outside the chain",
            3,
            3,
            2,
            2,
            (2, 3, last | mixed | 1),
            "forwarded",
        ),
    ]
}

/// Returns cases of segments while replicas and edge disagree about which replicas are up. The
/// service selects the chain (`CHAINS`; the test itself adds 9 to 11), in which this replica has
/// number 1.
fn disputed_replicas() -> Vec<SpreadCase> {
    let (skipped, last) = (STAMP_SKIPPED, STAMP_LAST);
    vec![
        ("not back to the sender", 2, 3, 1, 1, NONE, "unowned"),
        ("to a suspect", 9, 1, 0, 1, (8, 1, 1), "forwarded"),
        (
            "over one that is down",
            10,
            1,
            0,
            1,
            (2, 1, skipped | 1),
            "forwarded",
        ),
        (
            "a replica that the edge skipped and that is up here",
            2,
            1,
            1,
            skipped | 1,
            (3, 2, skipped | 1),
            "forwarded",
        ),
        (
            "a replica that the edge skipped, tried at the end",
            8,
            1,
            7,
            skipped | 1,
            (2, 8, last | skipped | 1),
            "forwarded",
        ),
        (
            "a replica that the edge skipped, and that sent the packet",
            11,
            2,
            1,
            skipped | 1,
            NONE,
            "unowned",
        ),
        (
            "once more along the chain, its end",
            8,
            1,
            7,
            last | skipped | 1,
            NONE,
            "unowned",
        ),
        (
            "once more along the chain, and on",
            1,
            1,
            4,
            last | skipped | 1,
            (2, 5, last | skipped | 1),
            "forwarded",
        ),
        (
            "passed over, and really down",
            7,
            1,
            1,
            skipped | 1,
            NONE,
            "unowned",
        ),
    ]
}

pub(super) fn spreading() -> Vec<SpreadCase> {
    [spreading_tables(), disputed_replicas()].concat()
}
