//! Rules on documents: every path in them exists, each has one title, and none names a package
//! registry's host.

use crate::tree::SourceTree;

/// Parts of host names that a commit may not contain.
const HOSTS: [&str; 6] = [
    "crates.io",
    "pypi.org",
    "npmjs.com",
    "proxy.golang.org",
    "deb.debian.org",
    "repo1.maven.org",
];

pub(crate) fn check(tree: &SourceTree, found: &mut Vec<String>) -> anyhow::Result<()> {
    for (path, text) in tree.with_suffix(".md") {
        titles(path, text, found);
        paths(tree, path, text, found);
    }
    for (path, text) in &tree.files {
        if path.ends_with(".lock") || path.ends_with("go.sum") || path == "xtask/src/prose.rs" {
            continue;
        }
        for (n, line) in text.lines().enumerate() {
            if HOSTS.iter().any(|h| line.contains(h)) {
                found.push(format!("{path}:{}: names a package registry's host", n + 1));
            }
        }
    }
    Ok(())
}

fn titles(path: &str, text: &str, found: &mut Vec<String>) {
    let mut fenced = false;
    let n = text
        .lines()
        .filter(|l| {
            fenced ^= l.starts_with("```");
            !fenced && l.starts_with("# ")
        })
        .count();
    if n != 1 {
        found.push(format!("{path}: {n} titles (`# …`), wanted one"));
    }
}

/// Checks words in backticks and links that look like a path of this tree: they have a slash, and
/// their first part is a folder of the root.
fn paths(tree: &SourceTree, doc: &str, text: &str, found: &mut Vec<String>) {
    for (n, line) in text.lines().enumerate() {
        let ticks = line.split('`').skip(1).step_by(2);
        let links = line.split("](").skip(1).filter_map(|r| r.split(')').next());
        for word in ticks {
            if looks_like_path(tree, word) && !tree.has(word) {
                found.push(format!("{doc}:{}: `{word}` does not exist", n + 1));
            }
        }
        for link in links {
            let target = link.split('#').next().unwrap_or_default();
            if target.is_empty() || target.contains("://") {
                continue;
            }
            let dir = doc.rsplit_once('/').map_or("", |(d, _)| d);
            if !tree.has(&normal(dir, target)) {
                found.push(format!("{doc}:{}: the link {link} leads nowhere", n + 1));
            }
        }
    }
}

fn normal(dir: &str, target: &str) -> String {
    let mut parts: Vec<&str> = dir.split('/').filter(|p| !p.is_empty()).collect();
    for p in target.split('/') {
        match p {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            p => parts.push(p),
        }
    }
    parts.join("/")
}

fn looks_like_path(tree: &SourceTree, word: &str) -> bool {
    let plain = word
        .bytes()
        .all(|b| b.is_ascii_alphanumeric() || b"/._-".contains(&b));
    let Some((first, rest)) = word.split_once('/') else {
        return false;
    };
    plain && !rest.is_empty() && !first.is_empty() && tree.has(first)
}
