//! Weights in a higher precision than the rest: sensitive layers.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::Arc;

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::covers;
use qhx_graph::graph::Graph;
use qhx_graph::quantize::Bits;
use qhx_graph::weight::{Storage, Weight};

use crate::recipe::{Precision, Recipe, RecipeOptions};

/// Ends of the names of weights that [`mix`] stores wider.
const VALUES: &str = ".v_proj.weight";
const DOWN: &str = ".mlp.down_proj.weight";

/// The precision of the weights that `part` names, see [`Override::covers`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Override {
    /// `layers.3`, `down_proj` or `layers.3.mlp.down_proj`. Empty for all.
    pub part: String,
    /// No lower than that of the bundle.
    pub precision: Precision,
}

impl Override {
    /// True for a tensor whose name has the words of `part`, one after the other: `layers.3` covers
    /// `model.layers.3.mlp.up_proj.weight`, and not `model.layers.31.mlp.up_proj.weight`.
    pub fn covers(&self, tensor: &str) -> bool {
        self.part.is_empty() || covers(&self.part, tensor)
    }
}

impl std::fmt::Display for Override {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}={}", self.part, self.precision.name())
    }
}

impl FromStr for Override {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let Some((part, precision)) = text.split_once('=').filter(|(part, _)| !part.is_empty())
        else {
            return Err(Error::new(
                ErrorKind::Usage,
                format!("{text:?}, expected PART=PRECISION, such as layers.3=w8a16"),
            ));
        };
        Ok(Self { part: part.to_owned(), precision: precision.parse()? })
    }
}

/// The recipe of `make`, with weights stored as the recipe of another precision stores them where an override asks for
/// it. Of several that cover a weight the last one counts.
///
/// Errors when an override covers no weight, or asks for less than the precision of `wanted`.
pub(crate) fn apply(
    make: impl Fn(&RecipeOptions) -> Result<Recipe>,
    wanted: &RecipeOptions,
    overrides: &[Override],
) -> Result<Recipe> {
    let mut recipe = make(wanted)?;
    mix(&mut recipe);
    if overrides.is_empty() {
        return Ok(recipe);
    }
    let precision = wanted.precision;
    let usual = stored(&recipe);
    let mut higher: BTreeMap<String, Weight> = BTreeMap::new();
    for one in overrides {
        if one.precision > precision {
            return Err(Error::new(
                ErrorKind::Usage,
                format!("weights {one}: lower than {}, the bundle's precision", precision.name()),
            )
            .hint(format!(
                "make the bundle with --precision {} and name what is to have a higher precision",
                one.precision.name()
            )));
        }
        let other = stored(&make(&RecipeOptions { precision: one.precision, ..wanted.clone() })?);
        let covered = |name: &str| one.covers(name) && usual.get(name).is_some_and(is_quantized);
        let covered: Vec<_> = other.into_iter().filter(|(name, _)| covered(name)).collect();
        if covered.is_empty() {
            let such = usual.iter().find(|(_, weight)| is_quantized(weight)).map(|(name, _)| name);
            return Err(Error::new(
                ErrorKind::Usage,
                format!(
                    "weights {one}: no weight that {} quantizes has this in its name",
                    precision.name()
                ),
            )
            .hint(match such {
                Some(name) => format!("such a weight is {name}"),
                None => "nothing is quantized: leave it out".to_owned(),
            }));
        }
        higher.extend(covered);
    }
    for graph in recipe.contexts.iter_mut().flat_map(|context| &mut context.graphs) {
        graph.store(|weight| {
            let other = higher.get(weight.source().name())?;
            Some(Weight::new(weight.source().clone(), other.storage()))
        });
    }
    Ok(recipe)
}

/// Stores what 4 bits harm most for its size in int8: the values of attention, and what the first and the last layer
/// add to the hidden states. Weights that the checkpoint holds in 4 bits stay so.
fn mix(recipe: &mut Recipe) {
    let graphs = recipe.contexts.iter().flat_map(|context| &context.graphs);
    let layer = |name: &str| name.strip_suffix(DOWN)?.rsplit('.').next()?.parse::<usize>().ok();
    let last =
        graphs.flat_map(Graph::weights).filter_map(|weight| layer(weight.source().name())).max();
    for graph in recipe.contexts.iter_mut().flat_map(|context| &mut context.graphs) {
        graph.store(|weight| {
            let (source, name) = (weight.source(), weight.source().name());
            let four = matches!(weight.storage(), Storage::Blocks(form) if form.bits == Bits::Four);
            let outer = layer(name).is_some_and(|layer| layer == 0 || Some(layer) == last);
            let wider =
                four && source.nearest_form().is_none() && (outer || name.ends_with(VALUES));
            wider.then(|| Precision::W8A16.weight(Arc::clone(source)))
        });
    }
}

fn is_quantized(weight: &Weight) -> bool {
    weight.storage() != Storage::Float
}

/// All weights by the names of their tensors. A tensor of which graphs read different rows is stored in one way.
fn stored(recipe: &Recipe) -> BTreeMap<String, Weight> {
    let graphs = recipe.contexts.iter().flat_map(|context| &context.graphs);
    let weights = graphs.flat_map(Graph::weights);
    weights.map(|weight| (weight.source().name().to_owned(), weight.clone())).collect()
}

/// Names of all weights that a recipe quantizes, each once, in the order of the graphs.
pub(crate) fn quantized(recipe: &Recipe) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    let graphs = recipe.contexts.iter().flat_map(|context| &context.graphs);
    for weight in graphs.flat_map(Graph::weights) {
        let name = weight.source().name();
        if is_quantized(weight) && !names.iter().any(|known| known == name) {
            names.push(name.to_owned());
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_names_are_whole_words() {
        let covers = |part: &str, tensor| {
            Override { part: part.to_owned(), precision: Precision::W8A16 }.covers(tensor)
        };
        let name = "model.layers.3.mlp.down_proj.weight";
        for part in ["layers.3", "down_proj", "3.mlp", "", "layers.3.mlp.down_proj.weight"] {
            assert!(covers(part, name), "{part}");
        }
        for part in ["layers.31", "ayers.3", "down", "layers.mlp"] {
            assert!(!covers(part, name), "{part}");
        }
        assert!(!covers("layers.3", "model.layers.31.mlp.down_proj.weight"));
        assert_eq!("layers.3=w8a16".parse::<Override>().unwrap().to_string(), "layers.3=w8a16");
        for wrong in ["layers.3", "=w8a16", "layers.3=w9"] {
            assert_eq!(wrong.parse::<Override>().unwrap_err().kind(), ErrorKind::Usage);
        }
    }
}
