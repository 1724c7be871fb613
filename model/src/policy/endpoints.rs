//! EndpointSlices (`discovery.k8s.io/v1`) and Endpoints (`v1`): the addresses behind a Service that
//! has no selector. The structs mirror the YAML; the compiler validates and interprets them.

use std::num::NonZeroU16;

use serde::Deserialize;

use super::Metadata;
use super::kubernetes::Transport;
use crate::ids::ObjectName;

/// Label of an EndpointSlice: the name of its Service.
pub const SERVICE_NAME_LABEL: &str = "kubernetes.io/service-name";
/// Label of an EndpointSlice: the component that writes it.
pub const MANAGED_BY_LABEL: &str = "endpointslice.kubernetes.io/managed-by";
/// Value of [`MANAGED_BY_LABEL`] for slices that repeat what the Service's selector says.
pub const SELECTOR_CONTROLLER: &str = "endpointslice-controller.k8s.io";

/// An object of kind EndpointSlice (`discovery.k8s.io/v1`).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EndpointSlice {
    pub metadata: Metadata,
    /// Kind of all addresses: `IPv4`, `IPv6` or `FQDN`.
    #[serde(default)]
    pub address_type: String,
    #[serde(default)]
    pub endpoints: Vec<SliceEndpoint>,
    #[serde(default)]
    pub ports: Vec<SlicePort>,
}

/// One endpoint of a slice.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct SliceEndpoint {
    /// Addresses of the same endpoint. Kubernetes uses the first one.
    pub addresses: Vec<String>,
    pub conditions: EndpointConditions,
}

/// The state of an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct EndpointConditions {
    /// `None` means that the state is unknown, which counts as ready.
    pub ready: Option<bool>,
}

/// A port on which the endpoints of a slice or subset listen.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct SlicePort {
    /// Name of the Service's port that leads here; empty for its only port without a name.
    pub name: String,
    /// `None` means all ports, which Canal does not support.
    pub port: Option<NonZeroU16>,
    pub protocol: Transport,
}

/// An object of kind Endpoints (`v1`), which is the older form of EndpointSlice. Its name is that
/// of its Service.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Endpoints {
    pub metadata: Metadata,
    #[serde(default)]
    pub subsets: Vec<EndpointSubset>,
}

/// Addresses that have the same ports.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct EndpointSubset {
    pub addresses: Vec<EndpointAddress>,
    /// Addresses of endpoints that are not ready.
    pub not_ready_addresses: Vec<EndpointAddress>,
    pub ports: Vec<SlicePort>,
}

/// One address of a subset.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct EndpointAddress {
    pub ip: String,
}

/// Endpoints of one Service that have the same ports.
#[derive(Debug, PartialEq, Eq)]
pub struct WrittenEndpoints<'a> {
    /// Addresses of ready endpoints, each with the path of its field.
    pub addresses: Vec<(String, &'a str)>,
    pub ports: &'a [SlicePort],
}

impl EndpointSlice {
    /// Returns the name of the Service, if a label contains a valid one.
    pub fn service(&self) -> Option<ObjectName> {
        let name = self.metadata.labels.get(SERVICE_NAME_LABEL)?;
        ObjectName::new(name).ok()
    }

    /// Returns whether Kubernetes wrote the slice from the Service's selector.
    pub fn repeats_selector(&self) -> bool {
        let writer = self.metadata.labels.get(MANAGED_BY_LABEL);
        writer.is_some_and(|writer| writer == SELECTOR_CONTROLLER)
    }

    /// Returns the slice's ready endpoints, with the ports of all.
    pub fn written(&self) -> WrittenEndpoints<'_> {
        let endpoints = self.endpoints.iter().enumerate();
        let ready = endpoints.filter(|(_, endpoint)| endpoint.conditions.ready != Some(false));
        let addresses = ready.filter_map(|(at, endpoint)| {
            let address = endpoint.addresses.first()?;
            Some((format!("endpoints[{at}].addresses[0]"), address.as_str()))
        });
        WrittenEndpoints {
            addresses: addresses.collect(),
            ports: &self.ports,
        }
    }
}

impl Endpoints {
    /// Returns the ready endpoints of each subset.
    pub fn written(&self) -> impl Iterator<Item = WrittenEndpoints<'_>> {
        self.subsets.iter().enumerate().map(|(number, subset)| {
            let addresses = subset.addresses.iter().enumerate().map(|(at, address)| {
                let field = format!("subsets[{number}].addresses[{at}].ip");
                (field, address.ip.as_str())
            });
            WrittenEndpoints {
                addresses: addresses.collect(),
                ports: &subset.ports,
            }
        })
    }
}
