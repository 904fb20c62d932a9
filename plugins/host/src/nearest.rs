//! Names that a misspelt one may have meant.

/// Names shown in a message.
const SHOWN: usize = 8;

/// The name nearest to `name`, when it is one that a slip of the hand makes of it: at most a third of
/// its characters left out, added, changed or exchanged with the next.
pub fn nearest<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    // Comparing takes time in the product of the lengths.
    const LONGEST: usize = 256;
    if name.len() > LONGEST {
        return None;
    }
    names
        .filter(|other| other.len() <= LONGEST)
        .map(|other| (strsim::damerau_levenshtein(name, other), other))
        .filter(|(distance, other)| *distance <= (name.len().max(other.len()) / 3).min(3))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, other)| other)
}

/// Some names for a message.
pub(crate) fn quoted(names: &[&str]) -> String {
    let mut shown: Vec<_> = names.iter().take(SHOWN).map(|name| format!("{name:?}")).collect();
    if names.len() > SHOWN {
        shown.push(format!("… ({} in all)", names.len()));
    }
    shown.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slips_are_found_and_other_words_are_not() {
        let names = ["decode", "prefill", "lmhead", "logits", "x"];
        let find = |name| nearest(name, names.into_iter());
        assert_eq!(find("decod"), Some("decode"));
        assert_eq!(find("lgits"), Some("logits"));
        assert_eq!(find("lmhaed"), Some("lmhead"));
        assert_eq!(find("note"), None);
        assert_eq!(find(&"x".repeat(1000)), None);
    }
}
