//! The chips that graphs are compiled for, by the names that people use.

use std::fmt;
use std::str::FromStr;

use qhx_base::{Error, ErrorKind};
use serde::{Deserialize, Serialize};

/// The chip that graphs are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Target {
    /// Hexagon architecture: 75 for v75.
    pub arch: u32,
    /// The library's number of the chip.
    pub soc: u32,
    /// Tightly coupled memory (VTCM) of the chip in MB, where it is known.
    pub vtcm_mb: Option<u32>,
}

/// A chip that has a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Soc {
    /// Qualcomm's name: `SM8550`.
    pub name: &'static str,
    /// Target to compile for.
    pub target: Target,
    /// Other names that people use: `8-gen-2`.
    pub aliases: &'static [&'static str],
}

const fn soc(
    name: &'static str,
    (arch, soc, vtcm_mb): (u32, u32, Option<u32>),
    aliases: &'static [&'static str],
) -> Soc {
    Soc { name, target: Target { arch, soc, vtcm_mb }, aliases }
}

/// The chips that have a name, with numbers as the library and ExecuTorch have them.
pub const SOCS: [Soc; 26] = [
    soc("SM8350", (68, 30, Some(4)), &["888"]),
    soc("SM7325", (68, 35, None), &["778g"]),
    soc("QCM6490", (68, 93, None), &["qcs6490", "rb3-gen-2"]),
    soc("SC8280X", (68, 37, None), &["sc8280xp", "8cx-gen-3"]),
    soc("SA8295", (68, 39, Some(8)), &["sa8295p"]),
    soc("SM8450", (69, 36, Some(8)), &["8-gen-1"]),
    soc("SM8475", (69, 42, Some(8)), &["8-plus-gen-1"]),
    soc("SXR2230P", (69, 53, Some(8)), &["xr2-gen-2"]),
    soc("SM8550", (73, 43, Some(8)), &["8-gen-2"]),
    soc("SC8380XP", (73, 60, Some(8)), &["x-elite", "x-plus"]),
    soc("SM8635", (73, 68, Some(4)), &["8s-gen-3"]),
    soc("SM7675", (73, 70, None), &["7-plus-gen-3"]),
    soc("QCS8550", (73, 66, None), &[]),
    soc("QCS9100", (73, 77, Some(8)), &["iq-9075"]),
    soc("SA8255", (73, 52, Some(8)), &["sa8255p"]),
    soc("SSG2115P", (73, 46, Some(2)), &[]),
    soc("SSG2125P", (73, 58, Some(2)), &[]),
    soc("SXR1230P", (73, 45, Some(2)), &[]),
    soc("SM8650", (75, 57, Some(8)), &["8-gen-3"]),
    soc("SM8750", (79, 69, Some(8)), &["8-elite"]),
    soc("SXR2330P", (79, 75, Some(8)), &[]),
    soc("SM8850", (81, 87, Some(8)), &["8-elite-gen-5"]),
    soc("SM8845", (81, 97, None), &["8-gen-5"]),
    soc("SC8480XP", (81, 88, None), &["x2-elite"]),
    soc("SAR2230P", (81, 95, Some(4)), &[]),
    soc("SW6100", (81, 96, Some(4)), &[]),
];

impl Target {
    /// SM7325 and QCM6490.
    pub const V68: Self = Self { arch: 68, soc: 35, vtcm_mb: None };
    /// Snapdragon 8 Gen 1.
    pub const V69: Self = Self { arch: 69, soc: 36, vtcm_mb: Some(8) };
    /// Snapdragon 8 Gen 2.
    pub const V73: Self = Self { arch: 73, soc: 43, vtcm_mb: Some(8) };
    /// Snapdragon 8 Gen 3.
    pub const V75: Self = Self { arch: 75, soc: 57, vtcm_mb: Some(8) };
    /// Snapdragon 8 Elite.
    pub const V79: Self = Self { arch: 79, soc: 69, vtcm_mb: Some(8) };
    /// Snapdragon 8 Elite Gen 5.
    pub const V81: Self = Self { arch: 81, soc: 87, vtcm_mb: Some(8) };
    /// An architecture each, with the chip that stands for it.
    pub const ALL: [Self; 6] = [Self::V68, Self::V69, Self::V73, Self::V75, Self::V79, Self::V81];

    /// The target of an architecture (`v73`, `73`), of a chip (`SC8380XP`) or of another name of one (`x-elite`).
    /// Upper and lower case, blanks and dashes make no difference, nor does `Snapdragon` in front.
    pub fn named(name: &str) -> Option<Self> {
        let wanted = plain(name);
        let arch = wanted.strip_prefix('v').unwrap_or(&wanted).parse().ok();
        let of_arch = || Self::ALL.into_iter().find(|target| Some(target.arch) == arch);
        let soc = SOCS.iter().find(|soc| soc.names().any(|name| plain(name) == wanted));
        soc.map(|soc| soc.target).or_else(of_arch)
    }

    /// True if it loads contexts whose graphs hold weights together.
    pub const fn shares_weights(&self) -> bool {
        self.arch >= 73
    }

    /// The target of the library's number of a chip.
    pub fn of_soc(number: u32) -> Option<Self> {
        SOCS.iter().map(|soc| soc.target).find(|target| target.soc == number)
    }

