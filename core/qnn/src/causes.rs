//! Why the device cannot be used, in words, where the number that the library returns does not say it.
//!
//! `logCreate` answers 4000 where there is no chip that the library knows, and `deviceCreate` 14001 for nearly all that
//! keeps the DSP away. What happened stands in the library's log only, often in its first line of many. The lines are
//! those of QAIRT 2.51. Where none of them is known, the error quotes the last ones.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use qhx_base::{Error, ErrorKind, Result};

use super::codes::{self, Code};
use super::library::{Library, why_not_loaded};
use super::log;

/// Environment variable with the folders where the DSP's loader looks for its libraries, parted by semicolons.
pub const SKEL_FOLDERS: &str = "ADSP_LIBRARY_PATH";

/// Files in which the kernel reports which chip this is. The library reads them in this order.
const SOC_FILES: [&str; 2] = ["/sys/devices/soc0/soc_id", "/sys/devices/system/soc/soc0/id"];

/// Status of a failing `remote_handle64_open` when there is no such library for the DSP.
const NO_SKEL: &str = "0x80000406";

/// A machine as the causes need to know it, so that tests can make one up.
struct Machine<'a> {
    /// Folder of libQnnHtp.
    folder: PathBuf,
    /// Value of [`SKEL_FOLDERS`].
    skel_folders: Option<String>,
    /// Content of [`SOC_FILES`].
    soc: Option<String>,
    /// Why a library cannot be loaded.
    why_not: &'a dyn Fn(&Path) -> Option<Error>,
}

/// Why the device cannot be used.
#[derive(Debug, PartialEq)]
struct Cause {
    /// A few words that stay the same: the name of this situation.
    name: &'static str,
    text: String,
    fix: String,
}

/// The error of a call that returned `status`. Its cause is taken from what `library` has logged since `mark`, and
/// from the files that the log names.
pub(crate) fn error(
    kind: ErrorKind,
    attempt: impl fmt::Display,
    status: u64,
    mark: u64,
    library: &Library,
) -> Error {
    let folder = library.path().parent().unwrap_or(Path::new("")).to_owned();
    let machine = Machine {
        folder,
        skel_folders: std::env::var(SKEL_FOLDERS).ok().filter(|value| !value.is_empty()),
        soc: SOC_FILES.iter().find_map(|file| fs::read_to_string(file).ok()),
        why_not: &why_not_loaded,
    };
    let code = Code::of(status);
    match find(&log::lines_since(mark), &machine) {
        Some(Cause { name, text, fix }) => {
            let number = format!("QNN {}, {}", code.name(), code.0);
            Error::new(kind, format!("{attempt}: {name}: {text} ({number})"))
                .with_code(u64::from(code.0))
                .hint(fix)
        }
        None => explain(codes::error(kind, attempt, status), mark),
    }
}

/// Same as [`codes::check`], with the library's own failure lines since `mark`.
pub(crate) fn check(
    kind: ErrorKind,
    attempt: impl fmt::Display,
    status: u64,
    mark: u64,
) -> Result<()> {
    codes::check(kind, attempt, status).map_err(|error| explain(error, mark))
}

/// Appends the library's own failure lines since `mark` to the message of `error`.
pub(crate) fn explain(error: Error, mark: u64) -> Error {
    let lines = log::failures_since(mark);
    if lines.is_empty() {
        return error;
    }
    let last: Vec<_> = lines.iter().rev().take(4).rev().map(String::as_str).collect();
    let message = format!("{}; the library says: {}", error.message(), last.join(" | "));
    error.with_message(message)
}

/// The cause that the first line names which is known.
fn find(lines: &[String], machine: &Machine<'_>) -> Option<Cause> {
    lines.iter().find_map(|line| cause(line, machine))
}

fn cause(line: &str, machine: &Machine<'_>) -> Option<Cause> {
    let cause = |name, text: String, fix: &str| Some(Cause { name, text, fix: fix.to_owned() });
    if line.contains("No Snapdragon SOC detected") {
        return Some(no_soc(machine));
    }
    if let Some((stub, _)) = after(line, "Failed in loading stub: ").and_then(|s| s.split_once(':'))
    {
        return Some(no_stub(stub, machine));
    }
    for (part, what) in [("Stub lib id mismatch", "stub"), ("Skel lib id mismatch", "skel")] {
        if line.contains(part) {
            return Some(mixed(line, what));
        }
    }
    if line.contains("unable to load unsigned PD") {
        return cause(
            "no unsigned process domain",
            "the DSP of this device takes signed libraries only".to_owned(),
            "use the vendor's own libraries, which are signed for it, or a device that allows unsigned ones",
        );
    }
    if line.contains(NO_SKEL) && (line.contains("openSession") || line.contains("qnn_open")) {
        return Some(no_skel(line, machine));
    }
    if line.contains("app lacks NPU usage permission") {
        return cause(
            "no permission",
            "the app may not use the NPU".to_owned(),
            "declare the permission in the app's manifest",
        );
    }
    if line.contains("executable name exceeds supported length") {
        return cause(
            "program name too long",
            "the DSP takes no program whose file name is this long".to_owned(),
            "rename the program",
        );
    }
    if let Some(rest) = after(line, "transport_config failed: rpc ") {
        return cause(
            "transport down",
            format!(
                "the DSP has loaded the skel, but does not answer it ({})",
                rest.split([',', ' ']).next().unwrap_or_default()
            ),
            "the DSP may be restarting: try again, and reboot the device if it persists",
        );
    }
    if let Some(rest) = after(line, "Can't read future blob. ") {
        return cause(
            "made by a newer QAIRT",
            rest.trim_end_matches('.').to_owned(),
            "use the libraries of that QAIRT or of a newer one, or forge the bundle with these",
        );
    }
    if line.contains("Failed to find available PD") {
        return cause(
            "no room on the NPU",
            format!("no process domain has room: {line}"),
            "close other programs that use the NPU, or keep fewer contexts loaded (--max-contexts)",
        );
    }
    None
}

