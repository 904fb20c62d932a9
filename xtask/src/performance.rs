//! The commands of docs/performance.md, run again.

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::cargo::{self, Result};
use crate::files::read;
use crate::kotlinc::at;
use crate::test;

const PAGE: &str = "docs/performance.md";
/// Begins a block of commands. One of ```` ```sh yours ```` needs something that is not here, such as a bundle.
const BLOCK: &str = "```sh";
/// Names of libraries in commands, which stand for those that are installed.
const LIBRARIES: [&str; 2] = ["libQnnHtp.so", "libQnnSystem.so"];
/// Folders that commands find by a path from the checkout.
const LINKS: [&str; 4] = ["benches", "examples", "target", "tests"];

/// The commands below one heading.
#[derive(Debug, PartialEq, Eq)]
struct Section {
    title: String,
    blocks: Vec<String>,
}

/// `cargo xtask performance [SECTION…]`: runs the commands of all sections or of those whose titles contain one of the
/// words, in `target/performance`, and keeps what each printed there.
pub(crate) fn run(wanted: &[String]) -> Result<()> {
    let root = qhx_paths::workspace();
    let sections = sections(&read(&root.join(PAGE))?);
    let is_wanted = |section: &&Section| {
        let title = section.title.to_lowercase();
        wanted.is_empty() || wanted.iter().any(|word| title.contains(&word.to_lowercase()))
    };
    let chosen: Vec<_> = sections.iter().filter(is_wanted).collect();
    if chosen.is_empty() {
        let titles: Vec<_> = sections.iter().map(|section| section.title.as_str()).collect();
        return Err(format!("no section like {wanted:?}; there are: {}", titles.join("; ")));
    }
    let target = cargo::target_folder()?;
    let program = ["--release", "--features", cargo::PROGRAM];
    let qhx = cargo::build(&["qhx-cli"], &program, "qhx")?;
    let folder = target.join("performance");
    fs::create_dir_all(&folder).map_err(at(&folder))?;
    for name in LINKS {
        let to = if name == "target" { target.clone() } else { root.join(name) };
        cargo::run(Command::new("ln").arg("-sfn").arg(to).arg(folder.join(name)))?;
    }
    let libraries = test::runtime(&qhx, &mut test::Skipped::default());
    let mut failed = Vec::new();
    for section in chosen {
        let log = folder.join(format!("{}.txt", slug(&section.title)));
        let mut out = fs::File::create(&log).map_err(at(&log))?;
        for block in &section.blocks {
            let mut block = block.clone();
            if let Some((htp, system)) = &libraries {
                for (name, path) in LIBRARIES.iter().zip([htp, system]) {
                    block = block.replace(name, &path.display().to_string());
                }
            }
            writeln!(out, "$ {}", block.trim_end().replace('\n', "\n$ ")).map_err(at(&log))?;
            let streams = out.try_clone().and_then(|copy| Ok((copy, out.try_clone()?)));
            let (stdout, stderr) = streams.map_err(at(&log))?;
            let path = std::env::var("PATH").unwrap_or_default();
            let beside = qhx.parent().unwrap_or(Path::new(".")).display();
            let mut bash = Command::new("bash");
            bash.args(["-euo", "pipefail", "-c", &block]).current_dir(&folder);
            bash.env("PATH", format!("{beside}:{path}")).stdin(Stdio::null());
            if let Err(why) = cargo::run(bash.stdout(stdout).stderr(stderr)) {
                let first = block.lines().last().unwrap_or_default();
                eprintln!("failed: {}: {first}; see {}", section.title, log.display());
                failed.push(format!("{}: {why}", section.title));
            }
        }
        eprintln!("{}: {}", section.title, log.display());
    }
    match failed.as_slice() {
        [] => Ok(()),
        some => Err(format!("{} blocks of {PAGE} failed:\n{}", some.len(), some.join("\n"))),
    }
}

/// The sections that have commands which can run anywhere.
fn sections(page: &str) -> Vec<Section> {
    let mut sections: Vec<Section> = Vec::new();
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        if let Some(title) = line.strip_prefix("## ") {
            sections.push(Section { title: title.to_owned(), blocks: Vec::new() });
        } else if line.starts_with("```") {
            let block: String =
                lines.by_ref().take_while(|line| *line != "```").flat_map(|l| [l, "\n"]).collect();
            if let Some(section) = sections.last_mut().filter(|_| line == BLOCK) {
                section.blocks.push(block);
            }
        }
    }
    sections.retain(|section| !section.blocks.is_empty());
    sections
}

fn slug(title: &str) -> String {
    title.to_lowercase().replace(|c: char| !c.is_ascii_alphanumeric(), "-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_stand_below_their_sections() {
        let page = "```sh\nbefore\n```\n## A b\n```sh yours\nno\n```\n```sh\none\ntwo\n```\n## C\n```json\n{}\n```\n";
        let blocks = vec!["one\ntwo\n".to_owned()];
        assert_eq!(sections(page), [Section { title: "A b".to_owned(), blocks }]);
        let page = read(&qhx_paths::workspace().join(PAGE)).unwrap_or_default();
        let programs = ["benches/", "target/release/", "qhx ", "cargo "];
        for section in sections(&page) {
            for block in section.blocks {
                assert!(
                    programs.iter().any(|one| block.contains(one)),
                    "{}: {block}",
                    section.title
                );
            }
        }
    }
}
