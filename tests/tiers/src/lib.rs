//! `#[tier(…)]`: what a test needs beyond Rust. Where it is not there, the test is ignored with a reason, which the
//! runner prints beside its name, as for any ignored test.
//!
//! ```text
//! #[tier(qnn)]
//! fn the_library_executes() {}
//!
//! #[tier(by_hand = "QHX_TEST_CHECKPOINT")]
//! fn a_checkpoint_of_the_environment() {}
//! ```
//!
//! The environment is looked at when the test is compiled, and cargo compiles the test again when it has changed.

use proc_macro::TokenStream;

/// A tier and the environment variables that say whether it runs.
struct Tier {
    name: &'static str,
    variable: &'static str,
    /// The variable has to be this, or else anything.
    value: Option<&'static str>,
    /// `QHX_REQUIRE_TIERS=1` asks for it.
    required: bool,
}

/// The tiers of `tests/README.md` that tests can name.
const TIERS: [Tier; 5] = [
    Tier { name: "qnn", variable: "QHX_QNN_HTP", value: None, required: true },
    Tier { name: "real", variable: "QHX_REAL", value: None, required: true },
    Tier { name: "cmake", variable: "QHX_CMAKE", value: Some("1"), required: true },
    Tier { name: "board", variable: "QHX_TEST_BOARD", value: None, required: false },
    Tier { name: "full", variable: "QHX_FULL", value: Some("1"), required: false },
];

/// `1`: a tier that cannot run is a failure.
const REQUIRE: &str = "QHX_REQUIRE_TIERS";
/// Names of tiers, with commas, that are to be left out though they could run.
const SKIP: &str = "QHX_SKIP_TIERS";

/// Makes a function a test that is ignored where a tier that it names cannot run.
///
/// `qnn`, `real`, `cmake`, `board` and `full` are tiers; `by_hand = "VARIABLE"` is for what a developer points at by
/// hand.
#[proc_macro_attribute]
pub fn tier(attribute: TokenStream, item: TokenStream) -> TokenStream {
    let code = expand(&attribute.to_string())
        .unwrap_or_else(|message| format!("::core::compile_error!({message:?});"));
    let mut tokens: TokenStream = code.parse().expect("what is written here is Rust");
    tokens.extend(item);
    tokens
}

/// Code that is put in front of the function.
fn expand(attribute: &str) -> Result<String, String> {
    let lookup = |variable: &str| std::env::var(variable).ok();
    let mut read = Environment { lookup: &lookup, variables: Vec::new() };
    let mut reasons = Vec::new();
    for needed in names(attribute)? {
        reasons.extend(read.reason(&needed));
    }
    let mut code = String::new();
    for variable in read.variables {
        // So that cargo knows what was read.
        code.push_str(&format!("const _: Option<&str> = ::core::option_env!({variable:?});"));
    }
    code.push_str("#[test]");
    if !reasons.is_empty() {
        code.push_str(&format!("#[ignore = {:?}]", reasons.join(", ")));
    }
    Ok(code)
}

/// A word of the attribute.
enum Needed {
    Tier(&'static Tier),
    ByHand(String),
}

/// The words between the parentheses.
fn names(attribute: &str) -> Result<Vec<Needed>, String> {
    let words = attribute.split(',').map(str::trim).filter(|word| !word.is_empty());
    let needed: Result<Vec<_>, String> = words
        .map(|word| {
            if let Some((key, variable)) = word.split_once('=')
                && key.trim() == "by_hand"
            {
                return Ok(Needed::ByHand(variable.trim().trim_matches('"').to_owned()));
            }
            let tier = TIERS.iter().find(|tier| tier.name == word);
            tier.map(Needed::Tier).ok_or_else(|| {
                let known: Vec<_> = TIERS.iter().map(|tier| tier.name).collect();
                format!(
                    "no tier {word:?}: there are {}, and by_hand = \"VARIABLE\"",
                    known.join(", ")
                )
            })
        })
        .collect();
    match needed {
        Ok(needed) if needed.is_empty() => Err("#[tier(…)] names no tier".to_owned()),
        other => other,
    }
}

/// The environment, and what was read of it.
struct Environment<'a> {
    lookup: &'a dyn Fn(&str) -> Option<String>,
    variables: Vec<String>,
}