fn no_soc(machine: &Machine<'_>) -> Cause {
    match machine.soc.as_deref().map(str::trim) {
        Some(soc) => Cause {
            name: "unknown SoC",
            text: format!("this chip has the id {soc}, and the library does not know it"),
            fix: "take the libraries of a newer QAIRT, which may know it".to_owned(),
        },
        None => Cause {
            name: "no SoC",
            text: format!("neither {} nor {} says which chip this is", SOC_FILES[0], SOC_FILES[1]),
            fix:
                "this machine has no Qualcomm chip, or the files are hidden from this program, as \
                  a container does"
                    .to_owned(),
        },
    }
}

/// The library reports the same where the stub is missing and where something is missing that the stub needs.
fn no_stub(stub: &str, machine: &Machine<'_>) -> Cause {
    let path = machine.folder.join(stub);
    if !path.is_file() {
        return Cause {
            name: "no stub",
            text: format!("{stub} is not in {}", machine.folder.display()),
            fix: format!("put the {stub} there that came with this libQnnHtp"),
        };
    }
    let why = (machine.why_not)(&path);
    let text = why.as_ref().map_or_else(|| path.display().to_string(), |e| e.message().to_owned());
    if text.contains("cdsprpc") {
        return Cause {
            name: "no libcdsprpc",
            text,
            fix:
                "it is the vendor's way to the DSP. Android: it lies in /vendor/lib64, and an app \
                  names it with uses-native-library. Linux: install the vendor's fastrpc package, \
                  and see that the loader finds libcdsprpc.so (LD_LIBRARY_PATH)"
                    .to_owned(),
        };
    }
    let fix = why.and_then(|e| e.hint_text().map(str::to_owned));
    Cause {
        name: "stub cannot be loaded",
        text,
        fix: fix.unwrap_or_else(|| format!("put the {stub} there that came with this libQnnHtp")),
    }
}

/// `… mismatch: … expected (A), detected (B)`.
fn mixed(line: &str, what: &str) -> Cause {
    let version = |word: &str| {
        let rest = after(line, word)?;
        rest.split(')').next()
    };
    let wanted = version("expected (").unwrap_or("another version");
    let found = version("detected (").unwrap_or("unknown");
    Cause {
        name: if what == "stub" { "stub of another version" } else { "skel of another version" },
        text: format!("the {what} is of {found}, libQnnHtp needs {wanted}"),
        fix: "take libQnnHtp, its stub and its skel from one QAIRT version".to_owned(),
    }
}

fn no_skel(line: &str, machine: &Machine<'_>) -> Cause {
    let skel = after(line, "file:///").and_then(|rest| rest.split('?').next());
    let skel = skel.unwrap_or("libQnnHtpV*Skel.so");
    let cause = |text: String, fix: String| Cause { name: "skel not found", text, fix };
    let Some(folders) = &machine.skel_folders else {
        return cause(
            format!("the DSP finds no {skel}, and {SKEL_FOLDERS} is not set"),
            format!("set {SKEL_FOLDERS} to the folder of {skel}"),
        );
    };
    let found = folders.split(';').map(|folder| Path::new(folder).join(skel)).find(|p| p.exists());
    match found {
        None => cause(
            format!("the DSP finds no {skel} in {SKEL_FOLDERS}={folders}"),
            format!("put {skel} there, or set {SKEL_FOLDERS} to its folder"),
        ),
        Some(path) if !is_for_the_dsp(&path) => cause(
            format!("{} is no library for the DSP", path.display()),
            "it may be a Git LFS pointer, an incomplete download or for another processor: copy it again from \
             hexagon-v*/unsigned of the QAIRT SDK"
                .to_owned(),
        ),
        Some(path) => cause(
            format!("the DSP does not take {} ({NO_SKEL})", path.display()),
            "it may not be readable for the DSP, or not be signed as this device wants it".to_owned(),
        ),
    }
}

