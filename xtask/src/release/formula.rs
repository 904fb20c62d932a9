//! Descriptions for package managers that fetch the archives.

use std::path::Path;

use super::VERSION;
use crate::cargo::Result;
use crate::docs::{read, write};

/// Writes the formula for Homebrew under Linux, with the hashes of the archives at `url`.
pub(super) fn homebrew(sums: &[(String, String)], url: &str, out: &Path) -> Result<()> {
    let template = read(&qhx_paths::workspace().join("packaging/homebrew/qhx.rb"))?;
    write(&out.join("qhx.rb"), &filled(&template, sums, url)?)
}

fn filled(template: &str, sums: &[(String, String)], url: &str) -> Result<String> {
    let mut text = template.replace("@URL@", url).replace("@VERSION@", VERSION);
    for (name, hash) in sums {
        let target = name.strip_prefix(&format!("qhx-{VERSION}-"));
        if let Some(target) = target.and_then(|name| name.strip_suffix(".tar.gz")) {
            text = text.replace(&format!("@{target}@"), hash);
        }
    }
    match text.lines().find(|line| line.contains("\"@") || line.contains("@\"")) {
        Some(line) => Err(format!("packaging/homebrew/qhx.rb: nothing was made for {line:?}")),
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
        let text = filled(&template, &sums, "https://example.org").unwrap();
        for (name, hash) in &sums {
            let lines = format!("    url \"https://example.org/{name}\"\n    sha256 \"{hash}\"\n");
            assert!(text.contains(&lines), "{lines} is in\n{text}");
        }
        sums.pop();
        let why = filled(&template, &sums, "https://example.org").unwrap_err();
        assert!(why.contains("@aarch64-unknown-linux-gnu@"), "{why}");
    }
}
