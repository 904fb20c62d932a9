//! Receipt of a bundle: what its weights cost the model's predictions on texts of four kinds, and how near its values
//! come to the end of f16.

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use qhx_graph::graph::Graph;
use qhx_graph::onnx::Known;
use qhx_graph::progress::Progress;

use crate::calibrate::{self, Against, Making, OpenBundle, Reader, Tally, open_joined};
use crate::forge::forge_known;
use crate::measured::Peak;
pub use crate::measured::{Receipt, TextQuality};
use crate::options::ForgeOptions;
use crate::plan::plan;
use crate::recipe::{Recipe, RecipeOptions};

/// Texts that ship with the program: the name of their kind, and one text of it.
pub const TEXTS: [(&str, &str); 4] = [
    ("prose", include_str!("texts/prose.txt")),
    ("code", include_str!("texts/code.txt")),
    ("chat", include_str!("texts/chat.txt")),
    ("german", include_str!("texts/german.txt")),
];
/// Tokens of a text that are compared: a multiple of the rows that prompt graphs take.
pub const TOKENS: usize = 64;

/// Texts as tokens, and what a model with f16 weights makes of them.
#[derive(Debug)]
pub struct Reference {
    texts: Vec<(String, Vec<u32>)>,
    /// Logarithms of probabilities, of each position of each text.
    scores: Vec<Vec<Vec<f32>>>,
    perplexities: Vec<f64>,
}

impl Reference {
    /// Texts of their kinds, as far as the tokenizer takes them, and at most `most` compared tokens of each. Errors
    /// when nothing is left of any.
    ///
    /// # Errors
    /// When the tokenizer cannot be read, or refuses every text.
    pub fn new<'a>(
        checkpoint: &Checkpoint,
        texts: impl IntoIterator<Item = (&'a str, &'a str)>,
        most: usize,
    ) -> Result<Self> {
        let tokenizer = checkpoint.tokenizer()?;
        let mut refused = None;
        let mut found = Vec::new();
        for (kind, text) in texts {
            match tokenizer.encode(text, true) {
                Ok(mut tokens) => {
                    // The last one is predicted and not consumed.
                    tokens.truncate(most.saturating_add(1));
                    if tokens.len() > 1 {
                        found.push((kind.to_owned(), tokens));
                    }
                }
                Err(error) => refused = Some(error.context(format_args!("text {kind:?}"))),
            }
        }
        match (found.is_empty(), refused) {
            (true, Some(error)) => Err(error),
            (true, None) => {
                let what = "no text has two tokens";
                Err(Error::new(ErrorKind::Prompt, what).hint("give texts of some hundred tokens"))
            }
            _ => Ok(Self { texts: found, scores: Vec::new(), perplexities: Vec::new() }),
        }
    }

    /// Tokens of each text.
    pub fn texts(&self) -> impl Iterator<Item = &[u32]> {
        self.texts.iter().map(|(_, tokens)| tokens.as_slice())
    }

    /// Positions that a bundle needs.
    pub fn longest(&self) -> usize {
        self.texts().map(<[u32]>::len).max().unwrap_or(0)
    }

    /// Has the model with f16 weights read the texts.
    ///
    /// # Errors
    /// When the model fails, or gives no numbers.
    pub fn read(&mut self, model: &mut dyn Reader, progress: &dyn Progress) -> Result<()> {
        for (kind, tokens) in &self.texts {
            let (mut tally, mut scores) = (Tally::default(), Vec::new());
            tally.read(kind, model, tokens, Against::Kept(&mut scores), progress)?;
            self.scores.push(scores);
            self.perplexities.push(tally.quality().perplexity);
        }
        Ok(())
    }

    /// Options of a bundle for the CPU that reads the texts with the weights of `options`, in the same place.
    pub fn options(&self, options: &ForgeOptions) -> ForgeOptions {
        ForgeOptions {
            task: options.task,
            precision: options.precision,
            head: options.head,
            weights: options.weights.clone(),
            folds: options.folds.clone(),
            columns: options.columns.clone(),
            activations: options.activations,
            ..calibrate::measured(options, &options.out, self.longest())
        }
    }

    /// Makes the bundle of [`Reference::options`] in a folder beside `options.out` that is removed, and compares what
    /// it makes of the texts.
    ///
    /// # Errors
    /// When the bundle cannot be made or run, or gives no numbers.
    pub fn receipt(
        &self,
        checkpoint: &Checkpoint,
        recipe: impl Fn(&Checkpoint, &RecipeOptions) -> Result<Recipe>,
        options: &ForgeOptions,
        nearest: Option<Peak>,
        open: OpenBundle<'_>,
        progress: &mut dyn Progress,
    ) -> Result<Receipt> {
        progress.stage("compare with f16 weights", 0);
        let folder = calibrate::scratch(&options.out)?;
        let made = ForgeOptions { out: folder.path().join("bundle"), ..self.options(options) };
        let mut weight_bytes = 0;
        let make = |recipe: Making<'_>| {
            weight_bytes = bytes(&plan(checkpoint, recipe, &made, false)?.1);
            let mut quiet = calibrate::Quiet(progress);
            let known = &mut Known::default();
            Ok(forge_known(checkpoint, recipe, &made, known, &mut quiet)?.manifest)
        };
        let mut model = open_joined(&recipe, &mut true, make, open)?;
        let mut texts = Vec::new();
        let perplexities = self.perplexities.iter();
        for (((kind, tokens), scores), f16) in self.texts.iter().zip(&self.scores).zip(perplexities)
        {
            let mut tally = Tally::default();
            tally.read(kind, &mut *model, tokens, Against::Known(scores), progress)?;
            let (kind, quality) = (kind.clone(), tally.quality());
            texts.push(TextQuality { kind, f16_perplexity: *f16, quality });
        }
        let tokens = self.scores.iter().map(Vec::len).sum();
        Ok(Receipt { tokens, texts, weight_bytes, nearest })
    }
}

/// Bytes of all weights of a recipe's graphs, each once.
fn bytes(recipe: &Recipe) -> u64 {
    let mut known = std::collections::HashMap::new();
    let graphs = recipe.contexts.iter().flat_map(|context| &context.graphs);
    for weight in graphs.flat_map(Graph::weights) {
        let key = (weight.source().name().to_owned(), weight.source().first_row(), weight.rows());
        known.insert(key, weight.qnn_bytes());
    }
    known.into_values().fold(0, u64::saturating_add)
}
