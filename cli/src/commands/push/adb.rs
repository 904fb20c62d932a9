//! The device at the other end of `adb`.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use qhx_base::{Error, ErrorKind, Result};
use qhx_qnn::Target;

/// The program of Android's platform tools.
const ADB: &str = "adb";

/// One device.
#[derive(Debug)]
pub(super) struct Device {
    serial: String,
}

impl Device {
    /// The device called `serial`, or else the only one.
    pub(super) fn find(serial: Option<&str>) -> Result<Self> {
        let listed = run(Command::new(ADB).arg("devices"))?;
        if !listed.status.success() {
            return Err(failure("adb devices", &listed));
        }
        let text = String::from_utf8_lossy(&listed.stdout).into_owned();
        let devices: Vec<(&str, &str)> =
            text.lines().skip(1).filter_map(|line| line.split_once('\t')).collect();
        let serial = choose(&devices, serial)?;
        Ok(Self { serial: serial.to_owned() })
    }

    /// The chip of the phone, where Android says which one it is and it has a name here.
    pub(super) fn target(&self) -> Option<Target> {
        Target::named(self.shell("getprop ro.soc.model").ok()?.trim())
    }

    pub(super) fn serial(&self) -> &str {
        &self.serial
    }

    fn adb(&self) -> Command {
        let mut command = Command::new(ADB);
        command.args(["-s", &self.serial]);
        command
    }

    /// Runs a line of shell there and returns its standard output.
    pub(super) fn shell(&self, line: &str) -> Result<String> {
        let output = run(self.adb().args(["shell", line]))?;
        if !output.status.success() {
            return Err(failure(line, &output));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// The command that runs a line of shell there.
    pub(super) fn shell_command(&self, line: &str) -> Command {
        let mut command = self.adb();
        command.args(["shell", line]);
        command
    }

    /// SHA-256 of each file below a folder, by its path in it. A folder that is not there has none.
    pub(super) fn hashes(&self, folder: &str) -> Result<HashMap<String, String>> {
        let folder = quoted(folder);
        let line = format!(
            "[ ! -d {folder} ] || {{ cd {folder} && find . -type f -exec sha256sum {{}} +; }}"
        );
        let listed = self.shell(&line)?;
        let entry = |line: &str| {
            let (hash, path) = line.trim_end_matches('\r').split_once("  ")?;
            Some((path.strip_prefix("./")?.to_owned(), hash.to_owned()))
        };
        Ok(listed.lines().filter_map(entry).collect())
    }

    /// Copies a file there.
    pub(super) fn push(&self, from: &Path, to: &str) -> Result<()> {
        let output = run(self.adb().arg("push").arg(from).arg(to))?;
        if output.status.success() {
            return Ok(());
        }
        Err(failure(&format!("copying {} to {to}", from.display()), &output))
    }
}

/// The serial number of the device that is meant, of what `adb devices` lists with their states.
fn choose<'a>(devices: &[(&'a str, &str)], wanted: Option<&str>) -> Result<&'a str> {
    let error = |message: String, hint: &str| Err(Error::new(ErrorKind::Usage, message).hint(hint));
    let names = || devices.iter().map(|(serial, _)| *serial).collect::<Vec<_>>().join(", ");
    let found = match (wanted, devices) {
        (_, []) => {
            return error(
                "adb sees no device".to_owned(),
                "connect one by USB with USB debugging enabled, or by `adb connect HOST`, and see that `adb devices` \
                 lists it",
            );
        }
        (None, [one]) => *one,
        (None, _) => {
            return error(
                format!("adb sees {} devices: {}", devices.len(), names()),
                "say which one is meant: --serial SERIAL",
            );
        }
        (Some(wanted), _) => match devices.iter().find(|(serial, _)| *serial == wanted) {
            Some(one) => *one,
            None => {
                return error(
                    format!("adb sees no device {wanted:?}, but {}", names()),
                    "give one of these with --serial",
                );
            }
        },
    };
    match found {
        (serial, "device") => Ok(serial),
        (serial, "unauthorized") => error(
            format!("device {serial} does not trust this computer yet"),
            "unlock it and allow USB debugging in the dialog that it shows",
        ),
        (serial, state) => error(
            format!("device {serial} is {state}"),
            "connect it again, or restart adb: adb kill-server",
        ),
    }
}

fn run(command: &mut Command) -> Result<Output> {
    command.stdin(Stdio::null()).output().map_err(|e| {
        let missing = e.kind() == std::io::ErrorKind::NotFound;
        let error = Error::caused(ErrorKind::Usage, ADB, e);
        if missing {
            error.with_message("adb is not on the path").hint(
                "install Android's platform tools (Debian, Ubuntu: apt-get install adb), or copy the files by other \
                 means: docs/devices.md says which",
            )
        } else {
            error
        }
    })
}

/// Error with the message of a failed command, in one line.
fn failure(attempt: &str, output: &Output) -> Error {
    let said = [&output.stderr[..], &output.stdout[..]].map(String::from_utf8_lossy);
    let lines: Vec<_> = said.iter().flat_map(|text| text.lines()).map(str::trim).collect();
    let full = lines.iter().find(|line| line.contains("No space left"));
    let last = lines.iter().rev().find(|line| !line.is_empty());
    let line = full.or(last).copied().unwrap_or("it says nothing");
    let error = Error::new(ErrorKind::Io, format!("{attempt}: {line}"));
    if full.is_some() {
        return error.hint("make room on the device, or give another folder with --to (`adb shell df` shows free space)");
    }
    error
}

/// A text as one word of a shell.
pub(super) fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// A file of this machine and its place on the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Item {
    /// Here.
    pub from: PathBuf,
    /// There, below the folder of all; parts are parted by `/`.
    pub to: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_not_ready_is_told_with_what_to_do() {
        for (state, part) in [("unauthorized", "trust"), ("offline", "is offline")] {
            let error = choose(&[("ab12", state)], None).unwrap_err();
            assert!(error.message().contains("ab12") && error.message().contains(part), "{error}");
            assert!(error.hint_text().is_some());
        }
        assert_eq!(choose(&[("a", "offline"), ("b", "device")], Some("b")).unwrap(), "b");
    }

    #[test]
    fn words_of_a_shell_are_quoted() {
        assert_eq!(quoted("it's $HOME"), r"'it'\''s $HOME'");
    }
}
