//! The redirector's rules as a plain function of one packet at one replica (`bpf/redirector.bpf.c` is the fast one). It keeps nothing, and
//! knows neither sockets nor plans: whose a session is, the caller says.

use canal_model::ids::ReplicaNumber;
use canal_model::program::CHAIN;

/// What a packet carries inside the tier: the version of the table by which its replica was chosen, and what tables could not say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stamp {
    pub(crate) version: u32,
    /// Tables of two versions have had a say.
    pub(crate) mixed: bool,
    /// Somebody was passed over for not being up.
    pub(crate) skipped: bool,
    /// The packet goes along the chain once more.
    pub(crate) last: bool,
}

/// A packet as it comes to a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Packet {
    /// `None`: an edge chose this replica.
    pub(crate) sender: Option<ReplicaNumber>,
    pub(crate) hop: usize,
    pub(crate) stamp: Stamp,
    /// A SYN.
    pub(crate) begins: bool,
}

/// What a replica does with a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It takes the packet: its own session's, or one that begins here.
    Keep,
    /// It sends the packet to another.
    Forward { to: ReplicaNumber, hop: usize, stamp: Stamp },
    /// The chain ends here: the kernel gets the packet, and resets.
    Unowned,
    /// The chain ends here while two tables are about: the packet is dropped, and TCP sends it again.
    Unsettled,
    /// The replica has no table of the service: the packet is dropped.
    NoTable,
}

/// A bucket's chain as a replica has it, and the version of its table.
pub(crate) type Chain<'a> = (&'a [ReplicaNumber], u32);

/// Decides at the replica `here`, which owns the packet's session or not.
pub(crate) fn judge(
    chain: Option<Chain<'_>>,
    here: ReplicaNumber,
    packet: &Packet,
    owns: bool,
    is_up: &dyn Fn(ReplicaNumber) -> bool,
) -> Verdict {
    let Some((chain, version)) = chain else { return Verdict::NoTable };
    let mut stamp = Stamp { version, mixed: packet.stamp.mixed || packet.stamp.version != version, ..packet.stamp };
    if packet.begins {
        // A hop says that the sender chose this replica; what an edge sent begins at the head.
        let head = next_place(chain, (None, None), 0, packet, &mut stamp, is_up).filter(|_| packet.hop == 0);
        return head.filter(|head| *head != here).map_or(Verdict::Keep, |to| Verdict::Forward { to, hop: 1, stamp });
    }
    if owns {
        return Verdict::Keep;
    }
    let apart = (Some(here), packet.sender);
    let mut next = next_place(chain, apart, behind(chain, here, packet), packet, &mut stamp, is_up);
    if next.is_none() && !stamp.last && (stamp.skipped || stamp.mixed) {
        stamp.last = true;
        next = next_place(chain, apart, 0, packet, &mut stamp, is_up);
    }
    match next {
        Some(to) => Verdict::Forward { to, hop: packet.hop + 1, stamp },
        None if stamp.mixed => Verdict::Unsettled,
        None => Verdict::Unowned,
    }
}

/// The place behind one's own, or behind the sender's if one is not in the chain; the front if the edge sent the packet.
fn behind(chain: &[ReplicaNumber], here: ReplicaNumber, packet: &Packet) -> usize {
    let place_of = |wanted: ReplicaNumber| chain.iter().position(|replica| *replica == wanted);
    let own = place_of(here).or_else(|| place_of(packet.sender?));
    own.filter(|_| packet.hop > 0).map_or(0, |own| own + 1)
}

/// The first that is up at `from` or behind it, but not the two of `apart`. The hop only counts visits.
fn next_place(
    chain: &[ReplicaNumber],
    apart: (Option<ReplicaNumber>, Option<ReplicaNumber>),
    from: usize,
    packet: &Packet,
    stamp: &mut Stamp,
    is_up: &dyn Fn(ReplicaNumber) -> bool,
) -> Option<ReplicaNumber> {
    if packet.hop >= CHAIN {
        return None;
    }
    for replica in chain.iter().skip(from).filter(|replica| ![apart.0, apart.1].contains(&Some(**replica))) {
        if is_up(*replica) {
            return Some(*replica);
        }
        stamp.skipped = true;
    }
    None
}