impl Environment<'_> {
    fn get(&mut self, variable: &str) -> Option<String> {
        if !self.variables.iter().any(|known| known == variable) {
            self.variables.push(variable.to_owned());
        }
        (self.lookup)(variable).filter(|value| !value.is_empty())
    }

    /// Why the test is ignored, if it is.
    fn reason(&mut self, needed: &Needed) -> Option<String> {
        let tier = match needed {
            Needed::Tier(tier) => tier,
            Needed::ByHand(variable) => {
                let set = self.get(variable).is_some();
                return (!set).then(|| format!("by hand: {variable} is not set"));
            }
        };
        let (name, variable) = (tier.name, tier.variable);
        if self.get(SKIP).is_some_and(|skip| skip.split(',').any(|skipped| skipped == name)) {
            return Some(format!("{name} tier: left out with {SKIP}"));
        }
        let found = self.get(variable);
        let runs =
            found.is_some() && tier.value.is_none_or(|value| found.as_deref() == Some(value));
        if runs || tier.required && self.get(REQUIRE).as_deref() == Some("1") {
            return None;
        }
        let wanted = tier.value.map_or("not set".to_owned(), |value| format!("not {value}"));
        Some(format!("{name} tier: {variable} is {wanted}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Why a test is ignored in an environment, and what was read to know it.
    fn ignored(attribute: &str, set: &[(&str, &str)]) -> (String, Vec<String>) {
        let lookup = |variable: &str| {
            let found = set.iter().find(|(name, _)| *name == variable);
            found.map(|(_, value)| (*value).to_owned())
        };
        let mut environment = Environment { lookup: &lookup, variables: Vec::new() };
        let needed = names(attribute).expect(attribute);
        let reasons: Vec<_> = needed.iter().filter_map(|tier| environment.reason(tier)).collect();
        (reasons.join(", "), environment.variables)
    }

    #[test]
    fn a_tier_runs_where_its_variable_is_set_or_is_left_out_by_name() {
        let qnn = ("QHX_QNN_HTP", "libQnnHtp.so");
        for (attribute, set, expected) in [
            ("qnn", &[qnn][..], ""),
            ("qnn", &[], "qnn tier: QHX_QNN_HTP is not set"),
            ("qnn", &[("QHX_QNN_HTP", "")], "qnn tier: QHX_QNN_HTP is not set"),
            ("qnn", &[qnn, (SKIP, "board,qnn")], "qnn tier: left out with QHX_SKIP_TIERS"),
            ("qnn, full", &[qnn], "full tier: QHX_FULL is not 1"),
            ("qnn, full", &[qnn, ("QHX_FULL", "0")], "full tier: QHX_FULL is not 1"),
            ("qnn, full", &[qnn, ("QHX_FULL", "1")], ""),
            ("by_hand = \"DIR\"", &[], "by hand: DIR is not set"),
            ("by_hand = \"DIR\"", &[("DIR", "folder")], ""),
        ] {
            assert_eq!(ignored(attribute, set).0, expected, "{attribute} {set:?}");
        }
    }

    #[test]
    fn a_required_tier_runs_so_that_it_fails_unless_it_is_left_out() {
        let required = (REQUIRE, "1");
        assert_eq!(ignored("qnn", &[required]).0, "");
        assert_eq!(ignored("board", &[required]).0, "board tier: QHX_TEST_BOARD is not set");
        let (reason, read) = ignored("qnn", &[required, (SKIP, "qnn")]);
        assert_eq!(reason, "qnn tier: left out with QHX_SKIP_TIERS");
        assert_eq!(read, [SKIP], "what decides is what cargo is told");
        assert_eq!(ignored("qnn", &[]).1, [SKIP, "QHX_QNN_HTP", REQUIRE]);
    }

    #[test]
    fn an_unknown_tier_is_refused_with_those_that_there_are() {
        let error = names("npu").err().expect("no such tier");
        assert!(
            error.starts_with("no tier \"npu\": there are qnn, real, cmake, board, full, and"),
            "{error}"
        );
        assert!(names("").is_err());
    }
}
