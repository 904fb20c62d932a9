//! Scores of documents for a query.

use qhx_base::{CancelToken, Error, ErrorKind, Result, TooLong, bail, error, setters};
use qhx_core::engine::{Model, Prompt};
use qhx_core::manifest::{Rerank, Verdict};
use qhx_text::Tokenizer;

/// A document and how well it answers.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Ranked {
    /// Which of the documents it is.
    pub index: usize,
    /// The better it answers, the larger. From 0 to 1, unless the manifest's `params.rerank.activation` is `identity`.
    pub score: f64,
    /// Tokens that the model read for it, those of the query included.
    pub tokens: usize,
}

/// Rules for asking a model about documents, from its manifest's `params.rerank`. They can be used with any session of
/// the model.
#[derive(Debug, Clone)]
pub struct Scoring {
    rules: Rerank,
    by: By,
    truncate: bool,
}

/// Source of the score.
#[derive(Debug, Clone, Copy)]
enum By {
    /// The logits of two tokens, of yes and no.
    Tokens([u32; 2]),
    /// The value of a head, perhaps through a sigmoid.
    Head { sigmoid: bool },
}

impl Scoring {
    /// Rules for `model`.
    ///
    /// # Errors
    /// When its manifest does not say so, its tokenizer has no such tokens, or it has no head of one value.
    pub fn of(model: &Model) -> Result<Self> {
        let rules = rules(model)?;
        let by = match &rules.verdict {
            Verdict::Head { sigmoid } => {
                model.require_scores()?;
                tokenizer(model)?;
                By::Head { sigmoid: *sigmoid }
            }
            Verdict::Tokens { yes, no } => By::Tokens(tokens(model, yes, no)?),
            _ => bail!(Internal, "params.rerank is of an unknown kind"),
        };
        Ok(Self { rules, by, truncate: false })
    }

    setters! {
        /// True to truncate texts that are too long together instead of refusing them: the longer text of a pair, as
        /// `CrossEncoder` of sentence-transformers does, else the document, at its end.
        truncate: bool,
        /// Task instruction for judging documents, instead of the manifest's `params.rerank.instruction`.
        instruction(instruction: impl Into<String>) => rules.instruction = instruction.into(),
    }

    /// Score of a document for a query: the probability of *yes* against *no*, from 0 to 1, or the value of the model's
    /// head. With a language model, successive documents for the same query cost only their own tokens if the prompt
    /// has the query first.
    ///
    /// # Errors
    /// When both do not fit the context, or `cancel` stops it.
    pub fn score(
        &self,
        model: &mut Model,
        query: &str,
        document: &str,
        cancel: &CancelToken,
    ) -> Result<f64> {
        self.scored(model, query, document, cancel).map(|(score, _)| score)
    }

    /// The score, and the number of tokens that were read for it.
    fn scored(
        &self,
        model: &mut Model,
        query: &str,
        document: &str,
        cancel: &CancelToken,
    ) -> Result<(f64, usize)> {
        match self.by {
            By::Tokens(verdict) => {
                let tokens = model.cancellable(cancel, |model| {
                    let document = match self.truncate {
                        true => self.fitting(model, query, document)?,
                        false => document,
                    };
                    model.encode_prompt(&Prompt::Text(filled(&self.rules, query, document)))
                })?;
                let count = tokens.len();
                let logits = model.next_logits(&Prompt::Tokens(tokens), &verdict, cancel)?;
                Ok((sigmoid(f64::from(logits[0]) - f64::from(logits[1])), count))
            }
            By::Head { sigmoid: bounded } => {
                let parts = self.parts(model, query, document, cancel)?;
                let parts: Vec<&[u32]> = parts.iter().map(Vec::as_slice).collect();
                let count = parts.iter().map(|part| part.len()).sum();
                let score = f64::from(model.score_parts(&parts, cancel)?);
                Ok((if bounded { sigmoid(score) } else { score }, count))
            }
        }
    }

