//! Pages of the project: what they name in backticks and link to is there.

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test that fails does so by panicking")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Files whose names end so are the project's own, wherever their path begins.
const SOURCES: [&str; 10] = ["rs", "py", "toml", "md", "sh", "kt", "h", "c", "cpp", "html"];

/// All files and folders below `folder`, but for what is built or hidden.
fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name == "target" || name == "node_modules" || (name.starts_with('.') && name != ".ci") {
            continue;
        }
        if path.is_dir() && !path.is_symlink() {
            walk(&path, found);
        }
        found.push(path);
    }
}

/// A page: its path within the project, and its text without blocks of code, whose lines are empty.
fn pages(root: &Path, files: &[PathBuf]) -> Vec<(PathBuf, String)> {
    let is_page = |path: &&PathBuf| path.extension().is_some_and(|extension| extension == "md");
    let read = |path: &PathBuf| {
        let mut within = false;
        let text = fs::read_to_string(path).unwrap();
        let lines = text.lines().map(|line| {
            let fence = line.trim_start().starts_with("```");
            within ^= fence;
            if within || fence { "" } else { line }
        });
        let text = lines.collect::<Vec<_>>().join("\n");
        (path.strip_prefix(root).unwrap().to_owned(), text)
    };
    files.iter().filter(is_page).map(read).collect()
}

/// Texts between single backticks on a line, with the line's number.
fn spans(text: &str) -> Vec<(usize, &str)> {
    let mut spans = Vec::new();
    for (at, line) in text.lines().enumerate() {
        // Odd parts lie between backticks.
        spans.extend(line.split('`').skip(1).step_by(2).map(|span| (at + 1, span)));
    }
    spans
}

/// `a/{b,c}.rs` is two paths.
fn expanded(path: &str) -> Vec<String> {
    let Some((before, rest)) = path.split_once('{') else { return vec![path.to_owned()] };
    let Some((list, after)) = rest.split_once('}') else { return vec![path.to_owned()] };
    list.split(',').flat_map(|one| expanded(&format!("{before}{one}{after}"))).collect()
}

/// True where `name` is of a pattern with at most one `*`.
fn matches(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((before, after)) => {
            name.len() >= before.len() + after.len()
                && name.starts_with(before)
                && name.ends_with(after)
        }
    }
}

#[test]
fn paths_in_backticks_are_there() {
    let root = qhx_paths::workspace();
    let mut files = Vec::new();
    walk(root, &mut files);
    let there: Vec<Vec<String>> = files
        .iter()
        .map(|path| {
            let within = path.strip_prefix(root).unwrap();
            within.iter().map(|part| part.to_string_lossy().into_owned()).collect()
        })
        .collect();
    let top: BTreeSet<_> =
        there.iter().filter(|parts| parts.len() > 1).map(|parts| &parts[0]).collect();
    let is_path = |span: &str| {
        let plain = |c: char| c.is_ascii_alphanumeric() || "_-./{},*".contains(c);
        let (first, _) = span.split_once('/').unwrap_or_default();
        let extension = span.rsplit_once('.').map_or("", |(_, extension)| extension);
        !first.is_empty()
            && span.chars().all(plain)
            && (top.contains(&first.to_owned()) || SOURCES.contains(&extension))
    };
    // Also as the end of a longer one: pages say where they are.
    let is_there = |path: &str| {
        let parts: Vec<_> = path.split('/').filter(|part| !part.is_empty()).collect();
        there.iter().any(|known| {
            known.len() >= parts.len()
                && known[known.len() - parts.len()..]
                    .iter()
                    .zip(&parts)
                    .all(|(name, part)| matches(part, name))
        })
    };
    let (mut count, mut missing) = (0, Vec::new());
    for (page, text) in pages(root, &files) {
        for (line, span) in spans(&text) {
            for path in expanded(span).iter().filter(|path| is_path(path)) {
                count += 1;
                if !is_there(path) {
                    missing.push(format!("{}:{line}: {path}", page.display()));
                }
            }
        }
    }
    assert!(count > 200, "{count} paths");
    assert!(missing.is_empty(), "these are not there:\n{}", missing.join("\n"));
}

#[test]
fn links_between_pages_lead_to_files() {
    let root = qhx_paths::workspace();
    let mut files = Vec::new();
    walk(root, &mut files);
    let (mut count, mut missing) = (0, Vec::new());
    for (page, text) in pages(root, &files) {
        let folder = root.join(&page).parent().unwrap().to_owned();
        for link in text.split("](").skip(1) {
            let target = link.split([')', '#', ' ', '\n']).next().unwrap_or_default();
            if target.is_empty() || target.contains(':') {
                continue;
            }
            count += 1;
            if !folder.join(target).exists() {
                missing.push(format!("{}: {target}", page.display()));
            }
        }
    }
    assert!(count > 100, "{count} links");
    assert!(missing.is_empty(), "these are not there:\n{}", missing.join("\n"));
}

