//! Opens and reads the files of one tenant's directory, without ever leaving it. Makes no choices about their content.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{Dir, FileType, Mode, OFlags, ResolveFlags, Stat, fstat, openat2};

use crate::limits::FILE_BYTES_MAX;

/// What changes when a file's content does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stamp {
    device: u64,
    inode: u64,
    size: i64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    fn of(stat: &Stat) -> Self {
        Self {
            device: stat.st_dev,
            inode: stat.st_ino,
            size: stat.st_size,
            modified: (stat.st_mtime, i64::try_from(stat.st_mtime_nsec).unwrap_or_default()),
            changed: (stat.st_ctime, i64::try_from(stat.st_ctime_nsec).unwrap_or_default()),
        }
    }
}

/// A file that is open for reading.
pub(crate) struct Opened {
    file: File,
    pub(crate) stamp: Stamp,
}

/// Why a file cannot be taken: the problem and the mend.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Unreadable {
    pub(crate) problem: String,
    pub(crate) mend: &'static str,
}

/// What reading a file gave.
pub(crate) enum Content {
    Text(String),
    /// It was written to meanwhile; read it again soon.
    Moving,
    Refused(Unreadable),
}

/// Opens the directory `name` below `parent`; links may not lead out of `parent`.
pub(crate) fn open_directory(parent: BorrowedFd<'_>, name: &str) -> rustix::io::Result<OwnedFd> {
    openat2(
        parent,
        name,
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS,
    )
}

/// The names in a directory that are UTF-8 and not hidden, sorted.
pub(crate) fn names(directory: BorrowedFd<'_>) -> rustix::io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        names.extend(entry.file_name().to_str().ok().filter(|name| !name.starts_with('.')).map(str::to_owned));
    }
    names.sort();
    Ok(names)
}

/// Opens the regular file `name`. A link may lead to another file below `directory` only; a pipe is not waited for.
pub(crate) fn open_file(directory: BorrowedFd<'_>, name: &str) -> Result<Opened, Unreadable> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let opened = openat2(directory, name, flags, Mode::empty(), ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS);
    let fd = opened.map_err(|error| match error {
        rustix::io::Errno::XDEV => {
            Unreadable { problem: "the link leads out of the tenant's directory".to_owned(), mend: "put the file itself here" }
        }
        error => Unreadable { problem: format!("the file cannot be opened: {error}"), mend: "make it readable for the controller" },
    })?;
    let stat =
        fstat(&fd).map_err(|error| Unreadable { problem: format!("the file cannot be read: {error}"), mend: "check the file system" })?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(Unreadable { problem: "this is not a regular file".to_owned(), mend: "remove it or rename it" });
    }
    Ok(Opened { file: File::from(fd), stamp: Stamp::of(&stat) })
}

/// Reads a file to its end, up to the limit.
pub(crate) fn read(opened: &mut Opened) -> Content {
    let refuse = |problem: String, mend: &'static str| Content::Refused(Unreadable { problem, mend });
    let mut bytes = Vec::new();
    if let Err(error) = opened.file.by_ref().take(FILE_BYTES_MAX as u64 + 1).read_to_end(&mut bytes) {
        return refuse(format!("the file cannot be read: {error}"), "check the file system");
    }
    if bytes.len() > FILE_BYTES_MAX {
        return refuse(format!("the file has more than {FILE_BYTES_MAX} bytes"), "split it into several files");
    }
    match fstat(opened.file.as_fd()) {
        Ok(stat) if Stamp::of(&stat) == opened.stamp => {}
        _ => return Content::Moving,
    }
    match String::from_utf8(bytes) {
        Ok(text) => Content::Text(text),
        Err(error) => {
            let good = &error.as_bytes()[..error.utf8_error().valid_up_to()];
            let line = good.iter().filter(|byte| **byte == b'\n').count() + 1;
            refuse(format!("line {line} is not UTF-8 text"), "save the file as UTF-8")
        }
    }
}
