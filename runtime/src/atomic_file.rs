//! Atomic file replacement: a reader finds the old or the new content, even after a kill at any
//! instant. The steps are: temporary file, fsync, rename, fsync of the folder.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Replaces `path` by `content`, readable by the owner only. It creates a missing folder with mode
/// 0700.
///
/// # Errors
/// The folder cannot be created or written; `path` then has the old content.
pub fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let folder = path
        .parent()
        .filter(|p| !p.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    folder_for_owner(folder)?;
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".new");
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&temporary)?;
    file.write_all(content)?;
    file.sync_all()?;
    // The content must be durable before the name points to it; the fsync of the folder makes the
    // rename durable.
    std::fs::rename(&temporary, path)?;
    File::open(folder)?.sync_all()
}

/// Creates the folder and its missing parents with mode 0700. Existing folders keep their mode.
///
/// # Errors
/// A folder cannot be created.
pub fn folder_for_owner(folder: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)
}
