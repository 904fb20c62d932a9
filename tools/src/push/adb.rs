//! The phone at the other end of `adb`.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use qhx::vars;
use qhx_base::{CancelToken, Error, ErrorKind, Result, error};
use qhx_qnn::Target;

use super::process::{self, Failure, Finished, Limits};

/// The program of Android's platform tools.
const ADB: &str = "adb";
/// Bytes of a short answer.
const SHORT: usize = 1 << 20;
/// Bytes of the hashes of all files.
const HASHES: usize = 16 << 20;
/// Bytes a second that the slowest phone reads and hashes, and the slowest connection carries.
const SLOWEST_HASH: u64 = 20 << 20;
const SLOWEST_COPY: u64 = 1 << 20;
/// Interval at which a phone that restarts is asked whether it is up.
const PAUSE: Duration = Duration::from_millis(500);
/// Code of a shell for a command that it does not find.
const NO_COMMAND: i32 = 127;

/// Times that a phone may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// Time for a short answer of adb.
    pub answer: Duration,
    /// Time for which a phone is waited for that disconnects or restarts.
    pub wait: Duration,
    /// Time for one step there.
    pub step: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        let [answer, wait, step] = [30, 180, 900].map(Duration::from_secs);
        Self { answer, wait, step }
    }
}

/// Reason why a command of adb has no result.
#[derive(Debug)]
pub(super) enum Fault {
    /// The phone is not connected any more.
    Gone(Error),
    /// Anything else.
    Other(Error),
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::Gone(error) | Fault::Other(error) => error,
        }
    }
}

/// One phone.
#[derive(Debug)]
pub(super) struct Device {
    adb: PathBuf,
    serial: String,
    patience: Patience,
    cancel: CancelToken,
}

impl Device {
    /// The phone called `serial`, or else the only one.
    pub(super) fn find(
        serial: Option<&str>,
        patience: Patience,
        cancel: &CancelToken,
    ) -> Result<Self> {
        let mut device =
            Self { adb: program()?, serial: String::new(), patience, cancel: cancel.clone() };
        let listed = device.short(Command::new(&device.adb).arg("devices"), "adb devices")?;
        if !listed.status.success() {
            return Err(failure("adb devices", &listed));
        }
        let text = String::from_utf8_lossy(&listed.stdout).into_owned();
        let devices: Vec<(&str, &str)> = text
            .lines()
            .filter_map(|line| line.trim_end_matches('\r').split_once('\t'))
            .map(|(serial, state)| (serial, state.trim()))
            .collect();
        device.serial = choose(&devices, serial)?.to_owned();
        Ok(device)
    }

    pub(super) fn serial(&self) -> &str {
        &self.serial
    }

    /// The chip of the phone, where Android says which one it is and it has a name here.
    pub(super) fn target(&self) -> Result<Option<Target>> {
        let named = |text: String| Target::named(text.trim());
        match self.shell("getprop ro.soc.model") {
            Ok(text) => Ok(named(text)),
            Err(Fault::Gone(error)) => Err(error),
            // Android before 12 has no such property, and a failing command is no reason to stop.
            Err(Fault::Other(error)) if error.kind() == ErrorKind::Cancelled => Err(error),
            Err(Fault::Other(_)) => Ok(None),
        }
    }

    fn adb(&self) -> Command {
        let mut command = Command::new(&self.adb);
        command.args(["-s", &self.serial]);
        command
    }

    /// Runs a short command.
    fn short(&self, command: &mut Command, attempt: &str) -> Result<Finished> {
        self.run(command, attempt, Limits { time: self.patience.answer, bytes: SHORT })
    }

    fn run(&self, command: &mut Command, attempt: &str, limits: Limits) -> Result<Finished> {
        process::run(command, limits, &self.cancel).map_err(|failure| match failure {
            Failure::System(e) => Error::caused(ErrorKind::Io, self.adb.display(), e),
            Failure::Time => error!(Io, "{attempt}: no answer in {} s", limits.time.as_secs_f64())
                .hint("connect the phone again, or restart adb: adb kill-server"),
            Failure::Bytes => error!(Io, "{attempt}: more than {} bytes of output", limits.bytes)
                .hint("is this phone what it should be? See what `adb shell` prints there"),
            Failure::Cancelled => {
                error!(Cancelled, "cancelled; files that are there are not copied again")
            }
        })
    }

    /// Runs a line of shell there, and returns its standard output.
    pub(super) fn shell(&self, line: &str) -> Result<String, Fault> {
        self.shell_within(line, Limits { time: self.patience.answer, bytes: SHORT })
    }