/// Pages of the book that say nothing of their own.
const OVERVIEWS: [&str; 3] = ["README.md", "docs/README.md", "CHANGELOG.md"];

#[test]
fn pages_say_under_the_title_for_whom_they_are() {
    let root = qhx_paths::workspace();
    let summary = fs::read_to_string(root.join("docs/SUMMARY.md")).unwrap();
    let targets = summary.split("](").skip(1).filter_map(|link| link.split(')').next());
    let (mut count, mut silent) = (0, Vec::new());
    for target in targets {
        let page = root.join("docs").join(target).canonicalize().unwrap();
        let name = page.strip_prefix(root.canonicalize().unwrap()).unwrap().to_owned();
        if OVERVIEWS.iter().any(|overview| name == Path::new(overview)) {
            continue;
        }
        count += 1;
        let text = fs::read_to_string(&page).unwrap();
        let mut lines = text.lines();
        let (title, gap, whom) = (lines.next(), lines.next(), lines.next().unwrap_or_default());
        let is_title = title.is_some_and(|title| title.starts_with("# "));
        if !is_title
            || gap != Some("")
            || !whom.starts_with("*For people who ")
            || !whom.ends_with(".*")
        {
            silent.push(name.display().to_string());
        }
    }
    assert!(count > 30, "{count} pages");
    assert!(silent.is_empty(), "no `*For people who ….*` below the title:\n{}", silent.join("\n"));
}

#[test]
fn both_lists_of_pages_have_the_same_parts() {
    let docs = qhx_paths::workspace().join("docs");
    // Parts of a list, each with its pages in order.
    let parts = |name: &str, heading: &str| -> Vec<(String, Vec<String>)> {
        let text = fs::read_to_string(docs.join(name)).unwrap();
        let heading = format!("\n{heading} ");
        let sections = text.split(&heading).skip(1);
        let parts = sections.map(|section| {
            let (title, rest) = section.split_once('\n').unwrap();
            let item = |line: &&str| line.starts_with("| [") || line.starts_with("- [");
            let links = rest.lines().filter(item).map(|line| line.split("](").nth(1).unwrap());
            let pages = links.map(|link| link.split(')').next().unwrap().to_owned());
            (title.to_owned(), pages.collect())
        });
        parts.filter(|(title, _)| title != "Host-ops").collect()
    };
    let summary = parts("SUMMARY.md", "#");
    assert_eq!(summary.iter().map(|(title, _)| &**title).collect::<Vec<_>>(), PARTS);
    assert_eq!(parts("README.md", "##"), summary);
}

/// Parts of the book.
const PARTS: [&str; 4] = ["Start", "Guides", "Reference", "Internals"];

/// Manifests of packages, by the names of these.
fn packages(files: &[PathBuf]) -> Vec<(String, PathBuf)> {
    let manifests = files.iter().filter(|path| path.ends_with("Cargo.toml"));
    let named = manifests.filter_map(|path| {
        let text = fs::read_to_string(path).unwrap();
        let (_, package) = text.split_once("[package]")?;
        let name = package.lines().find_map(|line| line.strip_prefix("name = "))?;
        Some((name.trim_matches('"').to_owned(), path.clone()))
    });
    named.collect()
}

#[test]
fn tests_and_packages_of_commands_are_there() {
    let root = qhx_paths::workspace();
    let mut files = Vec::new();
    walk(root, &mut files);
    let packages = packages(&files);
    let (mut count, mut missing) = (0, Vec::new());
    for (page, text) in pages(root, &files) {
        for (line, span) in spans(&text).into_iter().filter(|(_, span)| span.starts_with("cargo "))
        {
            let after = |names: [&str; 2]| {
                let mut words = span.split_whitespace().skip_while(|word| !names.contains(word));
                words.nth(1)
            };
            let Some(package) = after(["-p", "--package"]) else { continue };
            count += 1;
            let place = format!("{}:{line}: {span}", page.display());
            let Some((_, manifest)) = packages.iter().find(|(name, _)| name == package) else {
                missing.push(place);
                continue;
            };
            let Some(test) = after(["--test", "--test"]) else { continue };
            let tests = manifest.parent().unwrap().join("tests");
            let named =
                fs::read_to_string(manifest).unwrap().contains(&format!("name = \"{test}\""));
            if !named
                && !tests.join(test).with_extension("rs").exists()
                && !tests.join(test).join("main.rs").exists()
            {
                missing.push(place);
            }
        }
    }
    assert!(count > 20, "{count} commands");
    assert!(missing.is_empty(), "these are not there:\n{}", missing.join("\n"));
}