    /// The tokens of a query and a document for a head, at most as many as the encoder takes.
    fn parts(
        &self,
        model: &Model,
        query: &str,
        document: &str,
        cancel: &CancelToken,
    ) -> Result<Vec<Vec<u32>>> {
        let (tokenizer, max) = (tokenizer(model)?, model.info().max_ctx);
        let whole = || filled(&self.rules, query, document);
        let parts = match (self.rules.prompt.is_empty(), self.truncate) {
            (true, false) => tokenizer.encode_pair(query, document, max, cancel)?,
            (true, true) => tokenizer.encode_pair_truncated(query, document, max, cancel)?,
            (false, false) => vec![tokenizer.encode_within(&whole(), true, max, cancel)?],
            (false, true) => vec![tokenizer.encode_truncated(&whole(), max, cancel)?],
        };
        let found = parts.iter().map(Vec::len).sum::<usize>();
        if found > max {
            return Err(error!(
                Prompt,
                "query and document are {found} tokens, the encoder takes at most {max}"
            )
            .with_source(TooLong { max })
            .hint("split the document, cut it with --truncate, or make the bundle with a larger --max-ctx"));
        }
        Ok(parts)
    }

    /// The longest beginning of a document that fits the context with the rest of the prompt.
    fn fitting<'a>(&self, model: &Model, query: &str, document: &'a str) -> Result<&'a str> {
        let max = model.info().max_ctx;
        let document = tokenizer(model)?.beginning(document, max);
        let fits =
            |part: &str| match model.encode_prompt(&Prompt::Text(filled(&self.rules, query, part)))
            {
                Ok(tokens) => Ok(tokens.len() <= max),
                Err(e) if e.kind() == ErrorKind::Prompt => Ok(false),
                Err(e) => Err(e),
            };
        if fits(document)? {
            return Ok(document);
        }
        // The part that fits, and where one does not.
        let (mut part, mut beyond) = (&document[..0], document.len());
        loop {
            let middle =
                document.ceil_char_boundary(part.len() + (beyond - part.len()).div_ceil(2));
            let Some(longer) = document.get(..middle).filter(|_| middle < beyond) else {
                return Ok(part);
            };
            if fits(longer)? {
                part = longer;
            } else {
                beyond = middle;
            }
        }
    }

    /// The documents, the best first; of equal ones the earlier.
    ///
    /// # Errors
    /// Errors of [`Scoring::score`]; the error names the document by its index.
    pub fn rank<T: AsRef<str>>(
        &self,
        model: &mut Model,
        query: &str,
        documents: &[T],
        cancel: &CancelToken,
    ) -> Result<Vec<Ranked>> {
        let mut ranked = Vec::with_capacity(documents.len());
        for (index, document) in documents.iter().enumerate() {
            let scored = self.scored(model, query, document.as_ref(), cancel);
            let (score, tokens) =
                scored.map_err(|e| e.context(format_args!("document {index}")))?;
            ranked.push(Ranked { index, score, tokens });
        }
        ranked.sort_by(|a, b| b.score.total_cmp(&a.score));
        Ok(ranked)
    }
}

/// A model that scores documents for a query.
///
/// ```no_run
/// let mut reranker = qhx::Bundle::open("qwen3-reranker/v81")?.reranker()?;
/// let documents = ["Paris is the capital of France.", "Bread is baked."];
/// let best = reranker.rank("What is the capital of France?", &documents)?[0];
/// assert_eq!(best.index, 0);
/// # Ok::<(), qhx::Error>(())
/// ```
#[derive(Debug)]
pub struct Reranker {
    model: Model,
    scoring: Scoring,
}

impl Reranker {
    /// Wraps an open model, asked as its manifest says.
    ///
    /// # Errors
    /// Errors of [`Scoring::of`].
    pub fn new(model: Model) -> Result<Self> {
        let scoring = Scoring::of(&model)?;
        Ok(Self { model, scoring })
    }