    fn shell_within(&self, line: &str, limits: Limits) -> Result<String, Fault> {
        let finished = self.start(line, limits)?;
        if !finished.status.success() {
            return Err(self.fault(line, &finished));
        }
        Ok(String::from_utf8_lossy(&finished.stdout).into_owned())
    }

    /// Runs a line of shell there, whatever its exit code.
    pub(super) fn start(&self, line: &str, limits: Limits) -> Result<Finished, Fault> {
        let attempt = line.split(['\n', ';']).next().unwrap_or_default();
        self.run(self.adb().args(["shell", line]), attempt, limits).map_err(|error| {
            // Someone who pulls the cable may leave adb hanging.
            if error.kind() == ErrorKind::Io && !self.is_there() {
                return Fault::Gone(error);
            }
            Fault::Other(error)
        })
    }

    /// The fault of a command that ended with an error.
    pub(super) fn fault(&self, attempt: &str, finished: &Finished) -> Fault {
        let error = failure(attempt, finished);
        if says_lost(finished) || !self.is_there() {
            return Fault::Gone(error);
        }
        Fault::Other(error)
    }

    /// True if adb says that the phone is connected and ready.
    fn is_there(&self) -> bool {
        let state = self.short(self.adb().arg("get-state"), "adb get-state");
        state.is_ok_and(|state| {
            state.status.success() && String::from_utf8_lossy(&state.stdout).trim() == "device"
        })
    }

    /// Waits until the phone is connected and Android is up.
    pub(super) fn wait(&self) -> Result<()> {
        let end = Instant::now() + self.patience.wait;
        let late = || {
            error!(
                Io,
                "device {} did not come back in {} s",
                self.serial,
                self.patience.wait.as_secs_f64()
            )
            .hint(
                "connect it again, unlock it, and call the command again; it goes on where it was",
            )
        };
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(late());
            }
            let limits = Limits { time: left, bytes: SHORT };
            match self.run(self.adb().arg("wait-for-device"), "adb wait-for-device", limits) {
                Err(error) if error.kind() == ErrorKind::Cancelled => return Err(error),
                Ok(finished) if finished.status.success() && self.is_up()? => return Ok(()),
                _ => {}
            }
            std::thread::sleep(PAUSE.min(end.saturating_duration_since(Instant::now())));
            self.cancel.check()?;
        }
    }

    /// True once Android has started.
    fn is_up(&self) -> Result<bool> {
        let line = "getprop sys.boot_completed";
        let finished = self.short(self.adb().args(["shell", line]), line);
        match finished {
            Ok(finished) if finished.status.success() => {
                Ok(String::from_utf8_lossy(&finished.stdout).trim() == "1")
            }
            Ok(finished) => Ok(finished.status.code() == Some(NO_COMMAND)),
            Err(error) if error.kind() == ErrorKind::Cancelled => Err(error),
            Err(_) => Ok(false),
        }
    }

    /// SHA-256 of each file in a folder and in its folders `below`, by its path in it. A folder that is not there has
    /// none. `bytes` is the size of what may be there.
    pub(super) fn hashes(
        &self,
        folder: &str,
        below: &[&str],
        bytes: u64,
    ) -> Result<HashMap<String, String>, Fault> {
        const HASH: &str = "-type f -exec sha256sum {} +";
        let folder = quoted(folder);
        let below: Vec<_> = below.iter().map(|folder| quoted(&format!("./{folder}"))).collect();
        let line = format!(
            "[ ! -d {folder} ] || {{ cd {folder} && find . -maxdepth 1 {HASH} && for i in {}; do [ ! -d \"$i\" ] || \
             find \"$i\" {HASH} || exit 1; done; }}",
            below.join(" ")
        );
        let time = self.patience.answer + Duration::from_secs(bytes / SLOWEST_HASH);
        let listed = self.shell_within(&line, Limits { time, bytes: HASHES })?;
        let entry = |line: &str| {
            let (hash, path) = line.trim_end_matches('\r').split_once("  ")?;
            Some((path.strip_prefix("./")?.to_owned(), hash.to_owned()))
        };
        Ok(listed.lines().filter_map(entry).collect())
    }

    /// Copies a file of this number of bytes there.
    pub(super) fn push(&self, from: &Path, to: &str, bytes: u64) -> Result<(), Fault> {
        let time = self.patience.answer + Duration::from_secs(bytes / SLOWEST_COPY);
        let attempt = format!("copying to {to}");
        let limits = Limits { time, bytes: SHORT };
        let finished = self.run(self.adb().arg("push").arg(from).arg(to), &attempt, limits);
        match finished {
            Ok(finished) if finished.status.success() => Ok(()),
            Ok(finished) => Err(self.fault(&attempt, &finished)),
            Err(error) if error.kind() == ErrorKind::Io && !self.is_there() => {
                Err(Fault::Gone(error))
            }
            Err(error) => Err(Fault::Other(error)),
        }
    }
}

