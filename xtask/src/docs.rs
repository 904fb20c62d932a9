//! The pages of the documentation: where their links lead, and the book that mdBook makes of them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use crate::cargo::{self, Result, cargo, works};
use crate::kotlinc::at;

/// The list of the book's pages, which mdBook wants to be called so.
const SUMMARY: &str = "docs/SUMMARY.md";

/// The version of mdBook that is installed where none is there.
const MDBOOK: &str = "0.5.4";

/// A link of a page, outside of code.
struct Link<'a> {
    line: usize,
    /// Text that is shown for it.
    text: &'a str,
    target: &'a str,
    /// All of it, as bytes of the page.
    range: std::ops::Range<usize>,
}

/// `cargo xtask book`: the links are checked, then the book is made.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    if let [first, ..] = arguments {
        return Err(format!("book: unknown argument {first:?}"));
    }
    eprintln!("{}", book()?.display());
    Ok(())
}

/// Checks the links and makes the book. Returns the folder of its pages.
///
/// # Errors
/// Links that lead nowhere, or mdBook cannot be installed or fails: for people.
pub(crate) fn book() -> Result<PathBuf> {
    let root = qhx_paths::workspace();
    let broken = broken(root)?;
    if !broken.is_empty() {
        return Err(format!("links that lead nowhere:\n{}", broken.join("\n")));
    }
    let mdbook = mdbook()?;
    let folder = cargo::target_folder()?.join("book");
    // Pages that were removed would stay.
    let _ = std::fs::remove_dir_all(&folder);
    stage(root, &folder.join("src"))?;
    let settings = root.join("docs/book.toml");
    std::fs::copy(&settings, folder.join("book.toml")).map_err(at(&settings))?;
    cargo::run(Command::new(mdbook).arg("build").arg(&folder))?;
    Ok(folder.join("book"))
}

/// mdBook, which is built where it is not there.
fn mdbook() -> Result<PathBuf> {
    let ours = cargo::tools_folder().join("bin/mdbook");
    for program in [PathBuf::from("mdbook"), ours.clone()] {
        if works(Command::new(&program).arg("--version")) {
            return Ok(program);
        }
    }
    let mut install = cargo(&["install", "--quiet", "--locked", "--debug", "--root"]);
    install.arg(cargo::tools_folder()).args(["--no-default-features", "--features", "search"]);
    cargo::run(install.args(["--version", MDBOOK, "mdbook"]))?;
    Ok(ours)
}

/// The book's pages in `out`, as they lie in the checkout, with the files that they link to. Links to folders, and to
/// pages outside of the book, become their text.
fn stage(root: &Path, out: &Path) -> Result<()> {
    let pages = listed(root)?;
    for page in pages.iter().map(String::as_str).chain([SUMMARY]) {
        let text = read(&root.join(page))?;
        let mut staged = String::new();
        let mut end = 0;
        for link in links(&text) {
            let Some((file, _)) = local(page, link.target) else { continue };
            let from = root.join(&file);
            staged.push_str(&text[end..link.range.start]);
            end = link.range.end;
            if page == SUMMARY {
                staged.push_str(&format!("[{}]({file})", link.text));
            } else if from.is_dir() || (is_page(&from) && !pages.contains(&file)) {
                staged.push_str(link.text);
            } else {
                if !is_page(&from) {
                    copy(&from, &out.join(&file))?;
                }
                // mdBook makes the index of a folder of its README, and does not change links to it.
                let target = link.target.replace("README.md", "index.md");
                staged.push_str(&format!("[{}]({target})", link.text));
            }
        }
        staged.push_str(&text[end..]);
        let to = out.join(if page == SUMMARY { "SUMMARY.md" } else { page });
        write(&to, &staged)?;
    }
    Ok(())
}

/// The pages of the book, from the folder of the checkout.
fn listed(root: &Path) -> Result<BTreeSet<String>> {
    let summary = read(&root.join(SUMMARY))?;
    Ok(links(&summary).iter().filter_map(|link| Some(local(SUMMARY, link.target)?.0)).collect())
}

