//! Check that a file is a dynamic library for this machine, before the system loader is asked.
//!
//! Written here: four numbers at fixed places of a header are all that is read, of a file that may be anything.

use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::Path;

use qhx_base::{Error, ErrorKind, Result, files};

/// Bytes of an ELF file up to its machine, and of a PE file up to the place of its second header.
const HEAD: usize = 64;

/// A file format of dynamic libraries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    /// Linux, Android.
    Elf,
    /// Windows.
    Pe,
}

impl Format {
    const HERE: Self = if cfg!(windows) { Self::Pe } else { Self::Elf };

    const fn name(self) -> &'static str {
        match self {
            Self::Elf => "ELF",
            Self::Pe => "PE",
        }
    }

    /// The number that files of this format have for the machine that this program is for.
    const fn machine(self) -> u16 {
        match (self, cfg!(target_arch = "aarch64")) {
            (Self::Elf, true) => 183,
            (Self::Elf, false) => 62,
            (Self::Pe, true) => 0xaa64,
            (Self::Pe, false) => 0x8664,
        }
    }

    /// A machine in words.
    fn machine_name(self, machine: u16) -> String {
        let known = match (self, machine) {
            (Self::Elf, 62) | (Self::Pe, 0x8664) => "x86-64",
            (Self::Elf, 183) | (Self::Pe, 0xaa64) => "AArch64",
            (Self::Elf, 164) => "Hexagon, so it runs on the DSP (a skel library)",
            (Self::Elf, 40) | (Self::Pe, 0x1c0 | 0x1c4) => "32-bit ARM",
            (Self::Elf, 3) | (Self::Pe, 0x14c) => "32-bit x86",
            _ => return format!("machine {machine}"),
        };
        known.to_owned()
    }
}

/// Refuses what the system loader would refuse, in clearer words.
pub(crate) fn check(path: &Path) -> Result<()> {
    let fail = |e: std::io::Error| Error::io(ErrorKind::Runtime, path, e);
    let mut file = files::open(ErrorKind::Runtime, path)?;
    let mut head = Vec::with_capacity(HEAD);
    (&mut file).take(HEAD as u64).read_to_end(&mut head).map_err(fail)?;
    let mut found = elf(&head).map(|machine| (Format::Elf, machine));
    if let Some(place) = pe(&head) {
        let mut head = Vec::with_capacity(6);
        file.seek(SeekFrom::Start(place.into())).map_err(fail)?;
        file.take(6).read_to_end(&mut head).map_err(fail)?;
        found = head.strip_prefix(b"PE\0\0").and_then(u16_at::<0>).map(|m| (Format::Pe, m));
    }
    let here = Format::HERE;
    let Some((format, machine)) = found else {
        let what = format!("{}: not a shared library (no {} header)", path.display(), here.name());
        return Err(Error::new(ErrorKind::Runtime, what)
            .hint("the file may be a Git LFS pointer or an incomplete download"));
    };
    if (format, machine) == (here, here.machine()) {
        return Ok(());
    }
    let (found, wanted) = (format.machine_name(machine), here.machine_name(here.machine()));
    let system = match format {
        _ if format == here => "",
        Format::Elf => " under Linux or Android",
        Format::Pe => " under Windows",
    };
    Err(Error::new(
        ErrorKind::Runtime,
        format!(
            "{}: the library is for {found}{system}, this program needs {wanted}",
            path.display()
        ),
    )
    .hint("take the library from the folder of this platform in the QAIRT package"))
}

/// The machine of an ELF file.
fn elf(head: &[u8]) -> Option<u16> {
    head.starts_with(b"\x7fELF").then(|| u16_at::<18>(head))?
}

/// Offset of the header with the machine in a PE file.
fn pe(head: &[u8]) -> Option<u32> {
    let place = head.get(60..64)?.try_into().ok()?;
    head.starts_with(b"MZ").then(|| u32::from_le_bytes(place))
}

fn u16_at<const AT: usize>(bytes: &[u8]) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(AT..AT + 2)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(bytes: &[u8]) -> Result<()> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("library");
        std::fs::write(&path, bytes).unwrap();
        check(&path)
    }

    fn refused(bytes: &[u8]) -> String {
        let error = answer(bytes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Runtime);
        assert!(error.hint_text().is_some(), "{error}");
        error.message().to_owned()
    }

    fn elf(machine: u16) -> Vec<u8> {
        let mut bytes = vec![0; 64];
        bytes[..4].copy_from_slice(b"\x7fELF");
        bytes[18..20].copy_from_slice(&machine.to_le_bytes());
        bytes
    }

    fn pe(machine: u16) -> Vec<u8> {
        let mut bytes = vec![0; 64];
        bytes[..2].copy_from_slice(b"MZ");
        bytes[60] = 0x80;
        bytes.resize(0x80, 0);
        bytes.extend_from_slice(b"PE\0\0");
        bytes.extend_from_slice(&machine.to_le_bytes());
        bytes
    }

    #[test]
    fn a_library_of_this_machine_is_taken() {
        let here = Format::HERE.machine();
        answer(&if cfg!(windows) { pe(here) } else { elf(here) }).unwrap();
    }

    #[test]
    fn what_is_no_library_is_refused() {
        let mut cut = pe(0x8664);
        cut.truncate(0x82);
        for bytes in [&b""[..], b"version https://git-lfs.github.com/spec/v1\n", b"MZ", &cut] {
            let message = refused(bytes);
            assert!(message.contains("not a shared library (no "), "{message}");
        }
    }

    #[test]
    fn another_machine_or_system_is_named() {
        assert!(refused(&elf(164)).contains("for Hexagon"));
        assert!(refused(&elf(40)).contains("for 32-bit ARM"));
        assert!(refused(&pe(0x14c)).contains("for 32-bit x86"));
        let other = if cfg!(windows) { elf(183) } else { pe(0xaa64) };
        let message = refused(&other);
        let system = if cfg!(windows) { "under Linux or Android" } else { "under Windows" };
        assert!(message.contains(&format!("for AArch64 {system}, this")), "{message}");
    }
}
