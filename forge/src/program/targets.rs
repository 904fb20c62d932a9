//! The targets of `--target`: what is asked for, and where the bundle of each goes.

use std::path::{Path, PathBuf};

use qhx::libraries::Libraries;
use qhx::prepared;
use qhx_base::{Error, ErrorKind, Result};
use qhx_qnn::{Platform, Target};

/// A target that is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TargetChoice {
    Of(Target),
    /// The chip of the machine that the command runs on.
    This,
}

/// The word for [`TargetChoice::This`].
pub(super) const THIS: &str = "this";

/// Reads one target of the command line.
pub(super) fn parse(name: &str) -> Result<TargetChoice, String> {
    if name.eq_ignore_ascii_case(THIS) {
        return Ok(TargetChoice::This);
    }
    let error = match name.parse() {
        Ok(target) => return Ok(TargetChoice::Of(target)),
        Err(error) => error,
    };
    let message: Error = error;
    let hint = message.hint_text().unwrap_or_default();
    Err(format!("{}, or {THIS}\n  hint: {hint}", message.message()))
}

impl TargetChoice {
    /// Default target.
    pub(super) const DEFAULT: Self = Self::Of(Target::V81);

    /// The target, where it is known without libraries.
    pub(super) const fn known(self) -> Option<Target> {
        match self {
            Self::Of(target) => Some(target),
            Self::This => None,
        }
    }

    /// The target, of [`TargetChoice::This`] by the libraries' own word.
    pub(super) fn target(self, libraries: &Libraries) -> Result<Target> {
        match self {
            Self::Of(target) => Ok(target),
            Self::This => this(libraries),
        }
    }

    /// The name that [`parse`] reads.
    pub(super) fn name(self) -> String {
        match self {
            Self::Of(target) => target.name().unwrap_or_else(|| target.to_string()),
            Self::This => THIS.to_owned(),
        }
    }
}

/// The chip of this machine.
fn this(libraries: &Libraries) -> Result<Target> {
    let unknown = |what: &str| {
        Error::new(ErrorKind::Usage, format!("--target {THIS}: {what}"))
            .hint("name the target, such as --target v81")
    };
    if Platform::is_emulated() {
        return Err(unknown(
            "the QNN libraries of this machine are an emulator, which has no chip of its own",
        ));
    }
    prepared::chip(libraries)?.ok_or_else(|| unknown("the library does not say which chip this is"))
}

/// One bundle that is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    /// Target that was asked for.
    pub choice: TargetChoice,
    /// Target that the bundle is compiled for.
    pub target: Target,
    /// The bundle's folder.
    pub out: PathBuf,
}

/// The bundles of several targets, each in a folder of its architecture's name, or the one bundle in `out` itself.
pub(super) fn places(
    choices: &[TargetChoice],
    out: &Path,
    libraries: &Libraries,
) -> Result<Vec<Place>> {
    let mut places: Vec<Place> = Vec::new();
    for &choice in choices {
        let target = choice.target(libraries)?;
        if let Some(other) = places.iter().find(|place| place.target.arch == target.arch) {
            return Err(Error::new(
                ErrorKind::Usage,
                format!(
                    "--target {} and {} are both {target}, and there is one folder for each architecture",
                    other.choice.name(),
                    choice.name()
                ),
            )
            .hint(
                "leave one of them out, as a bundle for the one with less memory runs on both, or give it another \
                 --out",
            ));
        }
        let out = if choices.len() > 1 { out.join(target.to_string()) } else { out.to_owned() };
        places.push(Place { choice, target, out });
    }
    Ok(places)
}

