//! The redirector's rules as a plain function of one packet at one replica; `bpf/redirector.bpf.c`
//! is the fast version.
//!
//! It has no state and does not know sockets or plans: the caller decides whether the replica owns
//! the session.

use canal_model::ids::ReplicaNumber;
use canal_model::program::CHAIN_LENGTH_MAX;

/// The metadata of a packet inside the tier: the version of the table by which its replica was
/// chosen, and conditions met on the path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stamp {
    pub(crate) version: u32,
    /// Tables of two versions have been used for this packet.
    pub(crate) mixed: bool,
    /// A member was skipped because it is down.
    pub(crate) skipped: bool,
    /// The packet traverses the chain for the second time.
    pub(crate) last: bool,
}

/// A packet as it arrives at a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Packet {
    /// The replica that forwarded the packet; `None` if an edge sent it.
    pub(crate) sender: Option<ReplicaNumber>,
    pub(crate) hop: usize,
    pub(crate) stamp: Stamp,
    /// The packet is a SYN.
    pub(crate) begins: bool,
}

/// The action of a replica on a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PacketVerdict {
    /// The replica delivers the packet locally: it owns the session, or the session begins here.
    Keep,
    /// The replica forwards the packet to another one.
    Forward {
        to: ReplicaNumber,
        hop: usize,
        stamp: Stamp,
    },
    /// The chain ends here: the packet is delivered to the kernel, which sends a reset.
    Unowned,
    /// The chain ends here while tables of two versions are in use: the packet is dropped, and TCP
    /// sends it again.
    Unsettled,
    /// The replica has no table for the service: the packet is dropped.
    NoTable,
}

/// A bucket's chain in a replica's table, and the version of that table.
pub(crate) type Chain<'a> = (&'a [ReplicaNumber], u32);

/// Decides the action of the replica `here` on a packet. `owns` states whether it owns the packet's
/// session.
pub(crate) fn evaluate(
    chain: Option<Chain<'_>>,
    here: ReplicaNumber,
    packet: &Packet,
    owns: bool,
    is_up: &dyn Fn(ReplicaNumber) -> bool,
) -> PacketVerdict {
    let Some((chain, version)) = chain else {
        return PacketVerdict::NoTable;
    };
    let mut stamp = Stamp {
        version,
        mixed: packet.stamp.mixed || packet.stamp.version != version,
        ..packet.stamp
    };
    if packet.begins {
        // A hop above 0 means that another replica chose this one for the SYN; a SYN from an edge
        // starts at the head.
        let head = next_place(chain, (None, None), 0, packet, &mut stamp, is_up)
            .filter(|_| packet.hop == 0);
        // The replica takes the session itself if it is the head, if the head chose it, or if no
        // member is up.
        return head
            .filter(|head| *head != here)
            .map_or(PacketVerdict::Keep, |to| PacketVerdict::Forward {
                to,
                hop: 1,
                stamp,
            });
    }
    if owns {
        return PacketVerdict::Keep;
    }
    let apart = (Some(here), packet.sender);
    let mut next = next_place(
        chain,
        apart,
        behind(chain, here, packet),
        packet,
        &mut stamp,
        is_up,
    );
    // With a skipped member or tables of two versions, the owner may have been missed, so the chain
    // is walked once more from its start.
    if next.is_none() && !stamp.last && (stamp.skipped || stamp.mixed) {
        stamp.last = true;
        next = next_place(chain, apart, 0, packet, &mut stamp, is_up);
    }
    match next {
        Some(to) => PacketVerdict::Forward {
            to,
            hop: packet.hop + 1,
            stamp,
        },
        None if stamp.mixed => PacketVerdict::Unsettled,
        None => PacketVerdict::Unowned,
    }
}

/// Returns the position after `here`, or after the sender if `here` is not in the chain, or the
/// front if an edge sent the packet.
fn behind(chain: &[ReplicaNumber], here: ReplicaNumber, packet: &Packet) -> usize {
    let place_of = |wanted: ReplicaNumber| chain.iter().position(|replica| *replica == wanted);
    let own = place_of(here).or_else(|| place_of(packet.sender?));
    own.filter(|_| packet.hop > 0).map_or(0, |own| own + 1)
}

/// Returns the first member at or after `from` that is up, except the two in `apart`. The hop field
/// of the packet only counts visits; it does not select the member.
fn next_place(
    chain: &[ReplicaNumber],
    apart: (Option<ReplicaNumber>, Option<ReplicaNumber>),
    from: usize,
    packet: &Packet,
    stamp: &mut Stamp,
    is_up: &dyn Fn(ReplicaNumber) -> bool,
) -> Option<ReplicaNumber> {
    if packet.hop >= CHAIN_LENGTH_MAX {
        return None;
    }
    for replica in chain
        .iter()
        .skip(from)
        .filter(|replica| ![apart.0, apart.1].contains(&Some(**replica)))
    {
        if is_up(*replica) {
            return Some(*replica);
        }
        stamp.skipped = true;
    }
    None
}