/// Broken links of all pages below `root`, a line each.
///
/// # Errors
/// A page cannot be read.
fn broken(root: &Path) -> Result<Vec<String>> {
    let mut pages = BTreeMap::new();
    for file in pages_below(root)? {
        let name = file.strip_prefix(root).unwrap_or(&file).to_string_lossy().replace('\\', "/");
        pages.insert(name, read(&file)?);
    }
    let mut faults = Vec::new();
    for (page, text) in &pages {
        for link in links(text) {
            let Some((file, anchor)) = local(page, link.target) else { continue };
            let at = format!("{page}:{}: {}", link.line, link.target);
            match pages.get(&file) {
                Some(target) if !anchor.is_empty() && !anchors(target).contains(anchor) => {
                    faults.push(format!("{at}: {file} has no heading of that name"));
                }
                Some(_) => {}
                None if root.join(&file).exists() => {}
                None => faults.push(format!("{at}: there is no {file}")),
            }
        }
    }
    let listed = listed(root)?;
    let unlisted = |page: &&String| page.starts_with("docs/") && *page != SUMMARY;
    for page in pages.keys().filter(unlisted).filter(|page| !listed.contains(*page)) {
        faults.push(format!("{page}: {SUMMARY} does not list it"));
    }
    Ok(faults)
}

/// The pages in a folder and below, without what is built, fetched or hidden.
fn pages_below(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut pages = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(at(folder))? {
        let path = entry.map_err(at(folder))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.starts_with('.') || ["target", "node_modules"].contains(&name.as_str()) {
            continue;
        }
        if path.is_dir() {
            pages.append(&mut pages_below(&path)?);
        } else if is_page(&path) {
            pages.push(path);
        }
    }
    Ok(pages)
}

fn is_page(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "md")
}

/// The file that a link of `page` leads to, from the folder of the checkout, and the heading; None for an address.
fn local<'a>(page: &str, target: &'a str) -> Option<(String, &'a str)> {
    if target.contains("://") || target.starts_with("mailto:") {
        return None;
    }
    let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
    if file.is_empty() {
        return Some((page.to_owned(), anchor));
    }
    let mut path = PathBuf::new();
    let folder = Path::new(page).parent().unwrap_or(Path::new(""));
    for part in folder.join(file).components() {
        match part {
            Component::ParentDir if path.pop() => {}
            Component::CurDir => {}
            other => path.push(other),
        }
    }
    Some((path.to_string_lossy().replace('\\', "/"), anchor))
}

/// The lines of a page with the byte at which each begins, those in fences left out.
fn prose(text: &str) -> impl Iterator<Item = (usize, usize, &str)> {
    let (mut fenced, mut start) = (false, 0);
    text.split_inclusive('\n').enumerate().filter_map(move |(number, line)| {
        let begin = start;
        start += line.len();
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        (!fenced && !fence).then_some((number + 1, begin, line))
    })
}

fn links(text: &str) -> Vec<Link<'_>> {
    let mut found = Vec::new();
    for (line, start, content) in prose(text) {
        // Code within a line has brackets of its own.
        let mut code = false;
        let outside = |byte| {
            code ^= byte == b'`';
            !code
        };
        let plain: Vec<bool> = content.bytes().map(outside).collect();
        let mut from = 0;
        while let Some(middle) = content[from..].find("](").map(|at| from + at) {
            from = middle + 2;
            let Some(end) = content[from..].find(')').map(|at| from + at) else { break };
            let open = (0..middle).rev().find(|at| plain[*at] && content.as_bytes()[*at] == b'[');
            if let (true, Some(open)) = (plain[middle], open) {
                found.push(Link {
                    line,
                    text: &content[open + 1..middle],
                    target: &content[from..end],
                    range: start + open..start + end + 1,
                });
            }
        }
    }
    found
}

