//! Raises the process's limit of open files. It does not open or count files.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit of open files to the hard limit, and returns the limit in force.
///
/// If the hard limit is less than `wanted`, it is raised first. That needs CAP_SYS_RESOURCE.
pub fn raise_file_limit(wanted: u64) -> u64 {
    let have = getrlimit(Resource::Nofile);
    if have.maximum.is_some_and(|most| most < wanted) {
        // Fails without the capability, or above fs.nr_open. The returned limit shows the result.
        let _ = setrlimit(
            Resource::Nofile,
            Rlimit {
                current: Some(wanted),
                maximum: Some(wanted),
            },
        );
    }
    let have = getrlimit(Resource::Nofile);
    // Fails only in a sandbox; then the present limit remains.
    let _ = setrlimit(
        Resource::Nofile,
        Rlimit {
            current: have.maximum,
            maximum: have.maximum,
        },
    );
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_reaches_the_hard_one() {
        let most = raise_file_limit(0);
        assert_eq!(
            getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX),
            most
        );
        assert!(
            raise_file_limit(most.saturating_add(1)) >= most,
            "whether it may or not, nothing is lost"
        );
    }
}