/// The error of one of several bundles, with what the others are and how to go on.
pub(super) fn unfinished(error: Error, places: &[Place], failed: usize, out: &Path) -> Error {
    let (whole, rest) = places.split_at(failed);
    let [place, ..] = rest else { return error };
    let names = |places: &[Place]| {
        places.iter().map(|place| place.choice.name()).collect::<Vec<_>>().join(",")
    };
    let out = if rest.len() > 1 { out } else { &place.out };
    let go_on = format!("--target {} --out {} goes on from there", names(rest), out.display());
    let whole = match whole {
        [] => "no bundle is finished".to_owned(),
        [_, ..] => format!("{} finished and whole", folders(whole)),
    };
    let hint = error.hint_text().map(|hint| hint.replace(crate::forge::GO_ON, ""));
    let hint =
        hint.as_deref().map(|hint| hint.trim_end_matches("; ")).filter(|hint| !hint.is_empty());
    let hint = hint.map_or_else(String::new, |hint| format!("{hint}; "));
    error.context(format_args!("target {}", place.target)).hint(format!("{hint}{whole}; {go_on}"))
}

/// Folders in words.
fn folders(places: &[Place]) -> String {
    let list: Vec<_> = places.iter().map(|place| place.out.display().to_string()).collect();
    format!("{} {}", list.join(", "), if list.len() > 1 { "are" } else { "is" })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choices(names: &[&str]) -> Vec<TargetChoice> {
        names.iter().map(|name| parse(name).unwrap()).collect()
    }

    fn nowhere() -> Libraries {
        Libraries::new("htp", "system")
    }

    #[test]
    fn several_targets_have_a_folder_each() {
        let out = |names: &[&str]| -> Vec<PathBuf> {
            let places = places(&choices(names), Path::new("m"), &nowhere()).unwrap();
            places.into_iter().map(|place| place.out).collect()
        };
        assert_eq!(out(&["x-elite"]), [Path::new("m")]);
        let expected = ["m/v73", "m/v79", "m/v81"].map(PathBuf::from);
        assert_eq!(out(&["x-elite", "8-elite", "v81"]), expected);
    }

    #[test]
    fn two_chips_of_one_architecture_need_two_commands() {
        let error = places(&choices(&["v81", "v73", "x-elite"]), Path::new("m"), &nowhere());
        let error = error.unwrap_err();
        assert!(error.message().starts_with("--target v73 and SC8380XP are both v73"), "{error}");
    }

    #[test]
    fn an_error_names_what_is_whole_and_what_goes_on() {
        let places = places(&choices(&["v73", "x2-elite", "v68"]), Path::new("m"), &nowhere());
        let places = places.unwrap();
        let error = || {
            let hint = format!("what is finished stays in x; {}", crate::forge::GO_ON);
            Error::new(ErrorKind::Io, "disk full").hint(hint)
        };
        let last = unfinished(error(), &places, 2, Path::new("m"));
        assert_eq!(last.message(), "target v68: disk full");
        assert_eq!(
            last.hint_text().unwrap(),
            "what is finished stays in x; m/v73, m/v81 are finished and whole; --target v68 --out m/v68 goes on from \
             there"
        );
        let second = unfinished(error(), &places, 1, Path::new("m"));
        let hint = second.hint_text().unwrap();
        assert!(
            hint.contains("m/v73 is finished and whole; --target SC8480XP,v68 --out m "),
            "{hint}"
        );
        let first = unfinished(Error::new(ErrorKind::Io, "x"), &places, 0, Path::new("m"));
        assert!(first.hint_text().unwrap().starts_with("no bundle is finished; "), "{first}");
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn an_emulator_has_no_chip_of_its_own() {
        let error = places(&choices(&["this"]), Path::new("m"), &nowhere()).unwrap_err();
        assert!(error.message().contains("emulator"), "{error}");
        assert!(error.hint_text().unwrap().contains("--target v81"), "{error}");
    }

    #[test]
    fn an_unknown_target_is_refused_with_a_hint() {
        let error = parse("v99").unwrap_err();
        assert!(
            error.contains("v68, v69, v73, v75, v79, v81, or this\n  hint: did you mean"),
            "{error}"
        );
    }
}