/// The names by which links reach the headings of a page, as hubs of code and mdBook make them.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    for (_, _, line) in prose(text) {
        let title = line.trim_start_matches('#');
        if title.len() == line.len() || !title.starts_with(' ') {
            continue;
        }
        let mut shown = title.trim().to_owned();
        for link in links(title).iter().rev() {
            shown = shown.replace(&title[link.range.clone()], link.text);
        }
        let name: String = shown
            .to_lowercase()
            .chars()
            .filter(|c| c.is_alphanumeric() || "-_ ".contains(*c))
            .map(|c| if c == ' ' { '-' } else { c })
            .collect();
        let again = (1..).map(|n| format!("{name}-{n}"));
        let free = std::iter::once(name.clone()).chain(again).find(|name| !anchors.contains(name));
        anchors.extend(free);
    }
    anchors
}

pub(crate) fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(at(path))
}

/// Writes a file, with the folders above it.
pub(crate) fn write(path: &Path, content: &str) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new(""));
    std::fs::create_dir_all(folder).map_err(at(folder))?;
    std::fs::write(path, content).map_err(at(path))
}

/// Copies a file, with the folders above it.
pub(crate) fn copy(from: &Path, to: &Path) -> Result<()> {
    let folder = to.parent().unwrap_or(Path::new(""));
    std::fs::create_dir_all(folder).map_err(at(folder))?;
    std::fs::copy(from, to).map(|_| ()).map_err(at(from))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_of_all_pages_lead_somewhere() {
        let broken = broken(qhx_paths::workspace()).unwrap();
        assert!(broken.is_empty(), "{}", broken.join("\n"));
    }

    #[test]
    fn links_that_lead_nowhere_are_named() {
        let root = tempfile::tempdir().unwrap();
        let page = "# A `code` title\n## Twice\n## Twice\n[one](b.md#x) `[two](c.md)` [`three`](b.md)\n\
            ```\n# no title\n[four](d.md)\n```\n[five](#twice-1) [six](https://a.b/) [seven](../e)\n\
            [eight](#a-code-title) [nine](#no-title)\n";
        for (name, text) in [
            ("docs/a.md", page),
            ("docs/b.md", "# X\n"),
            ("docs/new.md", ""),
            ("docs/SUMMARY.md", "[A](a.md)\n[B](b.md)\n"),
            ("target/c.md", "[ten](none.md)\n"),
        ] {
            write(&root.path().join(name), text).unwrap();
        }
        let expected = [
            "docs/a.md:9: ../e: there is no e",
            "docs/a.md:10: #no-title: docs/a.md has no heading of that name",
            "docs/new.md: docs/SUMMARY.md does not list it",
        ];
        assert_eq!(broken(root.path()).unwrap(), expected);
    }

    #[test]
    fn the_book_links_to_its_own_pages_only() {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in [
            ("README.md", "[A](docs/a.md#x), [`ops`](ops), [T](tests/README.md)\n"),
            ("docs/a.md", "[home](../README.md) [code](../ops/b.c)\n"),
            ("docs/SUMMARY.md", "[Home](../README.md)\n- [A](a.md)\n"),
            ("ops/b.c", ""),
            ("tests/README.md", ""),
        ] {
            write(&root.path().join(name), text).unwrap();
        }
        let out = root.path().join("book");
        stage(root.path(), &out).unwrap();
        assert_eq!(read(&out.join("README.md")).unwrap(), "[A](docs/a.md#x), `ops`, T\n");
        assert_eq!(
            read(&out.join("docs/a.md")).unwrap(),
            "[home](../index.md) [code](../ops/b.c)\n"
        );
        assert_eq!(read(&out.join("SUMMARY.md")).unwrap(), "[Home](README.md)\n- [A](docs/a.md)\n");
        assert!(out.join("ops/b.c").is_file() && !out.join("tests").exists());
    }
}