    /// A name by which [`Target::named`] finds it: of the architecture where it is the chip that stands for it, or else
    /// of the chip.
    pub fn name(&self) -> Option<String> {
        if Self::ALL.contains(self) {
            return Some(self.to_string());
        }
        SOCS.iter().find(|soc| soc.target == *self).map(|soc| soc.name.to_owned())
    }
}

impl Soc {
    /// All its names.
    fn names(&self) -> impl Iterator<Item = &'static str> {
        std::iter::once(self.name).chain(self.aliases.iter().copied())
    }
}

impl fmt::Display for Soc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.aliases {
            [] => f.write_str(self.name),
            aliases => write!(f, "{} ({})", self.name, aliases.join(", ")),
        }
    }
}

/// The letters and digits of a name, as one compares them.
fn plain(name: &str) -> String {
    let name = name.to_ascii_lowercase().replace('+', "plus");
    let name: String = name.chars().filter(char::is_ascii_alphanumeric).collect();
    name.strip_prefix("snapdragon").map_or_else(|| name.clone(), str::to_owned)
}

/// The architectures in words.
fn architectures() -> String {
    Target::ALL.map(|target| target.to_string()).join(", ")
}

/// The longest name that others are compared with.
const LONGEST: usize = 32;

/// The name that a slip of the hand makes `name` of.
fn nearest(name: &str) -> Option<String> {
    let wanted = plain(name);
    if wanted.len() > LONGEST {
        return None;
    }
    let archs = Target::ALL.map(|target| target.to_string());
    let socs = SOCS.iter().flat_map(Soc::names).map(str::to_owned);
    archs
        .into_iter()
        .chain(socs)
        .map(|other| (strsim::damerau_levenshtein(&wanted, &plain(&other)), other))
        .filter(|(distance, other)| *distance <= (wanted.len().max(other.len()) / 3).clamp(1, 3))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, other)| other)
}

impl FromStr for Target {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        Self::named(name).ok_or_else(|| {
            let message = format!("{name:?} is no target: expected {}", architectures());
            let chips = SOCS.map(|soc| soc.to_string()).join(", ");
            let hint = match nearest(name) {
                Some(near) => format!("did you mean {near:?}? Or a chip: {chips}"),
                None => format!("or a chip: {chips}"),
            };
            Error::new(ErrorKind::Usage, message).hint(hint)
        })
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "v{}", self.arch)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn architectures_chips_and_other_names_are_targets() {
        for (name, arch, soc, vtcm_mb) in [
            ("v68", 68, 35, None),
            ("V69", 69, 36, Some(8)),
            ("73", 73, 43, Some(8)),
            ("v75", 75, 57, Some(8)),
            ("v79", 79, 69, Some(8)),
            ("v81", 81, 87, Some(8)),
            ("SC8380XP", 73, 60, Some(8)),
            ("sc8380xp", 73, 60, Some(8)),
            ("x-elite", 73, 60, Some(8)),
            ("X Plus", 73, 60, Some(8)),
            ("8-gen-2", 73, 43, Some(8)),
            ("Snapdragon 8+ Gen 1", 69, 42, Some(8)),
            ("rb3-gen-2", 68, 93, None),
            ("8-elite", 79, 69, Some(8)),
            ("8-elite-gen-5", 81, 87, Some(8)),
            ("888", 68, 30, Some(4)),
            ("8s-gen-3", 73, 68, Some(4)),
            ("SSG2115P", 73, 46, Some(2)),
        ] {
            assert_eq!(Target::named(name), Some(Target { arch, soc, vtcm_mb }), "{name}");
        }
        for name in ["", "v", "v80", "81.0", "sm", "snapdragon", "v 81 v"] {
            assert_eq!(Target::named(name), None, "{name}");
        }
    }

    #[test]
    fn no_two_chips_have_a_name_or_number_in_common() {
        let names: Vec<_> = SOCS.iter().flat_map(Soc::names).map(plain).collect();
        assert_eq!(names.iter().collect::<HashSet<_>>().len(), names.len());
        let numbers: HashSet<_> = SOCS.iter().map(|soc| soc.target.soc).collect();
        assert_eq!(numbers.len(), SOCS.len());
        for target in Target::ALL {
            assert_eq!(Target::of_soc(target.soc), Some(target), "{target}");
        }
        for target in SOCS.map(|soc| soc.target).into_iter().chain(Target::ALL) {
            assert_eq!(target.name().and_then(|name| Target::named(&name)), Some(target));
        }
    }

    #[test]
    fn an_unknown_target_lists_what_there_is_and_what_is_near() {
        let error = "x-elit".parse::<Target>().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
        assert_eq!(
            error.message(),
            "\"x-elit\" is no target: expected v68, v69, v73, v75, v79, v81"
        );
        let hint = error.hint_text().unwrap();
        assert!(hint.starts_with("did you mean \"x-elite\"? Or a chip: SM8350 (888), "), "{hint}");
        let near = |name: &str| name.parse::<Target>().unwrap_err().hint_text().unwrap().to_owned();
        assert!(near("sm8551").starts_with("did you mean \"SM8550\"?"));
        assert!(near("v74").starts_with("did you mean \"v7"));
        assert!(near("a-quite-different-thing").starts_with("or a chip: "));
        assert!(near(&"x".repeat(1 << 20)).starts_with("or a chip: "));
    }
}