/// True for an ELF file for Hexagon.
fn is_for_the_dsp(path: &Path) -> bool {
    const HEXAGON: [u8; 2] = 164_u16.to_le_bytes();
    let mut head = [0; 20];
    let read = fs::File::open(path).and_then(|mut f| std::io::Read::read_exact(&mut f, &mut head));
    read.is_ok() && head.starts_with(b"\x7fELF") && head.ends_with(&HEXAGON)
}

fn after<'a>(line: &'a str, part: &str) -> Option<&'a str> {
    line.split_once(part).map(|(_, rest)| rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(folder: &Path, skel_folders: Option<&str>, soc: Option<&str>) -> Machine<'static> {
        Machine {
            folder: folder.to_owned(),
            skel_folders: skel_folders.map(str::to_owned),
            soc: soc.map(str::to_owned),
            why_not: &|path| {
                let text =
                    format!("{}: cannot be loaded: libcdsprpc.so: cannot open", path.display());
                Some(Error::new(ErrorKind::Runtime, text))
            },
        }
    }

    fn reported(lines: &[&str], machine: &Machine<'_>) -> (&'static str, String) {
        let lines: Vec<_> = lines.iter().map(|&line| line.to_owned()).collect();
        let cause = find(&lines, machine).unwrap();
        assert!(!cause.fix.is_empty());
        (cause.name, cause.text)
    }

    /// Line that follows every cause.
    const AFTER: &str = "<E> Failed to parse platform config: 14001";

    #[test]
    fn a_missing_stub_is_not_a_missing_way_to_the_dsp() {
        let dir = tempfile::tempdir().unwrap();
        let machine = machine(dir.path(), None, None);
        let line = "<W> Failed in loading stub: libQnnHtpV81Stub.so: cannot open shared object file: No such file";
        let (name, text) = reported(&[line, AFTER], &machine);
        assert_eq!(name, "no stub");
        assert_eq!(text, format!("libQnnHtpV81Stub.so is not in {}", dir.path().display()));
        fs::write(dir.path().join("libQnnHtpV81Stub.so"), b"stub").unwrap();
        let (name, text) = reported(&[line, AFTER], &machine);
        assert_eq!(name, "no libcdsprpc");
        assert!(text.contains("libcdsprpc.so"), "{text}");
    }

    #[test]
    fn an_unknown_chip_is_reported_with_its_id() {
        let lines = ["<E> No Snapdragon SOC detected", "<E> Failed to init router"];
        assert_eq!(reported(&lines, &machine(Path::new(""), None, None)).0, "no SoC");
        let (name, text) = reported(&lines, &machine(Path::new(""), None, Some("9999\n")));
        assert_eq!((name, text.contains("id 9999,")), ("unknown SoC", true), "{text}");
    }

    #[test]
    fn a_skel_that_the_dsp_does_not_open_is_looked_at() {
        let dir = tempfile::tempdir().unwrap();
        let line = "<E> openSessionForPriority failed: devType=0 status=0x80000406 \
                    uri=file:///libQnnHtpV79Skel.so?qnn_2_51_0_skel_handle_invoke&_dom=cdsp";
        let folders = format!("/nowhere;{}", dir.path().display());
        let place = Path::new("");
        let text = |folders| {
            let (name, text) = reported(&[line, AFTER], &machine(place, folders, None));
            assert_eq!(name, "skel not found");
            assert!(text.contains("libQnnHtpV79Skel.so"), "{text}");
            text
        };
        assert!(text(None).ends_with("is not set"));
        assert!(text(Some(&folders)).contains("in ADSP_LIBRARY_PATH=/nowhere;"));
        let skel = dir.path().join("libQnnHtpV79Skel.so");
        fs::write(&skel, "version https://git-lfs.github.com/spec/v1\n").unwrap();
        assert!(text(Some(&folders)).ends_with("is no library for the DSP"));
        let mut elf = vec![0; 64];
        elf[..4].copy_from_slice(b"\x7fELF");
        elf[18] = 164;
        fs::write(&skel, elf).unwrap();
        assert!(text(Some(&folders)).contains("does not take"));
    }

    #[test]
    fn a_context_of_a_newer_release_names_both_versions() {
        let line = "<E> Can't read future blob. Newest blob version supported: 4.0.x. Current blob version: 5.1.x.";
        let (name, text) = reported(&[line], &machine(Path::new(""), None, None));
        assert_eq!(name, "made by a newer QAIRT");
        assert!(text.contains("4.0.x") && text.ends_with("5.1.x"), "{text}");
    }

    #[test]
    fn a_line_that_is_not_known_is_no_cause() {
        let machine = machine(Path::new(""), None, None);
        assert_eq!(find(&[AFTER.to_owned()], &machine), None);
    }
}
