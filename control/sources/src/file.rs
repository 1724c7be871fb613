//! Opens and reads the files of one tenant's directory without leaving it. It does not interpret
//! their content.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{Dir, FileType, Mode, OFlags, ResolveFlags, Stat, fstat, openat2};

use crate::limits::FILE_BYTES_MAX;

/// File metadata that changes when the file's content changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileFingerprint {
    device: u64,
    inode: u64,
    size: i64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl FileFingerprint {
    fn of(stat: &Stat) -> Self {
        Self {
            device: stat.st_dev,
            inode: stat.st_ino,
            size: stat.st_size,
            modified: (
                stat.st_mtime,
                i64::try_from(stat.st_mtime_nsec).unwrap_or_default(),
            ),
            changed: (
                stat.st_ctime,
                i64::try_from(stat.st_ctime_nsec).unwrap_or_default(),
            ),
        }
    }
}

/// A file that is open for reading.
pub(crate) struct OpenFile {
    file: File,
    pub(crate) stamp: FileFingerprint,
}

/// The reason that a file cannot be read: the problem and the fix.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct FileReadError {
    pub(crate) problem: String,
    pub(crate) fix: &'static str,
}

/// The result of reading a file.
pub(crate) enum FileContent {
    Text(String),
    /// The file changed while it was read; read it again soon.
    Moving,
    Refused(FileReadError),
}

/// Opens the directory `name` below `parent`. Links may not lead out of `parent`.
pub(crate) fn open_directory(parent: BorrowedFd<'_>, name: &str) -> rustix::io::Result<OwnedFd> {
    openat2(
        parent,
        name,
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS,
    )
}

/// Returns the sorted names in a directory that are UTF-8 and do not begin with a dot.
pub(crate) fn names(directory: BorrowedFd<'_>) -> rustix::io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        names.extend(
            entry
                .file_name()
                .to_str()
                .ok()
                .filter(|name| !name.starts_with('.'))
                .map(str::to_owned),
        );
    }
    names.sort();
    Ok(names)
}

/// Opens the regular file `name`. A link may only lead to another file below `directory`. Opening a
/// pipe does not block.
///
/// # Errors
/// Returns the problem and the fix if a link leaves the directory, the file cannot be opened, or it
/// is not a regular file.
pub(crate) fn open_file(directory: BorrowedFd<'_>, name: &str) -> Result<OpenFile, FileReadError> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let opened = openat2(
        directory,
        name,
        flags,
        Mode::empty(),
        ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS,
    );
    let fd = opened.map_err(|error| match error {
        rustix::io::Errno::XDEV => FileReadError {
            problem: "the symbolic link points outside the tenant's directory".to_owned(),
            fix: "put the file itself here",
        },
        error => FileReadError {
            problem: format!("the file cannot be opened: {error}"),
            fix: "make it readable for the controller",
        },
    })?;
    let stat = fstat(&fd).map_err(|error| FileReadError {
        problem: format!("the file cannot be read: {error}"),
        fix: "repair the file system, or restore the file",
    })?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(FileReadError {
            problem: "this is not a regular file".to_owned(),
            fix: "remove it or rename it",
        });
    }
    Ok(OpenFile {
        file: File::from(fd),
        stamp: FileFingerprint::of(&stat),
    })
}

/// Reads a file to its end, up to [`FILE_BYTES_MAX`].
pub(crate) fn read(opened: &mut OpenFile) -> FileContent {
    let refuse =
        |problem: String, fix: &'static str| FileContent::Refused(FileReadError { problem, fix });
    let mut bytes = Vec::new();
    if let Err(error) = opened
        .file
        .by_ref()
        .take(FILE_BYTES_MAX as u64 + 1)
        .read_to_end(&mut bytes)
    {
        return refuse(
            format!("the file cannot be read: {error}"),
            "repair the file system, or restore the file",
        );
    }
    if bytes.len() > FILE_BYTES_MAX {
        return refuse(
            format!("the file has more than {FILE_BYTES_MAX} bytes"),
            "split it into several files",
        );
    }
    // A writer that was active during the read may have left us a mixture of old and new content.
    match fstat(opened.file.as_fd()) {
        Ok(stat) if FileFingerprint::of(&stat) == opened.stamp => {}
        _ => return FileContent::Moving,
    }
    match String::from_utf8(bytes) {
        Ok(text) => FileContent::Text(text),
        Err(error) => {
            let good = &error.as_bytes()[..error.utf8_error().valid_up_to()];
            let line = good.iter().filter(|byte| **byte == b'\n').count() + 1;
            refuse(
                format!("line {line} is not UTF-8 text"),
                "save the file as UTF-8",
            )
        }
    }
}
