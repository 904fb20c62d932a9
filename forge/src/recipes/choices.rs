//! Recipe options that are numbers.

use qhx_base::{Error, ErrorKind, Result};

use crate::recipe::RecipeOptions;

/// Numbers of a recipe option, ascending and without repetition; none where it is not set.
pub(super) fn numbers(
    options: &RecipeOptions,
    name: &str,
    legal: std::ops::RangeInclusive<usize>,
) -> Result<Option<Vec<usize>>> {
    let Some(text) = options.choice(name) else { return Ok(None) };
    let numbers = text.split(',').map(|n| n.trim().parse().ok().filter(|n| legal.contains(n)));
    let Some(mut numbers) = numbers.collect::<Option<Vec<usize>>>() else {
        return Err(Error::new(
            ErrorKind::Usage,
            format!(
                "recipe option {name}: {text:?}, expected numbers from {} to {} with commas between them",
                legal.start(),
                legal.end()
            ),
        ));
    };
    numbers.sort_unstable();
    numbers.dedup();
    Ok(Some(numbers))
}

/// The numbers of the recipe option `windows`, seconds of audio up to `most`; or `default`.
pub(super) fn windows(
    options: &RecipeOptions,
    most: usize,
    default: &[usize],
) -> Result<Vec<usize>> {
    Ok(numbers(options, "windows", 1..=most)?.unwrap_or_else(|| default.to_vec()))
}

/// The number of a recipe option; none where it is not set.
pub(super) fn number(
    options: &RecipeOptions,
    name: &str,
    legal: std::ops::RangeInclusive<usize>,
) -> Result<Option<usize>> {
    match numbers(options, name, legal)?.as_deref() {
        None => Ok(None),
        Some([number]) => Ok(Some(*number)),
        Some(several) => {
            let what = format!("recipe option {name}: {} numbers, expected one", several.len());
            Err(Error::new(ErrorKind::Usage, what))
        }
    }
}
