//! [`LocalPod`]: a pod of this node, parsed and validated from its file in `--pods-dir`. [`crate::pod_reconciler`] watches the directory.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use canal_model::identity::Identity;
use canal_model::ids::{IdError, Namespace, ObjectName, ServiceAccount, TenantName, TrustDomain};
use canal_model::program::Labels;
use serde::Deserialize;

/// Longest pod file read, bytes. A pod file has a name, addresses, labels and ports; nobody
/// measured the largest.
pub const POD_FILE_BYTES_MAX: usize = 64 << 10;

/// Reason why a pod file is rejected. The pod stays as it was; the file is read again at the next
/// change.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PodError {
    /// The file is unreadable or longer than [`POD_FILE_BYTES_MAX`].
    #[error("{file}: {why}; fix: write a shorter file that this process may read")]
    File { file: String, why: String },
    /// The text is not the expected JSON.
    #[error(
        "{file}: {why}; fix: write uid, namespace, name, serviceAccount, netns, cgroup, ips and labels"
    )]
    Form { file: String, why: String },
    /// The tenant, namespace, pod or service account has an invalid name.
    #[error("{file}: {why}")]
    Name { file: String, why: IdError },
    /// The uid does not match the namespace and the name in the other fields.
    #[error(
        "{file}: uid {uid:?} is of another namespace or name; fix: write TENANT/{namespace}/{name}"
    )]
    Uid {
        file: String,
        uid: String,
        namespace: String,
        name: String,
    },
    /// The pod has no address, so it can neither be reached nor be distinguished from other pods.
    #[error("{file}: ips is empty; fix: write the pod's addresses")]
    Ips { file: String },
}

/// A pod as its file describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalPod {
    /// Unique name of the pod: `tenant/namespace/name`.
    pub uid: String,
    pub tenant: TenantName,
    pub namespace: Namespace,
    pub name: ObjectName,
    pub service_account: ServiceAccount,
    /// Path of the pod's network namespace file.
    pub netns: PathBuf,
    /// The cgroup v2 directory that contains the pod's processes.
    pub cgroup: PathBuf,
    pub ips: Vec<IpAddr>,
    pub labels: Labels,
    /// True if the application requests certificates of its own through the Workload API.
    pub workload_api: bool,
    /// Ports that the pod's containers declare for probes. The node's own processes may connect to
    /// them in plaintext, regardless of policy.
    pub probe_ports: BTreeSet<u16>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodFile {
    uid: String,
    namespace: String,
    name: String,
    service_account: String,
    netns: PathBuf,
    cgroup: PathBuf,
    ips: Vec<IpAddr>,
    #[serde(default)]
    labels: Labels,
    #[serde(default)]
    workload_api: bool,
    #[serde(default)]
    probe_ports: BTreeSet<u16>,
}

impl LocalPod {
    /// Parses the text of one pod file. Errors name the file as `file`.
    ///
    /// # Errors
    /// Returns the first of: text longer than [`POD_FILE_BYTES_MAX`], wrong JSON, a uid that does
    /// not match, no address, an invalid name.
    pub fn parse(file: &str, text: &[u8]) -> Result<Self, PodError> {
        let file = || file.to_string();
        if text.len() > POD_FILE_BYTES_MAX {
            return Err(PodError::File {
                file: file(),
                why: format!("longer than {POD_FILE_BYTES_MAX} bytes"),
            });
        }
        let f: PodFile = serde_json::from_slice(text).map_err(|e| PodError::Form {
            file: file(),
            why: e.to_string(),
        })?;
        let name_error = |why| PodError::Name { file: file(), why };
        let tenant = f.uid.split('/').next().unwrap_or_default();
        if f.uid != format!("{tenant}/{}/{}", f.namespace, f.name) {
            return Err(PodError::Uid {
                file: file(),
                uid: f.uid,
                namespace: f.namespace,
                name: f.name,
            });
        }
        if f.ips.is_empty() {
            return Err(PodError::Ips { file: file() });
        }
        Ok(Self {
            tenant: TenantName::new(tenant).map_err(name_error)?,
            namespace: Namespace::new(&f.namespace).map_err(name_error)?,
            name: ObjectName::new(&f.name).map_err(name_error)?,
            service_account: ServiceAccount::new(&f.service_account).map_err(name_error)?,
            uid: f.uid,
            netns: f.netns,
            cgroup: f.cgroup,
            ips: f.ips.iter().map(IpAddr::to_canonical).collect(),
            labels: f.labels,
            workload_api: f.workload_api,
            probe_ports: f.probe_ports,
        })
    }

    /// Reads and parses the pod file at `path`.
    ///
    /// # Errors
    /// The file is unreadable, or [`LocalPod::parse`] rejects its text.
    pub fn read(path: &Path) -> Result<Self, PodError> {
        let file = path.display().to_string();
        let text = std::fs::read(path).map_err(|e| PodError::File {
            file: file.clone(),
            why: e.to_string(),
        })?;
        Self::parse(&file, &text)
    }

    /// Returns the pod's SPIFFE identity in `trust_domain`.
    pub fn identity(&self, trust_domain: TrustDomain) -> Identity {
        Identity {
            trust_domain,
            namespace: self.namespace.clone(),
            service_account: self.service_account.clone(),
        }
    }

