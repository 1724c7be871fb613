//! The process's limit of open files. It opens and counts none.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit of open files to the hard one, and before that the hard one to `wanted` if it is less and this process may
/// (CAP_SYS_RESOURCE). The limit in force.
pub fn raise_file_limit(wanted: u64) -> u64 {
    let have = getrlimit(Resource::Nofile);
    if have.maximum.is_some_and(|most| most < wanted) {
        // Refused without the capability, or above fs.nr_open; the caller learns it from what is in force.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum: Some(wanted) });
    }
    let have = getrlimit(Resource::Nofile);
    // Refused only in a sandbox; then the present limit stands.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: have.maximum, maximum: have.maximum });
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_reaches_the_hard_one() {
        let most = raise_file_limit(0);
        assert_eq!(getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX), most);
        assert!(raise_file_limit(most.saturating_add(1)) >= most, "whether it may or not, nothing is lost");
    }
}
