//! A world's directories can be created while the end of another world removes their parents.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::state::make_dir;

/// Number of directories that are created. Without repeated attempts some of ten thousand fail on
/// two cores.
const MADE: usize = 10_000;

#[test]
fn a_directory_is_made_although_its_parents_are_removed_meanwhile() {
    let root = std::env::temp_dir().join(format!("canal-directories-{}", std::process::id()));
    let parent = root.join("worlds");
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let _ = std::fs::remove_dir(&parent);
                let _ = std::fs::remove_dir(&root);
            }
        });
        let made = (0..MADE).try_for_each(|_| make_dir(&parent));
        done.store(true, Ordering::Relaxed);
        made.expect("each is made");
    });
    let _ = std::fs::remove_dir_all(&root);
}
