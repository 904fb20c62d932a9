//! Descriptions for package managers that fetch the archives.

use std::path::{Path, PathBuf};

use super::VERSION;
use crate::cargo::Result;
use crate::files::{read, write};

/// Writes the formula for Homebrew under Linux, with the hashes of the archives at `url`.
///
/// # Errors
/// An archive is not there: for people.
pub(super) fn homebrew(sums: &[(String, String)], url: &str, out: &Path) -> Result<PathBuf> {
    let template = read(&qhx_paths::workspace().join("packaging/homebrew/qhx.rb"))?;
    let file = out.join("qhx.rb");
    write(&file, &filled(&template, ".tar.gz", sums, url)?)?;
    Ok(file)
}

/// Fills a template in: `@URL@`, `@VERSION@`, and for each archive with this ending its hash for the name of its
/// machine.
///
/// # Errors
/// The template has the hash of an archive that is not there.
pub(super) fn filled(
    template: &str,
    ending: &str,
    sums: &[(String, String)],
    url: &str,
) -> Result<String> {
    let mut text = template.replace("@URL@", url).replace("@VERSION@", VERSION);
    for (name, hash) in sums {
        let machine = name.strip_prefix(&format!("qhx-{VERSION}-"));
        if let Some(machine) = machine.and_then(|name| name.strip_suffix(ending)) {
            text = text.replace(&format!("@{machine}@"), hash);
        }
    }
    let missing = |word: &&str| word.starts_with('@') && word.ends_with('@') && word.len() > 2;
    match text.split([' ', '"', '\n']).find(missing) {
        Some(word) => Err(format!("there is no archive for {}", word.trim_matches('@'))),
        None => Ok(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_formula_has_the_hash_of_each_archive() {
        let template = read(&qhx_paths::workspace().join("packaging/homebrew/qhx.rb")).unwrap();
        let archive =
            |target: &str, hash: &str| (format!("qhx-{VERSION}-{target}.tar.gz"), hash.to_owned());
        let mut sums = vec![
            archive("x86_64-unknown-linux-gnu", "12ab"),
            archive("aarch64-unknown-linux-gnu", "34cd"),
        ];
        let text = filled(&template, ".tar.gz", &sums, "https://example.org").unwrap();
        for (name, hash) in &sums {
            let lines = format!("    url \"https://example.org/{name}\"\n    sha256 \"{hash}\"\n");
            assert!(text.contains(&lines), "{lines} is in\n{text}");
        }
        sums.pop();
        let why = filled(&template, ".tar.gz", &sums, "https://example.org").unwrap_err();
        assert!(why.contains("aarch64-unknown-linux-gnu"), "{why}");
    }
}
