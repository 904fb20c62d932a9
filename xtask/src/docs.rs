//! The pages of the documentation: where their links lead, and the book that mdBook makes of them.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cargo::{self, Result};
use crate::files::{copy, read, write};
use crate::kotlinc::at;
use crate::python;

/// The list of the book's pages, which mdBook wants to be called so.
const SUMMARY: &str = "docs/SUMMARY.md";

const MDBOOK: &str = "0.5.4";

/// Checks links, as `.rumdl.toml` says.
const RUMDL: &str = "rumdl==0.3.0";

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
    check(root)?;
    let mdbook =
        cargo::installed("mdbook", MDBOOK, &["--no-default-features", "--features", "search"])?;
    let folder = cargo::target_folder()?.join("book");
    // Pages that were removed would stay.
    let _ = std::fs::remove_dir_all(&folder);
    stage(root, &folder.join("src"))?;
    for name in ["book.toml", "book.css"] {
        copy(&root.join("docs").join(name), &folder.join(name))?;
    }
    cargo::run(Command::new(mdbook).arg("build").arg(&folder))?;
    Ok(folder.join("book"))
}

/// Checks the links of all pages below `root`, and that the book has each page of `docs`.
///
/// # Errors
/// rumdl cannot be installed, or something is wrong: for people.
fn check(root: &Path) -> Result<()> {
    let mut rumdl = Command::new(python::program(RUMDL, "rumdl")?);
    rumdl.args(["check", "--no-cache", "--config"]);
    rumdl.arg(qhx_paths::workspace().join(".rumdl.toml")).arg(".");
    cargo::run(rumdl.current_dir(root))?;
    let listed = listed(root)?;
    let docs = root.join("docs");
    for entry in std::fs::read_dir(&docs).map_err(at(&docs))? {
        let page = format!("docs/{}", entry.map_err(at(&docs))?.file_name().to_string_lossy());
        if is_page(Path::new(&page)) && page != SUMMARY && !listed.contains(&page) {
            return Err(format!("{page}: {SUMMARY} does not list it"));
        }
    }
    Ok(())
}

/// The book's pages in `out`, as they lie in the checkout, with the files that they link to. Links to folders, and to
/// pages outside of the book, become their text.
fn stage(root: &Path, out: &Path) -> Result<()> {
    let pages = listed(root)?;
    for page in pages.iter().map(String::as_str).chain([SUMMARY]) {
        let text = read(&root.join(page))?;
        let mut parts = text.split("](");
        let mut staged = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            let (target, rest) = part.split_once(')').unwrap_or((part, ""));
            let file = local(root, page, target).unwrap_or_default();
            let from = root.join(&file);
            match staged.rfind('[') {
                _ if page == SUMMARY => staged.push_str(&format!("]({file})")),
                Some(open)
                    if !file.is_empty()
                        && (from.is_dir() || is_page(&from) && !pages.contains(&file)) =>
                {
                    staged.remove(open);
                }
                _ => {
                    if from.is_file() && !is_page(&from) {
                        copy(&from, &out.join(&file))?;
                    }
                    // mdBook makes the index of a folder of its README, and does not change links to it.
                    let target = target.replace("README.md", "index.md");
                    staged.push_str(&format!("]({target})"));
                }
            }
            staged.push_str(rest);
        }
        write(&out.join(if page == SUMMARY { "SUMMARY.md" } else { page }), &staged)?;
    }
    Ok(())
}

/// The pages of the book, from the folder of the checkout.
fn listed(root: &Path) -> Result<BTreeSet<String>> {
    let summary = read(&root.join(SUMMARY))?;
    let targets = summary.split("](").skip(1).filter_map(|part| part.split(')').next());
    Ok(targets.filter_map(|target| local(root, SUMMARY, target)).collect())
}

/// The file that a link of `page` leads to, from the folder of the checkout; None for another address.
fn local(root: &Path, page: &str, target: &str) -> Option<String> {
    let file = target.split('#').next().filter(|file| !file.is_empty())?;
    let file = root.join(page).parent()?.join(file).canonicalize().ok()?;
    let file = file.strip_prefix(root.canonicalize().ok()?).ok()?;
    Some(file.to_string_lossy().replace('\\', "/"))
}

fn is_page(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "md")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_lead_somewhere_and_those_that_do_not_are_found() {
        if python::lacks(RUMDL, "rumdl") {
            return;
        }
        check(qhx_paths::workspace()).unwrap();
        let root = tempfile::tempdir().unwrap();
        let wrong = |page: &str, summary: &str| {
            write(&root.path().join("docs/a.md"), page).unwrap();
            write(&root.path().join(SUMMARY), summary).unwrap();
            check(root.path()).is_err()
        };
        assert!(!wrong("# A `b`\n[one](#a-b) `[two](c.md)` [three](../docs)\n", "[A](a.md)\n"));
        assert!(wrong("# A\n[four](#b)\n", "[A](a.md)\n"), "no heading");
        assert!(wrong("# A\n[five](b.md)\n", "[A](a.md)\n"), "no file");
        assert!(wrong("# A\n", "# Nothing\n"), "a page that the book has not");
    }

    /// Holds the schemas of what GitHub and GitLab read.
    const SCHEMAS: &str = "check-jsonschema==0.39.0";

    #[test]
    fn workflows_are_as_github_and_gitlab_read_them() {
        if python::lacks(SCHEMAS, "check-jsonschema") {
            return;
        }
        let root = qhx_paths::workspace();
        let folder = tempfile::tempdir().unwrap();
        let page = read(&root.join("docs/ci.md")).unwrap();
        let blocks = page.split("```yaml\n").skip(1).map(|rest| rest.split("```").next().unwrap());
        let [github, gitlab]: [&str; 2] = blocks.collect::<Vec<_>>().try_into().unwrap();
        let action = read(&root.join("action/action.yml")).unwrap();
        let template =
            read(&root.join("examples/plugin-template/.github/workflows/check.yml")).unwrap();
        let fits = |schema: &str, text: &str| {
            let file = folder.path().join("file.yml");
            write(&file, text).unwrap();
            let mut check = Command::new(python::program(SCHEMAS, "check-jsonschema").unwrap());
            check.args(["--builtin-schema", schema]).arg(&file);
            cargo::run(&mut check).is_ok()
        };
        assert!(fits("vendor.github-actions", &action));
        assert!(!fits("vendor.github-actions", &action.replace("using: composite", "using: bash")));
        for workflow in [&*template, github] {
            assert!(fits("vendor.github-workflows", workflow));
        }
        assert!(!fits("vendor.github-workflows", &github.replace("runs-on:", "run-on:")));
        assert!(fits("vendor.gitlab-ci", gitlab));
        assert!(!fits("vendor.gitlab-ci", &gitlab.replace("script:", "scripts:")));
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
