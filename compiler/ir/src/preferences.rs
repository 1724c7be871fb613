//! What a tenant prefers about offload targets and priority classes, with all references resolved,
//! and its text. No target reads it yet.

use std::fmt;

use canal_model::authorization::AttributeMatch;
use canal_model::ids::{Namespace, ObjectName, ServiceKey};
use canal_model::policy::preferences::{OffloadTargets, PriorityClass};
use canal_model::program::{HostMatch, HttpMatch, Labels};

use crate::{text, text_security};

/// An OffloadPreference.
///
/// A target may handle traffic if at least one preference about the traffic says `Allowed`, and none
/// says `Never`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OffloadIr {
    pub namespace: Namespace,
    pub name: ObjectName,
    pub subject: OffloadSubject,
    pub targets: OffloadTargets,
    /// Whether a target may decide once for a whole connection.
    pub is_per_connection: bool,
    /// Number of concurrent sessions that the owner expects.
    pub expected_sessions: Option<u32>,
    /// Requests per second that the owner expects.
    pub expected_rate: Option<u32>,
}

/// The traffic that an OffloadPreference is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OffloadSubject {
    /// Traffic of the workloads of the object's namespace with these labels.
    Workloads(Labels),
    ServicePort(ServiceKey, u16),
    Listeners(ListenerSelector),
}

/// One listener of a Gateway, or all of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenerSelector {
    /// The service that stands for the Gateway.
    pub gateway: ServiceKey,
    /// Name of one listener; `None` means all of them.
    pub section_name: Option<String>,
}

/// A TrafficPriority. The first rule of the first object that matches a request decides about its
/// class; a request that none matches is `normal`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PriorityIr {
    pub namespace: Namespace,
    pub name: ObjectName,
    pub rules: Vec<PriorityRuleIr>,
    /// Principals whose requests may name their own class.
    pub asserted_by: Vec<AttributeMatch>,
    /// Percentage of the tenant's requests that may be `high`.
    pub high_share: u8,
}

/// A rule that matches if one of its matches does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PriorityRuleIr {
    pub matches: Vec<PriorityMatchIr>,
    /// `normal` if a part of the rule is broken.
    pub class: PriorityClass,
}

/// Conditions that must all hold. A condition that is absent holds for every request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PriorityMatchIr {
    pub host: Option<HostMatch>,
    pub http: HttpMatch,
    /// Labels of source workloads in the object's namespace.
    pub source: Option<Labels>,
    pub principal: Option<AttributeMatch>,
    pub listener: Option<ListenerSelector>,
    /// Service that the request is for.
    pub service: Option<ServiceKey>,
}

impl fmt::Display for OffloadIr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "offload {}/{} ", self.namespace, self.name)?;
        match &self.subject {
            OffloadSubject::Workloads(labels) => write!(f, "workloads {}", label_list(labels))?,
            OffloadSubject::ServicePort(service, port) => write!(f, "service {service}:{port}")?,
            OffloadSubject::Listeners(listeners) => write!(f, "{listeners}")?,
        }
        let named = self.targets.named().into_iter();
        for (name, permission) in named.filter_map(|(name, it)| Some((name, it?))) {
            write!(f, " {name} {permission:?}")?;
        }
        if self.is_per_connection {
            f.write_str(" per connection")?;
        }
        if let Some(sessions) = self.expected_sessions {
            write!(f, " sessions {sessions}")?;
        }
        if let Some(rate) = self.expected_rate {
            write!(f, " requests {rate}/s")?;
        }
        Ok(())
    }
}

impl fmt::Display for ListenerSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let section = self.section_name.as_deref();
        write!(f, "listener {}/{}", self.gateway, section.unwrap_or("*"))
    }
}

impl fmt::Display for PriorityIr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (namespace, name) = (&self.namespace, &self.name);
        write!(
            f,
            "priority {namespace}/{name} high share {} %",
            self.high_share
        )?;
        for principal in &self.asserted_by {
            write!(f, " asserted by {}", text_security::one_match(principal))?;
        }
        for (number, rule) in (1..).zip(&self.rules) {
            for it in &rule.matches {
                write!(f, "\n  {number} {it} => {}", rule.class.as_str())?;
            }
        }
        write!(f, "\n  else => normal")
    }
}

impl fmt::Display for PriorityMatchIr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(host) = &self.host {
            write!(f, "host {} ", text::host(Some(host)))?;
        }
        f.write_str(&text::http_match(&self.http))?;
        if let Some(labels) = &self.source {
            write!(f, " from workloads {}", label_list(labels))?;
        }
        if let Some(principal) = &self.principal {
            write!(f, " from principal {}", text_security::one_match(principal))?;
        }
        if let Some(listener) = &self.listener {
            write!(f, " at {listener}")?;
        }
        if let Some(service) = &self.service {
            write!(f, " to {service}")?;
        }
        Ok(())
    }
}

fn label_list(labels: &Labels) -> String {
    let labels: Vec<String> = labels.iter().map(|(k, v)| format!("{k}={v}")).collect();
    text::list(&labels)
}
