//! Receive hash that this kernel calculates for a tunnel's packets (`bpf/receive_hash.bpf.c`). The
//! program is loaded and run over one frame for each source port. It is attached to nothing. The
//! caller decides which core a hash stands for and which ports it uses.

use std::net::Ipv4Addr;

use canal_abi::tier::VXLAN_PORT;
use libbpf_rs::{Object, ProgramInput};

use crate::embedded::EmbeddedObject;
use crate::{OffloadError, tier};

static OBJECT: &EmbeddedObject<[u8]> = &EmbeddedObject(*include_bytes!(concat!(
    env!("OUT_DIR"),
    "/receive_hash.bpf.o"
)));

const PROGRAM: &str = "canal_receive_hash";
const SOURCE: &str = "bpf/receive_hash.bpf.c";
/// Length of the Ethernet, IPv4, UDP and VXLAN headers together.
const FRAME_BYTES: usize = 14 + 20 + 8 + 8;
/// Offset of the UDP source port in the frame.
const SOURCE_PORT: usize = 14 + 20;

/// Loaded program that returns the hash.
#[derive(Debug)]
pub struct ReceiveHash {
    object: Object,
}

impl ReceiveHash {
    /// Loads the program.
    ///
    /// # Errors
    /// Fails if the kernel refuses it.
    pub fn load() -> Result<Self, OffloadError> {
        Ok(Self {
            object: tier::load(SOURCE, &OBJECT.0, &[], None, None)?,
        })
    }

    /// Returns the hashes of the tunnels from `from` to `to` with the `count` source ports from
    /// `first` on. Ports above 65535 are left out.
    ///
    /// # Errors
    /// Fails if the kernel cannot run the program.
    pub fn hashes(
        &self,
        from: Ipv4Addr,
        to: Ipv4Addr,
        first: u16,
        count: u16,
    ) -> Result<Vec<u32>, OffloadError> {
        let program = tier::program(&self.object, PROGRAM)?;
        let mut frame = frame(from, to);
        let mut hashes = Vec::with_capacity(count.into());
        for port in (first..=u16::MAX).take(count.into()) {
            frame[SOURCE_PORT..SOURCE_PORT + 2].copy_from_slice(&port.to_be_bytes());
            let input = ProgramInput {
                data_in: Some(&frame),
                ..ProgramInput::default()
            };
            let ran = program
                .test_run(input)
                .map_err(|source| OffloadError::Trial {
                    program: PROGRAM,
                    source,
                })?;
            hashes.push(ran.return_value);
        }
        Ok(hashes)
    }
}

/// Builds a packet of a tunnel as far as the hash depends on it: addresses, protocol and ports.
fn frame(from: Ipv4Addr, to: Ipv4Addr) -> [u8; FRAME_BYTES] {
    let mut frame = [0; FRAME_BYTES];
    // Ethernet header: the type is IPv4.
    frame[12..14].copy_from_slice(&[0x08, 0x00]);
    // IPv4 header: version and length, total length, TTL, UDP.
    frame[14] = 0x45;
    frame[16..18].copy_from_slice(&36u16.to_be_bytes());
    frame[22] = 64;
    frame[23] = 17;
    frame[26..30].copy_from_slice(&from.octets());
    frame[30..34].copy_from_slice(&to.octets());
    // UDP header: destination port and length.
    frame[36..38].copy_from_slice(&VXLAN_PORT.to_be_bytes());
    frame[38..40].copy_from_slice(&16u16.to_be_bytes());
    frame
}
