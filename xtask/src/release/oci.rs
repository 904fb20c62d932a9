//! The image for containers: `packaging/oci/Dockerfile` builds it from a checkout. Here it is built around the programs
//! of an archive and a bare system, as no registry has to be reached for that.

use std::path::Path;
use std::process::Command;

use super::Machine;
use super::proof::{self, Root};
use crate::cargo::{self, Result, works};
use crate::files::copy;
use crate::python::PROGRAMS;

pub(super) const DOCKERFILE: &str = "packaging/oci/Dockerfile";

/// The image of a machine, as far as it was tried.
#[derive(Debug)]
pub(super) struct Image {
    /// Size of its files in MiB.
    pub size: String,
    pub started: String,
}

/// Builds the image with the programs of an archive, and runs them in it.
///
/// # Errors
/// buildah is not there, or something fails: for people.
pub(super) fn proof(machine: Machine, archive: &Path, scratch: &Path) -> Result<Option<Image>> {
    if !works(Command::new("buildah").arg("--version")) {
        return Ok(None);
    }
    let base = Root::made(machine)?;
    let scratch = scratch.join(format!("image-{}", machine.name));
    let (unpacked, programs) = (scratch.join("unpacked"), scratch.join("programs"));
    std::fs::create_dir_all(&unpacked).map_err(crate::kotlinc::at(&unpacked))?;
    let mut tar = Command::new("tar");
    tar.args(["--extract", "--strip-components=1", "--file"]).arg(archive);
    cargo::run(tar.arg("--directory").arg(&unpacked))?;
    for program in PROGRAMS {
        let to = programs.join(format!("bin-{}", machine.name)).join(program);
        copy(&unpacked.join("bin").join(program), &to)?;
    }
    let script = qhx_paths::workspace().join("packaging/oci/prove.sh");
    let mut prove = if machine.is_here() {
        Command::new(script)
    } else {
        let mut enter = Command::new(qhx_paths::workspace().join(proof::ENTER));
        enter.arg("/").arg(script);
        enter
    };
    prove.arg(base).arg(programs).arg(machine.name).arg(&scratch);
    let size = cargo::output(&mut prove)?;
    let what = "built by buildah over a bare Debian 12, ran demo, server and health check";
    Ok(Some(Image { size: size.trim().to_owned(), started: machine.started(what) }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::read;
    use crate::release::VERSION;

    /// Words behind a keyword, of instructions that may go on over several lines.
    fn instructions<'a>(text: &'a str, keyword: &str) -> Vec<Vec<&'a str>> {
        let mut lines = text.lines();
        let mut found = Vec::new();
        while let Some(line) = lines.next() {
            let mut whole = vec![line];
            while whole.last().is_some_and(|line| line.ends_with('\\')) {
                whole.extend(lines.next());
            }
            let mut words = whole.iter().flat_map(|line| line.trim_end_matches('\\').split(' '));
            if words.next() == Some(keyword) {
                found.push(words.filter(|word| !word.is_empty()).collect());
            }
        }
        found
    }

    #[test]
    fn the_image_is_built_of_files_that_are_there() {
        let root = qhx_paths::workspace();
        let text = read(&root.join(DOCKERFILE)).unwrap();
        let copies = instructions(&text, "COPY");
        let from_here = copies.iter().filter(|words| !words[0].starts_with("--from="));
        let mut files = 0;
        for words in from_here {
            for file in &words[..words.len() - 1] {
                assert!(root.join(file).exists(), "{file}");
                files += 1;
            }
        }
        assert!(files >= 4, "{copies:?}");
        let last = instructions(&text, "HEALTHCHECK").concat().concat();
        let health = copies.iter().find(|words| words[0].ends_with("health.py")).unwrap();
        assert!(last.contains(&format!("\"{}health.py\"", health[1])), "{last}");
        assert_eq!(instructions(&text, "USER"), [["qhx"]]);
        assert_eq!(instructions(&text, "ENTRYPOINT"), [["[\"qhx\"]"]]);
        assert_eq!(instructions(&text, "VOLUME"), [["/var/cache/qhx"]]);
    }

    #[test]
    fn the_image_has_the_programs_and_the_compiler_of_the_checkout() {
        let root = qhx_paths::workspace();
        let text = read(&root.join(DOCKERFILE)).unwrap();
        let channel = read(&root.join("rust-toolchain.toml")).unwrap();
        let channel = channel.split('"').nth(1).unwrap();
        assert!(text.contains(&format!("ARG RUST=docker.io/library/rust:{channel}-bookworm\n")));
        assert!(text.contains(&format!("ARG VERSION={VERSION}\n")), "{text}");
        assert!(text.contains(&format!("--features {} ", cargo::PROGRAM)), "{text}");
        for program in PROGRAMS {
            assert!(text.contains(&format!("/release/{program}\"")), "{program}");
        }
    }

    #[test]
    fn the_health_check_asks_the_port_that_is_served() {
        let script = "import health; import sys; print(health.port(sys.argv[1:]))";
        for (command, port) in [
            ("qhx serve /bundles/a", "8080"),
            ("/sbin/docker-init -- qhx serve a --port 9000 --host 0.0.0.0", "9000"),
            ("qhx serve --port=9001 a", "9001"),
            ("qhx generate a Hello", "None"),
        ] {
            let mut python = Command::new("python3");
            python.args(["-B", "-c", script]).args(command.split(' '));
            python.current_dir(qhx_paths::workspace().join("packaging/oci"));
            assert_eq!(cargo::output(&mut python).unwrap().trim(), port, "{command}");
        }
    }
}
