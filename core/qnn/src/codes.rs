//! Names, meanings and fixes of the numbers that the QNN libraries return.

use std::fmt;

use qhx_base::{Error, ErrorKind, Result};

use qhx_qnn_sys as sys;

/// The code in the low 16 bits of a status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Code(pub u16);

/// A code a line, `CODE | NAME | meaning | fix`, and `5xxx | NAME` for those from 5000 on that have no line.
const TABLE: &str = include_str!("codes.txt");

/// Memory could not be had.
pub const MEM_ALLOC: u64 = sys::STATUS_MEM_ALLOC as u64;

/// The connection to the DSP broke, and can be opened again.
const RESTARTED: u16 = 1007;
/// The connection to the DSP broke, as the library sees it for good.
const RESTARTED_FATAL: u16 = 1011;

/// True for the codes of a DSP that restarted: every context is gone and has to be opened again.
pub fn means_restart(code: u64) -> bool {
    [RESTARTED, RESTARTED_FATAL].map(u64::from).contains(&code)
}

/// For codes that say little.
const LOOK: &str = "run it again with --log warn,qnn=debug and read what the library itself says";

impl Code {
    /// Success.
    pub const OK: Self = Self(0);

    /// The code of a status.
    pub const fn of(status: u64) -> Self {
        Self((status & 0xffff) as u16)
    }

    /// Name, meaning and fix of a line of the table, as far as it has them.
    fn entry(key: &str) -> Option<impl Iterator<Item = &'static str>> {
        let mut lines = TABLE.lines().map(|line| line.split(" | "));
        lines.find_map(|mut fields| fields.next().filter(|found| *found == key).map(|_| fields))
    }

    fn field(self, index: usize) -> Option<&'static str> {
        Self::entry(&self.0.to_string()).and_then(|mut fields| fields.nth(index))
    }

    /// qhx's name of the code, or that of its range.
    pub fn name(self) -> &'static str {
        let range = || Self::entry(&format!("{}xxx", self.0 / 1000))?.next();
        self.field(0).or_else(range).unwrap_or("UNKNOWN")
    }

    /// Meaning of the code, in words.
    pub fn meaning(self) -> Option<&'static str> {
        self.field(1)
    }

    /// A likely fix, when there is one.
    pub fn fix(self) -> Option<&'static str> {
        self.field(2)
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QNN {} ({})", self.name(), self.0)?;
        if let Some(meaning) = self.meaning() {
            write!(f, ": {meaning}")?;
        }
        Ok(())
    }
}

/// The error of a call that returned `status`: what was attempted, the code explained, and
/// the code's fix, or else where to look, as the hint.
pub fn error(kind: ErrorKind, attempt: impl fmt::Display, status: u64) -> Error {
    let code = Code::of(status);
    let kind = if means_restart(code.0.into()) { ErrorKind::DeviceLost } else { kind };
    let error = Error::new(kind, format!("{attempt}: {code}")).with_code(u64::from(code.0));
    error.hint(code.fix().unwrap_or(LOOK))
}

/// Checks the status that a call returned: any but 0 is an [`error`].
pub(crate) fn check(kind: ErrorKind, attempt: impl fmt::Display, status: u64) -> Result<()> {
    if status == 0 { Ok(()) } else { Err(error(kind, attempt, status)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_is_a_code_or_a_range() {
        let keys: Vec<_> = TABLE.lines().filter_map(|line| line.split(" | ").next()).collect();
        let codes: Vec<u16> = keys.iter().filter_map(|key| key.parse().ok()).collect();
        assert!(codes.is_sorted_by(|a, b| a < b), "{codes:?}");
        assert!(codes.len() > 90, "{}", codes.len());
        let ranges = keys.iter().filter_map(|key| key.strip_suffix("xxx")?.parse::<u16>().ok());
        assert_eq!(codes.len() + ranges.count(), keys.len());
        for code in codes.into_iter().skip(1) {
            assert!(Code(code).meaning().is_some_and(|meaning| !meaning.is_empty()), "{code}");
        }
    }

    #[test]
    fn the_code_is_the_low_16_bits() {
        let error = error(ErrorKind::Context, "loading a.bin", 0xdead_0000_138d);
        assert_eq!(error.code(), Some(5005));
        assert!(
            error.message().starts_with("loading a.bin: QNN CONTEXT_CREATE_FROM_BINARY (5005)")
        );
        assert!(error.hint_text().is_some_and(|h| h.contains("architecture")));
    }

    #[test]
    fn an_unknown_code_still_names_its_range() {
        assert_eq!(Code(5999).to_string(), "QNN CONTEXT (5999)");
        assert_eq!(Code(29999).to_string(), "QNN UNKNOWN (29999)");
        assert_eq!(Code::OK.to_string(), "QNN OK (0)");
        assert_eq!(Code(1).to_string(), "QNN COMMON (1)");
    }
}