    setters! {
        /// Task instruction for judging documents, instead of the manifest's `params.rerank.instruction`.
        instruction(instruction: impl Into<String>) => scoring.rules.instruction = instruction.into(),
        /// Same as [`Scoring::truncate`].
        truncate(truncate: bool) => scoring.truncate = truncate,
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Score of a document for a query.
    ///
    /// # Errors
    /// Errors of [`Scoring::score`].
    pub fn score(&mut self, query: &str, document: &str) -> Result<f64> {
        self.scoring.score(&mut self.model, query, document, &CancelToken::new())
    }

    /// The documents, the best first; of equal ones the earlier.
    ///
    /// # Errors
    /// Errors of [`Scoring::rank`].
    pub fn rank<T: AsRef<str>>(&mut self, query: &str, documents: &[T]) -> Result<Vec<Ranked>> {
        self.rank_unless(query, documents, &CancelToken::new())
    }

    /// Same as [`Reranker::rank`], until `cancel` stops it.
    ///
    /// # Errors
    /// Errors of [`Scoring::rank`].
    pub fn rank_unless<T: AsRef<str>>(
        &mut self,
        query: &str,
        documents: &[T],
        cancel: &CancelToken,
    ) -> Result<Vec<Ranked>> {
        self.scoring.rank(&mut self.model, query, documents, cancel)
    }
}

fn rules(model: &Model) -> Result<Rerank> {
    model.manifest().params.rerank.clone().ok_or_else(|| {
        error!(
            Usage,
            "{}: params.rerank is missing, which says what asks the model about a document",
            model.manifest().path.display()
        )
        .hint("make the bundle of a reranker: `qhx forge --rerank`, or `--task score` of a cross-encoder")
    })
}

fn fault(model: &Model, what: &str) -> Error {
    let path = model.manifest().path.display();
    error!(Manifest, "{path}: {what}")
        .hint("params.rerank is of another model than artifacts.tokenizer, or a file was damaged")
}

fn tokenizer(model: &Model) -> Result<&Tokenizer> {
    let missing = || fault(model, "the bundle has no tokenizer, so a text cannot be asked about");
    model.tokenizer().ok_or_else(missing)
}

/// The tokens of yes and no. Each has to be one.
fn tokens(model: &Model, yes: &str, no: &str) -> Result<[u32; 2]> {
    let tokenizer = tokenizer(model)?;
    let token = |text: &str| {
        let tokens = tokenizer.encode(text, false)?;
        match tokens[..] {
            [token] => Ok(token),
            _ => Err(fault(model, &format!("{text:?} is {} tokens, expected one", tokens.len()))),
        }
    };
    Ok([token(yes)?, token(no)?])
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The prompt with its places filled. What is filled in is not looked at again.
fn filled(rules: &Rerank, query: &str, document: &str) -> String {
    let places = [
        ("{instruction}", rules.instruction.as_str()),
        ("{query}", query),
        ("{document}", document),
    ];
    let mut rest = rules.prompt.as_str();
    let mut prompt = String::with_capacity(rest.len() + query.len() + document.len());
    loop {
        let found =
            places.iter().filter_map(|(place, text)| Some((rest.find(place)?, place, text)));
        let Some((at, place, text)) = found.min_by_key(|(at, ..)| *at) else { break };
        prompt.push_str(&rest[..at]);
        prompt.push_str(text);
        rest = &rest[at + place.len()..];
    }
    prompt.push_str(rest);
    prompt
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_filled_in_is_not_looked_at_again() {
        let rules = Rerank {
            prompt: "{instruction}|{query}|{document}|{query}.".to_owned(),
            instruction: "{document}".to_owned(),
            ..Rerank::default()
        };
        assert_eq!(filled(&rules, "{query}", "d"), "{document}|{query}|d|{query}.");
    }
}