/// True if adb failed and says that the phone is not there.
pub(super) fn says_lost(finished: &Finished) -> bool {
    let said = String::from_utf8_lossy(&finished.stderr);
    !finished.status.success() && said.lines().any(is_about_the_connection)
}

/// True for a message of adb itself about a phone that is not there.
fn is_about_the_connection(line: &str) -> bool {
    const SAYS: [&str; 7] = [
        "device offline",
        "device not found",
        "no devices/emulators found",
        "device still",
        "error: closed",
        "protocol fault",
        "connection reset",
    ];
    let line = line.trim().to_ascii_lowercase();
    let of_adb = ["error: ", "adb: "].iter().any(|start| line.starts_with(start));
    let named = line.contains("device '") && line.ends_with("' not found");
    of_adb && (named || SAYS.iter().any(|part| line.contains(part)))
}

/// The program, on the path or where Android's tools are installed.
fn program() -> Result<PathBuf> {
    let name = if cfg!(windows) { "adb.exe" } else { ADB };
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path);
    let sdks = [vars::ANDROID_HOME, vars::ANDROID_SDK_ROOT];
    let sdks = sdks.into_iter().filter_map(vars::get).map(PathBuf::from);
    // Where Android Studio puts them.
    let home = vars::get(if cfg!(windows) { "LOCALAPPDATA" } else { "HOME" }).map(PathBuf::from);
    let studio =
        ["Android/Sdk", "Library/Android/sdk"].map(|sdk| home.as_ref().map(|h| h.join(sdk)));
    let tools = sdks.chain(studio.into_iter().flatten()).map(|sdk| sdk.join("platform-tools"));
    let found = on_path.chain(tools).map(|folder| folder.join(name)).find(|file| file.is_file());
    found.ok_or_else(|| {
        error!(Usage, "adb is not on the path").hint(
            "install Android's platform tools (Debian, Ubuntu: apt-get install adb), or copy the files by other means: \
             docs/devices.md says which",
        )
    })
}

/// The serial number of the phone that is meant, of what `adb devices` lists with their states.
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
        (serial, "unauthorized" | "authorizing") => error(
            format!("device {serial} does not trust this computer yet"),
            "unlock it and allow USB debugging in the dialog that it shows",
        ),
        (serial, state) if state.starts_with("no permissions") => error(
            format!("device {serial}: this user may not use it: {state}"),
            "install udev rules for it (Debian, Ubuntu: apt-get install android-sdk-platform-tools-common), and \
             connect it again",
        ),
        (serial, state) => error(
            format!("device {serial} is {state}"),
            "connect it again, or restart adb: adb kill-server",
        ),
    }
}

/// Error with the message of a failed command, in one line.
fn failure(attempt: &str, finished: &Finished) -> Error {
    let said = [&finished.stderr[..], &finished.stdout[..]].map(String::from_utf8_lossy);
    let lines: Vec<_> = said.iter().flat_map(|text| text.lines()).map(str::trim).collect();
    let full = lines.iter().find(|line| is_full(line));
    let last = lines.iter().rev().find(|line| !line.is_empty());
    let line = full.or(last).copied().unwrap_or("it says nothing");
    Error::new(ErrorKind::Io, format!("{attempt}: {line}"))
}

/// True for a message about a device without space.
pub(super) fn is_full(message: &str) -> bool {
    message.contains("No space left")
}

/// A text as one word of a shell.
pub(super) fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_not_ready_is_one_error_with_a_fix() {
        for (state, part) in [
            ("unauthorized", "trust"),
            ("offline", "is offline"),
            ("no permissions (missing udev rules? user is in the plugdev group)", "may not use"),
        ] {
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

    #[test]
    fn only_messages_of_adb_say_that_a_phone_is_gone() {
        for line in [
            "error: device 'ab12' not found",
            "adb: error: failed to get feature set: device 'ab12' not found",
            "adb: error: device offline",
            "error: closed",
            "error: no devices/emulators found\r",
        ] {
            assert!(is_about_the_connection(line), "{line}");
        }
        for line in
            ["error: no model in 'x'", "sh: sha256sum: not found", "the device offline of a text"]
        {
            assert!(!is_about_the_connection(line), "{line}");
        }
    }
}
