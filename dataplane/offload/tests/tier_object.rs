//! Tests the cloud tier's compiled objects: their layouts equal Rust's, and the verifier's work
//! stays within `budgets.txt`.

use std::collections::BTreeMap;

use crate::lab::LabNetns;
use canal_abi::tier::LAYOUTS;
use canal_offload::edge::{self, EdgeProgram, EdgeProgramSettings};
use canal_offload::interface_guard::{self, InterfaceGuard};
use canal_offload::redirector::{self, RedirectorPrograms};
use canal_offload::sessions::{self, SessionTable};
use canal_offload::socket_steering::SocketSteering;
use libbpf_rs::btf::types::{MemberAttr, Struct};
use libbpf_rs::btf::{Btf, BtfKind, BtfType, HasSize};

/// Checks that every struct of the header in the object has the layout of Rust, and that Rust's
/// list contains each of them.
fn check_layouts(object: &str, bytes: &[u8]) {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    let btf = Btf::from_path(file.path()).unwrap();
    let names: Vec<String> = (1..btf.len() as u32)
        .filter_map(|id| btf.type_by_id::<BtfType<'_>>(id.into()))
        .filter(|t| t.kind() == BtfKind::Struct)
        .filter_map(|t| Some(t.name()?.to_str()?.to_string()))
        .filter(|n| n.starts_with("canal_"))
        .collect();
    assert!(!names.is_empty(), "{object} has no struct of the header");
    for name in names {
        let s: Struct<'_> = btf.type_by_name(&name).unwrap();
        let in_c: Vec<(String, usize)> = s
            .iter()
            .map(|m| {
                let MemberAttr::Normal { offset } = m.attr else {
                    panic!("{name} has a bit field")
                };
                (
                    m.name.unwrap().to_str().unwrap().to_string(),
                    offset as usize / 8,
                )
            })
            .collect();
        let (_, size, fields) = LAYOUTS
            .iter()
            .chain(canal_abi::interface_guard::LAYOUTS)
            .find(|(n, ..)| *n == name)
            .unwrap_or_else(|| panic!("{object}: struct {name} is not in canal-abi's list"));
        let in_rust: Vec<(String, usize)> =
            fields.iter().map(|(f, o)| ((*f).to_string(), *o)).collect();
        assert_eq!((s.size(), in_c), (*size, in_rust), "{object}: {name}");
    }
}

#[test]
fn every_struct_of_the_header_has_one_layout_in_c_and_in_rust() {
    check_layouts("edge", edge::object_bytes());
    for (object, bytes) in ["redirector", "tunnel"]
        .into_iter()
        .zip(redirector::object_bytes())
    {
        check_layouts(object, bytes);
    }
    check_layouts("sessions", sessions::object_bytes());
    check_layouts("interface_guard", interface_guard::object_bytes());
}

fn verified_instructions() -> Vec<(&'static str, u32)> {
    // The settings are constants to the verifier, which skips what they rule out. These rule out
    // nothing.
    let settings = EdgeProgramSettings {
        address: [250, 1, 0, 1].into(),
        tunnels: 20,
        aggregate: true,
        tunnel_port: 40_000,
        mtu: 1450,
    };
    let mut all = vec![(
        "canal_edge",
        EdgeProgram::load(&settings, None)
            .unwrap()
            .verified_insns()
            .unwrap(),
    )];
    let netns = LabNetns::new();
    let redirector = RedirectorPrograms::load(&redirector::RedirectorOptions {
        netns: None,
        device: "pod0".into(),
        pin_dir: None,
        address: [250, 1, 0, 2].into(),
        number: 1,
        edge: [250, 1, 0, 1].into(),
        mtu: 1450,
        tunnel_port: 40_000,
        tunnels: 20,
    });
    all.extend(redirector.unwrap().verified_insns().unwrap());
    all.push(
        SocketSteering::attach(Some(&netns.path()), None)
            .unwrap()
            .verified_insns()
            .unwrap(),
    );
    all.push((
        "canal_interface_guard",
        InterfaceGuard::load(None, None)
            .unwrap()
            .verified_insns()
            .unwrap(),
    ));
    all.push(
        SessionTable::attach(Some(&netns.path()), "pod0")
            .unwrap()
            .verified_insns()
            .unwrap(),
    );
    all
}

/// `budgets.txt` has lines of `program instructions`, recorded on the reference kernel. A program
/// may become cheaper; an increase of more than ten percent needs a review. Set BLESS=1 to record
/// new values.
#[test]
fn the_verifiers_work_stays_within_budget() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/budgets.txt");
    let mut budgets: BTreeMap<String, u32> = std::fs::read_to_string(path)
        .unwrap_or_default()
        .lines()
        .map(|l| l.split_once(' ').unwrap())
        .map(|(n, i)| (n.to_string(), i.parse().unwrap()))
        .collect();
    let measured = verified_instructions();
    if std::env::var_os("BLESS").is_some() {
        budgets.extend(measured.iter().map(|(n, i)| ((*n).to_string(), *i)));
        std::fs::write(
            path,
            budgets
                .iter()
                .map(|(n, i)| format!("{n} {i}\n"))
                .collect::<String>(),
        )
        .unwrap();
    }
    for (name, now) in measured {
        let budget = budgets
            .get(name)
            .unwrap_or_else(|| panic!("{name} has no budget: BLESS=1"));
        let most = budget + budget / 10;
        assert!(
            now > 0 && now <= most,
            "{name}: {now} instructions, budget {most}"
        );
    }
}
