//! The YAML files that `-f` names: files, directories of them, or `-` for stdin. It does not check
//! their content.

use std::io::Read;
use std::path::{Path, PathBuf};

use canal_wire::api::File;

use crate::exit::{ExitStatus, VerbError, VerbResult};

/// Maximum size of a file, in bytes: far above any hand-written one, and far below the controller's
/// limit.
/// The controller accepts 64 MiB in a request, of which one file takes a quarter.
const FILE_BYTES_MAX: u64 = 16 << 20;

/// Reads all files. A directory stands for its `.yaml` and `.yml` files in the order of their
/// names.
pub(crate) fn read(paths: &[PathBuf]) -> VerbResult<Vec<File>> {
    let mut files = Vec::new();
    for path in paths {
        if path.as_os_str() == "-" {
            let mut yaml = String::new();
            let read = std::io::stdin().read_to_string(&mut yaml);
            read.map_err(|problem| VerbError::failed("stdin", problem, "pipe UTF-8 YAML into it"))?;
            files.push(File {
                path: "stdin".to_owned(),
                yaml,
            });
        } else if path.is_dir() {
            let inside = yaml_files(path).map_err(|problem| unreadable(path, &problem))?;
            if inside.is_empty() {
                let what = "contains no .yaml or .yml file";
                return Err(VerbError::new(
                    ExitStatus::Failed,
                    path.display().to_string(),
                    what,
                    "name a file, or another directory",
                ));
            }
            files.extend(
                inside
                    .iter()
                    .map(|path| read_file(path))
                    .collect::<VerbResult<Vec<_>>>()?,
            );
        } else {
            files.push(read_file(path)?);
        }
    }
    Ok(files)
}

fn read_file(path: &Path) -> VerbResult<File> {
    let metadata = std::fs::metadata(path).map_err(|problem| unreadable(path, &problem))?;
    if metadata.len() > FILE_BYTES_MAX {
        let what = format!(
            "it has {} bytes; at most {FILE_BYTES_MAX} are allowed",
            metadata.len()
        );
        return Err(VerbError::failed(
            path.display().to_string(),
            what,
            "split it into several files",
        ));
    }
    let yaml = std::fs::read_to_string(path).map_err(|problem| unreadable(path, &problem))?;
    Ok(File {
        path: path.display().to_string(),
        yaml,
    })
}

fn unreadable(path: &Path, problem: &std::io::Error) -> VerbError {
    let exit = if problem.kind() == std::io::ErrorKind::NotFound {
        ExitStatus::Missing
    } else {
        ExitStatus::Failed
    };
    VerbError::new(
        exit,
        path.display().to_string(),
        problem.to_string(),
        "name a readable YAML file or directory",
    )
}

/// Returns the YAML files directly in `directory`, sorted.
pub(crate) fn yaml_files(directory: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_file() && path.extension().is_some_and(|e| e == "yaml" || e == "yml") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_stand_for_their_yaml_files_in_order() {
        let directory = tempfile::tempdir().unwrap();
        for name in ["b.yaml", "a.yml", "c.txt"] {
            std::fs::write(directory.path().join(name), name).unwrap();
        }
        let files = read(&[directory.path().to_owned()]).unwrap();
        assert_eq!(
            files.iter().map(|f| f.yaml.as_str()).collect::<Vec<_>>(),
            ["a.yml", "b.yaml"]
        );
    }

    #[test]
    fn missing_and_empty_files_are_named() {
        let directory = tempfile::tempdir().unwrap();
        let missing = read(&[directory.path().join("none.yaml")]).unwrap_err();
        assert_eq!(missing.exit, ExitStatus::Missing);
        assert!(
            read(&[directory.path().to_owned()])
                .unwrap_err()
                .what
                .contains("contains no")
        );
    }
}