    /// Returns whether the pod has an address of the family of `ip`.
    pub fn has_family_of(&self, ip: IpAddr) -> bool {
        self.ips.iter().any(|own| own.is_ipv4() == ip.is_ipv4())
    }

    /// Returns whether the two differ at most in labels and probe ports, so that no socket has to
    /// be reopened.
    pub fn same_place(&self, other: &Self) -> bool {
        let bare = |p: &Self| Self {
            labels: Labels::new(),
            probe_ports: BTreeSet::new(),
            ..p.clone()
        };
        bare(self) == bare(other)
    }
}

/// Returns the workload name that Istio's dashboards use: the pod's name without the suffix of a
/// ReplicaSet (`-6f7b8c9d5-x2x4z`) or a StatefulSet (`-0`).
pub fn workload_name(pod: &str) -> &str {
    let Some((head, last)) = pod.rsplit_once('-') else {
        return pod;
    };
    if !last.is_empty() && last.bytes().all(|b| b.is_ascii_digit()) {
        return head;
    }
    // Kubernetes draws both suffixes from an alphabet without vowels (k8s.io/apimachinery
    // rand.SafeEncodeString).
    let drawn = |s: &str| {
        s.bytes()
            .all(|b| b.is_ascii_digit() || (b.is_ascii_lowercase() && !b"aeiou".contains(&b)))
    };
    match head.rsplit_once('-') {
        Some((name, hash))
            if last.len() == 5 && (8..=10).contains(&hash.len()) && drawn(last) && drawn(hash) =>
        {
            name
        }
        _ => pod,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"{"uid":"alpha/bookinfo/reviews-v1-0","namespace":"bookinfo","name":"reviews-v1-0","serviceAccount":"reviews",
        "netns":"/run/netns/x","cgroup":"/sys/fs/cgroup/x","ips":["10.1.1.2","fd00::2"],"labels":{"app":"reviews"},"unknown":1}"#;

    #[test]
    fn a_pod_file_is_read() {
        let p = LocalPod::parse("f", GOOD.as_bytes()).unwrap();
        assert_eq!(
            (p.tenant.as_str(), p.ips.len(), p.labels["app"].as_str()),
            ("alpha", 2, "reviews")
        );
        let id = p.identity("alpha.example".parse().unwrap());
        assert_eq!(
            id.to_string(),
            "spiffe://alpha.example/ns/bookinfo/sa/reviews"
        );
        let probed = LocalPod::parse(
            "f",
            GOOD.replace("\"unknown\":1", "\"probePorts\":[8080,8081]")
                .as_bytes(),
        )
        .unwrap();
        assert_eq!(
            (p.probe_ports.len(), probed.probe_ports),
            (0, BTreeSet::from([8080, 8081])),
            "none is declared unless it is written"
        );
        assert!(
            !p.workload_api
                && LocalPod::parse(
                    "f",
                    GOOD.replace("\"unknown\":1", "\"workloadApi\":true")
                        .as_bytes()
                )
                .unwrap()
                .workload_api
        );
        assert!(
            p.has_family_of("10.9.9.9".parse().unwrap())
                && p.has_family_of("fd00::9".parse().unwrap())
        );
        let mut q = p.clone();
        q.labels.clear();
        q.probe_ports.insert(8080);
        assert!(p.same_place(&q) && p != q);
        q.service_account = "other".parse().unwrap();
        assert!(!p.same_place(&q));
    }

    #[test]
    fn errors_in_files_have_position_and_reason() {
        for (case, from, to, expected) in [
            ("torn", "\"labels\":{", "", "write uid, namespace"),
            (
                "no address",
                "[\"10.1.1.2\",\"fd00::2\"]",
                "[]",
                "ips is empty",
            ),
            ("bad address", "10.1.1.2", "10.1.1", "write uid"),
            (
                "another namespace",
                "\"namespace\":\"bookinfo\"",
                "\"namespace\":\"other\"",
                "uid \"alpha/bookinfo/reviews-v1-0\" is of another namespace or name; fix: write TENANT/other",
            ),
            ("bad tenant", "alpha/", "Alpha/", "tenant name"),
            (
                "bad account",
                "\"reviews\",\n",
                "\"Re_views\",\n",
                "service account",
            ),
        ] {
            let e = LocalPod::parse("dir/x.json", GOOD.replace(from, to).as_bytes())
                .unwrap_err()
                .to_string();
            assert!(
                e.contains(expected) && e.starts_with("dir/x.json: "),
                "{case}: {e}"
            );
        }
        let long = vec![b' '; POD_FILE_BYTES_MAX + 1];
        assert!(
            LocalPod::parse("f", &long)
                .unwrap_err()
                .to_string()
                .contains("longer than")
        );
        assert!(
            LocalPod::read(Path::new("/none"))
                .unwrap_err()
                .to_string()
                .starts_with("/none: ")
        );
    }

    #[test]
    fn workload_names_omit_the_suffixes_of_replicas() {
        for (pod, workload) in [
            ("reviews-v1-0", "reviews-v1"),
            ("reviews-v1-6f7b8c9d5-x2x4z", "reviews-v1"),
            ("reviews", "reviews"),
            ("reviews-v1", "reviews-v1"),
            ("web-frontends-alpha", "web-frontends-alpha"),
        ] {
            assert_eq!(workload_name(pod), workload, "{pod}");
        }
    }
}
