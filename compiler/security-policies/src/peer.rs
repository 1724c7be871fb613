//! Resolves PeerAuthentications: whether workloads accept plaintext. A broken object is Strict.

use std::collections::BTreeMap;

use canal_model::authorization::{PeerAuthentication, PeerMode, VALUES_MAX};
use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::TenantName;
use canal_model::policy::istio_security::{self, MutualTlsMode};

use crate::target::{selected, widest};
use crate::{PolicyResolver, key};
use canal_diagnostics::{DiagnosticCollector, Sourced};

/// Returns the peer authentications, sorted by key.
pub fn resolve(
    tenant: &TenantName,
    declared: &[Sourced<'_, istio_security::PeerAuthentication>],
    report: &mut DiagnosticCollector,
) -> Vec<PeerAuthentication> {
    let mut all: Vec<PeerAuthentication> = declared
        .iter()
        .map(|sourced| read(tenant, sourced, report))
        .collect();
    all.sort_by(|a, b| a.key.cmp(&b.key));
    all
}

fn mode(written: MutualTlsMode) -> Option<PeerMode> {
    match written {
        MutualTlsMode::Unset => None,
        MutualTlsMode::Disable => Some(PeerMode::Disable),
        MutualTlsMode::Permissive => Some(PeerMode::Permissive),
        MutualTlsMode::Strict => Some(PeerMode::Strict),
    }
}

fn read(
    tenant: &TenantName,
    sourced: &Sourced<'_, istio_security::PeerAuthentication>,
    report: &mut DiagnosticCollector,
) -> PeerAuthentication {
    let istio_security::PeerAuthentication { metadata, spec } = sourced.object;
    let mut reading = PolicyResolver::new(sourced, report);
    let labels = spec
        .selector
        .as_ref()
        .map(|selector| &selector.match_labels)
        .filter(|labels| !labels.is_empty());
    let target = match labels {
        Some(labels) if sourced.fault("spec.selector").is_none() => selected(metadata, labels),
        // A selector that cannot be read counts as none, so that the object fails closed.
        _ => widest(metadata),
    };
    // As in Istio, modes of ports need a selector.
    if labels.is_none()
        && !spec.port_level_mtls.is_empty()
        && sourced.fault("spec.selector").is_none()
    {
        reading.breaks(
            Code::MissingField,
            "spec.portLevelMtls",
            "modes of ports need a selector",
            "select workloads, or remove the field",
        );
    }
    if spec.port_level_mtls.len() > VALUES_MAX {
        let problem = format!(
            "there are {} ports, more than {VALUES_MAX}",
            spec.port_level_mtls.len()
        );
        reading.breaks(
            Code::LimitExceeded,
            "spec.portLevelMtls",
            problem,
            "set the mode of the whole workload",
        );
    }
    let mut ports = BTreeMap::new();
    // More ports break the object, so the rest needs no check.
    for (port, mtls) in spec.port_level_mtls.iter().take(VALUES_MAX) {
        match port.parse::<u16>().ok().filter(|port| *port > 0) {
            // A port without a mode of its own (UNSET) has the mode of the workload.
            Some(port) => ports.extend(mode(mtls.mode).map(|mode| (port, mode))),
            None => reading.breaks(
                Code::InvalidValue,
                format!("spec.portLevelMtls.{port}"),
                format!("{port:?} is not a port"),
                "write a number from 1 to 65535",
            ),
        }
    }
    // An object without a time is older than all others, as everywhere in the compiler.
    let created = metadata.creation_timestamp.map_or(0, |at| at.0);
    let key = key(tenant, metadata);
    match reading.broken {
        // A broken object fails closed: it requires mTLS at everything that it targets.
        Some(_) => PeerAuthentication {
            key,
            target,
            mode: Some(PeerMode::Strict),
            ports: BTreeMap::new(),
            created,
        },
        None => PeerAuthentication {
            key,
            target,
            mode: mode(spec.mtls.mode),
            ports,
            created,
        },
    }
}
