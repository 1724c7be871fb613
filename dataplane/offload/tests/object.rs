//! Tests the compiled object itself: its layout equals Rust's, and the verifier's work stays within
//! the recorded budget.

use std::collections::BTreeMap;

use crate::lab::{Cgroup, LabNetns};
use canal_abi::capture::LAYOUTS;
use canal_offload::capture::{CaptureOptions, CapturePrograms, object_bytes};
use canal_offload::inbound::InboundPrograms;
use canal_offload::pod_guard::{self, PodGuards};
use libbpf_rs::btf::types::Struct;
use libbpf_rs::btf::{Btf, BtfKind};

#[test]
fn every_struct_of_the_headers_has_one_layout_in_c_and_in_rust() {
    compare(object_bytes(), LAYOUTS);
    compare(pod_guard::object_bytes(), canal_abi::pod::LAYOUTS);
}

type Layouts = [(&'static str, usize, &'static [(&'static str, usize)])];

fn compare(object: &[u8], layouts: &Layouts) {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), object).unwrap();
    let btf = Btf::from_path(file.path()).unwrap();
    for (name, size, fields) in layouts {
        let s: Struct<'_> = btf
            .type_by_name(name)
            .unwrap_or_else(|| panic!("the object has no struct {name}"));
        let in_c: Vec<(String, usize)> = s
            .iter()
            .map(|m| {
                let libbpf_rs::btf::types::MemberAttr::Normal { offset } = m.attr else {
                    panic!("{name} has a bit field")
                };
                (
                    m.name.unwrap().to_str().unwrap().to_string(),
                    // BTF gives offsets in bits.
                    offset as usize / 8,
                )
            })
            .collect();
        let in_rust: Vec<(String, usize)> =
            fields.iter().map(|(f, o)| ((*f).to_string(), *o)).collect();
        assert_eq!(
            (libbpf_rs::btf::HasSize::size(&s), in_c),
            (*size, in_rust),
            "{name}"
        );
    }
    // Type 0 of BTF is `void`.
    let in_object: Vec<String> = (1..btf.len() as u32)
        .filter_map(|id| btf.type_by_id::<libbpf_rs::btf::BtfType<'_>>(id.into()))
        .filter(|t| t.kind() == BtfKind::Struct)
        .filter_map(|t| Some(t.name()?.to_str()?.to_string()))
        .filter(|n| n.starts_with("canal_"))
        .collect();
    for n in &in_object {
        assert!(
            layouts.iter().any(|(l, ..)| l == n),
            "struct {n} is in the object but not in canal-abi's list"
        );
    }
    assert_eq!(in_object.len(), layouts.len());
}

/// `tests/golden/verifier.txt` has lines of `program instructions`, recorded on the reference
/// kernel. A program may become cheaper; an increase of more than ten percent needs a review. Set
/// BLESS=1 to record new values.
#[test]
fn the_verifiers_work_stays_within_budget() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/verifier.txt");
    let mut measured = CapturePrograms::load(&CaptureOptions::default())
        .unwrap()
        .verified_instructions()
        .unwrap();
    // The count does not depend on the namespace, so the test's own will do.
    let here = std::path::Path::new("/proc/self/ns/net");
    measured.push(
        InboundPrograms::load(None)
            .unwrap()
            .prepare("a/b/c", here)
            .unwrap()
            .verified_instructions()
            .unwrap(),
    );
    let (ns, cgroup) = (LabNetns::new(), Cgroup::new());
    let guard = PodGuards::load(None)
        .unwrap()
        .attach("a/b/c", &cgroup.dir, &ns.path())
        .unwrap();
    measured.extend(guard.verified_instructions().unwrap());
    if std::env::var_os("BLESS").is_some() {
        let lines: String = measured.iter().map(|(n, i)| format!("{n} {i}\n")).collect();
        std::fs::write(path, lines).unwrap();
    }
    let golden: BTreeMap<String, u32> = std::fs::read_to_string(path)
        .unwrap()
        .lines()
        .map(|l| l.split_once(' ').unwrap())
        .map(|(n, i)| (n.to_string(), i.parse().unwrap()))
        .collect();
    assert_eq!(
        golden.len(),
        measured.len(),
        "the set of programs changed: BLESS=1"
    );
    for (name, now) in measured {
        // A tenth is for other compilers and kernels, whose verifiers count somewhat differently.
        let budget = golden[name] + golden[name] / 10;
        assert!(
            now > 0 && now <= budget,
            "{name}: {now} instructions, budget {budget}"
        );
    }
}
